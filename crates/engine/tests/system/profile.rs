//! The model guard: what each format costs a model, measured through its own pages.

use reef_engine::logits::kl_divergence;
use reef_engine::profile::{ModelProfile, TEXT, measure, minimum_tokens};
use reef_engine::session::{EngineError, Rules};
use reef_kv::page::PageFormat;
use reef_model::runner::{Activations, KeyRotation, ModelRunner, RunnerOptions};
use reef_model::tokenizer::{Encode, Tokenizer};

use super::support::drive::logits_in_chunks;
use super::support::files::fetched;
use super::support::random::Random;
use super::support::tiny::{Tiny, options};

fn profile(runner: &mut ModelRunner, ids: &[u32]) -> ModelProfile {
    measure(runner, 32, ids, &mut |_, _| {}).unwrap()
}

/// Each number is the mean divergence of a plain run from one in f16, over the rows of all blocks but the
/// first, or of those that see the context with blocks dropped.
#[test]
fn numbers_are_those_of_plain_runs() {
    let mut rotations = Vec::new();
    for (architecture, seed) in [("llama", 1), ("gemma3", 1), ("qwen3", 3)] {
        let model = Tiny { seed, ..Tiny::new(architecture) }.build();
        let ids = Random(41).tokens(300, 101);
        let mut runner = model.plain_runner();
        let measured = profile(&mut runner, &ids);
        let after = (runner.activations(), runner.key_rotation());
        assert_eq!(after, (Activations::Int8, KeyRotation::None), "as it was before");
        let key_rotation = measured.key_rotation;
        let mut runner = model.runner(RunnerOptions { key_rotation, ..options(Activations::F32) });
        let mut logits = |rules| logits_in_chunks(&mut runner, 32, &rules, &ids, 32);
        let plain = logits(Rules::default());
        let mean = |found: &[f32], unchanged: usize| {
            let rows = plain.chunks(101).zip(found.chunks(101)).take(299).skip(unchanged);
            let of_rows: Vec<f64> = rows.map(|(a, b)| kl_divergence(a, b)).collect();
            of_rows.iter().sum::<f64>() / of_rows.len() as f64
        };
        let close = |nats: f64, mean: f64| (nats - mean).abs() <= 1e-9 + 1e-4 * mean;
        for format in PageFormat::ALL {
            let found = logits(Rules { format_at_seal: format, ..Rules::default() });
            let (nats, mean) = (measured.format_nats[format], mean(&found, 32));
            assert!(close(nats, mean), "{format:?}: {nats} not {mean}");
            assert_eq!(nats == 0.0, format == PageFormat::F16, "{format:?}");
        }
        let dropped = logits(Rules { token_budget: Some(192), ..Rules::default() });
        let (nats, mean) = (measured.evict_nats, mean(&dropped, 192));
        assert!(close(nats, mean) && nats > 0.0, "dropping: {nats} not {mean}");
        rotations.push(key_rotation);
    }
    assert!(rotations.contains(&KeyRotation::None), "{rotations:?}");
}

#[test]
fn fewer_bits_cost_more() {
    let ids = Random(42).tokens(400, 101);
    let nats = profile(&mut Tiny::new("llama").build().plain_runner(), &ids).format_nats;
    let order = [
        PageFormat::F16,
        PageFormat::Int8,
        PageFormat::Fp8E4M3,
        PageFormat::K8V4,
        PageFormat::Int4,
    ];
    for pair in order.windows(2) {
        assert!(nats[pair[0]] < nats[pair[1]], "{pair:?}: {nats:?}");
    }
    assert!(nats[PageFormat::Fp8E4M3] < nats[PageFormat::Fp8E5M2], "{nats:?}");
}

#[test]
fn a_text_too_short_is_refused() {
    let mut runner = Tiny::new("llama").build().plain_runner();
    let minimum = minimum_tokens(32);
    let ids = Random(43).tokens(minimum, 101);
    profile(&mut runner, &ids);
    let error = measure(&mut runner, 32, &ids[1..], &mut |_, _| {}).unwrap_err();
    assert!(matches!(error, EngineError::ShortText { tokens, .. } if tokens == minimum - 1));
}

/// SmolLM2 bears 4-bit keys; its numbers have the order of magnitude that was published.
#[test]
fn smollm2_on_the_built_in_text() {
    let Some(gguf) = fetched("smollm2") else { return };
    let tokenizer = Tokenizer::from_gguf(&gguf).unwrap();
    let ids = tokenizer.encode(TEXT, Encode::default()).unwrap();
    assert!((560..=760).contains(&ids.len()), "{} tokens", ids.len());
    let mut runner = ModelRunner::load(&gguf, options(Activations::Int8)).unwrap();
    let mut told = Vec::new();
    let measured = measure(&mut runner, 32, &ids, &mut |done, _| told.push(done)).unwrap();
    assert!(told.windows(2).all(|pair| pair[0] < pair[1]) && told.len() >= 10, "{told:?}");
    let nats = measured.format_nats;
    assert!((1e-6..1e-3).contains(&nats[PageFormat::Int8]), "{nats:?}");
    assert!((1e-3..0.1).contains(&nats[PageFormat::Int4]), "{nats:?}");
    assert!(nats[PageFormat::Int4] < measured.evict_nats, "{measured:?}");
    assert_eq!(measured.ladder().four_bit_keys, measured.four_bit_keys);
}
