//! Windows, runs and shifts: which pages kernels see, and how far queries are rotated.

mod world;

use std::collections::BTreeMap;

use proptest::prelude::*;
use reef_kv::page::PageShape;
use reef_kv::policy::{EvictionPolicy, Observation, Protection, Random, SequenceSummary, Sinks};
use reef_kv::*;
use world::*;

const SHAPE: PageShape = PageShape { kv_heads: 1, head_dim: 16, block_size: 16 };

fn hybrid_pool(window: usize) -> BlockPool {
    let group = |layers, window| GroupConfig { layers, shape: SHAPE, window, pinned: vec![] };
    let groups = vec![group(5, Some(window)), group(1, None)];
    BlockPool::new(PoolConfig {
        groups,
        budget_bytes: 4 << 20,
        prefault: true,
        ladder: Ladder::default(),
    })
    .unwrap()
}

#[test]
fn a_window_group_holds_exactly_the_blocks_that_a_later_query_attends() {
    for window in [1, 15, 16, 17, 40, 64] {
        let pool = hybrid_pool(window);
        let mut sequence = Sequence::new(&pool, request(0, Fidelity::Exact));
        for tokens in [1, 5, 10, 16, 31, 64, 1, 1, 1, 1, 100, 7] {
            extend(&mut sequence, tokens);
            let next = sequence.next_position();
            // A query at p attends positions > p - window; the next one is at `next`.
            let attended = |first: &usize| (*first..first + 16).any(|p| p + window > next);
            let all: Vec<usize> = (0..next).step_by(16).collect();
            let expected: Vec<usize> = all.iter().copied().filter(attended).collect();
            // A full last block may have left the window of 1 already.
            assert_eq!(firsts(&sequence, 0), expected, "window {window}, next {next}");
            assert_eq!(firsts(&sequence, 1), all);
            check(&pool, &[&sequence]);
        }
        assert_eq!(sequence.usage().dropped_tokens, 0.0);
    }
}

#[test]
fn window_demand_is_what_growing_really_takes() {
    for (window, step) in [(40, 1), (40, 24), (64, 16), (100, 7)] {
        let pool = hybrid_pool(window);
        let mut sequence = Sequence::new(&pool, request(0, Fidelity::Exact));
        let mut peak = 0;
        while sequence.next_position() < 400 {
            sequence.grow(step).unwrap();
            peak = peak.max(sequence.view().groups[0].layers[0].len());
            sequence.commit(step);
        }
        let bytes = |layers, blocks| layers * blocks * SHAPE.page_bytes(page::PageFormat::F16);
        let full_blocks = sequence.view().groups[1].layers[0].len();
        let needed = bytes(5, peak) + bytes(1, full_blocks);
        let tokens = sequence.next_position();
        let answer = pool.bytes_for_tokens(tokens, page::PageFormat::F16, step);
        let overhead = pool.span_bytes() * 3 + answer / 10;
        assert!((needed..needed + overhead).contains(&answer), "{needed} {answer}");
    }
}

#[test]
fn positions_are_original_within_the_trained_context_and_relative_past_it() {
    let pool = hybrid_pool(32);
    let config = SequenceConfig { trained_context: 160, ..request(0, Fidelity::Evict) };
    let mut sequence = Sequence::new(&pool, config);
    let policy = Sinks { tail_tokens: 0 };
    extend(&mut sequence, 112);
    // Drops 16..48 while positions are original: no run, no shift.
    let plan = plan_token_budget(&sequence, &policy, 96, 16);
    apply(&mut sequence, &plan, 0);
    assert_eq!(firsts(&sequence, 1), [0, 48, 64, 80, 96]);
    assert_eq!(sequence.view().groups[1].shifts, [0]);
    extend(&mut sequence, 48);
    assert!(!sequence.positions_are_relative());
    // The token at position 160 is the first past the trained context.
    sequence.grow(1).unwrap();
    assert!(sequence.positions_are_relative());
    let runs = |sequence: &Sequence| -> Vec<u8> {
        sequence.view().groups[1].layers[0].iter().map(|page| page.run).collect()
    };
    assert_eq!(sequence.view().groups[1].shifts, [32, 0]);
    assert_eq!(runs(&sequence)[..3], [0, 1, 1]);
    assert_eq!(sequence.view().groups[0].shifts, [0]);
    sequence.commit(1);
    // More drops widen the gap; new blocks belong to the last run.
    let plan = plan_token_budget(&sequence, &policy, 97, 16);
    apply(&mut sequence, &plan, 1);
    write_stamps(&sequence, 160);
    extend(&mut sequence, 31);
    assert_eq!(sequence.view().groups[1].shifts, [80, 0]);
    assert_eq!(firsts(&sequence, 1), [0, 96, 112, 128, 144, 160, 176]);
    assert_eq!(runs(&sequence), [0, 1, 1, 1, 1, 1, 1]);
    check(&pool, &[&sequence]);
    // 192 tokens, 80 dropped in one layer of six.
    assert_eq!(sequence.usage().dropped_tokens, 80.0 / 6.0);
    assert_eq!(sequence.usage().tokens_by_format[page::PageFormat::F16], 112.0);
}

#[test]
fn a_step_that_needs_no_block_changes_no_page_of_the_view() {
    let pool = hybrid_pool(32);
    let mut sequence = Sequence::new(&pool, request(0, Fidelity::Exact));
    extend(&mut sequence, 20);
    let before = sequence.view().clone();
    let place = sequence.view().groups[1].layers[0].as_ptr();
    extend(&mut sequence, 1);
    assert_eq!(sequence.view(), &before);
    assert_eq!(sequence.view().groups[1].layers[0].as_ptr(), place);
}

#[test]
fn a_page_given_back_during_a_step_is_not_reused_before_its_fence() {
    let pool = hybrid_pool(32);
    let before = pool.accounts();
    let mut first = Sequence::new(&pool, request(0, Fidelity::Exact));
    extend(&mut first, 64);
    let view = first.view().clone();
    let offsets = |view: &page::SequenceView| -> Vec<u32> {
        view.groups.iter().flat_map(|g| g.layers.iter().flatten()).map(|p| p.offset).collect()
    };
    let older = pool.begin_step();
    let newer = pool.begin_step();
    drop(first);
    assert!(pool.accounts().fenced_bytes > 0);
    let mut second = Sequence::new(&pool, request(1, Fidelity::Exact));
    extend(&mut second, 64);
    let held = offsets(second.view());
    assert!(offsets(&view).iter().all(|offset| !held.contains(offset)));
    newer.pass();
    check(&pool, &[&second]);
    assert!(pool.accounts().fenced_bytes > 0, "the older step may still read the pages");
    older.pass();
    assert_eq!(pool.accounts().fenced_bytes, 0);
    drop(second);
    let after = pool.accounts();
    assert_eq!(Accounts { peak_bytes: 0, ..after }, before);
}

/// kv-behaviours 58: a step reads what leaves the window when the step is accepted.
#[test]
fn a_block_that_leaves_its_window_during_a_step_is_whole_until_the_fence() {
    let pool = hybrid_pool(32);
    let mut sequence = Sequence::new(&pool, request(0, Fidelity::Exact));
    extend(&mut sequence, 48);
    let fence = pool.begin_step();
    sequence.grow(64).unwrap();
    write_stamps(&sequence, 48);
    let view = sequence.view().clone();
    let during_the_step: Vec<Vec<u8>> =
        view.groups[0].layers[3].iter().map(|page| page_bytes(&pool, 0, page).to_vec()).collect();
    sequence.commit(64);
    let left = firsts(&sequence, 0)[0];
    assert_eq!(left, 80);
    // 16 to 80 of five layers; the first block had left before.
    let page_len = SHAPE.page_bytes(page::PageFormat::F16);
    assert_eq!(pool.accounts().fenced_bytes, 4 * 5 * page_len);
    let mut other = Sequence::new(&pool, request(1, Fidelity::Exact));
    extend(&mut other, 64);
    for (page, bytes) in view.groups[0].layers[3].iter().zip(&during_the_step) {
        assert_eq!(page_bytes(&pool, 0, page), &bytes[..], "block {}", page.first);
    }
    fence.pass();
    assert_eq!(pool.accounts().fenced_bytes, 0);
    let gone = view.groups[0].layers[3].iter().filter(|page| (page.first as usize) < left);
    // Debug builds poison with f16 NaN what is free.
    assert!(gone.into_iter().all(|page| {
        !cfg!(debug_assertions) || page_bytes(&pool, 0, page)[..2] == 0x7e00_u16.to_le_bytes()
    }));
    check(&pool, &[&sequence, &other]);
}

/// Gives up every second block: one gap each.
struct EveryOther;

impl EvictionPolicy for EveryOther {
    fn name(&self) -> &'static str {
        "every-other"
    }

    fn protection(&self) -> Protection {
        Protection::OpenBlocksOnly
    }

    fn order(&self, sequence: &SequenceSummary<'_>) -> Vec<usize> {
        let firsts = sequence.blocks.iter().map(|block| block.first);
        firsts.filter(|first| first / sequence.block_size % 2 == 1).collect()
    }
}

#[test]
fn a_policy_cannot_open_more_runs_than_a_page_can_name() {
    let pool = hybrid_pool(16);
    let config = SequenceConfig { trained_context: 16, ..request(0, Fidelity::Evict) };
    let mut sequence = Sequence::new(&pool, config);
    for _ in 0..700 {
        extend(&mut sequence, 16);
    }
    let plan = plan_token_budget(&sequence, &EveryOther, 0, 0);
    assert_eq!(plan.moves.len(), 255);
    apply(&mut sequence, &plan, 0);
    extend(&mut sequence, 1);
    check(&pool, &[&sequence]);
    let view = &sequence.view().groups[1];
    assert_eq!(view.shifts.len(), 256);
    check_relative(&sequence, (1, 0));
}

/// Fails where the kept tokens of a layer do not look to the next query as if they were the only ones:
/// side by side, in order, the newest right before it.
fn check_relative(sequence: &Sequence, (group, layer): (usize, usize)) {
    let view = &sequence.view().groups[group];
    let next = sequence.next_position();
    assert_eq!(view.shifts.last(), Some(&0));
    assert!(view.shifts.windows(2).all(|pair| pair[0] > pair[1]));
    assert!(view.runs[layer].len() <= 256);
    let distance = |page: &page::PageRef, token: usize| {
        let run = view.runs[layer][usize::from(page.run)];
        next - view.shifts[run as usize] as usize - token
    };
    let mut expected = 1;
    for page in view.layers[layer].iter().rev() {
        let first = page.first as usize;
        for token in (first..(first + 16).min(next)).rev() {
            assert_eq!(distance(page, token), expected, "token {token} of layer {layer}");
            expected += 1;
        }
    }
}

/// Gives up blocks in an order of its own in each layer: by the score that `observe_keys` was told.
struct PerLayer {
    spares_first: bool,
}

impl EvictionPolicy for PerLayer {
    fn name(&self) -> &'static str {
        "per-layer"
    }

    fn observes(&self) -> Observation {
        Observation::Keys
    }

    fn protection(&self) -> Protection {
        match self.spares_first {
            true => Protection::SinksTailAndKept { tail_tokens: 0 },
            false => Protection::OpenBlocksOnly,
        }
    }

    fn per_layer(&self) -> bool {
        true
    }

    fn order(&self, sequence: &SequenceSummary<'_>) -> Vec<usize> {
        let mut blocks = sequence.blocks.to_vec();
        blocks.sort_by(|a, b| a.score.total_cmp(&b.score));
        blocks.iter().map(|block| block.first).collect()
    }
}

fn layers_pool(layers: usize) -> BlockPool {
    let groups = vec![GroupConfig { layers, shape: SHAPE, window: None, pinned: vec![] }];
    let ladder = Ladder::default();
    BlockPool::new(PoolConfig { groups, budget_bytes: 48 << 20, prefault: false, ladder }).unwrap()
}

/// Tells a score of its own for each new block and layer.
fn score_blocks(sequence: &mut Sequence, from: usize, seed: u64) {
    for layer in 0..sequence.view().groups[0].layers.len() {
        for first in (from / 16 * 16..sequence.next_position()).step_by(16) {
            let mixed = (first as u64 / 16 + 1).wrapping_mul(seed | 1) ^ (layer as u64) << 20;
            let score = mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
            sequence.observe_keys(0, layer, first, score as f32);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 60,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    /// Whatever was dropped in whichever layer, before or after positions turned relative.
    #[test]
    fn kept_tokens_stand_side_by_side_in_every_layer(
        layers in 1..6usize,
        trained_context in 1..600usize,
        steps in proptest::collection::vec((1..60usize, 0..300usize, any::<bool>()), 1..40),
        seed in any::<u64>(),
    ) {
        let pool = layers_pool(layers);
        let config = SequenceConfig { trained_context, ..request(0, Fidelity::Evict) };
        let mut sequence = Sequence::new(&pool, config);
        for (step, (tokens, budget, spares_first)) in steps.into_iter().enumerate() {
            let from = sequence.next_position();
            extend(&mut sequence, tokens);
            score_blocks(&mut sequence, from, seed);
            let per_layer = PerLayer { spares_first };
            let whole = Random { seed };
            let policy: &dyn EvictionPolicy = if step % 3 == 2 { &whole } else { &per_layer };
            let plan = plan_token_budget(&sequence, policy, budget, 0);
            apply(&mut sequence, &plan, step as u64);
            // A newest block that was dropped opens its gap when the next one is there.
            sequence.grow(1).unwrap();
            write_stamps(&sequence, sequence.next_position().next_multiple_of(16));
            check(&pool, &[&sequence]);
            for layer in 0..layers {
                if sequence.positions_are_relative() {
                    check_next(&sequence, layer);
                } else {
                    prop_assert_eq!(&sequence.view().groups[0].shifts, &[0]);
                    prop_assert_eq!(&sequence.view().groups[0].runs[layer], &[0]);
                }
            }
        }
    }
}

/// [`check_relative`] where the next block was grown already: it holds no token yet.
fn check_next(sequence: &Sequence, layer: usize) {
    let view = &sequence.view().groups[0];
    let pages = &view.layers[layer];
    let newest = pages.last().unwrap();
    assert_eq!(view.runs[layer][usize::from(newest.run)] as usize, view.shifts.len() - 1);
    check_relative(sequence, (0, layer));
}

/// kv-behaviours 55: keys are never rotated again, however often blocks are dropped around them.
#[test]
fn fifty_evictions_change_no_byte_of_what_is_kept() {
    let pool = layers_pool(3);
    let config = SequenceConfig { trained_context: 200, ..request(0, Fidelity::Evict) };
    let mut sequence = Sequence::new(&pool, config);
    let mut written: BTreeMap<(usize, usize), Vec<u8>> = BTreeMap::new();
    let mut evictions = 0;
    for step in 0..80u64 {
        let from = sequence.next_position();
        sequence.grow(16).unwrap();
        for (layer, pages) in sequence.view().groups[0].layers.iter().enumerate() {
            let page = pages.last().unwrap();
            let at = |index: usize| (index * 7 + layer * 31 + from * 13) as u8;
            let bytes: Vec<u8> = (0..SHAPE.page_bytes(page::PageFormat::F16)).map(at).collect();
            write_page(&pool, page, &bytes);
            written.insert((layer, from), bytes);
        }
        sequence.commit(16);
        score_blocks(&mut sequence, from, 3);
        let plan = plan_token_budget(&sequence, &PerLayer { spares_first: true }, 300, 16);
        evictions += usize::from(!plan.is_empty());
        apply(&mut sequence, &plan, step);
        for (layer, pages) in sequence.view().groups[0].layers.iter().enumerate() {
            for page in pages {
                let expected = &written[&(layer, page.first as usize)];
                assert_eq!(page_bytes(&pool, 0, page), &expected[..]);
            }
        }
    }
    assert!(evictions >= 50 && sequence.positions_are_relative(), "{evictions}");
}

/// Ten million tokens in a budget of 200: memory stays as it is and positions exact.
#[test]
fn positions_are_exact_at_ten_million() {
    let pool = layers_pool(2);
    let config = SequenceConfig { trained_context: 512, ..request(0, Fidelity::Evict) };
    let mut sequence = Sequence::new(&pool, config);
    let mut used = Vec::new();
    while sequence.next_position() < 10_000_000 {
        let from = sequence.next_position();
        sequence.grow(256).unwrap();
        sequence.commit(256);
        score_blocks(&mut sequence, from, 77);
        let plan = plan_token_budget(&sequence, &PerLayer { spares_first: true }, 200, 0);
        apply(&mut sequence, &plan, 0);
        used.push(pool.accounts().used_bytes());
    }
    assert_eq!(used.iter().min(), used.iter().max());
    sequence.grow(1).unwrap();
    for layer in 0..2 {
        check_next(&sequence, layer);
        let first = sequence.view().groups[0].layers[layer][0];
        let shift = sequence.view().groups[0].shifts
            [sequence.view().groups[0].runs[layer][usize::from(first.run)] as usize];
        assert_eq!(first.first, 0);
        // Twelve blocks kept, the grown one apart.
        assert_eq!(shift as usize, sequence.next_position() - 12 * 16);
    }
    let usage = sequence.usage();
    assert_eq!(usage.dropped_tokens, (sequence.next_position() - 192) as f64);
}

/// Layers that drop different blocks need more distinct shifts than one layer can name runs.
#[test]
fn each_layer_has_its_own_256_runs() {
    let pool = layers_pool(3);
    let config = SequenceConfig { trained_context: 16, ..request(0, Fidelity::Evict) };
    let mut sequence = Sequence::new(&pool, config);
    extend(&mut sequence, 800 * 16);
    // Every second, third and fourth block are to go first.
    for layer in 0..3 {
        for block in 0..800 {
            let goes = block % (layer + 2) == 1;
            sequence.observe_keys(0, layer, block * 16, if goes { 0.0 } else { 1.0 });
        }
    }
    let plan = plan_token_budget(&sequence, &PerLayer { spares_first: false }, 100 * 16, 0);
    let of_layer = |layer: usize| {
        let drops = plan.moves.iter().filter(
            |planned| matches!(planned.kind, relief::MoveKind::Drop(t) if t.page == Some((0, layer))),
        );
        drops.count()
    };
    // The ends of runs may still go where no new run may be opened: every layer reaches the budget.
    assert_eq!([0, 1, 2].map(of_layer), [700, 700, 700]);
    apply(&mut sequence, &plan, 0);
    let view = &sequence.view().groups[0];
    let runs: Vec<usize> = view.runs.iter().map(Vec::len).collect();
    assert!(runs.iter().all(|&runs| runs > 1 && runs <= 256), "{runs:?}");
    check(&pool, &[&sequence]);
    (0..3).for_each(|layer| check_relative(&sequence, (0, layer)));
}

/// One layer drops single blocks, another pairs: together they need more shifts than a page can name.
#[test]
fn a_group_may_have_more_shifts_than_a_layer_has_runs() {
    let pool = layers_pool(2);
    let config = SequenceConfig { trained_context: 16, ..request(0, Fidelity::Evict) };
    let mut sequence = Sequence::new(&pool, config);
    extend(&mut sequence, 1100 * 16);
    for block in 0..1100 {
        for (layer, goes) in [block % 4 == 1, block % 4 < 2].into_iter().enumerate() {
            sequence.observe_keys(0, layer, block * 16, if goes { 0.0 } else { 1.0 });
        }
    }
    let plan = plan_token_budget(&sequence, &PerLayer { spares_first: false }, 590 * 16, 0);
    assert_eq!(plan.moves.len(), 2 * 510);
    apply(&mut sequence, &plan, 0);
    let view = &sequence.view().groups[0];
    assert!(view.runs.iter().all(|runs| runs.len() <= 256));
    assert!(view.shifts.len() > 256, "{} shifts", view.shifts.len());
    check(&pool, &[&sequence]);
    (0..2).for_each(|layer| check_relative(&sequence, (0, layer)));
}
