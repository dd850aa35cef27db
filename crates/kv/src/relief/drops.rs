//! Which blocks may be dropped, in what order, and what dropping them gives back.

use super::victim::Shares;
use super::{Move, MoveKind, ReliefPlan};
use crate::ledger::Reason;
use crate::page::PageFormat;
use crate::policy::{EvictionPolicy, SequenceSummary};
use crate::pool::State;
use crate::table::{MAXIMUM_RUNS, Sequence};

/// What one move drops.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DropTarget {
    /// Original position of the block's first token.
    pub first: usize,
    /// (KV group, layer in the group) whose page goes; `None`: every full-attention layer's.
    pub page: Option<(usize, usize)>,
}

/// The blocks that `policy` gives up, shared ones left out, and those left out that would split the
/// kept blocks in more runs than a page can name.
pub(super) fn drop_order(
    sequence: &Sequence,
    policy: &dyn EvictionPolicy,
    state: &State,
) -> Vec<DropTarget> {
    let groups = &sequence.pool().config().groups;
    let block_size = sequence.pool().config().block_size();
    let blocks = sequence.full_blocks();
    let summary =
        SequenceSummary { blocks: &blocks, block_size, next_position: sequence.next_position() };
    let shared = |first: usize| {
        let full = groups.iter().zip(&sequence.tables).filter(|(group, _)| group.window.is_none());
        full.map(|(_, table)| table).any(|table| {
            table
                .binary_search_by_key(&first, |entry| entry.first)
                .is_ok_and(|index| state.blocks[table[index].guard.index() as usize].owners > 1)
        })
    };
    let mut kept: Vec<usize> = blocks.iter().map(|block| block.first).collect();
    // The next block: where the newest one is dropped, the gap is before it.
    kept.push(sequence.pages_end());
    let mut order = Vec::new();
    for first in policy.order(&summary) {
        let Ok(index) = kept.binary_search(&first) else { continue };
        if !sequence.is_sealed(first) || shared(first) {
            continue;
        }
        kept.remove(index);
        let runs = 1 + kept.windows(2).filter(|pair| pair[1] - pair[0] != block_size).count();
        if runs > MAXIMUM_RUNS {
            kept.insert(index, first);
        } else {
            order.push(DropTarget { first, page: None });
        }
    }
    order
}

/// Calls `visit(group, format)` for each page that dropping `target` gives back. Returns their bytes.
pub(super) fn for_each_dropped_page(
    sequence: &Sequence,
    target: DropTarget,
    mut visit: impl FnMut(usize, PageFormat),
) -> usize {
    let mut bytes = 0;
    for (group, config) in sequence.pool().config().groups.iter().enumerate() {
        let found = sequence.tables[group].binary_search_by_key(&target.first, |entry| entry.first);
        let (None, Ok(index)) = (config.window, found) else { continue };
        for (index_in_group, layer) in sequence.view().groups[group].layers.iter().enumerate() {
            if target.page.is_some_and(|page| page != (group, index_in_group)) {
                continue;
            }
            visit(group, layer[index].format);
            bytes += config.shape.page_bytes(layer[index].format);
        }
    }
    bytes
}

/// `--policy P --budget N`: drops one block after another until the kept tokens and the next
/// `incoming_tokens` are at most `budget_tokens`, as far as the policy gives blocks up. To be carried
/// out before each step.
pub fn plan_token_budget(
    sequence: &Sequence,
    policy: &dyn EvictionPolicy,
    budget_tokens: usize,
    incoming_tokens: usize,
) -> ReliefPlan {
    let over = (sequence.kept_tokens() + incoming_tokens).saturating_sub(budget_tokens);
    let count = over.div_ceil(sequence.pool().config().block_size());
    if count == 0 {
        return ReliefPlan::default();
    }
    let order = drop_order(sequence, policy, &sequence.pool().shared.state());
    let shares = Shares::new(sequence);
    let moves = order.into_iter().take(count).map(|target| {
        let mut harm = 0.0;
        let bytes = for_each_dropped_page(sequence, target, |group, format| {
            harm += shares.page_drop_harm(sequence, (group, target.first), format);
        });
        let (request, first) = (sequence.config().request, target.first);
        let kind = MoveKind::Drop(target);
        Move { request, first, kind, bytes, harm, reason: Reason::TokenBudget }
    });
    ReliefPlan { moves: moves.collect(), ..ReliefPlan::default() }
}

/// Length of the prefix of `order` that is worth `blocks` whole blocks.
pub(super) fn blocks_prefix(order: &[DropTarget], blocks: usize) -> usize {
    blocks.min(order.len())
}
