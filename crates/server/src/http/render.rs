//! What a request's prompt is in tokens, for routers that look for the server that knows most of it. Asks
//! nothing of the engine.

use std::sync::Arc;

use axum::extract::State;
use reef_model::tokenizer::Encode;
use serde_json::{Value, json};

use super::completions::each_prompt;
use super::json::Json;
use super::prompt::token_ids;
use super::respond::new_id;
use crate::app::App;
use crate::error::ApiError;
use crate::types::completion::CompletionRequest;

/// `POST /v1/completions/render`: a list, one entry for each prompt.
///
/// # Errors
/// As `/v1/completions`.
pub async fn completions(
    State(app): State<Arc<App>>,
    Json(body): Json<CompletionRequest>,
) -> Result<axum::Json<Value>, ApiError> {
    let model = app.model_named(body.model.as_deref())?;
    let add_special = body.add_special_tokens.unwrap_or(true);
    let options = Encode { add_special, parse_special: true };
    let mut rendered = Vec::new();
    for prompt in each_prompt(body.prompt, app.settings.prompts_max)? {
        let ids = token_ids(&model.tokenizer, prompt, options).await?;
        rendered.push(document(&ids, app.model_name()));
    }
    Ok(axum::Json(Value::Array(rendered)))
}

/// A rendered prompt.
pub fn document(ids: &[u32], model: &str) -> Value {
    json!({"request_id": new_id("render"), "token_ids": ids, "model": model})
}
