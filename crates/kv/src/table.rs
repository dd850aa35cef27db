//! A sequence: its block tables in all KV groups, its positions, the view that kernels read.

use std::ops::Range;

use crate::account::ByFormat;
use crate::block::{BlockGuard, Page};
use crate::keep::{KeepError, KeptSpans};
use crate::ladder::{Fidelity, Rung};
use crate::ledger::{Ledger, LedgerEntry};
use crate::page::{PageFormat, PageRef, SequenceView};
use crate::policy::Observation;
use crate::pool::{BlockPool, NewBlock, Shortage};
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
    /// Layers that hold a page of it; the entry goes with the last.
    held_layers: usize,
}

/// A sequence's tables. Dropping it gives every block back.
#[derive(Debug)]
pub struct Sequence {
    pool: BlockPool,
    config: SequenceConfig,
    /// Accepted tokens, dropped ones included.
    next_position: usize,
    /// Positions that have pages; `>= next_position`.
    grown_end: usize,
    pub(crate) tables: Vec<Vec<Entry>>,
    view: SequenceView,
    relative: bool,
    scores: Scores,
    kept_spans: KeptSpans,
    /// Blocks since dropped or freed that had fallen down each rung.
    pub(crate) falls_gone: [usize; Rung::ALL.len()],
    /// Pages dropped, all layers.
    dropped_pages: usize,
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
    /// Token-layers dropped / layers of all groups. What leaves a window does not count.
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
            view: SequenceView {
                groups: groups.iter().map(|g| runs::original(g.layers)).collect(),
            },
            relative: false,
            scores: Scores::new(groups.iter().map(|group| group.layers)),
            kept_spans: KeptSpans::default(),
            falls_gone: [0; Rung::ALL.len()],
            dropped_pages: 0,
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

    /// Tokens it may still grow by: `wanted`, capped by `max_tokens`.
    pub fn remaining(&self, wanted: usize) -> usize {
        let limit = self.config.max_tokens.unwrap_or(usize::MAX);
        wanted.min(limit.saturating_sub(self.next_position))
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

    /// The record of each step down.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// New blocks per group that `tokens` more tokens need.
    pub(crate) fn missing_blocks(&self, tokens: usize) -> Vec<usize> {
        let end = self.next_position.saturating_add(tokens);
        let blocks = end.saturating_sub(self.pages_end()).div_ceil(self.block_size());
        // More than any arena holds, few enough that no sum of bytes overflows.
        vec![blocks.min(u32::MAX as usize); self.tables.len()]
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
    /// # Errors
    /// [`Shortage`] where the free pages do not suffice; the sequence is unchanged. Relieve and retry.
    pub fn grow(&mut self, tokens: usize) -> Result<(), Shortage> {
        self.ledger.reserve();
        let block_size = self.block_size();
        let end = self.next_position.saturating_add(tokens);
        let blocks = self.missing_blocks(tokens);
        if blocks.iter().any(|&count| count > 0) {
            let first = self.pages_end();
            let taken = self.pool.shared.take_blocks(&blocks, first)?;
            for (group, taken) in taken.into_iter().enumerate() {
                for (index, block) in taken.into_iter().enumerate() {
                    self.push_block(group, block, first + index * block_size);
                }
            }
            self.peak_bytes = self.peak_bytes.max(self.held_bytes);
        }
        self.grown_end = self.grown_end.max(end);
        self.update_positions();
        Ok(())
    }

    fn push_block(&mut self, group: usize, block: NewBlock, first: usize) {
        let block_size = self.block_size();
        let view = &mut self.view.groups[group];
        let mut opens_a_run = false;
        for ((layer, runs), page) in view.layers.iter_mut().zip(&view.runs).zip(&block.pages) {
            let end = layer.last().map(|last| last.first as usize + block_size);
            opens_a_run |= end.is_some_and(|end| end != first);
            let run = (runs.len() - 1) as u8;
            let Page { offset, format } = *page;
            push_tight(layer, PageRef { offset, first: first as u32, format, run });
        }
        self.scores.push(group);
        self.held_bytes += self.pool.config().groups[group].block_bytes(PageFormat::F16);
        let (guard, held_layers) = (block.guard, block.pages.len());
        let (refused, falls) = (ByFormat::default(), Falls::default());
        push_tight(&mut self.tables[group], Entry { guard, first, refused, falls, held_layers });
        // Behind a dropped block.
        if opens_a_run {
            self.number_runs(group);
        }
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
        self.next_position = (self.next_position + tokens).min(self.grown_end);
        for group in 0..self.tables.len() {
            if let Some(window) = self.pool.config().groups[group].window {
                // The next query is at `next_position` and attends positions > next_position - window.
                let first_attended = (self.next_position + 1).saturating_sub(window);
                let block_size = self.block_size();
                let out = |entry: &Entry| entry.first + block_size <= first_attended;
                let count = self.tables[group].iter().take_while(|entry| out(entry)).count();
                self.remove_blocks(group, 0, count);
            }
        }
    }

    /// Whether the block that begins at `first` is full and accepted.
    pub(crate) fn is_sealed(&self, first: usize) -> bool {
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

    /// Takes `count` blocks from entry `start` out of table and view; their guards give them back.
    /// Returns the bytes of their pages.
    fn remove_blocks(&mut self, group: usize, start: usize, count: usize) -> usize {
        let Some(last) = self.tables[group][start..start + count].last() else { return 0 };
        let (low, high) = (self.tables[group][start].first, last.first);
        let shape = self.pool.config().groups[group].shape;
        let mut bytes = 0;
        for (index, layer) in self.view.groups[group].layers.iter_mut().enumerate() {
            let from = layer.partition_point(|page| (page.first as usize) < low);
            let to = layer.partition_point(|page| page.first as usize <= high);
            bytes += layer.drain(from..to).map(|page| shape.page_bytes(page.format)).sum::<usize>();
            self.scores.remove(group, index, from..to);
        }
        self.held_bytes -= bytes;
        for entry in self.tables[group].drain(start..start + count) {
            count_falls(&mut self.falls_gone, entry.falls);
        }
        bytes
    }

    /// Drops the sealed block at original position `first` from every full-attention layer that holds
    /// it. Returns the bytes of its pages; 0 where there is none.
    pub(crate) fn drop_block(&mut self, first: usize) -> usize {
        let mut bytes = 0;
        for group in 0..self.tables.len() {
            let Some(index) = self.droppable(group, first) else { continue };
            self.dropped_pages += self.tables[group][index].held_layers;
            bytes += self.remove_blocks(group, index, 1);
            self.number_runs(group);
        }
        bytes
    }

    /// Drops the page of one full-attention layer of the sealed block at original position `first`; its
    /// other layers stay. Returns the bytes of the page; 0 where there is none, or it is shared.
    pub(crate) fn drop_page(&mut self, group: usize, layer: usize, first: usize) -> usize {
        let (Some(index), Some(page)) =
            (self.droppable(group, first), self.page_index(group, layer, first))
        else {
            return 0;
        };
        let entry = &mut self.tables[group][index];
        if !entry.guard.give_back_layer(layer) {
            return 0;
        }
        entry.held_layers -= 1;
        if entry.held_layers == 0 {
            count_falls(&mut self.falls_gone, entry.falls);
            self.tables[group].remove(index);
        }
        let format = self.view.groups[group].layers[layer].remove(page).format;
        self.scores.remove(group, layer, page..page + 1);
        let bytes = self.pool.config().groups[group].shape.page_bytes(format);
        self.held_bytes -= bytes;
        self.dropped_pages += 1;
        self.number_runs(group);
        bytes
    }

    /// Index of the entry at `first`, where a block there may be dropped at all.
    fn droppable(&self, group: usize, first: usize) -> Option<usize> {
        let full = self.pool.config().groups[group].window.is_none();
        if full && self.is_sealed(first) { self.entry_index(group, first) } else { None }
    }

    /// The page of the block at `first` was re-encoded in a layer: points the view at it.
    pub(crate) fn replace_page(&mut self, group: usize, first: usize, layer: usize, page: Page) {
        let shape = self.pool.config().groups[group].shape;
        let Some(index) = self.page_index(group, layer, first) else { return };
        let shown = &mut self.view.groups[group].layers[layer][index];
        self.held_bytes -= shape.page_bytes(shown.format);
        self.held_bytes += shape.page_bytes(page.format);
        shown.offset = page.offset;
        shown.format = page.format;
    }

    /// The page of the block at `first` was moved by compaction in a layer: points the view at it.
    pub(crate) fn move_page(&mut self, group: usize, first: usize, layer: usize, offset: u32) {
        if let Some(index) = self.page_index(group, layer, first) {
            self.view.groups[group].layers[layer][index].offset = offset;
        }
    }

    /// Marks tokens that scored policies and `sinks` must not drop, such as the client's instructions:
    /// every block with a token in `span` (positions, of the prompt or still to come) stays from now on.
    /// What was dropped before does not come back.
    ///
    /// # Errors
    /// An empty span, one past the sequence's `max_tokens`, or more separate spans than
    /// [`MAXIMUM_SPANS`](crate::keep::MAXIMUM_SPANS); nothing is marked then.
    pub fn keep(&mut self, span: Range<usize>) -> Result<(), KeepError> {
        match self.config.max_tokens {
            Some(max_tokens) if span.end > max_tokens => {
                Err(KeepError::PastEnd { span, max_tokens })
            }
            _ => self.kept_spans.add(span),
        }
    }

    /// Whether a token of the block at `first` is marked to be kept.
    pub(crate) fn is_marked(&self, first: usize) -> bool {
        self.kept_spans.meets(first..first + self.block_size())
    }

    /// Tells the sequence what its last step's queries attended to in one layer, for policies that
    /// observe [`Observation::AttentionMass`]: `masses` is `[rows][pages]`, the attention probability of
    /// each page of [`view`](Self::view) summed over the layer's query heads, rows in order. To be called
    /// once a step and layer, before blocks are dropped; `decay` is the policy's.
    pub fn observe_masses(&mut self, group: usize, layer: usize, masses: &[f32], decay: f32) {
        let pages = self.view.groups[group].layers[layer].len();
        self.scores.observe_masses((group, layer), pages, masses, decay);
    }

    /// Sets the score of the page of the block at `first`, for policies that observe
    /// [`Observation::Keys`]: how unlike the layer's other keys its keys are. Ignored where the layer
    /// does not hold the block.
    pub fn observe_keys(&mut self, group: usize, layer: usize, first: usize, score: f32) {
        if let Some(index) = self.page_index(group, layer, first) {
            let pages = self.view.groups[group].layers[layer].len();
            self.scores.observe_keys((group, layer), pages, index, score);
        }
    }

    /// The running sum of a layer's unit keys, `[kv_heads * head_dim]`, zeros at first: what the kernel
    /// that scores keys compares with and adds to.
    pub fn key_anchor(&mut self, group: usize, layer: usize) -> &mut [f32] {
        let shape = self.pool.config().groups[group].shape;
        self.scores.key_anchor(group, layer, shape.kv_heads * shape.head_dim)
    }

    /// Score of page `index` of a layer's view; 0 where nothing was observed.
    pub(crate) fn score(&self, at: (usize, usize), index: usize, observation: Observation) -> f32 {
        let first = self.view.groups[at.0].layers[at.1][index].first as usize;
        self.scores.score(at, index, self.next_position.saturating_sub(first), observation)
    }

    /// Relative positions begin when a position past the trained context has a page, and stay.
    fn update_positions(&mut self) {
        if !self.relative && self.grown_end > self.config.trained_context {
            self.relative = true;
            (0..self.tables.len()).for_each(|group| self.number_runs(group));
        }
    }

    /// Only after a drop, after a gap at the end, and when positions turn relative.
    fn number_runs(&mut self, group: usize) {
        if self.relative {
            let block_size = self.block_size();
            runs::number(&mut self.view.groups[group], block_size);
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
            dropped_tokens: (self.dropped_pages * self.block_size()) as f64
                / config.layers() as f64,
            held_bytes: self.held_bytes,
            peak_bytes: self.peak_bytes,
            bytes_at_f16: self.next_position * config.bytes_per_token(PageFormat::F16),
            relief: self.ledger.entries().to_vec(),
        }
    }
}

fn count_falls(gone: &mut [usize; Rung::ALL.len()], falls: Falls) {
    for rung in Rung::ALL {
        gone[rung as usize] += usize::from(falls.contains(rung));
    }
}

/// Pushes `item`; a list that is full grows by an eighth, because tables count against the budget.
pub(crate) fn push_tight<T>(list: &mut Vec<T>, item: T) {
    if list.len() == list.capacity() {
        list.reserve_exact(list.len() / 8 + 4);
    }
    list.push(item);
}
