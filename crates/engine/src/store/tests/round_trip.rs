//! What was stored comes back byte for byte, and never more is stored than there is room for.

use super::*;

#[test]
fn every_length_comes_back_byte_for_byte() {
    // Slots that end within pages, at their ends, and that hold several blocks.
    for slot_bytes in [128, 512 + 64, 1024 + 64, 4096, 64 << 10] {
        let pool = pool_of(1 << 20);
        for mut subject in Subject::all(SpillSize { file_bytes: 1 << 20, slot_bytes }) {
            for blocks in [0, 1, 2, 3, 7, 20] {
                let record = blocks as u64;
                let mut sequence = filled(&pool, record, blocks);
                let before = (sequence.next_position(), content(&sequence));
                assert_eq!(before.1, canary(record, blocks * BLOCK_BYTES));
                let image = subject.put(record, &mut sequence).unwrap();
                assert_pool_is_empty(&pool);
                // Others use the pages meanwhile.
                drop(filled(&pool, 99, 60));
                subject.get(record, image, &mut sequence).unwrap();
                let name = subject.name;
                assert_eq!((sequence.next_position(), content(&sequence)), before, "{name}");
                assert_eq!(check_invariants(&pool, &[&sequence]), []);
                assert_eq!(subject.store.usage().used_bytes, 0);
                // The record is gone.
                let (image, _) = sequence.pin();
                let pages = sequence_in(&pool, 50).restore(&image).unwrap();
                let again = subject.store.load(record, pages);
                assert_eq!(again, Err(SpillError::Unknown(record)));
            }
        }
        assert_pool_is_empty(&pool);
    }
}

#[test]
fn records_come_back_in_any_order() {
    let size = SpillSize { file_bytes: 1 << 20, slot_bytes: 1024 };
    let pool = pool_of(1 << 20);
    for mut subject in Subject::all(size) {
        let mut parked: BTreeMap<u64, (SequenceImage, Sequence)> = BTreeMap::new();
        for record in 0..12 {
            let mut sequence = filled(&pool, record, 1 + record as usize % 5);
            parked.insert(record, (subject.put(record, &mut sequence).unwrap(), sequence));
        }
        for turn in 0..12 {
            let record = (turn * 5 + 3) % 12;
            let (image, mut sequence) = parked.remove(&record).unwrap();
            subject.get(record, image, &mut sequence).unwrap();
            let bytes = content(&sequence);
            assert_eq!(bytes, canary(record, bytes.len()), "{} {record}", subject.name);
        }
        assert_eq!(subject.store.usage().records, 0);
    }
    assert_pool_is_empty(&pool);
}

#[test]
fn a_store_that_is_full_takes_what_fits_and_skips_what_does_not() {
    // Room for 10 blocks.
    let size = SpillSize { file_bytes: 4096 + 10 * 3136, slot_bytes: 3136 };
    let pool = pool_of(1 << 20);
    for mut subject in Subject::all(size) {
        assert_eq!(subject.store.usage().capacity_bytes, 10 * BLOCK_BYTES);
        let mut large = filled(&pool, 100, 11);
        assert!(!subject.store.can_store(11 * BLOCK_BYTES));
        let refused = subject.put(100, &mut large).unwrap_err();
        let (needed_bytes, free_bytes) = (11 * BLOCK_BYTES, 10 * BLOCK_BYTES);
        assert_eq!(refused, SpillError::Full { needed_bytes, free_bytes });
        assert_eq!(content(&large), canary(100, 11 * BLOCK_BYTES), "it is as it was");
        assert!(subject.store.poll().is_empty());

        let mut stored = Vec::new();
        for record in 0..100 {
            let mut sequence = filled(&pool, record, 2);
            let fits = subject.store.can_store(2 * BLOCK_BYTES);
            match subject.put(record, &mut sequence) {
                Ok(image) => stored.push((record, image, sequence)),
                Err(error) => assert!(!fits && matches!(error, SpillError::Full { .. })),
            }
            let usage = subject.store.usage();
            assert!(usage.used_bytes <= usage.capacity_bytes);
            if let Some(scratch) = &subject.scratch {
                let file_bytes = std::fs::metadata(scratch.path("spill")).unwrap().len();
                assert_eq!(file_bytes, size.file_bytes);
            }
        }
        assert_eq!(stored.len(), 5);
        for (record, image, mut sequence) in stored {
            subject.get(record, image, &mut sequence).unwrap();
            assert_eq!(content(&sequence), canary(record, 2 * BLOCK_BYTES));
        }
        assert!(subject.store.can_store(10 * BLOCK_BYTES));
    }
    assert_pool_is_empty(&pool);
}

#[test]
fn a_record_on_its_way_is_a_miss_and_never_half_of_it() {
    let size = SpillSize { file_bytes: 1 << 20, slot_bytes: 256 };
    let pool = pool_of(1 << 20);
    let (mut store, clock) =
        SimulatedSpill::new(size, SpillTiming { latency_us: 0, slot_us: 1 }, Box::new(|_| None))
            .unwrap();
    let mut sequence = filled(&pool, 1, 4);
    let (image, pinned) = sequence.pin();
    store.store(1, pinned).unwrap();
    sequence.clear();
    let mut now_us = 0;
    // At each moment of the write, and then in the read.
    let stored = loop {
        let pages = sequence.restore(&image).unwrap();
        assert_eq!(store.load(1, pages).unwrap_err(), SpillError::Busy(1));
        now_us += 1;
        clock.advance_to(now_us);
        if let Some(done) = store.poll().pop() {
            break done;
        }
    };
    let parts = (4 * BLOCK_BYTES).div_ceil(256 - 64) as u64;
    assert!(matches!(stored, SpillDone::Stored { elapsed_us, .. } if elapsed_us == parts));
    assert_eq!(now_us, parts);
    store.load(1, sequence.restore(&image).unwrap()).unwrap();
    let second = sequence.restore(&image).unwrap();
    assert_eq!(store.load(1, second).unwrap_err(), SpillError::Busy(1));
    clock.advance_to(2 * parts);
    let Some(SpillDone::Loaded { pages, .. }) = store.poll().pop() else { panic!("not loaded") };
    sequence.adopt(image, pages);
    assert_eq!(content(&sequence), canary(1, 4 * BLOCK_BYTES));
}

#[test]
fn the_waker_is_called_for_each_end() {
    let size = SpillSize { file_bytes: 1 << 20, slot_bytes: 1024 };
    let pool = pool_of(1 << 20);
    let mut subject = Subject::file(size);
    let calls = Arc::new(AtomicUsize::new(0));
    let theirs = calls.clone();
    subject.store.set_waker(Arc::new(move || {
        theirs.fetch_add(1, Ordering::SeqCst);
    }));
    let mut sequence = filled(&pool, 1, 3);
    let image = subject.put(1, &mut sequence).unwrap();
    subject.get(1, image, &mut sequence).unwrap();
    // The thread tells after it has handed over; dropping waits for it.
    drop(subject);
    assert_eq!(calls.load(Ordering::SeqCst), 2);
}

#[test]
fn a_simulation_repeats_itself_to_the_microsecond() {
    let log = || {
        let size = SpillSize { file_bytes: 1 << 18, slot_bytes: 640 };
        let pool = pool_of(1 << 20);
        let script = |operation: Operation| match operation.number % 7 {
            3 => Some(Fault::Slow(operation.number)),
            5 => Some(Fault::Partial),
            _ => None,
        };
        let mut subject = Subject::simulated(size, Box::new(script));
        let mut times = Vec::new();
        for record in 0..10 {
            let mut sequence = filled(&pool, record, 1 + record as usize % 4);
            let image = subject.put(record, &mut sequence).unwrap();
            times.push(subject.clock.as_ref().and_then(SpillClock::due_us));
            subject.get(record, image, &mut sequence).unwrap();
            times.push(Some(subject.clock.as_ref().unwrap().now_us()));
        }
        times
    };
    let times = log();
    assert_eq!(times, log());
    assert!(times.iter().step_by(2).all(Option::is_none), "idle between transfers");
}
