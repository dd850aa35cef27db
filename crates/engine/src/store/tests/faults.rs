//! Whatever goes wrong with one operation of the disk: no wrong byte is ever handed out, and nobody else
//! is harmed.

use super::*;

/// How often records came back, and how often they failed.
#[derive(Debug, Default, PartialEq, Eq)]
struct Outcome {
    exact: usize,
    failed: usize,
    operations: u64,
}

/// Three records are stored, then loaded in another order, each where the last succeeded; the disk does
/// `fault` in operation number `at`.
fn run(make: fn(SpillSize, FaultScript) -> Subject, fault: Fault, at: u64) -> Outcome {
    let pool = pool_of(1 << 20);
    let size = SpillSize { file_bytes: 1 << 18, slot_bytes: 2560 };
    let operations = Arc::new(AtomicU64::new(0));
    let counted = operations.clone();
    let script = move |operation: Operation| {
        counted.fetch_max(operation.number + 1, Ordering::SeqCst);
        (operation.number == at).then_some(fault)
    };
    let mut subject = make(size, Box::new(script));
    let mut outcome = Outcome::default();
    let mut parked = Vec::new();
    for record in 0..3 {
        let mut sequence = filled(&pool, record, 2);
        match subject.put(record, &mut sequence) {
            Ok(image) => parked.push((record, image, sequence)),
            Err(_) => outcome.failed += 1,
        }
    }
    parked.rotate_left(1);
    for (record, image, mut sequence) in parked {
        match subject.get(record, image, &mut sequence) {
            Ok(()) => {
                assert_eq!(content(&sequence), canary(record, 2 * BLOCK_BYTES), "{fault:?} {at}");
                outcome.exact += 1;
            }
            Err(_) => outcome.failed += 1,
        }
    }
    // Whatever happened, all is free again, and the store works.
    assert_pool_is_empty(&pool);
    let usage = subject.store.usage();
    assert_eq!((usage.used_bytes, usage.records), (0, 0), "{fault:?} {at}");
    assert_eq!(usage.failures, outcome.failed);
    let mut sequence = filled(&pool, 9, 2);
    let image = subject.put(9, &mut sequence).unwrap();
    subject.get(9, image, &mut sequence).unwrap();
    assert_eq!(content(&sequence), canary(9, 2 * BLOCK_BYTES));
    outcome.operations = operations.load(Ordering::SeqCst);
    outcome
}

/// Slots of a record of two blocks, each an operation.
const PARTS: u64 = 3;
/// Writes of the three records; as many reads follow.
const WRITES: u64 = 3 * PARTS;

/// Records that fail where `fault` strikes in operation `at`.
fn expected_failures(fault: Fault, at: u64) -> usize {
    let write = at < WRITES;
    match fault {
        Fault::NoSpace | Fault::Lost => usize::from(write),
        Fault::Broken | Fault::Nothing | Fault::Flip(_) => 1,
        Fault::Partial | Fault::Slow(_) => 0,
        // The first slot is right where it is the one that was asked for: record 0 is read last.
        Fault::Misplaced => usize::from(!write && at != WRITES + 2 * PARTS),
        // What was stored before is gone, and of the record in hand what was written so far.
        Fault::Wiped if write => (at / PARTS) as usize + usize::from(!at.is_multiple_of(PARTS)),
        // Slots are written in order, so what lies behind the cut is not yet written.
        Fault::Cut if write => 0,
        // The record in hand, unless it is complete, and those read after it.
        Fault::Wiped => 3 - ((at - WRITES) / PARTS) as usize,
        // Record 0 lies before the cut in the others; record 2 behind that in record 1.
        Fault::Cut => match at - WRITES {
            0..PARTS => 2,
            _ => 1,
        },
    }
}

#[test]
fn each_fault_in_each_operation_harms_what_it_must_and_no_more() {
    let flips = [0, 8 * 40, 8 * 60, 8 * 64, 8 * 1000 + 3].map(Fault::Flip);
    let others = [
        Fault::NoSpace,
        Fault::Broken,
        Fault::Partial,
        Fault::Nothing,
        Fault::Lost,
        Fault::Misplaced,
        Fault::Cut,
        Fault::Wiped,
        Fault::Slow(1000),
    ];
    for make in [Subject::simulated, Subject::thread] {
        for fault in flips.into_iter().chain(others) {
            for at in 0..2 * WRITES {
                let Outcome { exact, failed, operations } = run(make, fault, at);
                assert_eq!(exact + failed, 3, "{fault:?} {at}");
                assert_eq!(failed, expected_failures(fault, at), "{fault:?} {at}");
                assert!(operations > at, "{fault:?} {at} did not happen");
            }
        }
    }
}

#[test]
fn errors_say_what_happened() {
    let error = |fault: Fault, at: u64| {
        let pool = pool_of(1 << 20);
        let size = SpillSize { file_bytes: 1 << 18, slot_bytes: 2560 };
        let script = move |operation: Operation| (operation.number == at).then_some(fault);
        let mut subject = Subject::simulated(size, Box::new(script));
        let mut sequence = filled(&pool, 5, 2);
        match subject.put(5, &mut sequence) {
            Ok(image) => subject.get(5, image, &mut sequence).unwrap_err(),
            Err(error) => error,
        }
    };
    let system = |text: &str| SpillError::System(text.to_owned());
    let full = system("writing at byte 6656: no space left on device");
    assert_eq!(error(Fault::NoSpace, 1), full);
    assert_eq!(error(Fault::Nothing, 0), system("writing at byte 4096: nothing was written"));
    assert_eq!(error(Fault::Broken, 4), system("reading at byte 6656: input/output error"));
    assert_eq!(error(Fault::Cut, 5), system("reading at byte 9216: the file ends there"));
    assert_eq!(error(Fault::Flip(700), 4), SpillError::Damaged { record: 5, part: 1 });
    assert_eq!(error(Fault::Lost, 0), SpillError::Damaged { record: 5, part: 0 });
}

#[test]
fn a_broken_disk_is_left_alone_and_what_is_on_it_can_be_read() {
    let size = SpillSize { file_bytes: 1 << 18, slot_bytes: 2560 };
    let pool = pool_of(1 << 20);
    // The first record's writes and all reads go well.
    let script = |operation: Operation| {
        (operation.write && operation.number >= 2 * PARTS).then_some(Fault::Broken)
    };
    let mut subject = Subject::simulated(size, Box::new(script));
    let mut first = filled(&pool, 0, 2);
    let image = subject.put(0, &mut first).unwrap();
    let mut second = filled(&pool, 1, 2);
    let second_image = subject.put(1, &mut second).unwrap();
    let mut refused = 0;
    for record in 2..20 {
        let mut sequence = filled(&pool, record, 2);
        match subject.put(record, &mut sequence).unwrap_err() {
            SpillError::System(_) => assert!(refused == 0),
            SpillError::Closed { failures } => {
                assert_eq!(failures, FAILURES_TO_CLOSE);
                assert_eq!(content(&sequence), canary(record, 2 * BLOCK_BYTES), "not cleared");
                refused += 1;
            }
            error => panic!("{error}"),
        }
    }
    assert_eq!(refused, 18 - FAILURES_TO_CLOSE);
    assert!(subject.store.usage().closed && !subject.store.can_store(1));
    subject.get(0, image, &mut first).unwrap();
    assert_eq!(content(&first), canary(0, 2 * BLOCK_BYTES));
    assert!(subject.store.can_store(1), "after a success it is tried again");
    subject.get(1, second_image, &mut second).unwrap();
}

/// Panics in its first write.
struct Panicking(bool);

impl SlotIo for Panicking {
    fn read_at(&mut self, _offset: u64, _bytes: &mut [u8]) -> std::io::Result<usize> {
        Ok(0)
    }

    fn write_at(&mut self, _offset: u64, bytes: &[u8]) -> std::io::Result<usize> {
        assert!(std::mem::replace(&mut self.0, true), "a bug, for the test");
        Ok(bytes.len())
    }
}

#[test]
fn a_panic_of_the_thread_fails_one_record() {
    let size = SpillSize { file_bytes: 1 << 18, slot_bytes: 2560 };
    let pool = pool_of(1 << 20);
    let store = SpillFile::over(Box::new(Panicking(false)), size, "none".as_ref()).unwrap();
    let (name, store) = ("panicking", Box::new(store));
    let mut subject = Subject { name, store, clock: None, scratch: None };
    let mut sequence = filled(&pool, 0, 2);
    let error = subject.put(0, &mut sequence).unwrap_err();
    assert!(error.to_string().contains("panicked"), "{error}");
    assert_pool_is_empty(&pool);
    subject.put(1, &mut filled(&pool, 1, 2)).unwrap();
}
