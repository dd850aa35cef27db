//! Page encoding over sixteen lanes; the same bits as [`super::scalar`].

use super::{NotFinite, Run};
use crate::simd::{LANES, Simd, avx2::Avx2, avx512::Avx512};
use reef_kv::page::{PageFormat, PageShape};

/// Largest finite f16.
const HALF_MAX: f32 = 65504.0;

/// # Safety
/// Needs the tier of `S`; `page`, `slot`, `k`, `v` as [`super::write_kv`] checks.
#[inline(always)]
unsafe fn write_kv<S: Simd>(shape: &PageShape, page: &mut [u8], slot: usize, k: &[f32], v: &[f32]) {
    let (dim, group) = (shape.head_dim, shape.key_group());
    let first_key = slot / group * dim * group + slot % group;
    for head in 0..shape.kv_heads {
        let at = shape.head(PageFormat::F16, head);
        // SAFETY: the layout keeps every offset inside the page, whose length the caller checked.
        unsafe {
            let keys = page.as_mut_ptr().add(at.k).cast::<u16>().add(first_key);
            let values = page.as_mut_ptr().add(at.v).cast::<u16>().add(slot * dim);
            for channel in (0..dim).step_by(LANES) {
                let mut halves = [0u16; LANES];
                let input = head * dim + channel;
                S::store_f16(halves.as_mut_ptr(), clamped::<S>(k.as_ptr().add(input)));
                for (lane, half) in halves.iter().enumerate() {
                    keys.add((channel + lane) * group).write_unaligned(*half);
                }
                S::store_f16(values.add(channel), clamped::<S>(v.as_ptr().add(input)));
            }
        }
    }
}

/// # Safety
/// Needs the tier of `S`; `x` valid for sixteen reads.
#[inline(always)]
unsafe fn clamped<S: Simd>(x: *const f32) -> S::F {
    // The order of the arguments lets a NaN through: a comparison with NaN picks the second.
    // SAFETY: the caller's contract.
    unsafe { S::max(S::splat(-HALF_MAX), S::min(S::splat(HALF_MAX), S::load(x))) }
}

/// # Safety
/// Needs the tier of `S`; offsets of `run` inside `src` and `dst`.
#[inline(always)]
unsafe fn quantize<S: Simd, const VECTORS: usize>(
    run: Run,
    src: &[u8],
    dst: &mut [u8],
) -> Result<(), NotFinite> {
    // SAFETY: sixteen rows or fewer at a time, each `VECTORS * 16 = run.width` values, all inside the
    // offsets that the caller checked; short batches of scales go through arrays of sixteen.
    unsafe {
        // x * 0 is 0 for finite x and NaN otherwise, and NaN stays in the sum.
        let mut poison = S::splat(0.0);
        for first in (0..run.rows).step_by(LANES) {
            let rows = LANES.min(run.rows - first);
            let halves = src.as_ptr().add(run.halves).cast::<u16>().add(first * run.width);
            let (mut minima, mut maxima) = ([0f32; LANES], [0f32; LANES]);
            for row in 0..rows {
                let values: [S::F; VECTORS] =
                    std::array::from_fn(|i| S::load_f16(halves.add(row * run.width + i * LANES)));
                let (mut low, mut high) = (values[0], values[0]);
                for value in values {
                    poison = S::fma(value, S::splat(0.0), poison);
                    low = S::min(low, value);
                    high = S::max(high, value);
                }
                minima[row] = S::reduce_min(low);
                maxima[row] = S::reduce_max(high);
            }
            let (mut scale_halves, mut min_halves) = ([0u16; LANES], [0u16; LANES]);
            let inverse = scales::<S>(&minima, &maxima, &mut scale_halves, &mut min_halves);
            let codes = dst.as_mut_ptr().add(run.codes + first * run.width);
            for row in 0..rows {
                for i in (0..run.width).step_by(LANES) {
                    let value = S::load_f16(halves.add(row * run.width + i));
                    let offset = S::sub(value, S::splat(minima[row]));
                    let code = S::mul(offset, S::splat(inverse[row]));
                    S::store_u8(codes.add(row * run.width + i), S::min(code, S::splat(255.0)));
                }
            }
            let at = |part: usize| part + 2 * first..part + 2 * (first + rows);
            dst[at(run.scales)].copy_from_slice(bytemuck::cast_slice(&scale_halves[..rows]));
            dst[at(run.minima)].copy_from_slice(bytemuck::cast_slice(&min_halves[..rows]));
        }
        if S::lt_mask(poison, S::splat(1.0)) == u16::MAX { Ok(()) } else { Err(NotFinite) }
    }
}

/// Scales and minima of sixteen rows as f16, and `1 / scale` (0 for a scale of 0).
///
/// # Safety
/// Needs the tier of `S`.
#[inline(always)]
unsafe fn scales<S: Simd>(
    minima: &[f32; LANES],
    maxima: &[f32; LANES],
    scale_halves: &mut [u16; LANES],
    min_halves: &mut [u16; LANES],
) -> [f32; LANES] {
    // SAFETY: all arrays hold sixteen elements.
    unsafe {
        let zero = S::splat(0.0);
        let min = S::load(minima.as_ptr());
        let range = S::sub(S::load(maxima.as_ptr()), min);
        S::store_f16(scale_halves.as_mut_ptr(), S::div(range, S::splat(255.0)));
        let nearest = S::load_f16(scale_halves.as_ptr());
        let mut short = S::lt_mask(S::mul(nearest, S::splat(255.5)), range);
        while short != 0 {
            let lane = short.trailing_zeros() as usize;
            // A page with NaN or Inf ends in an error; wrapping keeps its garbage from panicking.
            scale_halves[lane] = scale_halves[lane].wrapping_add(1);
            short &= short - 1;
        }
        S::store_f16(min_halves.as_mut_ptr(), S::add(min, zero));
        let scale = S::load_f16(scale_halves.as_ptr());
        let some = S::lt_mask(zero, scale);
        let mut inverse = [0f32; LANES];
        S::store(inverse.as_mut_ptr(), S::select(some, S::div(S::splat(1.0), scale), zero));
        inverse
    }
}

/// # Safety
/// Needs the tier of `S`; offsets of `run` inside `src` and `dst`.
#[inline(always)]
unsafe fn quantize_width<S: Simd>(run: Run, src: &[u8], dst: &mut [u8]) -> Result<(), NotFinite> {
    // SAFETY: the caller's contract.
    unsafe {
        if run.width == 2 * LANES {
            quantize::<S, 2>(run, src, dst)
        } else {
            quantize::<S, 1>(run, src, dst)
        }
    }
}

macro_rules! tier {
    ($simd:ty, $features:literal, $write:ident, $quantize:ident) => {
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
            unsafe { write_kv::<$simd>(shape, page, slot, k, v) }
        }

        /// # Safety
        /// Needs the features named below; offsets of `run` inside `src` and `dst`.
        #[target_feature(enable = $features)]
        pub(super) unsafe fn $quantize(
            run: Run,
            src: &[u8],
            dst: &mut [u8],
        ) -> Result<(), NotFinite> {
            // SAFETY: the features are enabled here; the rest is the caller's contract.
            unsafe { quantize_width::<$simd>(run, src, dst) }
        }
    };
}

tier!(Avx2, "avx2,fma,f16c", write_kv_avx2, quantize_avx2);
tier!(
    Avx512,
    "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni",
    write_kv_avx512,
    quantize_avx512
);
