//! Which blocks may be dropped, in what order, and what dropping them gives back.
//!
//! What must not go is decided here, in one place, before a policy ranks the rest.

use super::victim::Shares;
use super::{Move, MoveKind, ReliefPlan};
use crate::account::ByFormat;
use crate::ledger::Reason;
use crate::page::{PageFormat, PageRef};
use crate::policy::{BlockSummary, EvictionPolicy, Protection, SequenceSummary};
use crate::pool::State;
use crate::runs::MAXIMUM_RUNS;
use crate::table::Sequence;

/// What one move drops.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DropTarget {
    /// Original position of the block's first token.
    pub first: usize,
    /// (KV group, layer in the group) whose page goes; `None`: every full-attention layer's.
    pub page: Option<(usize, usize)>,
}

/// What `policy` gives up, the first to go first. Left out: what the policy's protection covers, shared
/// blocks (another table's pages, and nothing to gain), and what would split the kept blocks of a layer
/// in more runs than a page can name.
///
/// A policy that chooses per layer yields its choices round by round: the first of every layer, then
/// the second of every layer, and so on, groups and layers ascending within a round.
pub(super) fn drop_order(
    sequence: &Sequence,
    policy: &dyn EvictionPolicy,
    state: &State,
) -> Vec<DropTarget> {
    let droppable = Droppable { sequence, protection: policy.protection(), state };
    if !policy.per_layer() {
        let firsts = droppable.order_of_sequence(policy);
        return firsts.into_iter().map(|first| DropTarget { first, page: None }).collect();
    }
    let layers: Vec<((usize, usize), Vec<usize>)> =
        sequence.full_layers().map(|at| (at, droppable.order_of_layer(policy, at))).collect();
    let rounds = layers.iter().map(|(_, order)| order.len()).max().unwrap_or(0);
    let round = |round: usize| {
        let chosen = move |(at, order): &((usize, usize), Vec<usize>)| {
            Some(DropTarget { first: *order.get(round)?, page: Some(*at) })
        };
        layers.iter().filter_map(chosen)
    };
    (0..rounds).flat_map(round).collect()
}

/// Length of the part at the front of a [`drop_order`] that is worth `blocks` whole blocks: as many
/// targets, or, of single layers, as many rounds.
pub(super) fn blocks_prefix(order: &[DropTarget], blocks: usize) -> usize {
    if blocks == 0 {
        return 0;
    }
    // A round ends where the layers begin anew.
    let begins = |pair: &[DropTarget]| pair[0].page.is_none() || pair[1].page <= pair[0].page;
    let ends = order.windows(2).enumerate().filter(|(_, pair)| begins(pair));
    ends.map(|(index, _)| index + 1).nth(blocks - 1).unwrap_or(order.len())
}

/// The blocks of a sequence that a policy may rank.
struct Droppable<'a> {
    sequence: &'a Sequence,
    protection: Protection,
    state: &'a State,
}

impl Droppable<'_> {
    fn may_go(&self, group: usize, first: usize) -> bool {
        let sequence = self.sequence;
        let Some(entry) = sequence.entry_index(group, first) else { return false };
        let block = sequence.tables[group][entry].guard.index() as usize;
        let protected = match self.protection {
            Protection::OpenBlocksOnly => false,
            Protection::SinksTailAndKept { tail_tokens } => {
                let tail_start = sequence.next_position().saturating_sub(tail_tokens);
                let end = first + sequence.pool().config().block_size();
                first == 0 || end > tail_start || sequence.is_marked(first)
            }
        };
        sequence.is_sealed(first) && !protected && self.state.blocks[block].owners == 1
    }

    fn ranked(&self, policy: &dyn EvictionPolicy, blocks: &[BlockSummary]) -> Vec<usize> {
        let sequence = self.sequence;
        let block_size = sequence.pool().config().block_size();
        let next_position = sequence.next_position();
        let mut order = policy.order(&SequenceSummary { blocks, block_size, next_position });
        // A policy may name only what it was given.
        order.retain(|first| blocks.binary_search_by_key(first, |block| block.first).is_ok());
        order
    }

    fn order_of_layer(&self, policy: &dyn EvictionPolicy, at: (usize, usize)) -> Vec<usize> {
        let pages = &self.sequence.view().groups[at.0].layers[at.1];
        let summary = |(index, page): (usize, &PageRef)| BlockSummary {
            first: page.first as usize,
            score: self.sequence.score(at, index, policy.observes()),
        };
        let held = pages.iter().enumerate().map(summary);
        let blocks: Vec<BlockSummary> =
            held.filter(|block| self.may_go(at.0, block.first)).collect();
        let mut kept = KeptRuns::of_layer(self.sequence, at);
        as_far_as_it_goes(self.ranked(policy, &blocks), |first| kept.drop_block(first))
    }

    fn order_of_sequence(&self, policy: &dyn EvictionPolicy) -> Vec<usize> {
        let sequence = self.sequence;
        // Mostly all layers hold the same blocks: then one stands for all.
        let mut kept: Vec<KeptRuns> = Vec::new();
        for at in sequence.full_layers() {
            let pages = &sequence.view().groups[at.0].layers[at.1];
            if !kept.iter().any(|runs| runs.are_of(pages)) {
                kept.push(KeptRuns::of_layer(sequence, at));
            }
        }
        let mut firsts: Vec<usize> = kept.iter().flat_map(KeptRuns::firsts).collect();
        firsts.sort_unstable();
        firsts.dedup();
        firsts.retain(|&first| {
            let mut groups = (0..sequence.tables.len())
                .filter(|&group| sequence.pool().config().groups[group].window.is_none())
                .filter(|&group| sequence.entry_index(group, first).is_some());
            groups.all(|group| self.may_go(group, first))
        });
        let blocks: Vec<BlockSummary> = firsts
            .into_iter()
            .map(|first| BlockSummary { first, score: self.mean_score(policy, first) })
            .collect();
        as_far_as_it_goes(self.ranked(policy, &blocks), |first| {
            let fits = kept.iter().all(|runs| runs.can_drop(first));
            let mut dropped = false;
            for runs in kept.iter_mut().filter(|_| fits) {
                // Not every layer need hold it.
                dropped |= runs.drop_block(first);
            }
            dropped
        })
    }

    /// Mean over the layers that hold the block at `first`.
    fn mean_score(&self, policy: &dyn EvictionPolicy, first: usize) -> f32 {
        let observation = policy.observes();
        if observation == crate::policy::Observation::Nothing {
            return 0.0;
        }
        let score = |at: (usize, usize)| {
            let index = self.sequence.page_index(at.0, at.1, first)?;
            Some(f64::from(self.sequence.score(at, index, observation)))
        };
        let (mut sum, mut layers) = (0.0, 0);
        self.sequence.full_layers().filter_map(score).for_each(|score| {
            sum += score;
            layers += 1;
        });
        (sum / f64::from(layers.max(1))) as f32
    }
}

/// The part of `order` that `drops` accepts; what it refuses is asked for again behind the rest, since
/// a run that has meanwhile become shorter may make it fit.
fn as_far_as_it_goes(order: Vec<usize>, mut drops: impl FnMut(usize) -> bool) -> Vec<usize> {
    let mut accepted = Vec::with_capacity(order.len());
    let mut refused = order;
    loop {
        let before = accepted.len();
        refused.retain(|&first| {
            let accepts = drops(first);
            if accepts {
                accepted.push(first);
            }
            !accepts
        });
        if accepted.len() == before || refused.is_empty() {
            return accepted;
        }
    }
}

/// The blocks a layer would still hold, and in how many runs.
#[derive(Clone, Debug, PartialEq, Eq)]
struct KeptRuns {
    block_size: usize,
    /// First positions, ascending, and behind them that of the next block: where the newest block is
    /// dropped, the gap is before it.
    firsts: Vec<usize>,
    /// Per block: indices in `firsts` of the nearest one before it (`usize::MAX`: none) and after it that
    /// are not dropped.
    neighbors: Vec<(usize, usize)>,
    runs: usize,
}

impl KeptRuns {
    fn of_layer(sequence: &Sequence, (group, layer): (usize, usize)) -> KeptRuns {
        let pages = &sequence.view().groups[group].layers[layer];
        let mut firsts: Vec<usize> = pages.iter().map(|page| page.first as usize).collect();
        firsts.push(sequence.pages_end());
        let block_size = sequence.pool().config().block_size();
        let neighbors = (0..firsts.len()).map(|i| (i.wrapping_sub(1), i + 1)).collect();
        let gaps = firsts.windows(2).filter(|pair| pair[1] - pair[0] != block_size).count();
        KeptRuns { block_size, firsts, neighbors, runs: 1 + gaps }
    }

    /// Whether a layer with these pages holds the same blocks.
    fn are_of(&self, pages: &[PageRef]) -> bool {
        pages.len() + 1 == self.firsts.len()
            && pages.iter().zip(&self.firsts).all(|(page, &first)| page.first as usize == first)
    }

    /// First positions of the blocks held at the beginning.
    fn firsts(&self) -> impl Iterator<Item = usize> {
        self.firsts[..self.firsts.len() - 1].iter().copied()
    }

    fn is_gap(&self, before: usize, after: usize) -> bool {
        self.firsts[after] - self.firsts[before] != self.block_size
    }

    /// Index of the block at `first` and the runs there would be without it; `None` where it is not held
    /// or dropped already.
    fn without(&self, first: usize) -> Option<(usize, usize)> {
        let index = self.firsts[..self.firsts.len() - 1].binary_search(&first).ok()?;
        let (before, after) = self.neighbors[index];
        if self.neighbors[after].0 != index {
            return None;
        }
        let gap_after = usize::from(self.is_gap(index, after));
        if before == usize::MAX {
            return Some((index, self.runs - gap_after));
        }
        let gap_before = usize::from(self.is_gap(before, index));
        Some((index, self.runs + 1 - gap_before - gap_after))
    }

    /// Whether the layer could do without the block at `first`; it can where it does not hold it.
    fn can_drop(&self, first: usize) -> bool {
        self.without(first).is_none_or(|(_, runs)| runs <= MAXIMUM_RUNS)
    }

    /// Drops the block at `first` where the runs that are left can be named. Returns whether it did.
    fn drop_block(&mut self, first: usize) -> bool {
        let Some((index, runs)) = self.without(first) else { return false };
        if runs > MAXIMUM_RUNS {
            return false;
        }
        self.runs = runs;
        let (before, after) = self.neighbors[index];
        self.neighbors[after].0 = before;
        if before != usize::MAX {
            self.neighbors[before].1 = after;
        }
        true
    }
}

/// Calls `visit(group, format, pages)` for the pages that dropping `target` gives back. Returns their bytes.
pub(super) fn for_each_dropped_pages(
    sequence: &Sequence,
    target: DropTarget,
    state: &State,
    mut visit: impl FnMut(usize, PageFormat, u16),
) -> usize {
    let mut bytes = 0;
    for (group, config) in sequence.pool().config().groups.iter().enumerate() {
        let meant = target.page.is_none_or(|(wanted, _)| wanted == group);
        let Some(entry) = sequence.entry_index(group, target.first) else { continue };
        if !meant || config.window.is_some() {
            continue;
        }
        let record = &state.blocks[sequence.tables[group][entry].guard.index() as usize];
        let pages = match target.page {
            None => record.pages_by_format(),
            Some((_, layer)) => {
                let page = record.pages[layer].map(|page| page.format);
                ByFormat::from_fn(|format| u16::from(page == Some(format)))
            }
        };
        for (format, &count) in pages.iter().filter(|(_, count)| **count > 0) {
            visit(group, format, count);
            bytes += config.shape.page_bytes(format) * usize::from(count);
        }
    }
    bytes
}

/// `--policy P --budget N`: drops one block after another (of each layer that is over the budget, where
/// the policy chooses per layer) until the kept tokens and the next `incoming_tokens` are at most
/// `budget_tokens`, as far as the policy gives blocks up. To be carried out before each step.
pub fn plan_token_budget(
    sequence: &Sequence,
    policy: &dyn EvictionPolicy,
    budget_tokens: usize,
    incoming_tokens: usize,
) -> ReliefPlan {
    let block_size = sequence.pool().config().block_size();
    let over = |kept: usize| {
        kept.saturating_add(incoming_tokens).saturating_sub(budget_tokens).div_ceil(block_size)
    };
    if over(sequence.kept_tokens()) == 0 {
        return ReliefPlan::default();
    }
    let mut left: Vec<((usize, usize), usize)> = sequence
        .full_layers()
        .map(|(group, layer)| ((group, layer), over(sequence.kept_in_layer(group, layer))))
        .collect();
    let mut wanted = |target: &DropTarget| {
        let mut any = false;
        let holds = |at: (usize, usize)| match target.page {
            Some(page) => page == at,
            None => sequence.page_index(at.0, at.1, target.first).is_some(),
        };
        for (_, blocks) in left.iter_mut().filter(|(at, blocks)| *blocks > 0 && holds(*at)) {
            *blocks -= 1;
            any = true;
        }
        any
    };
    let state = sequence.pool().shared.state();
    let order = drop_order(sequence, policy, &state);
    let shares = Shares::new(sequence);
    let targets = order.into_iter().filter(&mut wanted);
    let reason = Reason::TokenBudget;
    let moves = targets
        .map(|target| drop_move(sequence, target, &state, &shares, reason, &mut |_, _, _| {}))
        .collect();
    ReliefPlan { moves, ..ReliefPlan::default() }
}

/// The move that drops `target`; `visit(group, format, pages)` hears of the pages that it gives back.
pub(super) fn drop_move(
    sequence: &Sequence,
    target: DropTarget,
    state: &State,
    shares: &Shares,
    reason: Reason,
    visit: &mut dyn FnMut(usize, PageFormat, u16),
) -> Move {
    let mut harm = 0.0;
    let first = target.first;
    let bytes = for_each_dropped_pages(sequence, target, state, |group, format, pages| {
        harm += shares.page_drop_harm(sequence, (group, first), format) * f64::from(pages);
        visit(group, format, pages);
    });
    let entries = sequence.tables.iter().enumerate().find_map(|(group, table)| {
        let meant = target.page.is_none_or(|(wanted, _)| wanted == group);
        sequence.entry_index(group, first).filter(|_| meant).map(|entry| &table[entry])
    });
    let likely_block = entries.map_or(0, |entry| entry.guard.index());
    let (request, kind) = (sequence.config().request, MoveKind::Drop(target));
    Move { request, first, kind, bytes, harm, reason, likely_block }
}
