//! The answer of `/v1/chat/completions` as one document.

use std::sync::Arc;

use axum::response::Response;
use reef_engine::FinishReason;
use reef_engine::event::TokenLogprobs;
use reef_model::tokenizer::Tokenizer;
use serde_json::{Value, json};

use super::head::Head;
use super::respond::{finish_reason, stop_reason, whole};
use crate::app::{App, Model};
use crate::generation::{Collected, Completed, Job};
use crate::tools::{CallDelta, CallReader, Tools};
use crate::types::chat::ChatRequest;
use crate::types::logprobs::{TokenTexts, chat_logprob, prompt_logprobs};

/// What all parts of an answer need to know.
pub struct Answer {
    /// Who it is.
    pub head: Head,
    /// The model's.
    pub tokenizer: Arc<Tokenizer>,
    /// Those that it may call.
    pub tools: Option<Tools>,
    /// Alternatives reported with each token.
    logprobs: Option<usize>,
    with_prompt_logprobs: bool,
    tokens_as_ids: bool,
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
        let prompt_tokens = job.request.prompt.len();
        let head = Head::new(app, "chatcmpl", prompt_tokens, body.stream_options, body.kv.as_ref());
        Answer {
            head,
            tokenizer: model.tokenizer.clone(),
            tools,
            logprobs: job.request.logprobs,
            with_prompt_logprobs: job.request.prompt_logprobs.is_some(),
            tokens_as_ids: body.return_tokens_as_token_ids.unwrap_or(false),
        }
    }

    /// What finds the calls in a continuation.
    pub fn reader(&self) -> Option<CallReader> {
        self.tools.as_ref().map(Tools::reader)
    }

    /// Log-probabilities of generated tokens, where asked for.
    pub fn logprobs<'a>(&self, tokens: impl Iterator<Item = &'a TokenLogprobs>) -> Option<Value> {
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
        let mut document = self.head.document("chat.completion", choices, &taken);
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
pub fn call_document(call: CallDelta, tools: &Tools) -> Value {
    json!({
        "id": tools.call_id(),
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    })
}

/// Why a continuation with or without calls ended.
pub fn reason(reason: FinishReason, has_calls: bool) -> &'static str {
    match finish_reason(reason) {
        "stop" if has_calls => "tool_calls",
        other => other,
    }
}
