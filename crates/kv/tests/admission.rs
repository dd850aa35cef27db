//! Static answers: numbers of real models, and that what is promised is kept.

mod world;

use proptest::prelude::*;
use reef_kv::page::PageFormat::{F16, Int4, Int8};
use reef_kv::page::PageShape;
use reef_kv::*;
use world::*;

/// Gemma 3 270M: 15 window layers of 512, 3 full layers.
fn gemma3(budget_bytes: usize) -> PoolConfig {
    let shape = PageShape { kv_heads: 1, head_dim: 256, block_size: 32 };
    let group = |layers, window| GroupConfig { layers, shape, window, pinned: vec![] };
    PoolConfig {
        groups: vec![group(15, Some(512)), group(3, None)],
        budget_bytes,
        prefault: false,
        ladder: Ladder::default(),
    }
}

#[test]
fn smollm2_in_24_mib() {
    let pool = smollm2_pool(24 << 20);
    assert_eq!(pool.span_bytes(), 192 << 10);
    assert_eq!(pool.config().bytes_per_token(F16), 23_040);
    assert_eq!(pool.config().bytes_per_token(Int8), 12_960);
    assert_eq!(pool.capacity_tokens(F16), Some(1056));
    assert_eq!(pool.capacity_tokens(Int8), Some(1824));
    assert_eq!(pool.capacity_tokens(Int4), Some(3264));
    assert_eq!(pool.token_limit(Fidelity::Exact), Some(1056));
    assert_eq!(pool.token_limit(Fidelity::Int8), Some(1824));
    assert_eq!(pool.token_limit(Fidelity::Int4), Some(3264));
    assert_eq!(pool.token_limit(Fidelity::Evict), None);
    let accounts = pool.accounts();
    assert_eq!(accounts.reserved_bytes, 192 << 10);
    assert!(accounts.table_bytes < accounts.budget_bytes / 180);
    assert!(accounts.fragmentation_bytes < 192 << 10);
    // The 2,008 tokens of the main job do not fit at int8: blocks must be dropped too.
    let int8 = pool.bytes_for_tokens(2008, Int8, 1);
    assert!((25 << 20..27 << 20).contains(&int8), "{int8}");
}

#[test]
fn a_window_group_stops_growing() {
    let pool = BlockPool::new(gemma3(64 << 20)).unwrap();
    let bytes = |tokens| pool.bytes_for_tokens(tokens, F16, 1);
    let per_token = 3 * 2 * 256 * 2;
    let rise = bytes(3 * 4096) - bytes(4096);
    assert!(rise >= 2 * 4096 * per_token && rise < 2 * 4096 * per_token * 102 / 100, "{rise}");
    // A prefill chunk is open at once: it needs more of the window group.
    assert!(pool.bytes_for_tokens(4096, Int8, 512) > pool.bytes_for_tokens(4096, Int8, 1));
    let windows_only = PoolConfig { groups: gemma3(0).groups[..1].to_vec(), ..gemma3(64 << 20) };
    let pool = BlockPool::new(windows_only).unwrap();
    assert_eq!(pool.capacity_tokens(F16), None);
    assert_eq!(pool.token_limit(Fidelity::Exact), None);
    assert!(pool.fits_at_f16(1 << 40, 1));
}

#[test]
fn configurations_out_of_range_name_the_field() {
    let good = smollm2_pool(24 << 20).config().clone();
    let with = |change: fn(&mut GroupConfig)| {
        let mut config = good.clone();
        change(&mut config.groups[0]);
        BlockPool::new(config).unwrap_err().to_string()
    };
    assert!(with(|group| group.layers = 0).contains("layers = 0"));
    assert!(with(|group| group.shape.kv_heads = 0).contains("kv_heads = 0"));
    assert!(with(|group| group.shape.head_dim = 40).contains("head_dim = 40"));
    assert!(with(|group| group.shape.block_size = 24).contains("block_size = 24"));
    assert!(with(|group| group.window = Some(0)).contains("window = 0"));
    let none = PoolConfig { groups: vec![], ..good.clone() };
    assert!(BlockPool::new(none).unwrap_err().to_string().contains("at least one"));
    let huge = PoolConfig { budget_bytes: 1 << 50, ..good };
    assert!(BlockPool::new(huge).unwrap_err().to_string().contains("too large"));
}

#[test]
fn a_demand_beyond_all_sense_is_a_shortage() {
    for pool in [smollm2_pool(24 << 20), BlockPool::new(gemma3(24 << 20)).unwrap()] {
        let mut sequence = Sequence::new(&pool, request(0, Fidelity::Int8));
        extend(&mut sequence, 10);
        let policy = policy::Sinks { tail_tokens: TAIL_TOKENS };
        for step_tokens in [1, usize::MAX] {
            let demand =
                Demand { sequence: &sequence, tokens: usize::MAX, step_tokens, stretch_tokens: 0 };
            assert!(plan_relief(&pool, &[demand], &policy).shortage.is_some());
            assert!(relief_needed_bytes(&pool, &[demand]) > 1 << 40);
        }
        assert!(!pool.fits(usize::MAX / 2, Int8, usize::MAX));
        assert!(sequence.grow(usize::MAX).is_err());
        check(&pool, &[&sequence]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 60, ..ProptestConfig::default() })]

    /// A pool of about the smallest budget runs a long sequence of that contract in any steps as far as
    /// it promised, whatever the ladder and the pinned layers, and a sequence that fits in f16 is never
    /// touched.
    #[test]
    fn promises_are_kept(
        shape in (1..5usize, 1..9usize, 0..4usize),
        layers in proptest::collection::vec((1..9usize, proptest::option::of(1..200usize)), 1..4),
        pinned in proptest::collection::vec(0..9usize, 3),
        (rungs, four_bit_keys) in (proptest::sample::subsequence(Rung::ALL.to_vec(), 0..=4), any::<bool>()),
        contract in 0..4usize,
        spare in 0..3usize,
        chunk in 1..100usize,
    ) {
        let contract = Fidelity::ALL[contract];
        let (kv_heads, head_dim, block_size) = (shape.0, shape.1 * 16, 16 << shape.2);
        let shape = PageShape { kv_heads, head_dim, block_size };
        let group = |(&(layers, window), &pinned): (&(usize, Option<usize>), &usize)| {
            let pinned = if pinned < layers { vec![pinned] } else { vec![] };
            GroupConfig { layers, shape, window, pinned }
        };
        let groups = layers.iter().zip(&pinned).map(group).collect();
        let ladder = Ladder { rungs, four_bit_keys, ..Ladder::default() };
        let config = PoolConfig { groups, budget_bytes: 0, prefault: false, ladder };
        let minimum = minimum_budget_bytes(&config, contract);
        let pool = BlockPool::new(PoolConfig { budget_bytes: minimum * (2 + spare) / 2, ..config }).unwrap();
        let limit = pool.token_limit(contract).unwrap_or(1500).min(1500);
        prop_assert!(limit > block_size);
        let floor = pool.config().floor(contract);
        let evicts = pool.config().ladder.permits(contract, Rung::Evict);
        let promised = |&tokens: &usize| pool.fits(tokens, floor, chunk);
        let (limit, chunk) = match (1..=limit).rev().find(promised) {
            Some(limit) if !evicts => (limit, chunk),
            _ => (limit, 1),
        };
        let fits = pool.fits_at_f16(limit, chunk);
        let mut sequence = Sequence::new(&pool, SequenceConfig { max_tokens: Some(limit), ..request(0, contract) });
        let policy = policy::Sinks { tail_tokens: TAIL_TOKENS };
        while sequence.next_position() < limit {
            let tokens = sequence.remaining(chunk);
            let stretch_tokens = tokens * spare * 4;
            let plan = plan_relief(&pool, &[Demand { stretch_tokens, ..demand(&sequence, tokens, tokens) }], &policy);
            prop_assert_eq!(plan.shortage, None);
            prop_assert!(!fits || plan.moves.is_empty());
            apply(&mut sequence, &plan, 0);
            extend(&mut sequence, tokens);
        }
        check(&pool, &[&sequence]);
    }
}

/// Budgets are cut in spans that grow with them: every budget that is said to be enough must hold the
/// first block, the tail and an open block, at every ladder's floor.
#[test]
fn every_budget_above_the_minimum_holds_the_minimum() {
    let mut refused = 0;
    for block_size in [16, 32, 64, 128] {
        for list in ["int8,k8v4,int4,evict", "int8,k8v4,evict", "int8,evict", "evict"] {
            let shape = PageShape { kv_heads: 3, head_dim: 64, block_size };
            let groups = vec![GroupConfig { layers: 30, shape, window: None, pinned: vec![] }];
            let ladder = Ladder::parse(list).unwrap();
            let config = PoolConfig { groups, budget_bytes: 0, prefault: false, ladder };
            let least = minimum_budget_bytes(&config, Fidelity::Evict);
            for budget_bytes in (least..2 * least).step_by(32 << 10) {
                let config = PoolConfig { budget_bytes, ..config.clone() };
                if minimum_budget_bytes(&config, Fidelity::Evict) > budget_bytes {
                    refused += 1;
                    continue;
                }
                let floor = config.floor(Fidelity::Evict);
                let pool = BlockPool::new(config).unwrap();
                let tokens = (2 + TAIL_TOKENS.div_ceil(block_size)) * block_size;
                assert!(pool.fits(tokens, floor, 1), "{block_size} {list} {budget_bytes}");
            }
        }
    }
    assert!(refused < 10, "{refused}");
}
