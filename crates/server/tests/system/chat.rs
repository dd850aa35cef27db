//! `/v1/chat/completions`.

use axum::http::StatusCode;
use reef_engine::Refusal;
use reef_engine::constraint::TokenMask;
use serde_json::{Value, json};

use crate::support::{END, Script, Server};

const PATH: &str = "/v1/chat/completions";

/// Roles in letters, and no tools.
const PLAIN: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}\
                     {% if add_generation_prompt %}<a>{% endif %}{{ mood }}";

/// Hermes' tags.
const HERMES: &str = "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}\
                      {% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls %}\
                      {{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}<a>";

fn hello() -> Value {
    json!([{"role": "user", "content": "hi"}])
}

fn tools() -> Value {
    json!([{"type": "function", "function": {"name": "f", "parameters": {
        "type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}}}])
}

fn prompt_of(server: &Server) -> String {
    let asked = server.door.asked.lock().unwrap();
    let bytes = asked.last().unwrap().prompt.iter();
    String::from_utf8(bytes.map(|id| u8::try_from(*id).unwrap()).collect()).unwrap()
}

fn choices(events: &[Value]) -> Vec<&Value> {
    events.iter().flat_map(|event| event["choices"].as_array().unwrap()).collect()
}

fn content(events: &[Value], index: usize) -> String {
    let of = choices(events).into_iter().filter(|choice| choice["index"] == index);
    of.filter_map(|choice| choice["delta"]["content"].as_str()).collect()
}

#[test]
fn a_whole_answer_has_message_reason_and_usage() {
    let server = Server::chatting(Script::says("a reef"), PLAIN);
    let body = json!({
        "model": "tiny", "messages": [{"role": "developer", "content": "Be."},
                                      {"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "max_tokens": 3, "max_completion_tokens": 9, "unknown": {"field": 1}, "user": null,
        "chat_template_kwargs": {"mood": "!"},
    });
    let answer = server.post(PATH, &body);
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
    let document = answer.json();
    assert_eq!(document["object"], "chat.completion");
    let choice = &document["choices"][0];
    assert_eq!(
        choice["message"],
        json!({"role": "assistant", "content": "a reef", "refusal": null})
    );
    assert_eq!(
        (choice["finish_reason"].as_str(), &choice["logprobs"]),
        (Some("stop"), &Value::Null)
    );
    assert_eq!(document["usage"]["completion_tokens"], 6);
    assert_eq!(document["usage"]["kv"]["fidelity"], "evict");
    assert_eq!(prompt_of(&server), "<system>Be.<user>hi<a>!");
    let asked = server.door.asked.lock().unwrap();
    assert_eq!((asked[0].max_tokens, asked[0].end_ids.as_slice()), (Some(9), &[END][..]));
}

#[test]
fn the_role_comes_with_the_first_token_and_usage_last() {
    let server = Server::chatting(Script::says("caf\u{e9}"), PLAIN);
    let options = json!({"include_usage": true});
    let body = json!({"messages": hello(), "stream": true, "stream_options": options});
    let events = server.post(PATH, &body).events();
    let [c, .., end, usage] = events.as_slice() else { panic!("{events:?}") };
    assert_eq!(c["object"], "chat.completion.chunk");
    assert_eq!(c["choices"][0]["delta"], json!({"role": "assistant", "content": "c"}));
    assert!(c["choices"][0]["finish_reason"].is_null());
    assert_eq!(end["choices"][0]["delta"], json!({"content": "\u{e9}"}));
    assert_eq!(end["choices"][0]["finish_reason"], "stop");
    assert_eq!((&usage["choices"], &usage["usage"]["completion_tokens"]), (&json!([]), &json!(5)));
    assert_eq!(events.len(), 5, "half a character is no chunk");
    let roles = choices(&events).into_iter().filter(|choice| choice["delta"]["role"].is_string());
    assert_eq!(roles.count(), 1);
    assert!(events[..4].iter().all(|event| event.get("usage").is_none()));
}

#[test]
fn several_choices_stream_side_by_side() {
    let script =
        Script { texts: vec!["one".into(), "two".into()], ends: true, ..Script::default() };
    let server = Server::chatting(script, PLAIN);
    let body = json!({
        "messages": hello(), "n": 2, "stream": true, "stop": ["e"],
        "stream_options": {"include_usage": true, "continuous_usage_stats": true},
    });
    let events = server.post(PATH, &body).events();
    assert_eq!((content(&events, 0), content(&events, 1)), ("on".into(), "two".into()));
    assert!(events.iter().all(|event| event["usage"]["total_tokens"].is_u64()));
    let ends = choices(&events).into_iter().filter(|choice| choice["finish_reason"] == "stop");
    let ends: Vec<(&Value, &Value)> =
        ends.map(|end| (&end["index"], &end["stop_reason"])).collect();
    assert_eq!(ends, [(&json!(0), &json!("e")), (&json!(1), &Value::Null)]);
}

#[test]
fn logprobs_have_the_shape_of_chats_whole_and_streamed() {
    let server = Server::chatting(Script::says("xy"), PLAIN);
    let mut body = json!({"messages": hello(), "logprobs": true, "top_logprobs": 2});
    let document = server.post(PATH, &body).json();
    let entry = json!({
        "token": "x", "logprob": -0.5, "bytes": [120],
        "top_logprobs": [{"token": "a", "logprob": -1.0, "bytes": [97]},
                         {"token": "b", "logprob": -1.0, "bytes": [98]}],
    });
    let whole = document["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!((whole.len(), &whole[0]), (2, &entry));
    body["stream"] = true.into();
    let events = server.post(PATH, &body).events();
    assert_eq!(events[0]["choices"][0]["logprobs"]["content"], json!([entry]));
}

#[test]
fn calls_are_read_whole_and_streamed_and_shown_again() {
    let text = "Wait.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 41}}\n</tool_call>";
    let server = Server::chatting(Script::says(text), HERMES);
    let mut body = json!({"messages": hello(), "tools": tools(), "tool_choice": "auto"});
    let document = server.post(PATH, &body).json();
    let choice = &document["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    assert_eq!(choice["message"]["content"], "Wait.");
    let call = &choice["message"]["tool_calls"][0];
    assert_eq!(call["type"], "function");
    assert_eq!(call["function"], json!({"name": "f", "arguments": "{\"x\": 41}"}));
    assert!(call["id"].as_str().unwrap().starts_with("call_"));
    assert!(prompt_of(&server).starts_with("[{\"type\": \"function\""), "{}", prompt_of(&server));
    body["stream"] = true.into();
    let events = server.post(PATH, &body).events();
    assert_eq!(content(&events, 0), "Wait.");
    let deltas: Vec<&Value> = choices(&events)
        .into_iter()
        .flat_map(|choice| choice["delta"]["tool_calls"].as_array().into_iter().flatten())
        .collect();
    assert!(deltas[0]["id"].is_string() && deltas[0]["function"]["name"] == "f");
    assert!(deltas[1..].iter().all(|delta| delta.get("id").is_none() && delta["index"] == 0));
    let parts = deltas.iter().map(|delta| delta["function"]["arguments"].as_str().unwrap());
    assert_eq!(parts.collect::<String>(), "{\"x\": 41}");
    assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "tool_calls");
    let again = json!({"messages": [
        {"role": "user", "content": "hi"}, choice["message"],
        {"role": "tool", "tool_call_id": call["id"], "content": "42"}]});
    assert_eq!(server.post(PATH, &again).status, StatusCode::OK);
    assert_eq!(prompt_of(&server), "<user>hi<assistant>Wait.f{\"x\": 41}<tool>42<a>");
}

/// What the constraint of the last request allows first.
fn allowed(server: &Server) -> Vec<u32> {
    let asked = server.door.asked.lock().unwrap();
    let mut constraint = asked.last().unwrap().constraint.clone().expect("a constraint");
    let mut mask = TokenMask::default();
    mask.reset(257);
    constraint.allow(&mut mask);
    (0..257).filter(|token| mask.contains(*token)).collect()
}

#[test]
fn structures_become_constraints_here_and_in_completions() {
    let server = Server::chatting(Script::says("{}"), HERMES);
    let byte = |c: char| vec![u32::from(c)];
    for (fields, first) in [
        (json!({"response_format": {"type": "json_object"}}), byte('{')),
        (json!({"guided_choice": ["yes"]}), byte('y')),
        (json!({"structured_outputs": {"regex": "q+"}}), byte('q')),
        (json!({"tools": tools(), "tool_choice": "required"}), byte('<')),
        (json!({"grammar": "root ::= \"g\""}), byte('g')),
    ] {
        let mut body = json!({"messages": hello()});
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let answer = server.post(PATH, &body);
        assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
        assert_eq!(allowed(&server), first, "{fields}");
    }
    let body = json!({"prompt": ["a", "b"], "guided_regex": "z"});
    assert_eq!(server.post("/v1/completions", &body).status, StatusCode::OK);
    assert_eq!(allowed(&server), byte('z'));
    server.post(PATH, &json!({"messages": hello(), "response_format": {"type": "text"}}));
    assert!(server.door.asked.lock().unwrap().last().unwrap().constraint.is_none());
}

#[test]
fn what_is_wrong_is_named() {
    let server = Server::chatting(Script::says("ok"), PLAIN);
    for (fields, param) in [
        (json!({"messages": []}), "messages"),
        (json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}), "messages"),
        (json!({"messages": "hi"}), "messages"),
        (json!({"max_tokens": 0}), "max_tokens"),
        (json!({"max_completion_tokens": 0}), "max_completion_tokens"),
        (json!({"top_logprobs": 2}), "top_logprobs"),
        (json!({"logprobs": true, "top_logprobs": 21}), "top_logprobs"),
        (json!({"tools": tools()}), "tools"),
        (json!({"tool_choice": "required"}), "tool_choice"),
        (json!({"response_format": {"type": "xml"}}), "response_format"),
        (json!({"guided_regex": "("}), "guided_regex"),
        (json!({"guided_json": {"type": "no such"}}), "guided_json"),
        (json!({"chat_template": "{{ messages }}"}), "chat_template"),
        (
            json!({"continue_final_message": true, "add_generation_prompt": true}),
            "continue_final_message",
        ),
        (json!({"stream": true, "best_of": 2}), "stream"),
        (json!({"n": 0}), "n"),
    ] {
        let mut body = json!({"messages": hello()});
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let answer = server.post(PATH, &body);
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{fields}: {}", answer.body);
        let error = &answer.json()["error"];
        assert_eq!(error["param"], param, "{fields}: {error}");
        assert!(!error["message"].as_str().unwrap().contains('\n'));
    }
    let none = json!({"messages": hello(), "tools": tools(), "tool_choice": "none"});
    assert_eq!(server.post(PATH, &none).status, StatusCode::OK, "tools that nobody may call");
    let full =
        Script { refusal: Some(Refusal::QueueFull { waiting: 4, most: 4 }), ..Script::default() };
    let body = json!({"messages": hello(), "stream": true});
    assert_eq!(
        Server::chatting(full, PLAIN).post(PATH, &body).status,
        StatusCode::TOO_MANY_REQUESTS
    );
}

#[test]
fn without_a_template_and_where_it_refuses_the_client_is_told() {
    let bare = Server::new(Script::says("ok"));
    let refusing = Server::chatting(Script::says("ok"), "{{ raise_exception('users first') }}");
    let endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}";
    let endless = Server::chatting(Script::says("ok"), endless);
    for (server, hint) in
        [(&bare, "--chat-template"), (&refusing, "users first"), (&endless, "too much work")]
    {
        for path in [PATH, "/v1/chat/completions/render"] {
            let answer = server.post(path, &json!({"messages": hello()}));
            assert_eq!(answer.status, StatusCode::BAD_REQUEST);
            assert!(answer.body.contains(hint), "{}", answer.body);
        }
    }
}

#[test]
fn prompts_are_rendered_without_the_engine_and_may_end_in_the_last_message() {
    let server = Server::chatting(Script::says("ok"), PLAIN);
    let render = |body: Value| {
        let answer = server.post("/v1/chat/completions/render", &body);
        assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
        let ids = answer.json()["token_ids"].clone();
        let bytes = ids.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u8);
        String::from_utf8(bytes.collect()).unwrap()
    };
    let messages =
        json!([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well "}]);
    assert_eq!(render(json!({"messages": messages})), "<user>hi<assistant>well <a>");
    assert_eq!(
        render(json!({"messages": messages, "add_generation_prompt": false})),
        "<user>hi<assistant>well "
    );
    let going_on = json!({"messages": messages, "continue_final_message": true,
                          "chat_template_kwargs": {"mood": "cut off"}});
    assert_eq!(render(going_on), "<user>hi<assistant>well ");
    assert!(server.door.asked.lock().unwrap().is_empty());
}
