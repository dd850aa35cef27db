//! Which tokens of whom the next step computes.
//!
//! Every run that decodes is in every step, but while somebody of higher priority is prefilled; what time is
//! left goes to prefill, by priority, then to the tenant that had least, then in order of admission.

use std::cmp::Reverse;

use crate::cost::{CostModel, StepRows};
use crate::engine::Engine;
use crate::run::{Run, RunId};
use crate::speculate::{Room, RunKey};

/// Prompt tokens of a chunk whose logits are all wanted: they are kept side by side.
const LOGITS_TOKENS: usize = 16;

/// One run's part of the next step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Planned {
    pub run: RunId,
    /// The request, for beams, which step together.
    pub request: u64,
    /// Known tokens to compute.
    pub tokens: usize,
    /// Guesses computed behind them.
    pub drafts: Vec<u32>,
}

impl Planned {
    /// Tokens computed.
    pub(crate) fn rows(&self) -> usize {
        self.tokens + self.drafts.len()
    }
}

/// What a step has left for prefill.
struct Budget {
    tokens: usize,
    us: f64,
}

impl Budget {
    /// Takes out of it what a chunk of at most `most` tokens behind `position` may have: at least one token
    /// for the first, or a step with many decodes would starve it.
    fn take(&mut self, cost: &CostModel, position: usize, most: usize, first: bool) -> usize {
        let in_time = cost.prefill_tokens(position, self.us).max(usize::from(first));
        let tokens = most.min(self.tokens).min(in_time);
        self.tokens -= tokens;
        let context = tokens * (position + tokens / 2);
        let chunk = StepRows { decode: 1, prefill: tokens, context };
        self.us -= cost.step_us(chunk) - cost.step_us(StepRows::decode(1, 0));
        tokens
    }
}

impl Engine {
    /// The next step as it should be; memory may change it.
    pub(crate) fn schedule(&mut self) -> Vec<Planned> {
        let (decoding, mut prefilling): (Vec<RunId>, Vec<RunId>) = self
            .running
            .iter()
            .filter(|id| self.runs[id].beam_logits.is_none())
            .partition(|id| self.runs[id].is_decoding());
        prefilling.sort_by(|a, b| {
            self.prefill_order(*a)
                .partial_cmp(&self.prefill_order(*b))
                .unwrap_or(std::cmp::Ordering::Equal)
        });
        // Somebody who waits for a first token does not wait for the rows of those below as well.
        let least = prefilling.first().map_or(i32::MIN, |id| self.priority(*id));
        let taken = decoding.iter().filter(|id| self.priority(**id) >= least);
        let mut plan: Vec<Planned> = taken.map(|&id| self.decode(id)).collect();
        self.draft(&mut plan);
        let mut left = self.prefill_budget(&plan, &prefilling, !decoding.is_empty());
        let decodes = plan.len();
        for id in prefilling {
            let run = &self.runs[&id];
            let most = run.remaining().min(self.most_chunk_tokens(run));
            let first = plan.len() == decodes;
            let tokens = left.take(&self.cost, run.computed(), most, first);
            if tokens == 0 {
                break;
            }
            plan.push(Planned { run: id, request: run.request, tokens, drafts: Vec::new() });
        }
        plan
    }

    fn decode(&self, id: RunId) -> Planned {
        Planned { run: id, request: self.runs[&id].request, tokens: 1, drafts: Vec::new() }
    }

    fn prefill_order(&self, id: RunId) -> (Reverse<i32>, f64, u64) {
        let run = &self.runs[&id];
        let request = &self.requests[&run.request].request;
        (Reverse(request.priority), self.share.time(request.tenant), run.admitted)
    }

    /// What the next step has left for prefill: those who decode in it are not to wait much longer for
    /// their tokens than without, and where some are left out (`others_decode`) it ends in time for them.
    fn prefill_budget(
        &self,
        plan: &[Planned],
        prefilling: &[RunId],
        others_decode: bool,
    ) -> Budget {
        let scheduling = &self.config.scheduling;
        let tokens = scheduling.chunk_tokens;
        if prefilling.is_empty() {
            return Budget { tokens, us: 0.0 };
        }
        if plan.is_empty() {
            let us = if others_decode { scheduling.step_limit_us as f64 } else { f64::INFINITY };
            return Budget { tokens, us };
        }
        let alone_us = self.cost.step_us(self.rows_of(plan));
        let limit_us = (scheduling.step_limit_us as f64).min(alone_us * scheduling.gap_factor);
        Budget { tokens, us: limit_us - alone_us }
    }

    /// The rows of a step, for the estimate of its time.
    pub(crate) fn rows_of(&self, plan: &[Planned]) -> StepRows {
        let mut rows = StepRows::default();
        for planned in plan {
            let of_run = planned.rows();
            match planned.tokens {
                1 => rows.decode += of_run,
                _ => rows.prefill += of_run,
            }
            let run = &self.runs[&planned.run];
            rows.context += of_run * (run.sequence.kept_tokens() + of_run / 2);
        }
        rows
    }

    pub(crate) fn priority(&self, id: RunId) -> i32 {
        self.requests[&self.runs[&id].request].request.priority
    }

    /// Most tokens of one run in a step: its open f16 blocks take at most a quarter of a small pool, so
    /// that they do not push out what could have been kept; and what observing them allows.
    pub(crate) fn most_chunk_tokens(&self, run: &Run) -> usize {
        let most = self.config.rules.most_tokens(&run.sequence);
        let live = &self.requests[&run.request];
        // What was told before it was thrown away is computed apart: without logits.
        let untold = live.prompt_told.saturating_sub(run.computed());
        let of_logits = match live.request.prompt_logprobs {
            Some(_) if untold > 0 => untold,
            Some(_) => LOGITS_TOKENS,
            None => usize::MAX,
        };
        self.chunk_tokens.min(most).min(of_logits).max(1)
    }

    /// Adds drafts to the decodes of `plan`, as many as are expected to pay.
    fn draft(&mut self, plan: &mut [Planned]) {
        let Some(speculator) = &mut self.speculator else { return };
        let decoding = plan.len();
        let mut rows = decoding;
        for planned in plan {
            let run = &self.runs[&planned.run];
            let live = &self.requests[&run.request];
            if !live.request.speculate || live.beams.is_some() {
                continue;
            }
            let tokens_left = live.limit - run.generated();
            let room = Room { rows, decoding, tokens_left };
            speculator.draft(RunKey(run.id), &run.tokens, room, &mut planned.drafts);
            rows += planned.drafts.len();
        }
    }
}
