//! `/v1/completions`.

use axum::http::StatusCode;
use reef_engine::constraint::TokenMask;
use reef_engine::event::{Pause, PauseKind, PauseReason};
use reef_engine::{Branches, FinishReason, Refusal};
use reef_kv::Fidelity;
use reef_server::Settings;
use serde_json::{Value, json};

use crate::support::{END, Script, Server};

const PATH: &str = "/v1/completions";

fn text_of(events: &[Value], index: usize) -> String {
    let choices = events.iter().flat_map(|event| event["choices"].as_array().unwrap());
    let texts = choices.filter(|choice| choice["index"] == index);
    texts.map(|choice| choice["text"].as_str().unwrap()).collect()
}

#[test]
fn a_whole_answer_has_text_reason_and_usage() {
    let server = Server::new(Script::says("a reef"));
    let answer = server.post(PATH, &json!({"model": "tiny", "prompt": "ab", "max_tokens": 9}));
    assert_eq!(answer.status, StatusCode::OK);
    let document = answer.json();
    assert_eq!(document["object"], "text_completion");
    assert_eq!(document["choices"][0]["text"], "a reef");
    assert_eq!(document["choices"][0]["finish_reason"], "stop");
    assert!(document["choices"][0]["stop_reason"].is_null());
    let usage = &document["usage"];
    assert_eq!(usage["prompt_tokens"], 2);
    assert_eq!(usage["completion_tokens"], 6);
    assert_eq!(usage["total_tokens"], 8);
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 0);
    assert_eq!(usage["kv"]["fidelity"], "evict");
    assert!(!answer.headers.contains_key("x-reef-degraded"));
}

#[test]
fn a_stream_ends_in_the_chunk_of_its_last_token_then_usage_then_done() {
    let server = Server::new(Script { ends: false, ..Script::says("water") });
    let body = json!({
        "prompt": [1, 2, 3], "stream": true, "stream_options": {"include_usage": true},
        "max_tokens": 5,
    });
    let events = server.post(PATH, &body).events();
    assert_eq!(text_of(&events, 0), "water");
    assert_eq!(events.len(), 6, "a chunk a token, and the usage");
    assert_eq!(events[4]["choices"][0]["finish_reason"], "length");
    assert!(events[..4].iter().all(|event| event["choices"][0]["finish_reason"].is_null()));
    assert_eq!(events[5]["choices"], json!([]));
    assert_eq!(events[5]["usage"]["completion_tokens"], 5);
    assert!(events[..5].iter().all(|event| event.get("usage").is_none()));
}

#[test]
fn usage_comes_with_every_chunk_where_asked_for() {
    let server = Server::new(Script::says("xy"));
    let options = json!({"include_usage": true, "continuous_usage_stats": true});
    let body = json!({"prompt": "p", "stream": true, "stream_options": options});
    let events = server.post(PATH, &body).events();
    let counts: Vec<u64> =
        events.iter().map(|event| event["usage"]["completion_tokens"].as_u64().unwrap()).collect();
    assert_eq!(counts, [1, 2, 2]);
}

#[test]
fn a_stop_string_ends_the_text_before_it_and_the_engine_hears_of_it() {
    let server = Server::new(Script::says("one. two. three"));
    let body = json!({"prompt": "p", "stop": [". t"], "max_tokens": 99});
    let document = server.post(PATH, &body).json();
    assert_eq!(document["choices"][0]["text"], "one");
    assert_eq!(document["choices"][0]["finish_reason"], "stop");
    assert_eq!(document["choices"][0]["stop_reason"], ". t");
    assert_eq!(document["usage"]["completion_tokens"], 6, "what made the text and its stop");
    assert_eq!(*server.door.ended.lock().unwrap(), [(0, FinishReason::Stop)]);
    let included = json!({
        "prompt": "p", "stop": ". t", "include_stop_str_in_output": true, "max_tokens": 99,
    });
    assert_eq!(server.post(PATH, &included).json()["choices"][0]["text"], "one. t");
}

#[test]
fn of_several_continuations_each_stops_for_itself() {
    let texts = ["one. two", "three"].map(String::from).to_vec();
    let server = Server::new(Script { texts, ends: true, ..Script::default() });
    let body = json!({"prompt": "p", "n": 2, "stop": ".", "max_tokens": 99});
    let choices = server.post(PATH, &body).json()["choices"].clone();
    assert_eq!((&choices[0]["text"], &choices[1]["text"]), (&json!("one"), &json!("three")));
    assert_eq!(*server.door.ended_branches.lock().unwrap(), [(0, 0)]);
    assert!(server.door.ended.lock().unwrap().is_empty());
}

#[test]
fn characters_are_never_cut() {
    let server = Server::new(Script::says("é🦀"));
    let events = server.post(PATH, &json!({"prompt": "p", "stream": true})).events();
    assert_eq!(text_of(&events, 0), "é🦀");
    let texts: Vec<&str> =
        events.iter().map(|event| event["choices"][0]["text"].as_str().unwrap()).collect();
    assert_eq!(texts, ["é", "🦀"]);
}

#[test]
fn several_prompts_and_continuations_are_numbered_prompt_first() {
    let script = Script { texts: vec!["a".into(), "b".into()], ends: true, ..Script::default() };
    let server = Server::new(script);
    let body = json!({"prompt": ["x", "yy"], "n": 2});
    let document = server.post(PATH, &body).json();
    let choices = document["choices"].as_array().unwrap();
    let told: Vec<(u64, &str)> = choices
        .iter()
        .map(|one| (one["index"].as_u64().unwrap(), one["text"].as_str().unwrap()))
        .collect();
    assert_eq!(told, [(0, "a"), (1, "b"), (2, "a"), (3, "b")]);
    assert_eq!(document["usage"]["prompt_tokens"], 3);
    assert_eq!(document["usage"]["kv"].as_array().unwrap().len(), 2);
    let streamed = json!({"prompt": ["x", "yy"], "n": 2, "stream": true});
    let events = server.post(PATH, &streamed).events();
    let texts: Vec<String> = (0..4).map(|index| text_of(&events, index)).collect();
    assert_eq!(texts, ["a", "b", "a", "b"]);
    let asked = server.door.asked.lock().unwrap();
    assert_eq!(asked[0].branches, Branches::Sample { n: 2, best_of: 2 });
}

#[test]
fn echoed_logprobs_cover_prompt_and_answer() {
    let server = Server::new(Script::says("cd"));
    let body = json!({"prompt": "ab", "echo": true, "logprobs": 1, "max_tokens": 2});
    let document = server.post(PATH, &body).json();
    let choice = &document["choices"][0];
    assert_eq!(choice["text"], "abcd");
    let logprobs = &choice["logprobs"];
    assert_eq!(logprobs["tokens"], json!(["a", "b", "c", "d"]));
    assert_eq!(logprobs["text_offset"], json!([0, 1, 2, 3]));
    assert_eq!(logprobs["token_logprobs"], json!([null, -2.0, -0.5, -0.5]));
    assert!(logprobs["top_logprobs"][0].is_null());
    assert_eq!(logprobs["top_logprobs"][2], json!({"c": -0.5, "a": -1.0}));
    // Nothing but the prompt.
    let body = json!({"prompt": "ab", "echo": true, "logprobs": 1, "max_tokens": 0});
    let document = server.post(PATH, &body).json();
    assert_eq!(document["choices"][0]["text"], "ab");
    assert_eq!(document["choices"][0]["logprobs"]["tokens"], json!(["a", "b"]));
    assert_eq!(document["usage"]["completion_tokens"], 0);
    // The same as a stream.
    let body =
        json!({"prompt": "ab", "echo": true, "logprobs": 1, "max_tokens": 2, "stream": true});
    let events = server.post(PATH, &body).events();
    assert_eq!(text_of(&events, 0), "abcd");
    assert_eq!(events[0]["choices"][0]["logprobs"]["tokens"], json!(["a", "b"]));
    assert_eq!(events[1]["choices"][0]["logprobs"]["text_offset"], json!([2]));
}

/// `text_offset` is a place in the text, whatever a token shows when it comes.
#[test]
fn offsets_are_places_in_the_text() {
    let server = Server::new(Script::says("one. tw\u{e9}!"));
    let offsets = |body: Value| {
        let choice = server.post(PATH, &body).json()["choices"][0].take();
        choice["logprobs"]["text_offset"].clone()
    };
    let held = json!({"prompt": "p", "logprobs": 0, "max_tokens": 9, "stop": ". two"});
    assert_eq!(offsets(held), json!([0, 1, 2, 3, 4, 5, 6, 7, 7]), "held back is not later");
    let echoed = json!({"prompt": "\u{e9}\u{e9}", "logprobs": 0, "max_tokens": 2, "echo": true});
    assert_eq!(offsets(echoed), json!([0, 0, 1, 1, 2, 3]), "halves of a character are one place");
}

#[test]
fn stop_strings_wait_for_the_least_tokens() {
    let server = Server::new(Script::says("one. two. three"));
    let text = |least: usize| {
        let body = json!({"prompt": "p", "stop": ". t", "min_tokens": least, "max_tokens": 99});
        server.post(PATH, &body).json()["choices"][0]["text"].clone()
    };
    assert_eq!(text(3), "one");
    assert_eq!(text(4), "one. two");
    assert_eq!(text(50), "one. two. three");
}

#[test]
fn fields_reach_the_engine() {
    let server = Server::new(Script::says("x"));
    let body = json!({
        "prompt": [7, 8, 9], "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": -1, "seed": -1,
        "min_p": 0.1, "presence_penalty": 1.0, "frequency_penalty": -1.0, "repetition_penalty": 1.1,
        "logit_bias": {"65": -100}, "min_tokens": 2, "stop_token_ids": [3], "priority": 4,
        "kv": {"fidelity": "int8", "deadline_ms": 2, "keep": [[0, 2]]},
        "unknown_to_us": {"deep": [1]}, "user": null, "logprobs": null, "best_of": null,
    });
    assert_eq!(server.post(PATH, &body).status, StatusCode::OK);
    let asked = server.door.asked.lock().unwrap();
    let request = &asked[0];
    assert_eq!(request.prompt, [7, 8, 9]);
    assert_eq!(request.max_tokens, Some(5));
    assert_eq!(request.fidelity, Fidelity::Int8);
    assert_eq!(request.priority, -4, "vLLM's lower goes first");
    assert_eq!(request.deadline_us, Some(3000));
    assert_eq!((request.keep.len(), request.keep[0].clone()), (1, 0..2));
    assert_eq!(request.end_ids, [END, 3]);
    let sampling = &request.sampling;
    assert_eq!((sampling.temperature, sampling.top_k, sampling.seed), (0.5, 0, u64::MAX));
    assert_eq!(sampling.logit_bias, [(65, -100.0)]);
    assert_eq!(sampling.min_tokens, 2);
    drop(asked);
    let body = json!({"prompt": "a", "ignore_eos": true, "kv": {"priority": 3}, "priority": 9});
    assert_eq!(server.post(PATH, &body).status, StatusCode::OK);
    let request = &server.door.asked.lock().unwrap()[1];
    assert!(request.end_ids.is_empty());
    assert_eq!((request.priority, request.max_tokens), (3, Some(16)));
}

#[test]
fn what_is_wrong_is_named() {
    let server = Server::new(Script::says("x"));
    let cases = [
        (json!({"prompt": "a", "stop": 3}), "stop"),
        (json!({"prompt": {"a": 1}}), "prompt"),
        (json!({"prompt": []}), "prompt"),
        (json!({"prompt": [300]}), "prompt"),
        (json!({"prompt": "a", "temperature": -1}), "temperature"),
        (json!({"prompt": "a", "top_k": -2}), "top_k"),
        (json!({"prompt": "a", "n": 0}), "n"),
        (json!({"prompt": "a", "n": 1e30}), "n"),
        (json!({"prompt": "a", "n": 3, "best_of": 2}), "best_of"),
        (json!({"prompt": "a", "logprobs": 21}), "logprobs"),
        (json!({"prompt": "a", "max_tokens": 0}), "max_tokens"),
        (json!({"prompt": "a", "suffix": "b"}), "suffix"),
        (json!({"prompt": "a", "logit_bias": {"x": 1}}), "logit_bias"),
        (json!({"prompt": "a", "kv": {"fidelity": "int3"}}), "kv.fidelity"),
        (json!({"prompt": "a", "kv": {"keep": [[1, 2]]}}), "kv.keep"),
        (json!({"prompt": "a", "best_of": 2, "stream": true}), "stream"),
        (json!({"prompt": "a", "model": "other"}), "model"),
    ];
    for (body, field) in cases {
        let answer = server.post(PATH, &body);
        assert!(answer.status.is_client_error(), "{body}");
        let error = &answer.json()["error"];
        assert_eq!(error["param"], field, "{body}: {error}");
        assert!(error["message"].as_str().unwrap().contains(field), "{body}: {error}");
        assert!(error["code"].is_null() || error["code"].is_string());
    }
    assert!(server.door.asked.lock().unwrap().is_empty());
    for body in ["", "{", "[]", "null", "{\"prompt\":\"\\ud800\"}", "{\"prompt\":\"a\"} x"] {
        assert_eq!(server.post_text(PATH, body).status, StatusCode::BAD_REQUEST, "{body}");
    }
    assert_eq!(
        server.post(PATH, &json!({"prompt": "a", "model": "other"})).status,
        StatusCode::NOT_FOUND
    );
}

#[test]
fn a_structure_constrains_every_prompt_and_is_checked_first() {
    let server = Server::new(Script::says("7"));
    let body = json!({"prompt": ["a", "b"], "guided_regex": "[0-9]"});
    assert_eq!(server.post(PATH, &body).status, StatusCode::OK);
    for request in server.door.asked.lock().unwrap().iter_mut() {
        let mut mask = TokenMask::default();
        mask.reset(257);
        request.constraint.as_mut().unwrap().allow(&mut mask);
        let allowed: Vec<u32> = (0..257).filter(|token| mask.contains(*token)).collect();
        assert_eq!(allowed, (u32::from(b'0')..=u32::from(b'9')).collect::<Vec<u32>>());
    }
    for (field, value) in [("guided_regex", json!("(")), ("guided_json", json!("{"))] {
        let answer = server.post(PATH, &json!({"prompt": "a", field: value}));
        assert_eq!(answer.status, StatusCode::BAD_REQUEST);
        assert_eq!(answer.json()["error"]["param"], field);
    }
    let plain = json!({"prompt": "a", "response_format": {"type": "text"}});
    assert_eq!(server.post(PATH, &plain).status, StatusCode::OK);
    assert!(server.door.asked.lock().unwrap()[2].constraint.is_none());
}

#[test]
fn refusals_of_the_engine_come_before_the_stream() {
    let full = Refusal::QueueFull { waiting: 4, most: 4 };
    let server = Server::new(Script { refusal: Some(full), ..Script::default() });
    for stream in [false, true] {
        let answer = server.post(PATH, &json!({"prompt": "a", "stream": stream}));
        assert_eq!(answer.status, StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(answer.headers["retry-after"], "1");
        assert_eq!(answer.json()["error"]["code"], "queue_full");
    }
    assert!(server.door.ended.lock().unwrap().is_empty(), "it was never let in");
}

#[test]
fn what_was_degraded_is_told_in_a_header_or_the_last_chunk() {
    let server = Server::new(Script { dropped_tokens: 12.5, ..Script::says("abc") });
    let answer = server.post(PATH, &json!({"prompt": "a"}));
    assert_eq!(answer.headers["x-reef-degraded"], "dropped=13");
    let events = server.post(PATH, &json!({"prompt": "a", "stream": true})).events();
    assert_eq!(events.last().unwrap()["x_reef_degraded"], "dropped=13");
    assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "stop");
}

#[test]
fn pauses_are_comments_only_where_asked_for() {
    let pause = Pause {
        branch: 0,
        step: 3,
        kind: PauseKind::Wait,
        reason: PauseReason::Demand,
        blocks: 1,
        bytes: 0,
        lost_tokens: 0,
    };
    let server = Server::new(Script { pause: Some(pause), ..Script::says("abc") });
    let silent = server.post(PATH, &json!({"prompt": "a", "stream": true}));
    assert!(!silent.body.contains("\n: "));
    let body = json!({"prompt": "a", "stream": true, "kv": {"comments": true}});
    let told = server.post(PATH, &body);
    let after_the_first = "}]}\n\n: paused: wait (demand)\n\n: resumed\n\ndata: ";
    assert!(told.body.contains(after_the_first), "{}", told.body);
    assert_eq!(text_of(&told.events(), 0), "abc");
}

#[test]
fn a_client_that_goes_away_ends_its_request() {
    let server = Server::new(Script { hangs: true, ..Script::says("abc") });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let body = json!({"prompt": "a", "stream": true});
        let response = server.start(PATH, &body).await;
        drop(response);
    });
    assert_eq!(*server.door.ended.lock().unwrap(), [(0, FinishReason::Cancelled)]);
}

#[test]
fn no_request_permits_more_than_the_server_does() {
    let settings = Settings { fidelity: Fidelity::Int4, ..Settings::new("tiny") };
    let server = Server::with(Script::says("x"), settings);
    let asks = |fidelity: &str| json!({"prompt": "a", "kv": {"fidelity": fidelity}});
    let refused = server.post(PATH, &asks("evict"));
    assert_eq!(refused.status, StatusCode::BAD_REQUEST);
    assert_eq!(refused.json()["error"]["param"], "kv.fidelity");
    assert_eq!(server.post(PATH, &asks("exact")).status, StatusCode::OK);
    assert_eq!(server.post(PATH, &json!({"prompt": "a"})).status, StatusCode::OK);
    let asked = server.door.asked.lock().unwrap();
    assert_eq!([asked[0].fidelity, asked[1].fidelity], [Fidelity::Exact, Fidelity::Int4]);
}
