//! The last times that somebody's memory gave way, of all requests, for people to look at.

use std::collections::VecDeque;

use crate::event::{Event, PauseKind};

/// Entries kept.
const MOST_ENTRIES: usize = 200;
/// What is alike within so many microseconds is one entry: at hundreds of steps a second the entries would
/// otherwise not reach back for one.
const TOGETHER_US: u64 = 1_000_000;

/// One time that memory gave way, or several within a second: of one request, by one rung, for one reason.
#[derive(Clone, Debug, PartialEq)]
pub struct Relieved {
    /// The engine's time in microseconds, of the first of them.
    pub at_us: u64,
    /// The step before which it happened, of the first of them.
    pub step: u64,
    /// Key of the request whose memory it was; `None`: the prefix cache's.
    pub request: Option<u64>,
    /// The rung's name in JSON: re-encoded, dropped, gave way as a whole, or `drop_prefix`.
    pub rung: &'static str,
    /// Blocks it was done to; 0 for idle prefixes, which are counted in bytes alone.
    pub blocks: usize,
    /// Bytes given back.
    pub bytes: usize,
    /// Why, as in JSON.
    pub reason: &'static str,
    /// Expected rise of the negative log-likelihood in nats per later token; 0 where nothing is lost.
    pub harm: f64,
}

/// The last of them, oldest first.
#[derive(Clone, Debug, Default)]
pub(crate) struct Recent(VecDeque<Relieved>);

impl Recent {
    /// Notes what an event tells of memory.
    pub fn note(&mut self, at_us: u64, request: u64, event: &Event) {
        let request = Some(request);
        match event {
            Event::Relief(entry) => self.push(Relieved {
                at_us,
                step: entry.step,
                request,
                rung: entry.rung.name(),
                blocks: entry.blocks,
                bytes: entry.bytes,
                reason: entry.reason.name(),
                harm: entry.harm,
            }),
            Event::Paused(pause) => self.push(Relieved {
                at_us,
                step: pause.step,
                request,
                rung: pause.kind.name(),
                blocks: pause.blocks,
                // Whoever waits keeps its memory.
                bytes: if pause.kind == PauseKind::Wait { 0 } else { pause.bytes },
                reason: pause.reason.name(),
                harm: 0.0,
            }),
            _ => {}
        }
    }

    /// Idle prefixes were given up.
    pub fn note_evicted(&mut self, at_us: u64, step: u64, bytes: usize) {
        if bytes > 0 {
            let (rung, reason) = ("drop_prefix", "demand");
            self.push(Relieved {
                at_us,
                step,
                request: None,
                rung,
                blocks: 0,
                bytes,
                reason,
                harm: 0.0,
            });
        }
    }

    fn push(&mut self, relieved: Relieved) {
        let late = |known: &&mut Relieved| known.at_us + TOGETHER_US > relieved.at_us;
        let alike = self.0.iter_mut().rev().take_while(late).find(|known| {
            let kind = |of: &Relieved| (of.request, of.rung, of.reason);
            kind(known) == kind(&relieved)
        });
        if let Some(known) = alike {
            known.blocks += relieved.blocks;
            known.bytes += relieved.bytes;
            known.harm += relieved.harm;
            return;
        }
        if self.0.len() == MOST_ENTRIES {
            self.0.pop_front();
        }
        self.0.push_back(relieved);
    }

    pub fn entries(&self) -> impl Iterator<Item = &Relieved> {
        self.0.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{Pause, PauseReason};

    #[test]
    fn the_last_are_kept_and_those_of_a_second_are_one() {
        let mut recent = Recent::default();
        for second in 0..300 {
            recent.note_evicted(second * TOGETHER_US, second, 100);
            recent.note_evicted(second * TOGETHER_US + 5, second + 1, 50);
        }
        let now_us = 300 * TOGETHER_US;
        recent.note_evicted(now_us, 300, 0);
        let (branch, blocks, bytes, lost_tokens) = (0, 3, 300, 0);
        for kind in PauseKind::ALL.into_iter().chain([PauseKind::Swap]) {
            let reason = PauseReason::Demand;
            let pause = Pause { branch, step: 301, kind, reason, blocks, bytes, lost_tokens };
            recent.note(now_us, 7, &Event::Paused(pause));
        }
        recent.note(now_us, 7, &Event::Prefilled { tokens: 1, total: 2 });
        let entries: Vec<&Relieved> = recent.entries().collect();
        let first = (entries[0].step, entries[0].bytes);
        assert_eq!((entries.len(), first), (MOST_ENTRIES, (103, 150)));
        let last: Vec<_> =
            entries[197..].iter().map(|last| (last.request, last.rung, last.bytes)).collect();
        let of_request = Some(7);
        assert_eq!(
            last,
            [(of_request, "wait", 0), (of_request, "swap", 600), (of_request, "recompute", 300)]
        );
    }
}
