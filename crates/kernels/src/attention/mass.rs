//! How much attention each page gets: what eviction policies like H2O (arXiv 2306.14048) rank by.
//!
//! While a line runs, the sum of the weights of each key group is kept with the maximum they are
//! relative to; once the line's softmax is known, the sums become probabilities. Those of a page are
//! added over its key groups, then over the query heads of a KV head, then over KV heads, each in
//! order: the same bits whatever the batch, the chunk, the threads and the tier.

use super::{AttentionShape, SequenceRows};
use crate::simd::LANES;
use std::ops::Range;

/// Sums and maxima of key groups, `[lines][2][stride]`.
#[derive(Clone, Copy)]
pub(super) struct GroupSums {
    pub base: *mut f32,
    /// Floats from a line's sums to its maxima; a multiple of sixteen, at least the key groups.
    pub stride: usize,
}

impl GroupSums {
    /// Floats that `lines` lines over `groups` key groups need.
    pub fn floats(lines: usize, groups: usize) -> usize {
        lines * 2 * Self::stride(groups)
    }

    /// The stride for `groups` key groups.
    pub fn stride(groups: usize) -> usize {
        groups.next_multiple_of(LANES)
    }

    /// The sums from line `line` and key group `group` on.
    ///
    /// # Safety
    /// The place is inside the array or at its end.
    pub unsafe fn at(self, line: usize, group: usize) -> GroupSums {
        // SAFETY: the caller's contract.
        let base = unsafe { self.base.add(line * 2 * self.stride + group) };
        GroupSums { base, ..self }
    }

    /// Clears `groups` key groups of `lines` lines: a sum of 0 says that nothing was seen.
    ///
    /// # Safety
    /// As many are inside the array, and nobody else uses them.
    pub unsafe fn clear(self, lines: usize, groups: usize) {
        for line in 0..lines {
            // SAFETY: the caller's contract; zero bytes are 0.0.
            unsafe { self.at(line, 0).base.write_bytes(0, groups) }
        }
    }
}

/// The masses of the sequences of one batch that are observed.
#[derive(Default)]
pub(super) struct Masses {
    /// Of each sequence `[kv_heads][rows][pages]`, one after the other.
    pub values: Vec<f32>,
    /// Where the first KV head of each sequence stands in `values`; empty if it is not observed.
    pub sequences: Vec<Range<usize>>,
}

impl Masses {
    /// Makes room for a batch and clears it.
    pub fn lay_out(&mut self, shape: &AttentionShape, sequences: &[SequenceRows<'_>]) {
        self.sequences.clear();
        let mut end = 0;
        self.sequences.extend(sequences.iter().map(|sequence| {
            let count = if sequence.observe { sequence.rows * sequence.pages.len() } else { 0 };
            let start = end;
            end += count * shape.kv_heads;
            start..start + count
        }));
        self.reserve(end);
        self.values[..end].fill(0.0);
    }

    pub fn reserve(&mut self, count: usize) {
        if self.values.len() < count {
            self.values.resize(count, 0.0);
        }
    }

    /// Adds the masses of all KV heads of a sequence to those of the first.
    pub fn add_heads(&mut self, kv_heads: usize) {
        for range in &self.sequences {
            let count = range.len();
            let (total, others) = self.values[range.start..].split_at_mut(count);
            for head in 0..kv_heads - 1 {
                let of_head = &others[head * count..(head + 1) * count];
                total.iter_mut().zip(of_head).for_each(|(total, mass)| *total += mass);
            }
        }
    }
}

/// Adds the masses of key groups, `of_page` a page, to those of pages.
pub(super) fn add_pages(pages: &mut [f32], groups: &[f32], of_page: usize) {
    if of_page == 1 {
        pages.iter_mut().zip(groups).for_each(|(page, mass)| *page += mass);
        return;
    }
    for (page, groups) in pages.iter_mut().zip(groups.chunks_exact(of_page)) {
        *page += groups[1..].iter().fold(groups[0], |sum, mass| sum + mass);
    }
}
