//! What can be asked for.

use std::sync::Arc;

use axum::extract::{Path, State};
use serde_json::{Value, json};

use crate::app::{App, Model};
use crate::error::ApiError;

/// `GET /v1/models`.
///
/// # Errors
/// 503 while loading.
pub async fn list(State(app): State<Arc<App>>) -> Result<axum::Json<Value>, ApiError> {
    let model = app.model()?;
    let names = app.settings.model_names.iter();
    let cards: Vec<Value> = names.map(|name| card(model, name)).collect();
    Ok(axum::Json(json!({"object": "list", "data": cards})))
}

/// `GET /v1/models/{id}`.
///
/// # Errors
/// 503 while loading, 404 for another model.
pub async fn one(
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
) -> Result<axum::Json<Value>, ApiError> {
    let model = app.model_named(Some(&id))?;
    Ok(axum::Json(card(model, &id)))
}

fn card(model: &Model, name: &str) -> Value {
    json!({
        "id": name,
        "object": "model",
        "created": model.created,
        // Routers take it for the dialect, which is vLLM's.
        "owned_by": "vllm",
        "root": model.root,
        "parent": null,
        "max_model_len": model.context,
        "permission": [],
    })
}
