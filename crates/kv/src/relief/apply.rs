//! Carrying a plan out, step by step, so that at every moment each table names live pages.

use std::collections::HashMap;
use std::sync::Arc;

use super::{DropTarget, Move, MoveKind, ReliefPlan};
use crate::block::{BlockRecord, Page};
use crate::ladder::Rung;
use crate::ledger::LedgerEntry;
use crate::page::{PAGE_ALIGN, PageFormat, PageShape};
use crate::pool::{BlockPool, Shared};
use crate::span::{Place, Slot, Spans};
use crate::table::Sequence;

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
    /// Blocks re-encoded, counted per KV group.
    pub encoded_blocks: usize,
    /// Blocks dropped, over all full-attention groups.
    pub dropped_blocks: usize,
    /// Pages that moved between spans to make room.
    pub moved_pages: usize,
    /// Pages the kernel refused (NaN or infinity).
    pub refused_pages: usize,
    /// Blocks left as they were, or in part, because no target page was to be had. None for a plan of
    /// `plan_relief` that is carried out at once.
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

/// Carries out `plan`: drops, re-encodes through `encode` (batches of jobs of one block), compacts, and
/// writes `step` and the reasons into the ledgers. `sequences` are all sequences of the pool (pages of
/// others are never moved; moves of requests that are gone are skipped).
///
/// # Errors
/// [`ReliefError::StepInFlight`], and nothing was done.
///
/// # Panics
/// Only where `encode` does; then the page under way stays as it was, nothing leaks, and the tables,
/// views and accounts are consistent.
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
    let mut relief = Relief { shared: &pool.shared, sequences, step, outcome: Default::default() };
    for planned in &plan.moves {
        let found = relief.sequences.iter().position(|s| s.config().request == planned.request);
        let Some(index) = found else { continue };
        match planned.kind {
            MoveKind::Drop(target) => relief.drop_block(index, planned, target),
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

struct Relief<'a, 'b> {
    shared: &'a Arc<Shared>,
    sequences: &'a mut [&'b mut Sequence],
    step: u64,
    outcome: ReliefOutcome,
}

impl Relief<'_, '_> {
    fn drop_block(&mut self, index: usize, planned: &Move, target: DropTarget) {
        let sequence = &mut self.sequences[index];
        let bytes = match target.page {
            None => sequence.drop_block(target.first),
            Some((group, layer)) => sequence.drop_page(group, layer, target.first),
        };
        if bytes > 0 {
            self.outcome.dropped_blocks += 1;
            self.record(index, planned, 1, bytes);
        }
    }

    fn record(&mut self, index: usize, planned: &Move, blocks: usize, bytes: usize) {
        self.outcome.gained_bytes += bytes;
        self.sequences[index].ledger.record(LedgerEntry {
            step: self.step,
            request: planned.request,
            rung: planned.rung(),
            blocks,
            bytes,
            reason: planned.reason,
            harm: 0.0,
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
        let table = &self.sequences[index].tables[group];
        let found = table.binary_search_by_key(&planned.first, |entry| entry.first);
        let Ok(entry) = found else { return };
        let block = table[entry].guard.index();
        if !self.sequences[index].is_sealed(planned.first) {
            return;
        }
        let mut next_layer = 0;
        loop {
            let wanted = self.pages_to_encode(block, next_layer).len();
            if wanted == 0 {
                return;
            }
            let targets = self.take_targets(group, format, wanted);
            if targets.places.is_empty() {
                // Others have taken the room since, or the plan promised none: what is done is valid.
                self.outcome.unfinished_blocks += 1;
                return;
            }
            // Only now: making room may have moved the pages.
            let pages = self.pages_to_encode(block, next_layer);
            let batch = &pages[..targets.places.len()];
            next_layer = batch.last().map_or(usize::MAX, |(layer, _)| layer + 1);
            self.encode_batch(index, planned, (group, entry, format), batch, targets, encode);
        }
    }

    /// f16 pages of the block from layer `from` on; none where the block is shared.
    fn pages_to_encode(&self, block: u32, from: usize) -> Vec<(usize, Page)> {
        let state = self.shared.state();
        let record = &state.blocks[block as usize];
        let pages = record.pages.iter().enumerate().skip(from);
        let held = pages.filter_map(|(layer, page)| Some((layer, (*page)?)));
        let f16 = |(_, page): &(usize, Page)| page.format == PageFormat::F16 && record.owners == 1;
        held.filter(f16).collect()
    }

    /// Target pages for as many of `wanted` pages as the reserve has room for; at least one unless even
    /// compaction yields none.
    fn take_targets(&mut self, group: usize, format: PageFormat, wanted: usize) -> TargetPages {
        let class = self.shared.geometry.class_of[group][format];
        let mut targets = TargetPages { shared: self.shared.clone(), places: Vec::new() };
        let take = |targets: &mut TargetPages| {
            let mut state = self.shared.state();
            while targets.places.len() < wanted {
                let Some(place) = state.spans.take(class, Slot::Target, 0) else { break };
                targets.places.push(place);
            }
        };
        take(&mut targets);
        if targets.places.is_empty() {
            self.compact(|spans| spans.can_take_one(class));
            take(&mut targets);
        }
        targets
    }

    fn encode_batch(
        &mut self,
        index: usize,
        planned: &Move,
        (group, entry, format): (usize, usize, PageFormat),
        batch: &[(usize, Page)],
        mut targets: TargetPages,
        encode: &mut dyn FnMut(&mut [EncodeJob<'_>]),
    ) {
        let shape = self.shared.config.groups[group].shape;
        let refused = run_jobs(self.shared, shape, format, batch, &targets.places, encode);
        let block = self.sequences[index].tables[group][entry].guard.index();
        let mut saved_bytes = 0;
        for ((&(layer, old), &place), &refused) in batch.iter().zip(&targets.places).zip(&refused) {
            let mut state = self.shared.state();
            if refused {
                self.shared.reuse(&mut state, place);
                self.outcome.refused_pages += 1;
                self.sequences[index].tables[group][entry].refused[old.format] = true;
                continue;
            }
            // Swap the entry, then free the old page.
            state.spans.set(place, Slot::Held(block));
            let page = Page { offset: self.shared.page_offset(&state, place), format };
            state.blocks[block as usize].pages[layer] = Some(page);
            state.used[format] += shape.page_bytes(format);
            self.shared.give_back_page(&mut state, old);
            drop(state);
            self.sequences[index].replace_page(group, planned.first, layer, page);
            saved_bytes += shape.page_bytes(old.format) - shape.page_bytes(format);
        }
        targets.places.clear();
        if saved_bytes > 0 {
            let held = &mut self.sequences[index].tables[group][entry];
            // A block that a panic left half done is counted once.
            let new = Rung::to_format(format).is_some_and(|rung| held.falls.insert(rung));
            let blocks = usize::from(new);
            self.outcome.encoded_blocks += blocks;
            self.record(index, planned, blocks, saved_bytes);
        }
    }

    /// Compacts until `enough` holds, as far as that helps, and has the views follow.
    fn compact(&mut self, enough: impl Fn(&Spans) -> bool) {
        let mut holders = HashMap::new();
        for (index, sequence) in self.sequences.iter().enumerate() {
            for (group, table) in sequence.tables.iter().enumerate() {
                for held in table {
                    holders.insert(held.guard.index(), (index, group, held.first));
                }
            }
        }
        let sequences = &mut *self.sequences;
        let mut moved_pages = 0;
        let moved = |block: u32, record: &BlockRecord, layer: usize| {
            moved_pages += 1;
            // Only pages of these holders are movable.
            let Some(&(index, group, first)) = holders.get(&block) else { return };
            let Some(page) = record.pages[layer] else { return };
            sequences[index].move_page(group, first, layer, page.offset);
        };
        let mut state = self.shared.state();
        self.shared.compact(&mut state, enough, |block, _| holders.contains_key(&block), moved);
        drop(state);
        self.outcome.moved_pages += moved_pages;
    }
}

/// Target pages of a batch; given back on drop (also when the kernel panics) unless cleared.
struct TargetPages {
    shared: Arc<Shared>,
    places: Vec<Place>,
}

impl Drop for TargetPages {
    fn drop(&mut self) {
        if self.places.is_empty() {
            return;
        }
        let mut state = self.shared.state();
        for place in self.places.drain(..) {
            self.shared.reuse(&mut state, place);
        }
    }
}

/// Runs one batch outside the lock. Returns which pages were refused.
fn run_jobs(
    shared: &Shared,
    shape: PageShape,
    format: PageFormat,
    batch: &[(usize, Page)],
    places: &[Place],
    encode: &mut dyn FnMut(&mut [EncodeJob<'_>]),
) -> Vec<bool> {
    let offsets: Vec<usize> = {
        let state = shared.state();
        places.iter().map(|place| state.spans.offset(*place)).collect()
    };
    let job = |(&(_, page), &offset): (&(usize, Page), &usize)| {
        let source_offset = page.offset as usize * PAGE_ALIGN;
        let source_bytes = shape.page_bytes(page.format);
        // SAFETY: no step is in flight (checked at the start; the caller's `&mut` sequences keep new
        // writers out), the source is a live page that no one writes.
        let source = unsafe { shared.arena.slice(source_offset, source_bytes) };
        // SAFETY: the target is a slot taken for this job alone; no table names it yet.
        let target = unsafe { shared.arena.slice_mut(offset, shape.page_bytes(format)) };
        let source_format = page.format;
        EncodeJob { shape, source_format, source, target_format: format, target, refused: false }
    };
    let mut jobs: Vec<EncodeJob<'_>> = batch.iter().zip(&offsets).map(job).collect();
    encode(&mut jobs);
    jobs.iter().map(|job| job.refused).collect()
}
