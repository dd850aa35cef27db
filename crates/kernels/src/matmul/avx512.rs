//! AVX-512 VNNI kernels: one `vpdpbusd` eats a step of sixteen output rows.

#![allow(clippy::needless_range_loop)] // `row` indexes registers, rows and views alike

use super::format::WeightFormat;
use super::kernel::{
    self, Accumulators, MatmulTier, PanelFormat, Slab, in_runs, scales_and_minima, unrolled,
};
use super::packed::{PANEL_ROWS, STEP_CODES};
use super::quantized::TileView;
use crate::simd::{Simd, avx512::Avx512};
use std::arch::x86_64::*;
use std::ops::Range;

// SAFETY of every block below: the trait's contract: the caller has the features and valid pointers.
#[allow(clippy::undocumented_unsafe_blocks)]
impl MatmulTier for Avx512 {
    fn packed_rows<P: PanelFormat>() -> usize {
        // Codes in one plane are decoded in the shadow of the products, however many rows there are.
        if matches!(P::LAYOUT.bits, 5 | 6) { 48 } else { usize::MAX }
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
            in_runs!(rows, [12 8 6 4 3 2 1], |first, R| {
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
            in_runs!(rows, [12 10 8 6 4 3 2 1], |first, R| {
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
            in_runs!(rows, [12 6 3 2 1], |first, R| {
                let x = x.add(first * stride);
                f32_rows::<R>(weights, k, x, stride, &mut out.0[first..first + R])
            });
        }
    }
}

/// Unsigned codes of one step, `[16 rows][4 k]`.
///
/// # Safety
/// Needs the tier; `codes` points to a group's codes.
#[inline(always)]
unsafe fn step_codes<P: PanelFormat>(codes: *const u8, step: usize) -> __m512i {
    // SAFETY: the caller's promises; offsets inside the group.
    unsafe {
        if P::LAYOUT.bits == 8 {
            return _mm512_loadu_si512(codes.add(step * STEP_CODES).cast());
        }
        let pair = _mm512_loadu_si512(codes.add(step / 2 * STEP_CODES).cast());
        let low = _mm512_and_si512(shift_right(pair, 4 * (step as i32 % 2)), splat_byte(15));
        if P::LAYOUT.bits == 4 {
            return low;
        }
        let high = _mm512_loadu_si512(codes.add(P::LAYOUT.low_bytes).cast());
        let (bit, mask) = if P::LAYOUT.bits == 5 { (step, 0x10) } else { (2 * step, 0x30) };
        let high = _mm512_and_si512(shift_right(high, bit as i32 - 4), splat_byte(mask));
        _mm512_or_si512(low, high)
    }
}

/// Shifts 16-bit lanes right, or left by a negative count.
#[inline(always)]
unsafe fn shift_right(x: __m512i, count: i32) -> __m512i {
    // SAFETY: the caller has the tier.
    unsafe {
        match count {
            0 => x,
            1.. => _mm512_srl_epi16(x, _mm_cvtsi32_si128(count)),
            _ => _mm512_sll_epi16(x, _mm_cvtsi32_si128(-count)),
        }
    }
}

#[inline(always)]
unsafe fn splat_byte(byte: i8) -> __m512i {
    // SAFETY: the caller has the tier.
    unsafe { _mm512_set1_epi8(byte) }
}

/// Four activation codes in every lane.
#[inline(always)]
unsafe fn splat_step(codes: *const i8) -> __m512i {
    // SAFETY: four bytes are readable; the caller has the tier.
    unsafe { _mm512_set1_epi32(codes.cast::<i32>().read_unaligned()) }
}

/// # Safety
/// See [`MatmulTier::unpack`].
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn unpack<P: PanelFormat>(panel: *const u8, groups: Range<usize>, slab: &mut Slab) {
    let mut to: *mut u8 = slab.codes.as_mut_ptr().cast();
    for (index, group) in groups.enumerate() {
        // SAFETY: the group lies in the panel, the slab has room for it.
        unsafe {
            let codes = panel.add(P::LAYOUT.codes_offset(group));
            kernel::prefetch_group::<P>(codes);
            unrolled!(step in 0..P::STEPS, {
                _mm512_store_si512(to.add(step * STEP_CODES).cast(), step_codes::<P>(codes, step));
            });
            to = to.add(P::STEPS * STEP_CODES);
            let (scales, minima) = scales_and_minima::<Avx512, P>(panel, group);
            Avx512::store(slab.scales.as_mut_ptr().cast::<f32>().add(index * PANEL_ROWS), scales);
            if P::ASYMMETRIC {
                let to = slab.minima.as_mut_ptr().cast::<f32>().add(index * PANEL_ROWS);
                Avx512::store(to, minima);
            }
        }
    }
}

/// Where the sums of a row start: minus the zero point times the sum of its codes.
///
/// # Safety
/// Needs the tier; the view holds the group.
#[inline(always)]
unsafe fn first_sums<P: PanelFormat>(x: &TileView, group: usize, row: usize) -> __m512i {
    // SAFETY: the caller's promises.
    unsafe {
        if P::ASYMMETRIC {
            return _mm512_setzero_si512();
        }
        let sums = if P::GROUPS_PER_SCALE == 1 { x.negative_sums } else { x.negative_half_sums };
        let sum = _mm512_set1_epi32(*sums.add(group * x.width + row));
        _mm512_sll_epi32(sum, _mm_cvtsi32_si128(P::ZERO_SHIFT))
    }
}

/// Adds a group's integer sums of a row to its f32 accumulators.
///
/// # Safety
/// Needs the tier; the view holds the group.
#[inline(always)]
unsafe fn add_group<P: PanelFormat>(
    out: __m512,
    sums: __m512i,
    (scales, minima): (__m512, __m512),
    x: &TileView,
    group: usize,
    row: usize,
) -> __m512 {
    let at = group / P::GROUPS_PER_SCALE * x.width + row;
    // SAFETY: the caller's promises.
    unsafe {
        let scales = _mm512_mul_ps(scales, _mm512_set1_ps(*x.scales.add(at)));
        let out = _mm512_fmadd_ps(scales, _mm512_cvtepi32_ps(sums), out);
        if P::ASYMMETRIC {
            _mm512_fmadd_ps(minima, _mm512_set1_ps(*x.scaled_sums.add(at)), out)
        } else {
            out
        }
    }
}

/// `R` rows from row `first` of a tile times a slab. With twelve rows, 12 integer and 12 float
/// accumulators, the codes, scales and minima fill 27 of 32 registers.
///
/// # Safety
/// See [`MatmulTier::int8_tile`]; `out` holds R rows.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn int8_rows<P: PanelFormat, const R: usize>(
    slab: &Slab,
    groups: usize,
    x: TileView,
    first: usize,
    out: &mut [[f32; PANEL_ROWS]],
) {
    // SAFETY: the slab and the view hold `groups` groups, `out` R rows.
    unsafe {
        let mut w: *const u8 = slab.codes.as_ptr().cast();
        let mut x_codes = x.codes.add(4 * first);
        let mut floats = [_mm512_setzero_ps(); R];
        for row in 0..R {
            floats[row] = _mm512_loadu_ps(out[row].as_ptr());
        }
        for group in 0..groups {
            let mut sums = [_mm512_setzero_si512(); R];
            for row in 0..R {
                sums[row] = first_sums::<P>(&x, group, first + row);
            }
            for _ in 0..P::STEPS {
                let codes = _mm512_load_si512(w.cast());
                for row in 0..R {
                    sums[row] =
                        _mm512_dpbusd_epi32(sums[row], codes, splat_step(x_codes.add(4 * row)));
                }
                w = w.add(STEP_CODES);
                x_codes = x_codes.add(4 * x.width);
            }
            let scales = Avx512::load(slab.scales.as_ptr().cast::<f32>().add(group * PANEL_ROWS));
            let minima = if P::ASYMMETRIC {
                Avx512::load(slab.minima.as_ptr().cast::<f32>().add(group * PANEL_ROWS))
            } else {
                _mm512_setzero_ps()
            };
            for row in 0..R {
                let side = (scales, minima);
                floats[row] = add_group::<P>(floats[row], sums[row], side, &x, group, first + row);
            }
        }
        for row in 0..R {
            _mm512_storeu_ps(out[row].as_mut_ptr(), floats[row]);
        }
    }
}

/// `R` rows from row `first` of a tile times a packed panel. Few rows take two chains of integer sums to
/// hide the latency of `vpdpbusd`; they are exact, so their order is free. Twelve rows take one, and 28
/// registers.
///
/// # Safety
/// See [`MatmulTier::int8_packed`]; `out` holds R rows.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn int8_packed<P: PanelFormat, const R: usize>(
    panel: *const u8,
    groups: Range<usize>,
    x: TileView,
    first: usize,
    out: &mut [[f32; PANEL_ROWS]],
) {
    // SAFETY: the panel and the view hold `groups` groups, `out` R rows.
    unsafe {
        let mut floats = [_mm512_setzero_ps(); R];
        for row in 0..R {
            floats[row] = _mm512_loadu_ps(out[row].as_ptr());
        }
        for group in groups {
            let codes = panel.add(P::LAYOUT.codes_offset(group));
            kernel::prefetch_group::<P>(codes);
            let x_codes = x.codes.add((group * P::STEPS * x.width + first) * 4);
            let two_chains = R < 8;
            let mut chains = [[_mm512_setzero_si512(); R]; 2];
            for row in 0..R {
                chains[0][row] = first_sums::<P>(&x, group, first + row);
            }
            unrolled!(step in 0..P::STEPS, {
                let codes = step_codes::<P>(codes, step);
                let sums = &mut chains[if two_chains { step % 2 } else { 0 }];
                for row in 0..R {
                    let x = splat_step(x_codes.add((step * x.width + row) * 4));
                    sums[row] = _mm512_dpbusd_epi32(sums[row], codes, x);
                }
            });
            let side = scales_and_minima::<Avx512, P>(panel, group);
            for row in 0..R {
                let mut sums = chains[0][row];
                if two_chains {
                    sums = _mm512_add_epi32(sums, chains[1][row]);
                }
                floats[row] = add_group::<P>(floats[row], sums, side, &x, group, first + row);
            }
        }
        for row in 0..R {
            _mm512_storeu_ps(out[row].as_mut_ptr(), floats[row]);
        }
    }
}

/// # Safety
/// See [`MatmulTier::dequantize`].
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn dequantize<P: PanelFormat>(panel: *const u8, groups: Range<usize>, out: *mut f32) {
    let store_codes = |codes: *const u8, step: usize, to: *mut u8| {
        // SAFETY: `codes` is a group of the panel, `to` takes 64 bytes.
        unsafe { _mm512_storeu_si512(to.cast(), step_codes::<P>(codes, step)) }
    };
    // SAFETY: the caller's promises.
    unsafe { kernel::dequantize::<Avx512, P>(panel, groups, out, store_codes) }
}

/// # Safety
/// See [`MatmulTier::widen`].
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn widen(format: WeightFormat, panel: *const u8, k: Range<usize>, out: *mut f32) {
    // SAFETY: the caller's promises.
    unsafe { kernel::widen::<Avx512>(format, panel, k, out) }
}

/// # Safety
/// See [`MatmulTier::f32_tile`]; `out` holds R rows.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn f32_rows<const R: usize>(
    weights: *const f32,
    k: usize,
    x: *const f32,
    stride: usize,
    out: &mut [[f32; PANEL_ROWS]],
) {
    // SAFETY: the caller's promises.
    unsafe { kernel::f32_rows::<Avx512, R>(weights, k, x, stride, out) }
}
