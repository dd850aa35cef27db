//! Server-sent events, exactly as OpenAI's and vLLM's clients read them: LF line ends, `data: ` with its
//! space, no `event:` lines, whole events in every write; comments only where they were asked for (vLLM's
//! client loses what follows one).

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::Response;
use bytes::Bytes;
use http_body::Frame;
use serde::Serialize;

use crate::error::ApiError;
use crate::generation::{Merged, Update};

/// Events that are to be written next.
#[derive(Debug, Default)]
pub struct Events(Vec<u8>);

impl Events {
    /// One event with `value` as its data.
    pub fn push(&mut self, value: &impl Serialize) {
        self.0.extend_from_slice(b"data: ");
        // Our own shapes: maps with string keys, nothing that refuses.
        serde_json::to_writer(&mut self.0, value).expect("serializes");
        self.0.extend_from_slice(b"\n\n");
    }

    /// The last event of a stream.
    pub fn push_done(&mut self) {
        self.0.extend_from_slice(b"data: [DONE]\n\n");
    }

    /// A failure in the middle of a stream.
    pub fn push_error(&mut self, error: &ApiError) {
        self.push(&error.body());
    }

    /// A line that readers skip.
    pub fn push_comment(&mut self, comment: &str) {
        let line = comment.replace(['\n', '\r'], " ");
        self.0.extend_from_slice(b": ");
        self.0.extend_from_slice(line.as_bytes());
        self.0.extend_from_slice(b"\n\n");
    }

    fn take(&mut self) -> Option<Bytes> {
        (!self.0.is_empty()).then(|| std::mem::take(&mut self.0).into())
    }
}

/// Writes updates as one kind of event stream.
pub trait Narrator: Send + Unpin + 'static {
    /// Writes what `update` of generation `index` leads to.
    fn write(&mut self, index: usize, update: Update, events: &mut Events);

    /// Nothing more is known now: writes what was held back to be joined with what follows.
    fn flush(&mut self, events: &mut Events);

    /// Writes what stands between the end of all generations and the `[DONE]`.
    fn end(&mut self, events: &mut Events);
}

/// The body of an event stream. Dropping it, as happens when the client goes, ends its generations.
struct EventStream<N> {
    merged: Merged,
    narrator: N,
    events: Events,
    ended: bool,
}

impl<N: Narrator> EventStream<N> {
    /// Writes all that is known now.
    fn fill(&mut self, context: &mut Context<'_>) {
        while !self.ended && self.events.0.len() < FRAME_BYTES {
            match self.merged.poll_update(context) {
                Poll::Pending => return self.narrator.flush(&mut self.events),
                Poll::Ready(Some((index, update))) => {
                    self.narrator.write(index, update, &mut self.events);
                }
                Poll::Ready(None) => {
                    self.narrator.end(&mut self.events);
                    self.events.push_done();
                    self.ended = true;
                }
            }
        }
    }
}

/// A frame is not filled beyond this while more is known: other streams have their turn.
const FRAME_BYTES: usize = 16 << 10;

impl<N: Narrator> http_body::Body for EventStream<N> {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.fill(context);
        match self.events.take() {
            Some(bytes) => Poll::Ready(Some(Ok(Frame::data(bytes)))),
            None if self.ended => Poll::Ready(None),
            None => Poll::Pending,
        }
    }
}

/// A response that streams what `narrator` writes of `generations`.
pub fn response(merged: Merged, narrator: impl Narrator) -> Response {
    let stream = EventStream { merged, narrator, events: Events::default(), ended: false };
    let mut response = Response::new(Body::new(stream));
    let headers = response.headers_mut();
    headers
        .insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // nginx holds answers back otherwise.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_framed_as_clients_read_them() {
        let mut events = Events::default();
        events.push(&serde_json::json!({"text": "a\nb"}));
        events.push_comment("paused\nfor memory");
        events.push_done();
        let written = String::from_utf8(events.0).unwrap();
        assert_eq!(
            written,
            "data: {\"text\":\"a\\nb\"}\n\n: paused for memory\n\ndata: [DONE]\n\n"
        );
    }
}
