//! Log-probabilities in the shapes of OpenAI's completions and vLLM's `prompt_logprobs`.

use reef_engine::event::TokenLogprobs;
use reef_model::tokenizer::{Decode, Tokenizer};
use serde::Serialize;
use serde_json::{Map, Value, json};

/// Log-probabilities of a text's tokens: arrays of one length. The first token of a prompt has none.
#[derive(Clone, Debug, Default, Serialize)]
pub struct CompletionLogprobs {
    /// Where each token begins, in characters.
    pub text_offset: Vec<usize>,
    /// Natural logarithms; written with the digits that `top_logprobs` has, because clients compare the two
    /// to tell whether a token was the likeliest.
    pub token_logprobs: Vec<Option<f64>>,
    /// The tokens' texts.
    pub tokens: Vec<String>,
    /// Of each place the likeliest tokens, by text; the token itself always among them.
    pub top_logprobs: Vec<Option<Map<String, Value>>>,
}

impl CompletionLogprobs {
    /// Adds a token that begins at character `offset`; its alternatives as well if any were asked for.
    pub fn push(&mut self, tokens: &TokenTexts<'_>, logprobs: &TokenLogprobs, offset: usize) {
        let text = tokens.text(logprobs.id);
        let mut top = Map::new();
        top.insert(text.clone(), json!(logprobs.logprob));
        for &(id, logprob) in &logprobs.top {
            // Of tokens that look the same, the likeliest stays.
            top.entry(tokens.text(id)).or_insert(json!(logprob));
        }
        self.text_offset.push(offset);
        self.token_logprobs.push(Some(logprobs.logprob.into()));
        self.tokens.push(text);
        self.top_logprobs.push(Some(top));
    }

    /// Adds the first token of a prompt, before which nothing stands.
    pub fn push_first(&mut self, text: String) {
        self.text_offset.push(0);
        self.token_logprobs.push(None);
        self.tokens.push(text);
        self.top_logprobs.push(None);
    }
}

/// How tokens are named in log-probabilities.
#[derive(Clone, Copy)]
pub struct TokenTexts<'a> {
    /// The model's.
    pub tokenizer: &'a Tokenizer,
    /// As `token_id:N` (vLLM's `return_tokens_as_token_ids`).
    pub as_ids: bool,
}

impl TokenTexts<'_> {
    /// The name of a token.
    pub fn text(&self, id: u32) -> String {
        match self.as_ids {
            true => format!("token_id:{id}"),
            false => self.tokenizer.decode(&[id], Decode { show_special: true, continues: true }),
        }
    }
}

/// vLLM's `prompt_logprobs`: an entry for each token of the prompt, null for the first; `{id: {logprob, rank,
/// decoded_token}}`. The rank of a token that is not among the likeliest is not known.
pub fn prompt_logprobs(tokenizer: &Tokenizer, logprobs: &[TokenLogprobs]) -> Value {
    let texts = TokenTexts { tokenizer, as_ids: false };
    let entry = |token: &TokenLogprobs| {
        let rank = token.top.iter().position(|(id, _)| *id == token.id).map(|place| place + 1);
        let mut all = Map::new();
        let mut add = |id: u32, logprob: f32, rank: Option<usize>| {
            let decoded_token = texts.text(id);
            let value = json!({"logprob": logprob, "rank": rank, "decoded_token": decoded_token});
            all.insert(id.to_string(), value);
        };
        add(token.id, token.logprob, rank);
        for (place, &(id, logprob)) in token.top.iter().enumerate() {
            add(id, logprob, Some(place + 1));
        }
        Value::Object(all)
    };
    Value::Array(std::iter::once(Value::Null).chain(logprobs.iter().map(entry)).collect())
}

/// A token as the chat's `logprobs.content` has it, with its `most` likeliest alternatives.
pub fn chat_logprob(texts: &TokenTexts<'_>, token: &TokenLogprobs, most: usize) -> Value {
    let one = |id: u32, logprob: f32| {
        let bytes = texts.tokenizer.token_bytes(id);
        json!({"token": texts.text(id), "logprob": logprob, "bytes": bytes})
    };
    let mut document = one(token.id, token.logprob);
    let top = token.top.iter().take(most);
    document["top_logprobs"] = top.map(|&(id, logprob)| one(id, logprob)).collect();
    document
}
