//! The spill store: whole sequences out and back, or computed again; nobody ever reads another's.

use reef_engine::Request;
use reef_engine::event::{PauseKind, PauseReason};
use reef_engine::store::{Fault, SpillFile, SpillSize};

use super::*;

/// Requests whose text is their own from the first token on, some greedy, some not.
fn canaries(random: &mut Random, count: usize) -> Vec<Request> {
    let mut requests = unique(random, count, 30, 150);
    for (index, request) in requests.iter_mut().enumerate() {
        request.sampling.temperature = [0.0, 0.8][index % 2];
        request.sampling.seed = index as u64;
    }
    requests
}

/// Rows 83, 85, 86, 88, 89, 95 and 97: many at once through stores of any speed and size, steps in flight
/// while pages are written and read: every output is its own, nothing stays pinned.
#[test]
fn thrashing_through_a_store_every_text_is_its_own() {
    let mut swaps = 0;
    for (model, seed) in [(plain(), 1), (hybrid(), 2)] {
        let mut requests = canaries(&mut Random(seed), 32);
        requests.iter_mut().step_by(3).for_each(|request| request.max_tokens = Some(250));
        let expected = alone(&model, &requests);
        for (slots, slot_us, delay) in
            [(4000, 10, 0), (4000, 900, 2), (4000, 30_000, 1), (60, 400, 3)]
        {
            let config = crowded(budget_of(&model, 16));
            let script = move |step: u64| match delay {
                0 => Deed::Deliver,
                delay => Deed::Delay((step as usize * 7) % (2 * delay + 1)),
            };
            let engine = faulty_engine(model.plain_runner(), config, Box::new(script));
            let mut server = Server::new(engine).with_spill(slots, slot_us, Box::new(|_| None));
            serve(&mut server, &requests);
            let what = format!("seed {seed}: {slots} slots of {slot_us} us");
            server.assert_exact(&expected, &what);
            let counters = server.engine.stats().counters;
            swaps += counters.pauses(PauseKind::Swap);
            assert!(counters.pauses(PauseKind::Swap) > 0, "{what}: {counters:?}");
            assert_eq!(counters.spill_failures, 0, "{what}");
            server.assert_empty();
        }
    }
    assert!(swaps >= 12, "{swaps}");
}

/// Rows 82, 91, 97 and 101: whatever goes wrong with a write or a read, once, now and then or always: what
/// was lost is computed again once, said to be, and never served; the others are as they were.
#[test]
fn a_failed_transfer_is_computed_again_and_never_served() {
    let model = plain();
    let requests = canaries(&mut Random(3), 10);
    let expected = alone(&model, &requests);
    let faults = [
        Fault::NoSpace,
        Fault::Broken,
        Fault::Partial,
        Fault::Nothing,
        Fault::Flip(12_345),
        Fault::Lost,
        Fault::Misplaced,
        Fault::Cut,
        Fault::Wiped,
        Fault::Slow(40_000),
    ];
    let mut failures = 0;
    for (fault, every) in faults.into_iter().flat_map(|fault| [(fault, 1), (fault, 5), (fault, 23)])
    {
        let script = move |operation: reef_engine::store::Operation| {
            (operation.number % every == every - 1).then_some(fault)
        };
        let config = crowded(budget_of(&model, 14));
        let mut server = Server::of(&model, config).with_spill(1000, 50, Box::new(script));
        serve(&mut server, &requests);
        let what = format!("{fault:?} in every {every}th operation");
        server.assert_exact(&expected, &what);
        let counters = server.engine.stats().counters;
        assert!(counters.pauses(PauseKind::Swap) > 0, "{what}");
        failures += counters.spill_failures;
        let told: usize = (0..10)
            .flat_map(|key| server.pauses(key))
            .filter(|pause| pause.reason == PauseReason::SpillFailure)
            .inspect(|pause| assert_eq!(pause.kind, PauseKind::Recompute))
            .count();
        assert_eq!(told as u64, counters.spill_failures, "{what}: each failure is told once");
        server.assert_empty();
    }
    assert!(failures > 30, "{failures}");
}

/// Rows 92, 94 and 100: a plain file in a plain folder works, is used as soon as memory is short, stays
/// below its limit and is gone afterwards; a path that cannot be used is an error at start.
#[test]
fn a_plain_file_works() {
    let model = plain();
    let requests = canaries(&mut Random(4), 10);
    let expected = alone(&model, &requests);
    let path = std::env::temp_dir().join(format!("reef-behaviours-{}", std::process::id()));
    let limit_bytes = 160 << 10;
    let mut server = Server::of(&model, crowded(budget_of(&model, 14)));
    let size = SpillSize { file_bytes: limit_bytes, slot_bytes: SLOT_BYTES };
    server.engine.set_spill(Box::new(SpillFile::open(&path, size).unwrap()));
    for (key, request) in requests.iter().enumerate() {
        server.submit(key as u64, request);
    }
    let mut largest = 0;
    while server.open > 0 {
        if server.turn() == Progress::Waiting {
            std::thread::yield_now();
        }
        largest = largest.max(std::fs::metadata(&path).unwrap().len());
        assert!(server.now_us < 10_000_000_000, "{:?}", server.engine.stats());
    }
    server.assert_exact(&expected, "through a file");
    assert!(server.count(PauseKind::Swap) > 0 && largest <= limit_bytes, "{largest}");
    server.assert_empty();
    drop(server);
    assert!(!path.exists(), "the file goes with the store");
    let nowhere = path.join("no/such/folder");
    let error = SpillFile::open(&nowhere, size).err().expect("no such folder");
    assert!(error.to_string().contains("no/such/folder"), "{error}");
}

/// Rows 103 and 112: with next to nothing free and everything idle, prefixes give way as they are needed,
/// step by step, and the gauge tells what is held from what could be given back.
#[test]
fn idle_prefixes_give_way_step_by_step() {
    let model = plain();
    let mut random = Random(5);
    let config = with_prefix(IndexKind::Chain, engine_config(budget_of(&model, 40)));
    let mut server = Server::of(&model, config).with_good_spill();
    for key in 0..20 {
        server.submit(key, &exact(random.tokens(3 * BLOCK, VOCABULARY), 2));
        server.finish();
        server.assert_empty();
    }
    let block = block_bytes(&server.engine);
    let accounts = server.engine.pool().accounts();
    assert_eq!(accounts.cached_bytes, accounts.used_bytes());
    assert!(accounts.free_bytes < 5 * block && accounts.cached_bytes >= 36 * block, "{accounts:?}");
    let request = exact(random.tokens(20 * BLOCK, VOCABULARY), 15 * BLOCK);
    server.submit(99, &request);
    let mut turns_without = 0;
    while server.open > 0 {
        let before = server.engine.stats().counters.steps;
        server.turn();
        server.turn();
        let after = server.engine.stats().counters.steps;
        turns_without = if after == before { turns_without + 1 } else { 0 };
        assert!(turns_without <= 1, "a step every other turn");
    }
    let pauses = server.pauses(99);
    assert!(pauses.is_empty(), "{pauses:?}");
    assert_same(&server.outcomes[&99], &alone(&model, &[request])[0], "after 20 others");
    assert!(server.engine.stats().counters.evicted_prefix_bytes as usize >= 20 * block);
}

/// Row 104: a record larger than the store is not begun; below its limit the store is used.
#[test]
fn a_record_larger_than_the_store_is_skipped() {
    let model = plain();
    // The small one takes 2 or 3 blocks when it gives way, the large one 6 or more.
    let mut random = Random(6);
    let first = Request { priority: 2, ..exact(random.tokens(BLOCK, VOCABULARY), 9 * BLOCK) };
    let large = Request { priority: 1, ..exact(random.tokens(3 * BLOCK, VOCABULARY), 150) };
    let small = exact(random.tokens(10, VOCABULARY), 100);
    let requests = [first, large, small];
    let mut server =
        Server::of(&model, crowded(budget_of(&model, 12))).with_spill(10, 10, Box::new(|_| None));
    for (key, request) in requests.iter().enumerate() {
        server.submit(key as u64, request);
    }
    let capacity = server.engine.stats().spill.unwrap().capacity_bytes;
    while server.open > 0 {
        server.turn();
        assert!(server.engine.stats().spill.unwrap().used_bytes <= capacity);
    }
    server.assert_exact(&alone(&model, &requests), "a store of ten slots");
    let kinds = |key| server.pauses(key).iter().map(|pause| pause.kind).collect::<Vec<_>>();
    assert!(!kinds(1).contains(&PauseKind::Swap), "{:?}", kinds(1));
    assert!(kinds(1).contains(&PauseKind::Recompute), "{:?}", kinds(1));
    assert!(kinds(2).contains(&PauseKind::Swap), "{:?}", kinds(2));
    server.assert_empty();
}
