//! Ends that found the door full: kept apart so that who says them never waits.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, PoisonError};

use crate::event::FinishReason;

/// Ends left beside the full door, one of each request: no more than requests were ever handed over.
#[derive(Default)]
pub(crate) struct LateEnds(Mutex<BTreeMap<u64, FinishReason>>);

impl LateEnds {
    /// Leaves one; the first of a request counts.
    pub fn leave(&self, key: u64, reason: FinishReason) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).entry(key).or_insert(reason);
    }

    fn take(&self) -> BTreeMap<u64, FinishReason> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Holds back each late end until every command that was before it at the door is obeyed: the request that it
/// ends may be among them.
#[derive(Default)]
pub(crate) struct HeldBack {
    /// Commands obeyed so far.
    obeyed: u64,
    /// (commands obeyed when it is due, request, reason), oldest first.
    held: VecDeque<(u64, u64, FinishReason)>,
}

impl HeldBack {
    /// Takes what was left, before a look through the door, behind which `room` commands wait at most.
    pub fn collect(&mut self, late: &LateEnds, room: usize) {
        let due = self.obeyed + room as u64;
        self.held.extend(late.take().into_iter().map(|(key, reason)| (due, key, reason)));
    }

    /// What is due once `obeyed` more commands are obeyed; all where the door was found `empty`.
    pub fn due(&mut self, obeyed: usize, empty: bool) -> Vec<(u64, FinishReason)> {
        self.obeyed += obeyed as u64;
        let due = match empty {
            true => self.held.len(),
            false => self.held.partition_point(|(due, ..)| *due <= self.obeyed),
        };
        self.held.drain(..due).map(|(_, key, reason)| (key, reason)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_is_due_when_all_before_it_is_obeyed() {
        let (late, mut held) = (LateEnds::default(), HeldBack::default());
        held.due(5, false);
        late.leave(3, FinishReason::Stop);
        late.leave(3, FinishReason::Cancelled);
        held.collect(&late, 10);
        assert_eq!(held.due(9, false), []);
        late.leave(4, FinishReason::Deadline);
        held.collect(&late, 10);
        assert_eq!(held.due(1, false), [(3, FinishReason::Stop)], "ten commands on");
        assert_eq!(held.due(0, true), [(4, FinishReason::Deadline)], "nothing is before it");
        assert_eq!(held.due(0, true), []);
    }
}
