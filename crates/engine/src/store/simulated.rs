//! The spill store of the simulation: slots in memory, a virtual clock, faults by script, no thread.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use reef_kv::transfer::{EmptyPages, PinnedPages};

use super::disk::{FaultScript, SimulatedDisk};
use super::format::{SlotFormat, SpillSize};
use super::slot_file::SpillOpenError;
use super::slots::{Discarded, Slots};
use super::transfer::Transfer;
use super::{Spill, SpillDone, SpillError, SpillUsage};

/// How long transfers take, in virtual microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpillTiming {
    /// Before the first slot of a record.
    pub latency_us: u64,
    /// For each slot.
    pub slot_us: u64,
}

/// The clock of a simulated store, in the hands of whoever simulates. Clones are the same clock.
#[derive(Clone, Debug, Default)]
pub struct SpillClock {
    times: Arc<Times>,
}

#[derive(Debug)]
struct Times {
    now_us: AtomicU64,
    due_us: AtomicU64,
}

impl Default for Times {
    fn default() -> Times {
        Times { now_us: AtomicU64::new(0), due_us: AtomicU64::new(u64::MAX) }
    }
}

impl SpillClock {
    /// It is this late now. What is due by then happens at the next poll. A time before the last changes
    /// nothing.
    pub fn advance_to(&self, now_us: u64) {
        self.times.now_us.fetch_max(now_us, Ordering::Relaxed);
    }

    /// When the store has something to do next, for a simulation that leaps from event to event; `None`:
    /// nothing is under way.
    pub fn due_us(&self) -> Option<u64> {
        let due_us = self.times.due_us.load(Ordering::Relaxed);
        (due_us < u64::MAX).then_some(due_us)
    }

    /// How late it is.
    pub fn now_us(&self) -> u64 {
        self.times.now_us.load(Ordering::Relaxed)
    }
}

/// The same slots, format and transfers as [`SpillFile`](super::SpillFile), one record after the other,
/// with the bytes in memory. Each slot is moved at the first poll at or after its time, so pages that were
/// changed although they are pinned show, as they would with a thread.
pub struct SimulatedSpill {
    slots: Slots,
    format: SlotFormat,
    disk: SimulatedDisk,
    timing: SpillTiming,
    clock: SpillClock,
    /// The first one is being moved, the others wait.
    queue: VecDeque<Transfer>,
    /// When the first one's next slot is moved, or its last one is done.
    due_us: u64,
    /// When the first one began.
    begun_us: u64,
    /// How the first one's last slot went, known when its time is over.
    moved: Option<Result<(), SpillError>>,
    buffer: Vec<u8>,
}

impl SimulatedSpill {
    /// An empty store and its clock, at 0.
    ///
    /// # Errors
    /// A size out of range.
    pub fn new(
        size: SpillSize,
        timing: SpillTiming,
        script: FaultScript,
    ) -> Result<(SimulatedSpill, SpillClock), SpillOpenError> {
        let clock = SpillClock::default();
        // There is no other file that its slots could be mistaken for.
        let format = SlotFormat::new(size.slot_bytes, 0);
        let store = SimulatedSpill {
            slots: Slots::new(size.slots()?, format.part_bytes()),
            format,
            disk: SimulatedDisk::new(size.file_bytes, script),
            timing,
            clock: clock.clone(),
            queue: VecDeque::new(),
            due_us: 0,
            begun_us: 0,
            moved: None,
            buffer: vec![0; size.slot_bytes],
        };
        Ok((store, clock))
    }

    fn submit(&mut self, transfer: Transfer) {
        self.queue.push_back(transfer);
        if self.queue.len() == 1 {
            self.begin(self.clock.now_us());
        }
    }

    /// The first of the queue begins, if there is one.
    fn begin(&mut self, at_us: u64) {
        self.begun_us = at_us;
        let first_us = self.timing.latency_us.saturating_add(self.timing.slot_us);
        self.set_due(at_us.saturating_add(first_us));
    }

    fn set_due(&mut self, due_us: u64) {
        self.due_us = due_us;
        let told = if self.queue.is_empty() { u64::MAX } else { due_us };
        self.clock.times.due_us.store(told, Ordering::Relaxed);
    }

    /// What is due happens: a slot is moved, or is done, and with the last one the record; then the next
    /// one begins.
    fn step(&mut self) -> Option<SpillDone> {
        let transfer = self.queue.front_mut()?;
        let Some(outcome) = self.moved.take() else {
            let outcome = transfer.step(&mut self.disk, &self.format, &mut self.buffer);
            self.moved = Some(outcome);
            let slow_us = self.disk.take_slow_us();
            self.set_due(self.due_us.saturating_add(slow_us));
            return None;
        };
        if outcome.is_ok() && !transfer.is_complete() {
            self.set_due(self.due_us.saturating_add(self.timing.slot_us));
            return None;
        }
        let transfer = self.queue.pop_front()?;
        let ended = transfer.end(outcome, self.due_us - self.begun_us);
        self.begin(self.due_us);
        ended.settle(&mut self.slots)
    }
}

impl Spill for SimulatedSpill {
    fn can_store(&self, bytes: usize) -> bool {
        self.slots.can_store(bytes)
    }

    fn store(&mut self, record: u64, pages: PinnedPages) -> Result<(), SpillError> {
        let slots = self.slots.begin_store(record, pages.bytes())?;
        self.submit(Transfer::store(record, slots, pages));
        Ok(())
    }

    fn load(&mut self, record: u64, pages: EmptyPages) -> Result<(), SpillError> {
        let slots = self.slots.begin_load(record, pages.bytes())?;
        self.submit(Transfer::load(record, slots, pages));
        Ok(())
    }

    fn discard(&mut self, record: u64) {
        if self.slots.discard(record) == Discarded::Gone {
            return;
        }
        let is_it = |transfer: &Transfer| transfer.record() == record;
        let index = self.queue.iter().position(is_it);
        drop(index.and_then(|index| self.queue.remove(index)));
        self.slots.end(record, false);
        if index == Some(0) {
            self.moved = None;
            self.begin(self.clock.now_us());
        }
    }

    fn poll(&mut self) -> Vec<SpillDone> {
        let mut done = Vec::new();
        while !self.queue.is_empty() && self.due_us <= self.clock.now_us() {
            done.extend(self.step());
        }
        done
    }

    fn usage(&self) -> SpillUsage {
        self.slots.usage()
    }
}
