//! The accept loop and the orderly end.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::response::Response;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{AbortHandle, Id, JoinError, JoinSet};
use tokio::time::{Instant, sleep_until, timeout};
use tower_http::catch_panic::CatchPanicLayer;

use super::connection::{self, Connection};
use super::exchange::answer_panic;
use super::stop::{Stop, Stopping};
use super::traffic::Count;
use super::{Lifecycle, State, open_files, socket};
use crate::error::ApiError;

/// A connection that has been quiet for less may have its first request on the way: it is not closed to
/// make room.
const QUIET_ENOUGH: Duration = Duration::from_secs(1);
/// Newcomers that are being told 503 at once; more are closed without a word.
const TURNING_AWAY: usize = 64;
const TURN_AWAY: Duration = Duration::from_secs(1);
/// Pauses after a failure to accept that only time or a closed connection mends.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// What streams get to say that they end, once the time for draining is over.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// How the server ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drained {
    /// Requests in flight when it was told to stop.
    pub in_flight: usize,
    /// Those of them that were cut off.
    pub cut_off: usize,
    /// It ended because the engine died: the caller should say so in its exit status.
    pub engine_died: bool,
}

/// Serves `router` on `listener` until told to stop, or until the engine dies.
///
/// On [`Stopping::Drain`] the readiness becomes [`State::Draining`]: `/health` is to be 503, requests that
/// ask for work are refused with 503, connections close after their answer, and the port stays open so that
/// balancers see a reason rather than nothing. Once nothing is in flight it returns; at
/// [`drain_timeout`](super::Limits::drain_timeout) the readiness becomes [`State::CutOff`], and what has not
/// ended two seconds later is dropped. On [`Stopping::Now`] everything is dropped.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    lifecycle: Arc<Lifecycle>,
    mut stop: Stop,
) -> Drained {
    let panics = lifecycle.clone();
    let on_panic = move |panic| -> Response { answer_panic(&panics, panic) };
    let fitting = open_files::connections().unwrap_or(usize::MAX);
    if fitting < lifecycle.limits.connections {
        tracing::warn!(fitting, "the limit of open files (ulimit -n) allows fewer connections");
    }
    let mut server = Server {
        listener,
        router: router.layer(CatchPanicLayer::custom(on_panic)),
        most: lifecycle.limits.connections.min(fitting).max(1),
        lifecycle,
        draining: watch::Sender::new(false),
        tasks: JoinSet::new(),
        open: HashMap::new(),
        turning_away: JoinSet::new(),
        pause: None,
        paused_for: Duration::ZERO,
    };
    let how = server.run(&mut stop).await;
    let engine_died = how.is_none();
    let in_flight = server.in_flight();
    tracing::info!(in_flight, engine_died, "stopping");
    let cut_off = match how {
        Some(Stopping::Now) => in_flight,
        Some(Stopping::Drain) | None => server.drain(&mut stop).await,
    };
    server.lifecycle.readiness.set(State::CutOff);
    server.tasks.shutdown().await;
    Drained { in_flight, cut_off, engine_died }
}

/// What a newcomer is told where everybody is at work, without hyper.
fn full_house() -> String {
    let error = ApiError::unavailable("too many connections are at work: send this again later");
    let error = ApiError { code: Some("too_many_connections"), ..error };
    let body = error.body().to_string();
    let (length, seconds) = (body.len(), error.retry_after_s.unwrap_or(1));
    format!(
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: {seconds}\r\n\
         connection: close\r\ncontent-length: {length}\r\n\r\n{body}"
    )
}

struct Server {
    listener: TcpListener,
    router: Router,
    most: usize,
    lifecycle: Arc<Lifecycle>,
    draining: watch::Sender<bool>,
    tasks: JoinSet<()>,
    open: HashMap<Id, (Arc<Connection>, AbortHandle)>,
    turning_away: JoinSet<()>,
    /// Until when nothing is accepted.
    pause: Option<Instant>,
    paused_for: Duration,
}

enum Happening {
    Accepted(io::Result<TcpStream>),
    Ended(Result<(Id, ()), JoinError>),
    TurnedAway,
    PauseOver,
}

impl Server {
    /// Accepts until told to stop; `None`: the engine has died.
    async fn run(&mut self, stop: &mut Stop) -> Option<Stopping> {
        let dead = self.lifecycle.readiness.reached(State::Dead);
        tokio::pin!(dead);
        loop {
            tokio::select! {
                biased;
                how = stop.next() => return Some(how),
                () = &mut dead => return None,
                happening = self.next() => self.see(happening),
            }
        }
    }

    /// Lets what is in flight finish; returns how many requests did not.
    async fn drain(&mut self, stop: &mut Stop) -> usize {
        self.lifecycle.readiness.set(State::Draining);
        // Whoever listens is told; nobody may.
        self.draining.send_replace(true);
        let limit = Instant::now() + self.lifecycle.limits.drain_timeout;
        for (state, until) in [(State::Draining, limit), (State::CutOff, limit + LAST_WORDS)] {
            self.lifecycle.readiness.set(state);
            if state == State::CutOff {
                self.lifecycle.last_words.end_all();
            }
            while self.in_flight() > 0 {
                tokio::select! {
                    biased;
                    how = stop.next() => if how == Stopping::Now { return self.in_flight() },
                    () = sleep_until(until) => break,
                    happening = self.next() => self.see(happening),
                }
            }
        }
        self.in_flight()
    }

    fn in_flight(&self) -> usize {
        self.open.values().filter(|(connection, _)| connection.quiet_since().is_none()).count()
    }

    /// Cancel-safe.
    async fn next(&mut self) -> Happening {
        let pause = self.pause;
        tokio::select! {
            Some(ended) = self.tasks.join_next_with_id() => Happening::Ended(ended),
            Some(_) = self.turning_away.join_next() => Happening::TurnedAway,
            accepted = self.listener.accept(), if pause.is_none() => {
                Happening::Accepted(accepted.map(|(stream, _)| stream))
            }
            () = sleep_until(pause.unwrap_or_else(Instant::now)), if pause.is_some() => {
                Happening::PauseOver
            }
        }
    }

    fn see(&mut self, happening: Happening) {
        match happening {
            Happening::Accepted(Ok(stream)) => self.accept(stream),
            Happening::Accepted(Err(error)) => self.fail(&error),
            Happening::Ended(ended) => self.end(ended),
            Happening::TurnedAway => {}
            Happening::PauseOver => self.pause = None,
        }
    }

    fn accept(&mut self, stream: TcpStream) {
        self.paused_for = Duration::ZERO;
        self.lifecycle.traffic.count(Count::Accepted);
        socket::tune(&stream, self.lifecycle.limits.write_timeout);
        if self.open.len() >= self.most && !self.evict(QUIET_ENOUGH) {
            return self.turn_away(stream);
        }
        let connection = Arc::new(Connection::new());
        let (router, lifecycle) = (self.router.clone(), self.lifecycle.clone());
        let draining = self.draining.subscribe();
        let run = connection::run(stream, connection.clone(), router, lifecycle, draining);
        let task = self.tasks.spawn(run);
        self.open.insert(task.id(), (connection, task));
        self.lifecycle.traffic.set_open(self.open.len());
    }

    /// Closes the connection that has been quiet longest, if one has been for `at_least`.
    fn evict(&mut self, at_least: Duration) -> bool {
        let quiet = self
            .open
            .iter()
            .filter_map(|(&id, (connection, _))| connection.quiet_since().map(|since| (since, id)));
        let Some((since, id)) = quiet.min_by_key(|&(since, _)| since) else { return false };
        if since.elapsed() < at_least {
            return false;
        }
        if let Some((_, task)) = self.open.remove(&id) {
            task.abort();
        }
        self.lifecycle.traffic.count(Count::Evicted);
        true
    }

    /// Says 503 without reading the request.
    fn turn_away(&mut self, mut stream: TcpStream) {
        self.lifecycle.traffic.count(Count::TurnedAway);
        if self.turning_away.len() >= TURNING_AWAY {
            return;
        }
        self.turning_away.spawn(async move {
            let say = async {
                stream.write_all(full_house().as_bytes()).await?;
                stream.shutdown().await?;
                connection::discard(stream).await
            };
            // Whoever does not listen misses it.
            let _ = timeout(TURN_AWAY, say).await;
        });
    }

    /// A connection that broke before we took it concerns nobody; anything else (no descriptors, no
    /// memory) would fail again at once.
    fn fail(&mut self, error: &io::Error) {
        use io::ErrorKind::{ConnectionAborted, ConnectionReset, Interrupted};
        if matches!(error.kind(), ConnectionAborted | ConnectionReset | Interrupted) {
            return;
        }
        let evicted = self.evict(Duration::ZERO);
        self.paused_for = (self.paused_for * 2).clamp(FIRST_PAUSE, LONGEST_PAUSE);
        tracing::warn!(%error, evicted, pause = ?self.paused_for, "no connection can be taken");
        self.pause = Some(Instant::now() + self.paused_for);
    }

    fn end(&mut self, ended: Result<(Id, ()), JoinError>) {
        let id = match ended {
            Ok((id, ())) => id,
            Err(error) => {
                if error.is_panic() {
                    self.lifecycle.traffic.count(Count::Panic);
                    tracing::error!(%error, "a stream panicked; this is a bug");
                }
                error.id()
            }
        };
        self.open.remove(&id);
        self.lifecycle.traffic.set_open(self.open.len());
    }
}
