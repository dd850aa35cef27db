//! A server whose routes do what a test needs.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::task::Poll;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use bytes::Bytes;
use http_body::Frame;
use reef_server::lifecycle::{
    Drained, Lifecycle, Limits, State as Life, Stop, Stopper, bind, serve,
};
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// A running server.
pub struct Toy {
    pub address: SocketAddr,
    pub lifecycle: Arc<Lifecycle>,
    pub stopper: Stopper,
    pub seen: Arc<Seen>,
    ended: JoinHandle<Drained>,
}

/// What the routes have seen.
#[derive(Default)]
pub struct Seen {
    /// Lets `/hold` and `/tokens` end.
    pub release: Notify,
    /// Handlers and streams of them that are alive.
    pub alive: AtomicUsize,
    /// Bytes taken from `/flood`.
    pub flooded: AtomicU64,
}

/// Limits that a test can wait for.
pub fn short() -> Limits {
    Limits {
        head_timeout: Duration::from_millis(400),
        idle_timeout: Duration::from_millis(800),
        body_timeout: Duration::from_millis(400),
        write_timeout: Duration::from_millis(500),
        drain_timeout: Duration::from_millis(600),
        body_bytes: 100_000,
        bodies_bytes: 150_000,
        ..Limits::default()
    }
}

impl Toy {
    pub async fn start(limits: Limits) -> Toy {
        let listener = bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = listener.local_addr().unwrap();
        let lifecycle = Arc::new(Lifecycle::new(limits));
        lifecycle.readiness.set(Life::Ready);
        let (stopper, stop) = Stop::told();
        let seen = Arc::new(Seen::default());
        let router = router(Arc::new(Shared { seen: seen.clone(), lifecycle: lifecycle.clone() }));
        let ended = tokio::spawn(serve(listener, router, lifecycle.clone(), stop));
        Toy { address, lifecycle, stopper, seen, ended }
    }

    /// How the server ended.
    pub async fn ended(self) -> Drained {
        timeout(Duration::from_secs(20), self.ended).await.expect("it does not end").unwrap()
    }

    /// Waits until `alive` handlers are at work.
    pub async fn wait_alive(&self, alive: usize) {
        let reached = async {
            while self.seen.alive.load(Ordering::SeqCst) != alive {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(Duration::from_secs(20), reached).await.expect("the handlers' number");
    }
}

struct Shared {
    seen: Arc<Seen>,
    lifecycle: Arc<Lifecycle>,
}

type Toys = State<Arc<Shared>>;

fn router(shared: Arc<Shared>) -> Router {
    Router::new()
        .route("/ok", get(|| async { "ok" }))
        .route("/health", get(health))
        .route("/length", post(|body: Bytes| async move { body.len().to_string() }))
        .route("/unread", post(|| async { "unread" }))
        .route("/hold", get(hold).post(hold))
        .route("/tokens", get(tokens))
        .route("/flood", get(flood))
        .route("/panic", get(panics))
        .route("/panic_later", get(panics_later))
        .with_state(shared)
}

struct Alive(Arc<Seen>);

impl Alive {
    fn new(seen: &Arc<Seen>) -> Alive {
        seen.alive.fetch_add(1, Ordering::SeqCst);
        Alive(seen.clone())
    }
}

impl Drop for Alive {
    fn drop(&mut self) {
        self.0.alive.fetch_sub(1, Ordering::SeqCst);
    }
}

async fn health(State(shared): Toys) -> Response {
    let state = shared.lifecycle.readiness.state();
    let status = if state == Life::Ready { 200 } else { 503 };
    (axum::http::StatusCode::from_u16(status).unwrap(), state.name()).into_response()
}

/// Answers once released, or at the last moment.
async fn hold(State(shared): Toys) -> &'static str {
    let _alive = Alive::new(&shared.seen);
    tokio::select! {
        () = shared.seen.release.notified() => "held",
        () = shared.lifecycle.readiness.reached(Life::CutOff) => "last words",
    }
}

async fn panics() -> &'static str {
    panic!("a handler's bug")
}

async fn panics_later() -> Body {
    let mut frames = 0;
    Body::new(Frames(move |_: &mut std::task::Context<'_>| {
        frames += 1;
        assert!(frames < 3, "a stream's bug");
        Poll::Ready(Some(Bytes::from_static(b"frame ")))
    }))
}

/// A token every 20 ms, without an end until released.
async fn tokens(State(shared): Toys) -> Body {
    let alive = Alive::new(&shared.seen);
    let mut clock = Box::pin(tokio::time::sleep(Duration::ZERO));
    let mut release = {
        let seen = shared.seen.clone();
        Box::pin(async move { seen.release.notified().await })
    };
    Body::new(Frames(move |context: &mut std::task::Context<'_>| {
        let _alive = &alive;
        if release.as_mut().poll(context).is_ready() {
            return Poll::Ready(None);
        }
        std::task::ready!(clock.as_mut().poll(context));
        clock.as_mut().reset(tokio::time::Instant::now() + Duration::from_millis(20));
        Poll::Ready(Some(Bytes::from_static(b"token ")))
    }))
}

/// As much as anyone takes.
async fn flood(State(shared): Toys) -> Body {
    let alive = Alive::new(&shared.seen);
    let piece = Bytes::from(vec![b'x'; 4096]);
    Body::new(Frames(move |_: &mut std::task::Context<'_>| {
        alive.0.flooded.fetch_add(piece.len() as u64, Ordering::SeqCst);
        Poll::Ready(Some(piece.clone()))
    }))
}

/// A body out of a closure.
struct Frames<F>(F);

impl<F> http_body::Body for Frames<F>
where
    F: FnMut(&mut std::task::Context<'_>) -> Poll<Option<Bytes>> + Unpin,
{
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        (self.0)(context).map(|bytes| bytes.map(|bytes| Ok(Frame::data(bytes))))
    }
}
