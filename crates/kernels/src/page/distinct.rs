//! KeyDiff: how unlike the rest a block's keys are.

use super::scalar;
#[cfg(target_arch = "x86_64")]
use super::vector;
use crate::dispatch::Tier;
use crate::simd::LANES;
use reef_kv::page::{PageFormat, PageShape};

/// Tokens of the largest block.
const BLOCK_TOKENS_MAX: usize = 128;

/// The keys of one head of an f16 page: `[groups][head_dim][group]` halves.
#[derive(Clone, Copy)]
pub(super) struct KeyGroups<'a> {
    /// The halves, from the head's first key.
    pub bytes: &'a [u8],
    pub head_dim: usize,
    /// Tokens of a group: 16 or 32.
    pub group: usize,
}

impl KeyGroups<'_> {
    /// Number of the half that holds `channel` of `token`.
    pub fn index(&self, token: usize, channel: usize) -> usize {
        (token / self.group * self.head_dim + channel) * self.group + token % self.group
    }
}

/// KeyDiff score (arXiv 2504.15364, on keys after RoPE as kvpress computes it) of a full block in one
/// layer: the mean over heads and tokens of `-cos(key, anchor)`, where a head's anchor is the sum of
/// the unit keys so far, those of this block included. High = unlike the rest = worth keeping.
///
/// `page`: an f16 page of `shape`, all slots written. `anchor`: `[kv_heads * head_dim]`, zeros before
/// a sequence's first block; the block's unit keys are added. A key of zeros has no direction: it
/// counts 0. A NaN in the page makes the score and the anchor NaN.
///
/// The mean of the cosines needs no pass of its own: `Σ_t cos(k_t, a) = (Σ_t k_t / |k_t|) · a / |a|`,
/// and that sum is what was added to the anchor.
///
/// # Panics
/// If `page` or `anchor` is too short for `shape`.
pub fn key_distinctness(tier: Tier, shape: &PageShape, page: &[u8], anchor: &mut [f32]) -> f32 {
    let (dim, tokens) = (shape.head_dim, shape.block_size);
    assert!(page.len() >= shape.page_bytes(PageFormat::F16), "key_distinctness: page too short");
    assert_eq!(anchor.len(), shape.kv_heads * dim, "key_distinctness: anchor of another shape");
    assert!(dim.is_multiple_of(LANES), "key_distinctness: head_dim not a multiple of 16");
    assert!(
        tokens.is_multiple_of(LANES) && tokens <= BLOCK_TOKENS_MAX,
        "key_distinctness: block_size {tokens} is not 16, 32, 64 or 128"
    );
    let mut cosines = 0.0;
    for (head, anchor) in anchor.chunks_exact_mut(dim).enumerate() {
        let at = shape.head(PageFormat::F16, head).k;
        let bytes = &page[at..at + 2 * dim * tokens];
        let keys = KeyGroups { bytes, head_dim: dim, group: shape.key_group() };
        let mut inverse = [0f32; BLOCK_TOKENS_MAX];
        let inverse = &mut inverse[..tokens];
        inverse_norms(tier, keys, inverse);
        cosines += add_to_anchor(tier, keys, inverse, anchor);
    }
    (-cosines / (shape.kv_heads * tokens) as f64) as f32
}

/// Adds the unit keys of a head to its anchor; returns the sum of their cosines with the new anchor.
fn add_to_anchor(tier: Tier, keys: KeyGroups<'_>, inverse: &[f32], anchor: &mut [f32]) -> f64 {
    let (mut dot, mut squares) = (0f64, 0f64);
    for (part, anchor) in anchor.chunks_exact_mut(LANES).enumerate() {
        let sums = unit_sums(tier, keys, part * LANES, inverse);
        for (anchor, sum) in anchor.iter_mut().zip(sums) {
            *anchor += sum;
            dot += f64::from(sum) * f64::from(*anchor);
            squares += f64::from(*anchor) * f64::from(*anchor);
        }
    }
    if squares == 0.0 { 0.0 } else { dot / squares.sqrt() }
}

fn inverse_norms(tier: Tier, keys: KeyGroups<'_>, inverse: &mut [f32]) {
    match tier {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the tier is one of this CPU's; the keys hold `inverse.len()` tokens, a multiple of 16.
        Tier::Avx512 => unsafe { vector::inverse_norms_avx512(keys, inverse) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the same.
        Tier::Avx2 => unsafe { vector::inverse_norms_avx2(keys, inverse) },
        _ => scalar::inverse_norms(keys, inverse),
    }
}

fn unit_sums(tier: Tier, keys: KeyGroups<'_>, first: usize, inverse: &[f32]) -> [f32; LANES] {
    match tier {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as in `inverse_norms`, and `first + 16` channels exist.
        Tier::Avx512 => unsafe { vector::unit_sums_avx512(keys, first, inverse) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the same.
        Tier::Avx2 => unsafe { vector::unit_sums_avx2(keys, first, inverse) },
        _ => scalar::unit_sums(keys, first, inverse),
    }
}
