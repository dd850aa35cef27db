//! From a listening socket to the last answer: accepting, limits, readiness, draining.
//!
//! [`serve`] runs its own accept loop over hyper's HTTP/1 connections, because a language model's clients need
//! what `axum::serve` does not give: no Nagle (a token would wait 40 ms for the one before it), an end for
//! those who send or read too slowly, a bound on everything that outsiders can make grow, and an orderly end.
//! TLS and HTTP/2 are left to a proxy.

mod connection;
mod exchange;
mod last_words;
mod limits;
mod open_files;
mod readiness;
mod serve;
mod socket;
mod stop;
mod traffic;

use std::sync::Arc;

use crate::door::Door;
use last_words::LastWords;

pub use limits::Limits;
pub use readiness::{Readiness, State};
pub use serve::{Drained, serve};
pub use socket::bind;
pub use stop::{Stop, Stopper, Stopping};
pub use traffic::{Traffic, TrafficCounts};

/// What the accept loop and the handlers share about the server's own life.
#[derive(Debug, Default)]
pub struct Lifecycle {
    /// What a client may take.
    pub limits: Limits,
    /// Whether requests can be served now.
    pub readiness: Readiness,
    /// What came and went.
    pub traffic: Traffic,
    last_words: LastWords,
}

impl Lifecycle {
    /// A life that is about to begin: loading.
    pub fn new(limits: Limits) -> Lifecycle {
        Lifecycle { limits, ..Lifecycle::default() }
    }

    /// A door to what is behind `door`; what is asked through it and has not ended when the time for
    /// draining is over is ended then. For one door only.
    pub fn watch(&self, door: Arc<dyn Door>) -> Arc<dyn Door> {
        self.last_words.watch(door)
    }
}
