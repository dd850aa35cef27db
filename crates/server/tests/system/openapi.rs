//! The OpenAPI document and the routes are of one mind.

use axum::body::Body;
use axum::http::{Method, Request, StatusCode};
use serde_json::{Value, json};

use crate::support::{Script, Server};

fn document(server: &Server) -> Value {
    let answer = server.get("/openapi.json");
    assert_eq!(answer.status, StatusCode::OK);
    assert_eq!(answer.headers["content-type"], "application/json");
    answer.json()
}

#[test]
fn each_documented_operation_is_served_and_answers_with_a_documented_status() {
    let server = Server::new(Script::says("a reef"));
    let document = document(&server);
    for (path, operations) in document["paths"].as_object().unwrap() {
        for (method, operation) in operations.as_object().unwrap() {
            let method = Method::from_bytes(method.to_uppercase().as_bytes()).unwrap();
            let what = format!("{method} {path}");
            let uri = path.replace("{id}", "tiny");
            let body = if method == Method::POST { "{}" } else { "" };
            let request = Request::builder().method(&method).uri(uri).body(Body::from(body));
            let answer = server.ask(request.unwrap());
            assert_ne!(answer.status, StatusCode::METHOD_NOT_ALLOWED, "{what}");
            let status = answer.status.as_str();
            let told = operation["responses"].get(status);
            assert!(told.is_some(), "{what}: {status} is not documented: {}", answer.body);
            assert!(!answer.body.contains("there is nothing at"), "{what}");
        }
    }
}

#[test]
fn the_document_is_whole_and_of_this_version() {
    let server = Server::new(Script::says("a reef"));
    let document = document(&server);
    assert_eq!(document["info"]["version"], env!("CARGO_PKG_VERSION"));
    let text = document.to_string();
    let references = text.split("\"$ref\":\"#").skip(1).map(|rest| rest.split('"').next().unwrap());
    for pointer in references {
        assert!(document.pointer(pointer).is_some(), "nothing is at {pointer}");
    }
}

/// Schemathesis holds each event of a stream, by its fields, against the schema that is documented for it.
#[test]
fn a_stream_is_documented_by_its_events() {
    let server = Server::new(Script::says("a reef"));
    let document = document(&server);
    let event = &document["components"]["schemas"]["Event"];
    assert_eq!(event["properties"]["data"]["pattern"], r"^(\{.*\}|\[DONE\])$");
    let paths = document["paths"].as_object().unwrap();
    let streams: Vec<&str> = paths
        .iter()
        .filter_map(|(path, operations)| {
            let content = operations.pointer("/post/responses/200/content")?;
            let schema = &content.get("text/event-stream")?["schema"];
            assert_eq!(schema["$ref"], "#/components/schemas/Event", "{path}");
            Some(path.as_str())
        })
        .collect();
    assert_eq!(streams, ["/v1/chat/completions", "/v1/completions", "/inference/v1/generate"]);
    let body = json!({"prompt": "ab", "stream": true});
    let answer = server.post("/v1/completions", &body);
    assert!(answer.events().iter().all(Value::is_object), "{}", answer.body);
}
