//! Plans: which blocks give way, in what order. Pure.
//!
//! A plan is made in three passes. *Climb*: stage by stage (decision 0007), each block is given a target
//! or dropped until the counts say that the goal is reached. *Undo*: what later stages made unnecessary is
//! taken back, the last first. *Order*: the re-encodes are put in an order that can be carried out page
//! by page within the free spans. All are linear in blocks but for the order within a stage. Where nothing
//! is needed no block is looked at.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashSet};

use super::demand::{blocks_over_context, demand_pages};
use super::drops::{DropTarget, blocks_prefix, drop_move, drop_order};
use super::forecast::{Forecast, Goal};
use super::holders::Holders;
use super::order::order_encodes;
use super::stage::{Stage, stages};
use super::victim::{Victim, Victims, Zone};
use super::{Demand, EVICT_BATCH_BLOCKS, Move, ReliefPlan};
use crate::account::ByFormat;
use crate::ladder::Rung;
use crate::ledger::Reason;
use crate::page::PageFormat;
use crate::policy::EvictionPolicy;
use crate::pool::{BlockPool, Shortage, State};
use crate::table::Sequence;

/// Where demand is unknown, relief begins when this share of the spans would be taken, in percent.
const HIGH_MARK_PERCENT: usize = 85;
/// And it goes on until no more than this share would be.
const LOW_MARK_PERCENT: usize = 75;
/// Passes over the steps of a plan in search of unneeded ones; a second seldom finds any.
const UNDO_PASSES: usize = 3;
/// Kinds of steps remembered as needed; more are seldom.
const NEEDED_KINDS: usize = 16;

/// Plans relief for the predicted demand of all sequences: nothing where it fits as things lie.
///
/// Victims are taken by priority, lowest first; within a priority stage by stage, as the pool's
/// [`Ladder`](crate::Ladder) orders its rungs: middle blocks down one rung after another, the recent tail
/// to int8 before any block is dropped, then drops in the order of `policy` (several at a time), then the
/// tail to the floor, last the first block. Within a stage the least harm per byte goes first, then the
/// oldest. A sequence that permits drops also gives up blocks that would exceed its trained context.
///
/// A block that several of the sequences hold gives way once, where every holder's contract permits it and
/// when the holder's turn comes that gives way last; it is never dropped. A block that anyone else holds
/// stays where and as it is, and so do idle cached blocks: drop them first.
///
/// Once relief begins it makes room for [`Demand::stretch_tokens`] as far as the stages of
/// re-encoding that [`Demand::tokens`] needs can. Sequences without `max_tokens` are brought down to 75 %
/// of the pool whenever the demand would take more than 85 %.
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
    let up_to = |percent| Goal::Room { demand: &pages, spans: geometry.spans * percent / 100 };
    let need = up_to(100);
    let compaction = !state.spans.can_take(&pages, geometry.reserve_spans);
    let exceeds_context = demands.iter().any(|demand| blocks_over_context(demand) > 0);
    let grows_unknown = demands.iter().any(|demand| demand.is_unknown() && demand.tokens > 0);
    let over_mark =
        grows_unknown && !Forecast::new(&pool.shared, &state).reaches(up_to(HIGH_MARK_PERCENT));
    let beyond_need = exceeds_context || over_mark;
    if !compaction && !beyond_need {
        return ReliefPlan { demand_pages: pages, ..ReliefPlan::default() };
    }
    let holders = Holders::new(demands.iter().map(|demand| demand.sequence), &state);
    let forecast = Forecast::among(&pool.shared, &state, &holders);
    if !beyond_need && forecast.reaches(need) {
        return ReliefPlan { demand_pages: pages, compaction, ..ReliefPlan::default() };
    }
    let mut planner = Planner::new(pool, &state, &holders, demands, policy, forecast);
    planner.drop_over_context();
    let stretch_pages =
        demand_pages(pool, &state, demands, |demand| demand.stretch_tokens.max(demand.tokens));
    planner.relieve(&Goals {
        need,
        is_met: !compaction,
        stretch: Goal::Room { demand: &stretch_pages, spans: geometry.spans },
        low_mark: over_mark.then(|| up_to(LOW_MARK_PERCENT)),
    });
    let (mut plan, forecast) = planner.finish();
    if compaction || pages.iter().any(|&count| count > 0) {
        plan.shortage = forecast.shortage(&pages);
    }
    ReliefPlan { demand_pages: pages, compaction, ..plan }
}

/// Bytes of pages that `sequences` of `pool` hold together, what several of them share counted once.
pub fn held_bytes_together(pool: &BlockPool, sequences: &[&Sequence]) -> usize {
    let state = pool.shared.state();
    let listed = || sequences.iter().copied();
    Holders::new(listed(), &state).held_bytes(pool, listed(), &state)
}

/// Plans relief for a quota: what the sequences of `demands`, all those of one tenant, hold (a block that
/// several of them share counts once) and [`Demand::tokens`] more together take at most `quota_bytes` bytes
/// of pages. Nobody else's blocks give way, nor blocks that somebody else holds too.
///
/// Victims, stages and the stretch are those of [`plan_relief`], with bytes for a goal: whether the pool
/// has room for the demand is for `plan_relief` to say, after this plan was carried out. What would exceed
/// a trained context is left to it too. The plan counts on [`apply_relief`](super::apply_relief) being
/// given all sequences of the pool, so that it can move pages to make room.
///
/// With a shortage, `free_bytes` are what the quota leaves after the moves. A demand that alone exceeds
/// the quota costs nobody anything: no moves.
pub fn plan_quota(
    pool: &BlockPool,
    demands: &[Demand<'_>],
    quota_bytes: usize,
    policy: &dyn EvictionPolicy,
) -> ReliefPlan {
    let state = pool.shared.state();
    let bytes_for = |tokens: &dyn Fn(&Demand<'_>) -> usize| {
        pool.shared.page_bytes_sum(&demand_pages(pool, &state, demands, tokens))
    };
    let demand_bytes = bytes_for(&|demand| demand.tokens);
    let room_bytes = quota_bytes.saturating_sub(demand_bytes);
    let most_bytes: usize = demands.iter().map(|demand| demand.sequence.held_bytes()).sum();
    let short = |held_bytes| {
        let free_bytes = quota_bytes.saturating_sub(held_bytes);
        let shortage = Shortage { needed_bytes: demand_bytes, free_bytes };
        (demand_bytes > free_bytes || held_bytes > quota_bytes).then_some(shortage)
    };
    // What is shared counts more than once in the sum: an upper bound, at no cost.
    if short(most_bytes).is_none() {
        return ReliefPlan::default();
    }
    let holders = Holders::new(demands.iter().map(|demand| demand.sequence), &state);
    let held_bytes = holders.held_bytes(pool, demands.iter().map(|demand| demand.sequence), &state);
    if short(held_bytes).is_none() || demand_bytes > quota_bytes {
        return ReliefPlan { shortage: short(held_bytes), ..ReliefPlan::default() };
    }
    let forecast = Forecast::new(&pool.shared, &state);
    let others_bytes = forecast.used_bytes() - held_bytes;
    let stretch_bytes = bytes_for(&|demand| demand.stretch_tokens.max(demand.tokens));
    let mut planner = Planner::new(pool, &state, &holders, demands, policy, forecast);
    planner.relieve(&Goals {
        need: Goal::Bytes(others_bytes + room_bytes),
        is_met: false,
        stretch: Goal::Bytes(others_bytes + quota_bytes.saturating_sub(stretch_bytes)),
        low_mark: None,
    });
    let (plan, forecast) = planner.finish();
    ReliefPlan { shortage: short(forecast.used_bytes() - others_bytes), ..plan }
}

/// What a plan is to reach.
struct Goals<'a> {
    need: Goal<'a>,
    /// The need is met as things lie.
    is_met: bool,
    /// What re-encoding by the stages in use may go on for.
    stretch: Goal<'a>,
    /// To be reached by sequences of unknown length.
    low_mark: Option<Goal<'a>>,
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
    /// Indices of victims by priority class and zone.
    of_zone: Vec<[Vec<u32>; Zone::COUNT]>,
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
        holders: &Holders,
        demands: &'a [Demand<'a>],
        policy: &'a dyn EvictionPolicy,
        forecast: Forecast<'a>,
    ) -> Planner<'a> {
        let mut classes: BTreeMap<i32, Vec<usize>> = BTreeMap::new();
        for (index, demand) in demands.iter().enumerate() {
            classes.entry(demand.sequence.config().priority).or_default().push(index);
        }
        let classes: Vec<Vec<usize>> = classes.into_values().collect();
        let victims = Victims::new(demands, state, holders);
        Planner {
            pool,
            state,
            demands,
            policy,
            stages: stages(&pool.config().ladder),
            of_zone: victims.by_class_and_zone(&classes),
            classes,
            victims,
            after_drops: forecast.clone(),
            forecast,
            steps: Vec::new(),
            drops: Vec::new(),
            dropped: HashSet::new(),
        }
    }

    /// Plans all that `goals` ask for, as far as it goes.
    fn relieve(&mut self, goals: &Goals<'_>) {
        let reached = goals.is_met || self.climb(goals.need, false, None);
        if reached {
            self.undo_unneeded(&[goals.need]);
        }
        let firm_steps = self.steps.len();
        let mut enough = reached;
        let mut all = vec![goals.need];
        let stages = self.stages_for_stretch();
        if reached && !stages.is_empty() {
            enough &= self.climb(goals.stretch, false, Some(&stages));
            all.push(goals.stretch);
        }
        if let Some(low_mark) = goals.low_mark {
            enough &= self.climb(low_mark, true, None);
            all.push(low_mark);
        }
        if enough {
            self.undo_unneeded(&all);
        } else if reached {
            self.undo_until(goals.need, firm_steps);
        }
    }

    /// Goes down the stages until `goal` is reached, with `unknown_only` among the sequences of unknown
    /// length; only through the (class, stage)s of `within`, where given. Returns whether it was reached.
    fn climb(
        &mut self,
        goal: Goal<'_>,
        unknown_only: bool,
        within: Option<&HashSet<(usize, usize)>>,
    ) -> bool {
        for class in 0..self.classes.len() {
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
                        self.encode_zone(goal, unknown_only, at, zone, format);
                    }
                    Stage::Drop => self.drop_for_demand(goal, class, unknown_only),
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
        let mut stages = HashSet::new();
        let mut last = None;
        // Steps of one stage lie together.
        for stage in self.steps.iter().filter(in_use).map(|step| step.stage) {
            if last.replace(stage) != Some(stage) {
                stages.insert(stage);
            }
        }
        stages
    }

    /// Brings blocks of `zone` to `format`, as `stage`, until `goal` is reached.
    fn encode_zone(
        &mut self,
        goal: Goal<'_>,
        unknown_only: bool,
        stage: (usize, usize),
        zone: Zone,
        format: PageFormat,
    ) {
        let Some(rung) = Rung::to_format(format) else { return };
        let ladder = &self.pool.config().ladder;
        let may_give = |victim: &Victim| {
            !victim.dropped
                && (victim.unknown || !unknown_only)
                && ladder.permits(victim.contract, rung)
        };
        let mut order = Vec::new();
        for &index in &self.of_zone[stage.0][zone as usize] {
            let victim = &self.victims.all[index as usize];
            if may_give(victim) {
                let (harm, bytes) = self.victims.step(self.pool, index as usize, Some(format));
                if bytes > 0 {
                    // f32: sums of the same terms in another order must not decide. Bits of numbers that
                    // are not negative are in the order of the numbers.
                    let harm = ((harm / bytes as f64) as f32).to_bits();
                    order.push(Reverse((harm, victim.first, index)));
                }
            }
        }
        // Mostly a few of many are wanted.
        let mut order = BinaryHeap::from(order);
        while !self.forecast.reaches(goal) {
            let Some(Reverse((.., index))) = order.pop() else { return };
            let victim = index as usize;
            let previous = self.victims.all[victim].target;
            self.steps.push(Step { victim, previous, target: format, stage, undone: false });
            self.retarget(victim, Some(format));
        }
    }

    /// Plans another target for a victim.
    fn retarget(&mut self, index: usize, target: Option<PageFormat>) {
        let victim = &mut self.victims.all[index];
        let before = std::mem::replace(&mut victim.target, target);
        let conversions = self.victims.conversions.of_group(victim.group);
        for (format, &count) in victim.pages.iter().filter(|(_, count)| **count > 0) {
            let from = conversions.becomes(format, before);
            let to = conversions.becomes(format, target);
            if from != to {
                self.forecast.shift(victim.group, from, to, usize::from(count));
            }
        }
    }

    /// Drops from each sequence what would exceed its trained context.
    fn drop_over_context(&mut self) {
        for (index, demand) in self.demands.iter().enumerate() {
            let over = blocks_over_context(demand);
            if over > 0 {
                let order = drop_order(demand.sequence, self.policy, self.state);
                let count = blocks_prefix(&order, over.max(EVICT_BATCH_BLOCKS));
                for target in &order[..count] {
                    self.drop_target(index, *target, Reason::Context);
                }
            }
        }
    }

    /// Drops until `goal` is reached, at least [`EVICT_BATCH_BLOCKS`] once it begins.
    fn drop_for_demand(&mut self, goal: Goal<'_>, class: usize, unknown_only: bool) {
        let mut orders = Vec::new();
        let mut batch = 1;
        for &giver in &self.classes[class] {
            let demand = &self.demands[giver];
            let contract = demand.sequence.config().contract;
            let permits = self.pool.config().ladder.permits(contract, Rung::Evict);
            if permits && (demand.is_unknown() || !unknown_only) {
                let mut order = drop_order(demand.sequence, self.policy, self.state);
                order.retain(|target| !self.dropped.contains(&(giver, *target)));
                batch = batch.max(blocks_prefix(&order, EVICT_BATCH_BLOCKS));
                orders.push((giver, order));
            }
        }
        let ranks = orders.iter().map(|(_, order)| order.len()).max().unwrap_or(0);
        let mut count = 0;
        // Each gives its first choice before any its second.
        for rank in 0..ranks {
            for (giver, order) in &orders {
                let Some(target) = order.get(rank) else { continue };
                if !(1..batch).contains(&count) && self.forecast.reaches(goal) {
                    return;
                }
                self.drop_target(*giver, *target, Reason::Demand);
                count += 1;
            }
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
        let mut gone: ByFormat<u16> = ByFormat::default();
        let shares = &self.victims.shares[index];
        let visit = &mut |group, format, pages| {
            self.forecast.free(group, format, usize::from(pages));
            self.after_drops.free(group, format, usize::from(pages));
            gone[format] += pages;
        };
        self.drops.push(drop_move(sequence, target, self.state, shares, reason, visit));
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
    }

    /// Takes back, the last first, what is not needed to reach all `goals`.
    fn undo_unneeded(&mut self, goals: &[Goal<'_>]) {
        for _ in 0..UNDO_PASSES {
            let mut undone = false;
            // Kinds of steps that were found to be needed, by all that decides it, since the last that was
            // not.
            let mut needed = Vec::with_capacity(NEEDED_KINDS);
            for index in (0..self.steps.len()).rev() {
                let step = self.steps[index];
                let victim = &self.victims.all[step.victim];
                if step.undone || victim.dropped || victim.target != Some(step.target) {
                    continue;
                }
                let kind = (victim.group, victim.pages, step.target, step.previous);
                if needed.contains(&kind) {
                    continue;
                }
                // One step up, or all the way: a page half way down may take a span of its own.
                let mut ways = [step.previous, None].into_iter();
                self.steps[index].undone = ways.any(|previous| {
                    self.retarget(step.victim, previous);
                    goals.iter().all(|&goal| self.forecast.reaches(goal))
                });
                if self.steps[index].undone {
                    undone = true;
                    needed.clear();
                } else {
                    self.retarget(step.victim, Some(step.target));
                    if needed.len() < NEEDED_KINDS {
                        needed.push(kind);
                    }
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
    fn finish(self) -> (ReliefPlan, Forecast<'a>) {
        let Planner { demands, victims, mut after_drops, steps, drops, .. } = self;
        let mut seen = vec![false; victims.all.len()];
        let order = steps.iter().map(|step| step.victim).filter(|&victim| {
            !victims.all[victim].dropped && !std::mem::replace(&mut seen[victim], true)
        });
        let reason = Reason::Demand;
        let moves = order_encodes(demands, &victims, order, &mut after_drops, reason, drops);
        let weights = victims.weights(demands);
        (ReliefPlan { moves, weights, ..ReliefPlan::default() }, after_drops)
    }
}
