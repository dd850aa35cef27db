//! AVX2 + FMA + F16C tier: two registers.

use super::Simd;
use std::arch::x86_64::*;

/// The AVX2 tier.
#[derive(Clone, Copy)]
pub struct Avx2;

/// Lanes 0..8 and 8..16.
#[derive(Clone, Copy)]
pub struct Pair(pub __m256, pub __m256);

/// Sum of eight lanes: `lane[i] += lane[i + 4]`, then 2, then 1.
///
/// # Safety
/// Needs AVX.
#[inline(always)]
pub unsafe fn sum8(a: __m256) -> f32 {
    // SAFETY: the caller has AVX.
    unsafe {
        let four = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
    }
}

/// # Safety
/// Needs AVX2.
#[inline(always)]
unsafe fn lane_mask(bits: u16) -> __m256 {
    // SAFETY: the caller has AVX2.
    unsafe {
        let bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
        let all = _mm256_set1_epi32(i32::from(bits) & 0xff);
        _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(all, bit), bit))
    }
}

// SAFETY of every block below: the trait's contract: the caller has the features and valid pointers.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Simd for Avx2 {
    type F = Pair;
    #[inline(always)]
    unsafe fn splat(x: f32) -> Pair {
        unsafe { Pair(_mm256_set1_ps(x), _mm256_set1_ps(x)) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Pair {
        unsafe { Pair(_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, x: Pair) {
        unsafe {
            _mm256_storeu_ps(p, x.0);
            _mm256_storeu_ps(p.add(8), x.1);
        }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Pair {
        unsafe {
            let low = _mm256_cvtph_ps(_mm_loadu_si128(p.cast()));
            Pair(low, _mm256_cvtph_ps(_mm_loadu_si128(p.add(8).cast())))
        }
    }
    #[inline(always)]
    unsafe fn load_f16_pairs(p: *const u16) -> (Pair, Pair) {
        // Packing works per 128-bit half: the permutation puts the quarters back in order.
        #[inline(always)]
        unsafe fn packed(a: __m256i, b: __m256i) -> Pair {
            unsafe {
                let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(a, b));
                let low = _mm256_cvtph_ps(_mm256_castsi256_si128(words));
                Pair(low, _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(words)))
            }
        }
        unsafe {
            let (a, b) = (_mm256_loadu_si256(p.cast()), _mm256_loadu_si256(p.add(16).cast()));
            let word = _mm256_set1_epi32(0xffff);
            let first = packed(_mm256_and_si256(a, word), _mm256_and_si256(b, word));
            (first, packed(_mm256_srli_epi32::<16>(a), _mm256_srli_epi32::<16>(b)))
        }
    }
    #[inline(always)]
    unsafe fn store_f16(p: *mut u16, x: Pair) {
        unsafe {
            _mm_storeu_si128(p.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x.0));
            _mm_storeu_si128(p.add(8).cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x.1));
        }
    }
    #[inline(always)]
    unsafe fn load_u8(p: *const u8) -> Pair {
        unsafe {
            let low = _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast()));
            let high = _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.add(8).cast()));
            Pair(_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high))
        }
    }
    #[inline(always)]
    unsafe fn load_u4(p: *const u8, high: bool) -> Pair {
        unsafe {
            let low_half = _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast()));
            let high_half = _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.add(8).cast()));
            // Which of the two is the same all through a loop, mostly: a branch is cheaper than both.
            let (a, b) = if high {
                (_mm256_srli_epi32::<4>(low_half), _mm256_srli_epi32::<4>(high_half))
            } else {
                let nibble = _mm256_set1_epi32(15);
                (_mm256_and_si256(low_half, nibble), _mm256_and_si256(high_half, nibble))
            };
            Pair(_mm256_cvtepi32_ps(a), _mm256_cvtepi32_ps(b))
        }
    }
    #[inline(always)]
    unsafe fn load_u4_pair(p: *const u8) -> (Pair, Pair) {
        #[inline(always)]
        unsafe fn half(p: *const u8) -> (__m256, __m256) {
            unsafe {
                let bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast()));
                let low = _mm256_and_si256(bytes, _mm256_set1_epi32(15));
                let high = _mm256_srli_epi32::<4>(bytes);
                (_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high))
            }
        }
        unsafe {
            let (first, second) = (half(p), half(p.add(8)));
            (Pair(first.0, second.0), Pair(first.1, second.1))
        }
    }
    #[inline(always)]
    unsafe fn load_e4m3_as_f16(p: *const u8) -> Pair {
        unsafe {
            // The sign twice, then the seven other bits; the second sign goes.
            let words = _mm256_cvtepi8_epi16(_mm_loadu_si128(p.cast()));
            let halves = _mm256_slli_epi16::<7>(words);
            let halves = _mm256_and_si256(halves, _mm256_set1_epi16(0xbfff_u16 as i16));
            let low = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
            Pair(low, _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(halves)))
        }
    }
    #[inline(always)]
    unsafe fn load_e5m2(p: *const u8) -> Pair {
        unsafe {
            let (zero, bytes) = (_mm_setzero_si128(), _mm_loadu_si128(p.cast()));
            let low = _mm256_cvtph_ps(_mm_unpacklo_epi8(zero, bytes));
            Pair(low, _mm256_cvtph_ps(_mm_unpackhi_epi8(zero, bytes)))
        }
    }
    #[inline(always)]
    unsafe fn store_i8(p: *mut i8, x: Pair) {
        unsafe {
            // Packing works per 128-bit half: the permutation puts the quarters back in order.
            let words = _mm256_packs_epi32(_mm256_cvtps_epi32(x.0), _mm256_cvtps_epi32(x.1));
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(words);
            let high = _mm256_extracti128_si256::<1>(words);
            _mm_storeu_si128(p.cast(), _mm_packs_epi16(_mm256_castsi256_si128(words), high));
        }
    }
    #[inline(always)]
    unsafe fn load_byte_of_u32<const J: usize>(p: *const u8) -> Pair {
        #[inline(always)]
        unsafe fn half<const J: usize>(p: *const u8) -> __m256 {
            unsafe {
                let shift = _mm_cvtsi32_si128(8 * J as i32);
                let shifted = _mm256_srl_epi32(_mm256_loadu_si256(p.cast()), shift);
                _mm256_cvtepi32_ps(_mm256_and_si256(shifted, _mm256_set1_epi32(255)))
            }
        }
        unsafe { Pair(half::<J>(p), half::<J>(p.add(32))) }
    }
    #[inline(always)]
    unsafe fn add(a: Pair, b: Pair) -> Pair {
        unsafe { Pair(_mm256_add_ps(a.0, b.0), _mm256_add_ps(a.1, b.1)) }
    }
    #[inline(always)]
    unsafe fn sub(a: Pair, b: Pair) -> Pair {
        unsafe { Pair(_mm256_sub_ps(a.0, b.0), _mm256_sub_ps(a.1, b.1)) }
    }
    #[inline(always)]
    unsafe fn mul(a: Pair, b: Pair) -> Pair {
        unsafe { Pair(_mm256_mul_ps(a.0, b.0), _mm256_mul_ps(a.1, b.1)) }
    }
    #[inline(always)]
    unsafe fn div(a: Pair, b: Pair) -> Pair {
        unsafe { Pair(_mm256_div_ps(a.0, b.0), _mm256_div_ps(a.1, b.1)) }
    }
    #[inline(always)]
    unsafe fn fma(a: Pair, b: Pair, c: Pair) -> Pair {
        unsafe { Pair(_mm256_fmadd_ps(a.0, b.0, c.0), _mm256_fmadd_ps(a.1, b.1, c.1)) }
    }
    #[inline(always)]
    unsafe fn max(a: Pair, b: Pair) -> Pair {
        unsafe { Pair(_mm256_max_ps(a.0, b.0), _mm256_max_ps(a.1, b.1)) }
    }
    #[inline(always)]
    unsafe fn min(a: Pair, b: Pair) -> Pair {
        unsafe { Pair(_mm256_min_ps(a.0, b.0), _mm256_min_ps(a.1, b.1)) }
    }
    #[inline(always)]
    unsafe fn round(a: Pair) -> Pair {
        const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        unsafe { Pair(_mm256_round_ps::<NEAREST>(a.0), _mm256_round_ps::<NEAREST>(a.1)) }
    }
    #[inline(always)]
    unsafe fn exp2_int(n: Pair) -> Pair {
        #[inline(always)]
        unsafe fn half(n: __m256) -> __m256 {
            unsafe {
                let exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent))
            }
        }
        unsafe { Pair(half(n.0), half(n.1)) }
    }
    #[inline(always)]
    unsafe fn select(mask: u16, a: Pair, b: Pair) -> Pair {
        unsafe {
            let low = _mm256_blendv_ps(b.0, a.0, lane_mask(mask));
            Pair(low, _mm256_blendv_ps(b.1, a.1, lane_mask(mask >> 8)))
        }
    }
    #[inline(always)]
    unsafe fn lt_mask(a: Pair, b: Pair) -> u16 {
        unsafe {
            let low = _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(a.0, b.0)) as u16;
            let high = _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(a.1, b.1)) as u16;
            low | (high << 8)
        }
    }
    #[inline(always)]
    unsafe fn reduce_add(a: Pair) -> f32 {
        unsafe { sum8(_mm256_add_ps(a.0, a.1)) }
    }
    #[inline(always)]
    unsafe fn reduce_max(a: Pair) -> f32 {
        unsafe {
            let eight = _mm256_max_ps(a.0, a.1);
            let high = _mm256_extractf128_ps::<1>(eight);
            let four = _mm_max_ps(_mm256_castps256_ps128(eight), high);
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps::<1>(two, two)))
        }
    }
    #[inline(always)]
    unsafe fn reduce_min(a: Pair) -> f32 {
        unsafe {
            let eight = _mm256_min_ps(a.0, a.1);
            let high = _mm256_extractf128_ps::<1>(eight);
            let four = _mm_min_ps(_mm256_castps256_ps128(eight), high);
            let two = _mm_min_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_min_ss(two, _mm_shuffle_ps::<1>(two, two)))
        }
    }
    #[inline(always)]
    unsafe fn store_u8(p: *mut u8, x: Pair) {
        unsafe {
            // Packing works within 128-bit halves; the permutation puts the quarters in order.
            let words = _mm256_packs_epi32(_mm256_cvtps_epi32(x.0), _mm256_cvtps_epi32(x.1));
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(words);
            let high = _mm256_extracti128_si256::<1>(words);
            _mm_storeu_si128(p.cast(), _mm_packus_epi16(_mm256_castsi256_si128(words), high));
        }
    }
}
