//! What the running sequences will need, in pages.

use crate::admission::peak_window_blocks;
use crate::ladder::Rung;
use crate::pool::{BlockPool, State};
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
    let state = pool.shared.state();
    let pages = demand_pages(pool, &state, demands, |demand| demand.tokens);
    if state.spans.can_take(&pages, pool.shared.geometry.reserve_spans) {
        return 0;
    }
    let free_bytes = pool.shared.free_bytes_for(&state, &pages);
    pool.shared.page_bytes_sum(&pages).saturating_sub(free_bytes).max(1)
}

/// Pages per size class that all demands together need for `tokens(demand)` more tokens each, at their peak:
/// new blocks, and copies of shared open ones, of which the last holder needs none.
pub(super) fn demand_pages(
    pool: &BlockPool,
    state: &State,
    demands: &[Demand<'_>],
    tokens: impl Fn(&Demand<'_>) -> usize,
) -> Vec<usize> {
    let mut blocks = vec![0; pool.config().groups.len()];
    let mut copies = Vec::new();
    for demand in demands {
        let tokens = demand.sequence.remaining(tokens(demand));
        for (group, blocks) in blocks.iter_mut().enumerate() {
            *blocks += new_blocks(demand, tokens, group);
        }
        let of_sequence = demand.sequence.unwritable(tokens, state);
        copies.extend(of_sequence.map(|copy| (copy.block, copy.group)));
    }
    copies.sort_unstable();
    for holders in copies.chunk_by(|one, other| one == other) {
        let (block, group) = holders[0];
        let record = &state.blocks[block as usize];
        let all_write = record.owners as usize == holders.len() && !record.cached;
        blocks[group] += holders.len() - usize::from(all_write);
    }
    pool.shared.demand_pages(&blocks)
}

/// New blocks of a group that `tokens` more tokens need at their peak.
fn new_blocks(demand: &Demand<'_>, tokens: usize, group: usize) -> usize {
    let sequence = demand.sequence;
    let config = sequence.pool().config();
    let new = sequence.new_blocks(tokens);
    let Some(window) = config.groups[group].window else { return new };
    let (next, step) = (sequence.next_position(), demand.step_tokens);
    let peak = peak_window_blocks(window, config.block_size(), next, tokens, step);
    peak.saturating_sub(sequence.tables[group].len()).min(new)
}

/// Blocks to drop so that the kept tokens stay within the trained context.
pub(super) fn blocks_over_context(demand: &Demand<'_>) -> usize {
    let sequence = demand.sequence;
    let config = sequence.pool().config();
    if !config.ladder.permits(sequence.config().contract, Rung::Evict) {
        return 0;
    }
    let more = sequence.remaining(demand.tokens);
    if sequence.next_position().saturating_add(more) <= sequence.config().trained_context {
        return 0;
    }
    let tokens = sequence.kept_tokens().saturating_add(more);
    let over = tokens.saturating_sub(sequence.config().trained_context);
    over.div_ceil(config.block_size())
}
