//! What real clients tripped over (`cargo xtask clients`), so that it stays mended without them.

use reef_engine::Refusal;
use serde_json::json;

use crate::support::{Script, Server};

/// lm-eval: `token_logprob == max(top_logprobs.values())` tells whether a token was the likeliest.
#[test]
fn a_logprob_has_the_same_digits_in_both_places() {
    let server = Server::new(Script { logprob: Some(-0.273_415_6), ..Script::says("z") });
    let body = json!({"prompt": "ab", "logprobs": 1, "max_tokens": 1});
    let answer = server.post("/v1/completions", &body).json();
    let logprobs = &answer["choices"][0]["logprobs"];
    assert_eq!(logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]["z"]);
}

/// litellm tells that a prompt is too long by the words of the message, and falls back to another model.
#[test]
fn a_prompt_that_is_too_long_is_refused_in_the_words_that_clients_know() {
    let refusal = Refusal::Context { prompt: 2000, max_tokens: 1, context: 1024 };
    let server = Server::new(Script { refusal: Some(refusal), ..Script::says("z") });
    let answer = server.post("/v1/completions", &json!({"prompt": "ab", "max_tokens": 1}));
    let error = &answer.json()["error"];
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("this model's maximum context length is 1024 tokens"), "{message}");
    assert_eq!(error["code"], "context_length_exceeded");
}
