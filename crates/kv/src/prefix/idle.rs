//! The order in which idle blocks give way: queues, each least recently used first, every operation in
//! constant time.

use std::cmp::Reverse;

/// Which queue an idle block waits in; those of an earlier one give way first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Turn {
    /// Left the window of a sequence that goes on, and served no hit.
    LeftWindow,
    Ordinary,
    /// A client asked to retain it for a time.
    Pinned,
    /// The head of the waiting queue is about to use it.
    Protected,
}

const TURNS: usize = 4;
const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Seat {
    turn: Option<Turn>,
    previous: u32,
    next: u32,
    /// When it was put here, counted in puts.
    stamp: u64,
}

const EMPTY: Seat = Seat { turn: None, previous: NONE, next: NONE, stamp: 0 };

/// Doubly linked queues through one table.
#[derive(Debug)]
pub(crate) struct IdleQueues {
    seats: Vec<Seat>,
    first: [u32; TURNS],
    last: [u32; TURNS],
    stamp: u64,
}

impl IdleQueues {
    pub(crate) fn new() -> IdleQueues {
        IdleQueues { seats: Vec::new(), first: [NONE; TURNS], last: [NONE; TURNS], stamp: 0 }
    }

    /// The queue that `node` waits in.
    pub(crate) fn turn(&self, node: usize) -> Option<Turn> {
        self.seats.get(node).and_then(|seat| seat.turn)
    }

    /// Puts `node` at the end of a queue, whichever it was in before.
    pub(crate) fn push(&mut self, node: usize, turn: Turn) {
        self.remove(node);
        if self.seats.len() <= node {
            self.seats.resize(node + 1, EMPTY);
        }
        let last = std::mem::replace(&mut self.last[turn as usize], node as u32);
        self.stamp += 1;
        self.seats[node] = Seat { turn: Some(turn), previous: last, next: NONE, stamp: self.stamp };
        match last {
            NONE => self.first[turn as usize] = node as u32,
            last => self.seats[last as usize].next = node as u32,
        }
    }

    /// Takes `node` out, where it waits at all.
    pub(crate) fn remove(&mut self, node: usize) {
        let Some(Seat { turn: Some(turn), previous, next, .. }) = self.seats.get(node).copied()
        else {
            return;
        };
        match previous {
            NONE => self.first[turn as usize] = next,
            previous => self.seats[previous as usize].next = next,
        }
        match next {
            NONE => self.last[turn as usize] = previous,
            next => self.seats[next as usize].previous = previous,
        }
        self.seats[node] = EMPTY;
    }

    /// Whether `node` gives way after `other`; both wait.
    pub(crate) fn is_behind(&self, node: usize, other: usize) -> bool {
        let rank = |node: usize| (self.seats[node].turn, self.seats[node].stamp);
        rank(node) > rank(other)
    }

    /// The one that gives way next.
    pub(crate) fn first(&self) -> Option<usize> {
        self.first.iter().find(|first| **first != NONE).map(|first| *first as usize)
    }

    pub(crate) fn table_bytes(&self) -> usize {
        self.seats.capacity() * size_of::<Seat>()
    }
}

/// Sort key of blocks of equal age: tails before heads, so that what is left can still be reached.
pub(crate) fn tails_first(depth: usize) -> Reverse<usize> {
    Reverse(depth)
}
