//! The answer of `/v1/completions` as a stream.

use std::collections::BTreeMap;

use reef_engine::event::TokenLogprobs;
use serde::Serialize;
use serde_json::Value;

use super::completion_answer::{Answer, Echo};
use super::head::Head;
use super::narration::Dialect;
use super::respond::{finish_reason, stop_reason};
use crate::generation::{Ended, Finish, Piece};
use crate::types::logprobs::CompletionLogprobs;

/// An answer that is streamed.
pub struct CompletionStream {
    answer: Answer,
    /// Of each prompt, as far as they are known.
    prompt_logprobs: BTreeMap<usize, Vec<TokenLogprobs>>,
    /// Characters told of each continuation that has begun, by its index.
    offsets: BTreeMap<u32, usize>,
}

/// A continuation in a chunk.
#[derive(Default, Serialize)]
pub struct Choice {
    index: u32,
    text: String,
    logprobs: Option<CompletionLogprobs>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_reason: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<Value>,
}

impl CompletionStream {
    /// Nothing is told yet.
    pub fn new(answer: Answer) -> CompletionStream {
        let (prompt_logprobs, offsets) = Default::default();
        CompletionStream { answer, prompt_logprobs, offsets }
    }

    /// The prompt's log-probabilities, as those of the tokens that `echo` tells again.
    fn echoed(&self, echo: &Echo, known: &[TokenLogprobs]) -> Option<CompletionLogprobs> {
        self.answer.with_logprobs.then(|| {
            let mut logprobs = CompletionLogprobs::default();
            self.answer.push_prompt(&mut logprobs, echo, known);
            logprobs
        })
    }
}

impl Dialect for CompletionStream {
    type Choice = Choice;

    const OBJECT: &'static str = "text_completion";

    fn head(&self) -> &Head {
        &self.answer.head
    }

    fn index(&self, prompt: usize, choice: u32) -> u32 {
        self.answer.index(prompt, choice)
    }

    fn prompt_logprobs(&mut self, prompt: usize, next: Vec<TokenLogprobs>) {
        self.prompt_logprobs.entry(prompt).or_default().extend(next);
    }

    /// The prompt, where that was asked for.
    fn beginning(&mut self, prompt: usize, choice: u32) -> Option<Choice> {
        let index = self.index(prompt, choice);
        if self.offsets.contains_key(&index) {
            return None;
        }
        let known = self.prompt_logprobs.get(&prompt).map_or(&[][..], Vec::as_slice);
        let echo = self.answer.echo(prompt);
        let prompt_logprobs = self.answer.prompt_logprobs(known);
        let says_something = echo.is_some() || prompt_logprobs.is_some();
        let logprobs = echo.and_then(|echo| self.echoed(echo, known));
        let text = echo.map_or(String::new(), |echo| echo.text.clone());
        self.offsets.insert(index, text.chars().count());
        says_something.then(|| Choice {
            index,
            text,
            logprobs,
            prompt_logprobs,
            ..Choice::default()
        })
    }

    fn piece(&mut self, prompt: usize, piece: Piece) -> Option<Choice> {
        let index = self.index(prompt, piece.choice);
        let next = self.offsets.entry(index).or_default();
        let offset = *next;
        *next += piece.chars;
        if self.answer.echo_only {
            return None;
        }
        let logprobs = piece.logprobs.map(|token| {
            let mut logprobs = CompletionLogprobs::default();
            logprobs.push(&self.answer.texts(), &token, offset);
            logprobs
        });
        Some(Choice { index, text: piece.text, logprobs, ..Choice::default() })
    }

    fn ended(&mut self, prompt: usize, ended: Ended, held: Option<Choice>) -> Choice {
        let index = self.index(prompt, ended.choice);
        let mut choice = held.unwrap_or(Choice { index, ..Choice::default() });
        if !self.answer.echo_only {
            choice.text += &ended.text;
        }
        choice.finish_reason = Some(finish_reason(ended.reason));
        choice.stop_reason = stop_reason(ended.reason, ended.stop);
        choice
    }

    fn told(&mut self, choice: Choice) -> Option<Choice> {
        let is_silent = choice.text.is_empty() && choice.logprobs.is_none();
        (!is_silent || choice.finish_reason.is_some()).then_some(choice)
    }

    fn completion_tokens(&self, finish: &Finish) -> usize {
        if self.answer.echo_only { 0 } else { finish.completion_tokens }
    }
}
