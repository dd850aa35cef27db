//! What came and went, for metrics.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Counters of the accept loop and its connections; they only grow, except the first two.
#[derive(Debug, Default)]
pub struct Traffic {
    open: AtomicUsize,
    body_bytes: AtomicUsize,
    accepted: AtomicU64,
    turned_away: AtomicU64,
    evicted: AtomicU64,
    timed_out: AtomicU64,
    panics: AtomicU64,
}

/// [`Traffic`] at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TrafficCounts {
    /// Connections now.
    pub open: usize,
    /// Bytes of bodies that handlers have not answered yet, now.
    pub body_bytes: usize,
    /// Connections taken.
    pub accepted: u64,
    /// Connections answered 503 because all others were at work.
    pub turned_away: u64,
    /// Quiet connections that were closed to make room.
    pub evicted: u64,
    /// Connections closed because the client sent or read too slowly, or was quiet for too long.
    pub timed_out: u64,
    /// Handlers and streams that panicked.
    pub panics: u64,
}

/// What can be counted.
#[derive(Clone, Copy, Debug)]
pub(super) enum Count {
    Accepted,
    TurnedAway,
    Evicted,
    TimedOut,
    Panic,
}

impl Traffic {
    /// The numbers now.
    pub fn counts(&self) -> TrafficCounts {
        TrafficCounts {
            open: self.open.load(Ordering::Relaxed),
            body_bytes: self.body_bytes.load(Ordering::Relaxed),
            accepted: self.accepted.load(Ordering::Relaxed),
            turned_away: self.turned_away.load(Ordering::Relaxed),
            evicted: self.evicted.load(Ordering::Relaxed),
            timed_out: self.timed_out.load(Ordering::Relaxed),
            panics: self.panics.load(Ordering::Relaxed),
        }
    }

    pub(super) fn count(&self, what: Count) {
        let counter = match what {
            Count::Accepted => &self.accepted,
            Count::TurnedAway => &self.turned_away,
            Count::Evicted => &self.evicted,
            Count::TimedOut => &self.timed_out,
            Count::Panic => &self.panics,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn set_open(&self, connections: usize) {
        self.open.store(connections, Ordering::Relaxed);
    }

    /// Takes `bytes` of the room for bodies; `false`, and nothing is taken, where it would exceed `most`.
    pub(super) fn take_body_bytes(&self, bytes: usize, most: usize) -> bool {
        let add = |held: usize| held.checked_add(bytes).filter(|&sum| sum <= most);
        self.body_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).is_ok()
    }

    pub(super) fn give_body_bytes(&self, bytes: usize) {
        self.body_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }
}
