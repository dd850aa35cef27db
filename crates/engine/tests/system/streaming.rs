//! Sinks and window over a text longer than the trained context (StreamingLLM, arXiv 2309.17453).

use std::sync::LazyLock;

use reef_engine::session::Rules;
use reef_kv::policy::{PolicyOptions, by_name};
use reef_model::runner::{Activations, ModelRunner};
use reef_model::tokenizer::{Encode, Tokenizer};

use super::support::drive::{Scores, mean, scores};
use super::support::files::{fetched, shared};
use super::support::tiny::options;

/// Tokens kept.
const BUDGET: usize = 512;
/// SmolLM2's trained context, and a stretch beyond it where positions are relative.
const TOKENS: usize = 8192 + 512;

/// SmolLM2 and the ids of a long text, if both are there.
fn long_text() -> Option<(ModelRunner, Vec<u32>)> {
    let (gguf, text) = (fetched("smollm2")?, shared("text/newton_opticks.txt")?);
    let text = std::fs::read_to_string(text).unwrap();
    // Cut at a line's end: about 4 bytes a token.
    let cut = text[..6 * TOKENS].rfind('\n').unwrap();
    let tokenizer = Tokenizer::from_gguf(&gguf).unwrap();
    let mut ids = tokenizer.encode(&text[..cut], Encode::default()).unwrap();
    assert!(ids.len() >= TOKENS, "{} tokens", ids.len());
    ids.truncate(TOKENS);
    Some((ModelRunner::load(&gguf, options(Activations::Int8)).unwrap(), ids))
}

fn rules(policy: &str) -> Rules {
    let options = PolicyOptions { tail_tokens: 0, ..PolicyOptions::default() };
    Rules {
        policy: by_name(policy, &options).unwrap(),
        token_budget: Some(BUDGET),
        ..Rules::default()
    }
}

/// NLLs under sinks over all of the text.
static SINKS: LazyLock<Option<Scores>> = LazyLock::new(|| {
    let (mut runner, ids) = long_text()?;
    assert_eq!(runner.spec().trained_context, 8192);
    Some(scores(&mut runner, &rules("sinks"), &ids, 8192))
});

#[test]
fn sinks_and_window_stay_finite_and_stable_past_the_trained_context() {
    let Some(sinks) = &*SINKS else { return };
    assert_eq!(sinks.nll.len(), TOKENS - 1);
    assert!(sinks.nll.iter().all(|nll| nll.is_finite()));
    let third = TOKENS / 3;
    let (second, last) = (mean(&sinks.nll[third..2 * third]), mean(&sinks.nll[2 * third..]));
    assert!(last < 1.15 * second, "mean NLL went from {second} to {last}");
    // The stretch with relative positions against as long a one just before it.
    let (original, relative) = (mean(&sinks.nll[7680..8191]), mean(&sinks.nll[8191..]));
    assert!(relative < 1.2 * original, "mean NLL went from {original} to {relative}");
}

#[test]
fn sinks_and_window_beat_a_bare_window() {
    const PART: usize = 2560;
    let Some(sinks) = &*SINKS else { return };
    let Some((mut runner, ids)) = long_text() else { return };
    let window = scores(&mut runner, &rules("window"), &ids[..PART], 8192);
    // Before the first drop both are the same.
    assert_eq!(window.nll[..BUDGET - 32], sinks.nll[..BUDGET - 32]);
    let (with, without) = (mean(&sinks.nll[BUDGET..PART - 1]), mean(&window.nll[BUDGET..]));
    assert!(with < 0.95 * without, "mean NLL {with} with sinks, {without} without");
}

/// The same tokens with original positions throughout and with relative ones from 1,024 on.
#[test]
fn nothing_steps_where_positions_turn_relative() {
    const PART: usize = 2048;
    const TURN: usize = 1024;
    let Some(sinks) = &*SINKS else { return };
    let Some((mut runner, ids)) = long_text() else { return };
    let turned = scores(&mut runner, &rules("sinks"), &ids[..PART], TURN);
    let (original, relative) = (&sinks.nll[..PART - 1], &turned.nll[..]);
    assert_eq!(original[..TURN - 1], relative[..TURN - 1]);
    assert_ne!(original[TURN..], relative[TURN..]);
    for (from, to, share) in [(TURN, TURN + 128, 0.03), (TURN, PART - 1, 0.02)] {
        let (a, b) = (mean(&original[from..to]), mean(&relative[from..to]));
        assert!((b / a - 1.0).abs() < share, "{from}..{to}: original {a}, relative {b}");
    }
}
