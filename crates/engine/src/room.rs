//! Making room for the next step: idle prefixes go, blocks shrink or are dropped, somebody stands still.
//!
//! One pass, each round of which either finds room or takes something out of the step or the pool, so it
//! ends; nobody is touched whose leaving would give nothing.

use reef_kv::relief::plan_quota;
use reef_kv::{
    Demand, EncodeJob, ReliefPlan, Sequence, Shortage, apply_relief, plan_relief,
    plan_token_budget, relief_needed_bytes,
};

use crate::engine::Engine;
use crate::event::{PauseKind, PauseReason};
use crate::run::RunId;
use crate::schedule::Planned;
use crate::session::{EngineError, HORIZON_TOKENS, STRETCH_TOKENS};

/// Sequences up to which each looks the whole horizon ahead; more share that look.
const LONE_RUNS: usize = 4;

/// How far ahead room is made.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ahead {
    /// For the horizon, and once relief has begun for the stretch.
    Horizon,
    /// For the next step alone.
    Step,
    /// For the next step of those in it and so many tokens after it.
    Tokens(usize),
}

impl Engine {
    /// Makes room for `plan`, taking out of it what finds none.
    pub(crate) fn make_room(&mut self, plan: &mut Vec<Planned>) -> Result<(), EngineError> {
        self.keep_token_budgets(plan)?;
        self.keep_quotas(plan)?;
        while !plan.is_empty() {
            let Some(shortage) = self.relieve(plan)? else { break };
            self.give_way(plan, shortage);
        }
        // Who sat out and is in the step again goes on.
        for planned in plan.iter() {
            self.end_wait(planned.run);
        }
        Ok(())
    }

    /// Evicts idle prefixes, then relieves: for the horizon where it can, else for the step. `Some`: even
    /// that does not fit, and nothing was re-encoded or dropped.
    fn relieve(&mut self, plan: &[Planned]) -> Result<Option<Shortage>, EngineError> {
        self.evict_idle(plan);
        let mut relief = self.plan(plan, Ahead::Horizon);
        if relief.shortage.is_some() {
            // The horizon is a wish; this step is a need.
            relief = self.plan(plan, Ahead::Step);
        }
        if relief.shortage.is_none() {
            self.carry_out(&relief)?;
        }
        Ok(relief.shortage)
    }

    fn evict_idle(&mut self, plan: &[Planned]) {
        let demands = demands(&self.runs, &self.running, plan, Ahead::Horizon);
        let Some(cache) = &mut self.prefix else { return };
        let pool = &self.pool;
        if relief_needed_bytes(pool, &demands) > 0 {
            let bytes = cache.evict(&mut || relief_needed_bytes(pool, &demands) == 0);
            self.counters.evicted_prefix_bytes += bytes as u64;
            self.recent.note_evicted(self.now_us, self.step, bytes);
        }
    }

    fn plan(&self, plan: &[Planned], ahead: Ahead) -> ReliefPlan {
        let demands = demands(&self.runs, &self.running, plan, ahead);
        plan_relief(&self.pool, &demands, &*self.config.rules.policy)
    }

    /// Carries a plan out, between steps.
    pub(crate) fn carry_out(&mut self, plan: &ReliefPlan) -> Result<(), EngineError> {
        if plan.is_empty() {
            return Ok(());
        }
        let executor = &mut self.executor;
        let mut encode = |jobs: &mut [EncodeJob<'_>]| executor.encode(jobs);
        let mut sequences: Vec<&mut Sequence> =
            self.runs.values_mut().map(|run| &mut run.sequence).collect();
        let outcome = apply_relief(&self.pool, &mut sequences, plan, self.step, &mut encode)?;
        self.counters.relieved(&outcome);
        Ok(())
    }

    /// Limits of kept tokens, for measuring policies.
    fn keep_token_budgets(&mut self, plan: &[Planned]) -> Result<(), EngineError> {
        let Some(budget) = self.config.rules.token_budget else { return Ok(()) };
        for planned in plan {
            let sequence = &self.runs[&planned.run].sequence;
            let policy = &*self.config.rules.policy;
            let relief = plan_token_budget(sequence, policy, budget, planned.rows());
            self.carry_out(&relief)?;
        }
        Ok(())
    }

    /// Holds each tenant to its quota and the batch class to its share: their own blocks give way first,
    /// then the latest of them stand still.
    fn keep_quotas(&mut self, plan: &mut Vec<Planned>) -> Result<(), EngineError> {
        if self.heals() {
            return Ok(());
        }
        for tenant in 0..self.config.tenants.len() {
            if let Some(quota) = self.config.tenants[tenant].quota_bytes {
                self.keep_quota(plan, quota, &|of| of.0 == tenant)?;
            }
        }
        if self.config.scheduling.batch_share < 1.0 {
            self.keep_quota(plan, self.batch_bytes(), &|of| of.1 < 0)?;
        }
        Ok(())
    }

    fn keep_quota(
        &mut self,
        plan: &mut Vec<Planned>,
        quota_bytes: usize,
        belongs: &dyn Fn((usize, i32)) -> bool,
    ) -> Result<(), EngineError> {
        loop {
            let members: Vec<RunId> = self.running.clone();
            let members: Vec<RunId> =
                members.into_iter().filter(|id| belongs(self.tenant_and_priority(*id))).collect();
            let planned = |id: &RunId| plan.iter().any(|planned| planned.run == *id);
            if !members.iter().any(planned) {
                return Ok(());
            }
            let policy = &*self.config.rules.policy;
            let relief_for = |ahead| {
                let demands = demands(&self.runs, &members, plan, ahead);
                plan_quota(&self.pool, &demands, quota_bytes, policy)
            };
            let mut relief = relief_for(Ahead::Horizon);
            if relief.shortage.is_some() {
                relief = relief_for(Ahead::Step);
            }
            if relief.shortage.is_none() {
                return self.carry_out(&relief);
            }
            // The latest stands still; where it already did, it leaves the pool.
            let Some(last) = self.last_of(&members) else { return Ok(()) };
            let unit = self.unit(last);
            if members.iter().all(|id| unit.contains(id)) {
                // Alone it may go beyond: it was let in because it fits the pool.
                return Ok(());
            }
            if planned(&last) {
                self.sit_out(plan, last, PauseReason::Quota);
            } else {
                self.preempt(last, PauseReason::Quota, None);
            }
        }
    }

    /// Takes something out of the step or the pool: the last prefill, or the run that ranks last.
    fn give_way(&mut self, plan: &mut Vec<Planned>, shortage: Shortage) {
        let last = self.last_of(&self.running);
        let prefill = plan.iter().rposition(|planned| planned.tokens > 1);
        if let Some(at) = prefill {
            let run = plan[at].run;
            let lower = last.is_some_and(|last| self.priority(last) < self.priority(run));
            if !lower && self.shrink(plan, at) {
                return;
            }
        }
        if plan.iter().any(|planned| !planned.drafts.is_empty()) {
            plan.iter_mut().for_each(|planned| planned.drafts.clear());
            return;
        }
        let Some(last) = last.filter(|_| self.running.len() > self.unit_size()) else {
            self.stand_alone(plan, shortage);
            return;
        };
        let kind = self.cheapest_pause(plan, last);
        if kind == PauseKind::Wait {
            self.sit_out(plan, last, PauseReason::Demand);
            return;
        }
        self.preempt(last, PauseReason::Demand, Some(kind));
        self.drop_absent(plan);
        // What is being stored gives its bytes back later: until then the last of the step sit out.
        if kind == PauseKind::Swap && self.plan(plan, Ahead::Step).shortage.is_some() {
            self.sit_out_until_it_fits(plan);
        }
    }

    /// The runs of the one request, where only one is running.
    fn unit_size(&self) -> usize {
        self.running.first().map_or(1, |id| self.unit(*id).len())
    }

    /// Makes a prefill chunk end with the block that is open, or at the next one. `false`: it does already,
    /// or there is nothing else in the step and it is one block.
    fn shrink(&mut self, plan: &mut Vec<Planned>, at: usize) -> bool {
        let block_size = self.config.block_size;
        let run = &self.runs[&plan[at].run];
        let to_end = block_size - run.computed() % block_size;
        if plan[at].tokens > to_end {
            plan[at].tokens = to_end;
            return true;
        }
        if plan.len() > 1 && self.running.len() > self.unit_size() {
            let id = plan[at].run;
            self.sit_out(plan, id, PauseReason::Demand);
            return true;
        }
        let one = plan[at].tokens > 1;
        plan[at].tokens = 1;
        one
    }

    /// Nobody else runs and it does not fit: what is being stored, or loaded, still holds pages. Without
    /// such it cannot be, since the request was let in because alone it fits.
    fn stand_alone(&mut self, plan: &mut Vec<Planned>, short: Shortage) {
        let pending = self.runs.values().any(|run| !run.is_out() && !run.is_running());
        if pending {
            plan.clear();
            return;
        }
        self.counters.shortages_alone += 1;
        if let Some(planned) = plan.pop() {
            self.fail(planned.request, short.into());
        }
        plan.clear();
    }

    fn sit_out_until_it_fits(&mut self, plan: &mut Vec<Planned>) {
        while self.plan(plan, Ahead::Step).shortage.is_some() {
            let ids: Vec<RunId> = plan.iter().map(|planned| planned.run).collect();
            let Some(last) = self.last_of(&ids) else { return };
            self.sit_out(plan, last, PauseReason::Demand);
        }
    }

    /// Whether the step fits, and those in it go on for `tokens` more, without `last`.
    pub(crate) fn fits_without(&self, plan: &[Planned], last: RunId, tokens: usize) -> bool {
        let unit = self.unit(last);
        let rest: Vec<Planned> =
            plan.iter().filter(|planned| !unit.contains(&planned.run)).cloned().collect();
        !rest.is_empty() && self.plan(&rest, Ahead::Tokens(tokens)).shortage.is_none()
    }

    /// Takes out of `plan` whoever has left the pool.
    fn drop_absent(&self, plan: &mut Vec<Planned>) {
        plan.retain(|planned| self.runs.get(&planned.run).is_some_and(|run| run.is_running()));
    }
}

/// What the running ones will need: those in the step their rows and what is `ahead`, others nothing; all
/// may give way.
fn demands<'a>(
    runs: &'a std::collections::BTreeMap<RunId, crate::run::Run>,
    running: &[RunId],
    plan: &[Planned],
    ahead: Ahead,
) -> Vec<Demand<'a>> {
    // Many sequences side by side need blocks at different times: a part of them is a batch already.
    let horizon = (LONE_RUNS * HORIZON_TOKENS / running.len().max(1)).clamp(8, HORIZON_TOKENS);
    let stretch = horizon * (STRETCH_TOKENS / HORIZON_TOKENS);
    let demand = |id: &RunId| {
        let sequence = &runs[id].sequence;
        let Some(planned) = plan.iter().find(|planned| planned.run == *id) else {
            return Demand { sequence, tokens: 0, step_tokens: 1, stretch_tokens: 0 };
        };
        let rows = planned.rows();
        let (tokens, stretch_tokens) = match ahead {
            Ahead::Horizon => (sequence.remaining(rows.max(horizon)), stretch),
            Ahead::Step => (rows, rows),
            Ahead::Tokens(more) => (rows + more, rows + more),
        };
        Demand { sequence, tokens, step_tokens: rows, stretch_tokens }
    };
    running.iter().map(demand).collect()
}
