//! Which record has which slots, and what is being done to it. Pure: no I/O, no clock, no thread.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::sync::Arc;

use super::{SpillError, SpillUsage};

/// A store that failed so often without one success in between takes no more records: the disk is
/// broken, and each try would cost a request a pause.
pub const FAILURES_TO_CLOSE: usize = 8;

/// What is being done to a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Writing,
    Stored,
    Reading,
    /// Nobody wants it any more, but its slots are still being written or read.
    Abandoned,
}

#[derive(Debug)]
struct Record {
    slots: Arc<[u32]>,
    bytes: usize,
    state: State,
}

/// What is to be done about a record that was discarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Discarded {
    /// Nothing.
    Gone,
    /// Its transfer is to be stopped, and its end told to [`Slots::end`].
    UnderWay,
}

/// The slots of a store, and the records in them. Takes memory for slots that were once used only.
#[derive(Debug)]
pub(super) struct Slots {
    count: u32,
    part_bytes: usize,
    /// Slots from here on were never used.
    fresh: u32,
    /// Slots that were given back, lowest first: the used ones stay together.
    returned: BinaryHeap<Reverse<u32>>,
    records: BTreeMap<u64, Record>,
    failures: usize,
    failures_in_a_row: usize,
}

impl Slots {
    /// `count` free slots for parts of `part_bytes` bytes.
    pub(super) fn new(count: u32, part_bytes: usize) -> Slots {
        Slots {
            count,
            part_bytes,
            fresh: 0,
            returned: BinaryHeap::new(),
            records: BTreeMap::new(),
            failures: 0,
            failures_in_a_row: 0,
        }
    }

    fn free(&self) -> usize {
        (self.count - self.fresh) as usize + self.returned.len()
    }

    /// Even an empty record takes one: so there are never more records, nor transfers, than slots.
    fn needed(&self, bytes: usize) -> usize {
        bytes.div_ceil(self.part_bytes).max(1)
    }

    fn is_closed(&self) -> bool {
        self.failures_in_a_row >= FAILURES_TO_CLOSE
    }

    /// Whether a record of so many bytes would find room now.
    pub(super) fn can_store(&self, bytes: usize) -> bool {
        !self.is_closed() && self.needed(bytes) <= self.free()
    }

    /// Slots for a new record, which is being written from now on.
    ///
    /// # Errors
    /// The store is closed or full, or has a record of that number; nothing has changed.
    pub(super) fn begin_store(
        &mut self,
        record: u64,
        bytes: usize,
    ) -> Result<Arc<[u32]>, SpillError> {
        if self.is_closed() {
            return Err(SpillError::Closed { failures: self.failures_in_a_row });
        }
        if self.records.contains_key(&record) {
            return Err(SpillError::Busy(record));
        }
        let needed = self.needed(bytes);
        if needed > self.free() {
            let free_bytes = self.free() * self.part_bytes;
            return Err(SpillError::Full { needed_bytes: needed * self.part_bytes, free_bytes });
        }
        let slots: Arc<[u32]> = (0..needed).map(|_| self.take()).collect();
        let state = State::Writing;
        self.records.insert(record, Record { slots: slots.clone(), bytes, state });
        Ok(slots)
    }

    fn take(&mut self) -> u32 {
        if let Some(Reverse(slot)) = self.returned.pop() {
            return slot;
        }
        self.fresh += 1;
        self.fresh - 1
    }

    /// The slots of a stored record, which is being read from now on into pages of `bytes` bytes.
    ///
    /// # Errors
    /// No such record, one that is still being written or already read, or one of another size; nothing
    /// has changed.
    pub(super) fn begin_load(
        &mut self,
        record: u64,
        bytes: usize,
    ) -> Result<Arc<[u32]>, SpillError> {
        let held = self.records.get_mut(&record).ok_or(SpillError::Unknown(record))?;
        match held.state {
            State::Abandoned => return Err(SpillError::Unknown(record)),
            State::Writing | State::Reading => return Err(SpillError::Busy(record)),
            State::Stored => {}
        }
        if held.bytes != bytes {
            let (stored_bytes, pages_bytes) = (held.bytes, bytes);
            return Err(SpillError::Size { record, stored_bytes, pages_bytes });
        }
        held.state = State::Reading;
        Ok(held.slots.clone())
    }

    /// Nobody wants the record any more. Its slots are free now, or as soon as its transfer has ended.
    pub(super) fn discard(&mut self, record: u64) -> Discarded {
        match self.records.get_mut(&record) {
            Some(held) if held.state != State::Stored => {
                held.state = State::Abandoned;
                Discarded::UnderWay
            }
            Some(_) => {
                self.free_record(record);
                Discarded::Gone
            }
            None => Discarded::Gone,
        }
    }

    fn free_record(&mut self, record: u64) {
        if let Some(held) = self.records.remove(&record) {
            self.returned.extend(held.slots.iter().copied().map(Reverse));
        }
    }

    /// A record's transfer has ended, well or badly: nothing touches its slots any more. A record that
    /// was written stays; any other is gone. Returns whether anybody still wants to hear of it.
    pub(super) fn end(&mut self, record: u64, well: bool) -> bool {
        let Some(held) = self.records.get_mut(&record) else { return false };
        if held.state == State::Abandoned {
            self.free_record(record);
            return false;
        }
        if well {
            self.failures_in_a_row = 0;
        } else {
            self.failures += 1;
            self.failures_in_a_row += 1;
        }
        if well && held.state == State::Writing {
            held.state = State::Stored;
        } else {
            self.free_record(record);
        }
        true
    }

    /// What the store holds.
    pub(super) fn usage(&self) -> SpillUsage {
        SpillUsage {
            capacity_bytes: self.count as usize * self.part_bytes,
            used_bytes: (self.count as usize - self.free()) * self.part_bytes,
            records: self.records.len(),
            failures: self.failures,
            closed: self.is_closed(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    const PART_BYTES: usize = 100;

    /// No slot has two owners, and none is lost.
    fn check(slots: &Slots) {
        let mut seen: Vec<u32> = slots.records.values().flat_map(|r| r.slots.to_vec()).collect();
        seen.extend(slots.returned.iter().map(|slot| slot.0));
        seen.sort_unstable();
        assert_eq!(seen, (0..slots.fresh).collect::<Vec<u32>>());
        assert!(slots.fresh <= slots.count);
    }

    #[test]
    fn a_record_larger_than_what_is_free_changes_nothing() {
        let mut slots = Slots::new(3, PART_BYTES);
        assert!(slots.can_store(300) && !slots.can_store(301));
        let full = slots.begin_store(1, 301).unwrap_err();
        assert_eq!(full, SpillError::Full { needed_bytes: 400, free_bytes: 300 });
        assert_eq!(slots.usage().records, 0);
        assert_eq!(*slots.begin_store(1, 101).unwrap(), [0, 1]);
        assert!(slots.begin_store(2, 101).is_err());
        assert_eq!(*slots.begin_store(2, 100).unwrap(), [2]);
        assert!(!slots.can_store(0), "an empty record takes a slot too");
        assert_eq!(slots.usage().used_bytes, 300);
        check(&slots);
    }

    #[test]
    fn a_record_under_way_is_neither_read_nor_stored_again() {
        let mut slots = Slots::new(3, PART_BYTES);
        slots.begin_store(1, 150).unwrap();
        assert_eq!(slots.begin_load(1, 150), Err(SpillError::Busy(1)));
        assert_eq!(slots.begin_store(1, 10), Err(SpillError::Busy(1)));
        assert_eq!(slots.begin_load(2, 150), Err(SpillError::Unknown(2)));
        assert!(slots.end(1, true));
        let size = SpillError::Size { record: 1, stored_bytes: 150, pages_bytes: 149 };
        assert_eq!(slots.begin_load(1, 149), Err(size));
        slots.begin_load(1, 150).unwrap();
        assert_eq!(slots.begin_load(1, 150), Err(SpillError::Busy(1)));
    }

    #[test]
    fn slots_of_a_discarded_record_wait_for_its_transfer() {
        let mut slots = Slots::new(2, PART_BYTES);
        slots.begin_store(1, 200).unwrap();
        assert_eq!(slots.discard(1), Discarded::UnderWay);
        assert!(!slots.can_store(1), "still being written");
        assert_eq!(slots.begin_load(1, 200), Err(SpillError::Unknown(1)));
        assert!(!slots.end(1, true));
        assert!(slots.can_store(200));
        slots.begin_store(2, 200).unwrap();
        slots.end(2, true);
        assert_eq!(slots.discard(2), Discarded::Gone);
        assert_eq!(slots.discard(2), Discarded::Gone);
        assert_eq!(slots.usage(), SpillUsage { capacity_bytes: 200, ..SpillUsage::default() });
    }

    #[test]
    fn only_failures_in_a_row_close_it() {
        let mut slots = Slots::new(4, PART_BYTES);
        slots.begin_store(0, 10).unwrap();
        slots.end(0, true);
        for round in 1..=2 * FAILURES_TO_CLOSE as u64 {
            slots.begin_store(round, 10).unwrap();
            let good = round == FAILURES_TO_CLOSE as u64;
            assert!(slots.end(round, good));
            slots.discard(round);
        }
        assert_eq!(slots.usage().failures, 2 * FAILURES_TO_CLOSE - 1);
        assert!(slots.usage().closed && !slots.can_store(1));
        let closed = SpillError::Closed { failures: FAILURES_TO_CLOSE };
        assert_eq!(slots.begin_store(99, 10), Err(closed));
        slots.begin_load(0, 10).expect("what it holds can still be read");
        slots.end(0, true);
        assert!(!slots.usage().closed, "it works again");
    }

    #[derive(Clone, Debug)]
    enum Operation {
        Store(usize),
        Load(usize),
        Discard(usize),
        End(usize, bool),
    }

    fn operation() -> impl Strategy<Value = Operation> {
        prop_oneof![
            3 => (0..450_usize).prop_map(Operation::Store),
            2 => any::<usize>().prop_map(Operation::Load),
            1 => any::<usize>().prop_map(Operation::Discard),
            4 => (any::<usize>(), any::<bool>()).prop_map(|(which, good)| Operation::End(which, good)),
        ]
    }

    proptest! {
        /// Against a twin that knows each record's bytes only.
        #[test]
        fn agrees_with_a_naive_twin(operations in prop::collection::vec(operation(), 1..200)) {
            const COUNT: u32 = 12;
            let mut slots = Slots::new(COUNT, PART_BYTES);
            let mut twin: BTreeMap<u64, (usize, State)> = BTreeMap::new();
            let mut next = 0;
            let needed = |bytes: usize| bytes.div_ceil(PART_BYTES).max(1);
            for operation in operations {
                let used: usize = twin.values().map(|(bytes, _)| needed(*bytes)).sum();
                let pick = |which: usize| {
                    twin.iter().nth(which % twin.len().max(1)).map(|(id, held)| (*id, *held))
                };
                match operation {
                    Operation::Store(bytes) => {
                        let fits = used + needed(bytes) <= COUNT as usize;
                        let open = !slots.is_closed();
                        prop_assert_eq!(slots.can_store(bytes), fits && open);
                        prop_assert_eq!(slots.begin_store(next, bytes).is_ok(), fits && open);
                        if fits && open {
                            twin.insert(next, (bytes, State::Writing));
                        }
                        next += 1;
                    }
                    Operation::Load(which) => if let Some((id, (bytes, state))) = pick(which) {
                        let can = state == State::Stored;
                        prop_assert_eq!(slots.begin_load(id, bytes).is_ok(), can);
                        if can {
                            twin.insert(id, (bytes, State::Reading));
                        }
                    },
                    Operation::Discard(which) => if let Some((id, (bytes, state))) = pick(which) {
                        let gone = state == State::Stored;
                        prop_assert_eq!(slots.discard(id) == Discarded::Gone, gone);
                        twin.remove(&id);
                        if !gone {
                            twin.insert(id, (bytes, State::Abandoned));
                        }
                    },
                    Operation::End(which, good) => if let Some((id, (bytes, state))) = pick(which) {
                        if state == State::Stored {
                            continue;
                        }
                        prop_assert_eq!(slots.end(id, good), state != State::Abandoned);
                        twin.remove(&id);
                        if state == State::Writing && good {
                            twin.insert(id, (bytes, State::Stored));
                        }
                    },
                }
                let used: usize = twin.values().map(|(bytes, _)| needed(*bytes)).sum();
                prop_assert_eq!(slots.usage().used_bytes, used * PART_BYTES);
                prop_assert_eq!(slots.usage().records, twin.len());
                check(&slots);
            }
        }
    }
}
