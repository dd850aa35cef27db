//! One connection: what it waits for and how long it may, and its task.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};

use super::exchange::exchange;
use super::limits::{BUFFER_BYTES, Limits};
use super::socket::Socket;
use super::traffic::Count;
use super::{Lifecycle, State};

/// A client that was refused in the middle of its body is read on for this long, at most this much: a
/// connection closed over unread bytes is reset, and the refusal lost.
const LINGER: Duration = Duration::from_secs(2);
const LINGER_BYTES: usize = 64 << 20;

/// What a connection is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Nothing of a next request has come.
    Quiet,
    /// Some of its headers have.
    Head,
    /// It is being answered; the body's own limits hold.
    Busy,
    /// The answer is complete but not all of it written.
    Flushing,
}

#[derive(Debug)]
struct Moment {
    phase: Phase,
    since: Instant,
    /// Since when the socket takes nothing more.
    write_stalled: Option<Instant>,
    /// A request's body was not read to its end.
    is_body_unread: bool,
}

/// What a connection's socket, request and task know of each other.
#[derive(Debug)]
pub(super) struct Connection(Mutex<Moment>);

impl Connection {
    pub(super) fn new() -> Connection {
        Connection(Mutex::new(Moment {
            phase: Phase::Quiet,
            since: Instant::now(),
            write_stalled: None,
            is_body_unread: false,
        }))
    }

    fn moment(&self) -> MutexGuard<'_, Moment> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes came in.
    pub(super) fn heard(&self) {
        let mut moment = self.moment();
        if moment.phase == Phase::Quiet {
            (moment.phase, moment.since) = (Phase::Head, Instant::now());
        }
    }

    /// A request is being answered.
    pub(super) fn begin(&self) {
        let mut moment = self.moment();
        (moment.phase, moment.since) = (Phase::Busy, Instant::now());
    }

    /// Its answer is complete.
    pub(super) fn end(&self) {
        let mut moment = self.moment();
        (moment.phase, moment.since) = (Phase::Flushing, Instant::now());
    }

    /// The socket took some bytes, or none.
    pub(super) fn wrote(&self, progress: bool) {
        let mut moment = self.moment();
        if progress {
            moment.write_stalled = None;
        } else {
            moment.write_stalled.get_or_insert_with(Instant::now);
        }
    }

    /// All that was to be written is.
    pub(super) fn flushed(&self) {
        let mut moment = self.moment();
        if moment.phase == Phase::Flushing {
            (moment.phase, moment.since) = (Phase::Quiet, Instant::now());
        }
    }

    /// A body is left where it is.
    pub(super) fn leave_body(&self) {
        self.moment().is_body_unread = true;
    }

    fn is_body_unread(&self) -> bool {
        self.moment().is_body_unread
    }

    /// Since when nobody waits for an answer on it; `None`: somebody does.
    pub(super) fn quiet_since(&self) -> Option<Instant> {
        let moment = self.moment();
        matches!(moment.phase, Phase::Quiet | Phase::Head).then_some(moment.since)
    }

    /// When it is to be closed, as things are.
    fn deadline(&self, limits: &Limits) -> Option<Instant> {
        let moment = self.moment();
        let stalled = moment.write_stalled.map(|since| since + limits.write_timeout);
        match moment.phase {
            Phase::Quiet => Some(moment.since + limits.idle_timeout),
            Phase::Head => Some(moment.since + limits.head_timeout),
            Phase::Busy | Phase::Flushing => stalled,
        }
    }
}

/// Serves `stream` until it ends, takes too long, or the server stops and nothing is in flight on it.
pub(super) async fn run(
    stream: TcpStream,
    connection: Arc<Connection>,
    router: Router,
    lifecycle: Arc<Lifecycle>,
    mut draining: watch::Receiver<bool>,
) {
    let is_late = *draining.borrow_and_update();
    let service = service_fn(|request| {
        exchange(request, router.clone(), lifecycle.clone(), connection.clone())
    });
    let socket = Socket { stream, connection: connection.clone() };
    let mut http = http1::Builder::new()
        .timer(TokioTimer::new())
        // Ours starts with the first byte and not while nothing has come.
        .header_read_timeout(None)
        .max_header_size(lifecycle.limits.head_bytes)
        .max_buf_size(BUFFER_BYTES.max(lifecycle.limits.head_bytes))
        .keep_alive(!is_late)
        .serve_connection(TokioIo::new(socket), service);
    let mut timer = pin!(sleep_until(Instant::now() + lifecycle.limits.idle_timeout));
    let mut drain = pin!(async {
        // An error: the accept loop is gone, and ends this task.
        if draining.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    });
    let mut is_told = is_late;
    let in_time = poll_fn(|context| {
        if !is_told && drain.as_mut().poll(context).is_ready() {
            is_told = true;
            Pin::new(&mut http).graceful_shutdown();
        }
        if let Poll::Ready(ended) = Pin::new(&mut http).poll(context) {
            if let Err(error) = ended {
                tracing::debug!(%error, "a connection ended early");
            }
            return Poll::Ready(true);
        }
        let Some(deadline) = connection.deadline(&lifecycle.limits) else { return Poll::Pending };
        if timer.deadline() != deadline {
            timer.as_mut().reset(deadline);
        }
        timer.as_mut().poll(context).map(|()| false)
    });
    if !in_time.await {
        lifecycle.traffic.count(Count::TimedOut);
        return;
    }
    if connection.is_body_unread() && lifecycle.readiness.state() < State::CutOff {
        let stream = http.into_parts().io.into_inner().stream;
        // Only whether it is over matters.
        let _ = timeout(LINGER, discard(stream)).await;
    }
}

/// Reads until the peer closes.
pub(super) async fn discard(mut stream: TcpStream) -> std::io::Result<()> {
    let mut buffer = [0; 8192];
    let mut bytes = 0;
    while bytes < LINGER_BYTES {
        match stream.read(&mut buffer).await? {
            0 => break,
            read => bytes += read,
        }
    }
    Ok(())
}
