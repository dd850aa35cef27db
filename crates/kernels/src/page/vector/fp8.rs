//! 8-bit floats in vectors: [`Fp8::encode`] and [`Fp8::decode`] sixteen at a time.

use super::lanes::PageLanes;
use super::prefetch::prefetch;
use crate::page::fp8::Fp8;
use crate::page::reencode::NotFinite;
use crate::page::scalar::float8_scale;
use crate::simd::LANES;
use std::arch::x86_64::*;

/// # Safety
/// Needs the tier of `S`; `source` holds twice as many bytes as `target`, which are a multiple of 64.
#[inline(always)]
pub(super) unsafe fn to_floats8<S: PageLanes>(
    format: Fp8,
    source: &[u8],
    target: &mut [u8],
) -> Result<f32, NotFinite> {
    // SAFETY: the caller's contract; all reads and writes are whole vectors inside the slices.
    unsafe {
        let absmax = absmax(source)?;
        let (scale, inverse) = float8_scale(format, absmax);
        match format {
            Fp8::E4M3 => encode_all::<S, 20>(format, inverse, source, target),
            Fp8::E5M2 => encode_all::<S, 21>(format, inverse, source, target),
        }
        Ok(scale)
    }
}

/// Largest magnitude of the halves of `source`: sign off, halves order as integers do.
///
/// # Safety
/// Needs AVX2 and F16C; `source.len()` is a multiple of 128.
#[inline(always)]
unsafe fn absmax(source: &[u8]) -> Result<f32, NotFinite> {
    // SAFETY: the caller's contract.
    unsafe {
        let mut largest = [_mm256_setzero_si256(); 4];
        for chunk in source.chunks_exact(128) {
            for (i, largest) in largest.iter_mut().enumerate() {
                let halves = _mm256_loadu_si256(chunk.as_ptr().add(32 * i).cast());
                let size = _mm256_and_si256(halves, _mm256_set1_epi16(0x7fff));
                *largest = _mm256_max_epi16(*largest, size);
            }
        }
        let [a, b, c, d] = largest;
        let all = _mm256_max_epi16(_mm256_max_epi16(a, b), _mm256_max_epi16(c, d));
        let mut halves = [0u16; 16];
        _mm256_storeu_si256(halves.as_mut_ptr().cast(), all);
        let largest = halves.iter().copied().max().unwrap_or(0);
        let largest = half::f16::from_bits(largest);
        if largest.is_finite() { Ok(largest.to_f32()) } else { Err(NotFinite) }
    }
}

/// `DROPPED`: mantissa bits of an f32 that the format has no room for.
///
/// # Safety
/// As of [`to_floats8`].
#[inline(always)]
unsafe fn encode_all<S: PageLanes, const DROPPED: u32>(
    format: Fp8,
    inverse: f32,
    source: &[u8],
    target: &mut [u8],
) {
    // SAFETY: the caller's contract.
    unsafe {
        for (halves, codes) in source.chunks_exact(2 * LANES).zip(target.chunks_exact_mut(LANES)) {
            // The first pass has brought in this part; the next one lies right behind it.
            prefetch(halves.as_ptr().wrapping_add(source.len()));
            let halves = _mm256_loadu_si256(halves.as_ptr().cast());
            let value = S::mul(S::widen(halves), S::splat(inverse));
            let code = encode::<S, DROPPED>(format, value);
            _mm_storeu_si128(codes.as_mut_ptr().cast(), S::low_bytes(code));
        }
    }
}

/// Codes of finite lanes, without a branch: one formula rounds normal numbers and gives the code of
/// the smallest of them for anything below, the other does so for subnormal ones and anything above;
/// their sum counts the smallest normal once too often.
///
/// # Safety
/// Needs the tier of `S`.
#[inline(always)]
unsafe fn encode<S: PageLanes, const DROPPED: u32>(format: Fp8, value: S::F) -> S::I {
    let bits = format.mantissa_bits() as u32;
    let bias_step = (127 - format.bias() as u32) << 23;
    let smallest_normal = f32::from_bits(bias_step + (1 << 23));
    // Adding 2^23 smallest numbers leaves the multiple of them, nearest even, in the low bits.
    let counter = smallest_normal * (1u32 << DROPPED) as f32;
    let once = 1u32 << bits;
    // SAFETY: the caller has the features.
    unsafe {
        let size = S::from_bits(S::and(S::bits(value), S::splat_bits(0x7fff_ffff)));
        let size = S::min(size, S::splat(format.largest()));
        let normal = S::bits(S::max(size, S::splat(smallest_normal)));
        let odd = S::and(S::shift_right::<DROPPED>(normal), S::splat_bits(1));
        let half = ((1u32 << (DROPPED - 1)) - 1).wrapping_sub(bias_step);
        let rounded = S::add_bits(S::add_bits(normal, odd), S::splat_bits(half));
        let normal_code = S::shift_right::<DROPPED>(rounded);
        let below = S::add(S::min(size, S::splat(smallest_normal)), S::splat(counter));
        let below_code = S::add_bits(
            S::bits(below),
            S::splat_bits(counter.to_bits().wrapping_add(once).wrapping_neg()),
        );
        let sign = S::and(S::shift_right::<24>(S::bits(value)), S::splat_bits(0x80));
        S::add_bits(S::add_bits(normal_code, below_code), sign)
    }
}

/// The numbers of sixteen codes, exact; NaN and infinity as the format has them.
///
/// # Safety
/// Needs the tier of `S`.
#[inline(always)]
pub(super) unsafe fn decode<S: PageLanes, const E4M3: bool>(codes: __m128i) -> S::F {
    // SAFETY: the caller has the features.
    unsafe {
        let codes = _mm256_cvtepu8_epi16(codes);
        if !E4M3 {
            // The upper byte of an f16.
            return S::widen(_mm256_slli_epi16::<8>(codes));
        }
        // Exponent and mantissa in an f16's place are 2^8 too small, for the bias there is 15, not 7.
        let size = _mm256_and_si256(codes, _mm256_set1_epi16(0x7f));
        let sign = _mm256_slli_epi16::<8>(_mm256_xor_si256(codes, size));
        let nan = _mm256_cmpeq_epi16(size, _mm256_set1_epi16(0x7f));
        let halves = _mm256_or_si256(_mm256_slli_epi16::<7>(size), sign);
        let halves = _mm256_or_si256(halves, _mm256_and_si256(nan, _mm256_set1_epi16(0x7fff)));
        S::mul(S::widen(halves), S::splat(256.0))
    }
}
