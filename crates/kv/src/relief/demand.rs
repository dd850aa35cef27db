//! What the running sequences will need, in pages.

use crate::admission::peak_window_blocks;
use crate::ladder::Rung;
use crate::pool::BlockPool;
use crate::table::Sequence;

/// What a sequence will need next.
#[derive(Clone, Copy, Debug)]
pub struct Demand<'a> {
    /// The sequence.
    pub sequence: &'a Sequence,
    /// Tokens it will grow by over the horizon; capped by its `max_tokens`. Relief begins where this does
    /// not fit.
    pub tokens: usize,
    /// Tokens of each `grow`: the chunk for prefill, 1 for decode.
    pub step_tokens: usize,
    /// Tokens that relief makes room for once it has begun, so that it does not come back at every step;
    /// capped by `max_tokens`, at least `tokens`. A wish: for what lies beyond `tokens` no rung is used
    /// that `tokens` does not need anyway.
    pub stretch_tokens: usize,
}

impl Demand<'_> {
    /// Whether nobody said how long the sequence will get.
    pub(super) fn is_unknown(&self) -> bool {
        self.sequence.config().max_tokens.is_none()
    }
}

/// Bytes by which the demand exceeds the free bytes as things lie now; 0 where no relief is needed.
pub fn relief_needed_bytes(pool: &BlockPool, demands: &[Demand<'_>]) -> usize {
    let pages = demand_pages(pool, demands, |demand| demand.tokens);
    let state = pool.shared.state();
    if state.spans.can_take(&pages, pool.shared.geometry.reserve_spans) {
        return 0;
    }
    let free_bytes = pool.shared.free_bytes_for(&state, &pages);
    pool.shared.page_bytes_sum(&pages).saturating_sub(free_bytes).max(1)
}

/// Pages per size class that all demands together need for `tokens(demand)` more tokens each.
pub(super) fn demand_pages(
    pool: &BlockPool,
    demands: &[Demand<'_>],
    tokens: impl Fn(&Demand<'_>) -> usize,
) -> Vec<usize> {
    let mut blocks = vec![0; pool.config().groups.len()];
    for demand in demands {
        let more = demand_blocks(demand, tokens(demand));
        blocks.iter_mut().zip(more).for_each(|(sum, more)| *sum += more);
    }
    pool.shared.demand_pages(&blocks)
}

/// New blocks per group that `tokens` more tokens need at their peak.
fn demand_blocks(demand: &Demand<'_>, tokens: usize) -> Vec<usize> {
    let sequence = demand.sequence;
    let config = sequence.pool().config();
    let tokens = sequence.remaining(tokens);
    let more = sequence.missing_blocks(tokens);
    let peak = |group: usize, window: usize| {
        let next = sequence.next_position();
        let step = demand.step_tokens;
        let peak = peak_window_blocks(window, config.block_size(), next, tokens, step);
        peak.saturating_sub(sequence.tables[group].len())
    };
    let windows = config.groups.iter().enumerate().zip(more);
    windows
        .map(|((index, group), more)| group.window.map_or(more, |w| peak(index, w).min(more)))
        .collect()
}

/// Blocks to drop so that the kept tokens stay within the trained context.
pub(super) fn blocks_over_context(demand: &Demand<'_>) -> usize {
    let sequence = demand.sequence;
    let config = sequence.pool().config();
    if !config.ladder.permits(sequence.config().contract, Rung::Evict) {
        return 0;
    }
    let tokens = sequence.kept_tokens().saturating_add(sequence.remaining(demand.tokens));
    let over = tokens.saturating_sub(sequence.config().trained_context);
    over.div_ceil(config.block_size())
}
