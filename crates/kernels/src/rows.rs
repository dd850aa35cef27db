//! Row-wise work split over the pool, with each row's slice handed out exclusively.

use crate::pool::BarrierPool;

/// Rows up to which waking the pool costs more than it saves.
const FEW_ROWS: usize = 4;
/// The same for the values of rows that take a few operations each.
const FEW_LIGHT_VALUES: usize = 8 * 1024;
/// Shares of the rows per thread: one that has lost its core holds up a share, not all of its half.
const SHARES: usize = 4;

/// A slice whose disjoint rows may be taken from several threads at once.
struct RowsOf<T> {
    base: *mut T,
    stride: usize,
}

// SAFETY: rows are handed out to one thread each (see `split`), and T may move between threads.
unsafe impl<T: Send> Sync for RowsOf<T> {}

impl<T> RowsOf<T> {
    fn new(values: &mut [T], stride: usize, rows: usize) -> RowsOf<T> {
        assert!(values.len() >= rows * stride, "{} values for {rows} rows", values.len());
        RowsOf { base: values.as_mut_ptr(), stride }
    }

    /// # Safety
    /// `row` is in range and taken by one caller at a time.
    #[allow(clippy::mut_from_ref)]
    unsafe fn row(&self, row: usize) -> &mut [T] {
        // SAFETY: in range by `new`'s check and the caller's promise; exclusive by the same promise.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(row * self.stride), self.stride) }
    }
}

/// Calls `job` with every index in `0..rows`, each exactly once, in contiguous shares.
fn split(pool: &BarrierPool, rows: usize, job: &(dyn Fn(usize) + Sync)) {
    let shares = rows.min(SHARES * pool.threads());
    pool.for_each(shares, &|share, _thread| {
        (rows * share / shares..rows * (share + 1) / shares).for_each(job);
    });
}

/// What is done to a row.
pub type RowJob<'a, T> = dyn Fn(usize, &mut [T]) + Sync + 'a;

/// What is done to a row of two outputs.
pub type PairJob<'a, A, B> = dyn Fn(usize, &mut [A], &mut [B]) + Sync + 'a;

/// Runs `job(row, out[row])` for each of `rows` rows of `stride` elements.
pub fn for_each_row<T: Send>(
    pool: &BarrierPool,
    rows: usize,
    (out, stride): (&mut [T], usize),
    job: &RowJob<'_, T>,
) {
    let out = RowsOf::new(out, stride, rows);
    // SAFETY: each index is passed once, so no row is taken twice.
    let job = |row| job(row, unsafe { out.row(row) });
    if rows <= FEW_ROWS { (0..rows).for_each(job) } else { split(pool, rows, &job) }
}

/// Runs `job(row, a[row], b[row])` for each of `rows` rows of two outputs.
pub fn for_each_row_pair<A: Send, B: Send>(
    pool: &BarrierPool,
    rows: usize,
    (a, a_stride): (&mut [A], usize),
    (b, b_stride): (&mut [B], usize),
    job: &PairJob<'_, A, B>,
) {
    let a = RowsOf::new(a, a_stride, rows);
    let b = RowsOf::new(b, b_stride, rows);
    // SAFETY: each index is passed once, so no row is taken twice.
    let job = |row| job(row, unsafe { a.row(row) }, unsafe { b.row(row) });
    if rows <= FEW_ROWS { (0..rows).for_each(job) } else { split(pool, rows, &job) }
}

/// [`for_each_row`] for jobs of a few operations a value (a norm, a sum): a few thousand values are done
/// on the calling thread, since a barrier would take longer.
pub fn for_each_light_row<T: Send>(
    pool: &BarrierPool,
    rows: usize,
    (out, stride): (&mut [T], usize),
    job: &RowJob<'_, T>,
) {
    if rows * stride > FEW_LIGHT_VALUES {
        return for_each_row(pool, rows, (out, stride), job);
    }
    let out = RowsOf::new(out, stride, rows);
    // SAFETY: each index is passed once, on this thread.
    (0..rows).for_each(|row| job(row, unsafe { out.row(row) }));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_visited_once() {
        let pool = BarrierPool::new(3);
        for rows in [0, 1, 4, 5, 17, 5000] {
            let (mut a, mut b) = (vec![0u32; rows * 3], vec![0u32; rows * 2]);
            for_each_row_pair(&pool, rows, (&mut a, 3), (&mut b, 2), &|row, a, b| {
                a.iter_mut().chain(b).for_each(|x| *x += row as u32 + 1);
            });
            assert!(a.iter().enumerate().all(|(i, x)| *x == (i / 3) as u32 + 1));
            assert!(b.iter().enumerate().all(|(i, x)| *x == (i / 2) as u32 + 1));
            for_each_light_row(&pool, rows, (&mut a, 3), &|row, a| {
                a.iter_mut().for_each(|x| *x += row as u32);
            });
            assert!(a.iter().enumerate().all(|(i, x)| *x == 2 * (i / 3) as u32 + 1));
        }
    }
}
