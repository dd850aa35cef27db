//! llama.cpp's logits of its own tiny models (format: README of the goldens).

use reef_engine::session::Rules;
use reef_kernels::dispatch::Tier;
use reef_model::gguf::Gguf;
use reef_model::runner::{Activations, ModelRunner, RunnerOptions};

use super::support::drive::logits_in_chunks;
use super::support::files::shared;
use super::support::tiny::options;

/// Largest difference of a logit, in any tier.
const TOLERANCE: f32 = 1e-4;

fn compare(architecture: &str) {
    let name = format!("golden/archs/{architecture}-dense");
    let (Some(model), Some(expected)) =
        (shared(&format!("{name}.gguf")), shared(&format!("{name}.logits.bin")))
    else {
        return;
    };
    let bytes = std::fs::read(expected).unwrap();
    let words: Vec<[u8; 4]> = bytes.chunks_exact(4).map(|word| word.try_into().unwrap()).collect();
    let (tokens, vocabulary) = (u32::from_le_bytes(words[0]), u32::from_le_bytes(words[1]));
    let (tokens, vocabulary) = (tokens as usize, vocabulary as usize);
    let ids: Vec<u32> = words[2..2 + tokens].iter().map(|word| u32::from_le_bytes(*word)).collect();
    let expected: Vec<f32> =
        words[2 + tokens..].iter().map(|word| f32::from_le_bytes(*word)).collect();
    assert_eq!(expected.len(), tokens * vocabulary);
    let gguf = Gguf::open(model).unwrap();
    for tier in Tier::available() {
        let options = RunnerOptions { tier, ..options(Activations::F32) };
        let mut runner = ModelRunner::load(&gguf, options).unwrap();
        let logits = logits_in_chunks(&mut runner, 32, &Rules::default(), &ids, 20);
        let differences = logits.iter().zip(&expected).map(|(a, b)| (a - b).abs());
        let largest = differences.fold(0.0, f32::max);
        // NaN would pass a `>`.
        assert!(largest <= TOLERANCE, "{architecture} on {}: {largest} apart", tier.name());
        assert!(logits.iter().all(|logit| logit.is_finite()));
    }
}

#[test]
fn llama() {
    compare("llama");
}

#[test]
fn qwen2() {
    compare("qwen2");
}

#[test]
fn qwen3() {
    compare("qwen3");
}

#[test]
fn gemma3() {
    compare("gemma3");
}
