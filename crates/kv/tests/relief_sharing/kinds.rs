//! Kinds of failures known from other servers, and single cases of sharing.

use reef_kv::page::PageFormat;
use reef_kv::*;

use crate::SINKS;
use crate::crowd::{formats_of, held_bytes};
use crate::world::*;

/// 26 sequences of SmolLM2's pages that fill their pool at f16, the last block of each full too.
fn full_pool(contract: impl Fn(u64) -> Fidelity) -> (BlockPool, Vec<Sequence>) {
    let pool = smollm2_pool(90 << 20);
    let make = |id| Sequence::new(&pool, request(id, contract(id)));
    let mut sequences: Vec<Sequence> = (0..26).map(make).collect();
    let room = pool.capacity_tokens(PageFormat::F16).unwrap() / 32;
    (0..room).for_each(|block| extend(&mut sequences[block % 26], 32));
    (pool, sequences)
}

fn next_step(sequences: &[Sequence], stretch_tokens: usize) -> Vec<Demand<'_>> {
    let one = |sequence| Demand { stretch_tokens, ..demand(sequence, 1, 1) };
    sequences.iter().map(one).collect()
}

/// Kind A/19: a batch of 26 is a block short; one plan decides, nothing is halved, and it lasts.
#[test]
fn a_shortage_in_a_batch_is_one_decision_that_lasts() {
    let (pool, mut sequences) = full_pool(|_| Fidelity::Int4);
    let mut reliefs = 0;
    for step in 0..96 {
        let plan = plan_relief(&pool, &next_step(&sequences, 96), &SINKS);
        assert_eq!(plan.shortage, None);
        if !plan.is_empty() {
            reliefs += 1;
            let mut all: Vec<&mut Sequence> = sequences.iter_mut().collect();
            let outcome = apply_relief(&pool, &mut all, &plan, step, &mut keep_stamp).unwrap();
            assert_eq!(outcome.unfinished_blocks, 0);
        }
        // The whole batch goes on at every step.
        sequences.iter_mut().for_each(|sequence| extend(sequence, 1));
    }
    assert!((1..=3).contains(&reliefs), "{reliefs} reliefs in 96 steps");
    let all: Vec<&Sequence> = sequences.iter().collect();
    check(&pool, &all);
}

/// Kind A/4: nobody gives anything unless it yields memory now.
#[test]
fn no_victim_is_touched_unless_it_yields() {
    let (pool, mut sequences) =
        full_pool(|id| if id < 13 { Fidelity::Exact } else { Fidelity::Int4 });
    let formats = |sequences: &[Sequence]| sequences.iter().map(formats_of).collect::<Vec<_>>();
    let before = formats(&sequences);
    let plan = plan_relief(&pool, &next_step(&sequences, 1), &SINKS);
    assert_eq!(plan.shortage, None);
    assert!(plan.moves.iter().all(|planned| planned.bytes > 0 && planned.request >= 13));
    // A step in flight may read every page: nothing is mutated, however often it is asked.
    let fence = pool.begin_step();
    for _ in 0..3 {
        let mut all: Vec<&mut Sequence> = sequences.iter_mut().collect();
        let refused = apply_relief(&pool, &mut all, &plan, 0, &mut |_| panic!("no kernel runs"));
        assert_eq!(refused, Err(relief::ReliefError::StepInFlight));
        assert_eq!(formats(&sequences), before);
    }
    fence.pass();
    // What others read yields nothing: it is no victim, and the plan says that it is short.
    let pins: Vec<PinnedPages> = sequences.iter().map(|sequence| sequence.pin().1).collect();
    let pinned = plan_relief(&pool, &next_step(&sequences, 1), &SINKS);
    assert!(pinned.moves.is_empty() && pinned.shortage.is_some());
    drop(pins);
    let mut all: Vec<&mut Sequence> = sequences.iter_mut().collect();
    let used = pool.accounts().used_bytes();
    let outcome = apply_relief(&pool, &mut all, &plan, 0, &mut keep_stamp).unwrap();
    assert_eq!(outcome.unfinished_blocks, 0);
    assert_eq!(used - pool.accounts().used_bytes(), plan.gained_bytes());
    sequences.iter_mut().for_each(|sequence| extend(sequence, 1));
}

/// Each wants eight tokens at once.
fn chunks(sequences: &[Sequence]) -> Vec<Demand<'_>> {
    sequences.iter().map(|sequence| demand(sequence, 8, 8)).collect()
}

/// Kind J/115: a tenant with a quota of half the pool floods it; its own requests degrade, nobody else's,
/// and the other tenant's requests always find room at f16.
#[test]
fn a_flooding_tenant_degrades_its_own_requests_first() {
    let pool = smollm2_pool(48 << 20);
    let make = |id, priority| {
        let config = SequenceConfig { priority, ..request(id, Fidelity::Evict) };
        Sequence::new(&pool, config)
    };
    // The flood has the higher priority: a quota is no matter of that.
    let mut flood: Vec<Sequence> = (0..6).map(|id| make(id, 5)).collect();
    let mut quiet = make(100, 0);
    let quota = 24 << 20;
    let mut degraded = false;
    for step in 0..120 {
        if step % 2 == 0 && quiet.next_position() < 400 {
            let ahead = [demand(&quiet, 4, 4)];
            assert_eq!(relief_needed_bytes(&pool, &ahead), 0, "waits at step {step}");
            extend(&mut quiet, 4);
        }
        let plan = plan_quota(&pool, &chunks(&flood), quota, &SINKS);
        assert_eq!(plan.shortage, None, "step {step}");
        degraded |= !plan.is_empty();
        let mut all: Vec<&mut Sequence> = flood.iter_mut().collect();
        all.push(&mut quiet);
        apply_relief(&pool, &mut all, &plan, step, &mut keep_stamp).unwrap();
        // Whether the pool has room is another question: holes between pages are closed, no more.
        let mut demands = chunks(&flood);
        demands.push(demand(&quiet, 4, 4));
        let plan = plan_relief(&pool, &demands, &SINKS);
        assert_eq!((plan.moves.len(), plan.shortage), (0, None), "step {step}");
        let mut all: Vec<&mut Sequence> = flood.iter_mut().collect();
        all.push(&mut quiet);
        apply_relief(&pool, &mut all, &plan, step, &mut keep_stamp).unwrap();
        flood.iter_mut().for_each(|sequence| extend(sequence, 8));
        assert!(held_bytes(flood.iter()) <= quota);
    }
    assert!(degraded && quiet.ledger().entries().is_empty());
    assert!(formats_of(&quiet).values().all(|format| *format == PageFormat::F16));
    let mut all: Vec<&Sequence> = flood.iter().collect();
    all.push(&quiet);
    check(&pool, &all);
}

/// A shared prefix that an exact request holds too stays; without that request it goes down once for all.
#[test]
fn a_shared_prefix_goes_down_once_and_only_if_all_permit_it() {
    for with_exact in [true, false] {
        let pool = smollm2_pool(24 << 20);
        let mut first = Sequence::new(&pool, request(0, Fidelity::Int8));
        extend(&mut first, 640);
        let attach = |first: &mut Sequence, id, contract| {
            let mut attached = Vec::new();
            for block in 0..20 {
                let names = first.seal_identity(block * 32).unwrap();
                let guard = pool.attach(names[0].unwrap()).unwrap();
                attached.push(AttachedBlock { first: block * 32, group: 0, guard });
            }
            let mut sequence = Sequence::new(&pool, request(id, contract));
            sequence.attach_prefix(attached);
            sequence
        };
        let others: Vec<Sequence> =
            (1..9).map(|id| attach(&mut first, id, Fidelity::Int4)).collect();
        let exact = with_exact.then(|| attach(&mut first, 9, Fidelity::Exact));
        let mut all = vec![first];
        all.extend(others.into_iter().chain(exact));
        let demands: Vec<Demand<'_>> = all.iter().map(|s| demand(s, 32, 32)).collect();
        // 640 tokens that all share, and the first block of each, fit; 600 more do not.
        let needs = |tokens| {
            let mut demands = demands.clone();
            demands[0] = demand(&all[0], tokens, tokens);
            plan_relief(&pool, &demands, &SINKS)
        };
        let plan = needs(320);
        if with_exact {
            assert!(plan.moves.is_empty() && plan.shortage.is_some());
            continue;
        }
        assert_eq!(plan.shortage, None);
        assert!(!plan.moves.is_empty() && plan.moves.len() <= 20);
        // The strictest of the contracts is int8's.
        assert!(plan.moves.iter().all(|planned| planned.rung() == Rung::Int8));
        let saved =
            30 * (SMOLLM2.page_bytes(PageFormat::F16) - SMOLLM2.page_bytes(PageFormat::Int8));
        assert_eq!(plan.gained_bytes(), plan.moves.len() * saved);
        let mut list: Vec<&mut Sequence> = all.iter_mut().collect();
        let outcome = apply_relief(&pool, &mut list, &plan, 0, &mut keep_stamp).unwrap();
        assert_eq!(outcome.encoded_blocks, plan.moves.len());
        // Each ledger has it, with its part of the harm.
        let blocks: Vec<usize> = all.iter().map(|s| s.ledger().blocks(Rung::Int8)).collect();
        assert_eq!(blocks, vec![plan.moves.len(); 9]);
        let harm: f64 = all.iter().flat_map(|s| s.ledger().entries()).map(|e| e.harm).sum();
        assert!((harm - plan.harm()).abs() < 1e-12 && harm > 0.0);
        all[0].grow(320).unwrap();
    }
}

/// A plan that needs nothing looks at no block, however many there are.
#[test]
fn where_nothing_is_needed_no_block_is_looked_at() {
    let allocated = |tokens: usize| {
        let pool = smollm2_pool(256 << 20);
        let make = |id| {
            let mut sequence = Sequence::new(&pool, request(id, Fidelity::Evict));
            sequence.grow(tokens).unwrap();
            sequence.commit(tokens);
            sequence
        };
        let sequences: Vec<Sequence> = (0..8).map(make).collect();
        let demands = next_step(&sequences, 256);
        let info = allocation_counter::measure(|| {
            assert!(plan_relief(&pool, &demands, &SINKS).is_empty());
            assert!(plan_quota(&pool, &demands, 1 << 30, &SINKS).is_empty());
        });
        info.bytes_total
    };
    assert_eq!(allocated(33), allocated(1300));
}
