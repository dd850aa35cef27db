//! What is known of an HTTP request while it is worked on.

use std::sync::Arc;
use std::time::Instant;

use axum::http::HeaderMap;
use tracing::Span;

use crate::http::new_id;

tokio::task_local! {
    static CURRENT: RequestContext;
}

/// Longest id that is taken from a client, in bytes.
const ID_BYTES_MAX: usize = 128;

/// What is known of an HTTP request while it is worked on. As with a span, whoever works on it finds it
/// without its being handed through.
#[derive(Clone, Debug)]
pub struct RequestContext {
    /// When its head had come.
    pub arrived: Instant,
    /// `x-request-id`: the client's, or a new one.
    pub id: Arc<str>,
    /// The router's pattern.
    pub route: Arc<str>,
    /// Its span; disabled where traces are not exported.
    pub span: Span,
}

impl RequestContext {
    /// Of a request for `route` that has come now.
    pub(super) fn new(headers: &HeaderMap, route: &str, span: Span) -> RequestContext {
        let given = headers.get("x-request-id").and_then(|id| id.to_str().ok());
        let usable = |id: &&str| {
            (1..=ID_BYTES_MAX).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_graphic())
        };
        let id = given.filter(usable).map_or_else(|| new_id("req").into(), Arc::from);
        RequestContext { arrived: Instant::now(), id, route: route.into(), span }
    }

    /// The one of the request that the running task works on; outside of any, one that has come now.
    pub fn current() -> RequestContext {
        let outside = |_| RequestContext::new(&HeaderMap::new(), "none", Span::none());
        CURRENT.try_with(RequestContext::clone).unwrap_or_else(outside)
    }

    /// Runs `work` as part of this request.
    pub(super) async fn scope<F: Future>(self, work: F) -> F::Output {
        CURRENT.scope(self, work).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_taken_from_clients_where_they_can_be_written_back() {
        let id = |given: &[u8]| {
            let mut headers = HeaderMap::new();
            headers.insert("x-request-id", given.try_into().unwrap());
            RequestContext::new(&headers, "/", Span::none()).id
        };
        assert_eq!(&*id(b"abc-1"), "abc-1");
        let long = [b'a'; ID_BYTES_MAX + 1];
        assert_eq!(id(&long[1..]).len(), ID_BYTES_MAX);
        for unusable in [&long[..], b"", b"a b", b"caf\xe9"] {
            assert!(id(unusable).starts_with("req-"), "{unusable:?}");
        }
    }
}
