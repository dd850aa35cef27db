//! What responses of all kinds have in common.

use std::hash::{BuildHasher as _, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};

use axum::http::HeaderValue;
use axum::response::{IntoResponse as _, Response};
use reef_engine::{FinishReason, Usage};
use serde_json::Value;

use crate::usage::degraded_header;

/// A new id: `prefix` and what no other answer has.
pub fn new_id(prefix: &str) -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    format!("{prefix}-{:016x}{count:016x}", RandomState::new().hash_one(count))
}

/// OpenAI's name of a reason; clients' lists of them are closed, so what OpenAI does not know is `length`,
/// and [`stop_reason`] says more.
pub fn finish_reason(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop => "stop",
        FinishReason::Length | FinishReason::Deadline | FinishReason::Cancelled => "length",
    }
}

/// vLLM's `stop_reason`: the stop string, or what ended it from outside.
pub fn stop_reason(reason: FinishReason, stop: Option<String>) -> Option<String> {
    match reason {
        FinishReason::Stop => stop,
        FinishReason::Length => None,
        FinishReason::Deadline | FinishReason::Cancelled => Some(reason.name().into()),
    }
}

/// A whole answer.
pub fn whole<'a>(document: Value, usages: impl Iterator<Item = &'a Usage>) -> Response {
    let mut response = axum::Json(document).into_response();
    let degraded: Vec<String> = usages.filter_map(degraded_header).collect();
    // Names of formats and numbers: always a header's value.
    if let Ok(value) = HeaderValue::from_str(&degraded.join("; "))
        && !degraded.is_empty()
    {
        response.headers_mut().insert("x-reef-degraded", value);
    }
    response
}
