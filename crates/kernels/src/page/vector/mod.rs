//! Page encoding over sixteen lanes; the same bits as [`super::scalar`].

mod distinct;
mod fp8;
mod lanes;
mod prefetch;
mod quantize;
mod write;

use super::distinct::KeyGroups;
use super::fp8::Fp8;
use super::reencode::{NotFinite, Run};
use crate::simd::{LANES, avx2::Avx2, avx512::Avx512};
use reef_kv::page::PageShape;

/// 8-bit codes to 4-bit codes, see [`super::scalar::shrink`]. 256 bits wide on both tiers: wider would
/// wait for memory all the same.
///
/// # Safety
/// Needs AVX2; `source` is twice as long as `target` and a multiple of 64.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn shrink(source: &[u8], target: &mut [u8]) {
    // SAFETY: the caller's contract.
    unsafe { quantize::shrink(source, target) }
}

/// Copies codes that are in no cache; `source` and `target` are equally long.
///
/// # Safety
/// Needs AVX2.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn copy(source: &[u8], target: &mut [u8]) {
    prefetch::copy(source, target)
}

macro_rules! tier {
    ($simd:ty, $features:literal, $write:ident, $quantize:ident, $floats8:ident, $norms:ident, $sums:ident) => {
        /// # Safety
        /// Needs the features named below; arguments as [`super::write_kv`] checks.
        #[target_feature(enable = $features)]
        pub(super) unsafe fn $write(
            shape: &PageShape,
            page: &mut [u8],
            slot: usize,
            k: &[f32],
            v: &[f32],
        ) {
            // SAFETY: the features are enabled here; the rest is the caller's contract.
            unsafe { write::write_kv::<$simd>(shape, page, slot, k, v) }
        }

        /// # Safety
        /// Needs the features named below; the offsets of `run` lie inside `src` and `dst`.
        #[target_feature(enable = $features)]
        pub(super) unsafe fn $quantize(
            run: Run,
            src: &[u8],
            dst: &mut [u8],
        ) -> Result<(), NotFinite> {
            // SAFETY: the features are enabled here; the rest is the caller's contract.
            unsafe { quantize::quantize::<$simd>(run, src, dst) }
        }

        /// # Safety
        /// Needs the features named below; `source` is twice as long as `target`, a multiple of 64.
        #[target_feature(enable = $features)]
        pub(super) unsafe fn $floats8(
            format: Fp8,
            source: &[u8],
            target: &mut [u8],
        ) -> Result<f32, NotFinite> {
            // SAFETY: the features are enabled here; the rest is the caller's contract.
            unsafe { fp8::to_floats8::<$simd>(format, source, target) }
        }

        /// # Safety
        /// Needs the features named below; `keys` hold `inverse.len()` tokens, a multiple of 16.
        #[target_feature(enable = $features)]
        pub(super) unsafe fn $norms(keys: KeyGroups<'_>, inverse: &mut [f32]) {
            // SAFETY: the features are enabled here; the rest is the caller's contract.
            unsafe { distinct::inverse_norms::<$simd>(keys, inverse) }
        }

        /// # Safety
        /// Needs the features named below; `keys` hold `inverse.len()` tokens, a multiple of 16, and
        /// channels `first..first + 16`.
        #[target_feature(enable = $features)]
        pub(super) unsafe fn $sums(
            keys: KeyGroups<'_>,
            first: usize,
            inverse: &[f32],
        ) -> [f32; LANES] {
            // SAFETY: the features are enabled here; the rest is the caller's contract.
            unsafe { distinct::unit_sums::<$simd>(keys, first, inverse) }
        }
    };
}

tier!(
    Avx2,
    "avx2,fma,f16c",
    write_kv_avx2,
    quantize_avx2,
    to_floats8_avx2,
    inverse_norms_avx2,
    unit_sums_avx2
);
tier!(
    Avx512,
    "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni",
    write_kv_avx512,
    quantize_avx512,
    to_floats8_avx512,
    inverse_norms_avx512,
    unit_sums_avx512
);
