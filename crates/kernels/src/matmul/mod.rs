//! Quantised weights times rows of activations.
//!
//! One result for one row: whatever the batch, tile, thread count or tier, an output is the same
//! sequence of operations over k (see `scalar.rs`), so its bits are the same. Kernels differ only in how
//! many outputs they work on at once: sixteen output rows lie in the lanes of a vector, and lanes never
//! meet.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod format;
#[cfg(target_arch = "x86_64")]
mod kernel;
mod packed;
mod quantized;
mod scalar;

pub use format::{WEIGHT_FORMATS, WeightFormat};
pub use packed::{PANEL_ROWS, PackError, PackedMatrix};
pub use quantized::QuantizedRows;

use crate::dispatch::Tier;
use crate::pool::BarrierPool;
#[cfg(target_arch = "x86_64")]
use crate::simd::{avx2::Avx2, avx512::Avx512};
use quantized::TILE_ROWS;
use std::ops::Range;

/// Chunks of panels per thread when the weights' bytes are the work: few, for each chunk starts a new
/// stream from memory (measured: 3 gives up to 1.4 times the speed of 8), yet enough that a disturbed
/// core holds up a sixth of the work and not half.
const CHUNKS_OF_FEW_ROWS: usize = 3;
/// The same when arithmetic is the work.
const CHUNKS_OF_MANY_ROWS: usize = 16;
/// Rows from which arithmetic is the work.
const MANY_ROWS: usize = 9;

/// Activations: rows of `cols` values.
#[derive(Clone, Copy)]
pub enum Rows<'a> {
    /// For quantised weights: integer dot products.
    Int8(&'a QuantizedRows),
    /// For any weights: dequantised to f32 first. Exactly `rows` × cols values, row-major.
    F32 {
        /// Row-major values.
        values: &'a [f32],
        /// Number of rows.
        rows: usize,
    },
}

impl Rows<'_> {
    /// Number of rows.
    pub fn rows(&self) -> usize {
        match self {
            Rows::Int8(x) => x.rows(),
            Rows::F32 { rows, .. } => *rows,
        }
    }
}

/// One matrix of several that share their input and a barrier (q, k and v; gate and up).
#[derive(Clone, Copy)]
pub struct Job<'a> {
    /// `[outputs, cols]`.
    pub weights: &'a PackedMatrix,
    /// Column of the output where this matrix's outputs start.
    pub out_column: usize,
}

/// `out[row * out_stride + job.out_column + n] = Σ_k weights[n, k] * x[row, k]` for every job.
///
/// All jobs together are split over the pool's threads by panels of sixteen outputs. Allocates nothing.
///
/// # Panics
/// On shapes that do not fit together (columns of a job and of `x`, outputs beyond a row of `out` or
/// over another job's), and on int8 rows for weights that are not [quantised](WeightFormat::is_quantized).
pub fn matmul(
    tier: Tier,
    pool: &BarrierPool,
    jobs: &[Job],
    x: Rows,
    out: &mut [f32],
    out_stride: usize,
) {
    let rows = x.rows();
    check_shapes(jobs, x, out.len(), out_stride);
    if rows == 0 {
        return;
    }
    let panels: usize = jobs.iter().map(|job| job.weights.panels()).sum();
    let chunks = if rows < MANY_ROWS { CHUNKS_OF_FEW_ROWS } else { CHUNKS_OF_MANY_ROWS };
    let chunk = panels.div_ceil(chunks * pool.threads()).max(1);
    let start = Start(out.as_mut_ptr());
    pool.for_each(panels.div_ceil(chunk), &|item, _thread| {
        let chunk = item * chunk..panels.min((item + 1) * chunk);
        let mut first = 0;
        for job in jobs {
            let last = first + job.weights.panels();
            let mine = chunk.start.max(first)..chunk.end.min(last);
            if mine.start < mine.end {
                let mine = mine.start - first..mine.end - first;
                let columns = job.out_column..job.out_column + job.weights.rows();
                let out = Output { start: start.get(), stride: out_stride, columns };
                // SAFETY: shapes were checked; chunks do not overlap, nor do the columns of jobs.
                unsafe { run_panels(tier, job.weights, mine, x, &out) };
            }
            first = last;
        }
    });
}

/// A run of panels of one matrix.
///
/// # Safety
/// Shapes fit, the CPU has `tier`, and nobody else touches the output columns of these panels.
unsafe fn run_panels(
    tier: Tier,
    weights: &PackedMatrix,
    panels: Range<usize>,
    x: Rows,
    out: &Output,
) {
    // SAFETY: the caller's promises.
    unsafe {
        match (tier, x) {
            (Tier::Scalar, _) => scalar_panels(weights, panels, x, out),
            #[cfg(target_arch = "x86_64")]
            (Tier::Avx2, Rows::Int8(x)) => kernel::int8_panels::<Avx2>(weights, panels, x, out),
            #[cfg(target_arch = "x86_64")]
            (Tier::Avx2, Rows::F32 { values, .. }) => {
                kernel::f32_panels::<Avx2>(weights, panels, values, out);
            }
            #[cfg(target_arch = "x86_64")]
            (Tier::Avx512, Rows::Int8(x)) => {
                kernel::int8_panels::<Avx512>(weights, panels, x, out);
            }
            #[cfg(target_arch = "x86_64")]
            (Tier::Avx512, Rows::F32 { values, .. }) => {
                kernel::f32_panels::<Avx512>(weights, panels, values, out);
            }
            #[cfg(not(target_arch = "x86_64"))]
            _ => unreachable!("tier {} on another CPU", tier.name()),
        }
    }
}

/// # Safety
/// As [`run_panels`].
unsafe fn scalar_panels(weights: &PackedMatrix, panels: Range<usize>, x: Rows, out: &Output) {
    for panel in panels {
        for first in (0..x.rows()).step_by(TILE_ROWS) {
            let rows = first..x.rows().min(first + TILE_ROWS);
            let sums = match x {
                Rows::Int8(x) => scalar::int8_tile(weights, panel, x, rows.clone()),
                Rows::F32 { values, .. } => scalar::f32_tile(weights, panel, values, rows.clone()),
            };
            for (row, sums) in rows.zip(&sums) {
                // SAFETY: the caller's promises.
                unsafe { out.store(row, panel, sums) };
            }
        }
    }
}

fn check_shapes(jobs: &[Job], x: Rows, out_len: usize, out_stride: usize) {
    let rows = x.rows();
    for (index, job) in jobs.iter().enumerate() {
        let cols = job.weights.cols();
        match x {
            Rows::Int8(x) => {
                assert_eq!(x.cols(), cols, "columns of the int8 rows and of job {index}");
                let format = job.weights.format();
                assert!(format.is_quantized(), "{format} weights of job {index} need f32 rows");
            }
            Rows::F32 { values, rows } => {
                assert_eq!(values.len(), rows * cols, "f32 values: rows x columns of job {index}");
            }
        }
        let columns = job.out_column..job.out_column + job.weights.rows();
        assert!(
            columns.end <= out_stride,
            "job {index} ends at column {} of {out_stride}",
            columns.end
        );
        let free = |other: &Job| {
            other.out_column + other.weights.rows() <= columns.start
                || columns.end <= other.out_column
        };
        assert!(jobs[..index].iter().all(free), "outputs of job {index} overlap an earlier job's");
    }
    let needed = rows.saturating_sub(1) * out_stride
        + jobs.iter().map(|job| job.out_column + job.weights.rows()).max().unwrap_or(0);
    assert!(rows == 0 || out_len >= needed, "the output has {out_len} places, not {needed}");
}

/// The output columns of one matrix, written by several threads.
struct Output {
    start: *mut f32,
    stride: usize,
    columns: Range<usize>,
}

impl Output {
    /// First place and number of outputs of a panel in a row.
    ///
    /// # Safety
    /// The row and the panel exist.
    unsafe fn place(&self, row: usize, panel: usize) -> (*mut f32, usize) {
        let first = self.columns.start + panel * PANEL_ROWS;
        let count = PANEL_ROWS.min(self.columns.end - first);
        // SAFETY: inside the output, as the caller says.
        (unsafe { self.start.add(row * self.stride + first) }, count)
    }

    /// Writes the outputs of a panel, without its padding.
    ///
    /// # Safety
    /// The row and the panel exist and are the caller's alone.
    unsafe fn store(&self, row: usize, panel: usize, sums: &[f32; PANEL_ROWS]) {
        // SAFETY: as the caller says.
        unsafe {
            let (place, count) = self.place(row, panel);
            if count == PANEL_ROWS {
                // One vector, not a call.
                place.cast::<[f32; PANEL_ROWS]>().write_unaligned(*sums);
            } else {
                place.copy_from_nonoverlapping(sums.as_ptr(), count);
            }
        }
    }

    /// Reads what [`store`](Self::store) wrote.
    ///
    /// # Safety
    /// As [`store`](Self::store).
    #[cfg(target_arch = "x86_64")]
    unsafe fn load(&self, row: usize, panel: usize, sums: &mut [f32; PANEL_ROWS]) {
        // SAFETY: as the caller says.
        unsafe {
            let (place, count) = self.place(row, panel);
            place.copy_to_nonoverlapping(sums.as_mut_ptr(), count);
        }
    }
}

/// The output's address, shared by the threads.
struct Start(*mut f32);

// SAFETY: only an address; [`Output`]'s methods say who may write where.
unsafe impl Sync for Start {}

impl Start {
    fn get(&self) -> *mut f32 {
        self.0
    }
}
