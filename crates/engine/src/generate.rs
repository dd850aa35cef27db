//! One request from its beginning to its end, for callers who have only one.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::engine::{Engine, Progress};
use crate::event::{Event, FinishReason, Outcome, Usage};
use crate::request::Request;
use crate::session::EngineError;
use crate::wakeup::Wakeup;

/// What the caller does with an event: go on, or end the generation for a reason.
pub type Sink<'a> = dyn FnMut(Event) -> ControlFlow<FinishReason> + 'a;

/// The key of the request; nobody else has one.
const KEY: u64 = u64::MAX;
/// Whoever is in flight wakes the thread; this is only against a wake-up that never comes.
const LONGEST_WAIT: Duration = Duration::from_millis(100);

/// A finished generation: the first continuation and what the request took.
#[derive(Clone, Debug)]
pub struct Generation {
    /// Generated token ids, without the end token.
    pub token_ids: Vec<u32>,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// What it took.
    pub usage: Usage,
}

impl Engine {
    /// Runs `request` to its end, telling `sink` what happens. A running request is never ended for
    /// want of memory: what its contract cannot hold is refused before it starts.
    ///
    /// # Errors
    /// A refusal with numbers, a token outside the vocabulary, or weights that give no number.
    pub fn generate(
        &mut self,
        request: &Request,
        sink: &mut Sink<'_>,
    ) -> Result<Generation, EngineError> {
        let outcome = self.run_to_end(request, sink)?;
        let first = outcome.continuations.into_iter().next();
        let (token_ids, finish_reason) = first
            .map_or((Vec::new(), FinishReason::Cancelled), |first| {
                (first.token_ids, first.finish_reason)
            });
        Ok(Generation { token_ids, finish_reason, usage: outcome.usage })
    }

    /// [`generate`](Self::generate) with all continuations.
    ///
    /// # Errors
    /// As there.
    pub fn run_to_end(
        &mut self,
        request: &Request,
        sink: &mut Sink<'_>,
    ) -> Result<Outcome, EngineError> {
        self.submit(KEY, request.clone())?;
        let wakeup = Wakeup::of_this_thread();
        self.set_waker(wakeup.waker());
        let start = Instant::now();
        let (mut tokens_told, mut broken_off) = (0, false);
        loop {
            let progress = self.turn(start.elapsed().as_micros() as u64);
            if progress.is_err() {
                self.end(KEY, FinishReason::Cancelled);
            }
            for told in self.take_events() {
                match told.event {
                    Event::Finished(mut outcome) => {
                        if broken_off && request.branches.width() == 1 {
                            // Several tokens of one step may have been sampled before the sink spoke.
                            let first = outcome.continuations.iter_mut();
                            first.for_each(|of| of.token_ids.truncate(tokens_told));
                        }
                        return progress.map(|_| *outcome);
                    }
                    Event::Failed(error) => {
                        return Err(Arc::try_unwrap(error).unwrap_or_else(EngineError::Failed));
                    }
                    _ if broken_off => {}
                    event => {
                        tokens_told += usize::from(matches!(event, Event::Token(_)));
                        if let ControlFlow::Break(reason) = sink(event) {
                            broken_off = true;
                            self.end(KEY, reason);
                        }
                    }
                }
            }
            if progress? == Progress::Waiting {
                wakeup.wait(LONGEST_WAIT);
            }
        }
    }
}
