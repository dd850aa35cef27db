//! Nobody reads another tenant's KV memory, nor can tell what is in it: over a real engine.

use std::sync::Arc;

use reef_engine::{Engine, EngineConfig, EngineHandle};
use reef_server::access::parse_tenants;
use reef_server::lifecycle::Stopping;
use serde_json::{Value, json};
use tokio::sync::oneshot;

use crate::raw::Raw;
use crate::served::{Served, access};
use crate::tiny_model::tiny::Tiny;

const TENANTS: &str = r#"
    [[tenant]]
    name = "alice"
    key = "alice-key"
    [[tenant]]
    name = "bob"
    key = "bob-key"
    [[tenant]]
    name = "carol"
    key = "carol-key"
    salt = "team"
    [[tenant]]
    name = "dave"
    key = "dave-key"
    salt = "team"
    kv_quota = "256KiB"
    max_priority = 0
    strictest_fidelity = "int8"
"#;

struct Engines {
    server: Served,
    door: Arc<EngineHandle>,
}

/// What a request told, and what it cost.
#[derive(Debug, PartialEq)]
struct Told {
    cached_tokens: u64,
    /// Prompt tokens that the engine computed for it: what its time to the first token is made of.
    computed: u64,
}

impl Engines {
    async fn start() -> Engines {
        let tenants = parse_tenants(TENANTS, |_| None).unwrap();
        let access = access(&["user-key"], Some("root-key"), tenants);
        let tiny = Tiny { vocabulary: 257, ..Tiny::new("llama") };
        let config =
            EngineConfig { tenants: access.engine_tenants(), ..EngineConfig::new(8 << 20) };
        let engine = Engine::new(tiny.build().plain_runner(), config).unwrap();
        let door = Arc::new(EngineHandle::spawn(engine).unwrap());
        let server = Served::with(door.clone(), access).await;
        Engines { server, door }
    }

    async fn prefill_rows(&self) -> u64 {
        let (told, rows) = oneshot::channel();
        self.door.look(Box::new(move |engine| {
            told.send(engine.unwrap().stats().counters.prefill_rows).unwrap();
        }));
        rows.await.unwrap()
    }

    async fn ask_with(&self, key: &str, body: &Value) -> (u16, Value) {
        let header = format!("authorization: Bearer {key}\r\n");
        let answer = self.server.post("/v1/completions", &header, body).await;
        (answer.status, serde_json::from_str(&answer.body).unwrap())
    }

    async fn ask(&self, key: &str, prompt: &str) -> Told {
        let before = self.prefill_rows().await;
        let body = json!({"prompt": prompt, "max_tokens": 1, "kv": {"fidelity": "int8"}});
        let (status, answer) = self.ask_with(key, &body).await;
        assert_eq!(status, 200, "{answer}");
        let cached = &answer["usage"]["prompt_tokens_details"]["cached_tokens"];
        let computed = self.prefill_rows().await - before;
        Told { cached_tokens: cached.as_u64().unwrap(), computed }
    }
}

#[tokio::test]
async fn a_foreign_prefix_is_as_cold_as_none() {
    let engines = Engines::start().await;
    let secret = "the launch code of the reef is four eight fifteen sixteen; do not tell anybody. ";
    let secret = secret.repeat(3);
    let tokens = secret.len() as u64;
    let cold = Told { cached_tokens: 0, computed: tokens };
    assert_eq!(engines.ask("alice-key", &secret).await, cold);
    let warm = engines.ask("alice-key", &secret).await;
    assert!(warm.cached_tokens >= tokens - 32, "its own it finds: {warm:?}");
    assert_eq!(warm.computed, tokens - warm.cached_tokens);
    // Whoever guesses it computes it all, as for any text that nobody sent.
    for other in ["bob-key", "user-key", "carol-key"] {
        assert_eq!(engines.ask(other, &secret).await, cold, "{other}");
    }
    assert_eq!(engines.ask("alice-key", &secret).await, warm, "and is not pushed out by it");
    // Only the admin gets there, and says for whom.
    let for_alice = json!({"prompt": secret, "max_tokens": 1, "kv": {"tenant": "alice"}});
    let (status, answer) = engines.ask_with("bob-key", &for_alice).await;
    assert_eq!((status, &answer["error"]["param"]), (403, &json!("kv.tenant")));
    let (status, answer) = engines.ask_with("root-key", &for_alice).await;
    assert_eq!(status, 200);
    assert!(answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap() > 0);
    // Those who named one salt share.
    let shared = engines.ask("dave-key", &secret).await;
    assert!(shared.cached_tokens >= tokens - 32, "{shared:?}");
}

#[tokio::test]
async fn a_tenants_header_is_as_good_as_the_field() {
    let engines = Engines::start().await;
    let body = json!({"prompt": "a", "max_tokens": 1});
    let ask = async |headers: &str| {
        let answer = engines.server.post("/v1/completions", headers, &body).await;
        (answer.status, answer.body)
    };
    let bob = "authorization: Bearer bob-key\r\n";
    let root = "authorization: Bearer root-key\r\n";
    assert_eq!(ask(&format!("{bob}x-reef-tenant: alice\r\n")).await.0, 403);
    assert_eq!(ask(&format!("{bob}x-reef-tenant: bob\r\n")).await.0, 200);
    assert_eq!(ask(&format!("{root}x-reef-tenant: alice\r\n")).await.0, 200);
    assert_eq!(ask(&format!("{root}x-reef-tenant: nobody\r\n")).await.0, 400);
    assert_eq!(ask(&format!("{bob}x-reef-fidelity: best\r\n")).await.0, 400);
    let (status, text) = ask(&format!("{bob}x-reef-fidelity: exact\r\n")).await;
    assert_eq!(status, 200);
    let answer: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(answer["usage"]["kv"]["fidelity"], "exact");
}

/// Not about tenants; but about a real engine, too.
#[tokio::test]
async fn at_the_cut_off_a_stream_ends_whole() {
    let engines = Engines::start().await;
    let body = json!({"prompt": "a", "max_tokens": 4000, "ignore_eos": true, "stream": true,
        "stream_options": {"include_usage": true}})
    .to_string();
    let mut raw = Raw::connect(engines.server.address).await;
    let length = body.len();
    raw.say(&format!(
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer user-key\r\n\
         content-length: {length}\r\n\r\n{body}"
    ))
    .await;
    raw.wait_for("data: ").await;
    engines.server.stopper.stop(Stopping::Drain);
    let (said, _) = raw.rest().await;
    assert!(said.contains("\"finish_reason\":\"length\""), "{}", &said[said.len() - 900..]);
    assert!(said.contains("data: [DONE]\n\n\r\n0\r\n\r\n"), "{}", &said[said.len() - 900..]);
    let tokens = said.split("\"completion_tokens\":").nth(1).unwrap().split(',').next().unwrap();
    let tokens: usize = tokens.parse().unwrap();
    assert!((1..4000).contains(&tokens), "{tokens}");
}

#[tokio::test]
async fn bounds_of_a_tenant_hold() {
    let engines = Engines::start().await;
    let ask = async |kv: Value, max_tokens: usize| {
        let body = json!({"prompt": "a", "max_tokens": max_tokens, "kv": kv});
        engines.ask_with("dave-key", &body).await
    };
    let (status, answer) = ask(json!({"fidelity": "exact"}), 1).await;
    assert_eq!((status, &answer["error"]["param"]), (403, &json!("kv.fidelity")));
    let (status, answer) = ask(json!({"priority": 1}), 1).await;
    assert_eq!((status, &answer["error"]["param"]), (403, &json!("kv.priority")));
    let (status, _) = ask(json!({"priority": 0, "fidelity": "int8"}), 1).await;
    assert_eq!(status, 200);
    // Its quota, whatever is free.
    let (status, answer) = ask(json!({"fidelity": "int8"}), 3000).await;
    assert_eq!((status, &answer["error"]["code"]), (400, &json!("quota_exceeded")), "{answer}");
}
