//! How requests come and go: at any state, at once, leaving nothing behind.

use std::sync::Arc;

use reef_kv::{Sequence, SequenceConfig};

use crate::admission::{Refusal, admit};
use crate::engine::Engine;
use crate::event::{Continuation, Event, FinishReason, Outcome, Usage};
use crate::request::{Branches, Request};
use crate::run::{Live, Run, RunId, State};
use crate::session::EngineError;
use crate::speculate::RunKey;
use crate::store::SpillDone;

/// Weight of a finished generation against the running mean of their lengths.
const LENGTH_RATE: f64 = 0.1;

impl Engine {
    /// Takes a request in under the caller's `key`, which is free again after [`Event::Finished`] or
    /// [`Event::Failed`]. It is never ended for want of memory: what its contract cannot hold even alone
    /// is refused here.
    ///
    /// # Errors
    /// A [`Refusal`] with numbers; nothing has changed.
    pub fn submit(&mut self, key: u64, request: Request) -> Result<(), Refusal> {
        if self.requests.contains_key(&key) {
            return Err(Refusal::DuplicateKey { key });
        }
        let limit = admit(&self.pool, &self.config, self.facts, &request)?;
        let new = |id: &&RunId| self.runs[*id].preemptions == 0;
        let waiting = self.waiting.iter().filter(new).count();
        let most = self.config.scheduling.max_waiting;
        if waiting >= most {
            return Err(Refusal::QueueFull { waiting, most });
        }
        let tenant = request.tenant;
        if !self.requests.values().any(|live| live.request.tenant == tenant) {
            let active = self.requests.values().map(|live| live.request.tenant);
            self.share.arrive(tenant, active);
        }
        let cached = self.prefix.is_some() && request.use_prefix_cache;
        let root = cached.then(|| self.roots[tenant]);
        let beams = crate::beams::search(&request, limit);
        self.next_arrival += 1;
        let branched = request.branches.width() == 1;
        let live = Live {
            request: Arc::new(request),
            arrival: self.next_arrival,
            limit,
            root,
            runs: Vec::new(),
            ended: Vec::new(),
            beams,
            branched,
            was_admitted: false,
            cached_tokens: 0,
            pauses: Vec::new(),
            recomputed_tokens: 0,
            drafts: (0, 0),
            prompt_told: 0,
            usage: None,
            peak_bytes: 0,
        };
        self.requests.insert(key, live);
        let first = self.first_run(key);
        self.waiting.push(first);
        self.queue_changed = true;
        Ok(())
    }

    fn first_run(&mut self, key: u64) -> RunId {
        let id = self.next_run;
        self.next_run += 1;
        let live = &self.requests[&key];
        let request = live.request.clone();
        let total = request.prompt.len().saturating_add(live.limit).saturating_sub(1);
        let config = SequenceConfig {
            request: id,
            contract: request.fidelity,
            priority: request.priority,
            trained_context: self.facts.trained_context,
            max_tokens: Some(total),
        };
        let mut sequence = Sequence::new(&self.pool, config);
        for span in &request.keep {
            // Checked with the request.
            let _ = sequence.keep(span.clone());
        }
        let run = Run {
            id,
            request: key,
            branch: 0,
            sequence,
            tokens: request.prompt.clone(),
            prompt_tokens: request.prompt.len(),
            sampler: live.sampler(0),
            state: State::Waiting,
            slot: None,
            published: 0,
            logprobs: Vec::new(),
            cumulative_logprob: 0.0,
            beam_logits: None,
            admitted: 0,
            preemptions: 0,
            paused_since_us: None,
            most_computed: 0,
            entries_told: 0,
            entries_inherited: 0,
        };
        self.runs.insert(id, run);
        if let Some(live) = self.requests.get_mut(&key) {
            live.runs.push(id);
        }
        id
    }

    /// Ends a request now, in whatever state it is: a stop string was found, the client has gone. Unknown
    /// keys are ignored. What it has generated so far is told with [`Event::Finished`].
    pub fn end(&mut self, key: u64, reason: FinishReason) {
        let Some(live) = self.requests.get(&key) else { return };
        for id in live.runs.clone() {
            self.end_run(id, reason);
        }
    }

    /// Ends one of several continuations, which a stop string has ended; the others go on. Ignored where
    /// there is none such: unknown, ended, not begun, or a beam, which is only told at the end.
    pub fn end_branch(&mut self, key: u64, branch: u32, reason: FinishReason) {
        let Some(live) = self.requests.get(&key) else { return };
        if !live.branched || live.beams.is_some() {
            return;
        }
        let run = live.runs.iter().find(|id| self.runs[*id].branch == branch).copied();
        if let Some(id) = run {
            self.end_run(id, reason);
        }
    }

    /// Ends the requests whose deadline has passed.
    pub(crate) fn end_overdue(&mut self) {
        let now_us = self.now_us;
        let overdue = |live: &Live| live.request.deadline_us.is_some_and(|at| at <= now_us);
        let keys: Vec<u64> =
            self.requests.iter().filter(|(_, live)| overdue(live)).map(|(key, _)| *key).collect();
        keys.into_iter().for_each(|key| self.end(key, FinishReason::Deadline));
    }

    /// Ends a branch; with the last one the request.
    pub(crate) fn end_run(&mut self, id: RunId, reason: FinishReason) {
        let Some(run) = self.remove_run(id) else { return };
        let key = run.request;
        let Some(live) = self.requests.get_mut(&key) else { return };
        let mut usage = run.sequence.usage();
        usage.relief.drain(..run.entries_inherited);
        // Of a beam that falls out only what was done to it counts: its tokens are the others' too.
        let falls_out =
            !live.runs.is_empty() && live.beams.as_ref().is_some_and(|of| of.live() > 0);
        match &mut live.usage {
            Some(sum) if falls_out => sum.relief.extend(usage.relief),
            _ => {
                self.ended.add(&usage);
                live.add_usage(usage);
            }
        }
        let wanted = live.request.logprobs.is_some() || live.request.branches.width() > 1;
        if live.beams.is_none() {
            let continuation = Continuation {
                token_ids: run.tokens[run.prompt_tokens..].to_vec(),
                finish_reason: reason,
                cumulative_logprob: wanted.then_some(run.cumulative_logprob),
                logprobs: run.logprobs,
            };
            live.ended.push((run.branch, continuation));
        }
        if reason == FinishReason::Stop && live.request.max_tokens.is_none() {
            let generated = (run.tokens.len() - run.prompt_tokens) as f64;
            self.expected_tokens += LENGTH_RATE * (generated - self.expected_tokens);
        }
        let (is_over, is_beam) = (live.runs.is_empty(), live.beams.is_some());
        if is_over {
            self.finish(key, reason);
        } else if !is_beam {
            self.tell(key, Event::Ended { branch: run.branch, reason });
        }
    }

    /// Takes a branch out of everything that knows it; its blocks go with the returned run (behind the
    /// fence where a step is in flight).
    pub(crate) fn remove_run(&mut self, id: RunId) -> Option<Run> {
        self.leave_slot(id);
        let run = self.runs.remove(&id)?;
        self.queue_changed = true;
        self.waiting.retain(|&waiting| waiting != id);
        if let (
            State::Storing(record) | State::Stored(record) | State::Loading(record),
            Some(spill),
        ) = (&run.state, &mut self.spill)
        {
            spill.discard(record.number);
        }
        if let Some(speculator) = &mut self.speculator {
            speculator.forget(RunKey(id));
        }
        if let Some(live) = self.requests.get_mut(&run.request) {
            live.runs.retain(|&of| of != id);
        }
        Some(run)
    }

    fn finish(&mut self, key: u64, reason: FinishReason) {
        let Some(mut live) = self.requests.remove(&key) else { return };
        let continuations = match live.beams.take() {
            Some(search) => {
                let count = live.request.branches.given();
                self.best_beams(key, &search, count, reason)
            }
            None => ranked(&mut live),
        };
        let mut kv = live.usage.take().unwrap_or_else(|| self.no_usage());
        if live.request.branches.width() > 1 {
            kv.peak_bytes = live.peak_bytes;
        }
        let usage = Usage {
            prompt_tokens: live.request.prompt.len(),
            completion_tokens: continuations.iter().map(|of| of.token_ids.len()).sum(),
            cached_tokens: live.cached_tokens,
            fidelity: live.request.fidelity,
            budget_bytes: self.pool.config().budget_bytes,
            max_tokens_limit: live.limit,
            kv,
            pauses: live.pauses,
            recomputed_tokens: live.recomputed_tokens,
            drafts: live.drafts,
        };
        self.counters.finished += 1;
        self.tell(key, Event::Finished(Box::new(Outcome { continuations, usage })));
    }

    /// Usage of a request of which no branch ever ended by itself.
    fn no_usage(&self) -> reef_kv::KvUsage {
        let config = SequenceConfig {
            request: RunId::MAX,
            contract: reef_kv::Fidelity::Exact,
            priority: 0,
            trained_context: 1,
            max_tokens: None,
        };
        Sequence::new(&self.pool, config).usage()
    }

    /// Ends a request for a reason of its own.
    pub(crate) fn fail(&mut self, key: u64, error: EngineError) {
        let Some(live) = self.requests.get(&key) else { return };
        for id in live.runs.clone() {
            self.remove_run(id);
        }
        self.requests.remove(&key);
        self.counters.failed += 1;
        self.tell(key, Event::Failed(Arc::new(error)));
    }

    /// Takes what the spill store has done. Returns whether there was anything.
    pub(crate) fn take_spilled(&mut self) -> bool {
        let Some(spill) = &mut self.spill else { return false };
        let done = spill.poll();
        let any = !done.is_empty();
        for done in done {
            self.take_spill_done(done);
        }
        any
    }

    fn take_spill_done(&mut self, done: SpillDone) {
        let record = match &done {
            SpillDone::Stored { record, .. }
            | SpillDone::Loaded { record, .. }
            | SpillDone::Failed { record, .. } => *record,
        };
        let Some(id) = self.run_of_record(record) else {
            self.counters.stale_completions += 1;
            return;
        };
        match done {
            SpillDone::Stored { bytes, elapsed_us, .. } => {
                self.cost.learn_spill(bytes, elapsed_us);
                self.counters.spilled_bytes += bytes as u64;
                self.take_stored(id);
            }
            SpillDone::Loaded { pages, bytes, elapsed_us, .. } => {
                self.cost.learn_spill(bytes, elapsed_us);
                self.counters.loaded_bytes += bytes as u64;
                self.take_loaded(id, pages);
            }
            SpillDone::Failed { .. } => {
                self.counters.spill_failures += 1;
                self.throw_away_record(id);
            }
        }
    }

    fn run_of_record(&self, number: u64) -> Option<RunId> {
        let is_it = |run: &&Run| match &run.state {
            State::Storing(record) | State::Stored(record) | State::Loading(record) => {
                record.number == number
            }
            State::Waiting | State::Running => false,
        };
        self.runs.values().find(is_it).map(|run| run.id)
    }

    fn take_stored(&mut self, id: RunId) {
        let Some(run) = self.runs.get_mut(&id) else { return };
        match std::mem::replace(&mut run.state, State::Waiting) {
            State::Storing(record) => {
                run.sequence.clear();
                run.published = 0;
                run.state = State::Stored(record);
                self.waiting.push(id);
                self.queue_changed = true;
            }
            other => run.state = other,
        }
    }

    fn take_loaded(&mut self, id: RunId, pages: reef_kv::transfer::EmptyPages) {
        let Some(run) = self.runs.get_mut(&id) else { return };
        match std::mem::replace(&mut run.state, State::Waiting) {
            State::Loading(record) => {
                run.sequence.adopt(record.image, pages);
                self.take_slot(id);
            }
            other => run.state = other,
        }
    }
}

/// The continuations asked for: where more were sampled, the likeliest by mean log-probability.
fn ranked(live: &mut Live) -> Vec<Continuation> {
    let mut ended = std::mem::take(&mut live.ended);
    if let Branches::Sample { n, best_of } = live.request.branches
        && best_of > n
    {
        let mean = |of: &Continuation| {
            of.cumulative_logprob.unwrap_or(0.0) / of.token_ids.len().max(1) as f64
        };
        ended.sort_by(|a, b| mean(&b.1).total_cmp(&mean(&a.1)).then(a.0.cmp(&b.0)));
        ended.truncate(n);
    } else {
        ended.sort_by_key(|(branch, _)| *branch);
    }
    ended.into_iter().map(|(_, continuation)| continuation).collect()
}
