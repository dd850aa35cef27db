//! A server for a test to ask.

mod door;
mod tokenizer;

use std::sync::Arc;

use axum::body::Body;
use axum::http::{Request, Response, StatusCode};
use reef_engine::Tenant;
use reef_model::chat_template::ChatTemplate;
use reef_server::door::Door;
use reef_server::grammar::Grammars;
use reef_server::metrics::{ModelMetrics, Served};
use reef_server::{App, Model, Settings, http};
use serde_json::Value;
use tower::ServiceExt as _;

pub use door::{Script, ScriptedDoor};
pub use tokenizer::{END, byte_tokenizer};

/// A server of one model, and the engine behind it.
pub struct Server {
    router: axum::Router,
    pub door: Arc<ScriptedDoor>,
}

/// What was answered.
pub struct Answer {
    pub status: StatusCode,
    pub headers: axum::http::HeaderMap,
    pub body: String,
}

/// A model of bytes that `door` runs.
pub fn tiny_model(door: Arc<dyn Door>) -> Model {
    let tokenizer = Arc::new(byte_tokenizer());
    Model {
        root: "tiny.gguf".into(),
        created: 1,
        context: 1024,
        budget_bytes: 1 << 20,
        block_size: 32,
        grammars: Arc::new(Grammars::new(tokenizer.clone(), &[END])),
        tokenizer,
        template: None,
        door,
        metrics: ModelMetrics::new(served()),
    }
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|_| panic!("no JSON: {}", self.body))
    }

    /// The data of each event, the last of which must be `[DONE]`, framed as clients read them.
    pub fn events(&self) -> Vec<Value> {
        assert_eq!(self.headers["content-type"], "text/event-stream; charset=utf-8");
        let text = self.body.strip_suffix("data: [DONE]\n\n").expect("ends with [DONE]");
        let events = text.split_terminator("\n\n").filter(|event| !event.starts_with(": "));
        let data = events.map(|event| {
            let data = event.strip_prefix("data: ").expect("only data lines");
            assert!(!data.contains('\n') && !data.contains('\r'), "one line each");
            serde_json::from_str(data).expect("JSON")
        });
        data.collect()
    }
}

/// What it serves.
pub fn served() -> Served {
    Served {
        model_name: "tiny".into(),
        max_model_len: 1024,
        block_size: 32,
        f16_blocks: 32,
        prefix_caching: true,
        tenants: vec![Tenant::default()],
    }
}

impl Server {
    /// A server whose engine follows `script`.
    pub fn new(script: Script) -> Server {
        Server::with(script, Settings::new("tiny"))
    }

    /// The same with other settings.
    pub fn with(script: Script, settings: Settings) -> Server {
        Server::of(script, settings, None)
    }

    /// The same with a chat template.
    pub fn chatting(script: Script, template: &str) -> Server {
        Server::of(script, Settings::new("tiny"), Some(template))
    }

    fn of(script: Script, settings: Settings, template: Option<&str>) -> Server {
        let door = Arc::new(ScriptedDoor::new(script));
        let app = Arc::new(App::new(settings));
        let model = tiny_model(door.clone());
        let compile = |source| ChatTemplate::new(source, &model.tokenizer).expect("a template");
        let template = template.map(compile).map(Arc::new);
        app.set_model(Model { template, ..model });
        Server { router: http::router(app), door }
    }

    /// Asks with a JSON body.
    pub fn post(&self, path: &str, body: &Value) -> Answer {
        self.post_text(path, &body.to_string())
    }

    /// Asks with any body.
    pub fn post_text(&self, path: &str, body: &str) -> Answer {
        self.ask(Request::post(path).body(Body::from(body.to_owned())).unwrap())
    }

    pub fn get(&self, path: &str) -> Answer {
        self.ask(Request::get(path).body(Body::empty()).unwrap())
    }

    pub fn ask(&self, request: Request<Body>) -> Answer {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let Ok(response) = self.router.clone().oneshot(request).await;
            read(response).await
        })
    }
}

impl Server {
    /// Asks, and does not read the answer's body.
    pub async fn start(&self, path: &str, body: &Value) -> Response<Body> {
        let request = Request::post(path).body(Body::from(body.to_string())).unwrap();
        let Ok(response) = self.router.clone().oneshot(request).await;
        response
    }
}

async fn read(response: Response<Body>) -> Answer {
    let (parts, body) = response.into_parts();
    let bytes = axum::body::to_bytes(body, 16 << 20).await.unwrap();
    let body = String::from_utf8(bytes.to_vec()).unwrap();
    Answer { status: parts.status, headers: parts.headers, body }
}
