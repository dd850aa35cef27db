//! Routes; one file for each group of them.

mod completions;
mod embeddings;
mod generate;
mod health;
mod json;
mod models;
mod prompt;
mod render;
mod respond;
mod tokenize;

use std::sync::Arc;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::routing::{get, post};

pub use json::{Json, Sampled, parse};

use crate::app::App;
use crate::error::ApiError;

/// All routes.
pub fn router(app: Arc<App>) -> Router {
    let body = DefaultBodyLimit::max(app.settings.body_bytes_max);
    Router::new()
        .route("/health", get(health::health))
        .route("/version", get(health::version))
        .route("/v1/models", get(models::list))
        // An id may have slashes.
        .route("/v1/models/{*id}", get(models::one))
        .route("/v1/completions", post(completions::completions))
        .route("/v1/completions/render", post(render::completions))
        .route("/v1/embeddings", post(embeddings::embeddings))
        .route("/inference/v1/generate", post(generate::generate))
        .route("/tokenize", post(tokenize::tokenize))
        .route("/detokenize", post(tokenize::detokenize))
        .route("/tokenizer_info", get(tokenize::info))
        .fallback(nothing_here)
        .layer(body)
        .with_state(app)
}

async fn nothing_here(uri: axum::http::Uri) -> ApiError {
    ApiError::not_found(format!("there is nothing at {}", uri.path()), None)
}

/// Serves `router` until the process ends.
///
/// # Errors
/// The socket's.
pub async fn serve(listener: tokio::net::TcpListener, router: Router) -> std::io::Result<()> {
    axum::serve(listener, router).await
}
