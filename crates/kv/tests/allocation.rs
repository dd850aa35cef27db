//! Re-encoding allocates nothing, and a panic at any job leaves everything as it was or done.

mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};

use reef_kv::page::{PageFormat, PageShape};
use reef_kv::policy::Sinks;
use reef_kv::relief::MoveKind;
use reef_kv::*;
use world::*;

const POLICY: Sinks = Sinks { tail_tokens: TAIL_TOKENS };

/// Two groups, a layer pinned, 70 layers in one: more than a batch.
fn pool(halves_of_minimum: usize) -> BlockPool {
    let shape = PageShape { kv_heads: 1, head_dim: 16, block_size: 16 };
    let group = |layers, window, pinned| GroupConfig { layers, shape, window, pinned };
    let groups = vec![group(70, None, vec![0, 69]), group(3, Some(48), vec![])];
    let ladder = Ladder::default();
    let config = PoolConfig { groups, budget_bytes: 0, prefault: false, ladder };
    let minimum = minimum_budget_bytes(&config, Fidelity::Exact);
    BlockPool::new(PoolConfig { budget_bytes: halves_of_minimum * minimum / 2, ..config }).unwrap()
}

#[test]
fn the_counter_counts() {
    let allocated = allocation_counter::measure(|| drop(std::hint::black_box(vec![0u8; 100])));
    assert_eq!(allocated.count_total, 1);
}

#[test]
fn relief_allocates_nothing_while_it_encodes() {
    let pool = pool(5);
    let mut sequence = Sequence::new(&pool, request(0, Fidelity::Int4));
    let limit = pool.token_limit(Fidelity::Int4).unwrap();
    let (mut batches, mut moved, mut rungs) = (0, 0, Vec::new());
    while sequence.next_position() < limit {
        let plan = plan_relief(&pool, &[demand(&sequence, 1, 1)], &POLICY);
        assert_eq!(plan.shortage, None);
        let allocated = allocation_counter::measure(|| {
            let outcome = apply_relief(&pool, &mut [&mut sequence], &plan, 0, &mut |jobs| {
                batches += 1;
                keep_stamp(jobs);
            });
            moved += outcome.unwrap().moved_pages;
        });
        assert_eq!(allocated.count_total, 0, "{allocated:?}");
        rungs.extend(plan.moves.iter().map(|planned| planned.rung()));
        extend(&mut sequence, 1);
    }
    check(&pool, &[&sequence]);
    // It was put to the test: every rung, several batches a block, compaction.
    assert!([Rung::Int8, Rung::K8V4, Rung::Int4].iter().all(|rung| rungs.contains(rung)));
    assert!(batches > rungs.len() && moved > 0, "{batches} {moved}");
}

/// A sequence just before the first relief that uses several rungs at once, and that plan.
fn pressed(pool: &BlockPool) -> (Sequence, ReliefPlan) {
    let mut sequence = Sequence::new(pool, request(0, Fidelity::Evict));
    let fits = pool.capacity_tokens(PageFormat::F16).unwrap();
    (0..fits).for_each(|_| extend(&mut sequence, 1));
    let more = pool.capacity_tokens(PageFormat::Int4).unwrap() - fits;
    let plan = (1..=more)
        .map(|tokens| plan_relief(pool, &[demand(&sequence, tokens, 1)], &POLICY))
        .find(|plan| {
            let to = |rung| plan.moves.iter().any(|planned| planned.rung() == rung);
            to(Rung::Int8) && to(Rung::Evict) && (to(Rung::K8V4) || to(Rung::Int4))
        });
    (sequence, plan.expect("a plan that mixes rungs"))
}

#[test]
fn a_panic_at_any_job_of_a_plan_leaves_every_invariant_true() {
    let jobs_in = |plan: &ReliefPlan, pool: &BlockPool| {
        let (mut sequence, _) = pressed(pool);
        let mut jobs = 0;
        let count = &mut |batch: &mut [EncodeJob<'_>]| {
            keep_stamp(batch);
            jobs += batch.len();
        };
        apply_relief(pool, &mut [&mut sequence], plan, 1, count).unwrap();
        jobs
    };
    let pool = pool(4);
    let (sequence, plan) = pressed(&pool);
    let tokens = sequence.next_position();
    drop(sequence);
    let total = jobs_in(&plan, &pool);
    assert!(total > 200, "{total}");
    for panics_at in 0..total {
        let (mut sequence, _) = pressed(&pool);
        let before = formats_of_blocks(&sequence);
        let mut done = 0;
        let unwound = catch_unwind(AssertUnwindSafe(|| {
            apply_relief(&pool, &mut [&mut sequence], &plan, 1, &mut |jobs| {
                for job in jobs {
                    if done == panics_at {
                        // Prints nothing, unlike `panic!`.
                        std::panic::resume_unwind(Box::new("kernel fault"));
                    }
                    keep_stamp(std::slice::from_mut(job));
                    done += 1;
                }
            })
        }));
        assert!(unwound.is_err());
        check(&pool, &[&sequence]);
        for (at, format) in formats_of_blocks(&sequence) {
            let planned = plan.moves.iter().find_map(|planned| match planned.kind {
                MoveKind::Encode { group, format } => {
                    ((group, planned.first) == (at.0, at.2)).then_some(format)
                }
                MoveKind::Drop(_) => None,
            });
            let old = before.iter().find(|(other, _)| *other == at).map(|(_, format)| *format);
            assert!(Some(format) == old || Some(format) == planned, "{at:?}");
        }
        // The same need is met after all.
        let again = plan_relief(&pool, &[demand(&sequence, 1, 1)], &POLICY);
        assert_eq!(again.shortage, None);
        apply(&mut sequence, &again, 2);
        extend(&mut sequence, 1);
        assert_eq!(sequence.next_position(), tokens + 1);
        check(&pool, &[&sequence]);
    }
    let accounts = pool.accounts();
    assert_eq!((accounts.used_bytes(), accounts.fenced_bytes), (0, 0));
}

/// (group, layer, first) and format of every page.
fn formats_of_blocks(sequence: &Sequence) -> Vec<((usize, usize, usize), PageFormat)> {
    let mut pages = Vec::new();
    for (group, view) in sequence.view().groups.iter().enumerate() {
        for (layer, row) in view.layers.iter().enumerate() {
            pages.extend(row.iter().map(|p| ((group, layer, p.first as usize), p.format)));
        }
    }
    pages
}
