//! One request and its answer: limits of the body, panics, draining, and when the answer is complete.

use std::any::Any;
use std::convert::Infallible;
use std::fmt;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::header::{CONNECTION, HeaderValue, TRANSFER_ENCODING};
use axum::http::{Method, Request, Response, StatusCode};
use axum::response::IntoResponse;
use bytes::Bytes;
use http_body::{Body as HttpBody, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::time::{Instant, Sleep, sleep_until};
use tower::Service;

use super::connection::Connection;
use super::traffic::Count;
use super::{Lifecycle, State};
use crate::error::ApiError;
use crate::guarded::guarded;

/// Answers one request of a connection.
pub(super) async fn exchange(
    request: Request<Incoming>,
    mut router: Router,
    lifecycle: Arc<Lifecycle>,
    connection: Arc<Connection>,
) -> Result<Response<Body>, Infallible> {
    connection.begin();
    let exchange = Exchange(connection.clone());
    if let Some(refusal) = refuse_unread(&request, &lifecycle) {
        if !request.body().is_end_stream() {
            connection.leave_body();
        }
        return Ok(closing(refusal.into_response()));
    }
    let meter = Arc::new(Meter {
        lifecycle: lifecycle.clone(),
        connection,
        held: AtomicUsize::new(0),
        verdict: OnceLock::new(),
    });
    // A length beside the chunks has been dropped by hyper: somebody before us may have gone by it, and what
    // they took for the body's rest must not be read as a request (RFC 9112, 6.1).
    let is_chunked = request.headers().contains_key(TRANSFER_ENCODING);
    let request = request.map(|inner| Body::new(Metered::new(inner, meter.clone())));
    let Ok(response) = router.call(request).await;
    let response = match meter.verdict.get() {
        Some(verdict) => closing(verdict.refusal(&lifecycle).into_response()),
        None => response,
    };
    let response = match is_chunked || lifecycle.readiness.state() >= State::Draining {
        true => closing(response),
        false => response,
    };
    Ok(response.map(|body| guarded(body, exchange)))
}

/// What can be refused before its body is read.
fn refuse_unread(request: &Request<Incoming>, lifecycle: &Lifecycle) -> Option<ApiError> {
    let is_look = matches!(*request.method(), Method::GET | Method::HEAD | Method::OPTIONS);
    if !is_look && lifecycle.readiness.state() >= State::Draining {
        return Some(ApiError::unavailable("the server is stopping: send this again"));
    }
    let bytes = request.body().size_hint().lower();
    let most = lifecycle.limits.body_bytes;
    (bytes > most as u64).then(|| Verdict::TooLarge.refusal(lifecycle))
}

/// The last answer of its connection.
fn closing(mut response: Response<Body>) -> Response<Body> {
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    response
}

/// The answer to a request whose handler panicked.
pub(super) fn answer_panic(
    lifecycle: &Lifecycle,
    panic: Box<dyn Any + Send + 'static>,
) -> Response<Body> {
    lifecycle.traffic.count(Count::Panic);
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("no text");
    tracing::error!(panic = text, "a handler panicked; this is a bug");
    ApiError::internal("the server has a bug and could not answer; its log says more")
        .into_response()
}

/// From a request's arrival to the last byte of its answer.
struct Exchange(Arc<Connection>);

impl Drop for Exchange {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// Why a body is not read to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    TooLarge,
    TooSlow,
    NoRoom,
}

impl Verdict {
    fn refusal(self, lifecycle: &Lifecycle) -> ApiError {
        let limits = &lifecycle.limits;
        match self {
            Verdict::TooLarge => {
                let most = limits.body_bytes;
                let message = format!("the body is over {most} bytes: send less at once");
                let code = Some("body_too_large");
                let status = StatusCode::PAYLOAD_TOO_LARGE;
                ApiError { code, ..ApiError::new(status, "invalid_request_error", message) }
            }
            Verdict::TooSlow => {
                let (silence_s, rate) = (limits.body_timeout.as_secs(), limits.body_bytes_s);
                let message = format!(
                    "the body came too slowly: send it without a pause over {silence_s} s and at {rate} \
                     bytes/s at least"
                );
                let code = Some("body_too_slow");
                let status = StatusCode::REQUEST_TIMEOUT;
                ApiError { code, ..ApiError::new(status, "invalid_request_error", message) }
            }
            Verdict::NoRoom => {
                ApiError::unavailable("too many large bodies at once: send this again later")
            }
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Verdict::TooLarge => "the body is too large",
            Verdict::TooSlow => "the body came too slowly",
            Verdict::NoRoom => "there are too many bodies",
        })
    }
}

impl std::error::Error for Verdict {}

/// What a request's body has taken. The bytes count until the handler has answered and the body is gone.
struct Meter {
    lifecycle: Arc<Lifecycle>,
    connection: Arc<Connection>,
    held: AtomicUsize,
    verdict: OnceLock<Verdict>,
}

impl Meter {
    fn take(&self, bytes: usize) -> Result<(), Verdict> {
        let limits = &self.lifecycle.limits;
        if self.held.load(Ordering::Relaxed) + bytes > limits.body_bytes {
            return Err(Verdict::TooLarge);
        }
        if !self.lifecycle.traffic.take_body_bytes(bytes, limits.bodies_bytes) {
            return Err(Verdict::NoRoom);
        }
        self.held.fetch_add(bytes, Ordering::Relaxed);
        Ok(())
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        self.lifecycle.traffic.give_body_bytes(self.held.load(Ordering::Relaxed));
    }
}

/// A request's body within its limits.
struct Metered {
    inner: Incoming,
    meter: Arc<Meter>,
    start: Instant,
    heard: Instant,
    is_over: bool,
    timer: Option<Pin<Box<Sleep>>>,
}

impl Metered {
    fn new(inner: Incoming, meter: Arc<Meter>) -> Metered {
        let now = Instant::now();
        let is_over = inner.is_end_stream();
        Metered { inner, meter, start: now, heard: now, is_over, timer: None }
    }

    /// When the next bytes are to be here.
    fn deadline(&self) -> Instant {
        let limits = &self.meter.lifecycle.limits;
        let bytes = self.meter.held.load(Ordering::Relaxed) as f64;
        let fair = Duration::from_secs_f64(bytes / limits.body_bytes_s.max(1) as f64);
        (self.heard + limits.body_timeout).min(self.start + limits.body_timeout + fair)
    }

    fn refuse(&mut self, verdict: Verdict) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        // The first verdict stays.
        let _ = self.meter.verdict.set(verdict);
        Poll::Ready(Some(Err(axum::Error::new(verdict))))
    }
}

impl HttpBody for Metered {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        match Pin::new(&mut self.inner).poll_frame(context) {
            Poll::Ready(Some(Ok(frame))) => {
                self.heard = Instant::now();
                self.is_over = self.inner.is_end_stream();
                let bytes = frame.data_ref().map_or(0, Bytes::len);
                match self.meter.take(bytes) {
                    Ok(()) => Poll::Ready(Some(Ok(frame))),
                    Err(verdict) => self.refuse(verdict),
                }
            }
            Poll::Ready(Some(Err(error))) => Poll::Ready(Some(Err(axum::Error::new(error)))),
            Poll::Ready(None) => {
                self.is_over = true;
                Poll::Ready(None)
            }
            Poll::Pending => {
                let deadline = self.deadline();
                let timer = self.timer.get_or_insert_with(|| Box::pin(sleep_until(deadline)));
                if timer.deadline() != deadline {
                    timer.as_mut().reset(deadline);
                }
                match timer.as_mut().poll(context) {
                    Poll::Ready(()) => self.refuse(Verdict::TooSlow),
                    Poll::Pending => Poll::Pending,
                }
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

impl Drop for Metered {
    fn drop(&mut self) {
        if !self.is_over {
            self.meter.connection.leave_body();
        }
    }
}
