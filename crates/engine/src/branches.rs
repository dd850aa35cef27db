//! Several continuations of one prompt: branches share its blocks and part where they differ.

use crate::engine::Engine;
use crate::executor::Logits;
use crate::run::{Run, RunId, State};
use crate::sampler::Sampler;
use crate::session::EngineError;
use crate::settle::choose;

impl Engine {
    /// Makes the other branches of a request whose prompt has just been computed by `first`, each with
    /// its own random numbers: all share its blocks, the open one too, until one of them writes.
    ///
    /// `row`: index in `logits` of the last prompt token.
    pub(crate) fn branch_out(
        &mut self,
        first: RunId,
        logits: &Logits,
        row: usize,
    ) -> Result<(), EngineError> {
        let Some(request) = self.runs.get(&first).map(|run| run.request) else { return Ok(()) };
        let width = self.requests[&request].request.branches.width();
        if let Some(live) = self.requests.get_mut(&request) {
            live.branched = true;
        }
        for branch in 1..width as u32 {
            let sampler = self.requests[&request].sampler(branch);
            let Some(id) = self.fork(first, branch, sampler) else { return Ok(()) };
            let Some(run) = self.runs.get_mut(&id) else { return Ok(()) };
            let live = &self.requests[&request];
            let chosen = choose(run, live, logits, row, &[])?;
            self.push(id, &chosen.tokens);
            self.tell_tokens(id, chosen.tokens, chosen.finish);
        }
        Ok(())
    }

    /// A branch that goes on from where `parent` is.
    pub(crate) fn fork(&mut self, parent: RunId, branch: u32, sampler: Sampler) -> Option<RunId> {
        let id = self.next_run;
        self.next_run += 1;
        let parent = self.runs.get(&parent)?;
        let run = Run {
            id,
            request: parent.request,
            branch,
            sequence: parent.sequence.fork(id),
            tokens: parent.tokens[..parent.computed()].to_vec(),
            prompt_tokens: parent.prompt_tokens,
            sampler,
            state: State::Waiting,
            slot: None,
            published: parent.published,
            logprobs: Vec::new(),
            cumulative_logprob: 0.0,
            beam_logits: None,
            admitted: 0,
            preemptions: parent.preemptions,
            paused_since_us: None,
            most_computed: parent.most_computed,
            entries_told: parent.sequence.ledger().entries().len(),
            entries_inherited: parent.sequence.ledger().entries().len(),
        };
        let request = run.request;
        self.runs.insert(id, run);
        self.requests.get_mut(&request)?.runs.push(id);
        self.take_slot(id);
        Some(id)
    }
}
