//! The end of a step: completions are checked, tokens accepted and sampled, blocks sealed and published.

use reef_kv::page::PageFormat;
use reef_kv::plan_format_at_seal;
use reef_kv::policy::Observation;
use reef_kv::relief::held_bytes_together;

use crate::engine::{Engine, Flight, FlightEntry};
use crate::event::{Event, FinishReason, Token, TokenLogprobs};
use crate::executor::{Completion, Logits};
use crate::observe::observation;
use crate::run::{Live, Run, RunId};
use crate::sampler::{NoToken, token_logprobs};
use crate::session::EngineError;
use crate::speculate::{RunKey, Verdict, verify};

impl Flight {
    /// Takes a completion in. `false`: it belongs to another step, to nobody, or came twice.
    fn take(&mut self, completion: Completion) -> bool {
        let Completion { step, key, logits } = completion;
        #[cfg(feature = "mutants")]
        let (step, key) = match crate::mutant::is_active(crate::mutant::Mutant::TakeAnyCompletion) {
            true => {
                let same_slot = self.entries.iter().find(|entry| entry.key.slot == key.slot);
                (self.step, same_slot.map_or(key, |entry| entry.key))
            }
            false => (step, key),
        };
        let entry = self.entries.iter_mut().find(|entry| entry.key == key);
        match entry {
            Some(entry) if step == self.step && entry.logits.is_none() => {
                entry.logits = Some(logits);
                true
            }
            _ => false,
        }
    }

    fn is_complete(&self) -> bool {
        self.entries.iter().all(|entry| entry.logits.is_some())
    }
}

impl FlightEntry {
    /// The row of logits of the last known token.
    fn last_row(&self) -> usize {
        self.planned.tokens - 1 - self.logits_from
    }
}

/// What sampling a run's rows has led to.
#[derive(Default)]
pub(crate) struct Chosen {
    /// Tokens of the output.
    pub tokens: Vec<(u32, Option<TokenLogprobs>)>,
    /// Rows of drafts that hold tokens of the output.
    pub kept_rows: usize,
    pub verdict: Verdict,
    pub finish: Option<FinishReason>,
}

/// Samples from the rows from `first_row` on, of the last known token and of the drafts behind it.
pub(crate) fn choose(
    run: &mut Run,
    live: &Live,
    logits: &Logits,
    first_row: usize,
    drafts: &[u32],
) -> Result<Chosen, EngineError> {
    let mut chosen = Chosen::default();
    let generated = run.generated();
    if generated >= live.limit {
        chosen.finish = Some(FinishReason::Length);
        return Ok(chosen);
    }
    let wanted = live.logprobs_wanted();
    let rows = |index: usize| logits.row(first_row + index);
    let verdict = verify(&mut run.sampler, drafts, rows, wanted, &mut |sampled| {
        let id = sampled.token;
        if live.request.end_ids.contains(&id) {
            chosen.finish = Some(FinishReason::Stop);
            return false;
        }
        let logprobs = |logprob| TokenLogprobs { id, logprob, top: sampled.top };
        chosen.tokens.push((id, sampled.logprob.map(logprobs)));
        if generated + chosen.tokens.len() == live.limit {
            chosen.finish = Some(FinishReason::Length);
        }
        chosen.finish.is_none()
    });
    match verdict.no_token {
        Some(NoToken::NotFinite) => {
            let tokens = run.tokens.len() + chosen.tokens.len();
            return Err(EngineError::NotFinite { tokens });
        }
        Some(NoToken::Barred) => chosen.finish = Some(FinishReason::Stop),
        None if run.sampler.is_complete() => {
            chosen.finish.get_or_insert(FinishReason::Stop);
        }
        None => {}
    }
    if chosen.finish == Some(FinishReason::Stop)
        && let Some(reason) = run.sampler.fault()
    {
        return Err(EngineError::Constraint { reason });
    }
    // Of the tokens of the output all but the last stood in rows.
    chosen.kept_rows = verdict.accepted.min(chosen.tokens.len().saturating_sub(1));
    chosen.verdict = verdict;
    Ok(chosen)
}

impl Engine {
    /// Takes what the executor has done. `false`: a step is in flight.
    ///
    /// A step whose executor has nothing left to do and that still lacks a completion has lost it: what
    /// was not accepted is computed again in the next step.
    pub(crate) fn take_completions(&mut self) -> Result<bool, EngineError> {
        let Some(flight) = &mut self.flight else { return Ok(true) };
        let polled = self.executor.poll()?;
        for completion in polled.completions {
            if !flight.take(completion) {
                self.counters.stale_completions += 1;
            }
        }
        let complete = flight.is_complete();
        if !complete && !polled.idle {
            return Ok(false);
        }
        let Some(Flight { step, fence, entries, rows }) = self.flight.take() else {
            return Ok(true);
        };
        fence.pass();
        let elapsed_us = polled.elapsed_us.filter(|(of, _)| complete && *of == step);
        let elapsed_us = elapsed_us.map(|(_, elapsed_us)| elapsed_us);
        self.steps.record(rows.prefill + rows.decode, elapsed_us);
        if let Some(elapsed_us) = elapsed_us {
            self.cost.learn_step(rows, elapsed_us);
        }
        let of_step = (step, elapsed_us);
        let mut last = None;
        for (place, mut entry) in entries.into_iter().enumerate() {
            match entry.logits.take() {
                None => self.counters.lost_completions += 1,
                Some(logits) => {
                    self.settle(place, of_step, &entry, &logits)?;
                    last = Some(logits);
                }
            }
        }
        self.advance_beams();
        if let Some(logits) = last {
            self.executor.recycle(logits);
        }
        Ok(true)
    }

    /// Accepts what was computed of one run, and samples.
    fn settle(
        &mut self,
        place: usize,
        of_step: (u64, Option<u64>),
        entry: &FlightEntry,
        logits: &Logits,
    ) -> Result<(), EngineError> {
        let id = entry.planned.run;
        // Ended, or preempted and let in again: another generation.
        let Some(run) = self.runs.get_mut(&id).filter(|run| run.slot == Some(entry.key)) else {
            return Ok(());
        };
        let policy = &*self.config.rules.policy;
        if let Observation::AttentionMass { decay } = observation(policy, &run.sequence) {
            self.executor.observe_masses(place, &mut run.sequence, decay);
        }
        let before = run.computed();
        let reaches_end = before + entry.planned.tokens == run.tokens.len();
        self.tell_prompt_logprobs(id, before, entry, logits);
        let is_beam = self.requests[&entry.planned.request].beams.is_some();
        let chosen = match reaches_end && !is_beam {
            true => self.choose(id, entry, logits),
            false => Ok(Chosen::default()),
        };
        let chosen = match chosen {
            Ok(chosen) => chosen,
            Err(error) => {
                self.fail(entry.planned.request, error);
                return Ok(());
            }
        };
        self.push(id, &chosen.tokens);
        self.accept(id, before, entry.planned.tokens + chosen.kept_rows)?;
        self.tell_step(id, of_step);
        if reaches_end && is_beam {
            if let Some(run) = self.runs.get_mut(&id) {
                run.beam_logits = Some(logits.row(entry.last_row()).to_vec());
            }
        } else if reaches_end {
            self.note_drafts(id, entry, &chosen);
            if self.requests[&entry.planned.request].missing_branches() > 0 {
                self.branch_out(id, logits, entry.last_row())?;
            }
            self.tell_tokens(id, chosen.tokens, chosen.finish);
        }
        Ok(())
    }

    fn choose(
        &mut self,
        id: RunId,
        entry: &FlightEntry,
        logits: &Logits,
    ) -> Result<Chosen, EngineError> {
        let Some(run) = self.runs.get_mut(&id) else { return Ok(Chosen::default()) };
        let live = &self.requests[&run.request];
        choose(run, live, logits, entry.last_row(), &entry.planned.drafts)
    }

    /// Accepts `tokens` computed tokens of a run: blocks are sealed, scored, brought to their format and
    /// published; the step is told.
    fn accept(&mut self, id: RunId, before: usize, tokens: usize) -> Result<(), EngineError> {
        let Some(run) = self.runs.get_mut(&id) else { return Ok(()) };
        run.sequence.commit(tokens);
        run.sequence.trim();
        run.most_computed = run.most_computed.max(run.computed());
        let policy = &*self.config.rules.policy;
        if observation(policy, &run.sequence) == Observation::Keys {
            self.executor.observe_keys(&mut run.sequence, before);
        }
        if self.config.rules.format_at_seal != PageFormat::F16 {
            let rules = &self.config.rules;
            let (format, sinks, tail) =
                (rules.format_at_seal, rules.sink_tokens, rules.tail_tokens);
            let sealed = plan_format_at_seal(&run.sequence, format, sinks, tail);
            self.carry_out(&sealed)?;
        }
        self.note_peak(id);
        self.publish(id);
        Ok(())
    }

    /// Notes what the branches of a run's request hold together.
    fn note_peak(&mut self, id: RunId) {
        let Some(live) = self.requests.get_mut(&self.runs[&id].request) else { return };
        if live.request.branches.width() > 1 {
            let sequences: Vec<_> = live.runs.iter().map(|id| &self.runs[id].sequence).collect();
            let held_bytes = held_bytes_together(&self.pool, &sequences);
            live.peak_bytes = live.peak_bytes.max(held_bytes);
        }
    }

    /// Names newly sealed blocks to the prefix cache.
    fn publish(&mut self, id: RunId) {
        let Some(run) = self.runs.get_mut(&id) else { return };
        let live = &self.requests[&run.request];
        if let (Some(cache), Some(root)) = (&mut self.prefix, &live.root) {
            let tokens = &run.tokens[..run.sequence.next_position()];
            cache.publish(root, &mut run.sequence, tokens, &mut run.published);
        }
    }

    fn tell_step(&mut self, id: RunId, (step, elapsed_us): (u64, Option<u64>)) {
        let Some(run) = self.runs.get_mut(&id) else { return };
        let (request, tokens) = (run.request, run.computed());
        let total = run.prompt_tokens;
        let entries = run.sequence.ledger().entries();
        let new: Vec<_> = entries[run.entries_told.min(entries.len())..].to_vec();
        run.entries_told = entries.len();
        let Some(live) = self.requests.get_mut(&request) else { return };
        let done = tokens.min(total);
        if done > live.prompt_told {
            live.prompt_told = done;
            self.tell(request, Event::Prefilled { tokens: done, total });
        }
        new.into_iter().for_each(|entry| self.tell(request, Event::Relief(entry)));
        let used = self.pool.accounts().used;
        self.tell(request, Event::Step { step, tokens, used, elapsed_us });
    }

    fn note_drafts(&mut self, id: RunId, entry: &FlightEntry, chosen: &Chosen) {
        let tried = entry.planned.drafts.len();
        if tried == 0 {
            return;
        }
        let accepted = chosen.verdict.accepted;
        self.counters.drafts.0 += tried as u64;
        self.counters.drafts.1 += accepted as u64;
        if let Some(live) = self.requests.get_mut(&entry.planned.request) {
            live.drafts.0 += tried;
            live.drafts.1 += accepted;
        }
        if let Some(speculator) = &mut self.speculator {
            speculator.settle(RunKey(id), tried, &chosen.verdict, chosen.tokens.len());
        }
    }

    /// Adds sampled tokens to a run.
    pub(crate) fn push(&mut self, id: RunId, tokens: &[(u32, Option<TokenLogprobs>)]) {
        let Some(run) = self.runs.get_mut(&id) else { return };
        for (token, logprobs) in tokens {
            run.tokens.push(*token);
            if let Some(logprobs) = logprobs {
                run.cumulative_logprob += f64::from(logprobs.logprob);
                run.logprobs.push(logprobs.clone());
            }
        }
    }

    /// Tells tokens that were added to a run, and ends it where they are its last.
    pub(crate) fn tell_tokens(
        &mut self,
        id: RunId,
        tokens: Vec<(u32, Option<TokenLogprobs>)>,
        finish: Option<FinishReason>,
    ) {
        let Some(run) = self.runs.get(&id) else { return };
        let (request, branch) = (run.request, run.branch);
        self.counters.generated_tokens += tokens.len() as u64;
        let count = tokens.len();
        for (place, (id, logprobs)) in tokens.into_iter().enumerate() {
            let is_last = finish.is_some() && place + 1 == count;
            self.tell(request, Event::Token(Token { branch, id, logprobs, is_last }));
        }
        if let Some(reason) = finish {
            self.end_run(id, reason);
        }
    }

    fn tell_prompt_logprobs(
        &mut self,
        id: RunId,
        before: usize,
        entry: &FlightEntry,
        logits: &Logits,
    ) {
        let Some(run) = self.runs.get(&id) else { return };
        let live = &self.requests[&run.request];
        let Some(top) = live.request.prompt_logprobs else { return };
        if entry.logits_from != 0 || before >= run.prompt_tokens || live.prompt_told > before {
            return;
        }
        let rows = (0..entry.planned.tokens).filter_map(|row| {
            let next = before + row + 1;
            let token = (next < run.prompt_tokens).then(|| run.tokens[next])?;
            let (logprob, top) = token_logprobs(logits.row(row), token, top);
            Some(TokenLogprobs { id: token, logprob, top })
        });
        let rows: Vec<TokenLogprobs> = rows.collect();
        let request = run.request;
        self.tell(request, Event::PromptLogprobs(rows));
    }
}
