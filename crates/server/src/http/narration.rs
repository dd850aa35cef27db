//! An answer as a stream, the same for all of OpenAI's dialects: a chunk a token, the end of a continuation in the
//! chunk of its last token, what was degraded in the chunk of the last end, then the usage.

use reef_engine::Usage;
use reef_engine::event::TokenLogprobs;
use serde::Serialize;
use serde_json::Value;

use super::head::Head;
use crate::generation::{Ended, Finish, Piece, Update};
use crate::sse::{Events, Narrator};
use crate::usage::{degraded_header, usage_document};

/// What an answer's chunks look like.
pub trait Dialect: Send + Unpin + 'static {
    /// What a chunk says of one continuation.
    type Choice: Serialize + Send + Unpin;

    /// The `object` of every chunk.
    const OBJECT: &'static str;

    /// Who the answer is.
    fn head(&self) -> &Head;

    /// Where continuation `choice` of prompt `prompt` stands among all of the answer's.
    fn index(&self, prompt: usize, choice: u32) -> u32;

    /// Log-probabilities of the next tokens of a prompt.
    fn prompt_logprobs(&mut self, prompt: usize, next: Vec<TokenLogprobs>);

    /// What is said of a continuation before all else. Asked before each of its chunks.
    fn beginning(&mut self, _prompt: usize, _choice: u32) -> Option<Self::Choice> {
        None
    }

    /// What is said of a token.
    fn piece(&mut self, prompt: usize, piece: Piece) -> Option<Self::Choice>;

    /// What is said of an end, in one with `held`: what is said of the continuation's last token.
    fn ended(&mut self, prompt: usize, ended: Ended, held: Option<Self::Choice>) -> Self::Choice;

    /// What goes out of `choice`; `None`: it says nothing.
    fn told(&mut self, choice: Self::Choice) -> Option<Self::Choice>;

    /// What the next chunk says of the prompt, beside its choices.
    fn beside(&mut self) -> Option<Value> {
        None
    }

    /// Generated tokens that the client was given.
    fn completion_tokens(&self, finish: &Finish) -> usize;
}

/// A chunk of a stream.
#[derive(Serialize)]
struct Chunk<'a, C> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: &'a [C],
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    x_reef_degraded: Option<String>,
}

/// Writes an answer as a stream.
pub struct Narration<D: Dialect> {
    dialect: D,
    /// The index of a continuation, and what the next chunk will say of it: what comes at once joins it.
    held: Option<(u32, D::Choice)>,
    /// Generated tokens so far.
    tokens: usize,
    /// Of each prompt that has ended: what it took, and the tokens it was given.
    taken: Vec<(Usage, usize)>,
}

impl<D: Dialect> Narration<D> {
    /// Nothing is written yet.
    pub fn new(dialect: D) -> Narration<D> {
        Narration { dialect, held: None, tokens: 0, taken: Vec::new() }
    }

    fn begin(&mut self, prompt: usize, choice: u32, events: &mut Events) {
        if let Some(beginning) = self.dialect.beginning(prompt, choice) {
            self.write_choice(beginning, None, events);
        }
    }

    fn piece(&mut self, prompt: usize, piece: Piece, events: &mut Events) {
        self.write_held(None, events);
        self.begin(prompt, piece.choice, events);
        self.tokens += 1;
        let index = self.dialect.index(prompt, piece.choice);
        self.held = self.dialect.piece(prompt, piece).map(|said| (index, said));
    }

    fn ended(&mut self, prompt: usize, ended: Ended, events: &mut Events) {
        let index = self.dialect.index(prompt, ended.choice);
        if self.held.as_ref().is_none_or(|(held, _)| *held != index) {
            self.write_held(None, events);
            self.begin(prompt, ended.choice, events);
        }
        let held = self.held.take().map(|(_, said)| said);
        self.held = Some((index, self.dialect.ended(prompt, ended, held)));
    }

    fn write_held(&mut self, degraded: Option<String>, events: &mut Events) {
        let Some((_, said)) = self.held.take() else { return };
        if let Some(told) = self.dialect.told(said) {
            self.write_choice(told, degraded, events);
        }
    }

    fn write_choice(&mut self, said: D::Choice, degraded: Option<String>, events: &mut Events) {
        let head = self.dialect.head();
        let usage = head.continuous_usage.then(|| head.usage_so_far(self.tokens));
        self.write_chunk(&[said], usage, degraded, events);
    }

    fn write_chunk(
        &mut self,
        choices: &[D::Choice],
        usage: Option<Value>,
        x_reef_degraded: Option<String>,
        events: &mut Events,
    ) {
        let prompt_logprobs = self.dialect.beside();
        let Head { id, created, model, .. } = self.dialect.head();
        events.push(&Chunk {
            id,
            object: D::OBJECT,
            created: *created,
            model,
            choices,
            usage,
            prompt_logprobs,
            x_reef_degraded,
        });
    }
}

impl<D: Dialect> Narrator for Narration<D> {
    fn write(&mut self, index: usize, update: Update, events: &mut Events) {
        match update {
            Update::Admitted { .. } => {}
            Update::PromptLogprobs(next) => self.dialect.prompt_logprobs(index, next),
            Update::Piece(piece) => self.piece(index, piece, events),
            Update::Ended(ended) => self.ended(index, ended, events),
            Update::Paused(pause) if self.dialect.head().comments => {
                self.write_held(None, events);
                let (kind, reason) = (pause.kind.name(), pause.reason.name());
                events.push_comment(&format!("paused: {kind} ({reason})"));
            }
            Update::Resumed if self.dialect.head().comments => events.push_comment("resumed"),
            Update::Paused(_) | Update::Resumed => {}
            Update::Failed(error) => {
                self.write_held(None, events);
                events.push_error(&error);
            }
            Update::Finished(finish) => {
                self.write_held(degraded_header(finish.usage()), events);
                let tokens = self.dialect.completion_tokens(&finish);
                self.taken.push((finish.outcome.usage, tokens));
            }
        }
    }

    fn flush(&mut self, events: &mut Events) {
        self.write_held(None, events);
    }

    fn end(&mut self, events: &mut Events) {
        self.write_held(None, events);
        if self.dialect.head().stream_usage && !self.taken.is_empty() {
            self.write_chunk(&[], Some(usage_document(&self.taken)), None, events);
        }
    }
}
