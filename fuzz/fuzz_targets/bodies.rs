//! No body, however odd, makes the server panic, hang, answer 5xx or ask the engine for nonsense.
//!
//! The first byte picks a route, the rest is the body; it goes through the real routes to an engine that only
//! looks at what it is asked for.
#![no_main]

use std::sync::{Arc, LazyLock, Mutex};

use axum::Router;
use axum::body::Body;
use axum::http::Request as HttpRequest;
use libfuzzer_sys::fuzz_target;
use reef_engine::event::Event;
use reef_engine::handle::Listener;
use reef_engine::{EngineError, FinishReason, Refusal, Request, Tenant};
use reef_model::chat_template::ChatTemplate;
use reef_model::tokenizer::Tokenizer;
use reef_server::door::{Door, Look};
use reef_server::grammar::Grammars;
use reef_server::metrics::{ModelMetrics, Served};
use reef_server::{App, Model, Settings, http};
use tokio::runtime::Runtime;
use tower::ServiceExt as _;

#[path = "../../crates/server/tests/system/support/tokenizer.rs"]
mod tokenizer;

const PATHS: [&str; 8] = [
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/completions/render",
    "/v1/chat/completions/render",
    "/v1/embeddings",
    "/inference/v1/generate",
    "/tokenize",
    "/detokenize",
];

/// As SmolLM2's, with tools.
const TEMPLATE: &str = "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}\
    <|im_start|>system\nYou are helpful.<|im_end|>\n{% endif %}\
    {{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}\
    {% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}\
    {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// Tokens of the byte tokenizer.
const VOCABULARY: u32 = 257;
const BODY_BYTES: usize = 64 << 10;

/// An engine that looks at each request and has no room for it.
struct Looking;

impl Door for Looking {
    fn submit(&self, request: Request, mut listener: Listener) -> Result<u64, EngineError> {
        assert!(request.prompt.iter().all(|id| *id < VOCABULARY), "{request:?}");
        assert!(request.end_ids.len() < 4096 && request.keep.len() <= 1024, "{request:?}");
        assert!(request.keep.iter().all(|span| span.end <= request.prompt.len()), "{request:?}");
        assert!((1..=64).contains(&request.branches.width()), "{request:?}");
        assert!(request.branches.given() <= request.branches.width(), "{request:?}");
        assert!(request.logprobs.unwrap_or(0) <= 20, "{request:?}");
        assert!(request.sampling.temperature >= 0.0, "{request:?}");
        assert_eq!(request.tenant, 0);
        let full = Refusal::QueueFull { waiting: 1, most: 1 };
        listener(Event::Failed(Arc::new(full.into())));
        Ok(0)
    }

    fn end(&self, _: u64, _: FinishReason) {}

    fn end_branch(&self, _: u64, _: u32, _: FinishReason) {}

    fn look(&self, look: Look) {
        look(None);
    }

    fn now_us(&self) -> u64 {
        u64::MAX / 2
    }

    fn is_alive(&self) -> bool {
        true
    }
}

struct Server {
    runtime: Mutex<Runtime>,
    router: Router,
}

static SERVER: LazyLock<Server> = LazyLock::new(|| {
    let tokenizer: Arc<Tokenizer> = Arc::new(tokenizer::byte_tokenizer());
    let template = ChatTemplate::new(TEMPLATE, &tokenizer).expect("a template");
    let settings = Settings { body_bytes_max: BODY_BYTES, ..Settings::new("tiny") };
    let app = Arc::new(App::new(settings));
    app.set_model(Model {
        root: "tiny.gguf".into(),
        created: 1,
        context: 1024,
        budget_bytes: 1 << 20,
        block_size: 32,
        grammars: Arc::new(Grammars::new(tokenizer.clone(), &[tokenizer::END])),
        metrics: ModelMetrics::new(Served {
            model_name: "tiny".into(),
            max_model_len: 1024,
            block_size: 32,
            f16_blocks: 32,
            prefix_caching: false,
            tenants: vec![Tenant::default()],
        }),
        tokenizer,
        template: Some(Arc::new(template)),
        door: Arc::new(Looking),
    });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    Server { runtime: Mutex::new(runtime.expect("a runtime")), router: http::router(app) }
});

fuzz_target!(|bytes: &[u8]| {
    let Some((first, body)) = bytes.split_first() else { return };
    let path = PATHS[*first as usize % PATHS.len()];
    let request = HttpRequest::post(path).body(Body::from(body.to_vec())).expect("a request");
    let runtime = SERVER.runtime.lock().expect("one at a time");
    let answer = runtime.block_on(async {
        let Ok(response) = SERVER.router.clone().oneshot(request).await;
        let status = response.status();
        (status, axum::body::to_bytes(response.into_body(), 64 << 20).await.expect("a body"))
    });
    let (status, body) = answer;
    assert!(status.as_u16() < 500, "{path}: {status} {}", String::from_utf8_lossy(&body));
    if !status.is_success() {
        let error: serde_json::Value = serde_json::from_slice(&body).expect("errors are JSON");
        assert!(error["error"]["message"].is_string(), "{error}");
        assert!(body.len() < 4096, "the refusal repeats the request: {error}");
    }
});
