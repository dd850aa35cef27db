//! Beam search over block tables: forks share their parent's blocks, beams that fall out give theirs back,
//! the last that shares a block writes in place.

use crate::beam::{BeamRules, BeamSearch, Hypothesis};
use crate::engine::Engine;
use crate::event::{Continuation, Event, FinishReason, Token};
use crate::request::{Branches, Request};
use crate::run::RunId;
use crate::sampler::NoToken;
use crate::session::EngineError;

/// The search that `request` asks for, of at most `limit` tokens.
pub(crate) fn search(request: &Request, limit: usize) -> Option<BeamSearch> {
    let Branches::Beams { width, length_penalty, early_stopping, .. } = request.branches else {
        return None;
    };
    let end_ids = request.end_ids.clone();
    let rules = BeamRules { width, length_penalty, early_stopping, max_tokens: limit, end_ids };
    Some(BeamSearch::new(rules))
}

impl Engine {
    /// Goes on with every search whose beams all have their logits.
    pub(crate) fn advance_beams(&mut self) {
        let has_logits = |id: &RunId| self.runs[id].beam_logits.is_some();
        let searches = self.requests.iter().filter(|(_, live)| live.beams.is_some());
        let ready = searches.filter(|(_, live)| live.runs.iter().all(has_logits));
        let ready: Vec<u64> = ready.map(|(key, _)| *key).collect();
        ready.into_iter().for_each(|key| self.advance_search(key));
    }

    fn advance_search(&mut self, key: u64) {
        let Some(live) = self.requests.get_mut(&key) else { return };
        let parents = live.runs.clone();
        let runs = &mut self.runs;
        let mut take = |id: &RunId| {
            let run = runs.get_mut(id)?;
            let mut row = run.beam_logits.take()?;
            // Bias, penalties, the bar on end tokens.
            run.sampler.prepare(&mut row);
            Some(row)
        };
        let rows: Vec<Vec<f32>> = parents.iter().filter_map(&mut take).collect();
        let rows: Vec<&[f32]> = rows.iter().map(Vec::as_slice).collect();
        let Some(search) = &mut live.beams else { return };
        live.branched = true;
        let descents = match search.step(&rows) {
            Ok(descents) => descents,
            Err(NoToken::NotFinite | NoToken::Barred) => {
                let tokens = self.runs.get(&parents[0]).map_or(0, |run| run.tokens.len());
                return self.fail(key, EngineError::NotFinite { tokens });
            }
        };
        let mut next = Vec::with_capacity(descents.len());
        for (branch, descent) in descents.into_iter().enumerate() {
            let parent = parents[descent.parent];
            let id = match descent.takes_over {
                true => Some(parent),
                false => {
                    let sampler = self.runs.get(&parent).map(|run| run.sampler.clone());
                    sampler.and_then(|sampler| self.fork(parent, branch as u32, sampler))
                }
            };
            let Some(id) = id else { continue };
            if let Some(run) = self.runs.get_mut(&id) {
                run.branch = branch as u32;
                run.tokens.push(descent.token);
                run.sampler.accept(descent.token);
            }
            next.push(id);
        }
        let left_out = parents.into_iter().filter(|id| !next.contains(id));
        let left_out: Vec<RunId> = left_out.collect();
        if let Some(live) = self.requests.get_mut(&key) {
            live.runs.clone_from(&next);
            live.runs.extend(&left_out);
        }
        // With the last of them the request ends.
        left_out.into_iter().for_each(|id| self.end_run(id, FinishReason::Length));
    }

    /// The continuations of a search that has ended, or was ended for `reason`; their tokens are told.
    pub(crate) fn best_beams(
        &mut self,
        key: u64,
        search: &BeamSearch,
        count: usize,
        reason: FinishReason,
    ) -> Vec<Continuation> {
        let continuation = |found: Hypothesis| Continuation {
            token_ids: found.tokens,
            finish_reason: if found.ended { FinishReason::Stop } else { reason },
            cumulative_logprob: Some(found.cumulative_logprob),
            logprobs: Vec::new(),
        };
        let best: Vec<Continuation> = search.best(count).into_iter().map(continuation).collect();
        for (branch, continuation) in best.iter().enumerate() {
            self.counters.generated_tokens += continuation.token_ids.len() as u64;
            for &id in &continuation.token_ids {
                let token = Token { branch: branch as u32, id, logprobs: None, is_last: false };
                self.tell(key, Event::Token(token));
            }
        }
        best
    }
}
