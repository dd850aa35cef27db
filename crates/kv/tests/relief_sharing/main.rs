//! Relief among sequences that share blocks: contracts of all holders, promises kept, nobody else's bytes.

mod crowd;
mod kinds;
#[path = "../world/mod.rs"]
mod world;

use std::collections::BTreeMap;

use proptest::prelude::*;
use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};
use reef_kv::page::PageShape;
use reef_kv::policy::{EvictionPolicy, Sinks, Window};
use reef_kv::*;

use crowd::{Crowd, Operation, formats_of, held_bytes};

const BLOCK: usize = 16;
const WINDOW: usize = 40;
const SINKS: Sinks = Sinks { tail_tokens: 48 };

fn operation() -> impl Strategy<Value = Operation> {
    let contract = || proptest::sample::select(Fidelity::ALL.to_vec());
    let index = || 0..16usize;
    prop_oneof![
        2 => (contract(), 0..3).prop_map(|(contract, priority)| Operation::Start { contract, priority }),
        8 => (index(), 1..90usize).prop_map(|(sequence, tokens)| Operation::Extend { sequence, tokens }),
        3 => index().prop_map(|sequence| Operation::Fork { sequence }),
        3 => (index(), 1..12usize, contract(), 0..3).prop_map(
            |(sequence, blocks, contract, priority)| {
                Operation::Attach { sequence, blocks, contract, priority }
            }
        ),
        1 => index().prop_map(|sequence| Operation::End { sequence }),
        1 => index().prop_map(|sequence| Operation::Pin { sequence }),
    ]
}

fn pool() -> impl Strategy<Value = BlockPool> {
    let pins = proptest::collection::vec(proptest::sample::subsequence(vec![0, 1], 0..=1), 2);
    (pins, 4..12usize, any::<bool>()).prop_map(|(pins, halves, four_bit_keys)| {
        let shape = |kv_heads, head_dim| PageShape { kv_heads, head_dim, block_size: BLOCK };
        let group = |layers, shape, window, pinned: &Vec<usize>| GroupConfig {
            layers,
            shape,
            window,
            pinned: pinned.clone(),
        };
        let groups = vec![
            group(2, shape(2, 32), Some(WINDOW), &pins[0]),
            group(3, shape(1, 48), None, &pins[1]),
        ];
        let ladder = Ladder { four_bit_keys, ..Ladder::default() };
        let config = PoolConfig { groups, budget_bytes: 0, prefault: false, ladder };
        let budget_bytes = halves * minimum_budget_bytes(&config, Fidelity::Exact) / 2;
        BlockPool::new(PoolConfig { budget_bytes, ..config }).unwrap()
    })
}

fn relieve(pool: BlockPool, operations: Vec<Operation>, demands: Vec<(usize, bool)>) {
    let mut crowd = Crowd::new(pool.clone());
    operations.into_iter().for_each(|operation| crowd.run(operation));
    for (tokens, window) in demands {
        let policy: &dyn EvictionPolicy = if window { &Window } else { &SINKS };
        let plan = plan_relief(&pool, &crowd.demands(tokens, |_| true), policy);
        let beside = [
            ("relief beside pins", !crowd.pins.is_empty()),
            ("relief beside idle blocks", pool.accounts().cached_bytes > 0),
        ];
        for (event, is_so) in beside {
            see(event, usize::from(is_so && !plan.moves.is_empty()));
        }
        see("shortage", usize::from(plan.shortage.is_some()));
        crowd.carry_out(&plan);
        if plan.shortage.is_none() {
            for index in 0..crowd.sequences.len() {
                assert!(crowd.extend(index, tokens), "{tokens} promised");
            }
        }
    }
    drop(crowd);
    assert_eq!(pool.accounts().held_bytes(), 0);
}

fn keep_quota(pool: BlockPool, operations: Vec<Operation>, tokens: usize, percent: usize) {
    let mut crowd = Crowd::new(pool.clone());
    operations.into_iter().for_each(|operation| crowd.run(operation));
    // A quota's plan counts on all pages being movable.
    crowd.pins.clear();
    let theirs = |sequence: &Sequence| sequence.config().request.is_multiple_of(2);
    let held = held_bytes(crowd.sequences.iter().filter(|sequence| theirs(sequence)));
    let demands = crowd.demands(tokens, theirs);
    // All that the demand takes: nothing is free under a quota of nothing.
    let Some(none) = plan_quota(&pool, &demands, 0, &SINKS).shortage else { return };
    let quota = (held + none.needed_bytes) * percent / 100;
    let plan = plan_quota(&pool, &demands, quota, &SINKS);
    assert!(
        plan.moves.iter().all(|planned| planned.request.is_multiple_of(2) && planned.bytes > 0)
    );
    let before: Vec<_> = crowd.sequences.iter().map(formats_of).collect();
    crowd.carry_out(&plan);
    for (sequence, before) in crowd.sequences.iter().zip(&before) {
        assert!(theirs(sequence) || formats_of(sequence) == *before);
    }
    let after = held_bytes(crowd.sequences.iter().filter(|sequence| theirs(sequence)));
    let fits = after + none.needed_bytes <= quota;
    assert_eq!(fits, plan.shortage.is_none());
    if let Some(shortage) = plan.shortage {
        assert_eq!(shortage.free_bytes, quota.saturating_sub(after));
        assert_eq!(shortage.needed_bytes, none.needed_bytes);
        // Nothing is taken where it cannot help.
        assert!(plan.moves.is_empty() || none.needed_bytes <= quota);
    }
    see("quota kept by moves", usize::from(fits && !plan.moves.is_empty()));
    see("quota short", usize::from(!fits));
}

thread_local! {
    static SEEN: std::cell::RefCell<BTreeMap<&'static str, usize>> = Default::default();
}

/// Counts an event that the cases must come across.
fn see(event: &'static str, times: usize) {
    SEEN.with_borrow_mut(|seen| *seen.entry(event).or_default() += times);
}

/// Runs `test` on the same 200 random cases each time; each of `events` must happen 20 times.
fn run_cases<T: std::fmt::Debug>(
    cases: impl Strategy<Value = T>,
    events: &[&'static str],
    test: impl Fn(T),
) {
    let config = ProptestConfig { cases: 200, failure_persistence: None, ..Default::default() };
    let random = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let result = TestRunner::new_with_rng(config, random).run(&cases, |case| {
        test(case);
        Ok(())
    });
    assert!(result.is_ok(), "{}", result.unwrap_err());
    SEEN.with_borrow(|seen| {
        println!("{seen:?}");
        let few = |event: &&&str| seen.get(**event).copied().unwrap_or(0) < 20;
        assert_eq!(events.iter().find(few), None, "{seen:?}");
    });
}

fn operations() -> impl Strategy<Value = Vec<Operation>> {
    proptest::collection::vec(operation(), 60)
}

#[test]
fn what_a_plan_promises_holds_for_all_who_share() {
    let demands = proptest::collection::vec((1..120usize, any::<bool>()), 4);
    let events = [
        "shared block re-encoded",
        "block shared with exact stayed",
        "shared page moved",
        "block dropped",
        "relief beside pins",
        "relief beside idle blocks",
        "shortage",
    ];
    run_cases((pool(), operations(), demands), &events, |(pool, operations, demands)| {
        relieve(pool, operations, demands);
    });
}

#[test]
fn a_quota_costs_its_tenant_only() {
    let events = ["shared block re-encoded", "quota kept by moves", "quota short"];
    let cases = (pool(), operations(), 1..40usize, 60..100usize);
    run_cases(cases, &events, |(pool, operations, tokens, percent)| {
        keep_quota(pool, operations, tokens, percent);
    });
}
