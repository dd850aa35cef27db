//! Routes; one file for each group of them.

mod chat;
mod chat_answer;
mod chat_stream;
mod completion_answer;
mod completion_stream;
mod completions;
mod embeddings;
mod generate;
mod head;
mod health;
mod json;
mod loads;
mod metrics;
mod models;
mod narration;
mod openapi;
pub mod pool;
mod prompt;
mod render;
mod respond;
mod structure;
mod tokenize;

use std::sync::Arc;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::http::StatusCode;
use axum::middleware::from_fn_with_state;
use axum::routing::{get, post};

pub(crate) use respond::new_id;

use crate::access::{Routes, protect};
use crate::app::App;
use crate::error::ApiError;
use crate::page;
use crate::telemetry;

/// All routes.
pub fn router(app: Arc<App>) -> Router {
    let body = DefaultBodyLimit::max(app.settings.body_bytes_max);
    let access = app.access.clone();
    let open = Router::new()
        .route("/health", get(health::health))
        .route("/version", get(health::version))
        // The page shows nothing by itself: what it asks for is the administrator's.
        .merge(page::routes())
        .route("/openapi.json", get(openapi::openapi))
        .fallback(nothing_here)
        .method_not_allowed_fallback(other_method);
    let keyed = Router::new()
        .route("/v1/models", get(models::list))
        // An id may have slashes.
        .route("/v1/models/{*id}", get(models::one))
        .route("/v1/chat/completions", post(chat::chat))
        .route("/v1/chat/completions/render", post(chat::render))
        .route("/v1/completions", post(completions::completions))
        .route("/v1/completions/render", post(render::completions))
        .route("/v1/embeddings", post(embeddings::embeddings))
        .route("/inference/v1/generate", post(generate::generate))
        .route("/tokenize", post(tokenize::tokenize))
        .route("/detokenize", post(tokenize::detokenize))
        .route("/tokenizer_info", get(tokenize::info))
        .route("/v1/loads", get(loads::loads))
        .route("/loads", get(loads::loads))
        .method_not_allowed_fallback(other_method)
        .layer(body);
    let admin = Router::new()
        .route("/metrics", get(metrics::metrics))
        .route("/v1/pool", get(pool::pool))
        .method_not_allowed_fallback(other_method);
    let routes = Routes {
        open: open.with_state(app.clone()),
        keyed: keyed.with_state(app.clone()),
        admin: admin.with_state(app.clone()),
    };
    protect(&access, routes).layer(from_fn_with_state(app, telemetry::track))
}

async fn nothing_here(uri: axum::http::Uri) -> ApiError {
    ApiError::not_found(format!("there is nothing at {}", uri.path()), None)
}

async fn other_method(method: axum::http::Method, uri: axum::http::Uri) -> ApiError {
    let message = format!("{} does not take {method}", uri.path());
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "invalid_request_error", message)
}
