//! AVX-512 tier (F, BW, VL, DQ, VNNI): one register.

use super::Simd;
use std::arch::x86_64::*;

/// The AVX-512 tier.
#[derive(Clone, Copy)]
pub struct Avx512;

// SAFETY of every block below: the trait's contract: the caller has the features and valid pointers.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Simd for Avx512 {
    type F = __m512;
    #[inline(always)]
    unsafe fn splat(x: f32) -> __m512 {
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> __m512 {
        unsafe { _mm512_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, x: __m512) {
        unsafe { _mm512_storeu_ps(p, x) }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> __m512 {
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }
    #[inline(always)]
    unsafe fn load_f16_pairs(p: *const u16) -> (__m512, __m512) {
        unsafe {
            let pairs = _mm512_loadu_si512(p.cast());
            let second = _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(pairs));
            (_mm512_cvtph_ps(_mm512_cvtepi32_epi16(pairs)), _mm512_cvtph_ps(second))
        }
    }
    #[inline(always)]
    unsafe fn store_f16(p: *mut u16, x: __m512) {
        unsafe { _mm256_storeu_si256(p.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x)) }
    }
    #[inline(always)]
    unsafe fn load_u8(p: *const u8) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast()))) }
    }
    #[inline(always)]
    unsafe fn load_u4(p: *const u8, high: bool) -> __m512 {
        unsafe {
            let bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast()));
            // Which of the two is the same all through a loop, mostly: a branch is cheaper than both.
            _mm512_cvtepi32_ps(if high {
                _mm512_srli_epi32::<4>(bytes)
            } else {
                _mm512_and_si512(bytes, _mm512_set1_epi32(15))
            })
        }
    }
    #[inline(always)]
    unsafe fn load_u4_pair(p: *const u8) -> (__m512, __m512) {
        // Conversion, not a permutation of sixteen constants: on Zen 5 that waits for the ports of FMA.
        unsafe {
            let bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast()));
            let low = _mm512_and_si512(bytes, _mm512_set1_epi32(15));
            (_mm512_cvtepi32_ps(low), _mm512_cvtepi32_ps(_mm512_srli_epi32::<4>(bytes)))
        }
    }
    #[inline(always)]
    unsafe fn load_e4m3_as_f16(p: *const u8) -> __m512 {
        unsafe {
            // The sign twice, then the seven other bits; the second sign goes.
            let words = _mm256_cvtepi8_epi16(_mm_loadu_si128(p.cast()));
            let halves = _mm256_slli_epi16::<7>(words);
            _mm512_cvtph_ps(_mm256_and_si256(halves, _mm256_set1_epi16(0xbfff_u16 as i16)))
        }
    }
    #[inline(always)]
    unsafe fn load_e5m2(p: *const u8) -> __m512 {
        unsafe {
            let words = _mm256_cvtepu8_epi16(_mm_loadu_si128(p.cast()));
            _mm512_cvtph_ps(_mm256_slli_epi16::<8>(words))
        }
    }
    #[inline(always)]
    unsafe fn store_i8(p: *mut i8, x: __m512) {
        unsafe { _mm_storeu_si128(p.cast(), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x))) }
    }
    #[inline(always)]
    unsafe fn load_byte_of_u32<const J: usize>(p: *const u8) -> __m512 {
        unsafe {
            let shift = _mm_cvtsi32_si128(8 * J as i32);
            let shifted = _mm512_srl_epi32(_mm512_loadu_si512(p.cast()), shift);
            _mm512_cvtepi32_ps(_mm512_and_si512(shifted, _mm512_set1_epi32(255)))
        }
    }
    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn div(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_div_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn max(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_max_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn min(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_min_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn round(a: __m512) -> __m512 {
        unsafe { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a) }
    }
    #[inline(always)]
    unsafe fn exp2_int(n: __m512) -> __m512 {
        unsafe {
            let exponent = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(exponent))
        }
    }
    #[inline(always)]
    unsafe fn select(mask: u16, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_mask_blend_ps(mask, b, a) }
    }
    #[inline(always)]
    unsafe fn lt_mask(a: __m512, b: __m512) -> u16 {
        unsafe { _mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b) }
    }
    #[inline(always)]
    unsafe fn reduce_add(a: __m512) -> f32 {
        unsafe {
            let low = _mm512_castps512_ps256(a);
            let high = _mm512_extractf32x8_ps::<1>(a);
            super::avx2::sum8(_mm256_add_ps(low, high))
        }
    }
    #[inline(always)]
    unsafe fn reduce_max(a: __m512) -> f32 {
        unsafe { _mm512_reduce_max_ps(a) }
    }
    #[inline(always)]
    unsafe fn reduce_min(a: __m512) -> f32 {
        unsafe { _mm512_reduce_min_ps(a) }
    }
    #[inline(always)]
    unsafe fn store_u8(p: *mut u8, x: __m512) {
        unsafe { _mm_storeu_si128(p.cast(), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x))) }
    }
}
