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

/// Tokens computed at most, unless large blocks need more; a longer text is cut.
pub const MAXIMUM_TOKENS: usize = 384;

/// Keys go to 4 bits where that costs less than this over 8-bit keys, in nats of divergence. Well-behaved
/// models lie an order of magnitude below, those whose keys have outlier channels one above
/// (Qwen3-0.6B: perplexity 13.5 to 47.8, ik_llama.cpp issue 1509).
pub const FOUR_BIT_KEY_LIMIT_NATS: f64 = 0.05;

/// Keys are rotated where that lowers the divergence of int4 at least to this share: below it lies what
/// another text could turn round. (SmolLM2-135M gains; Gemma 3, whose keys have outlier channels that
/// scales per channel hold and a rotation spreads, loses.)
pub const ROTATION_GAIN: f64 = 0.95;

/// The lossy formats beside int4, which is measured first.
const OTHERS: [PageFormat; 4] =
    [PageFormat::Int8, PageFormat::Fp8E4M3, PageFormat::Fp8E5M2, PageFormat::K8V4];
/// Sequences that are computed in all: f16 and int4 twice, then f16, the others and the one that drops.
const LANES_IN_ALL: usize = 2 * 2 + 1 + OTHERS.len() + 1;

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
/// of `block_size` tokens (as the runner was loaded with): int4 without and with rotated keys, then all
/// the rest under the better of the two. `progress` is told rows done and rows in all. The runner's
/// activations and rotation are afterwards what they were.
///
/// One sequence with f16 KV and one a treatment run side by side, a block at a time, so that each row
/// attends sealed blocks in their final format.
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
    let minimum = minimum_tokens(block_size);
    // Blocks of 128 need more.
    let most = MAXIMUM_TOKENS.max(minimum).min(runner.spec().trained_context);
    let ids = &ids[..ids.len().min(most)];
    if ids.len() < minimum {
        return Err(EngineError::ShortText { tokens: ids.len(), minimum });
    }
    let before = (runner.activations(), runner.key_rotation());
    runner.set_activations(Activations::F32);
    let profile = measure_all(&mut Measure { runner, block_size, ids, progress, rows: 0 });
    runner.set_activations(before.0);
    runner.set_key_rotation(before.1);
    profile
}

fn measure_all(measure: &mut Measure<'_>) -> Result<ModelProfile, EngineError> {
    let flat = |format_at_seal| Rules { format_at_seal, ..Rules::default() };
    let int4 = [flat(PageFormat::Int4)];
    let plain_nats = measure.divergences(KeyRotation::None, &int4)?[0];
    let rotated_nats = measure.divergences(KeyRotation::Hadamard, &int4)?[0];
    let (key_rotation, int4_nats) = better(plain_nats, rotated_nats);
    let mut others: Vec<Rules> = OTHERS.into_iter().map(flat).collect();
    let kept = kept_tokens(measure.block_size);
    others.push(Rules { token_budget: Some(kept), ..Rules::default() });
    let nats = measure.divergences(key_rotation, &others)?;
    let mut format_nats = ByFormat::default();
    format_nats[PageFormat::Int4] = int4_nats;
    OTHERS.into_iter().zip(&nats).for_each(|(format, nats)| format_nats[format] = *nats);
    Ok(ModelProfile::new(key_rotation, format_nats, nats[OTHERS.len()]))
}

/// The rotation to use and its divergence of int4.
fn better(plain_nats: f64, rotated_nats: f64) -> (KeyRotation, f64) {
    match rotated_nats <= ROTATION_GAIN * plain_nats {
        true => (KeyRotation::Hadamard, rotated_nats),
        false => (KeyRotation::None, plain_nats),
    }
}

struct Measure<'a> {
    runner: &'a mut ModelRunner,
    block_size: usize,
    ids: &'a [u32],
    progress: &'a mut dyn FnMut(usize, usize),
    /// Rows done.
    rows: usize,
}

impl Measure<'_> {
    /// Mean divergence of each treatment from untouched f16 KV, over the rows that can feel it: those
    /// past the first block, or past what is kept.
    fn divergences(
        &mut self,
        key_rotation: KeyRotation,
        treatments: &[Rules],
    ) -> Result<Vec<f64>, EngineError> {
        let Measure { block_size, ids, .. } = *self;
        self.runner.set_key_rotation(key_rotation);
        let mut sums = vec![(0.0, 0); treatments.len()];
        let lanes = Lanes { block_size, treatments, pinned_layers: &[] };
        let scoring = Scoring { context: ids.len(), lanes, compare: true };
        let (done, lanes) = (self.rows, treatments.len() + 1);
        let progress = &mut *self.progress;
        score_together(self.runner, ids, &scoring, &mut |treatment, scored| {
            let unchanged = treatments[treatment].token_budget.unwrap_or(block_size);
            if let (Some(nats), true) = (scored.kld, scored.index > unchanged) {
                sums[treatment].0 += nats;
                sums[treatment].1 += 1;
            }
            if treatment == 0 {
                progress(done + (scored.index + 1) * lanes, ids.len() * LANES_IN_ALL);
            }
        })?;
        self.rows += ids.len() * lanes;
        Ok(sums.into_iter().map(|(sum, rows)| sum / f64::from(rows.max(1))).collect())
    }
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
        let chosen = |plain, rotated| better(plain, rotated).0;
        assert_eq!(chosen(0.010, 0.007), KeyRotation::Hadamard);
        assert_eq!(chosen(0.010, 0.0099), KeyRotation::None);
        assert_eq!(chosen(0.005, 0.015), KeyRotation::None);
        assert_eq!(chosen(0.005, f64::NAN), KeyRotation::None);
        assert_eq!(better(0.010, 0.007).1, 0.007);
    }
}
