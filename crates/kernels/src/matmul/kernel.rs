//! What a SIMD tier implements for matmul, and the loops around it that all tiers share.
//!
//! A panel meets the activations slab by slab: its codes are unpacked once into level-1 cache and meet
//! every tile of rows. Accumulators rest in the output between slabs, as f32 they lose nothing, so the
//! order of additions of an output is k ascending whatever the loops around it do.

use super::Output;
use super::format::WeightFormat;
use super::packed::{PANEL_ROWS, PackedMatrix, PanelLayout, STEP_CODES};
use super::quantized::{QuantizedRows, TILE_ROWS, TileView};
use crate::simd::Simd;
use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
use std::mem::MaybeUninit;
use std::ops::Range;

/// k per slab of the integer path: 32 KiB of codes and 8 KiB of scales.
const SLAB_K: usize = 2048;
/// k per slab of the f32 path: 16 KiB of weights.
const FLOAT_SLAB_K: usize = 256;
/// Activations that meet a chunk of panels before the next rows come: half of a small level-2 cache.
const BLOCK_BYTES: usize = 256 << 10;

/// How far ahead of the codes in work memory is asked for.
const PREFETCH_BYTES: usize = 4096;

/// A quantised format at compile time.
pub(super) trait PanelFormat: 'static {
    const FORMAT: WeightFormat;
    const LAYOUT: PanelLayout = PanelLayout::of(Self::FORMAT);
    /// Steps of four k per group.
    const STEPS: usize = Self::LAYOUT.group / 4;
    /// Groups that share an activation scale.
    const GROUPS_PER_SCALE: usize = 32 / Self::LAYOUT.group;
    /// Whether weights have a minimum; else they have a zero point, 2^`ZERO_SHIFT`.
    const ASYMMETRIC: bool = Self::LAYOUT.zero == 0;
    const ZERO_SHIFT: i32 = Self::LAYOUT.bits as i32 - 1;
}

macro_rules! panel_formats {
    ($($name:ident)*) => {
        $(
            #[allow(non_camel_case_types)]
            pub(super) struct $name;
            impl PanelFormat for $name {
                const FORMAT: WeightFormat = WeightFormat::$name;
            }
        )*
        /// Runs a generic function for a quantised format known at run time.
        macro_rules! with_panel_format {
            ($format:expr, $type:ident => $body:expr) => {
                match $format {
                    $(WeightFormat::$name => {
                        type $type = $name;
                        $body
                    })*
                    format => unreachable!("{format} has no integer path"),
                }
            };
        }
    };
}
panel_formats!(Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q4_K Q5_K Q6_K);

/// A slab of one panel, unpacked.
#[repr(align(64))]
pub(super) struct Slab {
    /// `[k / 4][16 rows][4 k]`; unsigned, or signed where the tier says so.
    pub codes: [MaybeUninit<u8>; SLAB_K * PANEL_ROWS],
    /// `[group][16 rows]`.
    pub scales: [MaybeUninit<f32>; SLAB_K],
    /// `[group][16 rows]`; only for formats with minima.
    pub minima: [MaybeUninit<f32>; SLAB_K / 2],
}

/// A slab of one panel as f32, `[k][16 rows]`; written and read through its address.
#[repr(align(64))]
#[allow(dead_code)]
struct FloatSlab([MaybeUninit<f32>; FLOAT_SLAB_K * PANEL_ROWS]);

/// Accumulators of a tile of rows.
#[repr(align(64))]
pub(super) struct Accumulators(pub [[f32; PANEL_ROWS]; TILE_ROWS]);

/// The kernels of a tier. Implementations forward to functions that enable the tier's features.
///
/// # Safety
/// Every method needs the tier's CPU features; `panel` holds the groups named; pointers in views are
/// valid for the k named.
pub(super) trait MatmulTier: Simd {
    /// Up to this many rows codes go from the packed panel to registers; beyond, unpacking to memory
    /// first is cheaper than to decode for every tile again.
    fn packed_rows<P: PanelFormat>() -> usize;

    /// Unpacks `groups` groups into a slab; a tier may take the offset of
    /// 128 off codes of 8 bits.
    /// # Safety
    /// See the trait; at most `SLAB_K` k.
    unsafe fn unpack<P: PanelFormat>(panel: *const u8, groups: Range<usize>, slab: &mut Slab);

    /// Adds the slab's `groups` groups to `rows` accumulators.
    /// # Safety
    /// See the trait; `rows` is at most the view's width.
    unsafe fn int8_tile<P: PanelFormat>(
        slab: &Slab,
        groups: usize,
        x: TileView,
        rows: usize,
        out: &mut Accumulators,
    );

    /// Adds the panel's `groups` to `rows` accumulators, straight from the packed bits; `x` starts at
    /// k = 0.
    /// # Safety
    /// See the trait; `rows` is at most the view's width.
    unsafe fn int8_packed<P: PanelFormat>(
        panel: *const u8,
        groups: Range<usize>,
        x: TileView,
        rows: usize,
        out: &mut Accumulators,
    );

    /// Dequantises `groups` groups to `[k][16 rows]`.
    /// # Safety
    /// See the trait; `out` takes 16 values per k.
    unsafe fn dequantize<P: PanelFormat>(panel: *const u8, groups: Range<usize>, out: *mut f32);

    /// Converts `k` in `[k][16 rows]` of F16, BF16 or F32 to f32.
    /// # Safety
    /// See the trait; `out` takes 16 values per k.
    unsafe fn widen(format: WeightFormat, panel: *const u8, k: Range<usize>, out: *mut f32);

    /// Adds `k` steps of f32 weights `[k][16 rows]` times rows `x`, `x + stride` ... to `rows`
    /// accumulators.
    /// # Safety
    /// See the trait; `rows` is at most 12.
    unsafe fn f32_tile(
        weights: *const f32,
        k: usize,
        x: *const f32,
        stride: usize,
        rows: usize,
        out: &mut Accumulators,
    );
}

/// A run of panels of one matrix times int8 rows.
///
/// # Safety
/// The CPU has the tier; the caller owns the output columns of these panels.
pub(super) unsafe fn int8_panels<T: MatmulTier>(
    weights: &PackedMatrix,
    panels: Range<usize>,
    x: &QuantizedRows,
    out: &Output,
) {
    // SAFETY: the caller's promises; the shapes were checked by `matmul`.
    unsafe {
        with_panel_format!(weights.format(), P => int8_blocks::<T, P>(weights, panels, x, out));
    }
}

/// # Safety
/// As [`int8_panels`].
unsafe fn int8_blocks<T: MatmulTier, P: PanelFormat>(
    weights: &PackedMatrix,
    panels: Range<usize>,
    x: &QuantizedRows,
    out: &Output,
) {
    let (width, cols) = (x.tile_width(), weights.cols());
    let tiles = x.rows().div_ceil(width);
    let tiles_per_block = (BLOCK_BYTES / (width * cols)).max(4);
    let packed = x.rows() <= T::packed_rows::<P>();
    let mut slab = MaybeUninit::<Slab>::uninit();
    // SAFETY: a Slab is made of MaybeUninit.
    let slab = unsafe { slab.assume_init_mut() };
    for first_tile in (0..tiles).step_by(tiles_per_block) {
        let block = first_tile..tiles.min(first_tile + tiles_per_block);
        for panel in panels.clone() {
            let bytes = weights.panel(panel).as_ptr();
            for first_k in (0..cols).step_by(SLAB_K) {
                let last_k = cols.min(first_k + SLAB_K);
                let groups = first_k / P::LAYOUT.group..last_k / P::LAYOUT.group;
                // SAFETY: the groups lie in the panel and fit the slab; tiles and columns exist.
                unsafe {
                    if !packed {
                        T::unpack::<P>(bytes, groups.clone(), slab);
                    }
                    for tile in block.clone() {
                        let rows = width.min(x.rows() - tile * width);
                        let place = Place { first_row: tile * width, rows, panel };
                        place.add(out, first_k == 0, |sums| {
                            if packed {
                                let view = x.tile(tile, 0);
                                T::int8_packed::<P>(bytes, groups.clone(), view, rows, sums);
                            } else {
                                let view = x.tile(tile, first_k);
                                T::int8_tile::<P>(slab, groups.len(), view, rows, sums);
                            }
                        });
                    }
                }
            }
        }
    }
}

/// A run of panels of one matrix times f32 rows `[rows, cols]`.
///
/// # Safety
/// The CPU has the tier; the caller owns the output columns of these panels.
pub(super) unsafe fn f32_panels<T: MatmulTier>(
    weights: &PackedMatrix,
    panels: Range<usize>,
    x: &[f32],
    out: &Output,
) {
    let cols = weights.cols();
    let rows = x.len() / cols;
    let mut slab = MaybeUninit::<FloatSlab>::uninit();
    let slab: *mut f32 = slab.as_mut_ptr().cast();
    for panel in panels {
        let bytes = weights.panel(panel).as_ptr();
        for first_k in (0..cols).step_by(FLOAT_SLAB_K) {
            let k = first_k..cols.min(first_k + FLOAT_SLAB_K);
            // SAFETY: k lies in the panel and fits the slab; rows and columns exist.
            unsafe {
                if weights.format().is_quantized() {
                    with_panel_format!(weights.format(), P => {
                        let groups = k.start / P::LAYOUT.group..k.end / P::LAYOUT.group;
                        T::dequantize::<P>(bytes, groups, slab);
                    });
                } else {
                    T::widen(weights.format(), bytes, k.clone(), slab);
                }
                for first_row in (0..rows).step_by(TILE_ROWS) {
                    let place = Place { first_row, rows: TILE_ROWS.min(rows - first_row), panel };
                    let x = x.as_ptr().add(first_row * cols + first_k);
                    place.add(out, first_k == 0, |sums| {
                        T::f32_tile(slab, k.len(), x, cols, place.rows, sums);
                    });
                }
            }
        }
    }
}

/// The outputs of one panel in a tile of rows.
struct Place {
    first_row: usize,
    rows: usize,
    panel: usize,
}

impl Place {
    /// Lets `add_slab` work on the accumulators: zeros for the first slab, else the sums so far.
    ///
    /// # Safety
    /// The rows and the panel exist and are the caller's alone.
    #[inline(always)]
    unsafe fn add(&self, out: &Output, first_slab: bool, add_slab: impl FnOnce(&mut Accumulators)) {
        let mut sums = Accumulators([[0.0; PANEL_ROWS]; TILE_ROWS]);
        // SAFETY: the caller's promises.
        unsafe {
            if !first_slab {
                for row in 0..self.rows {
                    out.load(self.first_row + row, self.panel, &mut sums.0[row]);
                }
            }
            add_slab(&mut sums);
            for row in 0..self.rows {
                out.store(self.first_row + row, self.panel, &sums.0[row]);
            }
        }
    }
}

/// Scales and minima of the sixteen rows in one group, exact.
///
/// # Safety
/// The CPU has the tier; the group lies in the panel.
#[inline(always)]
pub(super) unsafe fn scales_and_minima<S: Simd, P: PanelFormat>(
    panel: *const u8,
    group: usize,
) -> (S::F, S::F) {
    // SAFETY: offsets inside the group and its head.
    unsafe {
        let zero = S::splat(0.0);
        let side = panel.add(P::LAYOUT.group_offset(group));
        if P::LAYOUT.head_bytes == 0 {
            let tail = side.add(P::LAYOUT.low_bytes + P::LAYOUT.high_bytes);
            let minima = if P::ASYMMETRIC { S::load_f16(tail.add(32).cast()) } else { zero };
            return (S::load_f16(tail.cast()), minima);
        }
        let head = panel.add(P::LAYOUT.head_offset(group));
        let d = S::load_f16(head.cast());
        if !P::ASYMMETRIC {
            let signed = S::sub(S::load_u8(side), S::splat(128.0));
            return (S::mul(d, signed), zero);
        }
        let minima = S::mul(S::load_f16(head.add(32).cast()), S::load_u8(side.add(PANEL_ROWS)));
        (S::mul(d, S::load_u8(side)), S::sub(zero, minima))
    }
}

/// Asks for the codes that come [`PREFETCH_BYTES`] after `codes`: the hardware's own guess loses its way
/// where groups do not begin on cache lines.
#[inline(always)]
pub(super) fn prefetch_group<P: PanelFormat>(codes: *const u8) {
    for line in 0..P::LAYOUT.group_bytes().div_ceil(64) {
        let ahead = codes.wrapping_add(PREFETCH_BYTES + 64 * line);
        // SAFETY: a hint; any address is allowed.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(ahead.cast()) };
    }
}

/// The body of [`MatmulTier::dequantize`]; `step_codes` writes the 64 unsigned codes of a step.
///
/// # Safety
/// As the method; to be inlined where the features are enabled.
#[inline(always)]
pub(super) unsafe fn dequantize<S: Simd, P: PanelFormat>(
    panel: *const u8,
    groups: Range<usize>,
    out: *mut f32,
    step_codes: impl Fn(*const u8, usize, *mut u8),
) {
    let mut codes = [0_u8; STEP_CODES];
    let mut out = out;
    for group in groups {
        // SAFETY: the caller's promises; sixteen values per k are written.
        unsafe {
            let (scale, minimum) = scales_and_minima::<S, P>(panel, group);
            for step in 0..P::STEPS {
                step_codes(panel.add(P::LAYOUT.codes_offset(group)), step, codes.as_mut_ptr());
                let four = [
                    S::load_byte_of_u32::<0>(codes.as_ptr()),
                    S::load_byte_of_u32::<1>(codes.as_ptr()),
                    S::load_byte_of_u32::<2>(codes.as_ptr()),
                    S::load_byte_of_u32::<3>(codes.as_ptr()),
                ];
                for codes in four {
                    let centered = S::sub(codes, S::splat(P::LAYOUT.zero as f32));
                    S::store(out, S::fma(scale, centered, minimum));
                    out = out.add(PANEL_ROWS);
                }
            }
        }
    }
}

/// The body of [`MatmulTier::widen`].
///
/// # Safety
/// As the method; to be inlined where the features are enabled.
#[inline(always)]
pub(super) unsafe fn widen<S: Simd>(
    format: WeightFormat,
    panel: *const u8,
    k: Range<usize>,
    out: *mut f32,
) {
    // SAFETY: the caller's promises: sixteen values per k on both sides.
    unsafe {
        let from = panel.add(k.start * PANEL_ROWS * format.block_bytes());
        match format {
            WeightFormat::F16 => {
                for i in 0..k.len() {
                    let x = S::load_f16(from.cast::<u16>().add(i * PANEL_ROWS));
                    S::store(out.add(i * PANEL_ROWS), x);
                }
            }
            WeightFormat::BF16 => {
                for i in 0..k.len() * PANEL_ROWS {
                    let bits = u32::from(from.cast::<u16>().add(i).read_unaligned()) << 16;
                    *out.add(i) = f32::from_bits(bits);
                }
            }
            _ => out.copy_from_nonoverlapping(from.cast(), k.len() * PANEL_ROWS),
        }
    }
}

/// The body of [`MatmulTier::f32_tile`] for `R` rows.
///
/// # Safety
/// As the method; to be inlined where the features are enabled.
#[inline(always)]
pub(super) unsafe fn f32_rows<S: Simd, const R: usize>(
    weights: *const f32,
    k: usize,
    x: *const f32,
    stride: usize,
    out: &mut [[f32; PANEL_ROWS]],
) {
    // SAFETY: the caller's promises; `out` holds R rows.
    unsafe {
        let mut sums = [S::splat(0.0); R];
        for (sum, out) in sums.iter_mut().zip(&*out) {
            *sum = S::load(out.as_ptr());
        }
        for i in 0..k {
            let w = S::load(weights.add(i * PANEL_ROWS));
            for (row, sum) in sums.iter_mut().enumerate() {
                *sum = S::fma(w, S::splat(*x.add(row * stride + i)), *sum);
            }
        }
        for (sum, out) in sums.into_iter().zip(out) {
            S::store(out.as_mut_ptr(), sum);
        }
    }
}

/// Calls a function with a constant row count for a count known at run time: `$rows` is split into runs
/// of the constants listed, largest first.
macro_rules! in_runs {
    ($rows:expr, [$($size:literal)*], |$first:ident, $R:ident| $body:expr) => {{
        let rows: usize = $rows;
        let mut $first = 0;
        while $first < rows {
            match rows - $first {
                $(left if left >= $size => {
                    const $R: usize = $size;
                    $body;
                    $first += $R;
                })*
                _ => unreachable!("the sizes end with 1"),
            }
        }
    }};
}

/// A loop over at most eight steps whose `$step` is a constant in every copy of the body: shifts of bit
/// planes become immediate. (Left to itself the compiler unrolls some formats and not others.)
macro_rules! unrolled {
    ($step:ident in 0..$count:expr, $body:block) => {
        unrolled!(@ $step, $count, $body, 0 1 2 3 4 5 6 7)
    };
    (@ $step:ident, $count:expr, $body:block, $($index:literal)*) => {
        $(if $index < $count {
            let $step: usize = $index;
            $body
        })*
    };
}

pub(super) use {in_runs, unrolled};
