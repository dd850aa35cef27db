//! What opens with which key.

use serde_json::json;

use crate::served::{Served, access};

/// What is behind a key, with a body where it takes one.
const KEYED: [(&str, &str); 9] = [
    ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"),
    ("GET", "/tokenizer_info"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/completions/render"),
    ("POST", "/v1/embeddings"),
    ("POST", "/inference/v1/generate"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
];

/// What is the admin's.
const ADMIN: [(&str, &str); 2] = [("GET", "/metrics"), ("GET", "/v1/pool")];

async fn ask(server: &Served, (method, path): (&str, &str), headers: &str) -> u16 {
    let body = json!({"prompt": "a", "tokens": [97], "token_ids": [97], "sampling_params": {}});
    match method {
        "GET" => server.get(path, headers).await.status,
        _ => server.post(path, headers, &body).await.status,
    }
}

#[tokio::test]
async fn each_route_asks_for_its_key() {
    let server = Served::scripted(access(&["user"], Some("root"), Vec::new())).await;
    let user = "authorization: Bearer user\r\n";
    let root = "x-api-key: root\r\n";
    for route in KEYED {
        for none in
            ["", "authorization: Bearer nobody\r\n", "authorization: user\r\n", "cookie: user\r\n"]
        {
            assert_eq!(ask(&server, route, none).await, 401, "{route:?} {none:?}");
        }
        for key in [user, root] {
            let status = ask(&server, route, key).await;
            assert!(status != 401 && status != 403, "{route:?} {key:?}: {status}");
        }
    }
    for route in ADMIN {
        let status = ask(&server, route, root).await;
        // The scripted engine cannot be looked at: 503 for what is let through to it.
        assert!(status == 200 || status == 503, "{route:?}: {status}");
        assert_eq!(ask(&server, route, "").await, 401, "{route:?}");
        assert_eq!(ask(&server, route, user).await, 403, "{route:?}");
    }
    for open in ["/health", "/version"] {
        assert_eq!(ask(&server, ("GET", open), "").await, 200, "{open}");
    }
    let answer = server.post("/v1/completions", "", &json!({"prompt": "a"})).await;
    assert!(answer.head.contains("www-authenticate: bearer"), "{}", answer.head);
    let body: serde_json::Value = serde_json::from_str(&answer.body).unwrap();
    assert_eq!(body["error"]["code"], "invalid_api_key");
    assert_eq!(body["error"]["type"], "invalid_request_error");
}

#[tokio::test]
async fn pages_of_others_cannot_drive_a_local_server() {
    let server = Served::open().await;
    let body = json!({"prompt": "a"});
    let foreign = "origin: https://evil.example\r\ncontent-type: text/plain\r\n";
    let answer = server.post("/v1/completions", foreign, &body).await;
    assert_eq!(answer.status, 403);
    assert!(!answer.head.contains("access-control-allow-origin"), "{}", answer.head);
    let mut raw = crate::raw::Raw::connect(server.address).await;
    raw.say("GET /v1/models HTTP/1.1\r\nhost: rebound.evil.example\r\n\r\n").await;
    assert_eq!(raw.answer().await.status, 403);
    let own = "origin: http://localhost\r\n";
    assert_eq!(server.post("/v1/completions", own, &body).await.status, 200);
}

#[tokio::test]
async fn a_listed_origin_may_and_its_browser_is_told_so() {
    use reef_server::access::{Access, AccessSettings, Key, Origins};
    let settings = AccessSettings {
        api_keys: vec![Key::new("user").unwrap()],
        origins: Origins::new(["https://chat.example"]).unwrap(),
        is_loopback: true,
        ..AccessSettings::default()
    };
    let server = Served::scripted(Access::new(settings).unwrap()).await;
    let preflight = async |origin: &str| {
        let mut raw = crate::raw::Raw::connect(server.address).await;
        raw.say(&format!(
            "OPTIONS /v1/completions HTTP/1.1\r\nhost: localhost\r\norigin: {origin}\r\n\
             access-control-request-method: POST\r\n\
             access-control-request-headers: authorization,content-type\r\n\r\n"
        ))
        .await;
        raw.answer().await.head
    };
    let allowed = preflight("https://chat.example").await;
    assert!(allowed.contains("access-control-allow-origin: https://chat.example"), "{allowed}");
    assert!(
        allowed.contains("access-control-allow-headers: authorization,content-type"),
        "{allowed}"
    );
    let refused = preflight("https://evil.example").await;
    assert!(!refused.contains("access-control-allow-origin"), "{refused}");
    let headers = "origin: https://chat.example\r\nauthorization: Bearer user\r\n";
    let answer = server.post("/v1/completions", headers, &json!({"prompt": "a"})).await;
    assert_eq!(answer.status, 200);
    assert!(answer.head.contains("access-control-allow-origin: https://chat.example"));
}
