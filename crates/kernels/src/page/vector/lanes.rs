//! What page encoding needs of sixteen lanes beyond [`Simd`]: halves and integers in registers.

use crate::simd::{
    Simd,
    avx2::{Avx2, Pair},
    avx512::Avx512,
};
use std::arch::x86_64::*;

/// Sixteen lanes as f32, as u32, as halves in one 256-bit register and as bytes in one of 128 bits.
///
/// # Safety
/// As of [`Simd`]: every method needs the CPU features of its tier.
pub(super) trait PageLanes: Simd {
    /// Sixteen u32 lanes.
    type I: Copy;
    /// Halves to f32, exact.
    /// # Safety
    /// See the trait.
    unsafe fn widen(halves: __m256i) -> Self::F;
    /// f32 to the nearest half, ties to even.
    /// # Safety
    /// See the trait.
    unsafe fn narrow(x: Self::F) -> __m256i;
    /// Nearest integers, ties to even.
    /// # Safety
    /// See the trait.
    unsafe fn integers(x: Self::F) -> Self::I;
    /// The bits of the floats.
    /// # Safety
    /// See the trait.
    unsafe fn bits(x: Self::F) -> Self::I;
    /// # Safety
    /// See the trait.
    unsafe fn from_bits(x: Self::I) -> Self::F;
    /// # Safety
    /// See the trait.
    unsafe fn splat_bits(x: u32) -> Self::I;
    /// # Safety
    /// See the trait.
    unsafe fn and(a: Self::I, b: Self::I) -> Self::I;
    /// Wrapping.
    /// # Safety
    /// See the trait.
    unsafe fn add_bits(a: Self::I, b: Self::I) -> Self::I;
    /// Shift towards the low bits, zeros in.
    /// # Safety
    /// See the trait.
    unsafe fn shift_right<const N: u32>(a: Self::I) -> Self::I;
    /// Wrapping.
    /// # Safety
    /// See the trait.
    unsafe fn sub_bits(a: Self::I, b: Self::I) -> Self::I;
    /// Lanes in 0..=32767 to sixteen bits, in an order of the tier's own that [`Self::bytes`] undoes.
    /// # Safety
    /// See the trait.
    unsafe fn words(x: Self::I) -> __m256i;
    /// Words in the order of [`Self::words`] to bytes in the order of lanes; 255 for anything larger.
    /// # Safety
    /// See the trait.
    unsafe fn bytes(words: __m256i) -> __m128i;
}

// SAFETY of every block below: the trait's contract: the caller has the features.
#[allow(clippy::undocumented_unsafe_blocks)]
impl PageLanes for Avx512 {
    type I = __m512i;
    #[inline(always)]
    unsafe fn widen(halves: __m256i) -> __m512 {
        unsafe { _mm512_cvtph_ps(halves) }
    }
    #[inline(always)]
    unsafe fn narrow(x: __m512) -> __m256i {
        unsafe { _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x) }
    }
    #[inline(always)]
    unsafe fn integers(x: __m512) -> __m512i {
        unsafe { _mm512_cvtps_epi32(x) }
    }
    #[inline(always)]
    unsafe fn bits(x: __m512) -> __m512i {
        unsafe { _mm512_castps_si512(x) }
    }
    #[inline(always)]
    unsafe fn from_bits(x: __m512i) -> __m512 {
        unsafe { _mm512_castsi512_ps(x) }
    }
    #[inline(always)]
    unsafe fn splat_bits(x: u32) -> __m512i {
        unsafe { _mm512_set1_epi32(x as i32) }
    }
    #[inline(always)]
    unsafe fn and(a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_and_si512(a, b) }
    }
    #[inline(always)]
    unsafe fn add_bits(a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_add_epi32(a, b) }
    }
    #[inline(always)]
    unsafe fn shift_right<const N: u32>(a: __m512i) -> __m512i {
        unsafe { _mm512_srli_epi32::<N>(a) }
    }
    #[inline(always)]
    unsafe fn sub_bits(a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_sub_epi32(a, b) }
    }
    #[inline(always)]
    unsafe fn words(x: __m512i) -> __m256i {
        unsafe { _mm512_cvtepi32_epi16(x) }
    }
    #[inline(always)]
    unsafe fn bytes(words: __m256i) -> __m128i {
        unsafe { _mm256_cvtusepi16_epi8(words) }
    }
}

/// Two registers of eight u32.
#[derive(Clone, Copy)]
pub(super) struct IntPair(__m256i, __m256i);

// SAFETY of every block below: the trait's contract: the caller has the features.
#[allow(clippy::undocumented_unsafe_blocks)]
impl PageLanes for Avx2 {
    type I = IntPair;
    #[inline(always)]
    unsafe fn widen(halves: __m256i) -> Pair {
        unsafe {
            let low = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
            Pair(low, _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(halves)))
        }
    }
    #[inline(always)]
    unsafe fn narrow(x: Pair) -> __m256i {
        unsafe {
            let low = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x.0);
            _mm256_set_m128i(_mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x.1), low)
        }
    }
    #[inline(always)]
    unsafe fn integers(x: Pair) -> IntPair {
        unsafe { IntPair(_mm256_cvtps_epi32(x.0), _mm256_cvtps_epi32(x.1)) }
    }
    #[inline(always)]
    unsafe fn bits(x: Pair) -> IntPair {
        unsafe { IntPair(_mm256_castps_si256(x.0), _mm256_castps_si256(x.1)) }
    }
    #[inline(always)]
    unsafe fn from_bits(x: IntPair) -> Pair {
        unsafe { Pair(_mm256_castsi256_ps(x.0), _mm256_castsi256_ps(x.1)) }
    }
    #[inline(always)]
    unsafe fn splat_bits(x: u32) -> IntPair {
        unsafe { IntPair(_mm256_set1_epi32(x as i32), _mm256_set1_epi32(x as i32)) }
    }
    #[inline(always)]
    unsafe fn and(a: IntPair, b: IntPair) -> IntPair {
        unsafe { IntPair(_mm256_and_si256(a.0, b.0), _mm256_and_si256(a.1, b.1)) }
    }
    #[inline(always)]
    unsafe fn add_bits(a: IntPair, b: IntPair) -> IntPair {
        unsafe { IntPair(_mm256_add_epi32(a.0, b.0), _mm256_add_epi32(a.1, b.1)) }
    }
    #[inline(always)]
    unsafe fn shift_right<const N: u32>(a: IntPair) -> IntPair {
        unsafe {
            let count = _mm_cvtsi32_si128(N as i32);
            IntPair(_mm256_srl_epi32(a.0, count), _mm256_srl_epi32(a.1, count))
        }
    }
    #[inline(always)]
    unsafe fn sub_bits(a: IntPair, b: IntPair) -> IntPair {
        unsafe { IntPair(_mm256_sub_epi32(a.0, b.0), _mm256_sub_epi32(a.1, b.1)) }
    }
    #[inline(always)]
    unsafe fn words(x: IntPair) -> __m256i {
        // Packs within 128-bit halves: lanes 0..4, 8..12, 4..8, 12..16.
        unsafe { _mm256_packus_epi32(x.0, x.1) }
    }
    #[inline(always)]
    unsafe fn bytes(words: __m256i) -> __m128i {
        unsafe {
            let high = _mm256_extracti128_si256::<1>(words);
            let bytes = _mm_packus_epi16(_mm256_castsi256_si128(words), high);
            _mm_shuffle_epi32::<0b11_01_10_00>(bytes)
        }
    }
}
