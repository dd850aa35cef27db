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

/// `DROPPED`: mantissa bits of an f32 that the format has no room for. No product is so far above the
/// largest number, if at all, that it would round up, so nothing is left to saturate.
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
        let (low_word, sign_bit) = (_mm256_set1_epi16(0x7fff), _mm_set1_epi8(i8::MIN));
        for (halves, codes) in source.chunks_exact(2 * LANES).zip(target.chunks_exact_mut(LANES)) {
            // The first pass has brought in this part; the next one lies right behind it.
            prefetch(halves.as_ptr().wrapping_add(source.len()));
            let halves = _mm256_loadu_si256(halves.as_ptr().cast());
            let size = S::mul(S::widen(_mm256_and_si256(halves, low_word)), S::splat(inverse));
            let upper = _mm256_srli_epi16::<8>(halves);
            let upper = _mm_packus_epi16(
                _mm256_castsi256_si128(upper),
                _mm256_extracti128_si256::<1>(upper),
            );
            let code = encode::<S, DROPPED>(format, size);
            let code = _mm_or_si128(code, _mm_and_si128(upper, sign_bit));
            _mm_storeu_si128(codes.as_mut_ptr().cast(), code);
        }
    }
}

/// Codes of sixteen lanes that are positive or 0 and not beyond the largest number, sign off.
///
/// `2^DROPPED` times the power of two below a number has a last bit worth one step of the 8-bit float
/// there; added, it leaves the number of steps, nearest even, in the low bits. Below the smallest
/// normal the steps are those of the smallest normal. Codes count upward `2^m` a power of two.
///
/// # Safety
/// Needs the tier of `S`.
#[inline(always)]
unsafe fn encode<S: PageLanes, const DROPPED: u32>(format: Fp8, size: S::F) -> __m128i {
    let smallest_power = (128 - format.bias() as u32) << 23;
    // SAFETY: the caller has the features.
    unsafe {
        let power = S::from_bits(S::and(S::bits(size), S::splat_bits(0xff << 23)));
        let power = S::bits(S::max(power, S::splat(f32::from_bits(smallest_power))));
        let counter = S::add_bits(power, S::splat_bits(DROPPED << 23));
        let counted = S::add(size, S::from_bits(counter));
        let steps = S::sub_bits(S::bits(counted), counter);
        let code = S::add_bits(steps, S::shift_right::<DROPPED>(power));
        let first = _mm256_set1_epi16((smallest_power >> DROPPED) as i16);
        S::bytes(_mm256_sub_epi16(S::words(code), first))
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
