//! Tokens, models and what else needs no engine.

use axum::http::StatusCode;
use serde_json::json;

use crate::support::{Script, Server};

#[test]
fn text_becomes_tokens_and_text_again() {
    let server = Server::new(Script::default());
    let body = json!({"prompt": "hé<|im_end|>", "return_token_strs": true});
    let document = server.post("/tokenize", &body).json();
    assert_eq!(document["tokens"], json!([104, 195, 169, 256]));
    assert_eq!((&document["count"], &document["max_model_len"]), (&json!(4), &json!(1024)));
    assert_eq!(document["token_strs"][3], "<|im_end|>");
    let back = server.post("/detokenize", &json!({"tokens": document["tokens"]})).json();
    assert_eq!(back["prompt"], "hé<|im_end|>");
    let wrong = server.post("/detokenize", &json!({"tokens": [5000]}));
    assert_eq!(wrong.json()["error"]["param"], "tokens");
}

#[test]
fn a_conversation_becomes_the_tokens_of_its_prompt() {
    let template = "{% for m in messages %}{{ m.content }}{% endfor %}\
                    {% if add_generation_prompt %}>{% endif %}";
    let server = Server::chatting(Script::default(), template);
    let mut body = json!({"model": "tiny", "messages": [{"role": "user", "content": "hi"}]});
    assert_eq!(server.post("/tokenize", &body).json()["tokens"], json!([104, 105, 62]));
    body["add_generation_prompt"] = false.into();
    assert_eq!(server.post("/tokenize", &body).json()["tokens"], json!([104, 105]));
    let neither = server.post("/tokenize", &json!({"model": "tiny"}));
    assert_eq!(neither.status, StatusCode::BAD_REQUEST);
    assert_eq!(neither.json()["error"]["param"], "prompt");
}

#[test]
fn rendering_asks_nothing_of_the_engine() {
    let server = Server::new(Script::default());
    let body = json!({"prompt": ["a", "bc"], "max_tokens": 3});
    let document = server.post("/v1/completions/render", &body).json();
    assert_eq!(document[1]["token_ids"], json!([98, 99]));
    assert!(document[0]["request_id"].is_string());
    assert!(server.door.asked.lock().unwrap().is_empty());
}

#[test]
fn models_are_listed_for_clients_and_routers() {
    let server = Server::new(Script::default());
    let card = &server.get("/v1/models").json()["data"][0];
    assert_eq!((&card["id"], &card["owned_by"]), (&json!("tiny"), &json!("vllm")));
    assert_eq!((&card["max_model_len"], &card["root"]), (&json!(1024), &json!("tiny.gguf")));
    assert_eq!(server.get("/v1/models/tiny").json()["id"], "tiny");
    let wrong = server.get("/v1/models/org/other");
    assert_eq!(wrong.status, StatusCode::NOT_FOUND);
    assert_eq!(wrong.json()["error"]["code"], "model_not_found");
    assert_eq!(server.get("/health").status, StatusCode::OK);
    assert_eq!(server.get("/nowhere").status, StatusCode::NOT_FOUND);
    let no = server.post("/v1/embeddings", &json!({"model": "tiny", "input": "x"}));
    assert_eq!(no.status, StatusCode::BAD_REQUEST);
}
