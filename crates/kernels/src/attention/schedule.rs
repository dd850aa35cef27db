//! How a batch is cut into tasks, and the memory the tasks need.
//!
//! Sequences with few rows (decode) give one task per (split of the context, KV head), whose parts are
//! merged by the task that finishes last; others (prefill) one task per (tile of rows, KV head), which
//! merges as it goes. Both do the same arithmetic in the same order.

use super::mass::{GroupSums, Masses};
use super::{AttentionShape, SPLIT_TOKENS, SequenceRows};
use crate::simd::LANES;
use reef_kv::page::{KEY_GROUP_MAX, PageRef, VALUE_GROUP};
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::AtomicUsize;

/// Largest number of lines of a chunk (see the kernels).
pub(super) const CHUNK_LINES: usize = 6;
/// Query floats of a tile: what stays in the L1/L2 caches beside a page while lines take turns.
const TILE_FLOATS: usize = 3072;

/// Floats aligned to a cache line, so that no vector straddles two.
#[derive(Clone, Copy, Default)]
#[repr(C, align(64))]
struct CacheLine([f32; LANES]);

/// A growable zeroed array of cache lines, used through pointers.
#[derive(Default)]
pub(super) struct Floats(Vec<CacheLine>);

impl Floats {
    /// Makes room for `count` floats.
    fn reserve(&mut self, count: usize) {
        let lines = count.div_ceil(LANES);
        if self.0.len() < lines {
            self.0.resize(lines, CacheLine::default());
        }
    }

    pub(super) fn pointer(&mut self) -> *mut f32 {
        self.0.as_mut_ptr().cast()
    }
}

/// What one thread needs for a task; the arrays are those of `kernel::{Lines, Bench, Group}`.
#[derive(Default)]
pub(super) struct ThreadScratch {
    pub(super) query: Floats,
    pub(super) values: Floats,
    pub(super) lanes: Floats,
    pub(super) minima: Floats,
    pub(super) max: Floats,
    pub(super) visible: Vec<(usize, usize)>,
    pub(super) folded: Floats,
    pub(super) scores: Floats,
    pub(super) weights: Floats,
    pub(super) v_scale: Floats,
    pub(super) v_min: Floats,
    /// One part record: a split just closed.
    pub(super) part: Floats,
    /// Part records of the lines of a task.
    pub(super) totals: Floats,
    /// Key-group sums of the lines of a tile that is observed.
    pub(super) sums: Floats,
}

impl ThreadScratch {
    fn reserve(&mut self, shape: &AttentionShape, lines: usize) {
        let dim = shape.head_dim;
        let groups = dim.div_ceil(VALUE_GROUP);
        self.query.reserve(lines * dim);
        self.values.reserve(lines * dim);
        self.lanes.reserve(lines * LANES);
        self.minima.reserve(lines * groups * LANES);
        self.max.reserve(lines);
        if self.visible.len() < lines {
            self.visible.resize(lines, (0, 0));
        }
        self.folded.reserve(CHUNK_LINES * dim);
        self.scores.reserve(CHUNK_LINES * KEY_GROUP_MAX);
        self.weights.reserve(CHUNK_LINES * groups * KEY_GROUP_MAX);
        self.v_scale.reserve(groups * KEY_GROUP_MAX);
        self.v_min.reserve(groups * KEY_GROUP_MAX);
        self.part.reserve(part_floats(dim));
        self.totals.reserve(lines * part_floats(dim));
    }
}

/// Floats of a part record: `head_dim` values, then the maximum and the sum.
pub(super) fn part_floats(head_dim: usize) -> usize {
    head_dim + LANES
}

/// One sequence cut into tasks.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    /// Index of its first task; its tasks are numbered KV head fastest.
    pub(super) first_task: usize,
    /// Rows of a task: all of them where the context is split.
    pub(super) tile_rows: usize,
    /// Its splits, as a range of [`AttentionScratch::splits`].
    pub(super) splits: Range<usize>,
    /// Where its part records begin, `[kv_heads][splits][lines]`; `None` for tiles.
    pub(super) parts: Option<usize>,
    /// Its first row of the output.
    pub(super) first_row: usize,
    /// Where its key-group sums begin, `[kv_heads]` times those of its lines; `None` if it is not
    /// observed. Tiles keep theirs in thread scratch.
    pub(super) sums: Option<usize>,
}

impl Plan {
    /// Pages that any row of the sequence sees.
    pub(super) fn pages(&self, splits: &[Range<usize>]) -> Range<usize> {
        match &splits[self.splits.clone()] {
            [] => 0..0,
            [first, .., last] => first.start..last.end,
            [only] => only.clone(),
        }
    }
}

/// Working memory of [`super::paged_attention`].
///
/// It grows when a batch or a context larger than any before appears, and never otherwise.
#[derive(Default)]
pub struct AttentionScratch {
    /// One per thread. The locks are never contended: a thread takes its own.
    pub(super) threads: Vec<Mutex<ThreadScratch>>,
    pub(super) plans: Vec<Plan>,
    /// Pages of each split, as ranges of the sequence's pages.
    pub(super) splits: Vec<Range<usize>>,
    /// Part records of split contexts.
    pub(super) parts: Floats,
    /// Key-group sums of split contexts that are observed.
    pub(super) sums: Floats,
    /// What the observed sequences of the last batch attended to.
    pub(super) masses: Masses,
    /// Tasks still to finish before a (sequence, KV head) can be merged.
    pub(super) remaining: Vec<AtomicUsize>,
}

impl AttentionScratch {
    /// Room for batches of `max_rows` rows over contexts of `max_positions` tokens in layers of any
    /// of `shapes`, on `threads` threads.
    pub fn new(
        shapes: &[AttentionShape],
        max_rows: usize,
        max_positions: usize,
        threads: usize,
    ) -> AttentionScratch {
        let mut scratch = AttentionScratch::default();
        for shape in shapes {
            scratch.reserve_threads(shape, tile_rows(shape), threads);
            let rows = max_rows.min(tile_rows(shape));
            let splits = max_positions.div_ceil(SPLIT_TOKENS as usize) + 1;
            scratch.parts.reserve(rows * shape.heads * splits * part_floats(shape.head_dim));
            scratch.splits.reserve(splits);
            scratch.plans.reserve(max_rows);
            scratch.reserve_remaining(max_rows * shape.kv_heads);
        }
        scratch
    }

    /// Makes room for observing as well, so that the first batch that is observed allocates nothing;
    /// arguments as for [`new`](Self::new).
    pub fn reserve_masses(
        &mut self,
        shapes: &[AttentionShape],
        max_rows: usize,
        max_positions: usize,
    ) {
        for shape in shapes {
            let pages = max_positions.div_ceil(shape.block_size) + 1;
            let groups = pages * shape.page().key_groups();
            let rows = max_rows.min(tile_rows(shape));
            self.sums.reserve(GroupSums::floats(rows * shape.heads, groups));
            self.masses.reserve(max_rows * pages * shape.kv_heads);
            self.masses.sequences.reserve(max_rows);
            self.reserve_sums(tile_rows(shape) * shape.group_heads(), groups);
        }
    }

    fn reserve_sums(&mut self, lines: usize, groups: usize) {
        for thread in &mut self.threads {
            let thread = thread.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner());
            thread.sums.reserve(GroupSums::floats(lines, groups));
        }
    }

    /// Attention probability per page, added over all query heads of the layer, of sequence `index`
    /// of the last batch: `[rows][pages]`, 0 for a page that a row does not see. Empty if the sequence
    /// was not observed.
    ///
    /// A row's masses add up to the number of query heads, if it sees anything.
    pub fn masses(&self, index: usize) -> &[f32] {
        self.masses.sequences.get(index).map_or(&[], |range| &self.masses.values[range.clone()])
    }

    fn reserve_threads(&mut self, shape: &AttentionShape, rows: usize, threads: usize) {
        if self.threads.len() < threads {
            self.threads.resize_with(threads, Mutex::default);
        }
        for thread in &mut self.threads {
            // A panic under the lock leaves garbage in arrays that every task sets up anew.
            let thread = thread.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner());
            thread.reserve(shape, rows * shape.group_heads());
        }
    }

    fn reserve_remaining(&mut self, count: usize) {
        if self.remaining.len() < count {
            self.remaining.resize_with(count, AtomicUsize::default);
        }
    }

    /// Cuts a batch into tasks and makes room for them; gives the number of tasks.
    pub(super) fn plan(
        &mut self,
        shape: &AttentionShape,
        sequences: &[SequenceRows<'_>],
        threads: usize,
    ) -> usize {
        self.plans.clear();
        self.splits.clear();
        self.reserve_remaining(sequences.len() * shape.kv_heads);
        self.reserve_threads(shape, tile_rows(shape), threads);
        let (mut tasks, mut rows, mut parts, mut sums, mut tile_groups) = (0, 0, 0, 0, 0);
        for (sequence, remaining) in sequences.iter().zip(self.remaining.chunks_mut(shape.kv_heads))
        {
            let first_split = self.splits.len();
            push_splits(shape, sequence, &mut self.splits);
            let splits = self.splits.len() - first_split;
            let is_split = sequence.rows <= tile_rows(shape) && splits > 0;
            let tile_rows = if is_split { sequence.rows } else { tile_rows(shape) };
            let cuts = if is_split { splits } else { sequence.rows.div_ceil(tile_rows) };
            let plan = Plan {
                first_task: tasks,
                tile_rows,
                splits: first_split..self.splits.len(),
                parts: is_split.then_some(parts),
                first_row: rows,
                sums: sequence.observe.then_some(sums),
            };
            if sequence.observe {
                let groups = plan.pages(&self.splits).len() * shape.page().key_groups();
                if is_split {
                    sums += GroupSums::floats(sequence.rows * shape.heads, groups);
                } else {
                    tile_groups = tile_groups.max(groups);
                }
            }
            self.plans.push(plan);
            for count in remaining {
                *count.get_mut() = cuts;
            }
            tasks += cuts * shape.kv_heads;
            rows += sequence.rows;
            if is_split {
                parts += splits * sequence.rows * shape.heads * part_floats(shape.head_dim);
            }
        }
        self.parts.reserve(parts);
        self.sums.reserve(sums);
        self.reserve_sums(tile_rows(shape) * shape.group_heads(), tile_groups);
        tasks
    }
}

/// Query rows of a tile of prefill.
fn tile_rows(shape: &AttentionShape) -> usize {
    (TILE_FLOATS / (shape.group_heads() * shape.head_dim)).max(1)
}

/// Pushes the pages of each split, without pages that no row of the sequence sees.
fn push_splits(
    shape: &AttentionShape,
    sequence: &SequenceRows<'_>,
    splits: &mut Vec<Range<usize>>,
) {
    if sequence.rows == 0 {
        return;
    }
    let first_row = u64::from(sequence.first_position);
    let last_row = first_row + sequence.rows as u64 - 1;
    let seen = |page: &PageRef| {
        let end = u64::from(page.first) + shape.block_size as u64;
        u64::from(page.first) <= last_row
            && shape.window.is_none_or(|window| end + window as u64 > first_row + 1)
    };
    let mut last = None;
    for (index, page) in sequence.pages.iter().enumerate().filter(|(_, page)| seen(page)) {
        let number = page.first / SPLIT_TOKENS;
        match splits.last_mut() {
            Some(range) if last == Some(number) => range.end = index + 1,
            _ => splits.push(index..index + 1),
        }
        last = Some(number);
    }
}
