//! AVX2 kernels: `vpmaddubsw` into 16-bit sums for as many steps as the code width allows.
//!
//! A pair of products is at most 2 × 127 × (2^bits - 1): 3,810 for 4 bits, so eight steps (a whole group)
//! fit an i16; 7,874 and four steps for 5 bits; 16,002 and two steps for 6 bits. Codes of 8 bits are
//! taken as signed: |w| × (x with the sign of w) is at most 2 × 128 × 127 = 32,512, one step.

#![allow(clippy::needless_range_loop)] // `row` indexes registers, rows and views alike

use super::format::WeightFormat;
use super::kernel::{
    self, Accumulators, MatmulTier, PanelFormat, Slab, in_runs, scales_and_minima, unrolled,
};
use super::packed::{PANEL_ROWS, STEP_CODES};
use super::quantized::TileView;
use crate::simd::Simd;
use crate::simd::avx2::{Avx2, Pair};
use std::arch::x86_64::*;
use std::ops::Range;

/// Lanes 0..8 and 8..16 of sixteen integer sums.
type Sums = [__m256i; 2];

// SAFETY of every block below: the trait's contract: the caller has the features and valid pointers.
#[allow(clippy::undocumented_unsafe_blocks)]
impl MatmulTier for Avx2 {
    fn packed_rows<P: PanelFormat>() -> usize {
        24
    }

    unsafe fn unpack<P: PanelFormat>(panel: *const u8, groups: Range<usize>, slab: &mut Slab) {
        unsafe { unpack::<P>(panel, groups, slab) }
    }
    unsafe fn int8_tile<P: PanelFormat>(
        slab: &Slab,
        groups: usize,
        x: TileView,
        rows: usize,
        out: &mut Accumulators,
    ) {
        unsafe {
            in_runs!(rows, [6 3 2 1], |first, R| {
                int8_rows::<P, R>(slab, groups, x, first, &mut out.0[first..first + R])
            });
        }
    }
    unsafe fn int8_packed<P: PanelFormat>(
        panel: *const u8,
        groups: Range<usize>,
        x: TileView,
        rows: usize,
        out: &mut Accumulators,
    ) {
        unsafe {
            in_runs!(rows, [6 4 3 2 1], |first, R| {
                int8_packed::<P, R>(panel, groups.clone(), x, first, &mut out.0[first..first + R])
            });
        }
    }
    unsafe fn dequantize<P: PanelFormat>(panel: *const u8, groups: Range<usize>, out: *mut f32) {
        unsafe { dequantize::<P>(panel, groups, out) }
    }
    unsafe fn widen(format: WeightFormat, panel: *const u8, k: Range<usize>, out: *mut f32) {
        unsafe { widen(format, panel, k, out) }
    }
    unsafe fn f32_tile(
        weights: *const f32,
        k: usize,
        x: *const f32,
        stride: usize,
        rows: usize,
        out: &mut Accumulators,
    ) {
        unsafe {
            in_runs!(rows, [6 3 2 1], |first, R| {
                let x = x.add(first * stride);
                f32_rows::<R>(weights, k, x, stride, &mut out.0[first..first + R])
            });
        }
    }
}

/// Steps whose products fit a 16-bit sum; see the module.
const fn steps_per_sum<P: PanelFormat>() -> usize {
    match P::LAYOUT.bits {
        4 => 8,
        5 => 4,
        6 => 2,
        _ => 1,
    }
}

/// Unsigned codes of half a step, rows 0..8 or 8..16, `[8 rows][4 k]`.
///
/// # Safety
/// Needs the tier; `codes` points to a group's codes.
#[inline(always)]
unsafe fn step_codes<P: PanelFormat>(codes: *const u8, step: usize, half: usize) -> __m256i {
    // SAFETY: the caller's promises; offsets inside the group.
    unsafe {
        let codes = codes.add(STEP_CODES / 2 * half);
        if P::LAYOUT.bits == 8 {
            return _mm256_loadu_si256(codes.add(step * STEP_CODES).cast());
        }
        let pair = _mm256_loadu_si256(codes.add(step / 2 * STEP_CODES).cast());
        let low = _mm256_and_si256(shift_right(pair, 4 * (step as i32 % 2)), splat_byte(15));
        if P::LAYOUT.bits == 4 {
            return low;
        }
        let high = _mm256_loadu_si256(codes.add(P::LAYOUT.low_bytes).cast());
        let (bit, mask) = if P::LAYOUT.bits == 5 { (step, 0x10) } else { (2 * step, 0x30) };
        let high = _mm256_and_si256(shift_right(high, bit as i32 - 4), splat_byte(mask));
        _mm256_or_si256(low, high)
    }
}

/// As the kernels multiply them: codes of 8 bits signed, others unsigned.
///
/// # Safety
/// As [`step_codes`].
#[inline(always)]
unsafe fn factor_codes<P: PanelFormat>(codes: *const u8, step: usize, half: usize) -> __m256i {
    // SAFETY: the caller's promises.
    unsafe {
        let codes = step_codes::<P>(codes, step, half);
        if P::LAYOUT.bits == 8 { _mm256_xor_si256(codes, splat_byte(-128)) } else { codes }
    }
}

/// Shifts 16-bit lanes right, or left by a negative count.
#[inline(always)]
unsafe fn shift_right(x: __m256i, count: i32) -> __m256i {
    // SAFETY: the caller has the tier.
    unsafe {
        match count {
            0 => x,
            1.. => _mm256_srl_epi16(x, _mm_cvtsi32_si128(count)),
            _ => _mm256_sll_epi16(x, _mm_cvtsi32_si128(-count)),
        }
    }
}

#[inline(always)]
unsafe fn splat_byte(byte: i8) -> __m256i {
    // SAFETY: the caller has the tier.
    unsafe { _mm256_set1_epi8(byte) }
}

/// Four activation codes in every lane.
#[inline(always)]
unsafe fn splat_step(codes: *const i8) -> __m256i {
    // SAFETY: four bytes are readable; the caller has the tier.
    unsafe { _mm256_set1_epi32(codes.cast::<i32>().read_unaligned()) }
}

/// Products of a step, pairs added, in 16-bit lanes.
#[inline(always)]
unsafe fn multiply<P: PanelFormat>(w: __m256i, x: __m256i) -> __m256i {
    // SAFETY: the caller has the tier.
    unsafe {
        if P::LAYOUT.bits == 8 {
            _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w))
        } else {
            _mm256_maddubs_epi16(w, x)
        }
    }
}

/// Pairs of 16-bit sums added to 32 bits.
#[inline(always)]
unsafe fn widen_sums(sums: __m256i) -> __m256i {
    // SAFETY: the caller has the tier.
    unsafe { _mm256_madd_epi16(sums, _mm256_set1_epi16(1)) }
}

/// # Safety
/// See [`MatmulTier::unpack`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn unpack<P: PanelFormat>(panel: *const u8, groups: Range<usize>, slab: &mut Slab) {
    let mut to: *mut u8 = slab.codes.as_mut_ptr().cast();
    for (index, group) in groups.enumerate() {
        // SAFETY: the group lies in the panel, the slab has room for it.
        unsafe {
            let codes = panel.add(P::LAYOUT.codes_offset(group));
            kernel::prefetch_group::<P>(codes);
            unrolled!(step in 0..P::STEPS, {
                for half in 0..2 {
                    let to = to.add(step * STEP_CODES + half * STEP_CODES / 2);
                    _mm256_store_si256(to.cast(), factor_codes::<P>(codes, step, half));
                }
            });
            to = to.add(P::STEPS * STEP_CODES);
            let (scales, minima) = scales_and_minima::<Avx2, P>(panel, group);
            Avx2::store(slab.scales.as_mut_ptr().cast::<f32>().add(index * PANEL_ROWS), scales);
            if P::ASYMMETRIC {
                let to = slab.minima.as_mut_ptr().cast::<f32>().add(index * PANEL_ROWS);
                Avx2::store(to, minima);
            }
        }
    }
}

/// Where the sums of a row start: minus the zero point times the sum of its codes.
///
/// # Safety
/// Needs the tier; the view holds the group.
#[inline(always)]
unsafe fn first_sums<P: PanelFormat>(x: &TileView, group: usize, row: usize) -> __m256i {
    // SAFETY: the caller's promises.
    unsafe {
        if P::ASYMMETRIC || P::LAYOUT.bits == 8 {
            return _mm256_setzero_si256();
        }
        let sums = if P::GROUPS_PER_SCALE == 1 { x.negative_sums } else { x.negative_half_sums };
        let sum = _mm256_set1_epi32(*sums.add(group * x.width + row));
        _mm256_sll_epi32(sum, _mm_cvtsi32_si128(P::ZERO_SHIFT))
    }
}

/// Adds a group's integer sums to the f32 accumulators, which stay in level-1 cache: the registers are
/// full.
///
/// # Safety
/// Needs the tier; the view holds the group, `out` R rows.
#[inline(always)]
unsafe fn add_groups<P: PanelFormat, const R: usize>(
    sums: [Sums; R],
    (scales, minima): (Pair, Pair),
    x: &TileView,
    group: usize,
    first: usize,
    out: &mut [[f32; PANEL_ROWS]],
) {
    for row in 0..R {
        let at = group / P::GROUPS_PER_SCALE * x.width + first + row;
        // SAFETY: the caller's promises.
        unsafe {
            let [low, high] = sums[row];
            let sums = Pair(_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high));
            let scales = Avx2::mul(scales, Avx2::splat(*x.scales.add(at)));
            let mut floats = Avx2::fma(scales, sums, Avx2::load(out[row].as_ptr()));
            if P::ASYMMETRIC {
                floats = Avx2::fma(minima, Avx2::splat(*x.scaled_sums.add(at)), floats);
            }
            Avx2::store(out[row].as_mut_ptr(), floats);
        }
    }
}

/// Integer sums of one group, `R` rows from row `first` of a tile; `codes(step, half)` gives the weights.
/// Six rows take 12 sums, two vectors of codes and one of activations of the 16 registers.
///
/// # Safety
/// Needs the tier; the view holds the group.
#[inline(always)]
unsafe fn group_sums<P: PanelFormat, const R: usize>(
    codes: impl Fn(usize, usize) -> __m256i,
    x: &TileView,
    group: usize,
    first: usize,
) -> [Sums; R] {
    // SAFETY: the caller's promises.
    unsafe {
        let mut sums = [[_mm256_setzero_si256(); 2]; R];
        for row in 0..R {
            sums[row] = [first_sums::<P>(x, group, first + row); 2];
        }
        let x_codes = x.codes.add((group * P::STEPS * x.width + first) * 4);
        for run in (0..P::STEPS).step_by(steps_per_sum::<P>()) {
            let mut short = [[_mm256_setzero_si256(); 2]; R];
            for step in run..run + steps_per_sum::<P>() {
                let halves = [codes(step, 0), codes(step, 1)];
                for row in 0..R {
                    let x = splat_step(x_codes.add((step * x.width + row) * 4));
                    for half in 0..2 {
                        let products = multiply::<P>(halves[half], x);
                        short[row][half] = _mm256_add_epi16(short[row][half], products);
                    }
                }
            }
            for row in 0..R {
                for half in 0..2 {
                    let wide = widen_sums(short[row][half]);
                    sums[row][half] = _mm256_add_epi32(sums[row][half], wide);
                }
            }
        }
        sums
    }
}

/// `R` rows from row `first` of a tile times a slab.
///
/// # Safety
/// See [`MatmulTier::int8_tile`]; `out` holds R rows.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn int8_rows<P: PanelFormat, const R: usize>(
    slab: &Slab,
    groups: usize,
    x: TileView,
    first: usize,
    out: &mut [[f32; PANEL_ROWS]],
) {
    // SAFETY: the slab and the view hold `groups` groups, `out` R rows.
    unsafe {
        for group in 0..groups {
            let w: *const u8 = slab.codes.as_ptr().cast();
            let w = w.add(group * P::STEPS * STEP_CODES);
            let codes = |step: usize, half: usize| {
                _mm256_load_si256(w.add(step * STEP_CODES + half * STEP_CODES / 2).cast())
            };
            let sums = group_sums::<P, R>(codes, &x, group, first);
            let scales = Avx2::load(slab.scales.as_ptr().cast::<f32>().add(group * PANEL_ROWS));
            let minima = if P::ASYMMETRIC {
                Avx2::load(slab.minima.as_ptr().cast::<f32>().add(group * PANEL_ROWS))
            } else {
                Avx2::splat(0.0)
            };
            add_groups::<P, R>(sums, (scales, minima), &x, group, first, out);
        }
    }
}

/// `R` rows from row `first` of a tile times a packed panel.
///
/// # Safety
/// See [`MatmulTier::int8_packed`]; `out` holds R rows.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn int8_packed<P: PanelFormat, const R: usize>(
    panel: *const u8,
    groups: Range<usize>,
    x: TileView,
    first: usize,
    out: &mut [[f32; PANEL_ROWS]],
) {
    // SAFETY: the panel and the view hold `groups` groups, `out` R rows.
    unsafe {
        for group in groups {
            let planes = panel.add(P::LAYOUT.codes_offset(group));
            kernel::prefetch_group::<P>(planes);
            let codes = |step: usize, half: usize| factor_codes::<P>(planes, step, half);
            let sums = group_sums::<P, R>(codes, &x, group, first);
            let side = scales_and_minima::<Avx2, P>(panel, group);
            add_groups::<P, R>(sums, side, &x, group, first, out);
        }
    }
}

/// # Safety
/// See [`MatmulTier::dequantize`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dequantize<P: PanelFormat>(panel: *const u8, groups: Range<usize>, out: *mut f32) {
    let store_codes = |codes: *const u8, step: usize, to: *mut u8| {
        // SAFETY: `codes` is a group of the panel, `to` takes 64 bytes.
        unsafe {
            _mm256_storeu_si256(to.cast(), step_codes::<P>(codes, step, 0));
            _mm256_storeu_si256(to.add(32).cast(), step_codes::<P>(codes, step, 1));
        }
    };
    // SAFETY: the caller's promises.
    unsafe { kernel::dequantize::<Avx2, P>(panel, groups, out, store_codes) }
}

/// # Safety
/// See [`MatmulTier::widen`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn widen(format: WeightFormat, panel: *const u8, k: Range<usize>, out: *mut f32) {
    // SAFETY: the caller's promises.
    unsafe { kernel::widen::<Avx2>(format, panel, k, out) }
}

/// # Safety
/// See [`MatmulTier::f32_tile`]; `out` holds R rows.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn f32_rows<const R: usize>(
    weights: *const f32,
    k: usize,
    x: *const f32,
    stride: usize,
    out: &mut [[f32; PANEL_ROWS]],
) {
    // SAFETY: the caller's promises.
    unsafe { kernel::f32_rows::<Avx2, R>(weights, k, x, stride, out) }
}
