//! `/inference/v1/generate`.

use axum::http::StatusCode;
use serde_json::json;

use crate::support::{Script, Server};

const PATH: &str = "/inference/v1/generate";

#[test]
fn token_ids_come_back_whole_and_streamed() {
    let server = Server::new(Script::says("abc"));
    let body =
        json!({"request_id": "r1", "token_ids": [1, 2], "sampling_params": {"max_tokens": 2}});
    let document = server.post(PATH, &body).json();
    assert_eq!(document["request_id"], "r1");
    assert_eq!(document["choices"][0]["token_ids"], json!([97, 98]));
    assert_eq!(document["choices"][0]["finish_reason"], "length");
    let body = json!({
        "token_ids": [1], "sampling_params": {"logprobs": 1}, "stream": true,
        "stream_options": {"include_usage": true},
    });
    let events = server.post(PATH, &body).events();
    let ids: Vec<u64> = events
        .iter()
        .flat_map(|event| event["choices"].as_array().unwrap())
        .flat_map(|choice| choice["token_ids"].as_array().unwrap())
        .map(|id| id.as_u64().unwrap())
        .collect();
    assert_eq!(ids, [97, 98, 99]);
    let content = &events[0]["choices"][0]["logprobs"]["content"][0];
    assert_eq!(content["token"], "token_id:97");
    assert_eq!(content["bytes"], json!([97]));
    assert_eq!(events.last().unwrap()["usage"]["completion_tokens"], 3);
}

#[test]
fn unknown_tokens_are_refused() {
    let server = Server::new(Script::says("abc"));
    let answer = server.post(PATH, &json!({"token_ids": [1, 999]}));
    assert_eq!(answer.status, StatusCode::BAD_REQUEST);
    assert_eq!(answer.json()["error"]["param"], "token_ids");
}
