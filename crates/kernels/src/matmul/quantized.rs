//! Activations as int8, one scale per 32 values.

use super::scalar;
use crate::dispatch::Tier;
use crate::pool::BarrierPool;
#[cfg(target_arch = "x86_64")]
use crate::simd::{Simd, avx2::Avx2, avx512::Avx512};

/// Values that share a scale.
pub(super) const GROUP: usize = 32;
/// Rows of the widest tile.
pub(super) const TILE_ROWS: usize = 12;
/// Largest magnitudes below this are taken for zero: their inverse would overflow.
const SMALLEST_MAGNITUDE: f32 = 1e-30;
/// Below this many values a barrier costs more than the second thread saves.
const PARALLEL_VALUES: usize = 16 * 1024;

/// Rows of activations in int8: `x ≈ scale * code`, scale = largest magnitude of 32 values / 127, codes
/// in -127..=127, with the sums that weight zero points and minima need.
///
/// Stored in tiles of rows, as the kernels broadcast them: `[tile][k / 4][row in tile][4 k]` for codes
/// and `[tile][k / 32][row in tile]` for the rest. Buffers are reused from call to call.
#[derive(Default)]
pub struct QuantizedRows {
    rows: usize,
    cols: usize,
    /// Rows per tile: the row count itself up to 4, then 6, 8 or 12.
    width: usize,
    codes: Vec<i8>,
    scales: Vec<f32>,
    scaled_sums: Vec<f32>,
    negative_sums: Vec<i32>,
    negative_half_sums: Vec<i32>,
}

/// Where one tile's numbers start, and how many rows lie side by side.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(super) struct TileView {
    pub width: usize,
    pub codes: *const i8,
    /// Per 32 k: the scale.
    pub scales: *const f32,
    /// Per 32 k: scale × sum of the codes.
    pub scaled_sums: *const f32,
    /// Per 32 k: minus the sum of the codes.
    pub negative_sums: *const i32,
    /// Per 16 k: minus the sum of the codes.
    pub negative_half_sums: *const i32,
}

impl QuantizedRows {
    /// Empty buffers.
    pub fn new() -> QuantizedRows {
        QuantizedRows::default()
    }

    /// Rows held.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Values per row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Makes room for `rows` × `cols` values, so that later calls of [`quantize`](Self::quantize) up to
    /// that size do not allocate. Forgets the rows held.
    pub fn reserve(&mut self, rows: usize, cols: usize) {
        self.shape(rows.next_multiple_of(TILE_ROWS), cols);
        self.shape(0, cols);
    }

    /// Quantises row-major `x` `[rows, cols]`; `cols` is a multiple of 32. Same bits on every tier. A
    /// NaN or an infinity gives a finite code and, for an infinity, an infinite scale.
    ///
    /// # Panics
    /// If `x` is not whole rows or `cols` not a multiple of 32.
    pub fn quantize(&mut self, tier: Tier, pool: &BarrierPool, x: &[f32], cols: usize) {
        self.fill(tier, pool, x, cols, false);
    }

    /// Quantises each row of `x` and, as a row of its own behind it, what quantising it lost: rows
    /// `2 i` and `2 i + 1` together are row `i` in about 15 bits. A product with both, added, costs no
    /// second reading of the weights.
    ///
    /// # Panics
    /// As [`quantize`](Self::quantize).
    pub fn quantize_with_rest(&mut self, tier: Tier, pool: &BarrierPool, x: &[f32], cols: usize) {
        self.fill(tier, pool, x, cols, true);
    }

    fn fill(&mut self, tier: Tier, pool: &BarrierPool, x: &[f32], cols: usize, rest: bool) {
        assert!(cols > 0 && cols.is_multiple_of(GROUP), "{cols} columns, not a multiple of 32");
        assert!(x.len().is_multiple_of(cols), "{} values are not rows of {cols}", x.len());
        let rows = x.len() / cols;
        self.shape(rows * (1 + usize::from(rest)), cols);
        if !self.rows.is_multiple_of(self.width) {
            self.clear_last_tile();
        }
        let target = Target::of(self);
        let quantize_row = |row: usize| {
            let places = if rest { (2 * row, Some(2 * row + 1)) } else { (row, None) };
            // SAFETY: every row writes its own places of the buffers shaped above, which outlive this.
            unsafe { target.quantize_row(tier, places, &x[row * cols..][..cols]) }
        };
        if x.len() < PARALLEL_VALUES {
            (0..rows).for_each(quantize_row);
            return;
        }
        // Rows of a tile lie in the same cache lines: they belong to one thread. Tiles are of even width
        // where rows have rests, so that no pair is torn.
        let per_tile = if rest { self.width / 2 } else { self.width };
        pool.for_each(rows.div_ceil(per_tile), &|tile, _thread| {
            (tile * per_tile..rows.min((tile + 1) * per_tile)).for_each(quantize_row);
        });
    }

    /// The view of tile `tile` from k `first_k` (a multiple of 32) on.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn tile(&self, tile: usize, first_k: usize) -> TileView {
        let (width, cols) = (self.width, self.cols);
        let values = (tile * cols + first_k) * width;
        TileView {
            width,
            codes: self.codes[values..].as_ptr(),
            scales: self.scales[values / 32..].as_ptr(),
            scaled_sums: self.scaled_sums[values / 32..].as_ptr(),
            negative_sums: self.negative_sums[values / 32..].as_ptr(),
            negative_half_sums: self.negative_half_sums[values / 16..].as_ptr(),
        }
    }

    /// Rows per tile.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn tile_width(&self) -> usize {
        self.width
    }

    /// The codes of `row` from `first_k` (a multiple of 4) on, 32 or as many as there are.
    pub(super) fn group_codes(&self, row: usize, first_k: usize) -> [i16; GROUP] {
        let (tile, lane) = (row / self.width, row % self.width);
        let mut codes = [0; GROUP];
        for (step, four) in codes.chunks_exact_mut(4).enumerate().take((self.cols - first_k) / 4) {
            let at = ((tile * self.cols + first_k) / 4 + step) * self.width + lane;
            for (to, code) in four.iter_mut().zip(&self.codes[4 * at..4 * at + 4]) {
                *to = i16::from(*code);
            }
        }
        codes
    }

    /// The scale of `row` over k `32 group .. 32 group + 32`.
    pub(super) fn scale(&self, row: usize, group: usize) -> f32 {
        self.scales[self.group_index(row, group)]
    }

    /// Scale × sum of codes of the same values.
    pub(super) fn scaled_sum(&self, row: usize, group: usize) -> f32 {
        self.scaled_sums[self.group_index(row, group)]
    }

    fn group_index(&self, row: usize, group: usize) -> usize {
        let (tile, lane) = (row / self.width, row % self.width);
        (tile * self.cols / GROUP + group) * self.width + lane
    }

    fn shape(&mut self, rows: usize, cols: usize) {
        self.rows = rows;
        self.cols = cols;
        self.width = tile_width(rows);
        let values = rows.next_multiple_of(self.width) * cols;
        self.codes.resize(values, 0);
        self.scales.resize(values / 32, 0.0);
        self.scaled_sums.resize(values / 32, 0.0);
        self.negative_sums.resize(values / 32, 0);
        self.negative_half_sums.resize(values / 16, 0);
    }

    /// Kernels read whole tiles; rows that do not exist must not hold numbers of an earlier call
    /// (nothing depends on them, but stale infinities are slow on some CPUs).
    fn clear_last_tile(&mut self) {
        let values = self.rows / self.width * self.width * self.cols;
        self.codes[values..].fill(0);
        self.scales[values / 32..].fill(0.0);
        self.scaled_sums[values / 32..].fill(0.0);
        self.negative_sums[values / 32..].fill(0);
        self.negative_half_sums[values / 16..].fill(0);
    }
}

/// Rows per tile: of the fewest tiles, evenly filled, the next width that there are kernels for.
fn tile_width(rows: usize) -> usize {
    let tiles = rows.div_ceil(TILE_ROWS).max(1);
    match rows.div_ceil(tiles) {
        0..=1 => 1,
        few @ 2..=4 => few,
        many => many.next_multiple_of(2),
    }
}

/// The buffers while several threads fill different rows.
struct Target {
    width: usize,
    cols: usize,
    codes: *mut i8,
    scales: *mut f32,
    scaled_sums: *mut f32,
    negative_sums: *mut i32,
    negative_half_sums: *mut i32,
}

// SAFETY: plain addresses; `quantize_row` says who may write where.
unsafe impl Sync for Target {}

impl Target {
    fn of(rows: &mut QuantizedRows) -> Target {
        Target {
            width: rows.width,
            cols: rows.cols,
            codes: rows.codes.as_mut_ptr(),
            scales: rows.scales.as_mut_ptr(),
            scaled_sums: rows.scaled_sums.as_mut_ptr(),
            negative_sums: rows.negative_sums.as_mut_ptr(),
            negative_half_sums: rows.negative_half_sums.as_mut_ptr(),
        }
    }

    /// Fills the places of row `row` and of the row that holds its rest, if any.
    ///
    /// # Safety
    /// The buffers live and hold the rows; nobody else reads or writes them now; the CPU has `tier`.
    unsafe fn quantize_row(&self, tier: Tier, places: (usize, Option<usize>), x: &[f32]) {
        // SAFETY: the caller's promises.
        unsafe {
            match tier {
                Tier::Scalar => self.fill_row(places, x, scalar::quantize_group),
                #[cfg(target_arch = "x86_64")]
                Tier::Avx2 => self.fill_row_avx2(places, x),
                #[cfg(target_arch = "x86_64")]
                Tier::Avx512 => self.fill_row_avx512(places, x),
                #[cfg(not(target_arch = "x86_64"))]
                _ => unreachable!("tier {} on another CPU", tier.name()),
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn fill_row_avx2(&self, places: (usize, Option<usize>), x: &[f32]) {
        // SAFETY: the caller's promises; the features are enabled here.
        unsafe { self.fill_row(places, x, |x, codes| quantize_group::<Avx2>(x, codes)) }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    unsafe fn fill_row_avx512(&self, places: (usize, Option<usize>), x: &[f32]) {
        // SAFETY: the caller's promises; the features are enabled here.
        unsafe { self.fill_row(places, x, |x, codes| quantize_group::<Avx512>(x, codes)) }
    }

    /// # Safety
    /// As [`quantize_row`](Self::quantize_row); `quantize` may need the tier's features.
    #[inline(always)]
    unsafe fn fill_row(
        &self,
        (row, rest_row): (usize, Option<usize>),
        x: &[f32],
        quantize: impl Fn(&[f32], &mut [i8; GROUP]) -> f32,
    ) {
        let (mut codes, mut rest) = ([0_i8; GROUP], [0.0_f32; GROUP]);
        for (group, x) in x.chunks_exact(GROUP).enumerate() {
            let scale = quantize(x, &mut codes);
            // SAFETY: the caller's promises, for both rows.
            unsafe { self.fill_group(row, group, scale, &codes) };
            if let Some(rest_row) = rest_row {
                for ((rest, x), code) in rest.iter_mut().zip(x).zip(&codes) {
                    *rest = f32::from(*code).mul_add(-scale, *x);
                }
                let scale = quantize(&rest, &mut codes);
                // SAFETY: the same.
                unsafe { self.fill_group(rest_row, group, scale, &codes) };
            }
        }
    }

    /// # Safety
    /// As [`quantize_row`](Self::quantize_row).
    #[inline(always)]
    unsafe fn fill_group(&self, row: usize, group: usize, scale: f32, codes: &[i8; GROUP]) {
        let (tile, lane) = (row / self.width, row % self.width);
        // A plain loop of known length is inlined and takes the tier's vectors; an iterator's sum is not.
        let mut halves = [0_i32; 2];
        for (at, code) in codes.iter().enumerate() {
            halves[at / (GROUP / 2)] += i32::from(*code);
        }
        let index = tile * self.cols / GROUP + group;
        let at = index * self.width + lane;
        // SAFETY: indices of this row, inside the shaped buffers.
        unsafe {
            *self.scales.add(at) = scale;
            *self.scaled_sums.add(at) = scale * (halves[0] + halves[1]) as f32;
            *self.negative_sums.add(at) = -(halves[0] + halves[1]);
            for (half, sum) in halves.into_iter().enumerate() {
                *self.negative_half_sums.add((2 * index + half) * self.width + lane) = -sum;
            }
            for (step, four) in codes.chunks_exact(4).enumerate() {
                let to = self.codes.add(((index * 8 + step) * self.width + lane) * 4);
                to.copy_from_nonoverlapping(four.as_ptr(), 4);
            }
        }
    }
}

/// Scale and inverse scale of a group whose largest magnitude is `largest`.
#[inline(always)]
pub(super) fn group_scales(largest: f32) -> (f32, f32) {
    if largest < SMALLEST_MAGNITUDE { (0.0, 0.0) } else { (largest / 127.0, 127.0 / largest) }
}

/// The vector form of [`scalar::quantize_group`].
///
/// # Safety
/// The CPU has the tier; `x` holds 32 values.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn quantize_group<S: Simd>(x: &[f32], codes: &mut [i8; GROUP]) -> f32 {
    debug_assert_eq!(x.len(), GROUP);
    // SAFETY: two vectors of 16 in x and in codes.
    unsafe {
        let halves = [S::load(x.as_ptr()), S::load(x.as_ptr().add(16))];
        let zero = S::splat(0.0);
        let magnitude = |x| S::max(x, S::sub(zero, x));
        // A NaN loses against the zero, as in the specification.
        let largest = S::max(magnitude(halves[1]), S::max(magnitude(halves[0]), zero));
        let (scale, inverse) = group_scales(S::reduce_max(largest));
        for (half, x) in halves.into_iter().enumerate() {
            let y = S::round(S::mul(x, S::splat(inverse)));
            let y = S::max(S::min(y, S::splat(127.0)), S::splat(-127.0));
            S::store_i8(codes.as_mut_ptr().add(16 * half), y);
        }
        scale
    }
}
