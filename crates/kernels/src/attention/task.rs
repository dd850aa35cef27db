//! The tasks of a batch, over the kernels of one tier.

use super::element::unit;
use super::kernel::{Bench, CACHE_LINE, Group, Kernels, Lines, chunk_lines, prefetch};
use super::mass::{GroupSums, add_pages};
use super::schedule::{AttentionScratch, Plan, ThreadScratch, part_floats};
use super::{AttentionShape, SequenceRows};
use crate::pool::BarrierPool;
use crate::simd::LANES;
use reef_kv::page::{HeadLayout, PageFormat, PageRef, PartFormat, Scaling};
use std::ops::Range;
use std::sync::atomic::Ordering;

/// A pointer that tasks share; each writes places of its own.
#[derive(Clone, Copy)]
struct Shared(*mut f32);

// SAFETY: tasks write disjoint rows (output, masses) or records (parts, key-group sums), and records are
// read only by the task that saw all others finish through `remaining`.
unsafe impl Sync for Shared {}

impl Shared {
    fn pointer(self) -> *mut f32 {
        self.0
    }
}

/// What all tasks of a batch share.
struct Batch<'a> {
    kernels: &'static Kernels,
    shape: &'a AttentionShape,
    /// Tokens of a key group.
    tokens: usize,
    /// Key groups of a page.
    groups: usize,
    value_groups: usize,
    /// Layout of the first KV head, in the order of [`PageFormat::ALL`].
    layouts: [HeadLayout; PageFormat::ALL.len()],
    arena: &'a [u8],
}

/// Key groups between the one that is read and the one that is fetched into the cache meanwhile.
const LOOK_AHEAD: usize = 2;

/// What the thread will probably read after a task: known only by guess, and used only to fetch.
#[derive(Clone, Copy, Default)]
struct Following<'a> {
    kv_head: usize,
    pages: &'a [PageRef],
}

/// Rows of one sequence against one KV head.
struct Task<'a> {
    sequence: &'a SequenceRows<'a>,
    kv_head: usize,
    rows: Range<usize>,
    watch: Option<Watch>,
}

/// Where it is kept what an observed task attended to.
struct Watch {
    /// Pages that any row of the sequence sees.
    seen: Range<usize>,
    /// Sums of the task's lines, from the first key group of `seen` on.
    sums: GroupSums,
    /// Masses of the task's KV head, `[rows][pages]`.
    masses: *mut f32,
}

impl Watch {
    /// The watch over a task of `plan`; tiles keep their sums in the scratch of their thread, at `own`.
    ///
    /// # Safety
    /// The arrays have the room that `AttentionScratch::plan` makes.
    unsafe fn new(
        batch: &Batch<'_>,
        scratch: &AttentionScratch,
        (number, kv_head): (usize, usize),
        (sums, masses): (Shared, Shared),
        own: *mut f32,
    ) -> Option<Watch> {
        let plan = &scratch.plans[number];
        let first = plan.sums?;
        let seen = plan.pages(&scratch.splits);
        let groups = seen.len() * batch.groups;
        let of_head = &scratch.masses.sequences[number];
        // SAFETY: the caller's contract.
        unsafe {
            let lines = plan.tile_rows * batch.shape.group_heads();
            let base = match plan.parts {
                Some(_) => sums.pointer().add(first + kv_head * GroupSums::floats(lines, groups)),
                None => own,
            };
            let masses = masses.pointer().add(of_head.start + kv_head * of_head.len());
            let sums = GroupSums { base, stride: GroupSums::stride(groups) };
            Some(Watch { seen, sums, masses })
        }
    }
}

/// [`super::paged_attention`] on a SIMD tier; arguments are checked.
pub(super) fn run(
    kernels: &'static Kernels,
    pool: &BarrierPool,
    shape: &AttentionShape,
    sequences: &[SequenceRows<'_>],
    arena: &[u8],
    scratch: &mut AttentionScratch,
    out: &mut [f32],
) {
    let tasks = scratch.plan(shape, sequences, pool.threads());
    let batch = Batch::new(kernels, shape, arena);
    let parts = Shared(scratch.parts.pointer());
    let sums = Shared(scratch.sums.pointer());
    let masses = Shared(scratch.masses.values.as_mut_ptr());
    let out = Shared(out.as_mut_ptr());
    let scratch = &*scratch;
    // Where there are many, a thread takes all KV heads of a cut: they lie side by side in a page.
    let bundle = if tasks >= 8 * pool.threads() * shape.kv_heads { shape.kv_heads } else { 1 };
    let do_task = |task: usize, thread: usize| {
        let mut own = scratch.threads[thread].lock().unwrap_or_else(|bad| bad.into_inner());
        let number = scratch.plans.partition_point(|plan| plan.first_task <= task) - 1;
        let plan = &scratch.plans[number];
        let sequence = &sequences[number];
        let cut = (task - plan.first_task) / shape.kv_heads;
        let kv_head = (task - plan.first_task) % shape.kv_heads;
        // Threads take bundles in turn, more or less.
        let skipped =
            if (task + 1).is_multiple_of(bundle) { (pool.threads() - 1) * bundle } else { 0 };
        let next = task - plan.first_task + 1 + skipped;
        let splits = &scratch.splits[plan.splits.clone()];
        let last = sequence.rows.min((cut + 1) * plan.tile_rows);
        // SAFETY: the argument checks of `paged_attention` bound every read and write of the output;
        // `plan` made room for parts and thread scratch; disjointness as `Shared` says.
        unsafe {
            let of_thread = own.sums.pointer();
            let watch = Watch::new(&batch, scratch, (number, kv_head), (sums, masses), of_thread);
            match plan.parts {
                None => {
                    let rows = cut * plan.tile_rows..last;
                    let task = Task { sequence, kv_head, rows, watch };
                    batch.tile(&task, splits, &mut own, first_out(&batch, plan, out));
                }
                Some(first) => {
                    let task = Task { sequence, kv_head, rows: 0..sequence.rows, watch };
                    let record = part_floats(shape.head_dim);
                    let parts_of_split = sequence.rows * shape.group_heads() * record;
                    let parts_of_head = parts_of_split * splits.len();
                    let parts = parts.pointer().add(first + kv_head * parts_of_head);
                    let mine = parts.add(cut * parts_of_split);
                    let following = following(sequence, splits, next, shape.kv_heads);
                    batch.split(&task, splits[cut].clone(), following, &mut own, mine);
                    let remaining = &scratch.remaining[number * shape.kv_heads + kv_head];
                    // Acquire and release: the last to finish sees the parts of all others.
                    if remaining.fetch_sub(1, Ordering::AcqRel) == 1 {
                        let out = first_out(&batch, plan, out);
                        batch.join(&task, parts, splits.len(), &mut own, out);
                    }
                }
            }
        }
    };
    pool.for_each(tasks / bundle, &|index, thread| {
        (index * bundle..(index + 1) * bundle).for_each(|task| do_task(task, thread));
    });
}

/// The pages of task `next` of a sequence, if there is one.
fn following<'a>(
    sequence: &SequenceRows<'a>,
    splits: &[Range<usize>],
    next: usize,
    kv_heads: usize,
) -> Following<'a> {
    match splits.get(next / kv_heads) {
        Some(split) => {
            Following { kv_head: next % kv_heads, pages: &sequence.pages[split.clone()] }
        }
        None => Following::default(),
    }
}

/// The first output row of a sequence.
///
/// # Safety
/// The row is inside the output.
unsafe fn first_out(batch: &Batch<'_>, plan: &Plan, out: Shared) -> *mut f32 {
    // SAFETY: the caller's contract.
    unsafe { out.pointer().add(plan.first_row * batch.shape.heads * batch.shape.head_dim) }
}

impl Task<'_> {
    fn lines(&self, shape: &AttentionShape) -> usize {
        self.rows.len() * shape.group_heads()
    }
}

impl<'a> Batch<'a> {
    /// Looks up once what every key group asks for.
    fn new(kernels: &'static Kernels, shape: &'a AttentionShape, arena: &'a [u8]) -> Batch<'a> {
        let page = shape.page();
        Batch {
            kernels,
            shape,
            tokens: page.key_group(),
            groups: page.key_groups(),
            value_groups: page.value_groups(),
            layouts: PageFormat::ALL.map(|format| page.head(format, 0)),
            arena,
        }
    }

    /// All splits of the context for a tile of rows, merged in order.
    ///
    /// # Safety
    /// `out` points to the sequence's first row; thread scratch holds the lines of a task.
    unsafe fn tile(
        &self,
        task: &Task<'_>,
        splits: &[Range<usize>],
        own: &mut ThreadScratch,
        out: *mut f32,
    ) {
        let dim = self.shape.head_dim;
        let count = task.lines(self.shape);
        // SAFETY: the caller's contract.
        unsafe {
            let totals = own.totals.pointer();
            self.clear_totals(totals, count);
            for split in splits {
                self.walk(task, split.clone(), Following::default(), own);
                let part = own.part.pointer();
                for line in 0..count {
                    (self.kernels.close)(&self.lines(own, line), dim, part);
                    (self.kernels.merge)(totals.add(line * part_floats(dim)), part, dim);
                }
            }
            self.write_out(task, totals, out);
        }
    }

    /// One split of the context for all rows of a sequence; its parts go to `parts`.
    ///
    /// # Safety
    /// `parts` has room for the lines' records; thread scratch holds the lines of a task.
    unsafe fn split(
        &self,
        task: &Task<'_>,
        pages: Range<usize>,
        following: Following<'_>,
        own: &mut ThreadScratch,
        parts: *mut f32,
    ) {
        let dim = self.shape.head_dim;
        // SAFETY: the caller's contract.
        unsafe {
            self.walk(task, pages, following, own);
            for line in 0..task.lines(self.shape) {
                let part = parts.add(line * part_floats(dim));
                (self.kernels.close)(&self.lines(own, line), dim, part);
            }
        }
    }

    /// Merges the parts `[splits][lines]` of all splits in order and writes the rows.
    ///
    /// # Safety
    /// `parts` holds the records; `out` points to the sequence's first row.
    unsafe fn join(
        &self,
        task: &Task<'_>,
        parts: *const f32,
        splits: usize,
        own: &mut ThreadScratch,
        out: *mut f32,
    ) {
        let dim = self.shape.head_dim;
        let count = task.lines(self.shape);
        // SAFETY: the caller's contract.
        unsafe {
            let totals = own.totals.pointer();
            self.clear_totals(totals, count);
            for record in 0..splits * count {
                let total = totals.add(record % count * part_floats(dim));
                (self.kernels.merge)(total, parts.add(record * part_floats(dim)), dim);
            }
            self.write_out(task, totals, out);
        }
    }

    /// # Safety
    /// `totals` has room for `count` records.
    unsafe fn clear_totals(&self, totals: *mut f32, count: usize) {
        let floats = part_floats(self.shape.head_dim);
        // SAFETY: the caller's contract; zero bytes are 0.0.
        unsafe {
            totals.write_bytes(0, count * floats);
            for line in 0..count {
                *totals.add(line * floats + self.shape.head_dim) = f32::NEG_INFINITY;
            }
        }
    }

    /// # Safety
    /// `totals` holds the task's records; `out` points to the sequence's first row.
    unsafe fn write_out(&self, task: &Task<'_>, totals: *const f32, out: *mut f32) {
        let dim = self.shape.head_dim;
        let group = self.shape.group_heads();
        for line in 0..task.lines(self.shape) {
            let row = task.rows.start + line / group;
            let head = task.kv_head * group + line % group;
            // SAFETY: the caller's contract.
            unsafe {
                let out = out.add((row * self.shape.heads + head) * dim);
                (self.kernels.finish)(totals.add(line * part_floats(dim)), dim, out);
            }
        }
        if let Some(watch) = &task.watch {
            // SAFETY: the caller's contract.
            unsafe { self.collect(task, watch, totals) }
        }
    }

    /// Adds what each line attended to to the masses of its row.
    ///
    /// # Safety
    /// `totals` holds the task's records; all splits have left their sums.
    unsafe fn collect(&self, task: &Task<'_>, watch: &Watch, totals: *const f32) {
        let dim = self.shape.head_dim;
        let of_page = self.groups;
        let groups = watch.seen.len() * of_page;
        for line in 0..task.lines(self.shape) {
            let row = task.rows.start + line / self.shape.group_heads();
            let first = row * task.sequence.pages.len() + watch.seen.start;
            // SAFETY: the caller's contract; rows are this task's alone.
            unsafe {
                let sums = watch.sums.at(line, 0);
                (self.kernels.settle)(totals.add(line * part_floats(dim)), dim, sums, groups);
                let masses = watch.masses.add(first);
                let masses = std::slice::from_raw_parts_mut(masses, watch.seen.len());
                add_pages(masses, std::slice::from_raw_parts(sums.base, groups), of_page);
            }
        }
    }

    /// The arrays of `own` from line `first` on.
    ///
    /// # Safety
    /// `first` is a line the scratch has room for.
    unsafe fn lines(&self, own: &mut ThreadScratch, first: usize) -> Lines {
        let dim = self.shape.head_dim;
        // SAFETY: the caller's contract.
        unsafe {
            Lines {
                query: own.query.pointer().add(first * dim),
                values: own.values.pointer().add(first * dim),
                lanes: own.lanes.pointer().add(first * LANES),
                minima: own.minima.pointer().add(first * self.value_groups * LANES),
                max: own.max.pointer().add(first),
                visible: own.visible.as_ptr().add(first),
            }
        }
    }

    /// Takes the pages of one split into freshly cleared lines.
    ///
    /// # Safety
    /// Thread scratch holds the lines of a task; pages lie inside the arena.
    unsafe fn walk(
        &self,
        task: &Task<'_>,
        split: Range<usize>,
        following: Following<'_>,
        own: &mut ThreadScratch,
    ) {
        let count = task.lines(self.shape);
        let groups = self.groups;
        let pages = &task.sequence.pages[split.clone()];
        let mut run = None;
        // SAFETY: the caller's contract.
        unsafe {
            let lines = self.lines(own, 0);
            lines.values.write_bytes(0, count * self.shape.head_dim);
            lines.lanes.write_bytes(0, count * LANES);
            lines.minima.write_bytes(0, count * self.value_groups * LANES);
            std::slice::from_raw_parts_mut(lines.max, count).fill(f32::NEG_INFINITY);
            let sums = task.watch.as_ref().map(|watch| {
                let sums = watch.sums.at(0, (split.start - watch.seen.start) * groups);
                sums.clear(count, split.len() * groups);
                sums
            });
            for (index, page) in pages.iter().enumerate() {
                if run != Some(page.run) {
                    self.scale_queries(task, page.run, own);
                    run = Some(page.run);
                }
                for group in 0..groups {
                    if self.look(task, page, group, own) {
                        let number = index * groups + group;
                        let ahead = number + LOOK_AHEAD;
                        let ahead = self.nth_group(task.kv_head, pages, following, ahead);
                        let sums = sums.map(|sums| sums.at(0, number));
                        self.attend(task, page, group, ahead, own, sums);
                    }
                }
            }
        }
    }

    /// The `number`-th key group from the start of `pages`, going on in the pages that this thread
    /// will probably read after them.
    fn nth_group<'p>(
        &self,
        kv_head: usize,
        pages: &'p [PageRef],
        following: Following<'p>,
        number: usize,
    ) -> Option<(usize, &'p PageRef, usize)> {
        let groups = self.groups;
        let (index, group) = (number / groups, number % groups);
        if let Some(page) = pages.get(index) {
            return Some((kv_head, page, group));
        }
        let page = following.pages.get(index - pages.len())?;
        Some((following.kv_head, page, group))
    }

    /// Fills the lines' queries: those rotated for `run`, times the score factor.
    ///
    /// # Safety
    /// As [`walk`](Self::walk).
    unsafe fn scale_queries(&self, task: &Task<'_>, run: u8, own: &mut ThreadScratch) {
        let dim = self.shape.head_dim;
        let of_head = self.shape.group_heads() * dim;
        for (index, row) in task.rows.clone().enumerate() {
            let from = (usize::from(run) * task.sequence.rows + row) * self.shape.heads * dim;
            // SAFETY: the caller's contract; `check` made sure that the run has queries.
            unsafe {
                let query = task.sequence.queries.as_ptr().add(from + task.kv_head * of_head);
                let out = own.query.pointer().add(index * of_head);
                (self.kernels.scale)(query, self.shape.scale, of_head, out);
            }
        }
    }

    /// Sets which tokens of a key group each line sees; gives whether any does.
    fn look(&self, task: &Task<'_>, page: &PageRef, group: usize, own: &mut ThreadScratch) -> bool {
        let tokens = self.tokens;
        let first = page.first + (group * tokens) as u32;
        let heads = self.shape.group_heads();
        let mut any = false;
        for (index, row) in task.rows.clone().enumerate() {
            let position = task.sequence.first_position + row as u32;
            let visible = self.shape.visible(first, tokens, position);
            any |= visible.0 < visible.1;
            own.visible[index * heads..(index + 1) * heads].fill(visible);
        }
        any
    }

    /// One key group against all lines of a task; an observed one leaves its sums.
    ///
    /// # Safety
    /// As [`walk`](Self::walk).
    unsafe fn attend(
        &self,
        task: &Task<'_>,
        page: &PageRef,
        group: usize,
        ahead: Option<(usize, &PageRef, usize)>,
        own: &mut ThreadScratch,
        sums: Option<GroupSums>,
    ) {
        // SAFETY: the caller's contract.
        unsafe {
            let mut source = self.group(task.kv_head, page, group, own);
            if let Some((kv_head, page, group)) = ahead {
                (source.ahead_k, source.ahead_v) = self.stored(kv_head, page, group);
                self.fetch_scales(kv_head, page, group);
            }
            let kernels = &self.kernels.chunk[page.format as usize];
            let bench = Bench {
                folded: own.folded.pointer(),
                scores: own.scores.pointer(),
                weights: own.weights.pointer(),
            };
            let count = task.lines(self.shape);
            let mut first = 0;
            while first < count {
                let taken = chunk_lines(count - first);
                let visible = &own.visible[first..first + taken];
                if visible.iter().any(|(low, high)| low < high) {
                    let lines = self.lines(own, first);
                    kernels[taken](&source, &lines, &bench);
                    if let Some(sums) = sums {
                        let (tokens, sums) = (self.tokens, sums.at(first, 0));
                        (self.kernels.observe)(bench.scores, tokens, lines.max, taken, sums);
                    }
                }
                first += taken;
                // Once is enough.
                (source.ahead_k, source.ahead_v) = (source.k, source.v);
            }
        }
    }

    /// `PageShape::head`, looked up.
    fn layout(&self, format: PageFormat, kv_head: usize) -> HeadLayout {
        let at = self.layouts[format as usize];
        let skip = kv_head * at.end;
        HeadLayout {
            k: at.k + skip,
            v: at.v + skip,
            k_scale: at.k_scale + skip,
            k_min: at.k_min + skip,
            v_scale: at.v_scale + skip,
            v_min: at.v_min + skip,
            end: at.end + skip,
        }
    }

    /// Where the K and V of a key group lie.
    fn stored(&self, kv_head: usize, page: &PageRef, group: usize) -> (*const u8, *const u8) {
        let at = self.layout(page.format, kv_head);
        let values = group * self.tokens * self.shape.head_dim;
        let skip = |part: PartFormat| values * part.bits() / 8;
        let bytes = &self.arena[page.byte_offset()..];
        let k = at.k + skip(page.format.keys());
        let v = at.v + skip(page.format.values());
        (bytes[k..].as_ptr(), bytes[v..].as_ptr())
    }

    /// Fetches the scales of a key group into the cache; f16 has none.
    fn fetch_scales(&self, kv_head: usize, page: &PageRef, group: usize) {
        let at = self.layout(page.format, kv_head);
        match page.format.keys().scaling() {
            Scaling::None => return,
            Scaling::Whole => {
                return prefetch(self.arena[page.byte_offset() + at.k_scale..].as_ptr());
            }
            Scaling::Grouped => {}
        }
        let of_keys = 2 * self.shape.head_dim;
        let of_values = 2 * self.tokens * self.value_groups;
        let parts = [(at.k_scale, of_keys), (at.k_min, of_keys), (at.v_scale, of_values)];
        for (part, bytes) in parts.into_iter().chain([(at.v_min, of_values)]) {
            let start = page.byte_offset() + part + group * bytes;
            for line in (start..start + bytes).step_by(CACHE_LINE) {
                prefetch(self.arena[line..].as_ptr());
            }
        }
    }

    /// Where a key group lies; V scales that come in groups are spread first.
    ///
    /// # Safety
    /// As [`walk`](Self::walk).
    unsafe fn group(
        &self,
        kv_head: usize,
        page: &PageRef,
        group: usize,
        own: &mut ThreadScratch,
    ) -> Group {
        let (dim, tokens) = (self.shape.head_dim, self.tokens);
        let at = self.layout(page.format, kv_head);
        let (mut v_scale, v_min) = (own.v_scale.pointer().cast_const(), own.v_min.pointer());
        // SAFETY: the layout keeps every part inside the page, and `check` the page in the arena.
        unsafe {
            let page_bytes = self.arena.as_ptr().add(page.byte_offset());
            let mut k_scale = page_bytes.add(at.k_scale);
            let values = page.format.values();
            match values.scaling() {
                Scaling::None => {}
                Scaling::Whole => v_scale = page_bytes.add(at.v_scale).cast(),
                Scaling::Grouped => {
                    let groups = self.value_groups;
                    let row = group * tokens * groups * 2;
                    let (scales, minima) = (page_bytes.add(at.v_scale), page_bytes.add(at.v_min));
                    let spread = self.kernels.spread;
                    let out = own.v_scale.pointer();
                    spread(scales.add(row).cast(), tokens, groups, unit(values), out);
                    spread(minima.add(row).cast(), tokens, groups, 1.0, v_min);
                    k_scale = k_scale.add(2 * group * dim);
                }
            }
            let (k, v) = self.stored(kv_head, page, group);
            Group {
                k,
                v,
                k_scale,
                k_min: page_bytes.add(at.k_min).cast::<u16>().wrapping_add(group * dim),
                v_scale,
                v_min,
                ahead_k: k,
                ahead_v: v,
                tokens,
                head_dim: dim,
            }
        }
    }
}
