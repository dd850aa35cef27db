//! What real clients tripped over (`cargo xtask clients`), so that it stays mended without them.

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
