//! A request on its way through the engine, as a stream of text: tokens become characters, stop strings end
//! continuations, and a reader who goes away ends it all.

mod choice;
mod collect;
mod merged;

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use reef_engine::event::{Event, Outcome, Pause, Token, TokenLogprobs};
use reef_engine::{FinishReason, Request, Usage};
use reef_model::tokenizer::Tokenizer;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

pub use choice::Ended;
use choice::{Choice, Pushed};
pub use collect::{Collected, Completed};
pub use merged::Merged;

use crate::app::Model;
use crate::door::Door;
use crate::error::ApiError;
use crate::metrics::{Arrival, RequestObserver};
use crate::telemetry::{self, RequestContext};

/// What is asked of the engine, and how its tokens become text.
#[derive(Clone, Debug)]
pub struct Job {
    /// For the engine.
    pub request: Request,
    /// How tokens become text.
    pub text: TextOptions,
}

/// How tokens become text.
#[derive(Clone, Debug, Default)]
pub struct TextOptions {
    /// A continuation ends before the first of these.
    pub stops: Vec<String>,
    /// The stop string is part of the text.
    pub include_stop: bool,
    /// Control tokens are shown as they are written.
    pub show_special: bool,
    /// Text of so many first tokens is not looked through for stop strings.
    pub min_tokens: usize,
}

/// What comes of a request.
#[derive(Debug)]
pub enum Update {
    /// It left the queue for the first time.
    Admitted {
        /// Prompt tokens whose KV was found in the prefix cache.
        cached_tokens: usize,
    },
    /// Log-probabilities of the next prompt tokens.
    PromptLogprobs(Vec<TokenLogprobs>),
    /// The next token of a continuation.
    Piece(Piece),
    /// A continuation has ended.
    Ended(Ended),
    /// It stands still for a while.
    Paused(Pause),
    /// It goes on.
    Resumed,
    /// All has ended; nothing follows.
    Finished(Box<Finish>),
    /// It could not go on; nothing follows.
    Failed(ApiError),
}

/// A token, with the text that can be shown now that it is here.
#[derive(Clone, Debug)]
pub struct Piece {
    /// Index of the continuation.
    pub choice: u32,
    /// Often empty: inside a character, or what may be the start of a stop string.
    pub text: String,
    /// Characters that the token completes, shown now or held back: where the next one begins.
    pub chars: usize,
    /// The token.
    pub token_id: u32,
    /// Where asked for.
    pub logprobs: Option<TokenLogprobs>,
}

/// The end of a request.
#[derive(Debug)]
pub struct Finish {
    /// Generated tokens of all continuations that the client was given.
    pub completion_tokens: usize,
    /// What the engine says of it.
    pub outcome: Outcome,
}

impl Finish {
    /// What the engine says it took.
    pub fn usage(&self) -> &Usage {
        &self.outcome.usage
    }
}

/// A request in the engine; dropping it ends it there.
pub struct Generation {
    events: UnboundedReceiver<Event>,
    live: Live,
    tokenizer: Arc<Tokenizer>,
    text: TextOptions,
    /// Empty where continuations are chosen at the end: best of several, beams.
    choices: Vec<Choice>,
    /// What is known and was not given out.
    queue: VecDeque<Update>,
    /// What is queued goes out together with an end that is still to come: clients take the gap between two
    /// chunks as the time of a token.
    awaits_end: bool,
}

/// Ends the request in the engine unless it has ended.
struct Live {
    door: Arc<dyn Door>,
    key: u64,
    ended: bool,
}

impl Drop for Live {
    fn drop(&mut self) {
        if !self.ended {
            self.door.end(self.key, FinishReason::Cancelled);
        }
    }
}

/// Counts what `request` goes through, and writes a line when it has ended.
fn observe(model: &Model, request: &Request) -> RequestObserver {
    let context = RequestContext::current();
    let arrival = Arrival {
        prompt_tokens: request.prompt.len(),
        tenant: request.tenant,
        n: request.branches.given(),
        max_tokens: request.max_tokens,
        looks_up_prefix: model.metrics.served().prefix_caching
            && request.use_prefix_cache
            && request.prompt_logprobs.is_none(),
        at: context.arrived,
    };
    let served = model.metrics.served();
    let tenant = served.tenants.get(request.tenant).map_or("unknown", |tenant| &tenant.name);
    model.metrics.observe(arrival, telemetry::on_end(context, &served.model_name, tenant))
}

impl Generation {
    /// Hands `jobs` to the engine of `model` and waits until all are accepted.
    ///
    /// # Errors
    /// The engine's first refusal; what it had accepted is ended.
    pub async fn start_all(model: &Model, jobs: Vec<Job>) -> Result<Vec<Generation>, ApiError> {
        let submitted = jobs.into_iter().map(|job| Generation::submit(model, job));
        let mut generations = submitted.collect::<Result<Vec<Generation>, ApiError>>()?;
        for generation in &mut generations {
            generation.accepted().await?;
        }
        Ok(generations)
    }

    /// Hands `job` to the engine of `model` and waits until it is accepted.
    ///
    /// # Errors
    /// The engine's refusal.
    pub async fn start(model: &Model, job: Job) -> Result<Generation, ApiError> {
        let mut generation = Generation::submit(model, job)?;
        generation.accepted().await?;
        Ok(generation)
    }

    fn submit(model: &Model, job: Job) -> Result<Generation, ApiError> {
        let Job { request, text } = job;
        let branches = request.branches;
        let choices = if branches.is_ranked() { 0 } else { branches.width() };
        let (sender, events) = unbounded_channel();
        // Bounded by the tokens that the request may generate. What nobody reads here wakes nobody.
        let mut observer = observe(model, &request);
        let listener = Box::new(move |event| {
            observer.hear(&event);
            match event {
                Event::Prefilled { .. } | Event::Relief(_) | Event::Step { .. } => {
                    !sender.is_closed()
                }
                event => sender.send(event).is_ok(),
            }
        });
        let key = model.door.submit(request, listener).map_err(|error| ApiError::from(&error))?;
        let live = Live { door: model.door.clone(), key, ended: false };
        let tokenizer = model.tokenizer.clone();
        let choices = (0..choices).map(|_| Choice::new(&tokenizer, &text)).collect();
        let (queue, awaits_end) = (VecDeque::new(), false);
        Ok(Generation { events, live, tokenizer, text, choices, queue, awaits_end })
    }

    async fn accepted(&mut self) -> Result<(), ApiError> {
        let error = match self.events.recv().await {
            Some(Event::Accepted) => return Ok(()),
            Some(Event::Failed(error)) => (&*error).into(),
            _ => ApiError::unavailable("the engine has stopped"),
        };
        self.close();
        Err(error)
    }

    /// The next thing that happens; `None` after the end.
    pub fn poll_update(&mut self, context: &mut Context<'_>) -> Poll<Option<Update>> {
        loop {
            if !self.awaits_end
                && let Some(update) = self.queue.pop_front()
            {
                return Poll::Ready(Some(update));
            }
            if self.live.ended {
                return Poll::Ready(None);
            }
            match ready!(self.events.poll_recv(context)) {
                Some(event) => self.take(event),
                None => self.fail(ApiError::unavailable("the engine has stopped")),
            }
        }
    }

    /// Whether more is to be given out with what was.
    fn has_more(&self) -> bool {
        !self.queue.is_empty()
    }

    /// The next thing that happens; `None` after the end.
    pub async fn next(&mut self) -> Option<Update> {
        std::future::poll_fn(|context| self.poll_update(context)).await
    }

    /// Everything at once, for answers that are not streamed.
    ///
    /// # Errors
    /// What kept it from going on.
    pub async fn collect(self) -> Result<Collected, ApiError> {
        collect::collect(self).await
    }

    fn take(&mut self, event: Event) {
        let update = match event {
            Event::Accepted | Event::Prefilled { .. } | Event::Relief(_) | Event::Step { .. } => {
                return;
            }
            Event::Token(token) => return self.take_token(token),
            Event::Ended { branch, reason } => return self.end(branch, reason),
            Event::Finished(outcome) => return self.finish(*outcome),
            Event::Failed(error) => return self.fail((&*error).into()),
            Event::Admitted { cached_tokens, .. } => Update::Admitted { cached_tokens },
            Event::PromptLogprobs(logprobs) => Update::PromptLogprobs(logprobs),
            Event::Paused(pause) => Update::Paused(pause),
            Event::Resumed { .. } => Update::Resumed,
        };
        self.queue.push_back(update);
    }

    fn take_token(&mut self, token: Token) {
        let Token { branch, id: token_id, logprobs, is_last } = token;
        // None: tokens of ranked continuations are told again at the end, and what follows a stop string
        // was computed before the engine heard of it.
        let Some(choice) = self.choices.get_mut(branch as usize) else { return };
        let Some(Pushed { text, chars, stop }) = choice.push(token_id) else { return };
        let piece = Piece { choice: branch, text, chars, token_id, logprobs };
        self.queue.push_back(Update::Piece(piece));
        self.awaits_end = is_last;
        if stop {
            self.end(branch, FinishReason::Stop);
            let Live { door, key, .. } = &self.live;
            match self.awaits_end {
                true => door.end(*key, FinishReason::Stop),
                false => door.end_branch(*key, branch, FinishReason::Stop),
            }
        }
    }

    /// Ends a continuation; `Finished`, which tells what was used, is awaited with the last.
    fn end(&mut self, branch: u32, reason: FinishReason) {
        let Some(choice) = self.choices.get_mut(branch as usize) else { return };
        self.queue.extend(choice.end(branch, reason).map(Update::Ended));
        self.awaits_end = self.choices.iter().all(Choice::has_ended);
    }

    fn fail(&mut self, error: ApiError) {
        self.close();
        self.queue.push_back(Update::Failed(error));
    }

    /// Ends what has not ended, then all.
    fn finish(&mut self, outcome: Outcome) {
        for (index, choice) in self.choices.iter_mut().enumerate() {
            let continuation = outcome.continuations.get(index);
            let reason = continuation.map_or(FinishReason::Cancelled, |one| one.finish_reason);
            self.queue.extend(choice.end(index as u32, reason).map(Update::Ended));
        }
        let completion_tokens = match self.choices.is_empty() {
            true => outcome.continuations.iter().map(|one| one.token_ids.len()).sum(),
            false => self.choices.iter().map(Choice::tokens).sum(),
        };
        self.close();
        self.queue.push_back(Update::Finished(Box::new(Finish { completion_tokens, outcome })));
    }

    fn close(&mut self) {
        self.live.ended = true;
        self.awaits_end = false;
        self.events.close();
    }
}
