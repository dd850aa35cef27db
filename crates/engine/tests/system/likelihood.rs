//! Likelihood of a real text by real models, against HF transformers and between our own settings.

use std::sync::LazyLock;

use reef_engine::score::{ScoreOptions, score};
use reef_engine::session::Rules;
use reef_kv::page::PageFormat;
use reef_model::runner::{Activations, ModelRunner};

use super::support::drive::{Scores, mean, scores};
use super::support::files::{Likelihood, fetched};
use super::support::tiny::options;

/// One model on the golden text in three settings. `None` where the model is absent.
struct Runs {
    golden: Likelihood,
    int8_activations: Scores,
    f32_activations: Scores,
    int8_kv: Scores,
}

fn runs(alias: &str) -> Option<Runs> {
    let gguf = fetched(alias)?;
    let golden = Likelihood::golden(alias);
    let run = |activations, format_at_seal| {
        let mut runner = ModelRunner::load(&gguf, options(activations)).unwrap();
        let rules = Rules { format_at_seal, ..Rules::default() };
        let context = runner.spec().trained_context;
        scores(&mut runner, &rules, &golden.ids, context)
    };
    Some(Runs {
        int8_activations: run(Activations::Int8, PageFormat::F16),
        f32_activations: run(Activations::F32, PageFormat::F16),
        int8_kv: run(Activations::Int8, PageFormat::Int8),
        golden,
    })
}

static SMOLLM2: LazyLock<Option<Runs>> = LazyLock::new(|| runs("smollm2"));
static GEMMA3: LazyLock<Option<Runs>> = LazyLock::new(|| runs("gemma3"));

fn models() -> impl Iterator<Item = (&'static str, &'static Runs)> {
    let all = [("smollm2", &*SMOLLM2), ("gemma3", &*GEMMA3)];
    all.into_iter().filter_map(|(alias, runs)| Some((alias, runs.as_ref()?)))
}

fn assert_within(found: f64, expected: f64, share: f64, what: &str) {
    let off = (found / expected - 1.0).abs();
    assert!(
        off <= share,
        "{what}: mean NLL {found}, expected {expected} within {share}: {off} off"
    );
}

#[test]
fn f32_activations_are_within_half_a_thousandth_of_transformers() {
    for (alias, runs) in models() {
        assert_eq!(runs.f32_activations.nll.len(), 1023);
        let found = runs.f32_activations.mean_nll();
        assert_within(found, runs.golden.mean_nll, 0.0005, alias);
    }
}

#[test]
fn f32_activations_have_the_top_token_of_transformers() {
    for (alias, runs) in models() {
        assert_eq!(runs.golden.top.len(), 9);
        for &(index, token, log_p, _) in &runs.golden.top {
            let (found, found_log_p) =
                (runs.f32_activations.top[index], runs.f32_activations.top_log_p[index]);
            assert_eq!(found, token, "{alias} after token {index}");
            assert!((found_log_p - log_p).abs() < 0.02, "{alias} {index}: {found_log_p}, {log_p}");
        }
    }
}

#[test]
fn int8_activations_are_within_half_a_percent_of_transformers() {
    for (alias, runs) in models() {
        assert_within(runs.int8_activations.mean_nll(), runs.golden.mean_nll, 0.005, alias);
    }
}

#[test]
fn int8_and_f32_activations_agree_on_the_top_token() {
    for (alias, runs) in models() {
        let (a, b) = (&runs.int8_activations.top, &runs.f32_activations.top);
        let same = a.iter().zip(b).filter(|(a, b)| a == b).count();
        let share = same as f64 / a.len() as f64;
        assert!(share >= 0.97, "{alias}: {share:.4} of {} tokens", a.len());
    }
}

#[test]
fn int8_kv_is_within_two_thousandths_of_f16_kv() {
    for (alias, runs) in models() {
        let what = format!("{alias} with int8 KV");
        assert_within(runs.int8_kv.mean_nll(), runs.int8_activations.mean_nll(), 0.002, &what);
        assert!(runs.int8_kv.nll != runs.int8_activations.nll, "{alias}: int8 KV was not used");
    }
}

/// `reef eval ppl` says what these tests measure, and its comparison is with f16 KV.
#[test]
fn eval_gives_the_same_numbers() {
    let Some(gguf) = fetched("smollm2") else { return };
    let golden = Likelihood::golden("smollm2");
    let mut runner = ModelRunner::load(&gguf, options(Activations::Int8)).unwrap();
    let rules = Rules { format_at_seal: PageFormat::Int8, ..Rules::default() };
    let expected = scores(&mut runner, &rules, &golden.ids[..200], 8192);
    let options = ScoreOptions { context: 200, block_size: 32, rules, compare: true };
    let mut scored = Vec::new();
    score(&mut runner, &golden.ids[..200], &options, &mut |token| scored.push(token)).unwrap();
    let nll: Vec<f64> = scored.iter().map(|token| token.nll).collect();
    assert_eq!(nll.len(), 199);
    assert!(nll.iter().zip(&expected.nll).all(|(a, b)| (a - b).abs() < 1e-9));
    let kld: Vec<f64> = scored.iter().map(|token| token.kld.unwrap()).collect();
    // Nothing is lossy before the first seal.
    assert!(kld[..31].iter().all(|kld| *kld < 1e-9));
    assert!(mean(&kld[32..]) > 1e-6 && mean(&kld) < 0.01, "{}", mean(&kld));
    let same = scored.iter().filter(|token| token.same_top == Some(true)).count();
    assert!(same >= 190, "{same} of 199");
}
