//! Stores under test, and sequences with known bytes to send through them.

mod discard;
mod faults;
mod process;
mod round_trip;
pub(super) mod scratch;
mod system;
mod thrash;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use reef_kv::page::PageShape;
use reef_kv::transfer::SequenceImage;
use reef_kv::{
    BlockPool, Fidelity, GroupConfig, Ladder, PoolConfig, Sequence, SequenceConfig,
    check_invariants,
};

use super::disk::SimulatedDisk;
use super::transfer::SlotIo;
use super::*;
use scratch::Scratch;

/// Tokens of a block.
const BLOCK: usize = 16;
/// Bytes of a block at f16: three layers of 1 KiB.
const BLOCK_BYTES: usize = 3072;

/// A pool of two KV groups.
fn pool_of(budget_bytes: usize) -> BlockPool {
    let shape = PageShape { kv_heads: 1, head_dim: 16, block_size: BLOCK };
    let group = |layers| GroupConfig { layers, shape, window: None, pinned: vec![] };
    let groups = vec![group(2), group(1)];
    let ladder = Ladder::default();
    BlockPool::new(PoolConfig { groups, budget_bytes, prefault: false, ladder }).unwrap()
}

/// Bytes that no other record has.
fn canary(record: u64, bytes: usize) -> Vec<u8> {
    let mut canary = vec![0; bytes];
    blake3::Hasher::new().update(&record.to_le_bytes()).finalize_xof().fill(&mut canary);
    canary
}

fn sequence_in(pool: &BlockPool, record: u64) -> Sequence {
    let config = SequenceConfig {
        request: record,
        contract: Fidelity::Exact,
        priority: 0,
        trained_context: 1 << 20,
        max_tokens: None,
    };
    Sequence::new(pool, config)
}

/// A sequence of so many blocks whose pages hold the record's canary; `None` where the pool is short.
fn try_filled(pool: &BlockPool, record: u64, blocks: usize) -> Option<Sequence> {
    let mut sequence = sequence_in(pool, record);
    sequence.grow(blocks * BLOCK).ok()?;
    sequence.commit(blocks * BLOCK);
    let (image, pinned) = sequence.pin();
    drop(pinned);
    sequence.clear();
    let mut pages = sequence.restore(&image).unwrap();
    let bytes = pages.bytes();
    assert_eq!(pages.copy_from(0, &canary(record, bytes)), bytes);
    sequence.adopt(image, pages);
    Some(sequence)
}

fn filled(pool: &BlockPool, record: u64, blocks: usize) -> Sequence {
    try_filled(pool, record, blocks).expect("a pool that is large enough")
}

fn content(sequence: &Sequence) -> Vec<u8> {
    let (_, pinned) = sequence.pin();
    let mut bytes = vec![0; pinned.bytes()];
    pinned.copy_to(0, &mut bytes);
    bytes
}

fn assert_pool_is_empty(pool: &BlockPool) {
    assert_eq!(pool.accounts().used_bytes(), 0, "pages are still held");
    assert_eq!(check_invariants(pool, &[]), []);
}

/// A store, and whatever makes its time pass.
struct Subject {
    name: &'static str,
    store: Box<dyn Spill>,
    clock: Option<SpillClock>,
    scratch: Option<Scratch>,
}

impl Subject {
    fn file(size: SpillSize) -> Subject {
        let scratch = Scratch::new();
        let store = SpillFile::open(&scratch.path("spill"), size).unwrap();
        let (name, store) = ("file", Box::new(store));
        Subject { name, store, clock: None, scratch: Some(scratch) }
    }

    fn thread(size: SpillSize, script: FaultScript) -> Subject {
        let disk = SimulatedDisk::new(size.file_bytes, script);
        let store = SpillFile::over(Box::new(disk), size, "memory".as_ref()).unwrap();
        Subject { name: "thread", store: Box::new(store), clock: None, scratch: None }
    }

    fn simulated(size: SpillSize, script: FaultScript) -> Subject {
        let timing = SpillTiming { latency_us: 50, slot_us: 10 };
        let (store, clock) = SimulatedSpill::new(size, timing, script).unwrap();
        let (name, clock) = ("simulated", Some(clock));
        Subject { name, store: Box::new(store), clock, scratch: None }
    }

    fn all(size: SpillSize) -> [Subject; 3] {
        let no_faults = || -> FaultScript { Box::new(|_| None) };
        let simulated = Subject::simulated(size, no_faults());
        [Subject::file(size), Subject::thread(size, no_faults()), simulated]
    }

    /// Waits until something is over. Panics where nothing is for long.
    fn next(&mut self) -> Vec<SpillDone> {
        let begun = Instant::now();
        loop {
            if let Some(clock) = &self.clock {
                clock.advance_to(clock.due_us().expect("nothing is under way"));
            }
            let done = self.store.poll();
            if !done.is_empty() {
                return done;
            }
            assert!(begun.elapsed() < Duration::from_secs(60), "{}: nothing happens", self.name);
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// Stores the sequence, clears it, and waits.
    fn put(&mut self, record: u64, sequence: &mut Sequence) -> Result<SequenceImage, SpillError> {
        let (image, pinned) = sequence.pin();
        self.store.store(record, pinned)?;
        sequence.clear();
        match self.next().remove(0) {
            SpillDone::Stored { record: stored, bytes, .. } => {
                assert_eq!((stored, bytes), (record, image.bytes()));
                Ok(image)
            }
            SpillDone::Failed { record: failed, error } => {
                assert_eq!(failed, record);
                Err(error)
            }
            loaded => panic!("{loaded:?}"),
        }
    }

    /// Loads the record into the cleared sequence.
    fn get(
        &mut self,
        record: u64,
        image: SequenceImage,
        sequence: &mut Sequence,
    ) -> Result<(), SpillError> {
        self.store.load(record, sequence.restore(&image).unwrap())?;
        match self.next().remove(0) {
            SpillDone::Loaded { record: loaded, pages, bytes, .. } => {
                assert_eq!((loaded, bytes), (record, image.bytes()));
                sequence.adopt(image, pages);
                Ok(())
            }
            SpillDone::Failed { record: failed, error } => {
                assert_eq!(failed, record);
                Err(error)
            }
            stored => panic!("{stored:?}"),
        }
    }
}
