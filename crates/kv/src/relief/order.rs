//! The order in which re-encodes are carried out: page by page within the free spans.

use std::collections::{BTreeMap, VecDeque};

use super::convert::changes;
use super::forecast::Forecast;
use super::holders::Holders;
use super::victim::Victims;
use super::{Demand, Move, MoveKind, ReliefPlan};
use crate::account::ByFormat;
use crate::ledger::Reason;
use crate::page::PageFormat;
use crate::table::Sequence;

/// One re-encode, and the pages it changes.
#[derive(Clone, Copy)]
struct Encode {
    victim: usize,
    group: usize,
    target: PageFormat,
    pages: ByFormat<u16>,
}

impl Encode {
    fn take_back(&self, forecast: &mut Forecast<'_>) {
        for (format, &count) in self.pages.iter().filter(|(_, count)| **count > 0) {
            forecast.shift(self.group, self.target, format, usize::from(count));
        }
    }
}

/// Re-encodes by source and target format, each in the order in which they were decided on.
type Kinds = BTreeMap<(Option<PageFormat>, PageFormat), VecDeque<Encode>>;

/// Takes the next re-encodes to carry out from `kinds` to `encoded` and enters them in `forecast`: of the
/// first kind that gives back at least as many spans as it takes, the shortest run that does. So one empty
/// span is enough to begin with, and it is there again after each run. Where no kind does, one re-encode
/// that finds room. `false`: none does, or all are done.
fn next_encodes(forecast: &mut Forecast<'_>, kinds: &mut Kinds, encoded: &mut Vec<Encode>) -> bool {
    let mut alone = None;
    let spans_before = forecast.spans();
    for (kind, encodes) in &mut *kinds {
        let mut run = 0;
        let mut pays = false;
        while let (false, Some(next)) = (pays, encodes.get(run)) {
            if !forecast.encode(next.group, &next.pages, next.target) {
                break;
            }
            run += 1;
            pays = forecast.spans() <= spans_before;
        }
        if pays {
            encoded.extend(encodes.drain(..run));
            return true;
        }
        encodes.iter().take(run).rev().for_each(|encode| encode.take_back(forecast));
        alone = alone.or((run > 0).then_some(*kind));
    }
    let next = alone.and_then(|kind| kinds.get_mut(&kind)).and_then(VecDeque::pop_front);
    let Some(next) = next else { return false };
    forecast.encode(next.group, &next.pages, next.target);
    encoded.push(next);
    true
}

/// Puts the planned re-encodes of `order` behind `moves`, as far as each finds room for its pages when its
/// turn comes and the reserve is whole at the end. Returns all moves; `forecast` says what they lead to.
pub(super) fn order_encodes(
    demands: &[Demand<'_>],
    victims: &Victims,
    order: impl Iterator<Item = usize>,
    forecast: &mut Forecast<'_>,
    reason: Reason,
    mut moves: Vec<Move>,
) -> Vec<Move> {
    let Some(pool) = demands.first().map(|demand| demand.sequence.pool()) else { return moves };
    let mut kinds = Kinds::new();
    for index in order {
        let victim = &victims.all[index];
        let Some(target) = victim.target else { continue };
        let changes = |format| changes(&pool.config().groups[victim.group], format, target);
        let pages = ByFormat::from_fn(|f| if changes(f) { victim.pages[f] } else { 0 });
        let source = pages.iter().find(|(_, count)| **count > 0).map(|(format, _)| format);
        if source.is_some() {
            let encode = Encode { victim: index, group: victim.group, target, pages };
            kinds.entry((source, target)).or_default().push_back(encode);
        }
    }
    let mut encoded = Vec::new();
    while next_encodes(forecast, &mut kinds, &mut encoded) {}
    // A re-encode of few pages may cost more spans than it frees: then it is not worth its harm.
    while !forecast.reserve_is_kept() {
        let Some(last) = encoded.pop() else { break };
        last.take_back(forecast);
    }
    moves.extend(encoded.into_iter().map(|encode| {
        let victim = &victims.all[encode.victim];
        let (harm, bytes) = victims.planned(pool, encode.victim);
        Move {
            request: demands[victim.sequence].sequence.config().request,
            first: victim.first,
            kind: MoveKind::Encode { group: victim.group, format: encode.target },
            bytes,
            harm,
            reason,
            likely_block: victim.block,
        }
    }));
    moves
}

/// `--kv-format`: brings every sealed block of `sequence` to `format`, except those with a token among
/// the first `sink_tokens` or the last `tail_tokens`, as far as the free spans allow. To be carried out
/// after each commit. It is the caller who asks for the format: neither the contract nor the ladder is
/// looked at; pinned layers and blocks that others hold too stay.
pub fn plan_format_at_seal(
    sequence: &Sequence,
    format: PageFormat,
    sink_tokens: usize,
    tail_tokens: usize,
) -> ReliefPlan {
    if format == PageFormat::F16 {
        return ReliefPlan::default();
    }
    let pool = sequence.pool();
    let tail_start = sequence.next_position().saturating_sub(tail_tokens);
    let state = pool.shared.state();
    let demands = [Demand { sequence, tokens: 0, step_tokens: 1, stretch_tokens: 0 }];
    let holders = Holders::new([sequence].into_iter(), &state);
    let mut victims = Victims::new(&demands, &state, &holders);
    let wanted =
        |first: usize| first >= sink_tokens && first + pool.config().block_size() <= tail_start;
    let mut order: Vec<usize> = (0..victims.all.len()).collect();
    order.retain(|&index| wanted(victims.all[index].first));
    order.sort_by_key(|&index| victims.all[index].first);
    order.iter().for_each(|&index| victims.all[index].target = Some(format));
    let mut forecast = Forecast::among(&pool.shared, &state, &holders);
    let (order, reason) = (order.into_iter(), Reason::FormatAtSeal);
    let moves = order_encodes(&demands, &victims, order, &mut forecast, reason, Vec::new());
    ReliefPlan { moves, ..ReliefPlan::default() }
}
