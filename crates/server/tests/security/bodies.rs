//! Bodies that nobody means well with.

use serde_json::{Value, json};

use crate::served::Served;

/// Everything that takes a body.
const PATHS: [&str; 9] = [
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/completions/render",
    "/v1/chat/completions/render",
    "/v1/embeddings",
    "/inference/v1/generate",
    "/tokenize",
    "/detokenize",
    "/v1/models",
];

/// Fields of requests, ours, OpenAI's and vLLM's.
const FIELDS: [&str; 50] = [
    "max_tokens",
    "max_completion_tokens",
    "n",
    "best_of",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "min_tokens",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "priority",
    "stop",
    "stop_token_ids",
    "logit_bias",
    "stream",
    "stream_options",
    "echo",
    "suffix",
    "model",
    "kv",
    "response_format",
    "tools",
    "tool_choice",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
    "truncate_prompt_tokens",
    "beam_width",
    "use_beam_search",
    "length_penalty",
    "allowed_token_ids",
    "bad_words",
    "user",
    "sampling_params",
    "chat_template",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "documents",
    "request_id",
    "cache_salt",
    "vllm_xargs",
];

/// No body is our fault.
fn check(path: &str, what: &str, answer: &crate::raw::Answer) {
    let status = answer.status;
    assert!(status < 500, "{path}, {what}: {status} {}", answer.body);
    if status >= 400 {
        let body: Value = serde_json::from_str(&answer.body)
            .unwrap_or_else(|_| panic!("{path}, {what}: {status} is no JSON: {}", answer.body));
        assert!(body["error"]["message"].is_string(), "{path}, {what}: {body}");
        assert!(answer.head.contains("content-type: application/json"), "{}", answer.head);
        assert!(answer.body.len() < 4096, "{path}, {what}: the refusal repeats the request");
    }
}

#[tokio::test]
async fn what_is_no_json_is_refused() {
    let server = Served::open().await;
    let deep = |open: &str, close: &str, n: usize| open.repeat(n) + &close.repeat(n);
    let texts: Vec<Vec<u8>> = vec![
        b"".into(),
        b"null".into(),
        b"[]".into(),
        b"0".into(),
        b"\"text\"".into(),
        b"{".into(),
        b"{\"prompt\":".into(),
        b"{\"prompt\": \"a\"} trailing".into(),
        b"{\"prompt\": \"a\", \"prompt\": \"b\"}".into(),
        b"{'prompt': 'a'}".into(),
        b"{\"prompt\": NaN}".into(),
        b"{\"prompt\": \"a\", \"temperature\": Infinity}".into(),
        b"\xef\xbb\xbf{\"prompt\": \"a\"}".into(),
        b"{\"prompt\": \"\xff\xfe\"}".into(),
        b"{\"prompt\": \"\\ud800\"}".into(),
        b"{\"prompt\": \"\\udc00\\ud800\"}".into(),
        b"{\"prompt\": \"a\0b\"}".into(),
        b"\0\0\0\0".into(),
        b"--x\r\ncontent-disposition: form-data\r\n\r\n--x--".into(),
        deep("[", "]", 200_000).into(),
        deep("{\"a\":", "}", 200_000).into(),
        format!("{{\"prompt\": {}}}", deep("[", "]", 200_000)).into(),
        format!("{{\"messages\": {}}}", deep("[", "]", 100_000)).into(),
        format!("{{\"prompt\": \"a\", \"x\": {}}}", deep("{\"a\":", "}", 100_000)).into(),
        format!("{{\"{}\": 1}}", "k".repeat(1 << 20)).into(),
        format!("{{\"prompt\": \"a\", \"max_tokens\": {}}}", "9".repeat(100_000)).into(),
        "{\"prompt\": \"a\", \"max_tokens\": 1e999}".into(),
        "{\"prompt\": \"a\", \"seed\": -1e400}".into(),
        "{\"prompt\": \"a\"".encode_utf16().flat_map(u16::to_le_bytes).collect(),
    ];
    for path in PATHS {
        for text in &texts {
            let what = String::from_utf8_lossy(&text[..text.len().min(40)]).into_owned();
            check(path, &what, &server.post_bytes(path, "", text).await);
        }
    }
    server.assert_well().await;
}

#[tokio::test]
async fn values_out_of_range_are_refused() {
    let server = Served::open().await;
    let long = "a".repeat(1 << 20);
    let numbers = [
        json!(-1),
        json!(0),
        json!(1e308),
        json!(-1e308),
        json!(0.5),
        json!(i64::MIN),
        json!(u64::MAX),
        json!(1u64 << 63),
        json!("1"),
        json!(true),
        json!([]),
        json!({}),
    ];
    let whole = |path: &str| match path {
        "/inference/v1/generate" => json!({"token_ids": [97], "sampling_params": {}}),
        _ => json!({"prompt": "a", "messages": [{"role": "user", "content": "a"}], "tokens": [97]}),
    };
    for path in PATHS {
        for field in FIELDS {
            for number in &numbers {
                let mut body = whole(path);
                body[field] = number.clone();
                if body.get("sampling_params").is_some_and(Value::is_object) {
                    body["sampling_params"][field] = number.clone();
                }
                check(path, &format!("{field} = {number}"), &server.post(path, "", &body).await);
            }
            let mut body = whole(path);
            body[field] = json!(long);
            check(path, &format!("a long {field}"), &server.post(path, "", &body).await);
        }
    }
    server.assert_well().await;
}

#[tokio::test]
async fn lists_without_end_are_refused() {
    let server = Served::open().await;
    let many = |value: Value, count: usize| Value::Array(vec![value; count]);
    let bias: serde_json::Map<String, Value> =
        (0..50_000).map(|id| (id.to_string(), json!(1))).collect();
    let bodies = [
        json!({"prompt": many(json!("a"), 10_000)}),
        json!({"prompt": many(json!([97]), 10_000)}),
        json!({"prompt": many(json!(97), 500_000)}),
        json!({"prompt": many(json!(4_000_000_000u64), 10)}),
        json!({"prompt": many(json!(-1), 10)}),
        json!({"prompt": [[]]}),
        json!({"prompt": [97, "a", [97]]}),
        json!({"prompt": ""}),
        json!({"prompt": "a", "stop": many(json!("b"), 100_000)}),
        json!({"prompt": "a", "stop": [""]}),
        json!({"prompt": "a", "stop": ["a".repeat(1 << 20)]}),
        json!({"prompt": "a", "logit_bias": bias}),
        json!({"prompt": "a", "logit_bias": {"x": 1}}),
        json!({"prompt": "a", "logit_bias": {"97": 1e308, "-1": 5}}),
        json!({"prompt": "a", "stop_token_ids": many(json!(u64::MAX), 1000)}),
        json!({"prompt": "a", "kv": {"keep": many(json!([0, 1]), 100_000)}}),
        json!({"prompt": "a", "kv": {"keep": [[1, 0], [0, u64::MAX]]}}),
        json!({"prompt": "a", "kv": {"deadline_ms": u64::MAX, "priority": i32::MIN}}),
        json!({"prompt": "a", "kv": {"tenant": "x".repeat(100_000)}}),
        json!({"prompt": "a", "kv": {"fidelity": "x".repeat(100_000)}}),
        json!({"prompt": "a", "guided_regex": "(((a{1,1000}){1,1000}){1,1000}){1,1000}"}),
        json!({"prompt": "a", "guided_regex": "(".repeat(100_000)}),
        json!({"prompt": "a", "guided_json": {"$ref": "#"}}),
        json!({"prompt": "a", "guided_json": {"type": "array", "minItems": 1e15}}),
        json!({"prompt": "a", "guided_choice": many(json!("a"), 100_000)}),
        json!({"messages": many(json!({"role": "user", "content": "a"}), 50_000)}),
        json!({"messages": [{"role": "nobody", "content": "a"}]}),
        json!({"messages": [{"role": "user", "content": many(json!({"type": "text", "text": ""}), 50_000)}]}),
        json!({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}]}]}),
        json!({"tokens": many(json!(97), 500_000)}),
        json!({"tokens": [u64::MAX]}),
        json!({"token_ids": many(json!(97), 500_000), "sampling_params": {}}),
        json!({"token_ids": [], "sampling_params": {}}),
    ];
    for path in PATHS {
        for (index, body) in bodies.iter().enumerate() {
            check(path, &format!("body {index}"), &server.post(path, "", body).await);
        }
    }
    server.assert_well().await;
}

#[tokio::test]
async fn other_content_types_do_not_matter_or_are_refused() {
    let server = Served::open().await;
    let body = json!({"prompt": "a", "max_tokens": 1});
    for content_type in [
        "text/plain",
        "application/x-www-form-urlencoded",
        "x",
        "",
        "application/json; charset=utf-16",
    ] {
        let header = format!("content-type: {content_type}\r\n");
        let answer = server.post("/v1/completions", &header, &body).await;
        check("/v1/completions", content_type, &answer);
    }
    let gzip = "content-encoding: gzip\r\n";
    check(
        "/v1/completions",
        gzip,
        &server.post_bytes("/v1/completions", gzip, b"\x1f\x8b\x08").await,
    );
    server.assert_well().await;
}

#[tokio::test]
async fn markup_in_a_request_comes_back_as_json_only() {
    let server = Served::open().await;
    let script = "<script>alert(1)</script>";
    let body = json!({"model": script, "prompt": script});
    let answer = server.post("/v1/completions", "", &body).await;
    assert_eq!(answer.status, 404);
    assert!(answer.head.contains("content-type: application/json"), "{}", answer.head);
    assert!(answer.head.contains("x-content-type-options: nosniff"), "{}", answer.head);
    let answer = server.get("/%3Cscript%3Ealert(1)%3C/script%3E", "").await;
    assert_eq!(answer.status, 404);
    assert!(answer.head.contains("content-type: application/json"), "{}", answer.head);
    assert!(answer.head.contains("x-content-type-options: nosniff"), "{}", answer.head);
}
