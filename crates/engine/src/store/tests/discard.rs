//! A record nobody wants any more, or a store that goes, at every state: everything is free again.

use std::sync::atomic::AtomicBool;
use std::sync::{Condvar, Mutex};

use super::*;

const SLOT_BYTES: usize = 2560;
/// Slots of a record of two blocks.
const PARTS: u64 = 3;

/// A disk that does an operation only when it is let.
struct GatedDisk {
    disk: SimulatedDisk,
    gate: Arc<Gate>,
}

#[derive(Default)]
struct Gate {
    /// (operations allowed, operations done)
    counts: Mutex<(u64, u64)>,
    changed: Condvar,
    /// The thread has let go of its disk.
    closed: AtomicBool,
}

impl Gate {
    /// Lets so many more operations happen, and waits for them.
    fn allow(&self, operations: u64) {
        let mut counts = self.counts.lock().unwrap();
        counts.0 += operations;
        self.changed.notify_all();
        while counts.1 < counts.0 {
            counts = self.changed.wait(counts).unwrap();
        }
    }

    /// Lets everything happen, without waiting.
    fn open(&self) {
        self.counts.lock().unwrap().0 += 1000;
        self.changed.notify_all();
    }

    fn wait_for_permission(&self) {
        let mut counts = self.counts.lock().unwrap();
        while counts.1 == counts.0 {
            counts = self.changed.wait(counts).unwrap();
        }
    }

    fn note_done(&self) {
        self.counts.lock().unwrap().1 += 1;
        self.changed.notify_all();
    }
}

impl SlotIo for GatedDisk {
    fn read_at(&mut self, offset: u64, bytes: &mut [u8]) -> std::io::Result<usize> {
        self.gate.wait_for_permission();
        let read = self.disk.read_at(offset, bytes);
        self.gate.note_done();
        read
    }

    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> std::io::Result<usize> {
        self.gate.wait_for_permission();
        let written = self.disk.write_at(offset, bytes);
        self.gate.note_done();
        written
    }
}

impl Drop for GatedDisk {
    fn drop(&mut self) {
        self.gate.closed.store(true, Ordering::SeqCst);
    }
}

/// Opens the gate on drop, so that a test that fails does not wait for the thread for ever.
struct Keeper(Arc<Gate>);

impl Drop for Keeper {
    fn drop(&mut self) {
        self.0.open();
    }
}

/// A store that goes on operation by operation: by a gate on its thread's disk, or by its clock.
struct Paced {
    /// Before the store: dropped first.
    gate: Option<Arc<Keeper>>,
    store: Box<dyn Spill>,
    clock: Option<SpillClock>,
    now_us: u64,
    woken: Arc<AtomicUsize>,
}

impl Paced {
    /// Room for exactly two records.
    fn size() -> SpillSize {
        SpillSize { file_bytes: 4096 + 2 * PARTS * SLOT_BYTES as u64, slot_bytes: SLOT_BYTES }
    }

    fn gated() -> Paced {
        let gate = Arc::new(Gate::default());
        let disk = SimulatedDisk::new(1 << 20, Box::new(|_| None));
        let disk = Box::new(GatedDisk { disk, gate: gate.clone() });
        let gate = Some(Arc::new(Keeper(gate)));
        let mut store = SpillFile::over(disk, Paced::size(), "gated".as_ref()).unwrap();
        let woken = Arc::new(AtomicUsize::new(0));
        let theirs = woken.clone();
        store.set_waker(Arc::new(move || {
            theirs.fetch_add(1, Ordering::SeqCst);
        }));
        Paced { gate, store: Box::new(store), clock: None, now_us: 0, woken }
    }

    fn simulated() -> Paced {
        let timing = SpillTiming { latency_us: 0, slot_us: 1 };
        let (store, clock) =
            SimulatedSpill::new(Paced::size(), timing, Box::new(|_| None)).unwrap();
        let (store, clock) = (Box::new(store), Some(clock));
        Paced { gate: None, store, clock, now_us: 0, woken: Arc::default() }
    }

    fn allow(&mut self, operations: u64) {
        if let Some(gate) = &self.gate {
            gate.0.allow(operations);
        }
        if let Some(clock) = &self.clock {
            self.now_us += operations;
            clock.advance_to(self.now_us);
        }
    }

    /// Waits until the thread has handed over so many transfers in all.
    fn wait_for_ends(&self, ends: usize) {
        let begun = Instant::now();
        while self.gate.is_some() && self.woken.load(Ordering::SeqCst) < ends {
            assert!(begun.elapsed() < Duration::from_secs(60));
            std::thread::yield_now();
        }
    }

    /// Lets the thread go on and polls until the store is empty; what it says meanwhile.
    fn drain(&mut self) -> Vec<SpillDone> {
        let begun = Instant::now();
        let mut done = Vec::new();
        if let Some(gate) = &self.gate {
            gate.0.open();
        }
        while self.store.usage().records > 0 {
            assert!(begun.elapsed() < Duration::from_secs(60));
            self.now_us += 1;
            if let Some(clock) = &self.clock {
                clock.advance_to(self.now_us);
            }
            for over in self.store.poll() {
                if let SpillDone::Stored { record, .. } = over {
                    self.store.discard(record);
                }
                done.push(over);
            }
        }
        done
    }
}

/// How far record 1 has come when it is discarded.
#[derive(Clone, Copy, Debug, PartialEq)]
enum At {
    StoreWaiting,
    /// So many slots are written.
    StoreRunning(u64),
    /// Written, not polled.
    StoreOver,
    Stored,
    LoadWaiting,
    LoadRunning(u64),
    LoadOver,
}

impl At {
    fn all() -> Vec<At> {
        let mut all = vec![At::StoreWaiting, At::StoreOver, At::Stored, At::LoadWaiting];
        all.push(At::LoadOver);
        all.extend((0..PARTS).flat_map(|part| [At::StoreRunning(part), At::LoadRunning(part)]));
        all
    }

    fn loads(self) -> bool {
        matches!(self, At::LoadWaiting | At::LoadRunning(_) | At::LoadOver)
    }
}

/// Brings record 1 so far. Returns the blocks of record 0, which keeps the thread busy where record 1 is
/// to wait.
fn bring(paced: &mut Paced, pool: &BlockPool, at: At) -> usize {
    let pinned = |record| filled(pool, record, 2).pin().1;
    let waits = matches!(at, At::StoreWaiting | At::LoadWaiting);
    let mut sequence = filled(pool, 1, 2);
    let (image, pages) = sequence.pin();
    sequence.clear();
    if at == At::StoreWaiting {
        paced.store.store(0, pinned(0)).unwrap();
    }
    paced.store.store(1, pages).unwrap();
    match at {
        At::StoreWaiting => {}
        At::StoreRunning(parts) => paced.allow(parts),
        _ => {
            paced.allow(PARTS);
            paced.wait_for_ends(1);
        }
    }
    if at == At::Stored || at.loads() {
        let done = paced.store.poll();
        assert!(matches!(done[..], [SpillDone::Stored { record: 1, .. }]), "{done:?}");
    }
    if at == At::LoadWaiting {
        paced.store.store(0, pinned(0)).unwrap();
    }
    if at.loads() {
        paced.store.load(1, sequence.restore(&image).unwrap()).unwrap();
    }
    match at {
        At::LoadRunning(parts) => paced.allow(parts),
        At::LoadOver => {
            paced.allow(PARTS);
            paced.wait_for_ends(2);
        }
        _ => {}
    }
    if waits { 2 } else { 0 }
}

#[test]
fn a_discarded_record_leaves_nothing_at_any_state() {
    for make in [Paced::gated, Paced::simulated] {
        for at in At::all() {
            let pool = pool_of(1 << 20);
            let mut paced = make();
            let busy_blocks = bring(&mut paced, &pool, at);
            paced.store.discard(1);
            paced.store.discard(1);
            let running = matches!(at, At::StoreRunning(_) | At::LoadRunning(_));
            if !running {
                // Now, not when the thread comes to it.
                assert_eq!(pool.accounts().used_bytes(), busy_blocks * BLOCK_BYTES, "{at:?}");
                assert_eq!(paced.store.usage().records, busy_blocks / 2, "{at:?}");
            }
            let told = paced.drain();
            let of_the_other =
                |done: &SpillDone| matches!(done, SpillDone::Stored { record: 0, .. });
            assert!(told.iter().all(of_the_other) && told.len() == busy_blocks / 2, "{told:?}");
            assert_pool_is_empty(&pool);
            let capacity_bytes = 2 * PARTS as usize * (SLOT_BYTES - 64);
            let empty = SpillUsage { capacity_bytes, ..SpillUsage::default() };
            assert_eq!(paced.store.usage(), empty, "{at:?}");
            // Its slots hold others now.
            let mut sequences: Vec<Sequence> = (5..7).map(|id| filled(&pool, id, 2)).collect();
            let Paced { store, clock, .. } = paced;
            let mut subject = Subject { name: "reused", store, clock, scratch: None };
            let mut put = |(index, sequence)| subject.put(5 + index as u64, sequence).unwrap();
            let images: Vec<_> = sequences.iter_mut().enumerate().map(&mut put).collect();
            for ((image, sequence), id) in images.into_iter().zip(&mut sequences).zip(5..) {
                subject.get(id, image, sequence).unwrap();
                assert_eq!(content(sequence), canary(id, 2 * BLOCK_BYTES), "{at:?}");
            }
        }
    }
}

#[test]
fn slots_in_the_hands_of_the_thread_are_not_given_out() {
    let pool = pool_of(1 << 20);
    let mut paced = Paced::gated();
    bring(&mut paced, &pool, At::StoreRunning(1));
    paced.store.discard(1);
    assert!(paced.store.can_store(2 * BLOCK_BYTES) && !paced.store.can_store(4 * BLOCK_BYTES));
    paced.drain();
    assert!(paced.store.can_store(4 * BLOCK_BYTES));
}

#[test]
fn a_store_that_is_dropped_lets_go_of_everything() {
    for at in At::all() {
        let pool = pool_of(1 << 20);
        let mut paced = Paced::gated();
        bring(&mut paced, &pool, at);
        let gate = paced.gate.take().unwrap();
        let done_before = gate.0.counts.lock().unwrap().1;
        // The thread may be in an operation, which is let go on only after it was told to stop.
        let opener = std::thread::spawn({
            let gate = gate.clone();
            move || {
                std::thread::sleep(Duration::from_millis(30));
                gate.0.open();
            }
        });
        drop(paced);
        assert!(gate.0.closed.load(Ordering::SeqCst), "{at:?}: the thread is still there");
        assert_pool_is_empty(&pool);
        let done = gate.0.counts.lock().unwrap().1 - done_before;
        assert!(done <= 1, "{at:?}: {done} more operations");
        opener.join().unwrap();
    }
}

#[test]
fn a_store_that_is_dropped_removes_its_file() {
    let scratch = Scratch::new();
    let path = scratch.path("spill");
    let pool = pool_of(1 << 20);
    let mut store = SpillFile::open(&path, SpillSize::new(2 << 20)).unwrap();
    store.store(0, filled(&pool, 0, 2).pin().1).unwrap();
    drop(store);
    assert!(!path.exists());
    assert_pool_is_empty(&pool);
}
