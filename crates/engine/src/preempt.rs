//! Standing still: who, and how. Waiting in place, swapping to the spill store or computing again,
//! whichever is estimated to cost least.

use reef_kv::Sequence;

use crate::engine::Engine;
use crate::event::{Event, Pause, PauseKind, PauseReason};
use crate::run::{Record, Run, RunId, State};
use crate::schedule::Planned;

/// Times that a run is swapped or thrown away before others go in its place.
pub(crate) const MOST_PREEMPTIONS: u32 = 3;

impl Engine {
    /// The run of `among` that gives way first: of the lowest priority, not too often preempted, let in
    /// last. Beams count as the first of them.
    pub(crate) fn last_of(&self, among: &[RunId]) -> Option<RunId> {
        let rank = |id: &RunId| {
            let run = &self.runs[id];
            let protected = run.preemptions >= MOST_PREEMPTIONS;
            (-self.priority(*id), !protected, run.admitted)
        };
        among.iter().copied().max_by_key(rank)
    }

    /// The cheapest way to make `last` stand still, in estimated microseconds.
    pub(crate) fn cheapest_pause(&self, plan: &[Planned], last: RunId) -> PauseKind {
        let run = &self.runs[&last];
        let alone = self.unit(last).len() == 1;
        let bytes = run.sequence.held_bytes();
        let mut ways = vec![(self.cost.recompute_us(run.computed()), PauseKind::Recompute)];
        if alone && bytes > 0 && self.spill.as_ref().is_some_and(|spill| spill.can_store(bytes)) {
            ways.push((self.cost.swap_us(bytes), PauseKind::Swap));
        }
        if let Some(wait_us) = self.wait_us(plan, last) {
            ways.push((wait_us, PauseKind::Wait));
        }
        let least = ways.into_iter().min_by(|a, b| a.0.total_cmp(&b.0));
        least.map_or(PauseKind::Recompute, |(_, kind)| kind)
    }

    /// Microseconds until another run has ended and left its memory, where the others can go on until
    /// then without `last`.
    fn wait_us(&self, plan: &[Planned], last: RunId) -> Option<f64> {
        let others = plan.iter().filter(|planned| planned.run != last);
        let left = |planned: &Planned| {
            let run = &self.runs[&planned.run];
            let limit = self.requests[&run.request].limit;
            run.remaining() + limit.saturating_sub(run.generated())
        };
        let tokens = others.map(left).min()?;
        if !self.fits_without(plan, last, tokens) {
            return None;
        }
        let rows = self.rows_of(plan);
        Some(tokens as f64 * self.cost.step_us(rows))
    }

    /// Takes a run out of the step; it keeps its memory.
    pub(crate) fn sit_out(&mut self, plan: &mut Vec<Planned>, id: RunId, reason: PauseReason) {
        let unit = self.unit(id);
        plan.retain(|planned| !unit.contains(&planned.run));
        for id in unit {
            if self.runs[&id].paused_since_us.is_none() {
                let blocks = self.runs[&id].sequence.held_blocks();
                self.pause(id, PauseKind::Wait, reason, (blocks, 0, 0));
            }
        }
    }

    /// A run that sat out is in the step again.
    pub(crate) fn end_wait(&mut self, id: RunId) {
        let now_us = self.now_us;
        let Some(run) = self.runs.get_mut(&id) else { return };
        if let Some(since) = run.paused_since_us.take() {
            let (request, branch) = (run.request, run.branch);
            let paused_us = now_us.saturating_sub(since);
            self.tell(request, Event::Resumed { branch, recomputed_tokens: 0, paused_us });
        }
    }

    /// Makes a run (all beams of a search) leave the pool, in the cheapest way or that of `kind`.
    pub(crate) fn preempt(&mut self, id: RunId, reason: PauseReason, kind: Option<PauseKind>) {
        let kind = kind.unwrap_or_else(|| self.cheapest_pause(&[], id));
        for id in self.unit(id) {
            if !self.runs[&id].is_running() {
                continue;
            }
            if kind != PauseKind::Swap || !self.store(id, reason) {
                self.throw_away(id, reason);
            }
        }
    }

    /// Gives back everything that a run holds; it waits to be computed again.
    pub(crate) fn throw_away(&mut self, id: RunId, reason: PauseReason) {
        self.leave_slot(id);
        let Some(run) = self.runs.get_mut(&id) else { return };
        let given = (run.sequence.held_blocks(), run.sequence.held_bytes(), run.computed());
        run.preemptions += 1;
        reset(run);
        #[cfg(feature = "mutants")]
        if crate::mutant::is_active(crate::mutant::Mutant::FreshSampler) {
            run.sampler = self.requests[&run.request].sampler(run.branch);
        }
        self.waiting.push(id);
        self.queue_changed = true;
        self.pause(id, PauseKind::Recompute, reason, given);
    }

    /// Begins to swap a run out. `false`: the store has no room, and nothing has changed.
    fn store(&mut self, id: RunId, reason: PauseReason) -> bool {
        let (Some(run), Some(spill)) = (self.runs.get_mut(&id), &mut self.spill) else {
            return false;
        };
        if run.beam_logits.is_some() {
            return false;
        }
        run.sequence.trim();
        let (image, pages) = run.sequence.pin();
        let (blocks, bytes) = (run.sequence.held_blocks(), pages.bytes());
        self.next_record += 1;
        let number = self.next_record;
        if spill.store(number, pages).is_err() {
            return false;
        }
        run.preemptions += 1;
        run.state = State::Storing(Record { number, image });
        self.leave_slot(id);
        self.pause(id, PauseKind::Swap, reason, (blocks, bytes, 0));
        true
    }

    /// The record of a run is lost or of no use: it is computed again.
    pub(crate) fn throw_away_record(&mut self, id: RunId) {
        let Some(run) = self.runs.get_mut(&id) else { return };
        let lost_tokens = run.computed().max(run.most_computed);
        reset(run);
        if !self.waiting.contains(&id) {
            self.waiting.push(id);
        }
        self.queue_changed = true;
        let given = (0, 0, lost_tokens);
        self.pause(id, PauseKind::Recompute, PauseReason::SpillFailure, given);
    }

    /// Tells and notes that a run stands still. `given`: blocks, bytes and tokens given up.
    fn pause(
        &mut self,
        id: RunId,
        kind: PauseKind,
        reason: PauseReason,
        given: (usize, usize, usize),
    ) {
        let (step, now_us) = (self.step, self.now_us);
        self.counters.paused(kind, reason);
        let Some(run) = self.runs.get_mut(&id) else { return };
        run.paused_since_us.get_or_insert(now_us);
        let (blocks, bytes, lost_tokens) = given;
        let branch = run.branch;
        let pause = Pause { branch, step, kind, reason, blocks, bytes, lost_tokens };
        let request = run.request;
        if let Some(live) = self.requests.get_mut(&request) {
            live.pauses.push(pause);
        }
        self.tell(request, Event::Paused(pause));
    }

    /// A run no longer takes part in steps.
    pub(crate) fn leave_slot(&mut self, id: RunId) {
        self.running.retain(|&running| running != id);
        if let Some(key) = self.runs.get_mut(&id).and_then(|run| run.slot.take()) {
            #[cfg(feature = "mutants")]
            if crate::mutant::is_active(crate::mutant::Mutant::LeakSlot) {
                return;
            }
            self.slots.remove(&key.slot);
        }
    }
}

/// A run as it was before anything was computed; what it has generated stays.
fn reset(run: &mut Run) {
    let sequence: &mut Sequence = &mut run.sequence;
    run.most_computed = run.most_computed.max(sequence.next_position());
    sequence.clear();
    run.state = State::Waiting;
    run.beam_logits = None;
    run.published = 0;
}
