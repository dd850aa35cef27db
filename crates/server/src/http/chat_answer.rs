//! The answer of `/v1/chat/completions`, whole and streamed.

use std::sync::Arc;

use axum::response::Response;
use reef_engine::event::TokenLogprobs;
use reef_engine::{FinishReason, Usage};
use reef_model::tokenizer::Tokenizer;
use serde::Serialize;
use serde_json::{Value, json};

use super::respond::{finish_reason, new_id, stop_reason, whole};
use crate::app::{App, Model, unix_time};
use crate::generation::{Collected, Completed, Ended, Job, Piece, Update};
use crate::sse::{Events, Narrator};
use crate::tools::{CallDelta, CallReader, Read, Tools};
use crate::types::chat::ChatRequest;
use crate::types::logprobs::{TokenTexts, chat_logprob, prompt_logprobs};
use crate::usage::{degraded_header, usage_document};

/// What all parts of an answer need to know.
pub struct Answer {
    id: String,
    created: u64,
    model: String,
    tokenizer: Arc<Tokenizer>,
    tools: Option<Tools>,
    /// Alternatives reported with each token.
    logprobs: Option<usize>,
    with_prompt_logprobs: bool,
    tokens_as_ids: bool,
    prompt_tokens: usize,
    stream_usage: bool,
    continuous_usage: bool,
    comments: bool,
}

impl Answer {
    /// The answer to `body`, which became `job` and shows `tools`.
    pub fn new(
        app: &App,
        model: &Model,
        body: &ChatRequest,
        job: &Job,
        tools: Option<Tools>,
    ) -> Answer {
        let stream = body.stream_options.unwrap_or_default();
        Answer {
            id: new_id("chatcmpl"),
            created: unix_time(),
            model: app.model_name().into(),
            tokenizer: model.tokenizer.clone(),
            tools,
            logprobs: job.request.logprobs,
            with_prompt_logprobs: job.request.prompt_logprobs.is_some(),
            tokens_as_ids: body.return_tokens_as_token_ids.unwrap_or(false),
            prompt_tokens: job.request.prompt.len(),
            stream_usage: stream.includes_usage(),
            continuous_usage: stream.is_continuous(),
            comments: body.kv.as_ref().and_then(|kv| kv.comments).unwrap_or(false),
        }
    }

    fn reader(&self) -> Option<CallReader> {
        self.tools.as_ref().map(Tools::reader)
    }

    fn logprobs<'a>(&self, tokens: impl Iterator<Item = &'a TokenLogprobs>) -> Option<Value> {
        let texts = TokenTexts { tokenizer: &self.tokenizer, as_ids: self.tokens_as_ids };
        let most = self.logprobs?;
        let content = tokens.map(|token| chat_logprob(&texts, token, most));
        Some(json!({"content": content.collect::<Vec<Value>>(), "refusal": null}))
    }

    /// The document of an answer that is not streamed.
    pub fn whole(&self, collected: Collected) -> Response {
        let choices = collected.completed.iter().enumerate();
        let choices: Vec<Value> = choices.map(|(index, one)| self.choice(index, one)).collect();
        let taken = [(collected.usage, collected.completion_tokens)];
        let mut document = json!({
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "usage": usage_document(&taken),
        });
        if self.with_prompt_logprobs {
            document["prompt_logprobs"] =
                prompt_logprobs(&self.tokenizer, &collected.prompt_logprobs);
        }
        whole(document, taken.iter().map(|(usage, _)| usage))
    }

    fn choice(&self, index: usize, completed: &Completed) -> Value {
        let mut message = json!({"role": "assistant", "content": completed.text, "refusal": null});
        let mut has_calls = false;
        if let (Some(mut reader), Some(tools)) = (self.reader(), &self.tools) {
            let mut read = reader.push(&completed.text);
            read.add(reader.finish());
            has_calls = reader.has_calls();
            let is_silent = has_calls && read.content.is_empty();
            message["content"] = if is_silent { Value::Null } else { read.content.into() };
            if has_calls {
                let calls = read.calls.into_iter().map(|call| call_document(call, tools));
                message["tool_calls"] = calls.collect();
            }
        }
        json!({
            "index": index,
            "message": message,
            "logprobs": self.logprobs(completed.logprobs.iter()),
            "finish_reason": reason(completed.reason, has_calls),
            "stop_reason": stop_reason(completed.reason, completed.stop.clone()),
        })
    }
}

/// A call, whole or the beginning of it.
fn call_document(call: CallDelta, tools: &Tools) -> Value {
    json!({
        "id": tools.call_id(),
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    })
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

fn reason(reason: FinishReason, has_calls: bool) -> &'static str {
    match finish_reason(reason) {
        "stop" if has_calls => "tool_calls",
        other => other,
    }
}

/// A chunk of a stream.
#[derive(Serialize)]
struct Chunk<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: &'a [ChunkChoice],
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    x_reef_degraded: Option<String>,
}

#[derive(Default, Serialize)]
struct ChunkChoice {
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

impl ChunkChoice {
    fn is_silent(&self) -> bool {
        let Delta { content, tool_calls, .. } = &self.delta;
        content.is_none()
            && tool_calls.is_empty()
            && self.logprobs.is_none()
            && self.finish_reason.is_none()
    }
}

/// Writes the answer as a stream.
pub struct Narration {
    answer: Answer,
    /// What the next chunk will say: the end of a continuation joins its last token, and what was degraded
    /// joins the end.
    held: Option<ChunkChoice>,
    /// Of each continuation.
    told: Vec<Told>,
    /// Until the first chunk tells them.
    prompt_logprobs: Vec<TokenLogprobs>,
    tokens: usize,
    usage: Option<(Usage, usize)>,
}

/// What was told of a continuation.
struct Told {
    has_role: bool,
    reader: Option<CallReader>,
}

impl Narration {
    /// Nothing is written yet.
    pub fn new(answer: Answer) -> Narration {
        Narration {
            answer,
            held: None,
            told: Vec::new(),
            prompt_logprobs: Vec::new(),
            tokens: 0,
            usage: None,
        }
    }

    fn told(&mut self, choice: u32) -> &mut Told {
        while self.told.len() <= choice as usize {
            self.told.push(Told { has_role: false, reader: self.answer.reader() });
        }
        &mut self.told[choice as usize]
    }

    /// Adds what was read to the delta that is held.
    fn add(&self, held: &mut ChunkChoice, read: Read) {
        if !read.content.is_empty() {
            held.delta.content.get_or_insert_default().push_str(&read.content);
        }
        let Some(tools) = &self.answer.tools else { return };
        let calls = read.calls.into_iter().map(|call| call_delta(call, tools));
        held.delta.tool_calls.extend(calls);
    }

    fn piece(&mut self, piece: Piece, events: &mut Events) {
        self.write_held(None, events);
        self.tokens += 1;
        let read = match &mut self.told(piece.choice).reader {
            Some(reader) => reader.push(&piece.text),
            None => Read { content: piece.text, calls: Vec::new() },
        };
        let logprobs = self.answer.logprobs(piece.logprobs.iter());
        let logprobs = logprobs.filter(|_| piece.logprobs.is_some());
        let mut held = ChunkChoice { index: piece.choice, logprobs, ..ChunkChoice::default() };
        self.add(&mut held, read);
        self.held = Some(held);
    }

    fn ended(&mut self, ended: Ended, events: &mut Events) {
        if self.held.as_ref().is_none_or(|held| held.index != ended.choice) {
            self.write_held(None, events);
        }
        let (read, has_calls) = match &mut self.told(ended.choice).reader {
            Some(reader) => {
                let mut read = reader.push(&ended.text);
                read.add(reader.finish());
                (read, reader.has_calls())
            }
            None => (Read { content: ended.text, calls: Vec::new() }, false),
        };
        let fresh = ChunkChoice { index: ended.choice, ..ChunkChoice::default() };
        let mut held = self.held.take().unwrap_or(fresh);
        self.add(&mut held, read);
        held.finish_reason = Some(reason(ended.reason, has_calls));
        held.stop_reason = stop_reason(ended.reason, ended.stop);
        self.held = Some(held);
    }

    /// Writes what is held.
    fn write_held(&mut self, degraded: Option<String>, events: &mut Events) {
        let Some(mut held) = self.held.take().filter(|held| !held.is_silent()) else { return };
        let told = self.told(held.index);
        if !std::mem::replace(&mut told.has_role, true) {
            held.delta.role = Some("assistant");
            if held.delta.tool_calls.is_empty() {
                held.delta.content.get_or_insert_default();
            }
        }
        let usage = self.answer.continuous_usage.then(|| self.usage_so_far());
        self.write_chunk(&[held], usage, degraded, events);
    }

    fn write_chunk(
        &mut self,
        choices: &[ChunkChoice],
        usage: Option<Value>,
        x_reef_degraded: Option<String>,
        events: &mut Events,
    ) {
        let known = std::mem::take(&mut self.prompt_logprobs);
        let Answer { id, created, model, tokenizer, .. } = &self.answer;
        events.push(&Chunk {
            id,
            object: "chat.completion.chunk",
            created: *created,
            model,
            choices,
            usage,
            prompt_logprobs: (!known.is_empty()).then(|| prompt_logprobs(tokenizer, &known)),
            x_reef_degraded,
        });
    }

    fn usage_so_far(&self) -> Value {
        let (prompt, completion) = (self.answer.prompt_tokens, self.tokens);
        json!({
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        })
    }
}

impl Narrator for Narration {
    fn write(&mut self, _index: usize, update: Update, events: &mut Events) {
        match update {
            Update::Admitted { .. } => {}
            Update::PromptLogprobs(more) => self.prompt_logprobs.extend(more),
            Update::Piece(piece) => self.piece(piece, events),
            Update::Ended(ended) => self.ended(ended, events),
            Update::Paused(pause) if self.answer.comments => {
                self.write_held(None, events);
                let (kind, reason) = (pause.kind.name(), pause.reason.name());
                events.push_comment(&format!("paused: {kind} ({reason})"));
            }
            Update::Resumed if self.answer.comments => events.push_comment("resumed"),
            Update::Paused(_) | Update::Resumed => {}
            Update::Failed(error) => {
                self.write_held(None, events);
                events.push_error(&error);
            }
            Update::Finished(finish) => {
                self.write_held(degraded_header(finish.usage()), events);
                self.usage = Some((finish.outcome.usage, finish.completion_tokens));
            }
        }
    }

    fn flush(&mut self, events: &mut Events) {
        // An end waits for what was degraded, which comes next.
        if self.held.as_ref().is_some_and(|held| held.finish_reason.is_none()) {
            self.write_held(None, events);
        }
    }

    fn end(&mut self, events: &mut Events) {
        self.write_held(None, events);
        if let Some(taken) = self.usage.take().filter(|_| self.answer.stream_usage) {
            self.write_chunk(&[], Some(usage_document(&[taken])), None, events);
        }
    }
}
