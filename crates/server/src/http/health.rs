//! Whether requests are taken, and what answers.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use serde_json::{Value, json};

use crate::app::App;

/// `GET /health`: 200 with nothing, or 503 while loading, draining or dead.
pub async fn health(State(app): State<Arc<App>>) -> StatusCode {
    let is_ready = app.lifecycle.readiness.is_ready();
    match app.model() {
        Ok(model) if is_ready && model.door.is_alive() => StatusCode::OK,
        _ => StatusCode::SERVICE_UNAVAILABLE,
    }
}

/// `GET /version`.
pub async fn version() -> axum::Json<Value> {
    axum::Json(json!({"version": env!("CARGO_PKG_VERSION"), "engine": "reef"}))
}
