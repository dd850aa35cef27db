//! Around every handler: the id goes back, the answer is counted, a refusal gets its line.

use std::sync::Arc;

use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderValue, Method, header};
use axum::middleware::Next;
use axum::response::Response;
use tracing::Span;

use super::{REFUSAL_TARGET, RequestContext};
use crate::app::App;
use crate::error::Refused;
use crate::guarded::guarded;

/// Most characters of a path that a line shows.
const PATH_CHARS_MAX: usize = 200;
/// Asked every second by whoever waits for the server: no is the answer they look for.
const PROBE: &str = "/health";

/// A layer of the router, around all of its handlers.
pub async fn track(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let method = request.method().clone();
    let route = request.extensions().get::<MatchedPath>().cloned();
    let pattern = route.as_ref().map(MatchedPath::as_str);
    let span = request_span(&request, pattern);
    let context = RequestContext::new(request.headers(), pattern.unwrap_or("none"), span);
    let path: String = request.uri().path().escape_debug().take(PATH_CHARS_MAX).collect();
    let mut response = context.clone().scope(next.run(request)).await;
    app.metrics.answered(&method, pattern, response.status(), context.arrived.elapsed());
    if let Ok(id) = HeaderValue::from_str(&context.id) {
        response.headers_mut().insert("x-request-id", id);
    }
    let is_refusal = response.status().is_client_error() || response.status().is_server_error();
    if is_refusal && pattern != Some(PROBE) {
        refused(&context, &method, &path, &response);
    }
    #[cfg(feature = "otlp")]
    super::otlp::answered(&context, response.status());
    let streams = response.headers().get(header::CONTENT_TYPE);
    match streams.is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream")) {
        // It counts as open until it has been sent or given up.
        true => response.map(|body| guarded(body, app.metrics.stream())),
        false => response,
    }
}

#[cfg(feature = "otlp")]
fn request_span(request: &Request, route: Option<&str>) -> Span {
    super::otlp::request_span(request.method(), route, request.headers())
}

#[cfg(not(feature = "otlp"))]
fn request_span(_: &Request, _: Option<&str>) -> Span {
    Span::none()
}

/// Messages may repeat what the client has sent, so they are not logged.
fn refused(context: &RequestContext, method: &Method, path: &str, response: &Response) {
    let refused = response.extensions().get::<Refused>();
    let (kind, code) = (refused.map(|of| of.kind), refused.and_then(|of| of.code));
    let (id, route, status) = (&*context.id, &*context.route, response.status().as_u16());
    let elapsed_ms = context.arrived.elapsed().as_micros() as f64 / 1e3;
    if response.status().is_server_error() {
        tracing::warn!(target: REFUSAL_TARGET, id, %method, route, path, status, kind, code, elapsed_ms, "refused");
    } else {
        tracing::info!(target: REFUSAL_TARGET, id, %method, route, path, status, kind, code, elapsed_ms, "refused");
    }
}
