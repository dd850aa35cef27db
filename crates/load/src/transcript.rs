//! One streamed answer, checked event by event as the clients of OpenAI's dialect would.

use serde_json::Value;

use crate::fault::Fault;
use crate::sse::Strictness;

/// Reasons that closed enums of clients know.
const FINISH_REASONS: [&str; 5] =
    ["stop", "length", "tool_calls", "content_filter", "function_call"];

/// What an answer must be like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Choices asked for (`n`).
    pub choices: usize,
    /// Chat, or plain completions.
    pub is_chat: bool,
    /// Tokens of each choice at most.
    pub max_tokens: usize,
    /// No end token ends it: exactly so many.
    pub exactly: bool,
    /// `stream_options.include_usage`.
    pub usage: bool,
    /// `stream_options.continuous_usage_stats`.
    pub continuous_usage: bool,
    /// Log-probabilities of each token: then tokens can be counted from outside.
    pub logprobs: bool,
}

/// One choice as far as it has come.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Choice {
    /// Its text.
    pub text: String,
    /// Its end.
    pub finish_reason: Option<String>,
    /// Chunks that brought text or tokens.
    pub chunks: usize,
    /// Tokens with log-probabilities.
    pub tokens: usize,
    has_role: bool,
}

/// Tokens as the server counts them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Of the prompt.
    pub prompt_tokens: usize,
    /// Generated, in all choices.
    pub completion_tokens: usize,
}

/// A streamed answer as far as it has come.
pub struct Transcript {
    wanted: Wanted,
    strictness: Strictness,
    /// Its choices.
    pub choices: Vec<Choice>,
    /// The last counts told.
    pub counts: Option<Counts>,
    has_final_usage: bool,
    is_done: bool,
    id: Option<String>,
}

impl Transcript {
    /// Nothing has come yet.
    pub fn new(wanted: Wanted, strictness: Strictness) -> Transcript {
        let choices = vec![Choice::default(); wanted.choices];
        let (counts, id) = (None, None);
        Transcript {
            wanted,
            strictness,
            choices,
            counts,
            has_final_usage: false,
            is_done: false,
            id,
        }
    }

    /// Takes the payload of one event; whether it brought generated tokens.
    ///
    /// # Errors
    /// An error event, or what breaks the dialect.
    pub fn take(&mut self, payload: &str) -> Result<bool, Fault> {
        if self.is_done {
            return Err(Fault::Malformed("an event behind [DONE]".into()));
        }
        if payload == "[DONE]" {
            self.is_done = true;
            return Ok(false);
        }
        let event: Value = serde_json::from_str(payload)
            .map_err(|error| Fault::Malformed(format!("{error} in {payload}")))?;
        if let Some(error) = event.get("error").filter(|error| !error.is_null()) {
            return Err(Fault::ErrorEvent(error.to_string()));
        }
        let Some(choices) = event["choices"].as_array() else {
            return Err(Fault::Malformed(format!("no choices in {payload}")));
        };
        if self.strictness == Strictness::Strict {
            self.check_frame(&event)?;
        }
        self.take_usage(&event["usage"], choices.is_empty())?;
        let mut has_tokens = false;
        for choice in choices {
            has_tokens |= self.take_choice(choice)?;
        }
        Ok(has_tokens)
    }

    /// The fields of a chunk around its choices.
    fn check_frame(&mut self, event: &Value) -> Result<(), Fault> {
        let object = match self.wanted.is_chat {
            true => "chat.completion.chunk",
            false => "text_completion",
        };
        if event["object"] != object {
            return Err(Fault::Malformed(format!("object is {}, not {object}", event["object"])));
        }
        let created = event["created"].as_u64().and_then(|seconds| u32::try_from(seconds).ok());
        if created.is_none() || !event["model"].is_string() {
            return Err(Fault::Malformed(format!("created or model in {event}")));
        }
        let Some(id) = event["id"].as_str() else {
            return Err(Fault::Malformed(format!("no id in {event}")));
        };
        match &self.id {
            Some(first) if first != id => {
                Err(Fault::Malformed(format!("id {id} behind chunks of {first}")))
            }
            Some(_) => Ok(()),
            None => {
                self.id = Some(id.to_string());
                Ok(())
            }
        }
    }

    fn take_usage(&mut self, usage: &Value, is_last: bool) -> Result<(), Fault> {
        let strict = self.strictness == Strictness::Strict;
        if usage.is_null() {
            return match is_last && strict {
                true => Err(Fault::Malformed("a chunk without choices and without usage".into())),
                false => Ok(()),
            };
        }
        let number = |key: &str| usage[key].as_u64().map(|count| count as usize);
        let (Some(prompt_tokens), Some(completion_tokens), Some(total)) =
            (number("prompt_tokens"), number("completion_tokens"), number("total_tokens"))
        else {
            return Err(Fault::Malformed(format!("usage is {usage}")));
        };
        if total != prompt_tokens + completion_tokens {
            return Err(Fault::Miscounted(format!("total of {usage}")));
        }
        if strict && !is_last && !self.wanted.continuous_usage {
            return Err(Fault::Malformed("usage in a chunk with choices, not asked for".into()));
        }
        let before = self.counts.unwrap_or_default();
        if strict && completion_tokens < before.completion_tokens {
            return Err(Fault::Miscounted(format!("usage fell below {before:?} to {usage}")));
        }
        // llama-server counts each choice of a plain completion by itself, in its last chunk.
        let others = if strict || is_last { 0 } else { before.completion_tokens };
        self.counts = Some(Counts { prompt_tokens, completion_tokens: completion_tokens + others });
        self.has_final_usage |= is_last || !strict;
        Ok(())
    }

    fn take_choice(&mut self, told: &Value) -> Result<bool, Fault> {
        let strict = self.strictness == Strictness::Strict;
        let index = told["index"].as_u64().unwrap_or(u64::MAX) as usize;
        let (is_chat, choices) = (self.wanted.is_chat, self.wanted.choices);
        let Some(choice) = self.choices.get_mut(index) else {
            return Err(Fault::Malformed(format!("index {} of {choices} choices", told["index"])));
        };
        let text = match is_chat {
            true => told["delta"]["content"].as_str().unwrap_or_default(),
            false => told["text"].as_str().unwrap_or_default(),
        };
        // llama-server gives plain completions the shape of a chat's.
        let shape = if is_chat || !strict { "content" } else { "tokens" };
        let tokens = told["logprobs"][shape].as_array().map_or(0, Vec::len);
        if choice.finish_reason.is_some() && !text.is_empty() {
            return Err(Fault::Malformed(format!("text behind the end of choice {index}")));
        }
        if strict && is_chat && !choice.has_role {
            if told["delta"]["role"] != "assistant" {
                return Err(Fault::Malformed(format!("the first delta has no role: {told}")));
            }
            choice.has_role = true;
        }
        choice.text.push_str(text);
        choice.tokens += tokens;
        let has_tokens = !text.is_empty() || tokens > 0;
        choice.chunks += usize::from(has_tokens);
        if let Some(reason) = told["finish_reason"].as_str() {
            if !FINISH_REASONS.contains(&reason) || choice.finish_reason.is_some() {
                return Err(Fault::Malformed(format!("finish_reason `{reason}` of {index}")));
            }
            choice.finish_reason = Some(reason.to_string());
        }
        Ok(has_tokens)
    }

    /// Checks the whole when the body has ended.
    ///
    /// # Errors
    /// What is missing, or counted wrong.
    pub fn check(&self) -> Result<(), Fault> {
        if !self.is_done {
            return Err(Fault::Truncated("no [DONE]".into()));
        }
        let unfinished = self.choices.iter().position(|choice| choice.finish_reason.is_none());
        if let Some(index) = unfinished {
            return Err(Fault::Truncated(format!("no finish_reason of choice {index}")));
        }
        let strict = self.strictness == Strictness::Strict;
        if self.wanted.usage && !self.has_final_usage {
            return Err(Fault::Truncated("no usage, although asked for".into()));
        }
        if strict && !self.wanted.usage && self.has_final_usage {
            return Err(Fault::Malformed("a chunk of usage that nobody asked for".into()));
        }
        let stopped = self.choices.iter().filter(|c| c.finish_reason.as_deref() == Some("stop"));
        self.check_counts(stopped.count())
    }

    fn check_counts(&self, stopped: usize) -> Result<(), Fault> {
        let Wanted { choices, max_tokens, exactly, logprobs, .. } = self.wanted;
        let seen: usize = self.choices.iter().map(|choice| choice.tokens).sum();
        let told = self.counts.filter(|_| self.has_final_usage).map(|c| c.completion_tokens);
        if let Some(told) = told {
            if told > choices * max_tokens {
                return Err(Fault::Miscounted(format!(
                    "{told} of {choices} x {max_tokens} tokens"
                )));
            }
            // An end token counts, but is not shown.
            if logprobs && !(seen..=seen + stopped).contains(&told) {
                return Err(Fault::Miscounted(format!("{told} told, {seen} seen")));
            }
        }
        let tokens = told.or(logprobs.then_some(seen));
        let whole = choices * max_tokens;
        match tokens.filter(|tokens| (exactly || stopped == 0) && *tokens < whole) {
            Some(tokens) => Err(Fault::Truncated(format!("{tokens} of {whole} tokens came"))),
            None => Ok(()),
        }
    }

    /// Tokens generated: as told, else as many chunks as brought some.
    pub fn completion_tokens(&self) -> usize {
        let chunks = self.choices.iter().map(|choice| choice.chunks.max(choice.tokens)).sum();
        self.counts.map_or(chunks, |counts| counts.completion_tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn wanted() -> Wanted {
        Wanted {
            choices: 1,
            is_chat: false,
            max_tokens: 2,
            exactly: true,
            usage: true,
            continuous_usage: false,
            logprobs: true,
        }
    }

    fn chunk(text: &str, finish: Value) -> String {
        let choice = json!({"index": 0, "text": text, "finish_reason": finish,
            "logprobs": {"tokens": [text]}});
        json!({"id": "a", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]})
            .to_string()
    }

    fn usage(tokens: usize) -> String {
        let usage =
            json!({"prompt_tokens": 3, "completion_tokens": tokens, "total_tokens": 3 + tokens});
        json!({"id": "a", "object": "text_completion", "created": 1, "model": "m", "choices": [],
            "usage": usage})
        .to_string()
    }

    fn read(wanted: Wanted, payloads: &[String]) -> Result<(), Fault> {
        let mut transcript = Transcript::new(wanted, Strictness::Strict);
        for payload in payloads {
            transcript.take(payload)?;
        }
        transcript.check()
    }

    #[test]
    fn a_whole_answer_passes() {
        let all =
            [chunk("a", Value::Null), chunk("b", json!("length")), usage(2), "[DONE]".to_string()];
        assert_eq!(read(wanted(), &all), Ok(()));
        for missing in 0..4 {
            let mut some = all.to_vec();
            some.remove(missing);
            assert!(read(wanted(), &some).is_err(), "without {missing}");
        }
        let unasked = Wanted { usage: false, ..wanted() };
        assert!(matches!(read(unasked, &all), Err(Fault::Malformed(_))));
    }

    #[test]
    fn wrong_counts_are_seen() {
        let start = [chunk("a", Value::Null), chunk("b", json!("length"))];
        let with = |tokens| [start.to_vec(), vec![usage(tokens), "[DONE]".into()]].concat();
        assert!(matches!(read(wanted(), &with(3)), Err(Fault::Miscounted(_))));
        let cut = [chunk("a", json!("length")), usage(1), "[DONE]".into()];
        assert!(matches!(read(wanted(), &cut), Err(Fault::Truncated(_))));
        // An end token counts, but is not shown.
        let stopped = [chunk("a", json!("stop")), usage(2), "[DONE]".into()];
        let open = Wanted { exactly: false, max_tokens: 9, ..wanted() };
        assert_eq!(read(open, &stopped), Ok(()));
    }

    #[test]
    fn errors_and_breaches_in_the_stream_are_seen() {
        let error = json!({"error": {"message": "m"}}).to_string();
        assert!(matches!(read(wanted(), &[error]), Err(Fault::ErrorEvent(_))));
        let wrong = [
            chunk("a", json!("cancelled")),
            chunk("a", Value::Null).replace("text_completion", "x"),
            chunk("a", Value::Null).replace("\"created\":1", "\"created\":5000000000"),
            "{}".to_string(),
            "{".to_string(),
        ];
        for payload in wrong {
            assert!(read(wanted(), std::slice::from_ref(&payload)).is_err(), "{payload}");
        }
        let behind = [chunk("a", json!("length")), chunk("b", Value::Null)];
        assert!(matches!(read(wanted(), &behind), Err(Fault::Malformed(_))));
    }
}
