//! Carrying a plan out, step by step, so that at every moment each table names live pages.
//!
//! Re-encoding allocates nothing: jobs lie on the stack, spans and block records were sized when the pool
//! was made, the ledger has room since the sequence last grew.

use std::sync::Arc;

use super::victim::becomes;
use super::{DropTarget, Move, MoveKind, ReliefPlan};
use crate::block::{BlockRecord, Page};
use crate::ladder::Rung;
use crate::ledger::LedgerEntry;
use crate::page::{PAGE_ALIGN, PageFormat, PageShape};
use crate::pool::{BlockPool, Shared};
use crate::span::{Place, Slot, Spans};
use crate::table::Sequence;

/// Most pages of one batch of jobs: all layers of most models, few enough for the stack.
pub const BATCH_PAGES: usize = 64;

/// One page to re-encode. Jobs of one batch touch disjoint bytes and may run on several threads.
#[derive(Debug)]
pub struct EncodeJob<'a> {
    /// Shape of both pages.
    pub shape: PageShape,
    /// Format of `source`.
    pub source_format: PageFormat,
    /// The live page, full of accepted tokens.
    pub source: &'a [u8],
    /// Format wanted.
    pub target_format: PageFormat,
    /// The page to write; its bytes are arbitrary before.
    pub target: &'a mut [u8],
    /// Set it where `source` holds NaN or infinity: the page stays as it is, for good.
    pub refused: bool,
}

/// What was carried out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReliefOutcome {
    /// Blocks re-encoded, counted per KV group and rung.
    pub encoded_blocks: usize,
    /// Blocks dropped, over all full-attention groups; of a policy that chooses per layer, pages.
    pub dropped_blocks: usize,
    /// Pages that moved between spans to make room.
    pub moved_pages: usize,
    /// Pages the kernel refused (NaN or infinity).
    pub refused_pages: usize,
    /// Blocks left as they were, or in part, because no target page was to be had. None for a plan that
    /// is carried out at once.
    pub unfinished_blocks: usize,
    /// Bytes of pages given back.
    pub gained_bytes: usize,
}

/// A plan that cannot be carried out now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReliefError {
    /// A step is in flight and may read the pages.
    #[error("relief while a step is in flight: wait for the step's fence")]
    StepInFlight,
}

/// Carries out `plan`: drops, re-encodes through `encode` (batches of at most [`BATCH_PAGES`] jobs of one
/// block, all from one format to one other), compacts, and writes `step`, the reasons and the expected
/// harm into the ledgers. `sequences` are all sequences of the pool (pages of others are never moved;
/// moves of requests that are gone are skipped).
///
/// # Errors
/// [`ReliefError::StepInFlight`], and nothing was done.
///
/// # Panics
/// Only where `encode` does; then the pages of the batch under way stay as they were, nothing leaks, and
/// the tables, views, ledgers and accounts are consistent.
pub fn apply_relief(
    pool: &BlockPool,
    sequences: &mut [&mut Sequence],
    plan: &ReliefPlan,
    step: u64,
    encode: &mut dyn FnMut(&mut [EncodeJob<'_>]),
) -> Result<ReliefOutcome, ReliefError> {
    if pool.shared.step_in_flight(&pool.shared.state()) {
        return Err(ReliefError::StepInFlight);
    }
    let mut relief = Relief { pool, sequences, step, outcome: Default::default() };
    for planned in &plan.moves {
        let found = relief.sequences.iter().position(|s| s.config().request == planned.request);
        let Some(index) = found else { continue };
        match planned.kind {
            MoveKind::Drop(target) => relief.drop_target(index, planned, target),
            MoveKind::Encode { group, format } => {
                relief.encode_block(index, planned, group, format, encode);
            }
        }
    }
    if !plan.demand_pages.is_empty() {
        let reserve = pool.shared.geometry.reserve_spans;
        relief.compact(|spans| spans.can_take(&plan.demand_pages, reserve));
    }
    Ok(relief.outcome)
}

/// The block being re-encoded.
#[derive(Clone, Copy)]
struct Subject<'a> {
    /// Index of its sequence.
    sequence: usize,
    planned: &'a Move,
    group: usize,
    /// Index of its record.
    block: u32,
    format: PageFormat,
}

struct Relief<'a, 'b> {
    pool: &'a BlockPool,
    sequences: &'a mut [&'b mut Sequence],
    step: u64,
    outcome: ReliefOutcome,
}

impl Relief<'_, '_> {
    fn shared(&self) -> &Arc<Shared> {
        &self.pool.shared
    }

    fn drop_target(&mut self, index: usize, planned: &Move, target: DropTarget) {
        let sequence = &mut self.sequences[index];
        let before = sequence.dropped_blocks();
        let bytes = match target.page {
            None => sequence.drop_block(target.first),
            Some((group, layer)) => sequence.drop_page(group, layer, target.first),
        };
        if bytes > 0 {
            // Pages of single layers count when they make up a block.
            let blocks = sequence.dropped_blocks() - before;
            self.outcome.dropped_blocks += blocks;
            self.record(index, planned, blocks, bytes);
        }
    }

    fn record(&mut self, index: usize, planned: &Move, blocks: usize, bytes: usize) {
        self.outcome.gained_bytes += bytes;
        // Pages that were refused, or found no room, cost nothing.
        let done = bytes as f64 / planned.bytes.max(bytes) as f64;
        self.sequences[index].ledger.record(LedgerEntry {
            step: self.step,
            request: planned.request,
            rung: planned.rung(),
            blocks,
            bytes,
            reason: planned.reason,
            harm: planned.harm * done,
        });
    }

    fn encode_block(
        &mut self,
        index: usize,
        planned: &Move,
        group: usize,
        format: PageFormat,
        encode: &mut dyn FnMut(&mut [EncodeJob<'_>]),
    ) {
        let sequence = &self.sequences[index];
        let Some(entry) = sequence.entry_index(group, planned.first) else { return };
        if !sequence.is_sealed(planned.first) {
            return;
        }
        let held = &sequence.tables[group][entry];
        let (block, refused) = (held.guard.index(), held.refused);
        let subject = Subject { sequence: index, planned, group, block, format };
        for source in PageFormat::ALL {
            let changes = becomes(self.pool, group, source, Some(format)) != source;
            if changes && !refused[source] && !self.encode_pages(subject, source, encode) {
                // Others have taken the room since: what is done is valid.
                self.outcome.unfinished_blocks += 1;
                return;
            }
        }
    }

    /// Re-encodes the pages of the block that are in `source`, a batch at a time. `false` where no target
    /// page was to be had.
    fn encode_pages(
        &mut self,
        subject: Subject<'_>,
        source: PageFormat,
        encode: &mut dyn FnMut(&mut [EncodeJob<'_>]),
    ) -> bool {
        let mut next_layer = 0;
        loop {
            let mut batch = Batch::new(self.shared());
            let wanted = self.pages_from(subject, source, next_layer, |_, _| {});
            if wanted == 0 {
                return true;
            }
            self.take_targets(subject, wanted, &mut batch);
            if batch.count == 0 {
                return false;
            }
            // Only now: making room may have moved the pages.
            let count = batch.count;
            let mut found = 0;
            self.pages_from(subject, source, next_layer, |layer, page| {
                if found < count {
                    batch.pages[found] = (layer, page);
                    next_layer = layer + 1;
                }
                found += 1;
            });
            self.encode_batch(subject, batch, encode);
        }
    }

    /// Visits at most [`BATCH_PAGES`] pages of the block in `source`, from layer `from` on, that are not
    /// pinned; none where the block is shared. Returns how many there are.
    fn pages_from(
        &self,
        subject: Subject<'_>,
        source: PageFormat,
        from: usize,
        mut visit: impl FnMut(usize, Page),
    ) -> usize {
        let state = self.shared().state();
        let record = &state.blocks[subject.block as usize];
        if record.owners != 1 {
            return 0;
        }
        let pinned = &self.pool.config().groups[subject.group].pinned;
        let pages = record.pages.iter().enumerate().skip(from);
        let held = pages.filter_map(|(layer, page)| Some((layer, (*page)?)));
        let meant = held.filter(|(layer, page)| page.format == source && !pinned.contains(layer));
        meant.take(BATCH_PAGES).map(|(layer, page)| visit(layer, page)).count()
    }

    /// Target pages for as many of `wanted` pages as there is room for; at least one unless even
    /// compaction yields none.
    fn take_targets(&mut self, subject: Subject<'_>, wanted: usize, batch: &mut Batch) {
        let class = self.shared().geometry.class_of[subject.group][subject.format];
        batch.take(class, wanted);
        if batch.count == 0 {
            self.compact(|spans| spans.can_take_one(class));
            batch.take(class, wanted);
        }
    }

    fn encode_batch(
        &mut self,
        subject: Subject<'_>,
        mut batch: Batch,
        encode: &mut dyn FnMut(&mut [EncodeJob<'_>]),
    ) {
        let Subject { sequence, planned, group, block, format } = subject;
        let shape = self.pool.config().groups[group].shape;
        let refused = batch.run(shape, format, encode);
        let mut saved_bytes = 0;
        // From here on nothing of the caller's runs.
        let count = std::mem::take(&mut batch.count);
        for (job, refused) in refused.iter().enumerate().take(count) {
            let ((layer, old), place) = (batch.pages[job], batch.places[job]);
            let shared = &self.pool.shared;
            let mut state = shared.state();
            if *refused {
                shared.reuse(&mut state, place);
                drop(state);
                self.outcome.refused_pages += 1;
                if let Some(entry) = self.sequences[sequence].entry_index(group, planned.first) {
                    self.sequences[sequence].tables[group][entry].refused[old.format] = true;
                }
                continue;
            }
            // Swap the entry, then free the old page.
            state.spans.set(place, Slot::Held(block));
            let page = Page { offset: shared.page_offset(&state, place), format };
            state.blocks[block as usize].pages[layer] = Some(page);
            state.used[format] += shape.page_bytes(format);
            shared.give_back_page(&mut state, old);
            drop(state);
            self.sequences[sequence].replace_page(group, planned.first, layer, page);
            saved_bytes += shape.page_bytes(old.format) - shape.page_bytes(format);
        }
        if saved_bytes > 0 {
            let mut new = false;
            if let Some(entry) = self.sequences[sequence].entry_index(group, planned.first) {
                // A block that takes several batches, or that a panic left half done, counts once.
                let falls = &mut self.sequences[sequence].tables[group][entry].falls;
                new = Rung::to_format(format).is_some_and(|rung| falls.insert(rung));
            }
            self.outcome.encoded_blocks += usize::from(new);
            self.record(sequence, planned, usize::from(new), saved_bytes);
        }
    }

    /// Compacts until `enough` holds, as far as that helps, and has the views follow. Pages of blocks that
    /// no one of the sequences holds stay.
    fn compact(&mut self, enough: impl Fn(&Spans) -> bool) {
        let holds = |sequence: &Sequence, block: u32, record: &BlockRecord| {
            let (group, first) = (record.group as usize, record.first as usize);
            let entry = sequence.entry_index(group, first);
            entry.is_some_and(|entry| sequence.tables[group][entry].guard.index() == block)
        };
        let (pool, mut moved_pages) = (self.pool, 0);
        let sequences = std::cell::RefCell::new(&mut *self.sequences);
        let movable = |block: u32, record: &BlockRecord| {
            sequences.borrow().iter().any(|s| holds(s, block, record))
        };
        let moved = |block: u32, record: &BlockRecord, layer: usize| {
            moved_pages += 1;
            let mut sequences = sequences.borrow_mut();
            let holder = sequences.iter_mut().find(|sequence| holds(sequence, block, record));
            if let (Some(holder), Some(page)) = (holder, record.pages[layer]) {
                let (group, first) = (record.group as usize, record.first as usize);
                holder.move_page(group, first, layer, page.offset);
            }
        };
        let mut state = pool.shared.state();
        pool.shared.compact(&mut state, enough, movable, moved);
        drop(state);
        self.outcome.moved_pages += moved_pages;
    }
}

/// Target pages of a batch and the pages that go there; the targets are given back on drop (also when
/// the kernel panics) unless `count` was taken.
struct Batch {
    shared: Arc<Shared>,
    count: usize,
    places: [Place; BATCH_PAGES],
    /// Layer and page of the source.
    pages: [(usize, Page); BATCH_PAGES],
}

impl Batch {
    fn new(shared: &Arc<Shared>) -> Batch {
        let no_page = Page { offset: 0, format: PageFormat::F16 };
        Batch {
            shared: shared.clone(),
            count: 0,
            places: [Place::default(); BATCH_PAGES],
            pages: [(0, no_page); BATCH_PAGES],
        }
    }

    /// Takes up to `wanted` target pages of `class`, the reserve included.
    fn take(&mut self, class: usize, wanted: usize) {
        let mut state = self.shared.state();
        while self.count < wanted {
            let Some(place) = state.spans.take(class, Slot::Target, 0) else { break };
            self.places[self.count] = place;
            self.count += 1;
        }
    }

    /// Runs the jobs outside the lock. Returns which were refused.
    fn run(
        &self,
        shape: PageShape,
        format: PageFormat,
        encode: &mut dyn FnMut(&mut [EncodeJob<'_>]),
    ) -> [bool; BATCH_PAGES] {
        let mut offsets = [0; BATCH_PAGES];
        let state = self.shared.state();
        for (offset, place) in offsets.iter_mut().zip(&self.places[..self.count]) {
            *offset = state.spans.offset(*place);
        }
        drop(state);
        let mut jobs: [EncodeJob<'_>; BATCH_PAGES] = std::array::from_fn(|job| {
            let source_format = self.pages[job].1.format;
            let (source, target): (&[u8], &mut [u8]) = if job < self.count {
                let source_offset = self.pages[job].1.offset as usize * PAGE_ALIGN;
                let (from_bytes, to_bytes) =
                    (shape.page_bytes(source_format), shape.page_bytes(format));
                // SAFETY: no step is in flight (checked at the start; the caller's `&mut` sequences keep
                // new writers out), and the source is a live page that no one writes.
                let source = unsafe { self.shared.arena.slice(source_offset, from_bytes) };
                // SAFETY: the target is a slot taken for this job alone; no table names it yet.
                let target = unsafe { self.shared.arena.slice_mut(offsets[job], to_bytes) };
                (source, target)
            } else {
                (&[], &mut [])
            };
            EncodeJob {
                shape,
                source_format,
                source,
                target_format: format,
                target,
                refused: false,
            }
        });
        encode(&mut jobs[..self.count]);
        std::array::from_fn(|job| jobs[job].refused)
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        if self.count == 0 {
            return;
        }
        let mut state = self.shared.state();
        for place in &self.places[..self.count] {
            self.shared.reuse(&mut state, *place);
        }
    }
}
