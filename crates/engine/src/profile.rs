//! What lossy KV memory does to one model: the guard of 4-bit keys, and the table by which relief weighs
//! its moves. Measured once for a model, in seconds, on a built-in text.

use reef_kv::page::PageFormat;
use reef_kv::{ByFormat, HarmTable, Ladder, TAIL_TOKENS};
use reef_model::runner::{Activations, KeyRotation, ModelRunner};

use crate::eval::Lanes;
use crate::score::{Scoring, score_together};
use crate::session::{EngineError, Rules};

/// The text to measure on: prose (the first three paragraphs from Lewis Carroll, *Alice's Adventures in
/// Wonderland*, 1865, in the public domain), and after it a list, code and questions written for this
/// purpose, which refer back to one another so that distant keys matter. About 650 tokens.
pub const TEXT: &str = include_str!("profile.txt");

/// Tokens computed at most; a longer text is cut.
pub const MAXIMUM_TOKENS: usize = 448;

/// Keys go to 4 bits where that costs less than this over 8-bit keys, in nats of divergence. Well-behaved
/// models lie an order of magnitude below, those whose keys have outlier channels one above
/// (Qwen3-0.6B: perplexity 13.5 to 47.8, ik_llama.cpp issue 1509).
pub const FOUR_BIT_KEY_LIMIT_NATS: f64 = 0.05;

/// Keys are rotated where that lowers the divergence of int4 at least to this share: below it lies what
/// another text could turn round. (SmolLM2-135M gains; Gemma 3, whose keys have outlier channels that
/// scales per channel hold and a rotation spreads, loses.)
pub const ROTATION_GAIN: f64 = 0.95;

/// Every format but f16, with which they are compared.
const LOSSY: [PageFormat; 5] = [
    PageFormat::Int8,
    PageFormat::Fp8E4M3,
    PageFormat::Fp8E5M2,
    PageFormat::K8V4,
    PageFormat::Int4,
];

#[derive(Clone, Copy, Default)]
struct Sum {
    nats: f64,
    tokens: usize,
}

/// What lossy KV memory does to a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ModelProfile {
    /// Mean Kullback-Leibler divergence, in nats per token, from f16 KV to KV with every sealed block in
    /// the format; activations in f32, so that the cache alone differs. 0 for f16.
    pub format_nats: ByFormat<f64>,
    /// The same with every token dropped but those of the first block and of the recent tail. For a
    /// calibrated model a divergence is the expected rise of the negative log-likelihood, and of a
    /// short text it is by far the steadier of the two.
    pub evict_nats: f64,
    /// Whether keys may go to 4 bits: see [`FOUR_BIT_KEY_LIMIT_NATS`].
    pub four_bit_keys: bool,
    /// The rotation under which all this was measured, the better of two: see [`ROTATION_GAIN`].
    pub key_rotation: KeyRotation,
}

impl ModelProfile {
    fn new(key_rotation: KeyRotation, format_nats: ByFormat<f64>, evict_nats: f64) -> ModelProfile {
        let key_nats = format_nats[PageFormat::Int4] - format_nats[PageFormat::K8V4];
        // A NaN forbids.
        let four_bit_keys = key_nats < FOUR_BIT_KEY_LIMIT_NATS;
        ModelProfile { format_nats, evict_nats, four_bit_keys, key_rotation }
    }

    /// Every rung that the model bears, with its own harm.
    pub fn ladder(&self) -> Ladder {
        let ModelProfile { format_nats, evict_nats, four_bit_keys, .. } = *self;
        Ladder { four_bit_keys, harm: HarmTable { format_nats, evict_nats }, ..Ladder::default() }
    }
}

/// Tokens that must be there for the measure to mean something: one block is dropped, and two see it.
pub fn minimum_tokens(block_size: usize) -> usize {
    kept_tokens(block_size) + 2 * block_size
}

/// Tokens kept by the sequence that drops: the first block, the tail, and the block being computed.
fn kept_tokens(block_size: usize) -> usize {
    2 * block_size + TAIL_TOKENS.next_multiple_of(block_size)
}

/// Measures `runner` on `ids`, at most [`MAXIMUM_TOKENS`] of them and the trained context, with blocks
/// of `block_size` tokens (as the runner was loaded with), without and with rotated keys. `progress` is
/// told tokens done and tokens in all. The runner's activations and rotation are afterwards what they
/// were.
///
/// One sequence with f16 KV, one a lossy format and one that drops run side by side, a block at a time,
/// so that each row attends sealed blocks in their final format.
///
/// # Errors
/// Fewer than [`minimum_tokens`], a token outside the vocabulary, logits that are not finite, or memory
/// that the system does not give.
pub fn measure(
    runner: &mut ModelRunner,
    block_size: usize,
    ids: &[u32],
    progress: &mut dyn FnMut(usize, usize),
) -> Result<ModelProfile, EngineError> {
    let most = MAXIMUM_TOKENS.min(runner.spec().trained_context);
    let ids = &ids[..ids.len().min(most)];
    let minimum = minimum_tokens(block_size);
    if ids.len() < minimum {
        return Err(EngineError::ShortText { tokens: ids.len(), minimum });
    }
    let before = (runner.activations(), runner.key_rotation());
    runner.set_activations(Activations::F32);
    let mut measure_with = |key_rotation, done| {
        runner.set_key_rotation(key_rotation);
        let mut progress = |tokens| progress(done + tokens, 2 * ids.len());
        measure_rotated(runner, block_size, ids, &mut progress)
    };
    let plain = measure_with(KeyRotation::None, 0);
    let rotated = measure_with(KeyRotation::Hadamard, ids.len());
    runner.set_activations(before.0);
    runner.set_key_rotation(before.1);
    Ok(better(plain?, rotated?))
}

/// The profile with rotated keys where they are worth it.
fn better(plain: ModelProfile, rotated: ModelProfile) -> ModelProfile {
    let nats = |profile: &ModelProfile| profile.format_nats[PageFormat::Int4];
    if nats(&rotated) <= ROTATION_GAIN * nats(&plain) { rotated } else { plain }
}

fn measure_rotated(
    runner: &mut ModelRunner,
    block_size: usize,
    ids: &[u32],
    progress: &mut dyn FnMut(usize),
) -> Result<ModelProfile, EngineError> {
    let flat = |format_at_seal| Rules { format_at_seal, ..Rules::default() };
    let mut treatments: Vec<Rules> = LOSSY.into_iter().map(flat).collect();
    treatments.push(Rules { token_budget: Some(kept_tokens(block_size)), ..Rules::default() });
    let mut sums = vec![Sum::default(); treatments.len()];
    let lanes = Lanes { block_size, treatments: &treatments, pinned_layers: &[] };
    let scoring = Scoring { context: ids.len(), lanes, compare: true };
    score_together(runner, ids, &scoring, &mut |treatment, scored| {
        // The first block attends nothing sealed: there all are the same.
        if let (Some(nats), true) = (scored.kld, scored.index > block_size) {
            sums[treatment].nats += nats;
            sums[treatment].tokens += 1;
        }
        if treatment == 0 {
            progress(scored.index + 1);
        }
    })?;
    let means: Vec<f64> = sums.iter().map(|sum| sum.nats / sum.tokens.max(1) as f64).collect();
    let mut format_nats = ByFormat::default();
    LOSSY.into_iter().zip(&means).for_each(|(format, mean)| format_nats[format] = *mean);
    Ok(ModelProfile::new(runner.key_rotation(), format_nats, means[LOSSY.len()]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use reef_kv::Fidelity;

    #[test]
    fn keys_go_to_four_bits_only_where_that_is_cheap() {
        let profile = |k8v4, int4| {
            let nats = |format| match format {
                PageFormat::K8V4 => k8v4,
                PageFormat::Int4 => int4,
                _ => 0.0,
            };
            ModelProfile::new(KeyRotation::None, ByFormat::from_fn(nats), 0.3)
        };
        // Values in 4 bits may cost what they cost: only what the keys add counts.
        assert!(profile(0.2, 0.2 + 0.9 * FOUR_BIT_KEY_LIMIT_NATS).four_bit_keys);
        assert!(!profile(0.01, 0.01 + 1.1 * FOUR_BIT_KEY_LIMIT_NATS).four_bit_keys);
        assert!(!profile(0.01, f64::NAN).four_bit_keys);
        let ladder = profile(0.01, 1.3).ladder();
        assert_eq!(ladder.floor(Fidelity::Evict), PageFormat::K8V4);
        assert_eq!(ladder.harm.format_nats[PageFormat::Int4], 1.3);
        assert_eq!(ladder.harm.evict_nats, 0.3);
    }

    #[test]
    fn keys_are_rotated_only_where_that_is_clearly_better() {
        let profile = |key_rotation, int4| {
            let nats = |format| if format == PageFormat::Int4 { int4 } else { 0.0 };
            ModelProfile::new(key_rotation, ByFormat::from_fn(nats), 0.3)
        };
        let chosen = |plain, rotated| {
            let plain = profile(KeyRotation::None, plain);
            better(plain, profile(KeyRotation::Hadamard, rotated)).key_rotation
        };
        assert_eq!(chosen(0.010, 0.007), KeyRotation::Hadamard);
        assert_eq!(chosen(0.010, 0.0099), KeyRotation::None);
        assert_eq!(chosen(0.005, 0.015), KeyRotation::None);
        assert_eq!(chosen(0.005, f64::NAN), KeyRotation::None);
    }
}
