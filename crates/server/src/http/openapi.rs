//! `GET /openapi.json`: what is served, for tools that read such documents.

use axum::http::header;
use axum::response::IntoResponse;

/// The document; a test holds it against the routes.
const DOCUMENT: &str = include_str!("../../../../docs/openapi.json");

/// `GET /openapi.json`.
pub async fn openapi() -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "application/json")], DOCUMENT)
}
