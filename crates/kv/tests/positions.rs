//! Windows, runs and shifts: which pages kernels see, and how far queries are rotated.

mod world;

use reef_kv::page::PageShape;
use reef_kv::policy::{EvictionPolicy, Protection, SequenceSummary, Sinks};
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
    // Each page is rotated by the tokens dropped after it, and by those only.
    let kept = firsts(&sequence, 1);
    for page in &view.layers[0] {
        let first = page.first as usize;
        let kept_after = kept.iter().filter(|&&other| other > first).count() * 16;
        let positions_after = kept.last().unwrap() - first;
        assert_eq!(view.shifts[page.run as usize] as usize, positions_after - kept_after);
    }
}
