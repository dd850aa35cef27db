//! Norms and sums of unit keys, for [`crate::page::key_distinctness`]; the token is the lane.

use crate::page::distinct::KeyGroups;
use crate::page::scalar::inverse_norm;
use crate::simd::{LANES, Simd};

/// # Safety
/// Needs the tier of `S`; `keys` hold `inverse.len()` tokens, a multiple of 16.
#[inline(always)]
pub(super) unsafe fn inverse_norms<S: Simd>(keys: KeyGroups<'_>, inverse: &mut [f32]) {
    for (vector, inverse) in inverse.chunks_exact_mut(LANES).enumerate() {
        // SAFETY: sixteen tokens from a multiple of 16 lie side by side in one group.
        unsafe {
            let first = keys.bytes.as_ptr().cast::<u16>().add(keys.index(vector * LANES, 0));
            let mut squares = S::splat(0.0);
            for channel in 0..keys.head_dim {
                let key = S::load_f16(first.add(channel * keys.group));
                squares = S::fma(key, key, squares);
            }
            S::store(inverse.as_mut_ptr(), squares);
        }
        for inverse in inverse {
            *inverse = inverse_norm(*inverse);
        }
    }
}

/// # Safety
/// Needs the tier of `S`; `keys` hold `inverse.len()` tokens, a multiple of 16, and sixteen channels
/// from `first`.
#[inline(always)]
pub(super) unsafe fn unit_sums<S: Simd>(
    keys: KeyGroups<'_>,
    first: usize,
    inverse: &[f32],
) -> [f32; LANES] {
    let mut sums = [0f32; LANES];
    // Not by closure: one that is not inlined lacks the CPU features.
    for (channel, sum) in sums.iter_mut().enumerate() {
        // SAFETY: as above.
        unsafe {
            let mut lanes = S::splat(0.0);
            for token in (0..inverse.len()).step_by(LANES) {
                let at = keys.index(token, first + channel);
                let key = S::load_f16(keys.bytes.as_ptr().cast::<u16>().add(at));
                lanes = S::fma(key, S::load(inverse.as_ptr().add(token)), lanes);
            }
            *sum = S::reduce_add(lanes);
        }
    }
    sums
}
