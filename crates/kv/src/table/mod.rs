//! A sequence: its block tables in all KV groups, its positions, the view that kernels read.

mod attach;
mod drops;
mod fork;
mod observe;

pub use attach::AttachedBlock;

use std::sync::Arc;

use crate::account::ByFormat;
use crate::block::{BlockGuard, BlockRecord, Page};
use crate::keep::KeptSpans;
use crate::ladder::{Fidelity, Rung};
use crate::ledger::{Ledger, LedgerEntry};
use crate::page::{PageFormat, PageRef, SequenceView};
use crate::pool::{BlockPool, CopyOf, Shortage, State};
use crate::runs;
use crate::scores::Scores;

/// What a sequence is created with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequenceConfig {
    /// The request; unique among the sequences of a pool.
    pub request: u64,
    /// What may be done to its KV.
    pub contract: Fidelity,
    /// Lower gives way first.
    pub priority: i32,
    /// Positions up to here are used as they are; past it they are relative (kv-memory point 14).
    pub trained_context: usize,
    /// Tokens the sequence will hold at most (prompt + `max_tokens`): predicted demand stops there.
    pub max_tokens: Option<usize>,
}

/// The rungs that pages of a block were re-encoded by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Falls(u8);

impl Falls {
    /// Adds `rung`. Returns whether it is new.
    pub(crate) fn insert(&mut self, rung: Rung) -> bool {
        let new = !self.contains(rung);
        self.0 |= 1 << rung as u8;
        new
    }

    /// The rungs of both.
    pub(crate) fn and(self, other: Falls) -> Falls {
        Falls(self.0 | other.0)
    }

    pub(crate) fn contains(self, rung: Rung) -> bool {
        self.0 & (1 << rung as u8) != 0
    }
}

/// One block in a table.
#[derive(Debug)]
pub(crate) struct Entry {
    pub guard: BlockGuard,
    /// Original position of its first token.
    pub first: usize,
    /// Formats of which a kernel refused to re-encode a page (NaN or infinity): it is not asked again.
    pub refused: ByFormat<bool>,
    /// What this block has been through, for the ledger's invariant. Layers that were dropped since
    /// count too.
    pub falls: Falls,
    /// What it had been through when the sequence got it: another one's, or recorded before.
    pub inherited: Falls,
    /// Layers that hold a page of it; the entry goes with the last.
    pub(crate) held_layers: u16,
}

/// A sequence's tables. Dropping it gives every block back.
#[derive(Debug)]
pub struct Sequence {
    pool: BlockPool,
    config: SequenceConfig,
    /// Accepted tokens, dropped ones included.
    pub(crate) next_position: usize,
    /// Positions that have pages; `>= next_position`.
    pub(crate) grown_end: usize,
    pub(crate) tables: Vec<Vec<Entry>>,
    view: Arc<SequenceView>,
    pub(crate) relative: bool,
    pub(crate) scores: Scores,
    kept_spans: KeptSpans,
    /// Blocks since dropped or freed that had fallen down each rung.
    pub(crate) falls_gone: [usize; Rung::ALL.len()],
    /// Pages dropped, all layers.
    dropped_pages: usize,
    /// The part of them that is missing from what it holds now.
    pub(crate) lacking_pages: usize,
    /// The worst of what the next token will attend.
    pub(crate) lossy: Fidelity,
    /// The worst of what its computation has attended.
    pub(crate) attended: Fidelity,
    held_bytes: usize,
    peak_bytes: usize,
    pub(crate) ledger: Ledger,
}

/// What a request's KV memory went through.
#[derive(Clone, Debug, PartialEq)]
pub struct KvUsage {
    /// Accepted tokens still held, by format: token-layers / layers, full-attention groups (or all
    /// groups where every one has a window).
    pub tokens_by_format: ByFormat<f64>,
    /// Token-layers missing from what is held because they were dropped / layers of all groups. What leaves a
    /// window does not count.
    pub dropped_tokens: f64,
    /// Bytes of pages held now.
    pub held_bytes: usize,
    /// Most bytes of pages ever held.
    pub peak_bytes: usize,
    /// Accepted tokens x f16 bytes per token.
    pub bytes_at_f16: usize,
    /// Each step down, oldest first.
    pub relief: Vec<LedgerEntry>,
}

impl Sequence {
    /// An empty sequence in `pool`.
    pub fn new(pool: &BlockPool, config: SequenceConfig) -> Sequence {
        let groups = &pool.config().groups;
        Sequence {
            pool: pool.clone(),
            config,
            next_position: 0,
            grown_end: 0,
            tables: groups.iter().map(|_| Vec::new()).collect(),
            view: Arc::new(empty_view(pool)),
            relative: false,
            scores: Scores::new(groups.iter().map(|group| group.layers)),
            kept_spans: KeptSpans::default(),
            falls_gone: [0; Rung::ALL.len()],
            dropped_pages: 0,
            lacking_pages: 0,
            lossy: Fidelity::Exact,
            attended: Fidelity::Exact,
            held_bytes: 0,
            peak_bytes: 0,
            ledger: Ledger::default(),
        }
    }

    /// What it was created with.
    pub fn config(&self) -> &SequenceConfig {
        &self.config
    }

    /// The pool its blocks are in.
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// Accepted tokens, dropped ones included: the original position of the next token.
    pub fn next_position(&self) -> usize {
        self.next_position
    }

    /// Accepted tokens still held by the full-attention layer that holds most; all where every group has
    /// a window.
    pub fn kept_tokens(&self) -> usize {
        let kept = self.full_layers().map(|(group, layer)| self.kept_in_layer(group, layer));
        kept.max().unwrap_or(self.next_position)
    }

    /// Accepted tokens that a full-attention layer still holds.
    pub(crate) fn kept_in_layer(&self, group: usize, layer: usize) -> usize {
        let held = self.view.groups[group].layers[layer].len() * self.block_size();
        self.next_position - (self.pages_end() - held)
    }

    /// Blocks dropped so far: pages dropped / full-attention layers, rounded down.
    pub(crate) fn dropped_blocks(&self) -> usize {
        self.dropped_pages / self.full_layers().count().max(1)
    }

    /// (group, layer in the group) of every full-attention layer.
    pub(crate) fn full_layers(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        let groups = self.pool.config().groups.iter().enumerate();
        let full = groups.filter(|(_, group)| group.window.is_none());
        full.flat_map(|(index, group)| (0..group.layers).map(move |layer| (index, layer)))
    }

    /// Pages dropped so far, all layers. What leaves a window does not count.
    pub fn dropped_pages(&self) -> usize {
        self.dropped_pages
    }

    /// Token-layers missing from what is held because they were dropped / layers of all groups.
    pub fn dropped_tokens(&self) -> f64 {
        let layers = self.pool.config().layers();
        (self.lacking_pages * self.block_size()) as f64 / layers as f64
    }

    /// Tokens it may still grow by: `wanted`, capped by `max_tokens`.
    pub fn remaining(&self, wanted: usize) -> usize {
        let limit = self.config.max_tokens.unwrap_or(usize::MAX);
        wanted.min(limit.saturating_sub(self.next_position))
    }

    /// Bytes of pages held, shared ones included.
    pub fn held_bytes(&self) -> usize {
        self.held_bytes
    }

    /// Blocks held, of all groups, shared ones included.
    pub fn held_blocks(&self) -> usize {
        self.tables.iter().map(Vec::len).sum()
    }

    /// Whether kernels see relative positions (see `GroupView::shifts`).
    pub fn positions_are_relative(&self) -> bool {
        self.relative
    }

    /// The pages, as kernels read them: every block held, open ones included, oldest first. Always in
    /// step with the tables; costs nothing to ask for.
    pub fn view(&self) -> &SequenceView {
        &self.view
    }

    /// The same pages for an executor to hold while a step is in flight: a change of the tables while
    /// somebody holds it goes to a copy, so that nobody sees it change.
    pub fn shared_view(&self) -> Arc<SequenceView> {
        self.view.clone()
    }

    /// The worst of all that the computation of its tokens has attended so far: formats, drops, and what
    /// attached blocks were made from. Never improves until [`clear`](Self::clear).
    pub fn fidelity(&self) -> Fidelity {
        self.attended
    }

    /// The record of each step down.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// New blocks, in each group, that `tokens` more tokens need.
    pub(crate) fn new_blocks(&self, tokens: usize) -> usize {
        let end = self.next_position.saturating_add(tokens);
        let blocks = end.saturating_sub(self.pages_end()).div_ceil(self.block_size());
        // More than any arena holds, few enough that no sum of bytes overflows.
        blocks.min(u32::MAX as usize)
    }

    /// The blocks held that the next `tokens` tokens write in and that must be copied before: somebody else
    /// holds them, or the prefix index names them.
    pub(crate) fn unwritable(&self, tokens: usize, state: &State) -> impl Iterator<Item = CopyOf> {
        let end = self.next_position.saturating_add(tokens);
        let tables = self.tables.iter().enumerate();
        tables.flat_map(move |(group, table)| {
            let open = table.iter().rev().take_while(|entry| !self.is_sealed(entry.first));
            open.filter(move |entry| tokens > 0 && entry.first < end).filter_map(move |entry| {
                let block = entry.guard.index();
                let first = entry.first;
                let shared = !state.blocks[block as usize].is_writable();
                #[cfg(feature = "mutants")]
                let shared =
                    shared && !crate::mutant::is_active(crate::mutant::Mutant::NoCopyOnWrite);
                shared.then_some(CopyOf { block, group, first })
            })
        })
    }

    /// First position without a page.
    pub(crate) fn pages_end(&self) -> usize {
        self.grown_end.next_multiple_of(self.pool.config().block_size())
    }

    /// Gets f16 pages for the next `tokens` positions in every group, all or nothing. The model may
    /// then write K and V of those positions into the view's pages; until then a position's bytes are
    /// arbitrary (NaN in debug builds, so that a kernel that reads past the written tokens shows).
    /// Growing again by no more than was grown and not yet committed changes nothing.
    ///
    /// An open block that another sequence holds too is copied first, in whole pages (copy-on-write); the
    /// last one that holds it writes it in place.
    ///
    /// # Errors
    /// [`Shortage`] where the free pages do not suffice; the sequence is unchanged. Relieve and retry.
    /// While a step is in flight nothing is copied: `free_bytes` is then 0; retry when it has ended.
    pub fn grow(&mut self, tokens: usize) -> Result<(), Shortage> {
        self.ledger.reserve();
        let new = self.new_blocks(tokens);
        let copies: Vec<CopyOf> = self.unwritable(tokens, &self.pool.shared.state()).collect();
        if new > 0 || !copies.is_empty() {
            let first = self.pages_end();
            let new = vec![new; self.tables.len()];
            let (copied, taken) = self.pool.shared.take_blocks(&copies, &new, first)?;
            for (copy, block) in copies.iter().zip(copied) {
                self.replace_block(copy, block);
            }
            for (group, taken) in taken.into_iter().enumerate() {
                self.push_blocks(group, taken);
            }
            self.note_held();
        }
        self.grown_end = self.grown_end.max(self.next_position.saturating_add(tokens));
        self.update_positions();
        Ok(())
    }

    /// Puts a copy in the place of a block that is shared.
    fn replace_block(&mut self, copy: &CopyOf, block: BlockGuard) {
        let Some(index) = self.entry_index(copy.group, copy.first) else { return };
        let pages = self.pool.shared.state().blocks[block.index() as usize].pages.clone();
        self.tables[copy.group][index].guard = block;
        let pages = pages.into_iter().enumerate();
        for (layer, page) in pages.filter_map(|(layer, page)| Some((layer, page?))) {
            self.replace_page(copy.group, copy.first, layer, page);
        }
    }

    /// Puts blocks, oldest first, behind the others of their group.
    pub(crate) fn push_blocks(&mut self, group: usize, blocks: Vec<BlockGuard>) {
        let block_size = self.block_size();
        let page_bytes = self.pool.shared.page_bytes(group);
        let state = self.pool.shared.state();
        let record = |guard: &BlockGuard| &state.blocks[guard.index() as usize];
        let records: Vec<&BlockRecord> = blocks.iter().map(record).collect();
        let view = &mut Arc::make_mut(&mut self.view).groups[group];
        let mut opens_a_run = false;
        // Layer by layer: a view's list is long, a record's short.
        for (index, layer) in view.layers.iter_mut().enumerate() {
            let run = (view.runs[index].len() - 1) as u8;
            let mut end = layer.last().map(|last| last.first as usize + block_size);
            reserve_tight(layer, records.len());
            for record in &records {
                let Some(Page { offset, format }) = record.pages[index] else { continue };
                let first = record.first;
                // Behind a dropped block.
                opens_a_run |= end.is_some_and(|end| end != first as usize);
                end = Some(first as usize + block_size);
                layer.push(PageRef { offset, first, format, run });
                self.held_bytes += page_bytes[format];
            }
            self.scores.extend(group, index, layer.len());
        }
        let table = &mut self.tables[group];
        reserve_tight(table, records.len());
        let counts = records.iter().map(|record| {
            let held_layers = record.pages.iter().flatten().count();
            (record.first as usize, held_layers as u16)
        });
        let counts: Vec<(usize, u16)> = counts.collect();
        drop(state);
        for (guard, (first, held_layers)) in blocks.into_iter().zip(counts) {
            let (refused, falls, inherited) = Default::default();
            table.push(Entry { guard, first, refused, falls, inherited, held_layers });
        }
        if opens_a_run {
            self.number_runs(group);
        }
    }

    /// Whether it holds nothing and nothing was accepted.
    pub(crate) fn is_empty(&self) -> bool {
        self.grown_end == 0
    }

    /// Keeps the peak of bytes held.
    pub(crate) fn note_held(&mut self) {
        self.peak_bytes = self.peak_bytes.max(self.held_bytes);
    }

    fn block_size(&self) -> usize {
        self.pool.config().block_size()
    }

    /// Accepts the next `tokens` positions (at most what was grown): full blocks are sealed, and window
    /// groups give back the blocks that no later query attends.
    pub fn commit(&mut self, tokens: usize) {
        debug_assert!(
            self.next_position + tokens <= self.grown_end,
            "commit beyond what was grown"
        );
        #[cfg(feature = "mutants")]
        let tokens = match crate::mutant::is_active(crate::mutant::Mutant::KeepRejected) {
            true => self.grown_end - self.next_position,
            false => tokens,
        };
        let before = self.next_position;
        self.next_position = (self.next_position + tokens).min(self.grown_end);
        if self.next_position > before {
            self.attended = self.attended.max(self.lossy);
            self.seal_from(before);
        }
        for group in 0..self.tables.len() {
            if let Some(window) = self.pool.config().groups[group].window {
                // The next query is at `next_position` and attends positions > next_position - window.
                let first_attended = (self.next_position + 1).saturating_sub(window);
                #[cfg(feature = "mutants")]
                let first_attended = first_attended
                    + usize::from(crate::mutant::is_active(crate::mutant::Mutant::EarlyWindow));
                let block_size = self.block_size();
                let out = |entry: &Entry| entry.first + block_size <= first_attended;
                let count = self.tables[group].iter().take_while(|entry| out(entry)).count();
                self.remove_blocks(group, 0, count);
            }
        }
    }

    /// Notes of the blocks sealed since `next_position` was `before` what they were computed from.
    fn seal_from(&self, before: usize) {
        let block_size = self.block_size();
        if before / block_size == self.next_position / block_size {
            return;
        }
        #[cfg(feature = "mutants")]
        if crate::mutant::is_active(crate::mutant::Mutant::IgnoreContext) {
            return;
        }
        let mut state = self.pool.shared.state();
        for table in &self.tables {
            let new = table.iter().rev().take_while(|entry| entry.first + block_size > before);
            for entry in new.filter(|entry| self.is_sealed(entry.first)) {
                state.blocks[entry.guard.index() as usize].context = self.attended;
            }
        }
    }

    /// Whether the block that begins at `first` is full and accepted.
    pub(crate) fn is_sealed(&self, first: usize) -> bool {
        #[cfg(feature = "mutants")]
        if crate::mutant::is_active(crate::mutant::Mutant::SealEarly) {
            return first + self.block_size() <= self.next_position + 1;
        }
        first + self.block_size() <= self.next_position
    }

    /// Index of the block that begins at `first` in the group's table.
    pub(crate) fn entry_index(&self, group: usize, first: usize) -> Option<usize> {
        self.tables[group].binary_search_by_key(&first, |entry| entry.first).ok()
    }

    /// Index in a layer's view of the page that begins at `first`; `None` where the layer lacks it.
    pub(crate) fn page_index(&self, group: usize, layer: usize, first: usize) -> Option<usize> {
        let pages = &self.view.groups[group].layers[layer];
        pages.binary_search_by_key(&first, |page| page.first as usize).ok()
    }

    /// The page of the block at `first` was re-encoded in a layer: points the view at it.
    pub(crate) fn replace_page(&mut self, group: usize, first: usize, layer: usize, page: Page) {
        let shape = self.pool.config().groups[group].shape;
        let Some(index) = self.page_index(group, layer, first) else { return };
        self.lossy = self.lossy.max(Fidelity::of_format(page.format));
        let shown = &mut Arc::make_mut(&mut self.view).groups[group].layers[layer][index];
        self.held_bytes -= shape.page_bytes(shown.format);
        self.held_bytes += shape.page_bytes(page.format);
        shown.offset = page.offset;
        shown.format = page.format;
    }

    /// The page of the block at `first` was moved by compaction in a layer: points the view at it.
    pub(crate) fn move_page(&mut self, group: usize, first: usize, layer: usize, offset: u32) {
        #[cfg(feature = "mutants")]
        if crate::mutant::is_active(crate::mutant::Mutant::MoveUntold) {
            return;
        }
        if let Some(index) = self.page_index(group, layer, first) {
            Arc::make_mut(&mut self.view).groups[group].layers[layer][index].offset = offset;
        }
    }

    /// Relative positions begin when a position past the trained context has a page, and stay.
    fn update_positions(&mut self) {
        if !self.relative && self.grown_end > self.config.trained_context {
            self.relative = true;
            (0..self.tables.len()).for_each(|group| self.number_runs(group));
        }
    }

    /// Only after a drop, after a gap at the end, and when positions turn relative.
    pub(crate) fn number_runs(&mut self, group: usize) {
        if self.relative {
            let block_size = self.block_size();
            runs::number(&mut Arc::make_mut(&mut self.view).groups[group], block_size);
        }
    }

    /// Usage so far.
    pub fn usage(&self) -> KvUsage {
        let config = self.pool.config();
        let has_full = config.groups.iter().any(|group| group.window.is_none());
        let mut token_layers: ByFormat<usize> = ByFormat::default();
        let mut layers = 0;
        for (group, view) in config.groups.iter().zip(&self.view.groups) {
            if has_full && group.window.is_some() {
                continue;
            }
            layers += group.layers;
            for page in view.layers.iter().flatten() {
                let held = self.next_position.saturating_sub(page.first as usize);
                token_layers[page.format] += held.min(self.block_size());
            }
        }
        KvUsage {
            tokens_by_format: ByFormat::from_fn(|f| token_layers[f] as f64 / layers as f64),
            dropped_tokens: self.dropped_tokens(),
            held_bytes: self.held_bytes,
            peak_bytes: self.peak_bytes,
            bytes_at_f16: self.next_position * config.bytes_per_token(PageFormat::F16),
            relief: self.ledger.entries().to_vec(),
        }
    }
}

/// The view of a sequence that holds nothing.
fn empty_view(pool: &BlockPool) -> SequenceView {
    let groups = &pool.config().groups;
    SequenceView { groups: groups.iter().map(|group| runs::original(group.layers)).collect() }
}

fn count_falls(gone: &mut [usize; Rung::ALL.len()], falls: Falls) {
    for rung in Rung::ALL {
        gone[rung as usize] += usize::from(falls.contains(rung));
    }
}

/// Makes room for `more` items; a list that is full grows by an eighth, because tables count against the
/// budget.
pub(crate) fn reserve_tight<T>(list: &mut Vec<T>, more: usize) {
    if list.capacity() - list.len() < more {
        list.reserve_exact(more.max(list.len() / 8 + 4));
    }
}

/// Pushes `item` into a list that grows by an eighth.
pub(crate) fn push_tight<T>(list: &mut Vec<T>, item: T) {
    reserve_tight(list, 1);
    list.push(item);
}
