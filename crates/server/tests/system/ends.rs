//! How streams end, whenever the engine's thread and the server's happen to run: what is asked in the middle of
//! what the engine tells at once gets all of it or nothing.

use std::pin::Pin;
use std::task::Poll;

use axum::body::Body;
use http_body::Body as _;
use serde_json::{Value, json};

use crate::support::{Script, Server};

const TEMPLATE: &str = "{{ messages[0].content }}";

/// What is known of a stream now.
async fn known(body: &mut Body) -> Vec<Value> {
    let mut text = Vec::new();
    std::future::poll_fn(|context| {
        while let Poll::Ready(Some(frame)) = Pin::new(&mut *body).poll_frame(context) {
            text.extend_from_slice(&frame.unwrap().into_data().unwrap());
        }
        Poll::Ready(())
    })
    .await;
    let text = String::from_utf8(text).unwrap();
    let data = text.split_terminator("\n\n").filter_map(|event| event.strip_prefix("data: "));
    data.filter(|data| *data != "[DONE]").map(|data| serde_json::from_str(data).unwrap()).collect()
}

/// The index, text and reason of each choice.
fn said(events: &[Value]) -> Vec<(u64, &str, Option<&str>)> {
    let choices = events.iter().flat_map(|event| event["choices"].as_array().unwrap());
    let said = choices.map(|choice| {
        let text = choice["text"].as_str().or(choice["delta"]["content"].as_str());
        let index = choice["index"].as_u64().unwrap();
        (index, text.unwrap_or_default(), choice["finish_reason"].as_str())
    });
    said.collect()
}

/// What is known of the answer to `body`, merged into a request of either kind, before and after the end of
/// the engine's requests.
fn before_and_after(script: &Script, path: &str, body: &Value) -> [Vec<Value>; 2] {
    let script = Script { hangs: true, ..script.clone() };
    let server = Server::chatting(script, TEMPLATE);
    let mut body = body.clone();
    body["stream"] = true.into();
    if path.contains("chat") {
        body["messages"] = json!([{"role": "user", "content": "hi"}]);
    } else if body.get("prompt").is_none() {
        body["prompt"] = "hi".into();
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut stream = server.start(path, &body).await.into_body();
        let before = known(&mut stream).await;
        server.door.finish();
        [before, known(&mut stream).await]
    })
}

#[test]
fn a_last_token_waits_for_its_end() {
    let script = Script { ends: false, ..Script::says("abc") };
    for path in ["/v1/completions", "/v1/chat/completions"] {
        let [before, after] = before_and_after(&script, path, &json!({"max_tokens": 3}));
        assert_eq!(said(&before), [(0, "a", None), (0, "b", None)], "{path}");
        assert_eq!(said(&after), [(0, "c", Some("length"))], "{path}");
    }
}

#[test]
fn a_token_that_ends_nothing_waits_for_nothing() {
    let [before, after] =
        before_and_after(&Script::says("ab"), "/v1/completions", &json!({"max_tokens": 9}));
    assert_eq!(said(&before), [(0, "a", None), (0, "b", None)]);
    assert_eq!(said(&after), [(0, "", Some("stop"))]);
}

#[test]
fn each_continuation_ends_for_itself_and_the_last_with_what_was_degraded() {
    let texts = ["ab", "cde"].map(String::from).to_vec();
    let script = Script { texts, ends: true, dropped_tokens: 2.0, ..Script::default() };
    for path in ["/v1/completions", "/v1/chat/completions"] {
        let body = json!({"n": 2, "max_tokens": 2});
        let [before, after] = before_and_after(&script, path, &body);
        assert_eq!(
            said(&before),
            [(0, "a", None), (0, "b", Some("stop")), (1, "c", None)],
            "{path}"
        );
        assert_eq!(said(&after), [(1, "d", Some("length"))], "{path}");
        assert!(before.iter().all(|event| event.get("x_reef_degraded").is_none()));
        assert_eq!(after[0]["x_reef_degraded"], "dropped=2");
    }
}

#[test]
fn a_stop_string_ends_one_continuation_at_once_and_the_last_with_the_request() {
    let texts = ["a.", "b."].map(String::from).to_vec();
    let script = Script { texts, ends: true, ..Script::default() };
    let body = json!({"n": 2, "max_tokens": 9, "stop": "."});
    let [before, after] = before_and_after(&script, "/v1/completions", &body);
    assert_eq!(said(&before), [(0, "a", None), (0, "", Some("stop")), (1, "b", None)]);
    assert_eq!(said(&after), [(1, "", Some("stop"))]);
}

#[test]
fn of_several_prompts_each_ends_in_its_last_chunk() {
    let script = Script { ends: false, dropped_tokens: 1.0, ..Script::says("ab") };
    let body = json!({"prompt": ["x", "y"], "max_tokens": 2});
    let [before, after] = before_and_after(&script, "/v1/completions", &body);
    let mut first = said(&before);
    first.sort();
    assert_eq!(first, [(0, "a", None), (1, "a", None)]);
    let mut last = said(&after);
    last.sort();
    assert_eq!(last, [(0, "b", Some("length")), (1, "b", Some("length"))]);
    assert!(after.iter().all(|event| event["x_reef_degraded"] == "dropped=1"));
}
