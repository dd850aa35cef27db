//! What must not be: nothing runs although somebody waits and memory is free; an invariant is broken.

use reef_kv::Sequence;
use reef_kv::check_invariants;
use reef_kv::invariant::Violation;

use crate::engine::Engine;
use crate::session::EngineError;

/// Turns without progress after which the engine helps itself, then after which it gives up on the first
/// in the queue.
const HEAL_TURNS: u32 = 2;
const GIVE_UP_TURNS: u32 = 8;

impl Engine {
    /// Whether it stands still and helps itself: quotas and shares do not bind then.
    pub(crate) fn heals(&self) -> bool {
        self.stalled_turns >= HEAL_TURNS
    }

    /// Looks whether the engine stands still although it need not.
    pub(crate) fn watch(&mut self, progressed: bool) {
        let pending = self.runs.values().any(|run| !run.is_out() && !run.is_running());
        if progressed || pending || self.requests.is_empty() {
            self.stalled_turns = 0;
            return;
        }
        self.stalled_turns += 1;
        self.queue_changed = true;
        if self.stalled_turns < HEAL_TURNS {
            return;
        }
        self.counters.stalls += 1;
        if self.stalled_turns < GIVE_UP_TURNS {
            // What only serves the future makes room for the present.
            if let Some(cache) = &mut self.prefix {
                cache.clear();
            }
            return;
        }
        self.stalled_turns = 0;
        let first = self.waiting.first().or(self.running.first()).copied();
        if let Some(run) = first.and_then(|id| self.runs.get(&id)) {
            let request = run.request;
            self.fail(request, EngineError::Stalled);
        }
    }

    /// Checks every invariant of pool and engine; what is broken is counted and returned.
    pub fn check(&mut self) -> Vec<Violation> {
        let sequences: Vec<&Sequence> = self.runs.values().map(|run| &run.sequence).collect();
        let mut broken = check_invariants(&self.pool, &sequences);
        broken.extend(self.broken_lists());
        let found = self.prefix.as_mut().and_then(|cache| cache.inconsistency());
        broken.extend(found.map(|found| Violation {
            id: "prefix-cache",
            sentence: "index, tree, queues and pool agree on what is cached",
            found,
        }));
        self.counters.violations += broken.len() as u64;
        broken
    }

    /// The engine's own: lists and states agree.
    fn broken_lists(&self) -> Option<Violation> {
        let out = self.runs.values().filter(|run| run.is_out()).count();
        let running = self.runs.values().filter(|run| run.is_running()).count();
        let in_slots = self.runs.values().filter(|run| run.slot.is_some()).count();
        let found = format!(
            "{out} out, {} waiting; {running} running, {} listed, {in_slots} in slots, {} slots taken",
            self.waiting.len(),
            self.running.len(),
            self.slots.len()
        );
        let good = out == self.waiting.len()
            && running == self.running.len()
            && in_slots == running
            && self.slots.len() == running;
        let violation = Violation {
            id: "lists-are-states",
            sentence: "each run is in the list of its state, and in a slot exactly while it runs",
            found,
        };
        (!good).then_some(violation)
    }
}
