//! Plans: which blocks give way, in what order. Pure.
//!
//! A plan is made in three passes. *Climb*: stage by stage (decision 0007), each block is given a target
//! or dropped until the counts say that the demand fits. *Undo*: what later stages made unnecessary is
//! taken back, the last first. *Order*: the re-encodes are put in an order that can be carried out page
//! by page within the free spans. All are linear in blocks but for one sort per stage.

use std::collections::{BTreeMap, HashSet, VecDeque};

use super::demand::{blocks_over_context, demand_pages};
use super::drops::{DropTarget, blocks_prefix, drop_order, for_each_dropped_page};
use super::forecast::{Forecast, Goal};
use super::victim::{Victims, Zone, becomes};
use super::{Demand, EVICT_BATCH_BLOCKS, Move, MoveKind, ReliefPlan};
use crate::account::ByFormat;
use crate::ladder::{Ladder, Rung};
use crate::ledger::Reason;
use crate::page::PageFormat;
use crate::policy::EvictionPolicy;
use crate::pool::{BlockPool, State};
use crate::table::Sequence;

/// Where demand is unknown, relief begins when this share of the spans would be taken, in percent.
const HIGH_MARK_PERCENT: usize = 85;
/// And it goes on until no more than this share would be.
const LOW_MARK_PERCENT: usize = 75;
/// Passes over the steps of a plan in search of unneeded ones; a second seldom finds any.
const UNDO_PASSES: usize = 3;

/// Plans relief for the predicted demand of all sequences: nothing where it fits as things lie.
///
/// Victims are taken by priority, lowest first; within a priority stage by stage, as the pool's
/// [`Ladder`] orders its rungs: middle blocks down one rung after another, the recent tail to int8 before
/// any block is dropped, then drops in the order of `policy` (several at a time), then the tail to the
/// floor, last the first block. Within a stage the least harm per byte goes first, then the oldest. A
/// sequence that permits drops also gives up blocks that would exceed its trained context.
///
/// Once relief begins it makes room for [`Demand::stretch_tokens`] as far as the stages of
/// re-encoding that [`Demand::tokens`] needs can. Sequences without `max_tokens` are brought down to 75 % of the pool
/// whenever the demand would take more than 85 %.
///
/// A plan with a shortage gives up all it may and still does not suffice: rather than carry it out,
/// plan again for less (the next step alone in place of the horizon, a smaller chunk).
pub fn plan_relief(
    pool: &BlockPool,
    demands: &[Demand<'_>],
    policy: &dyn EvictionPolicy,
) -> ReliefPlan {
    let state = pool.shared.state();
    let geometry = &pool.shared.geometry;
    let pages = demand_pages(pool, &state, demands, |demand| demand.tokens);
    let need = Goal { demand: &pages, spans: geometry.spans };
    let mark = |percent| Goal { demand: &pages, spans: geometry.spans * percent / 100 };
    let compaction = !state.spans.can_take(&pages, geometry.reserve_spans);
    let over_context: Vec<usize> = demands.iter().map(blocks_over_context).collect();
    let exceeds_context = over_context.iter().any(|&blocks| blocks > 0);
    let forecast = Forecast::new(&pool.shared, &state);
    let fits = !compaction || forecast.reaches(need);
    let grows_unknown = demands.iter().any(|demand| demand.is_unknown() && demand.tokens > 0);
    let over_mark = grows_unknown && !forecast.reaches(mark(HIGH_MARK_PERCENT));
    if fits && !exceeds_context && !over_mark {
        return ReliefPlan { demand_pages: pages, compaction, ..ReliefPlan::default() };
    }
    let mut planner = Planner::new(pool, &state, demands, policy, forecast);
    planner.drop_over_context(&over_context);
    let mut goals = vec![need];
    let reached = !compaction || planner.climb(need, |_| true, None);
    if reached {
        planner.undo_unneeded(&goals);
    }
    let firm_steps = planner.steps.len();
    let mut enough = reached;
    let stretch_pages;
    let stages = planner.stages_for_stretch();
    if reached && !stages.is_empty() {
        stretch_pages =
            demand_pages(pool, &state, demands, |demand| demand.stretch_tokens.max(demand.tokens));
        let stretch = Goal { demand: &stretch_pages, spans: geometry.spans };
        enough &= planner.climb(stretch, |_| true, Some(&stages));
        goals.push(stretch);
    }
    if over_mark {
        enough &= planner.climb(mark(LOW_MARK_PERCENT), |demand| demand.is_unknown(), None);
        goals.push(mark(LOW_MARK_PERCENT));
    }
    if enough {
        planner.undo_unneeded(&goals);
    } else if reached {
        planner.undo_until(need, firm_steps);
    }
    let (moves, forecast) = planner.finish();
    let demanded = compaction || pages.iter().any(|&count| count > 0);
    let shortage = if demanded { forecast.shortage(&pages) } else { None };
    ReliefPlan { moves, shortage, demand_pages: pages, compaction }
}

/// One stage of the ladder, for the victims of one priority.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Blocks of the zone are brought to the format.
    Encode(Zone, PageFormat),
    /// Blocks are dropped.
    Drop,
}

/// The stages of a ladder, first to last (decision 0007).
fn stages(ladder: &Ladder) -> Vec<Stage> {
    use PageFormat::Int8;
    let place = |wanted| ladder.rungs.iter().position(|&rung| rung == wanted);
    let has_int8 = place(Rung::Int8).is_some();
    let tail_before_drops = has_int8 && place(Rung::Int8) < place(Rung::Evict);
    let mut stages = Vec::new();
    for rung in &ladder.rungs {
        match rung.format() {
            Some(format) => stages.push(Stage::Encode(Zone::Middle, format)),
            None => {
                stages.extend(tail_before_drops.then_some(Stage::Encode(Zone::Tail, Int8)));
                stages.push(Stage::Drop);
            }
        }
    }
    for zone in [Zone::Tail, Zone::Sinks] {
        let lower = ladder.rungs.iter().filter_map(|rung| rung.format()).filter(|f| *f != Int8);
        let int8_first = has_int8.then_some(Int8);
        let formats = int8_first.into_iter().chain(lower);
        let not_yet = formats.filter(|&f| f != Int8 || zone == Zone::Sinks || !tail_before_drops);
        stages.extend(not_yet.map(|format| Stage::Encode(zone, format)));
    }
    stages
}

/// One victim brought down by one stage.
#[derive(Clone, Copy)]
struct Step {
    victim: usize,
    previous: Option<PageFormat>,
    target: PageFormat,
    /// The (priority class, stage) it belongs to.
    stage: (usize, usize),
    undone: bool,
}

struct Planner<'a> {
    pool: &'a BlockPool,
    state: &'a State,
    demands: &'a [Demand<'a>],
    policy: &'a dyn EvictionPolicy,
    stages: Vec<Stage>,
    /// Sequences by priority, lowest first.
    classes: Vec<Vec<usize>>,
    victims: Victims,
    /// After all that is planned.
    forecast: Forecast<'a>,
    /// After the drops alone.
    after_drops: Forecast<'a>,
    steps: Vec<Step>,
    drops: Vec<Move>,
    dropped: HashSet<(usize, DropTarget)>,
}

impl<'a> Planner<'a> {
    fn new(
        pool: &'a BlockPool,
        state: &'a State,
        demands: &'a [Demand<'a>],
        policy: &'a dyn EvictionPolicy,
        forecast: Forecast<'a>,
    ) -> Planner<'a> {
        let mut classes: BTreeMap<i32, Vec<usize>> = BTreeMap::new();
        for (index, demand) in demands.iter().enumerate() {
            classes.entry(demand.sequence.config().priority).or_default().push(index);
        }
        Planner {
            pool,
            state,
            demands,
            policy,
            stages: stages(&pool.config().ladder),
            classes: classes.into_values().collect(),
            victims: Victims::new(demands, state),
            after_drops: forecast.clone(),
            forecast,
            steps: Vec::new(),
            drops: Vec::new(),
            dropped: HashSet::new(),
        }
    }

    fn permits(&self, sequence: usize, rung: Rung) -> bool {
        let contract = self.demands[sequence].sequence.config().contract;
        self.pool.config().ladder.permits(contract, rung)
    }

    /// Goes down the stages until `goal` is reached, among the sequences that `may_give`; only through the
    /// (class, stage)s of `within`, where given. Returns whether it was reached.
    fn climb(
        &mut self,
        goal: Goal<'_>,
        may_give: impl Fn(&Demand<'_>) -> bool,
        within: Option<&HashSet<(usize, usize)>>,
    ) -> bool {
        for class in 0..self.classes.len() {
            let all = self.classes[class].iter().copied();
            let givers: Vec<usize> = all.filter(|&index| may_give(&self.demands[index])).collect();
            for stage in 0..self.stages.len() {
                if self.forecast.reaches(goal) {
                    return true;
                }
                let at = (class, stage);
                if within.is_some_and(|within| !within.contains(&at)) {
                    continue;
                }
                match self.stages[stage] {
                    Stage::Encode(zone, format) => {
                        self.encode_zone(goal, &givers, at, zone, format);
                    }
                    Stage::Drop => self.drop_for_demand(goal, &givers),
                }
            }
        }
        self.forecast.reaches(goal)
    }

    /// The (class, stage)s of re-encoding that what is planned so far makes use of. Nothing is dropped for
    /// a stretch: it would cost text that the need may spare, since blocks that leave the tail shrink.
    fn stages_for_stretch(&self) -> HashSet<(usize, usize)> {
        let in_use = |step: &&Step| {
            let victim = &self.victims.all[step.victim];
            !step.undone && !victim.dropped && victim.target.is_some()
        };
        self.steps.iter().filter(in_use).map(|step| step.stage).collect()
    }

    /// Brings blocks of `zone` to `format`, as `stage`, until `goal` is reached.
    fn encode_zone(
        &mut self,
        goal: Goal<'_>,
        givers: &[usize],
        stage: (usize, usize),
        zone: Zone,
        format: PageFormat,
    ) {
        let Some(rung) = Rung::to_format(format) else { return };
        let mut order = Vec::new();
        for &giver in givers.iter().filter(|&&giver| self.permits(giver, rung)) {
            for index in self.victims.of_sequence(giver) {
                let victim = &self.victims.all[index];
                if victim.zone != zone || victim.dropped {
                    continue;
                }
                let (harm, bytes) = self.victims.step(self.pool, index, Some(format));
                if bytes > 0 {
                    // f32: sums of the same terms in another order must not decide.
                    order.push(((harm / bytes as f64) as f32, victim.first, index));
                }
            }
        }
        // Victims lie by sequence, then group.
        order.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then((a.1, a.2).cmp(&(b.1, b.2))));
        for (.., victim) in order {
            if self.forecast.reaches(goal) {
                return;
            }
            let previous = self.victims.all[victim].target;
            self.steps.push(Step { victim, previous, target: format, stage, undone: false });
            self.retarget(victim, Some(format));
        }
    }

    /// Plans another target for a victim.
    fn retarget(&mut self, index: usize, target: Option<PageFormat>) {
        let victim = &mut self.victims.all[index];
        let before = std::mem::replace(&mut victim.target, target);
        for (format, &count) in victim.pages.iter().filter(|(_, count)| **count > 0) {
            let from = becomes(self.pool, victim.group, format, before);
            let to = becomes(self.pool, victim.group, format, target);
            if from != to {
                self.forecast.shift(victim.group, from, to, count);
            }
        }
    }

    /// Drops from each sequence what would exceed its trained context.
    fn drop_over_context(&mut self, over_context: &[usize]) {
        for (index, &over) in over_context.iter().enumerate().filter(|(_, over)| **over > 0) {
            let order = drop_order(self.demands[index].sequence, self.policy, self.state);
            let count = blocks_prefix(&order, over.max(EVICT_BATCH_BLOCKS));
            for target in &order[..count] {
                self.drop_target(index, *target, Reason::Context);
            }
        }
    }

    /// Drops until `goal` is reached, at least [`EVICT_BATCH_BLOCKS`] once it begins.
    fn drop_for_demand(&mut self, goal: Goal<'_>, givers: &[usize]) {
        let mut ranked = Vec::new();
        let mut batch = 1;
        for &giver in givers.iter().filter(|&&giver| self.permits(giver, Rung::Evict)) {
            let mut order = drop_order(self.demands[giver].sequence, self.policy, self.state);
            order.retain(|target| !self.dropped.contains(&(giver, *target)));
            batch = batch.max(blocks_prefix(&order, EVICT_BATCH_BLOCKS));
            let of_giver = order.into_iter().enumerate();
            ranked.extend(of_giver.map(|(rank, target)| (rank, giver, target)));
        }
        // Ranks interleave sequences: each gives its first choice before any its second.
        ranked.sort_unstable();
        for (count, (_, giver, target)) in ranked.into_iter().enumerate() {
            if self.forecast.reaches(goal) && !(1..batch).contains(&count) {
                break;
            }
            self.drop_target(giver, target, Reason::Demand);
        }
    }

    fn drop_target(&mut self, index: usize, target: DropTarget, reason: Reason) {
        let sequence = self.demands[index].sequence;
        self.dropped.insert((index, target));
        // What was to be re-encoded is dropped as it is.
        let groups = 0..self.pool.config().groups.len();
        let is_full = |group: &usize| self.pool.config().groups[*group].window.is_none();
        let meant = |group: &usize| target.page.is_none_or(|(other, _)| other == *group);
        let victims: Vec<usize> = groups
            .filter(|group| is_full(group) && meant(group))
            .filter_map(|group| self.victims.find(index, group, target.first))
            .collect();
        let targets: Vec<Option<PageFormat>> =
            victims.iter().map(|&victim| self.victims.all[victim].target).collect();
        victims.iter().for_each(|&victim| self.retarget(victim, None));
        let mut gone: ByFormat<usize> = ByFormat::default();
        let shares = self.victims.shares[index];
        let mut harm = 0.0;
        let bytes = for_each_dropped_page(sequence, target, |group, format| {
            self.forecast.free(group, format);
            self.after_drops.free(group, format);
            harm += shares.page_drop_harm(sequence, (group, target.first), format);
            gone[format] += 1;
        });
        for (victim, planned) in victims.into_iter().zip(targets) {
            let dropped = &mut self.victims.all[victim];
            match target.page {
                None => {
                    dropped.pages = ByFormat::default();
                    dropped.dropped = true;
                }
                Some((group, layer)) => {
                    let pinned = self.pool.config().groups[group].pinned.contains(&layer);
                    for (format, &count) in gone.iter().filter(|_| !pinned) {
                        // A refused page is not among those that may be re-encoded.
                        dropped.pages[format] = dropped.pages[format].saturating_sub(count);
                    }
                    self.retarget(victim, planned);
                }
            }
        }
        let (request, first) = (sequence.config().request, target.first);
        self.drops.push(Move { request, first, kind: MoveKind::Drop(target), bytes, harm, reason });
    }

    /// Takes back, the last first, what is not needed to reach all `goals`.
    fn undo_unneeded(&mut self, goals: &[Goal<'_>]) {
        for _ in 0..UNDO_PASSES {
            let mut undone = false;
            for index in (0..self.steps.len()).rev() {
                let step = self.steps[index];
                let victim = &self.victims.all[step.victim];
                if step.undone || victim.dropped || victim.target != Some(step.target) {
                    continue;
                }
                // One step up, or all the way: a page half way down may take a span of its own.
                let mut ways = [step.previous, None].into_iter();
                self.steps[index].undone = ways.any(|previous| {
                    self.retarget(step.victim, previous);
                    goals.iter().all(|&goal| self.forecast.reaches(goal))
                });
                undone |= self.steps[index].undone;
                if !self.steps[index].undone {
                    self.retarget(step.victim, Some(step.target));
                }
            }
            if !undone {
                break;
            }
        }
    }

    /// Takes back the last steps, down to the first `firm_steps`, until `goal` is reached: a few pages of
    /// another size may take more spans than they give back.
    fn undo_until(&mut self, goal: Goal<'_>, firm_steps: usize) {
        for index in (firm_steps..self.steps.len()).rev() {
            if self.forecast.reaches(goal) {
                break;
            }
            let step = self.steps[index];
            let victim = &self.victims.all[step.victim];
            if !victim.dropped && victim.target == Some(step.target) {
                self.retarget(step.victim, step.previous);
                self.steps[index].undone = true;
            }
        }
    }

    /// The moves in an order that can be carried out, and what they lead to.
    fn finish(self) -> (Vec<Move>, Forecast<'a>) {
        let Planner { pool, demands, victims, after_drops, steps, drops, .. } = self;
        let mut order: Vec<usize> = steps.iter().map(|step| step.victim).collect();
        let mut seen = HashSet::new();
        order.retain(|victim| !victims.all[*victim].dropped && seen.insert(*victim));
        let sequence = |index: usize| demands[index].sequence;
        order_encodes(pool, &victims, &sequence, order, after_drops, Reason::Demand, drops)
    }
}

/// One re-encode, and the pages it changes.
#[derive(Clone)]
struct Encode {
    victim: usize,
    group: usize,
    target: PageFormat,
    pages: ByFormat<usize>,
}

/// The next re-encodes to carry out, taken out of `kinds` (by source and target format) and entered in
/// `forecast`: of the first kind that gives back at least as many spans as it takes, the shortest run that
/// does. So one empty span is enough to begin with, and it is there again after each run. Where no kind
/// does, one re-encode that finds room. `None`: none does, or all are done.
fn next_encodes(
    forecast: &mut Forecast<'_>,
    kinds: &mut BTreeMap<(Option<PageFormat>, PageFormat), VecDeque<Encode>>,
) -> Option<Vec<Encode>> {
    let mut alone = None;
    for (kind, encodes) in &mut *kinds {
        let mut trial = forecast.clone();
        let mut run = 0;
        let mut pays = false;
        while let (false, Some(next)) = (pays, encodes.get(run)) {
            if !trial.encode(next.group, &next.pages, next.target) {
                break;
            }
            run += 1;
            pays = trial.spans() <= forecast.spans();
        }
        if pays {
            *forecast = trial;
            return Some(encodes.drain(..run).collect());
        }
        alone = alone.or((run > 0).then_some(*kind));
    }
    let next = kinds.get_mut(&alone?)?.pop_front()?;
    forecast.encode(next.group, &next.pages, next.target);
    Some(vec![next])
}

/// Puts the planned re-encodes of `order` behind `moves`, as far as each finds room for its pages when its
/// turn comes and the reserve is whole at the end. Returns all moves and what they lead to.
fn order_encodes<'a>(
    pool: &BlockPool,
    victims: &Victims,
    sequence: &dyn Fn(usize) -> &'a Sequence,
    order: Vec<usize>,
    mut forecast: Forecast<'a>,
    reason: Reason,
    mut moves: Vec<Move>,
) -> (Vec<Move>, Forecast<'a>) {
    let mut kinds: BTreeMap<(Option<PageFormat>, PageFormat), VecDeque<Encode>> = BTreeMap::new();
    for index in order {
        let victim = &victims.all[index];
        let Some(target) = victim.target else { continue };
        let changes = |f| becomes(pool, victim.group, f, Some(target)) != f;
        let pages = ByFormat::from_fn(|f| if changes(f) { victim.pages[f] } else { 0 });
        let source = pages.iter().find(|(_, count)| **count > 0).map(|(format, _)| format);
        if source.is_some() {
            let encode = Encode { victim: index, group: victim.group, target, pages };
            kinds.entry((source, target)).or_default().push_back(encode);
        }
    }
    let mut encoded = Vec::new();
    while let Some(next) = next_encodes(&mut forecast, &mut kinds) {
        encoded.extend(next);
    }
    // A re-encode of few pages may cost more spans than it frees: then it is not worth its harm.
    while !forecast.reserve_is_kept() {
        let Some(Encode { group, target, pages, .. }) = encoded.pop() else { break };
        for (format, &count) in pages.iter().filter(|(_, count)| **count > 0) {
            forecast.shift(group, target, format, count);
        }
    }
    moves.extend(encoded.into_iter().map(|encode| {
        let victim = &victims.all[encode.victim];
        let format = encode.target;
        let (harm, bytes) = victims.planned(pool, encode.victim);
        let request = sequence(victim.sequence).config().request;
        let kind = MoveKind::Encode { group: victim.group, format };
        Move { request, first: victim.first, kind, bytes, harm, reason }
    }));
    (moves, forecast)
}

/// `--kv-format`: brings every sealed block of `sequence` to `format`, except those with a token among
/// the first `sink_tokens` or the last `tail_tokens`, as far as the free spans allow. To be carried out
/// after each commit. It is the caller who asks for the format: neither the contract nor the ladder is
/// looked at; pinned layers stay.
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
    let demand = Demand { sequence, tokens: 0, step_tokens: 1, stretch_tokens: 0 };
    let mut victims = Victims::new(&[demand], &state);
    let wanted =
        |first: usize| first >= sink_tokens && first + pool.config().block_size() <= tail_start;
    let mut order: Vec<usize> = (0..victims.all.len()).collect();
    order.retain(|&index| wanted(victims.all[index].first));
    order.sort_by_key(|&index| victims.all[index].first);
    order.iter().for_each(|&index| victims.all[index].target = Some(format));
    let forecast = Forecast::new(&pool.shared, &state);
    let reason = Reason::FormatAtSeal;
    let (moves, _) =
        order_encodes(pool, &victims, &|_| sequence, order, forecast, reason, Vec::new());
    ReliefPlan { moves, ..ReliefPlan::default() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use PageFormat::{Int4, Int8, K8V4};
    use Stage::{Drop, Encode};
    use Zone::{Middle, Sinks, Tail};

    #[test]
    fn the_tail_gives_way_before_a_block_is_dropped_and_the_sinks_last() {
        let default = [
            Encode(Middle, Int8),
            Encode(Middle, K8V4),
            Encode(Middle, Int4),
            Encode(Tail, Int8),
            Drop,
            Encode(Tail, K8V4),
            Encode(Tail, Int4),
            Encode(Sinks, Int8),
            Encode(Sinks, K8V4),
            Encode(Sinks, Int4),
        ];
        assert_eq!(stages(&Ladder::default()), default);
    }

    #[test]
    fn a_ladder_may_be_reordered_and_shortened() {
        let stages = |list| stages(&Ladder::parse(list).unwrap());
        assert_eq!(
            stages("evict,int8"),
            [Drop, Encode(Middle, Int8), Encode(Tail, Int8), Encode(Sinks, Int8)]
        );
        assert_eq!(
            stages("int4,evict"),
            [Encode(Middle, Int4), Drop, Encode(Tail, Int4), Encode(Sinks, Int4)]
        );
        assert_eq!(stages("evict"), [Drop]);
        assert_eq!(stages("none"), []);
    }
}
