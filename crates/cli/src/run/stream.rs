//! One generation, its text as it comes, and what was measured on the way.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use reef_engine::event::Token;
use reef_engine::stop::{Matched, StopMatcher};
use reef_engine::{Engine, Event, FinishReason, Generation, Request};
use reef_kv::ByFormat;
use reef_model::tokenizer::{Decode, Detokenizer, Tokenizer};

use crate::output::{print_line, print_text};
use crate::progress::Progress;

/// A finished generation with its text and times.
pub struct Streamed {
    /// Text generated, cut before a stop string.
    pub text: String,
    /// What the engine answered.
    pub generation: Generation,
    /// KV bytes by format after each step.
    pub memory: Vec<Sample>,
    /// From the start to the first token.
    pub time_to_first_token: Duration,
    /// Computing the prompt; 0 if it was not computed to its end.
    pub prefill_time: Duration,
    /// From the first token to the last.
    pub decode_time: Duration,
}

/// KV memory after a step.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// The engine's number of the step.
    pub step: u64,
    /// Tokens computed so far, dropped ones included.
    pub tokens: usize,
    /// Bytes of pages in use.
    pub used: ByFormat<usize>,
}

/// Samples kept at most: more than any chart has columns.
const MOST_SAMPLES: usize = 4096;

/// Samples of a run of any length, evenly apart, the newest among them.
struct Samples {
    kept: Vec<Sample>,
    /// Only every so many-th step stays.
    every: u64,
}

impl Default for Samples {
    fn default() -> Samples {
        Samples { kept: Vec::new(), every: 1 }
    }
}

impl Samples {
    fn push(&mut self, sample: Sample) {
        let every = self.every;
        self.kept.pop_if(|last| !last.step.is_multiple_of(every));
        if self.kept.len() == MOST_SAMPLES {
            self.every *= 2;
            self.kept.retain(|sample| sample.step.is_multiple_of(self.every));
        }
        self.kept.push(sample);
    }
}

/// Runs `request`, writing its text to stdout as it comes where `show`.
pub fn stream(
    engine: &mut Engine,
    tokenizer: &Tokenizer,
    request: &Request,
    stops: &[String],
    show: bool,
    interrupted: &AtomicBool,
) -> anyhow::Result<Streamed> {
    let mut listener = Listener {
        detokenizer: tokenizer.detokenizer(Decode { continues: true, ..Decode::default() }),
        stops: StopMatcher::new(stops),
        show,
        interrupted,
        text: String::new(),
        memory: Samples::default(),
        stopped: false,
        progress: Progress::new(request.prompt.len(), "prompt tokens"),
        start: Instant::now(),
        prefilled: None,
        first_token: None,
        failure: None,
    };
    let generation = engine.generate(request, &mut |event| listener.hear(event))?;
    listener.progress.end();
    if let Some(failure) = listener.failure.take() {
        return Err(failure);
    }
    let end = Instant::now();
    listener.end()?;
    let Listener { text, memory, start, prefilled, first_token, .. } = listener;
    let first = first_token.unwrap_or(end);
    Ok(Streamed {
        text,
        generation,
        memory: memory.kept,
        time_to_first_token: first - start,
        prefill_time: prefilled.unwrap_or(start) - start,
        decode_time: end - first,
    })
}

struct Listener<'a> {
    detokenizer: Detokenizer<&'a Tokenizer>,
    stops: StopMatcher,
    show: bool,
    interrupted: &'a AtomicBool,
    text: String,
    memory: Samples,
    /// A stop string was found: what follows it is not shown.
    stopped: bool,
    progress: Progress,
    start: Instant,
    prefilled: Option<Instant>,
    first_token: Option<Instant>,
    failure: Option<anyhow::Error>,
}

impl Listener<'_> {
    fn hear(&mut self, event: Event) -> ControlFlow<FinishReason> {
        match event {
            Event::Accepted
            | Event::Admitted { .. }
            | Event::PromptLogprobs(_)
            | Event::Relief(_)
            | Event::Paused(_)
            | Event::Resumed { .. }
            | Event::Ended { .. }
            | Event::Finished(_)
            | Event::Failed(_) => {}
            Event::Prefilled { tokens, total } => {
                self.progress.set(tokens);
                if tokens == total {
                    self.prefilled = Some(Instant::now());
                    self.progress.end();
                }
            }
            Event::Step { step, tokens, used, .. } => {
                self.memory.push(Sample { step, tokens, used })
            }
            Event::Token(Token { id, .. }) => {
                self.first_token.get_or_insert_with(Instant::now);
                let piece = self.detokenizer.push(id);
                let (piece, stopped) = match self.stops.push(&piece) {
                    Matched::Text(piece) => (piece, false),
                    Matched::Stop { text, .. } => (text, true),
                };
                if let Err(failure) = self.write(&piece) {
                    self.failure = Some(failure);
                    return ControlFlow::Break(FinishReason::Cancelled);
                }
                self.stopped = stopped;
                if stopped {
                    return ControlFlow::Break(FinishReason::Stop);
                }
            }
        }
        match self.interrupted.load(Ordering::SeqCst) {
            true => ControlFlow::Break(FinishReason::Cancelled),
            false => ControlFlow::Continue(()),
        }
    }

    fn write(&mut self, piece: &str) -> anyhow::Result<()> {
        self.text.push_str(piece);
        if self.show {
            print_text(piece)?;
        }
        Ok(())
    }

    /// Text that was held back for a stop string or an unfinished character.
    fn end(&mut self) -> anyhow::Result<()> {
        if !self.stopped {
            let rest = self.detokenizer.clone().finish();
            let rest = self.stops.finish() + &rest;
            self.write(&rest)?;
        }
        if self.show {
            print_line("")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_run_keeps_a_bounded_number_of_samples_and_its_newest() {
        let mut samples = Samples::default();
        for step in 0..10 * MOST_SAMPLES as u64 + 7 {
            samples.push(Sample { step, tokens: step as usize, used: ByFormat::default() });
            assert_eq!(samples.kept.last().unwrap().step, step);
            assert!(samples.kept.len() <= MOST_SAMPLES);
        }
        assert!(samples.kept.len() > MOST_SAMPLES / 2);
        let apart = |pair: &[Sample]| pair[1].step - pair[0].step;
        let even = &samples.kept[..samples.kept.len() - 1];
        assert!(even.windows(2).all(|pair| apart(pair) == samples.every));
    }
}
