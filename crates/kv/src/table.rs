//! A sequence: its block tables in all KV groups, its positions, the view that kernels read.

use crate::account::ByFormat;
use crate::block::{BlockGuard, Page};
use crate::config::GroupConfig;
use crate::ladder::Fidelity;
use crate::ledger::{Ledger, LedgerEntry};
use crate::page::{GroupView, PageFormat, PageRef, SequenceView};
use crate::policy::BlockSummary;
use crate::pool::{BlockPool, NewBlock, Shortage};

/// Most runs of kept blocks a view can name: `PageRef::run` has 8 bits.
pub(crate) const MAXIMUM_RUNS: usize = 256;

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

/// One block in a table.
#[derive(Debug)]
pub(crate) struct Entry {
    pub guard: BlockGuard,
    /// Original position of its first token.
    pub first: usize,
    /// A kernel refused to re-encode a page of it (NaN or infinity): it is not asked for again.
    pub refused: bool,
    /// Formats this block has fallen through, for the ledger's invariant.
    pub falls: usize,
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
    dropped_blocks: usize,
    /// Re-encodes that blocks since dropped or freed had been through.
    pub(crate) falls_gone: usize,
    dropped_token_layers: usize,
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
        let empty = |group: &GroupConfig| GroupView {
            layers: vec![Vec::new(); group.layers],
            shifts: vec![0],
        };
        Sequence {
            pool: pool.clone(),
            config,
            next_position: 0,
            grown_end: 0,
            tables: groups.iter().map(|_| Vec::new()).collect(),
            view: SequenceView { groups: groups.iter().map(empty).collect() },
            relative: false,
            dropped_blocks: 0,
            falls_gone: 0,
            dropped_token_layers: 0,
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

    /// Accepted tokens that full-attention groups still hold.
    pub fn kept_tokens(&self) -> usize {
        self.next_position - self.dropped_blocks * self.pool.config().block_size()
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
        let block_size = self.pool.config().block_size();
        let end = self.next_position.saturating_add(tokens);
        let blocks = self.missing_blocks(tokens);
        if blocks.iter().any(|&count| count > 0) {
            let first = self.pages_end();
            let taken = self.pool.shared.take_blocks(&blocks)?;
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
        let view = &mut self.view.groups[group];
        // A block put behind the others opens a run only after a dropped one.
        let run = (view.shifts.len() - 1) as u8;
        for (layer, page) in view.layers.iter_mut().zip(&block.pages) {
            layer.push(PageRef {
                offset: page.offset,
                first: first as u32,
                format: page.format,
                run,
            });
        }
        self.held_bytes += self.pool.config().groups[group].block_bytes(PageFormat::F16);
        self.tables[group].push(Entry { guard: block.guard, first, refused: false, falls: 0 });
        let last_gap =
            self.tables[group].iter().rev().nth(1).map(|entry| entry.first + self.block_size());
        if last_gap.is_some_and(|end| end != first) {
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

    /// Takes `count` blocks from entry `start` out of table and view; their guards give them back.
    fn remove_blocks(&mut self, group: usize, start: usize, count: usize) -> usize {
        if count == 0 {
            return 0;
        }
        let mut bytes = 0;
        for layer in &mut self.view.groups[group].layers {
            let shape = self.pool.config().groups[group].shape;
            for page in layer.drain(start..start + count) {
                bytes += shape.page_bytes(page.format);
            }
        }
        self.held_bytes -= bytes;
        for entry in self.tables[group].drain(start..start + count) {
            self.falls_gone += entry.falls;
        }
        bytes
    }

    /// Drops the sealed block at original position `first` from every full-attention group. Returns the
    /// bytes of its pages; 0 where no such block is held.
    pub(crate) fn drop_block(&mut self, first: usize) -> usize {
        let mut bytes = 0;
        for group in 0..self.tables.len() {
            if self.pool.config().groups[group].window.is_some() || !self.is_sealed(first) {
                continue;
            }
            if let Ok(index) = self.tables[group].binary_search_by_key(&first, |entry| entry.first)
            {
                bytes += self.remove_blocks(group, index, 1);
                let layers = self.pool.config().groups[group].layers;
                self.dropped_token_layers += self.block_size() * layers;
                self.number_runs(group);
            }
        }
        self.dropped_blocks += usize::from(bytes > 0);
        bytes
    }

    /// A page of entry `index` was re-encoded: points the view at it.
    pub(crate) fn replace_page(&mut self, group: usize, index: usize, layer: usize, page: Page) {
        let shape = self.pool.config().groups[group].shape;
        let entry = &mut self.view.groups[group].layers[layer][index];
        self.held_bytes -= shape.page_bytes(entry.format);
        self.held_bytes += shape.page_bytes(page.format);
        entry.offset = page.offset;
        entry.format = page.format;
    }

    /// A page of entry `index` was moved by compaction: points the view at it.
    pub(crate) fn move_page(&mut self, group: usize, index: usize, layer: usize, offset: u32) {
        self.view.groups[group].layers[layer][index].offset = offset;
    }

    /// Relative positions begin when a position past the trained context has a page, and stay.
    fn update_positions(&mut self) {
        if !self.relative && self.grown_end > self.config.trained_context {
            self.relative = true;
            (0..self.tables.len()).for_each(|group| self.number_runs(group));
        }
    }

    /// Numbers the runs of kept blocks and works out how many tokens were dropped after each. Only after
    /// a drop, after a gap at the end, and when positions turn relative.
    fn number_runs(&mut self, group: usize) {
        if !self.relative {
            return;
        }
        let block_size = self.block_size();
        let entries = &self.tables[group];
        let gap = |pair: &[Entry]| pair[1].first - pair[0].first - block_size;
        let mut runs = vec![0u8; entries.len()];
        let mut gaps = Vec::new();
        for (index, pair) in entries.windows(2).enumerate() {
            if gap(pair) > 0 {
                gaps.push(gap(pair) as u32);
            }
            // Plans never open more gaps than this (`MAXIMUM_RUNS`).
            runs[index + 1] = gaps.len().min(MAXIMUM_RUNS - 1) as u8;
        }
        let view = &mut self.view.groups[group];
        view.shifts = (0..=gaps.len()).map(|run| gaps[run..].iter().sum()).collect();
        for layer in &mut view.layers {
            layer.iter_mut().zip(&runs).for_each(|(page, run)| page.run = *run);
        }
    }

    /// The blocks of the full-attention groups, oldest first; empty where every group has a window.
    pub(crate) fn full_blocks(&self) -> Vec<BlockSummary> {
        let groups = &self.pool.config().groups;
        let Some(full) = groups.iter().position(|group| group.window.is_none()) else {
            return Vec::new();
        };
        let summary = |entry: &Entry| BlockSummary {
            first: entry.first,
            sealed: self.is_sealed(entry.first),
        };
        self.tables[full].iter().map(summary).collect()
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
            dropped_tokens: self.dropped_token_layers as f64 / config.layers() as f64,
            held_bytes: self.held_bytes,
            peak_bytes: self.peak_bytes,
            bytes_at_f16: self.next_position * config.bytes_per_token(PageFormat::F16),
            relief: self.ledger.entries().to_vec(),
        }
    }
}
