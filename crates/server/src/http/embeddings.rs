//! `POST /v1/embeddings`: a clear no.

use std::sync::Arc;

use axum::extract::State;

use crate::app::App;
use crate::error::ApiError;

/// `POST /v1/embeddings`.
///
/// # Errors
/// Always: no model that is served gives embeddings.
pub async fn embeddings(State(app): State<Arc<App>>) -> ApiError {
    let text = format!(
        "the model `{}` generates text and gives no embeddings: ask a server of an embedding model",
        app.model_name()
    );
    ApiError { code: Some("unsupported_model"), ..ApiError::invalid("model", text) }
}
