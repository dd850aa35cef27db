//! What gives way, in what order, and what never does.

mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};

use reef_kv::page::PageFormat::{F16, Int4, Int8};
use reef_kv::policy::{Sinks, Window};
use reef_kv::*;
use world::*;

const POLICY: Sinks = Sinks { tail_tokens: TAIL_TOKENS };

fn plan_for(sequence: &Sequence, tokens: usize, step_tokens: usize) -> ReliefPlan {
    plan_relief(sequence.pool(), &[demand(sequence, tokens, step_tokens)], &POLICY)
}

/// Decodes up to `total` tokens as an engine does. Returns false where relief says it is short.
fn decode(sequence: &mut Sequence, total: usize, horizon: usize) -> bool {
    let pool = sequence.pool().clone();
    while sequence.next_position() < total {
        let step = sequence.next_position() as u64;
        let plan = plan_for(sequence, sequence.remaining(horizon), 1);
        if plan.shortage.is_some() {
            return false;
        }
        if !plan.is_empty() {
            apply(sequence, &plan, step);
            check(&pool, &[sequence]);
        }
        extend(sequence, 1);
    }
    check(&pool, &[sequence]);
    true
}

#[test]
fn a_request_that_fits_at_f16_is_never_touched() {
    let pool = smollm2_pool(24 << 20);
    let fits = pool.capacity_tokens(F16).unwrap();
    assert!(pool.fits_at_f16(fits, 1) && !pool.fits_at_f16(fits + 1, 1));
    let mut config = request(0, Fidelity::Evict);
    config.max_tokens = Some(fits);
    let mut sequence = Sequence::new(&pool, config);
    // The horizon is far beyond what fits: `max_tokens` caps the demand.
    assert!(decode(&mut sequence, fits, 1 << 30));
    assert_eq!(sequence.usage().relief, []);
    assert_eq!(sequence.usage().tokens_by_format[F16], fits as f64);
}

#[test]
fn every_rung_is_used_up_before_a_block_is_dropped() {
    let pool = smollm2_pool(24 << 20);
    let mut sequence = Sequence::new(&pool, request(0, Fidelity::Evict));
    let total = 4000;
    assert!(decode(&mut sequence, total, 64));
    let usage = sequence.usage();
    let begins = |rung| usage.relief.iter().position(|entry| entry.rung == rung).unwrap();
    let order = Rung::ALL.map(begins);
    assert!(order.is_sorted(), "{order:?}");
    // Before the first drop all of the middle was at the floor, and the tail at int8.
    for rung in Rung::ALL {
        assert!(
            usage.relief[..begins(Rung::Evict)].iter().filter(|e| e.rung == rung).count() > 1
                || rung == Rung::Evict
        );
    }
    for entry in usage.relief.iter().filter(|entry| entry.rung == Rung::Evict) {
        assert!(entry.blocks >= relief::EVICT_BATCH_BLOCKS, "{entry:?}");
        assert_eq!(entry.reason, Reason::Demand);
    }
    // Sinks stay f16 and stay; the tail is 8 bits at worst; kept and dropped add up.
    assert_eq!((firsts(&sequence, 0)[0], formats(&sequence, 0)[0]), (0, F16));
    assert!(formats(&sequence, 0).iter().rev().take(4).all(|&format| format <= Int8));
    let kept: f64 = usage.tokens_by_format.iter().map(|(_, tokens)| tokens).sum();
    assert_eq!(kept + usage.dropped_tokens, total as f64);
    assert!(usage.dropped_tokens > 0.0 && usage.peak_bytes <= 24 << 20);
    assert_eq!(usage.bytes_at_f16, total * 23_040);
    // The budget is put to use: what is kept is near what it can hold.
    let capacity = pool.capacity_tokens(Int4).unwrap();
    assert!(kept > capacity as f64 * 0.8, "{kept} of {capacity}");
}

#[test]
fn each_contract_stops_where_it_must() {
    for contract in Fidelity::ALL {
        let pool = smollm2_pool(12 << 20);
        let limit = pool.token_limit(contract);
        let mut sequence = Sequence::new(&pool, request(0, contract));
        let reached = decode(&mut sequence, limit.unwrap_or(5000), 1);
        assert!(reached, "{contract:?} stopped at {} of {limit:?}", sequence.next_position());
        if let Some(limit) = limit {
            assert!(!decode(&mut sequence, limit + 1, 1), "{contract:?}");
            let shortage = plan_for(&sequence, 1, 1).shortage.unwrap();
            assert!(shortage.needed_bytes > shortage.free_bytes);
            assert!(sequence.grow(1).is_err());
            assert_eq!(sequence.usage().dropped_tokens, 0.0);
        }
        // At the limit even the tail and the sinks have given way.
        if contract < Fidelity::Evict {
            let floor = pool.config().floor(contract);
            assert!(formats(&sequence, 0).iter().rev().skip(1).all(|&format| format == floor));
        }
        check(&pool, &[&sequence]);
    }
}

#[test]
fn the_smallest_budget_suffices_and_less_is_refused_with_numbers() {
    let config = smollm2_pool(24 << 20).config().clone();
    let minimum = minimum_budget_bytes(&config, Fidelity::Evict);
    assert!((2 << 20..4 << 20).contains(&minimum), "{minimum}");
    let pool = smollm2_pool(minimum);
    let mut sequence = Sequence::new(&pool, request(0, Fidelity::Evict));
    assert!(decode(&mut sequence, 1000, 1));
    let small = PoolConfig { budget_bytes: minimum / 2, ..config };
    let message = BlockPool::new(small).unwrap_err().to_string();
    assert!(message.contains("--kv-memory") && message.contains("at least"), "{message}");
}

#[test]
fn a_prompt_longer_than_the_pool_is_prefilled_in_chunks() {
    let pool = smollm2_pool(24 << 20);
    let mut sequence = Sequence::new(&pool, request(0, Fidelity::Evict));
    while sequence.next_position() < 4000 {
        let chunk = 256.min(4000 - sequence.next_position());
        let plan = plan_for(&sequence, chunk, chunk);
        assert_eq!(plan.shortage, None);
        apply(&mut sequence, &plan, 0);
        extend(&mut sequence, chunk);
        check(&pool, &[&sequence]);
    }
    assert!(sequence.usage().dropped_tokens > 700.0);
    // A chunk beyond any hope says so, with numbers.
    let shortage = plan_for(&sequence, 2000, 2000).shortage.unwrap();
    assert!(shortage.needed_bytes > shortage.free_bytes);
}

#[test]
fn kept_tokens_stay_within_the_trained_context() {
    let pool = smollm2_pool(24 << 20);
    let config = SequenceConfig { trained_context: 512, ..request(0, Fidelity::Evict) };
    let mut sequence = Sequence::new(&pool, config);
    for step in 0..100 {
        let plan = plan_for(&sequence, 32, 32);
        apply(&mut sequence, &plan, step);
        extend(&mut sequence, 32);
        assert!(sequence.kept_tokens() <= 512);
    }
    let usage = sequence.usage();
    assert!(usage.relief.iter().all(|entry| entry.reason == Reason::Context));
    assert!(usage.relief.iter().all(|entry| entry.blocks == relief::EVICT_BATCH_BLOCKS));
}

#[test]
fn low_priority_gives_way_first_and_exact_never() {
    let pool = smollm2_pool(24 << 20);
    let make = |id, contract, priority| {
        Sequence::new(&pool, SequenceConfig { priority, ..request(id, contract) })
    };
    let mut exact = make(0, Fidelity::Exact, -1);
    let mut low = make(1, Fidelity::Int8, 0);
    let mut high = make(2, Fidelity::Evict, 1);
    for sequence in [&mut exact, &mut low, &mut high] {
        extend(sequence, 320);
    }
    let plan = |tokens| {
        let demands = [demand(&exact, 0, 1), demand(&low, 0, 1), demand(&high, tokens, tokens)];
        plan_relief(&pool, &demands, &POLICY)
    };
    let touched = |plan: &ReliefPlan| plan.moves.iter().map(|m| m.request).collect::<Vec<_>>();
    let some = touched(&plan(128));
    assert!(!some.is_empty() && some.iter().all(|&request| request == 1), "{some:?}");
    let more = touched(&plan(288));
    assert!(more.contains(&1) && more.contains(&2) && !more.contains(&0), "{more:?}");
    let moves = plan(288);
    let mut sequences = [&mut exact, &mut low, &mut high];
    apply_relief(&pool, &mut sequences, &moves, 1, &mut keep_stamp).unwrap();
    check(&pool, &[&exact, &low, &high]);
    assert_eq!(exact.usage().tokens_by_format[Int8], 0.0);
}

#[test]
fn a_panic_in_the_kernel_leaves_old_pages_live_and_leaks_nothing() {
    for panics_at in 0..6 {
        let pool = smollm2_pool(24 << 20);
        let mut sequence = Sequence::new(&pool, request(0, Fidelity::Evict));
        assert!(decode(&mut sequence, pool.capacity_tokens(F16).unwrap(), 1));
        let plan = plan_for(&sequence, 128, 128);
        let mut calls = 0;
        let unwound = catch_unwind(AssertUnwindSafe(|| {
            apply_relief(&pool, &mut [&mut sequence], &plan, 1, &mut |jobs| {
                keep_stamp(&mut jobs[..1]);
                assert!(calls < panics_at, "kernel fault");
                calls += 1;
                keep_stamp(jobs);
            })
        }));
        assert!(unwound.is_err());
        check(&pool, &[&sequence]);
        let again = plan_for(&sequence, 128, 128);
        assert_eq!(again.shortage, None);
        apply(&mut sequence, &again, 2);
        check(&pool, &[&sequence]);
        extend(&mut sequence, 128);
        drop(sequence);
        let accounts = pool.accounts();
        assert_eq!((accounts.used_bytes(), accounts.fenced_bytes), (0, 0));
    }
}

#[test]
fn a_refused_page_stays_f16_and_is_not_asked_for_again() {
    let pool = smollm2_pool(24 << 20);
    let mut sequence = Sequence::new(&pool, request(0, Fidelity::Evict));
    extend(&mut sequence, 96);
    let plan = plan_format_at_seal(&sequence, Int8, 0, 0);
    assert_eq!(plan.moves.len(), 3);
    let outcome = apply_relief(&pool, &mut [&mut sequence], &plan, 0, &mut |jobs| {
        keep_stamp(jobs);
        jobs.iter_mut().for_each(|job| job.refused = true);
    });
    assert_eq!(outcome.unwrap().refused_pages, 90);
    assert!(plan_format_at_seal(&sequence, Int8, 0, 0).is_empty());
    assert_eq!(sequence.usage().tokens_by_format[F16], 96.0);
    check(&pool, &[&sequence]);
}

#[test]
fn format_at_seal_keeps_sinks_and_tail() {
    let pool = smollm2_pool(24 << 20);
    let mut sequence = Sequence::new(&pool, request(0, Fidelity::Evict));
    for _ in 0..40 {
        extend(&mut sequence, 10);
        let plan = plan_format_at_seal(&sequence, Int8, 4, 64);
        apply(&mut sequence, &plan, 0);
        check(&pool, &[&sequence]);
    }
    let expected = |first: usize| if first == 0 || first + 32 > 400 - 64 { F16 } else { Int8 };
    let expected: Vec<_> = firsts(&sequence, 0).into_iter().map(expected).collect();
    assert_eq!(formats(&sequence, 0), expected);
    assert!(plan_format_at_seal(&sequence, F16, 0, 0).is_empty());
}

#[test]
fn a_token_budget_drops_one_block_at_a_time() {
    for (policy, kept_first) in
        [(&Sinks { tail_tokens: 0 } as &dyn policy::EvictionPolicy, true), (&Window, false)]
    {
        let pool = smollm2_pool(24 << 20);
        let mut sequence = Sequence::new(&pool, request(0, Fidelity::Evict));
        for position in 0..1000 {
            let plan = plan_token_budget(&sequence, policy, 256, 1);
            assert!(plan.moves.len() <= 1);
            apply(&mut sequence, &plan, position);
            extend(&mut sequence, 1);
            assert!(sequence.kept_tokens() <= 256);
        }
        assert_eq!(firsts(&sequence, 0)[0] == 0, kept_first);
        assert!(sequence.kept_tokens() > 256 - 32);
        check(&pool, &[&sequence]);
    }
}

#[test]
fn relief_waits_for_the_step_in_flight() {
    let pool = smollm2_pool(24 << 20);
    let mut sequence = Sequence::new(&pool, request(0, Fidelity::Evict));
    extend(&mut sequence, 64);
    let plan = plan_format_at_seal(&sequence, Int8, 0, 0);
    let fence = pool.begin_step();
    let refused = apply_relief(&pool, &mut [&mut sequence], &plan, 0, &mut keep_stamp);
    assert_eq!(refused, Err(relief::ReliefError::StepInFlight));
    fence.pass();
    apply(&mut sequence, &plan, 0);
    assert_eq!(formats(&sequence, 0), [Int8, Int8]);
}
