//! Carrying a plan out, step by step, so that at every moment each table names live pages.
//!
//! Re-encoding allocates nothing: jobs lie on the stack, spans and block records were sized when the pool
//! was made, the ledger has room since the sequence last grew. Who holds which block is written into the
//! block records first, in one pass over all tables: then each move and each page finds its holders at once.

use std::sync::Arc;

use super::batch::{BATCH_PAGES, Batch, EncodeJob};
use super::convert::changes;
use super::victim::zone_of;
use super::{DropTarget, Move, MoveKind, ReliefPlan};
use crate::account::ByFormat;
use crate::block::{BlockRecord, Page};
use crate::harm::zone_weight;
use crate::ladder::Rung;
use crate::ledger::{LedgerEntry, Reason};
use crate::page::PageFormat;
use crate::pool::{BlockPool, Shared, State};
use crate::span::{Slot, Spans};
use crate::table::Sequence;

/// Blocks that came down one rung for one reason, each counted once however many hold it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepDown {
    /// Blocks, counted as in a [`LedgerEntry`].
    pub blocks: u64,
    /// Bytes of pages given back.
    pub bytes: u64,
}

/// [`StepDown`] by rung and reason, `[rung][reason]`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepsDown([[StepDown; Reason::ALL.len()]; Rung::ALL.len()]);

impl StepsDown {
    fn add(&mut self, planned: &Move, blocks: usize, bytes: usize) {
        let sum = &mut self.0[planned.rung() as usize][planned.reason as usize];
        sum.blocks += blocks as u64;
        sum.bytes += bytes as u64;
    }

    /// Adds `other`, cell by cell.
    pub fn merge(&mut self, other: &StepsDown) {
        for (sum, more) in self.0.iter_mut().flatten().zip(other.0.iter().flatten()) {
            sum.blocks += more.blocks;
            sum.bytes += more.bytes;
        }
    }

    /// Every rung and reason with its sums, zeros included.
    pub fn iter(&self) -> impl Iterator<Item = (Rung, Reason, StepDown)> {
        let of_rung = move |rung: Rung| {
            Reason::ALL
                .into_iter()
                .map(move |reason| (rung, reason, self.0[rung as usize][reason as usize]))
        };
        Rung::ALL.into_iter().flat_map(of_rung)
    }
}

/// What was carried out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReliefOutcome {
    /// By rung and reason.
    pub steps_down: StepsDown,
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
/// harm into the ledgers. `sequences` are all sequences of the pool: a block that any other holds too is
/// neither re-encoded nor moved. Of a block that several of them hold each gets the new pages into its view
/// and an entry into its ledger. Moves of blocks that are gone are skipped, and so are those that a holder
/// who has come since forbids.
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
    let mut state = pool.shared.state();
    if pool.shared.step_in_flight(&state) {
        return Err(ReliefError::StepInFlight);
    }
    list_holders(&mut state, sequences);
    drop(state);
    let mut relief = Relief { pool, sequences, plan, step, outcome: Default::default() };
    for planned in &plan.moves {
        let Some(subject) = relief.subject(planned) else { continue };
        match planned.kind {
            MoveKind::Drop(target) => relief.drop_target(subject, target),
            MoveKind::Encode { group, format } => {
                relief.encode_block(subject, group, format, encode);
            }
        }
    }
    if !plan.demand_pages.is_empty() {
        let reserve = pool.shared.geometry.reserve_spans;
        relief.compact(|spans| spans.can_take(&plan.demand_pages, reserve));
    }
    Ok(relief.outcome)
}

/// Writes into each block's record which of `sequences` hold it.
fn list_holders(state: &mut State, sequences: &[&mut Sequence]) {
    for record in &mut state.blocks {
        // The first holder of an idle block would be one of an earlier list, perhaps a longer one.
        (record.holders, record.first_holder) = (0, 0);
    }
    for (index, sequence) in sequences.iter().enumerate() {
        for entry in sequence.tables.iter().flatten() {
            let record = &mut state.blocks[entry.guard.index() as usize];
            if record.holders == 0 {
                record.first_holder = index as u32;
            }
            record.holders = record.holders.saturating_add(1);
        }
    }
}

/// Whether all that hold the block are at hand. So it is with idle blocks, which nobody holds.
fn is_at_hand(record: &BlockRecord) -> bool {
    record.owners == u32::from(record.holders) && record.holders < u16::MAX
}

/// Calls `visit` for each of `sequences` that holds the block of `record`, with the index of its entry.
fn for_each_holder(
    sequences: &mut [&mut Sequence],
    block: u32,
    record: &BlockRecord,
    mut visit: impl FnMut(&mut Sequence, usize),
) {
    let (group, first) = (record.group as usize, record.first as usize);
    let mut left = record.holders;
    for sequence in &mut sequences[record.first_holder as usize..] {
        if left == 0 {
            return;
        }
        let entry = sequence.entry_index(group, first);
        let entry = entry.filter(|&entry| sequence.tables[group][entry].guard.index() == block);
        if let Some(entry) = entry {
            visit(sequence, entry);
            left -= 1;
        }
    }
}

/// The block of a move.
#[derive(Clone, Copy)]
struct Subject<'a> {
    planned: &'a Move,
    /// Index of its record.
    block: u32,
    /// Of its sequences, the index of the first.
    sequence: usize,
}

struct Relief<'a, 'b> {
    pool: &'a BlockPool,
    sequences: &'a mut [&'b mut Sequence],
    plan: &'a ReliefPlan,
    step: u64,
    outcome: ReliefOutcome,
}

impl Relief<'_, '_> {
    fn shared(&self) -> &Arc<Shared> {
        &self.pool.shared
    }

    /// The block that `planned` is about; `None` where it is gone, or held by somebody who is not at hand.
    fn subject<'m>(&self, planned: &'m Move) -> Option<Subject<'m>> {
        let is_it = |sequence: &Sequence| sequence.config().request == planned.request;
        let group = match planned.kind {
            MoveKind::Encode { group, .. } => Some(group),
            MoveKind::Drop(target) => target.page.map(|(group, _)| group),
        };
        let block_of = |sequence: &Sequence| {
            let mut groups = group.map_or(0..sequence.tables.len(), |group| group..group + 1);
            groups.find_map(|group| {
                let entry = sequence.entry_index(group, planned.first)?;
                Some(sequence.tables[group][entry].guard.index())
            })
        };
        let state = self.shared().state();
        let likely = state.blocks.get(planned.likely_block as usize);
        let likely = likely.map(|record| record.first_holder as usize);
        let likely = likely.filter(|&at| self.sequences.get(at).is_some_and(|s| is_it(s)));
        let sequence = likely.or_else(|| self.sequences.iter().position(|s| is_it(s)))?;
        let block = block_of(self.sequences[sequence])?;
        let at_hand = is_at_hand(&state.blocks[block as usize]);
        at_hand.then_some(Subject { planned, block, sequence })
    }

    fn drop_target(&mut self, subject: Subject<'_>, target: DropTarget) {
        let Subject { planned, sequence, .. } = subject;
        let sequence = &mut self.sequences[sequence];
        let before = sequence.dropped_blocks();
        let bytes = match target.page {
            None => sequence.drop_block(target.first),
            Some((group, layer)) => sequence.drop_page(group, layer, target.first),
        };
        if bytes > 0 {
            // Pages of single layers count when they make up a block.
            let blocks = sequence.dropped_blocks() - before;
            self.outcome.dropped_blocks += blocks;
            self.outcome.gained_bytes += bytes;
            self.outcome.steps_down.add(planned, blocks, bytes);
            note(sequence, self.step, planned, (blocks, bytes), 1.0);
        }
    }

    fn encode_block(
        &mut self,
        subject: Subject<'_>,
        group: usize,
        format: PageFormat,
        encode: &mut dyn FnMut(&mut [EncodeJob<'_>]),
    ) {
        let Some(refused) = self.refused_by_holders(subject, format) else { return };
        for source in PageFormat::ALL {
            let changes = changes(&self.pool.config().groups[group], source, format);
            if changes
                && !refused[source]
                && !self.encode_pages(subject, group, (source, format), encode)
            {
                // Others have taken the room since: what is done is valid.
                self.outcome.unfinished_blocks += 1;
                return;
            }
        }
    }

    /// Formats of which any holder knows that the kernel refused a page; `None` where a holder's block is
    /// open, or where one of several does not permit `format`.
    fn refused_by_holders(
        &mut self,
        subject: Subject<'_>,
        format: PageFormat,
    ) -> Option<ByFormat<bool>> {
        let mut refused = ByFormat::<bool>::default();
        let mut good = true;
        self.visit_holders(subject.block, |sequence, group, entry, shared| {
            let entry = &sequence.tables[group][entry];
            let permits = !shared || sequence.config().contract.permits_format(format);
            good &= permits && sequence.is_sealed(entry.first);
            PageFormat::ALL.into_iter().for_each(|format| refused[format] |= entry.refused[format]);
        });
        good.then_some(refused)
    }

    /// Calls `visit(sequence, group, entry, whether there are several)` for each holder of a block.
    fn visit_holders(
        &mut self,
        block: u32,
        mut visit: impl FnMut(&mut Sequence, usize, usize, bool),
    ) {
        let state = self.pool.shared.state();
        let record = &state.blocks[block as usize];
        let (group, shared) = (record.group as usize, record.holders > 1);
        for_each_holder(self.sequences, block, record, |sequence, entry| {
            visit(sequence, group, entry, shared);
        });
    }

    /// Re-encodes the pages of the block that are in `formats.0` to `formats.1`, a batch at a time. `false`
    /// where no target page was to be had.
    fn encode_pages(
        &mut self,
        subject: Subject<'_>,
        group: usize,
        (source, target): (PageFormat, PageFormat),
        encode: &mut dyn FnMut(&mut [EncodeJob<'_>]),
    ) -> bool {
        let mut next_layer = 0;
        loop {
            let mut batch = Batch::new(self.shared());
            let wanted = self.pages_from(subject, source, next_layer, |_, _| {});
            if wanted == 0 {
                return true;
            }
            self.take_targets(self.shared().geometry.class_of[group][target], wanted, &mut batch);
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
            let shape = self.pool.config().groups[group].shape;
            let refused = batch.run(shape, target, encode);
            self.swap_pages(subject, target, batch, &refused);
        }
    }

    /// Visits at most [`BATCH_PAGES`] pages of the block in `source`, from layer `from` on, that are not
    /// pinned; none where somebody who is not at hand holds the block. Returns how many there are.
    fn pages_from(
        &self,
        subject: Subject<'_>,
        source: PageFormat,
        from: usize,
        mut visit: impl FnMut(usize, Page),
    ) -> usize {
        let state = self.shared().state();
        let record = &state.blocks[subject.block as usize];
        if !is_at_hand(record) {
            return 0;
        }
        let pinned = &self.pool.config().groups[record.group as usize].pinned;
        let pages = record.pages.iter().enumerate().skip(from);
        let held = pages.filter_map(|(layer, page)| Some((layer, (*page)?)));
        let meant = held.filter(|(layer, page)| page.format == source && !pinned.contains(layer));
        meant.take(BATCH_PAGES).map(|(layer, page)| visit(layer, page)).count()
    }

    /// Target pages of `class` for as many of `wanted` pages as there is room for; at least one unless even
    /// compaction yields none.
    fn take_targets(&mut self, class: usize, wanted: usize, batch: &mut Batch) {
        batch.take(class, wanted);
        if batch.count == 0 {
            self.compact(|spans| spans.can_take_one(class));
            batch.take(class, wanted);
        }
    }

    /// Puts the pages of a batch that ran in the place of their sources, for every holder.
    fn swap_pages(
        &mut self,
        subject: Subject<'_>,
        format: PageFormat,
        mut batch: Batch,
        refused: &[bool; BATCH_PAGES],
    ) {
        let pool = self.pool;
        let mut guard = pool.shared.state();
        let state = &mut *guard;
        let record = &state.blocks[subject.block as usize];
        if !is_at_hand(record) {
            // Somebody has come while the kernel ran, whose view names the old pages: as it was.
            return;
        }
        // From here on nothing of the caller's runs.
        let known_as = record.cached.then(|| record.fidelity());
        let shape = pool.config().groups[record.group as usize].shape;
        let refused_formats = ByFormat::default();
        let mut swapped = Swapped { format, pages: 0, saved_bytes: 0, refused: refused_formats };
        let count = std::mem::take(&mut batch.count);
        for (job, refused) in refused.iter().enumerate().take(count) {
            let ((layer, old), place) = (batch.pages[job], batch.places[job]);
            if *refused {
                pool.shared.reuse(state, place);
                self.outcome.refused_pages += 1;
                swapped.refused[old.format] = true;
                continue;
            }
            // Swap the entry, then free the old page.
            state.spans.set(place, Slot::Held(subject.block));
            let page = Page { offset: pool.shared.page_offset(state, place), format };
            state.blocks[subject.block as usize].pages[layer] = Some(page);
            state.used[format] += shape.page_bytes(format);
            pool.shared.give_back_page(state, old);
            batch.pages[swapped.pages] = (layer, page);
            swapped.pages += 1;
            swapped.saved_bytes += shape.page_bytes(old.format) - shape.page_bytes(format);
        }
        let record = &mut state.blocks[subject.block as usize];
        // The prefix index tells others what they may use.
        if known_as.is_some_and(|known_as| known_as < record.fidelity()) {
            record.lowered = true;
            state.note_cache_change(subject.block);
        }
        let record = &state.blocks[subject.block as usize];
        self.follow_swap(subject, record, &swapped, &batch.pages[..swapped.pages]);
    }

    /// Has every holder's view, table and ledger follow; `pages` are the new ones, by layer.
    fn follow_swap(
        &mut self,
        subject: Subject<'_>,
        record: &BlockRecord,
        swapped: &Swapped,
        pages: &[(usize, Page)],
    ) {
        let Subject { planned, block, .. } = subject;
        let (step, weights) = (self.step, &self.plan.weights);
        let group = record.group as usize;
        let total = total_weight(self.sequences, block, record, weights);
        let mut new = false;
        for_each_holder(self.sequences, block, record, |sequence, entry| {
            for &(layer, page) in pages {
                sequence.replace_page(group, planned.first, layer, page);
            }
            let entry = &mut sequence.tables[group][entry];
            for format in PageFormat::ALL {
                entry.refused[format] |= swapped.refused[format];
            }
            if swapped.saved_bytes > 0 {
                // A block that takes several batches, or that a panic left half done, counts once.
                let rung = Rung::to_format(swapped.format);
                let fell = rung.is_some_and(|rung| entry.falls.insert(rung));
                new |= fell;
                let share = match total {
                    Some(total) => weight_of(sequence, group, planned.first, weights) / total,
                    None => 1.0 / f64::from(record.holders),
                };
                note(sequence, step, planned, (usize::from(fell), swapped.saved_bytes), share);
            }
        });
        self.outcome.encoded_blocks += usize::from(new);
        self.outcome.gained_bytes += swapped.saved_bytes;
        self.outcome.steps_down.add(planned, usize::from(new), swapped.saved_bytes);
    }

    /// Compacts until `enough` holds, as far as that helps, and has the views follow. Pages of blocks that
    /// anyone holds who is not at hand stay.
    fn compact(&mut self, enough: impl Fn(&Spans) -> bool) {
        let (pool, mut moved_pages) = (self.pool, 0);
        let sequences = &mut *self.sequences;
        let moved = |block: u32, record: &BlockRecord, layer: usize| {
            moved_pages += 1;
            let Some(page) = record.pages[layer] else { return };
            let (group, first) = (record.group as usize, record.first as usize);
            for_each_holder(sequences, block, record, |sequence, _| {
                sequence.move_page(group, first, layer, page.offset);
            });
        };
        let mut state = pool.shared.state();
        pool.shared.compact(&mut state, enough, is_at_hand, moved);
        drop(state);
        self.outcome.moved_pages += moved_pages;
    }
}

/// What came of a batch.
struct Swapped {
    /// Of the new pages.
    format: PageFormat,
    /// How many there are.
    pages: usize,
    saved_bytes: usize,
    /// Formats of sources that the kernel refused.
    refused: ByFormat<bool>,
}

/// Enters what was done of `planned` into the ledger of one of its sequences: `(blocks, bytes)`, and this
/// `share` of the harm.
fn note(
    sequence: &mut Sequence,
    step: u64,
    planned: &Move,
    (blocks, bytes): (usize, usize),
    share: f64,
) {
    // Pages that were refused, or found no room, cost nothing.
    let done = bytes as f64 / planned.bytes.max(bytes) as f64;
    let request = sequence.config().request;
    sequence.ledger.record(LedgerEntry {
        step,
        request,
        rung: planned.rung(),
        blocks,
        bytes,
        reason: planned.reason,
        harm: planned.harm * done * share,
    });
}

/// The weight of the block at `first` among what `sequence` holds; 0 where the plan does not know it.
fn weight_of(sequence: &Sequence, group: usize, first: usize, weights: &[(u64, f64)]) -> f64 {
    let request = sequence.config().request;
    let found = weights.binary_search_by_key(&request, |(request, _)| *request);
    let Ok(index) = found else { return 0.0 };
    zone_weight(zone_of(sequence, group, first)) / weights[index].1.max(1.0)
}

/// Sum of the weights of a block among what each of its holders has; `None` where it has one holder, or
/// the plan knows none of them.
fn total_weight(
    sequences: &mut [&mut Sequence],
    block: u32,
    record: &BlockRecord,
    weights: &[(u64, f64)],
) -> Option<f64> {
    let (group, first) = (record.group as usize, record.first as usize);
    let mut total = 0.0;
    if record.holders > 1 {
        for_each_holder(sequences, block, record, |sequence, _| {
            total += weight_of(sequence, group, first, weights);
        });
    }
    (total > 0.0).then_some(total)
}
