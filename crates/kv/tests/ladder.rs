//! The ladder: order of rungs and victims, contracts, pinned layers, hysteresis, marks, harm.

mod world;

use std::time::Instant;

use proptest::prelude::*;
use reef_kv::page::PageFormat::{F16, Fp8E4M3, Int4, Int8, K8V4};
use reef_kv::page::PageShape;
use reef_kv::policy::Sinks;
use reef_kv::relief::MoveKind;
use reef_kv::*;
use world::*;

const POLICY: Sinks = Sinks { tail_tokens: TAIL_TOKENS };

fn with_ladder(budget_bytes: usize, ladder: Ladder) -> BlockPool {
    let config = smollm2_pool(24 << 20).config().clone();
    BlockPool::new(PoolConfig { budget_bytes, ladder, ..config }).unwrap()
}

fn plan_for(sequence: &Sequence, tokens: usize) -> ReliefPlan {
    plan_relief(sequence.pool(), &[demand(sequence, tokens, 1)], &POLICY)
}

/// Grows a sequence to `tokens` as decode does. Returns the rungs used, in the order of first use.
fn decode(sequence: &mut Sequence, tokens: usize) -> Vec<Rung> {
    let pool = sequence.pool().clone();
    let mut rungs = Vec::new();
    while sequence.next_position() < tokens {
        let plan = plan_for(sequence, 1);
        assert_eq!(plan.shortage, None, "at {}", sequence.next_position());
        // Within a plan drops come first though they were decided on last.
        let mut new: Vec<Rung> = plan.moves.iter().map(relief::Move::rung).collect();
        new.sort_by_key(|rung| pool.config().ladder.rungs.iter().position(|other| other == rung));
        new.into_iter().for_each(|rung| {
            if !rungs.contains(&rung) {
                rungs.push(rung);
            }
        });
        apply(sequence, &plan, 0);
        extend(sequence, 1);
    }
    check(&pool, &[sequence]);
    rungs
}

#[test]
fn rungs_are_used_in_the_order_of_the_ladder_and_disabled_ones_never() {
    for list in ["int8,k8v4,int4,evict", "int8,evict", "k8v4,evict", "int4", "evict,int8", "evict"]
    {
        let pool = with_ladder(12 << 20, Ladder::parse(list).unwrap());
        let mut sequence = Sequence::new(&pool, request(0, Fidelity::Evict));
        let tokens = pool.token_limit(Fidelity::Evict).unwrap_or(2000);
        let used = decode(&mut sequence, tokens);
        let expected = &pool.config().ladder.rungs[..];
        // Where blocks may be dropped first nothing else is needed.
        let expected = if list == "evict,int8" { &[Rung::Evict] } else { expected };
        assert_eq!(used, expected, "{list}");
        let tail = pool.config().floor(Fidelity::Evict);
        assert!(formats(&sequence, 0).iter().all(|&format| format <= tail));
    }
}

#[test]
fn a_model_whose_keys_do_not_bear_four_bits_stops_at_k8v4() {
    let ladder = Ladder { four_bit_keys: false, ..Ladder::default() };
    let pool = with_ladder(12 << 20, ladder);
    assert_eq!(pool.config().floor(Fidelity::Int4), K8V4);
    let limit = pool.token_limit(Fidelity::Int4).unwrap();
    let whole = with_ladder(12 << 20, Ladder::default());
    assert!(whole.token_limit(Fidelity::Int4).unwrap() > limit * 5 / 4);
    let mut sequence = Sequence::new(&pool, request(0, Fidelity::Int4));
    assert_eq!(decode(&mut sequence, limit), [Rung::Int8, Rung::K8V4]);
    assert!(plan_for(&sequence, 1).shortage.is_some());
}

#[test]
fn pinned_layers_stay_f16_and_are_counted() {
    let mut config = smollm2_pool(24 << 20).config().clone();
    config.groups[0].pinned = vec![0, 29];
    let pool = BlockPool::new(config.clone()).unwrap();
    let plain = smollm2_pool(24 << 20);
    let limit = pool.token_limit(Fidelity::Int4).unwrap();
    let plain_limit = plain.token_limit(Fidelity::Int4).unwrap();
    // 2 layers at 768 bytes a token, 28 at 240, where it was 30 at 240.
    let expected = plain_limit * 30 * 240 / (2 * 768 + 28 * 240);
    assert!(limit.abs_diff(expected) <= 64, "{limit} {expected}");
    let mut sequence = Sequence::new(&pool, request(0, Fidelity::Int4));
    decode(&mut sequence, limit);
    let view = &sequence.view().groups[0];
    for (layer, pages) in view.layers.iter().enumerate() {
        let expected = if layer == 0 || layer == 29 { F16 } else { Int4 };
        let sealed = &pages[..pages.len() - 1];
        assert!(sealed.iter().all(|page| page.format == expected), "layer {layer}");
    }
    config.groups[0].pinned = vec![30];
    let error = BlockPool::new(config.clone()).unwrap_err().to_string();
    assert!(error.contains("pinned layer = 30"), "{error}");
    config.groups[0].pinned = vec![3, 3];
    assert!(BlockPool::new(config).is_err());
}

#[test]
fn the_newest_tokens_are_the_most_precise() {
    let pool = smollm2_pool(24 << 20);
    let mut sequence = Sequence::new(&pool, request(0, Fidelity::Int4));
    for tokens in [1400, 1900, 2400, 3000] {
        decode(&mut sequence, tokens);
        let formats = formats(&sequence, 0);
        // Behind the first block precision only rises towards the end.
        assert!(formats[1..].is_sorted_by(|older, newer| older >= newer), "{formats:?}");
    }
}

#[test]
fn relief_makes_room_for_a_longer_stretch_by_the_same_rungs() {
    let pool = smollm2_pool(24 << 20);
    let mut events = [0, 0];
    for (stretch, events) in [64, 256].into_iter().zip(&mut events) {
        let mut sequence = Sequence::new(&pool, request(0, Fidelity::Evict));
        while sequence.next_position() < 3200 {
            let tokens = sequence.remaining(64);
            let far = Demand { stretch_tokens: stretch, ..demand(&sequence, tokens, 1) };
            let plan = plan_relief(&pool, &[far], &POLICY);
            let need = plan_for(&sequence, tokens);
            let deepest = |plan: &ReliefPlan| plan.moves.iter().map(relief::Move::rung).max();
            assert_eq!(deepest(&plan), deepest(&need));
            assert!(plan.gained_bytes() >= need.gained_bytes());
            *events += usize::from(!plan.moves.is_empty());
            apply(&mut sequence, &plan, 0);
            extend(&mut sequence, 1);
        }
        check(&pool, &[&sequence]);
    }
    // Drops are never stretched, and the last blocks need some.
    assert!(events[1] * 3 < events[0] * 2, "{events:?}");
}

#[test]
fn marks_rule_only_where_demand_is_unknown() {
    let pool = smollm2_pool(24 << 20);
    let share = |tokens: usize| tokens as f64 / pool.capacity_tokens(F16).unwrap() as f64;
    let known = request(0, Fidelity::Int8);
    let mut sequence = Sequence::new(&pool, SequenceConfig { max_tokens: None, ..known });
    while plan_for(&sequence, 1).is_empty() {
        extend(&mut sequence, 32);
    }
    let begun = share(sequence.next_position());
    assert!((0.80..0.87).contains(&begun), "{begun}");
    let plan = plan_for(&sequence, 1);
    assert_eq!(plan.shortage, None);
    apply(&mut sequence, &plan, 0);
    let used = pool.accounts().used_bytes() as f64 / (24 << 20) as f64;
    assert!((0.68..0.75).contains(&used), "{used}");
    check(&pool, &[&sequence]);
    let held = sequence.next_position();
    drop(sequence);
    let mut sequence = Sequence::new(&pool, known);
    extend(&mut sequence, held);
    assert!(plan_for(&sequence, 1).is_empty());
}

#[test]
fn harm_follows_the_table_and_adds_up() {
    let pool = smollm2_pool(24 << 20);
    let table = pool.config().ladder.harm;
    let mut sequence = Sequence::new(&pool, request(0, Fidelity::Evict));
    extend(&mut sequence, 640);
    let near = |a: f64, b: f64| (a - b).abs() < 1e-12;
    let mut last = F16;
    for format in [Int8, K8V4, Int4] {
        let plan = plan_format_at_seal(&sequence, format, 0, 0);
        let rise = table.format_nats[format] - table.format_nats[last];
        assert!(near(plan.harm(), rise), "{} {rise}", plan.harm());
        // The tail carries most of it.
        let of_tail = plan.moves.iter().filter(|planned| planned.first >= 512).map(|m| m.harm);
        assert!(of_tail.sum::<f64>() > plan.harm() / 2.0);
        apply(&mut sequence, &plan, 0);
        last = format;
    }
    let plan = plan_token_budget(&sequence, &POLICY, 0, 0);
    assert!(near(plan.harm(), table.evict_nats - table.format_nats[Int4]));
    apply(&mut sequence, &plan, 1);
    let recorded: f64 = sequence.ledger().entries().iter().map(|entry| entry.harm).sum();
    assert!(near(recorded, table.evict_nats), "{recorded}");
    check(&pool, &[&sequence]);
}

#[test]
fn a_refused_page_stays_and_its_block_goes_on_without_it() {
    let pool = smollm2_pool(24 << 20);
    let mut sequence = Sequence::new(&pool, request(0, Fidelity::Evict));
    extend(&mut sequence, 64);
    for format in [Int8, Int4] {
        let plan = plan_format_at_seal(&sequence, format, 0, 0);
        assert_eq!(plan.moves.len(), 2);
        let mut jobs_seen = 0;
        let outcome = apply_relief(&pool, &mut [&mut sequence], &plan, 0, &mut |jobs| {
            keep_stamp(jobs);
            jobs_seen += jobs.len();
            // The third layer of each block holds a NaN.
            let third = jobs.iter_mut().filter(|job| job.source_format == F16).nth(2);
            third.into_iter().for_each(|job| job.refused = true);
        });
        assert_eq!(outcome.unwrap().refused_pages, if format == Int8 { 2 } else { 0 });
        assert_eq!(jobs_seen, if format == Int8 { 60 } else { 58 });
        check(&pool, &[&sequence]);
    }
    let row = |layer: usize| sequence.view().groups[0].layers[layer].iter().map(|p| p.format);
    assert!(row(2).all(|format| format == F16) && row(3).all(|format| format == Int4));
    // fp8 asked for at seal is 8 bits: it falls on to 4, never back to int8.
    let mut other = Sequence::new(&pool, request(1, Fidelity::Evict));
    extend(&mut other, 64);
    let plan = plan_format_at_seal(&other, Fp8E4M3, 0, 0);
    apply(&mut other, &plan, 0);
    assert!(plan_format_at_seal(&other, Int8, 0, 0).is_empty());
    let plan = plan_format_at_seal(&other, K8V4, 0, 0);
    apply(&mut other, &plan, 0);
    assert_eq!(formats(&other, 0), [K8V4, K8V4]);
    let rungs: Vec<Rung> = other.ledger().entries().iter().map(|entry| entry.rung).collect();
    assert_eq!(rungs, [Rung::Int8, Rung::K8V4]);
    check(&pool, &[&sequence, &other]);
}

#[test]
fn windows_are_re_encoded_and_never_dropped() {
    let shape = PageShape { kv_heads: 1, head_dim: 256, block_size: 32 };
    let group = |layers, window| GroupConfig { layers, shape, window, pinned: vec![] };
    let groups = vec![group(15, Some(512)), group(3, None)];
    let ladder = Ladder::default();
    let config = PoolConfig { groups, budget_bytes: 0, prefault: false, ladder };
    let minimum = minimum_budget_bytes(&config, Fidelity::Evict);
    let pool = BlockPool::new(PoolConfig { budget_bytes: minimum * 5 / 4, ..config }).unwrap();
    let mut sequence = Sequence::new(&pool, request(0, Fidelity::Evict));
    decode(&mut sequence, 3000);
    // The window holds all its tokens, in fewer bytes.
    assert_eq!(firsts(&sequence, 0)[0], (3001 - 512) / 32 * 32);
    assert!(formats(&sequence, 0).iter().filter(|&&format| format == Int4).count() > 8);
    assert!(sequence.usage().dropped_tokens > 0.0);
    let kept_gaps = firsts(&sequence, 0).windows(2).filter(|pair| pair[1] - pair[0] != 32).count();
    assert_eq!(kept_gaps, 0);
}

#[test]
fn lower_priorities_give_all_before_higher_ones_give_anything() {
    let pool = smollm2_pool(24 << 20);
    let make = |id, priority| {
        let config = SequenceConfig { priority, ..request(id, Fidelity::Evict) };
        let mut sequence = Sequence::new(&pool, config);
        (0..10).for_each(|_| extend(&mut sequence, 32));
        sequence
    };
    let sequences = [make(0, 5), make(1, -3), make(2, 5)];
    let mut touched_high = false;
    for tokens in (32..1200).step_by(32) {
        let demands = [
            demand(&sequences[0], 0, 1),
            demand(&sequences[1], 0, 1),
            demand(&sequences[2], tokens, tokens),
        ];
        let plan = plan_relief(&pool, &demands, &POLICY);
        let of = |request| plan.moves.iter().filter(move |m| m.request == request);
        if of(0).count() + of(2).count() > 0 {
            touched_high = true;
            // All of the lower one's middle is gone, its tail at the floor.
            let drops = of(1).filter(|m| matches!(m.kind, MoveKind::Drop(_))).count();
            let floors = of(1).filter(|m| m.kind == MoveKind::Encode { group: 0, format: Int4 });
            let undone_at_most = 4;
            assert!(drops == 5 && floors.count() + undone_at_most >= 5, "{tokens}: {drops}");
        }
    }
    assert!(touched_high);
}

#[test]
fn a_plan_over_ten_thousand_blocks_takes_milliseconds() {
    let shape = PageShape { kv_heads: 1, head_dim: 16, block_size: 16 };
    let groups = vec![GroupConfig { layers: 4, shape, window: None, pinned: vec![] }];
    let ladder = Ladder::default();
    let config = PoolConfig { groups, budget_bytes: 48 << 20, prefault: false, ladder };
    let pool = BlockPool::new(config).unwrap();
    let mut sequence = Sequence::new(&pool, request(0, Fidelity::Evict));
    extend(&mut sequence, 10_000 * 16);
    let timed = |tokens| {
        let begun = Instant::now();
        let plan = plan_for(&sequence, tokens);
        (begun.elapsed().as_secs_f64() * 1e3, plan)
    };
    // A few blocks; all to one rung; all down every rung and half of them dropped.
    for (tokens, moves) in [(20_000, 1_000), (100_000, 9_000), (150_000, 9_900)] {
        let (elapsed_ms, plan) = timed(tokens);
        println!("{} moves for {tokens} tokens in {elapsed_ms:.1} ms", plan.moves.len());
        assert!(plan.shortage.is_none() && plan.moves.len() >= moves, "{}", plan.moves.len());
        // A quadratic scan would take 100,000,000 visits.
        assert!(elapsed_ms < 1000.0, "{elapsed_ms} ms");
    }
}

#[test]
fn tables_are_as_large_as_they_are_counted() {
    let config = smollm2_pool(24 << 20).config().clone();
    let limits = [(Int8, 13_000.0), (K8V4, 10_150.0), (Int4, 7_300.0), (Fp8E4M3, 11_900.0)];
    for (format, limit) in limits {
        let bytes = config.bytes_per_token_with_tables(format);
        let pages = config.bytes_per_token(format) as f64;
        assert!(pages + 20.0 < bytes && bytes <= limit, "{format:?}: {bytes}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 40, ..ProptestConfig::default() })]

    /// No single re-encode of a plan can be left out.
    #[test]
    fn a_plan_is_exactly_enough(
        layers in 1..5usize,
        heads in 1..3usize,
        spare in 2..5usize,
        held in 1..100usize,
        tokens in 1..200usize,
        contract in 1..4usize,
    ) {
        let shape = PageShape { kv_heads: heads, head_dim: 32, block_size: 16 };
        let groups = vec![GroupConfig { layers, shape, window: None, pinned: vec![] }];
        let ladder = Ladder::default();
        let config = PoolConfig { groups, budget_bytes: 0, prefault: false, ladder };
        let minimum = minimum_budget_bytes(&config, Fidelity::Exact);
        let pool = BlockPool::new(PoolConfig { budget_bytes: minimum * spare, ..config }).unwrap();
        let contract = Fidelity::ALL[contract];
        let build = || {
            let mut sequence = Sequence::new(&pool, request(0, contract));
            let fits = pool.capacity_tokens(F16).unwrap();
            let limit = pool.token_limit(contract).unwrap_or(usize::MAX);
            decode(&mut sequence, limit.min(fits * (50 + held) / 100));
            sequence
        };
        let first = build();
        let plan = plan_for(&first, tokens);
        let encodes = |m: &relief::Move| matches!(m.kind, MoveKind::Encode { .. });
        drop(first);
        if plan.shortage.is_none() {
            for left_out in (0..plan.moves.len()).filter(|&index| encodes(&plan.moves[index])) {
                let mut sequence = build();
                let mut less = plan.clone();
                less.moves.remove(left_out);
                apply(&mut sequence, &less, 0);
                prop_assert!(sequence.grow(tokens).is_err(), "{:?}", plan.moves[left_out]);
            }
            let mut sequence = build();
            apply(&mut sequence, &plan, 0);
            prop_assert!(sequence.grow(tokens).is_ok());
        }
    }
}
