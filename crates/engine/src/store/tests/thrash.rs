//! Many sequences thrash through a small store: each keeps its own bytes.

use super::*;

/// Sequences.
const RECORDS: usize = 32;
/// Numbers for a test: a permuted congruential generator (PCG, O'Neill 2014, XSH RR 64/32).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        let old = self.0;
        self.0 = old.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let mixed = (((old >> 18) ^ old) >> 27) as u32;
        mixed.rotate_right((old >> 59) as u32) as usize % limit
    }
}

/// Where a sequence is.
enum Place {
    Pool(Sequence),
    Leaving(Sequence, SequenceImage),
    Stored(Sequence, SequenceImage),
    Coming(Sequence, SequenceImage),
    /// Thrown away: to be computed anew.
    Nowhere,
}

struct World {
    pool: BlockPool,
    subject: Subject,
    random: Random,
    places: Vec<Place>,
    next_record: u64,
    /// Which sequence a record is of.
    owners: BTreeMap<u64, usize>,
    loads: usize,
    failures: usize,
    full: usize,
    discards: usize,
}

impl World {
    fn new(subject: Subject, seed: u64) -> World {
        // About 24 of the 32 sequences.
        let pool = pool_of(200 << 10);
        let places = (0..RECORDS).map(|_| Place::Nowhere).collect();
        let (random, owners) = (Random(seed), BTreeMap::new());
        let (next_record, loads, failures, full, discards) = (0, 0, 0, 0, 0);
        World {
            pool,
            subject,
            random,
            places,
            next_record,
            owners,
            loads,
            failures,
            full,
            discards,
        }
    }

    /// The content of a sequence is that of its canary; it says its own length too.
    fn blocks(index: usize) -> usize {
        1 + index % 4
    }

    fn act(&mut self, index: usize) {
        self.places[index] = match std::mem::replace(&mut self.places[index], Place::Nowhere) {
            Place::Nowhere => match try_filled(&self.pool, index as u64, World::blocks(index)) {
                Some(sequence) => Place::Pool(sequence),
                None => Place::Nowhere,
            },
            Place::Pool(sequence) => self.leave(index, sequence),
            Place::Stored(sequence, image) => self.come(index, sequence, image),
            under_way if self.random.below(8) == 0 => {
                // The client has gone.
                let record = *self.owners.iter().find(|(_, owner)| **owner == index).unwrap().0;
                self.owners.remove(&record);
                self.subject.store.discard(record);
                self.discards += 1;
                drop(under_way);
                Place::Nowhere
            }
            under_way => under_way,
        };
    }

    fn leave(&mut self, index: usize, mut sequence: Sequence) -> Place {
        let record = self.next_record;
        self.next_record += 1;
        let (image, pinned) = sequence.pin();
        match self.subject.store.store(record, pinned) {
            Ok(()) => {
                self.owners.insert(record, index);
                // The pins alone hold the pages now.
                sequence.clear();
                Place::Leaving(sequence, image)
            }
            Err(SpillError::Full { .. } | SpillError::Closed { .. }) => {
                self.full += 1;
                assert_eq!(content(&sequence), canary(index as u64, image.bytes()));
                // It may as well be thrown away.
                if self.random.below(4) == 0 { Place::Nowhere } else { Place::Pool(sequence) }
            }
            Err(error) => panic!("{error}"),
        }
    }

    fn come(&mut self, index: usize, mut sequence: Sequence, image: SequenceImage) -> Place {
        let record = *self.owners.iter().find(|(_, owner)| **owner == index).unwrap().0;
        let Ok(pages) = sequence.restore(&image) else { return Place::Stored(sequence, image) };
        self.subject.store.load(record, pages).unwrap();
        Place::Coming(sequence, image)
    }

    fn poll(&mut self) {
        std::thread::yield_now();
        if let Some(clock) = &self.subject.clock {
            let leap_us = self.random.below(60) as u64;
            clock.advance_to(clock.now_us() + leap_us);
        }
        for done in self.subject.store.poll() {
            let (record, outcome) = match done {
                SpillDone::Stored { record, .. } => (record, Some(None)),
                SpillDone::Loaded { record, pages, .. } => (record, Some(Some(pages))),
                SpillDone::Failed { record, .. } => (record, None),
            };
            // Nothing is heard of a record that was discarded.
            let index = self.owners[&record];
            let place = std::mem::replace(&mut self.places[index], Place::Nowhere);
            self.places[index] = match (place, outcome) {
                (Place::Leaving(sequence, image), Some(None)) => Place::Stored(sequence, image),
                (Place::Coming(mut sequence, image), Some(Some(pages))) => {
                    self.owners.remove(&record);
                    self.loads += 1;
                    sequence.adopt(image, pages);
                    let bytes = content(&sequence);
                    assert_eq!(bytes.len(), World::blocks(index) * BLOCK_BYTES);
                    assert_eq!(bytes, canary(index as u64, bytes.len()), "foreign bytes");
                    Place::Pool(sequence)
                }
                (Place::Leaving(..) | Place::Coming(..), None) => {
                    self.owners.remove(&record);
                    self.failures += 1;
                    Place::Nowhere
                }
                _ => panic!("an end of something else"),
            };
        }
    }

    /// Until so many records have come back; then to idle.
    fn run(mut self, loads: usize) -> World {
        let begun = Instant::now();
        while self.loads < loads {
            for _ in 0..1 + self.random.below(12) {
                let index = self.random.below(RECORDS);
                self.act(index);
            }
            self.poll();
            let usage = self.subject.store.usage();
            assert!(usage.used_bytes <= usage.capacity_bytes);
            assert!(begun.elapsed() < Duration::from_secs(120), "no progress");
        }
        // To idle: everyone leaves.
        let records: Vec<u64> = self.owners.keys().copied().collect();
        records.into_iter().for_each(|record| self.subject.store.discard(record));
        self.places.clear();
        while self.subject.store.usage().records > 0 {
            std::thread::yield_now();
            assert!(self.subject.store.poll().is_empty());
            assert!(begun.elapsed() < Duration::from_secs(120), "records are left");
        }
        assert_eq!(self.subject.store.usage().used_bytes, 0);
        assert_pool_is_empty(&self.pool);
        self
    }
}

/// Room for about 10 records; each takes 2 to 9 slots.
fn size() -> SpillSize {
    SpillSize { file_bytes: 4096 + 50 * 1280, slot_bytes: 1280 }
}

#[test]
fn thirty_two_sequences_keep_their_own_bytes() {
    for subject in Subject::all(size()) {
        let world = World::new(subject, 1).run(500);
        assert_eq!(world.failures, 0, "{}", world.subject.name);
        assert!(world.full > 50, "{}: the store was never full", world.subject.name);
        assert!(world.discards > 10, "{}: {} discards", world.subject.name, world.discards);
    }
}

#[test]
fn a_disk_that_fails_now_and_then_costs_records_and_no_byte() {
    let makes: [(fn(_, _) -> _, u64); 2] = [(Subject::simulated, 8), (Subject::thread, 2)];
    for (make, seeds) in makes {
        for seed in 0..seeds {
            let mut random = Random(seed);
            let script = move |_: Operation| match random.below(60) {
                0 => Some(Fault::Flip(random.below(1 << 20) as u64)),
                1 => Some(Fault::Lost),
                2 => Some(Fault::Misplaced),
                3 => Some(Fault::Broken),
                4 => Some(Fault::Partial),
                5 => Some(Fault::NoSpace),
                6 => Some(Fault::Slow(random.below(1000) as u64)),
                7 if random.below(20) == 0 => Some(Fault::Wiped),
                8 if random.below(20) == 0 => Some(Fault::Cut),
                _ => None,
            };
            let world = World::new(make(size(), Box::new(script)), seed).run(200);
            assert!(world.failures > 20, "{} failures", world.failures);
            let usage = world.subject.store.usage();
            assert!(usage.failures >= world.failures, "{usage:?}");
        }
    }
}
