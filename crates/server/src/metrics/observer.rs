//! One request as metrics see it: fed with the engine's events, it measures by the definitions of vLLM.

use std::sync::Arc;
use std::time::{Duration, Instant};

use reef_engine::event::{Pause, PauseKind, PauseReason, Usage};
use reef_engine::{Event, FinishReason, Outcome};
use reef_kv::page::PageFormat;

use super::request::RequestFamilies;

/// What is known of a request when it comes.
#[derive(Clone, Copy, Debug)]
pub struct Arrival {
    /// Prompt tokens.
    pub prompt_tokens: usize,
    /// Index of the engine's tenant.
    pub tenant: usize,
    /// Choices asked for.
    pub n: usize,
    /// Limit of generated tokens, if the client named one.
    pub max_tokens: Option<usize>,
    /// Whether its prompt is looked up in the prefix cache.
    pub looks_up_prefix: bool,
    /// When it came.
    pub at: Instant,
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// An end token or a stop string.
    Stop,
    /// The limit of tokens.
    Length,
    /// The client has gone, or asked for the end.
    Cancelled,
    /// Its deadline passed.
    Deadline,
    /// It could not go on.
    Failed,
    /// The engine did not take it.
    Refused,
}

impl Ending {
    /// Every way.
    pub const ALL: [Ending; 6] = [
        Ending::Stop,
        Ending::Length,
        Ending::Cancelled,
        Ending::Deadline,
        Ending::Failed,
        Ending::Refused,
    ];

    /// The name in metrics and logs.
    pub fn name(self) -> &'static str {
        match self {
            Ending::Failed => "failed",
            Ending::Refused => "refused",
            Ending::Stop => FinishReason::Stop.name(),
            Ending::Length => FinishReason::Length.name(),
            Ending::Cancelled => FinishReason::Cancelled.name(),
            Ending::Deadline => FinishReason::Deadline.name(),
        }
    }

    /// vLLM's name: it knows no deadlines, and does not count what it refuses.
    pub(super) fn vllm_name(self) -> Option<&'static str> {
        match self {
            Ending::Stop => Some("stop"),
            Ending::Length => Some("length"),
            Ending::Cancelled | Ending::Deadline => Some("abort"),
            Ending::Failed => Some("error"),
            Ending::Refused => None,
        }
    }
}

impl From<FinishReason> for Ending {
    fn from(reason: FinishReason) -> Ending {
        match reason {
            FinishReason::Stop => Ending::Stop,
            FinishReason::Length => Ending::Length,
            FinishReason::Cancelled => Ending::Cancelled,
            FinishReason::Deadline => Ending::Deadline,
        }
    }
}

/// What a request went through, for its line in the log and its span.
#[derive(Clone, Debug)]
pub struct RequestSummary {
    /// How it ended.
    pub ending: Ending,
    /// Prompt tokens.
    pub prompt_tokens: usize,
    /// Generated tokens of all choices.
    pub completion_tokens: usize,
    /// Prompt tokens found in the prefix cache.
    pub cached_tokens: usize,
    /// From arrival to admission.
    pub queue: Option<Duration>,
    /// From arrival to the first token.
    pub first_token: Option<Duration>,
    /// From arrival to the end.
    pub e2e: Duration,
    /// The contract's name; `None` where the engine has not reported.
    pub fidelity: Option<&'static str>,
    /// Tokens held below f16 at the end.
    pub degraded_tokens: f64,
    /// Tokens dropped.
    pub dropped_tokens: f64,
    /// Times a choice stood still.
    pub pauses: usize,
}

/// When a choice last had an output.
#[derive(Clone, Copy, Debug)]
struct Choice {
    last: Instant,
    tokens: usize,
}

/// Told how a request ended, once.
pub type OnEnd = Box<dyn FnOnce(&RequestSummary) + Send>;

/// Measures one request; lives in its listener, on the engine's thread, so that a client that reads slowly
/// does not count. Dropped before its end it counts as cancelled: that is what a client that goes away leaves
/// behind. Until [`Event::Accepted`] its end is a refusal.
pub struct RequestObserver {
    families: Arc<RequestFamilies>,
    arrival: Arrival,
    accepted: bool,
    admitted: Option<Instant>,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
    cached_tokens: usize,
    generated: usize,
    /// By branch.
    choices: Vec<Option<Choice>>,
    /// The branch whose output is being told: its tokens up to the next step are one output.
    output_of: Option<u32>,
    pauses: usize,
    preemptions: usize,
    usage: Option<UsageSums>,
    on_end: Option<OnEnd>,
}

#[derive(Clone, Copy, Debug)]
struct UsageSums {
    fidelity: &'static str,
    degraded: f64,
    dropped: f64,
}

impl From<&Usage> for UsageSums {
    fn from(usage: &Usage) -> UsageSums {
        let lossy = usage.kv.tokens_by_format.iter().filter(|(of, _)| *of != PageFormat::F16);
        UsageSums {
            fidelity: usage.fidelity.name(),
            degraded: lossy.map(|(_, tokens)| tokens).sum(),
            dropped: usage.kv.dropped_tokens,
        }
    }
}

impl RequestObserver {
    pub(super) fn new(
        families: Arc<RequestFamilies>,
        arrival: Arrival,
        on_end: OnEnd,
    ) -> RequestObserver {
        RequestObserver {
            families,
            arrival,
            accepted: false,
            admitted: None,
            first_token: None,
            last_token: None,
            cached_tokens: 0,
            generated: 0,
            choices: Vec::new(),
            output_of: None,
            pauses: 0,
            preemptions: 0,
            usage: None,
            on_end: Some(on_end),
        }
    }

    /// Takes an event of the request in, as of now. To be given all of them.
    pub fn hear(&mut self, event: &Event) {
        self.hear_at(event, Instant::now());
    }

    /// The same, as of `now`, which never goes back.
    pub fn hear_at(&mut self, event: &Event, now: Instant) {
        match event {
            Event::Accepted => self.accepted = true,
            Event::Step { .. } => self.output_of = None,
            Event::Token(token) => self.token(token.branch, now),
            Event::Admitted { cached_tokens, .. } => self.admitted(*cached_tokens, now),
            Event::Paused(pause) => self.paused(pause),
            Event::Resumed { paused_us, .. } => {
                self.families.pause_seconds.observe(*paused_us as f64 / 1e6);
            }
            Event::Finished(outcome) => self.finished(outcome, now),
            Event::Failed(_) if !self.accepted => self.end(Ending::Refused, now),
            Event::Failed(_) => self.end(Ending::Failed, now),
            Event::Prefilled { .. }
            | Event::PromptLogprobs(_)
            | Event::Relief(_)
            | Event::Ended { .. } => {}
        }
    }

    fn admitted(&mut self, cached_tokens: usize, now: Instant) {
        self.admitted = Some(now);
        self.cached_tokens = cached_tokens;
        self.families.queue_seconds.observe(seconds(self.arrival.at, now));
        if self.arrival.looks_up_prefix {
            self.families.prefix_queries.inc_by(self.arrival.prompt_tokens as u64);
            self.families.prefix_hits.inc_by(cached_tokens as u64);
        }
    }

    fn token(&mut self, branch: u32, now: Instant) {
        self.generated += 1;
        self.families.generation_tokens.inc();
        if let Some(tenant) = self.families.tenant(self.arrival.tenant) {
            tenant.generation_tokens.inc();
        }
        if self.first_token.is_none() {
            self.first_token(now);
        }
        self.last_token = Some(now);
        let same_output = self.output_of == Some(branch);
        self.output_of = Some(branch);
        let place = branch as usize;
        if self.choices.len() <= place {
            // The engine numbers branches without gaps, and limits them.
            self.choices.resize(place + 1, None);
        }
        match &mut self.choices[place] {
            Some(choice) => {
                choice.tokens += 1;
                if !same_output {
                    self.families.inter_token_seconds.observe(seconds(choice.last, now));
                    choice.last = now;
                }
            }
            none => *none = Some(Choice { last: now, tokens: 1 }),
        }
    }

    /// Its prefill has ended.
    fn first_token(&mut self, now: Instant) {
        self.first_token = Some(now);
        let (families, prompt) = (&self.families, self.arrival.prompt_tokens as u64);
        let cached = (self.cached_tokens as u64).min(prompt);
        families.first_token_seconds.observe(seconds(self.arrival.at, now));
        families.prompt_tokens.inc_by(prompt);
        families.prompt_tokens_cached.inc_by(cached);
        families.prompt_tokens_hit.inc_by(cached);
        families.prompt_tokens_computed.inc_by(prompt - cached);
        if let Some(tenant) = families.tenant(self.arrival.tenant) {
            tenant.prompt_tokens.inc_by(prompt);
        }
        if let Some(admitted) = self.admitted {
            families.prefill_seconds.observe(seconds(admitted, now));
        }
    }

    fn paused(&mut self, pause: &Pause) {
        self.pauses += 1;
        // Who was swapped out and could not be read back had left the pool before.
        let left = pause.kind != PauseKind::Wait && pause.reason != PauseReason::SpillFailure;
        self.preemptions += usize::from(left);
    }

    fn finished(&mut self, outcome: &Outcome, now: Instant) {
        let sums = UsageSums::from(&outcome.usage);
        if sums.degraded > 0.0 || sums.dropped > 0.0 {
            self.families.degraded.inc();
        }
        self.usage = Some(sums);
        let first = outcome.continuations.first();
        self.end(first.map_or(Ending::Cancelled, |of| of.finish_reason.into()), now);
    }

    fn end(&mut self, ending: Ending, now: Instant) {
        let Some(on_end) = self.on_end.take() else { return };
        self.families.ended(ending);
        if ending != Ending::Refused {
            self.observe_end(now);
        }
        let since_arrival = |at: Instant| at.saturating_duration_since(self.arrival.at);
        on_end(&RequestSummary {
            ending,
            prompt_tokens: self.arrival.prompt_tokens,
            completion_tokens: self.generated,
            cached_tokens: self.cached_tokens,
            queue: self.admitted.map(since_arrival),
            first_token: self.first_token.map(since_arrival),
            e2e: since_arrival(now),
            fidelity: self.usage.map(|usage| usage.fidelity),
            degraded_tokens: self.usage.map_or(0.0, |usage| usage.degraded),
            dropped_tokens: self.usage.map_or(0.0, |usage| usage.dropped),
            pauses: self.pauses,
        });
    }

    /// As vLLM: of a request that never had a token only what it has.
    fn observe_end(&self, now: Instant) {
        let (families, arrival) = (&*self.families, &self.arrival);
        if let Some(tenant) = families.tenant(arrival.tenant) {
            tenant.requests.inc();
        }
        families.e2e_seconds.observe(seconds(arrival.at, now));
        families.preemptions.observe(self.preemptions as f64);
        families.prompt_tokens_of_request.observe(arrival.prompt_tokens as f64);
        let computed = arrival.prompt_tokens.saturating_sub(self.cached_tokens);
        families.prefill_computed_tokens.observe(computed as f64);
        families.generation_tokens_of_request.observe(self.generated as f64);
        let longest = self.choices.iter().flatten().map(|choice| choice.tokens).max().unwrap_or(0);
        families.most_generation_tokens.observe(longest as f64);
        families.choices.observe(arrival.n as f64);
        if let Some(most) = arrival.max_tokens {
            families.max_tokens.observe(most as f64);
        }
        let (Some(first), Some(last)) = (self.first_token, self.last_token) else { return };
        let decode = seconds(first, last);
        families.decode_seconds.observe(decode);
        if let Some(admitted) = self.admitted {
            families.inference_seconds.observe(seconds(admitted, last));
        }
        let after_first = longest.saturating_sub(1);
        let per_token = if after_first > 0 { decode / after_first as f64 } else { 0.0 };
        families.time_per_output_token_seconds.observe(per_token);
    }
}

impl Drop for RequestObserver {
    fn drop(&mut self) {
        let ending = if self.accepted { Ending::Cancelled } else { Ending::Refused };
        self.end(ending, Instant::now());
    }
}

fn seconds(from: Instant, to: Instant) -> f64 {
    to.saturating_duration_since(from).as_secs_f64()
}
