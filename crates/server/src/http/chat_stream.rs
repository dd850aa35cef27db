//! The answer of `/v1/chat/completions` as a stream.

use reef_engine::event::TokenLogprobs;
use serde::Serialize;
use serde_json::{Value, json};

use super::chat_answer::{Answer, call_document, reason};
use super::head::Head;
use super::narration::Dialect;
use super::respond::stop_reason;
use crate::generation::{Ended, Finish, Piece};
use crate::tools::{CallDelta, CallReader, Read, Tools};
use crate::types::logprobs::prompt_logprobs;

/// An answer that is streamed.
pub struct ChatStream {
    answer: Answer,
    /// Of each continuation.
    told: Vec<Told>,
    /// Until the next chunk tells them.
    prompt_logprobs: Vec<TokenLogprobs>,
}

/// What was told of a continuation.
struct Told {
    has_role: bool,
    reader: Option<CallReader>,
}

/// A continuation in a chunk.
#[derive(Default, Serialize)]
pub struct Choice {
    index: u32,
    delta: Delta,
    logprobs: Option<Value>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_reason: Option<String>,
}

#[derive(Default, Serialize)]
struct Delta {
    /// With the first token, not before: clients measure the time to it.
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<Value>,
}

impl Choice {
    fn is_silent(&self) -> bool {
        let Delta { content, tool_calls, .. } = &self.delta;
        content.is_none()
            && tool_calls.is_empty()
            && self.logprobs.is_none()
            && self.finish_reason.is_none()
    }

    fn add(&mut self, read: Read, tools: Option<&Tools>) {
        if !read.content.is_empty() {
            self.delta.content.get_or_insert_default().push_str(&read.content);
        }
        let Some(tools) = tools else { return };
        let calls = read.calls.into_iter().map(|call| call_delta(call, tools));
        self.delta.tool_calls.extend(calls);
    }
}

/// A call as it streams: only its first delta has id and name.
fn call_delta(call: CallDelta, tools: &Tools) -> Value {
    let index = call.index;
    let mut document = match call.name {
        Some(_) => call_document(call, tools),
        None => json!({"function": {"arguments": call.arguments}}),
    };
    document["index"] = index.into();
    document
}

impl ChatStream {
    /// Nothing is told yet.
    pub fn new(answer: Answer) -> ChatStream {
        ChatStream { answer, told: Vec::new(), prompt_logprobs: Vec::new() }
    }

    fn told_of(&mut self, choice: u32) -> &mut Told {
        while self.told.len() <= choice as usize {
            self.told.push(Told { has_role: false, reader: self.answer.reader() });
        }
        &mut self.told[choice as usize]
    }
}

impl Dialect for ChatStream {
    type Choice = Choice;

    const OBJECT: &'static str = "chat.completion.chunk";

    fn head(&self) -> &Head {
        &self.answer.head
    }

    fn index(&self, _prompt: usize, choice: u32) -> u32 {
        choice
    }

    fn prompt_logprobs(&mut self, _prompt: usize, next: Vec<TokenLogprobs>) {
        self.prompt_logprobs.extend(next);
    }

    fn piece(&mut self, _prompt: usize, piece: Piece) -> Option<Choice> {
        let read = match &mut self.told_of(piece.choice).reader {
            Some(reader) => reader.push(&piece.text),
            None => Read { content: piece.text, calls: Vec::new() },
        };
        let logprobs = self.answer.logprobs(piece.logprobs.iter());
        let logprobs = logprobs.filter(|_| piece.logprobs.is_some());
        let mut choice = Choice { index: piece.choice, logprobs, ..Choice::default() };
        choice.add(read, self.answer.tools.as_ref());
        Some(choice)
    }

    fn ended(&mut self, _prompt: usize, ended: Ended, held: Option<Choice>) -> Choice {
        let (read, has_calls) = match &mut self.told_of(ended.choice).reader {
            Some(reader) => {
                let mut read = reader.push(&ended.text);
                read.add(reader.finish());
                (read, reader.has_calls())
            }
            None => (Read { content: ended.text, calls: Vec::new() }, false),
        };
        let mut choice = held.unwrap_or(Choice { index: ended.choice, ..Choice::default() });
        choice.add(read, self.answer.tools.as_ref());
        choice.finish_reason = Some(reason(ended.reason, has_calls));
        choice.stop_reason = stop_reason(ended.reason, ended.stop);
        choice
    }

    fn told(&mut self, mut choice: Choice) -> Option<Choice> {
        if choice.is_silent() {
            return None;
        }
        let told = self.told_of(choice.index);
        if !std::mem::replace(&mut told.has_role, true) {
            choice.delta.role = Some("assistant");
            if choice.delta.tool_calls.is_empty() {
                choice.delta.content.get_or_insert_default();
            }
        }
        Some(choice)
    }

    fn beside(&mut self) -> Option<Value> {
        let known = std::mem::take(&mut self.prompt_logprobs);
        (!known.is_empty()).then(|| prompt_logprobs(&self.answer.tokenizer, &known))
    }

    fn completion_tokens(&self, finish: &Finish) -> usize {
        finish.completion_tokens
    }
}
