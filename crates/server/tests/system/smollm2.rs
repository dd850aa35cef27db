//! A real model behind the real routes.

use std::path::PathBuf;
use std::sync::Arc;

use axum::body::Body;
use axum::http::{Request, StatusCode};
use reef_engine::{Engine, EngineConfig, EngineHandle};
use reef_kernels::dispatch::Tier;
use reef_model::chat_template::ChatTemplate;
use reef_model::gguf::Gguf;
use reef_model::runner::{Activations, KeyRotation, ModelRunner, RunnerOptions};
use reef_model::tokenizer::Tokenizer;
use reef_server::grammar::Grammars;
use reef_server::{App, Model, Settings, http};
use serde_json::{Value, json};
use tower::ServiceExt as _;

use crate::support::tiny_model;

/// SmolLM2 out of the cache that `reef pull` fills, with the file's template or another.
fn router(template: Option<&str>) -> Option<axum::Router> {
    let folder = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let home = folder("REEF_HOME")
        .or_else(|| folder("XDG_CACHE_HOME").map(|path| path.join("reef")))
        .or_else(|| folder("HOME").map(|path| path.join(".cache/reef")));
    let path = home.unwrap_or_default().join("smollm2.gguf");
    if !path.is_file() {
        eprintln!("skipped: smollm2.gguf is not in the cache (`reef pull smollm2` fetches it)");
        return None;
    }
    let gguf = Gguf::open(&path).unwrap();
    let tokenizer = Arc::new(Tokenizer::from_gguf(&gguf).unwrap());
    let template = match template {
        Some(source) => ChatTemplate::new(source, &tokenizer),
        None => ChatTemplate::from_gguf(&gguf, &tokenizer),
    };
    let options = RunnerOptions {
        threads: 2,
        tier: Tier::detect(),
        activations: Activations::Int8,
        block_size: 32,
        key_rotation: KeyRotation::None,
    };
    let runner = ModelRunner::load(&gguf, options).unwrap();
    let config = EngineConfig::new(64 << 20);
    let app = Arc::new(App::new(Settings::new("smollm2")));
    let ends = tokenizer.vocabulary().end_of_generation();
    let door = Arc::new(EngineHandle::spawn(Engine::new(runner, config).unwrap()).unwrap());
    app.set_model(Model {
        context: 8192,
        grammars: Arc::new(Grammars::new(tokenizer.clone(), ends)),
        template: Some(Arc::new(template.unwrap())),
        tokenizer: tokenizer.clone(),
        ..tiny_model(door)
    });
    Some(http::router(app))
}

async fn ask(router: &axum::Router, body: &Value) -> String {
    let request = Request::post("/v1/chat/completions").body(Body::from(body.to_string())).unwrap();
    let Ok(response) = router.clone().oneshot(request).await;
    let status = response.status();
    let bytes = axum::body::to_bytes(response.into_body(), 1 << 20).await.unwrap();
    let text = String::from_utf8(bytes.to_vec()).unwrap();
    assert_eq!(status, StatusCode::OK, "{text}");
    text
}

#[tokio::test]
async fn smollm2_answers_the_same_whole_and_streamed() {
    let Some(router) = router(None) else { return };
    let mut body = json!({
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0, "max_tokens": 24, "logprobs": true,
    });
    let whole: Value = serde_json::from_str(&ask(&router, &body).await).unwrap();
    let text = whole["choices"][0]["message"]["content"].as_str().unwrap();
    assert!(text.chars().filter(|c| c.is_alphabetic()).count() > 20, "{text}");
    let tokens = whole["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(whole["usage"]["completion_tokens"], tokens.len());
    body["stream"] = true.into();
    let stream = ask(&router, &body).await;
    let events = stream.split_terminator("\n\n").map(|event| event.strip_prefix("data: ").unwrap());
    let chunks: Vec<Value> = events
        .filter(|data| *data != "[DONE]")
        .map(|data| serde_json::from_str(data).unwrap())
        .collect();
    let deltas = chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str());
    assert_eq!(deltas.collect::<String>(), text);
}

#[tokio::test]
async fn smollm2_keeps_to_schemas_and_makes_the_calls_that_are_demanded() {
    let hermes = "{% if tools %}Tools: {{ tools | tojson }} Call them as <tool_call>.{% endif %}\
                  {% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
                  <|im_start|>assistant\n";
    let Some(router) = router(Some(hermes)) else { return };
    let messages =
        json!([{"role": "user", "content": "Where is Paris, and what is the weather there?"}]);
    let parameters = json!({
        "type": "object", "required": ["city", "days"], "additionalProperties": false,
        "properties": {"city": {"type": "string", "maxLength": 20},
                       "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    });
    let check = |text: &str| {
        let value: Value = serde_json::from_str(text).unwrap_or_else(|_| panic!("{text}"));
        assert!(value["city"].as_str().unwrap().chars().count() <= 20, "{text}");
        assert!((1..=9).contains(&value["days"].as_i64().unwrap()), "{text}");
        assert_eq!(value.as_object().unwrap().len(), 2);
    };
    for seed in 0..3 {
        let body = json!({
            "messages": messages, "seed": seed, "temperature": 1.5, "max_tokens": 200,
            "response_format": {"type": "json_schema",
                                "json_schema": {"name": "w", "strict": true, "schema": parameters}},
        });
        let answer: Value = serde_json::from_str(&ask(&router, &body).await).unwrap();
        let choice = &answer["choices"][0];
        assert_eq!(choice["finish_reason"], "stop", "{answer}");
        check(choice["message"]["content"].as_str().unwrap());
        let body = json!({
            "messages": messages, "seed": seed, "temperature": 1.5, "max_tokens": 200,
            "tools": [{"type": "function", "function": {"name": "weather", "parameters": parameters}}],
            "tool_choice": {"type": "function", "function": {"name": "weather"}}, "n": 2,
        });
        let answer: Value = serde_json::from_str(&ask(&router, &body).await).unwrap();
        for choice in answer["choices"].as_array().unwrap() {
            assert_eq!(choice["finish_reason"], "tool_calls", "{answer}");
            let call = &choice["message"]["tool_calls"][0];
            assert_eq!(call["function"]["name"], "weather");
            check(call["function"]["arguments"].as_str().unwrap());
        }
    }
}
