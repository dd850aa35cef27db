//! The OpenAPI document and the routes are of one mind.

use axum::body::Body;
use axum::http::{Method, Request, StatusCode};
use serde_json::Value;

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
