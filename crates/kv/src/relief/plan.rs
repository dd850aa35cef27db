//! Plans: which blocks give way, in what order. Pure.

use super::drops::{DropTarget, drop_order, for_each_dropped_page};
use super::forecast::Forecast;
use super::{Demand, EVICT_BATCH_BLOCKS, Move, MoveKind, ReliefPlan};
use crate::admission::peak_window_blocks;
use crate::config::TAIL_TOKENS;
use crate::ladder::Rung;
use crate::ledger::Reason;
use crate::page::PageFormat;
use crate::policy::EvictionPolicy;
use crate::pool::{BlockPool, State};
use crate::table::{Sequence, SequenceConfig};

/// Where a block lies in its sequence; a later zone gives way later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Zone {
    Middle,
    Tail,
    Sinks,
}

/// A block that could be re-encoded.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    sequence: usize,
    group: usize,
    first: usize,
    zone: Zone,
    /// f16 pages of the block.
    pages: usize,
}

/// Plans relief for the predicted demand of all sequences: nothing where it fits as things lie.
///
/// Order: oldest middle f16 blocks to int8; then, where the contract permits, drops in the order of
/// `policy`, several at a time; then the tail and last the first block to int8. Lowest priority first.
/// A sequence that permits drops also gives up blocks that would exceed its trained context.
///
/// A plan with a shortage gives up all it may and still does not suffice: rather than carry it out,
/// plan again for less (the next step alone in place of the horizon, a smaller chunk).
pub fn plan_relief(
    pool: &BlockPool,
    demands: &[Demand<'_>],
    policy: &dyn EvictionPolicy,
) -> ReliefPlan {
    let state = pool.shared.state();
    let demand_pages = demand_pages(pool, demands);
    let compaction = !state.spans.can_take(&demand_pages, pool.shared.geometry.reserve_spans);
    let over_context: Vec<usize> = demands.iter().map(blocks_over_context).collect();
    if !compaction && over_context.iter().all(|&blocks| blocks == 0) {
        return ReliefPlan::default();
    }
    let forecast = Forecast::new(&pool.shared, &state, demand_pages);
    let (encodes, drops) = (Vec::new(), Vec::new());
    let mut planner = Planner { pool, state: &state, demands, forecast, encodes, drops };
    planner.drop_over_context(policy, &over_context);
    if compaction {
        let candidates = planner.candidates();
        planner.encode_zone(&candidates, Zone::Middle);
        planner.drop_for_demand(policy);
        planner.encode_zone(&candidates, Zone::Tail);
        planner.encode_zone(&candidates, Zone::Sinks);
    }
    planner.finish(compaction)
}

/// Bytes by which the demand exceeds the free bytes as things lie now; 0 where no relief is needed.
pub fn relief_needed_bytes(pool: &BlockPool, demands: &[Demand<'_>]) -> usize {
    let pages = demand_pages(pool, demands);
    let state = pool.shared.state();
    if state.spans.can_take(&pages, pool.shared.geometry.reserve_spans) {
        return 0;
    }
    let free_bytes = pool.shared.free_bytes_for(&state, &pages);
    pool.shared.page_bytes_sum(&pages).saturating_sub(free_bytes).max(1)
}

/// Pages per size class that all demands together need.
fn demand_pages(pool: &BlockPool, demands: &[Demand<'_>]) -> Vec<usize> {
    let mut blocks = vec![0; pool.config().groups.len()];
    for demand in demands {
        blocks.iter_mut().zip(demand_blocks(demand)).for_each(|(sum, more)| *sum += more);
    }
    pool.shared.demand_pages(&blocks)
}

/// New blocks per group that the demand needs at its peak.
fn demand_blocks(demand: &Demand<'_>) -> Vec<usize> {
    let sequence = demand.sequence;
    let config = sequence.pool().config();
    let tokens = sequence.remaining(demand.tokens);
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
fn blocks_over_context(demand: &Demand<'_>) -> usize {
    let sequence = demand.sequence;
    if !sequence.config().contract.permits(Rung::Evict) {
        return 0;
    }
    let tokens = sequence.kept_tokens().saturating_add(sequence.remaining(demand.tokens));
    let over = tokens.saturating_sub(sequence.config().trained_context);
    over.div_ceil(sequence.pool().config().block_size())
}

struct Planner<'a> {
    pool: &'a BlockPool,
    state: &'a State,
    demands: &'a [Demand<'a>],
    forecast: Forecast<'a>,
    encodes: Vec<(Candidate, Move)>,
    drops: Vec<Move>,
}

impl Planner<'_> {
    /// Every block that may be re-encoded, in the order in which they give way within a zone.
    fn candidates(&self) -> Vec<Candidate> {
        let mut candidates = Vec::new();
        for (index, demand) in self.demands.iter().enumerate() {
            if demand.sequence.config().contract.permits(Rung::Int8) {
                candidates.extend(sealed_f16_blocks(demand.sequence, index, self.state));
            }
        }
        let priority = |c: &Candidate| self.demands[c.sequence].sequence.config().priority;
        candidates.sort_by_key(|c| (priority(c), c.first, c.sequence, c.group));
        candidates
    }

    fn encode_zone(&mut self, candidates: &[Candidate], zone: Zone) {
        for candidate in candidates.iter().filter(|candidate| candidate.zone == zone) {
            if self.forecast.satisfied() {
                return;
            }
            let sequence = self.demands[candidate.sequence].sequence;
            let full = self.pool.config().groups[candidate.group].window.is_none();
            if full && self.is_dropped(sequence.config().request, candidate.first) {
                continue;
            }
            let Candidate { group, pages, .. } = *candidate;
            if self.forecast.encode(group, PageFormat::F16, PageFormat::Int8, pages) {
                let planned = encode_move(sequence, candidate, PageFormat::Int8, Reason::Demand);
                self.encodes.push((*candidate, planned));
            }
        }
    }

    /// Drops from each sequence what would exceed its trained context.
    fn drop_over_context(&mut self, policy: &dyn EvictionPolicy, over_context: &[usize]) {
        for (index, &over) in over_context.iter().enumerate().filter(|(_, over)| **over > 0) {
            let order = drop_order(self.demands[index].sequence, policy, self.state);
            for target in order.into_iter().take(over.max(EVICT_BATCH_BLOCKS)) {
                self.drop_block(index, target, Reason::Context);
            }
        }
    }

    /// Drops until the demand fits, at least [`EVICT_BATCH_BLOCKS`] once it begins.
    fn drop_for_demand(&mut self, policy: &dyn EvictionPolicy) {
        let mut victims = Vec::new();
        for (index, demand) in self.demands.iter().enumerate() {
            let SequenceConfig { request, contract, priority, .. } = *demand.sequence.config();
            if !contract.permits(Rung::Evict) {
                continue;
            }
            let mut order = drop_order(demand.sequence, policy, self.state);
            order.retain(|target| !self.is_dropped(request, target.first));
            let ranked = order.into_iter().enumerate();
            victims.extend(ranked.map(|(rank, target)| (priority, rank, index, target)));
        }
        // Ranks interleave sequences of one priority: each gives its first choice before any its second.
        victims.sort_unstable();
        for (dropped, (_, _, index, target)) in victims.into_iter().enumerate() {
            let in_batch = (1..EVICT_BATCH_BLOCKS).contains(&dropped);
            if self.forecast.satisfied() && !in_batch {
                return;
            }
            self.drop_block(index, target, Reason::Demand);
        }
    }

    fn is_dropped(&self, request: u64, first: usize) -> bool {
        self.drops.iter().any(|drop| drop.request == request && drop.first == first)
    }

    fn drop_block(&mut self, index: usize, target: DropTarget, reason: Reason) {
        let sequence = self.demands[index].sequence;
        // What was to be re-encoded is dropped as it is.
        let config = self.pool.config();
        let forecast = &mut self.forecast;
        self.encodes.retain(|(candidate, _)| {
            let full = config.groups[candidate.group].window.is_none();
            let dropped = full && candidate.sequence == index && candidate.first == target.first;
            if dropped {
                let Candidate { group, pages, .. } = *candidate;
                forecast.undo_encode(group, PageFormat::F16, PageFormat::Int8, pages);
            }
            !dropped
        });
        let bytes = for_each_dropped_page(sequence, target, |group, format| {
            forecast.free(group, format);
        });
        self.drops.push(Move {
            request: sequence.config().request,
            first: target.first,
            kind: MoveKind::Drop(target),
            bytes,
            reason,
        });
    }

    fn finish(mut self, compaction: bool) -> ReliefPlan {
        // A re-encode of few pages may cost more spans than it frees: then it is not worth its harm.
        while !self.forecast.reserve_is_kept() {
            let Some((candidate, _)) = self.encodes.pop() else { break };
            let Candidate { group, pages, .. } = candidate;
            self.forecast.undo_encode(group, PageFormat::F16, PageFormat::Int8, pages);
        }
        let mut moves = self.drops;
        moves.extend(self.encodes.iter().map(|(_, planned)| *planned));
        let shortage = if compaction { self.forecast.shortage() } else { None };
        ReliefPlan { moves, shortage, demand_pages: self.forecast.into_demand(), compaction }
    }
}

/// Sealed blocks of `sequence` that have f16 pages, are not shared, and hold only finite numbers.
fn sealed_f16_blocks(sequence: &Sequence, index: usize, state: &State) -> Vec<Candidate> {
    let config = sequence.pool().config();
    let block_size = config.block_size();
    let tail_start = sequence.next_position().saturating_sub(TAIL_TOKENS);
    let mut candidates = Vec::new();
    for (group, table) in sequence.tables.iter().enumerate() {
        let layers = &sequence.view().groups[group].layers;
        for (position, entry) in table.iter().enumerate() {
            let shared = state.blocks[entry.guard.index() as usize].owners > 1;
            if shared || entry.refused || !sequence.is_sealed(entry.first) {
                continue;
            }
            let is_f16 = |pages: &&Vec<_>| {
                let page: &crate::page::PageRef = &pages[position];
                page.format == PageFormat::F16
            };
            let pages = layers.iter().filter(is_f16).count();
            let zone = if entry.first == 0 && config.groups[group].window.is_none() {
                Zone::Sinks
            } else if entry.first + block_size > tail_start {
                Zone::Tail
            } else {
                Zone::Middle
            };
            if pages > 0 {
                candidates.push(Candidate {
                    sequence: index,
                    group,
                    first: entry.first,
                    zone,
                    pages,
                });
            }
        }
    }
    candidates
}

fn encode_move(
    sequence: &Sequence,
    candidate: &Candidate,
    format: PageFormat,
    reason: Reason,
) -> Move {
    let shape = sequence.pool().config().groups[candidate.group].shape;
    let saved = shape.page_bytes(PageFormat::F16) - shape.page_bytes(format);
    Move {
        request: sequence.config().request,
        first: candidate.first,
        kind: MoveKind::Encode { group: candidate.group, format },
        bytes: candidate.pages * saved,
        reason,
    }
}

/// `--kv-format`: brings every sealed block of `sequence` to `format`, except those with a token among
/// the first `sink_tokens` or the last `tail_tokens`. To be carried out after each commit. It is the
/// caller who asks for the format: the contract is not looked at.
pub fn plan_format_at_seal(
    sequence: &Sequence,
    format: PageFormat,
    sink_tokens: usize,
    tail_tokens: usize,
) -> ReliefPlan {
    if format == PageFormat::F16 {
        return ReliefPlan::default();
    }
    let block_size = sequence.pool().config().block_size();
    let tail_start = sequence.next_position().saturating_sub(tail_tokens);
    let state = sequence.pool().shared.state();
    let mut moves: Vec<Move> = sealed_f16_blocks(sequence, 0, &state)
        .iter()
        .filter(|c| c.first >= sink_tokens && c.first + block_size <= tail_start)
        .map(|candidate| encode_move(sequence, candidate, format, Reason::FormatAtSeal))
        .collect();
    moves.sort_by_key(|planned| planned.first);
    ReliefPlan { moves, ..ReliefPlan::default() }
}
