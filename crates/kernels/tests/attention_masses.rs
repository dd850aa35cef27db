//! How much attention each page gets: against softmax in f64, and bit for bit across tiers and chunks.

#[path = "support/attention.rs"]
mod support;

use proptest::prelude::*;
use reef_kernels::attention::{AttentionScratch, SequenceRows, paged_attention};
use reef_kernels::dispatch::Tier;
use reef_kernels::pool::BarrierPool;
use support::{SMOLLM2, World, attend, bits, format_of, shapes};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(25))]

    #[test]
    fn masses_are_the_softmax_and_the_same_bits_in_any_chunk(
        shape in shapes(),
        length in 1usize..600,
        runs in 1usize..4,
        rows in 1usize..60,
        choice in prop_oneof![0u64..6, any::<u64>()],
        drop in 0usize..6,
        seed: u64,
    ) {
        let world = World::new(shape, length, runs, seed >> 1, |block| {
            let last = length.div_ceil(shape.block_size) - 1;
            (drop == 0 || block == last || block % 7 != drop).then(|| format_of(choice, block))
        });
        let rows = rows.min(length);
        let first = length - rows;
        let pages = world.pages.len();
        let observe = |tier, threads, first, rows| {
            world.attend_and_observe(tier, threads, (first, rows), true)
        };
        let (out, masses) = observe(Tier::Scalar, 1, first, rows);
        prop_assert_eq!(masses.len(), rows * pages);
        for tier in Tier::available() {
            let plain = world.attend(tier, 2, first, rows);
            prop_assert!(bits(&plain) == bits(&out), "observing changes nothing");
            for threads in [1, 3] {
                let (_, together) = observe(tier, threads, first, rows);
                prop_assert!(bits(&together) == bits(&masses), "{} together", tier.name());
                let half = rows / 2;
                let (mut parts, rest) =
                    (observe(tier, threads, first, half).1, observe(tier, threads, first + half, rows - half).1);
                parts.extend(rest);
                prop_assert!(bits(&parts) == bits(&masses), "{} in two chunks", tier.name());
                let alone = observe(tier, threads, length - 1, 1).1;
                let last = &masses[(rows - 1) * pages..];
                prop_assert!(bits(&alone) == bits(last), "{} decode", tier.name());
            }
        }
        for row in [0, rows - 1] {
            let naive = world.naive(first + row).masses;
            let mine = &masses[row * pages..(row + 1) * pages];
            for (mass, expected) in mine.iter().zip(&naive) {
                prop_assert!((f64::from(*mass) - expected).abs() < 1e-5 * shape.heads as f64);
            }
            let seen = naive.iter().any(|mass| *mass > 0.0);
            let sum: f32 = mine.iter().sum();
            let heads = if seen { shape.heads as f32 } else { 0.0 };
            prop_assert!((sum - heads).abs() < 1e-5 * shape.heads as f32, "{sum} of {heads}");
        }
    }
}

/// Two sequences, of which `observed` are observed, in one batch on one scratch.
fn batch(
    scratch: &mut AttentionScratch,
    worlds: [(&World, usize, usize); 2],
    arena: &[u8],
    observed: [bool; 2],
) -> [Vec<f32>; 2] {
    let queries = worlds.map(|(world, first, rows)| world.queries(first, rows));
    let mut sequences = Vec::new();
    for (index, (world, first, rows)) in worlds.iter().enumerate() {
        sequences.push(SequenceRows {
            pages: &world.pages,
            first_position: *first as u32,
            rows: *rows,
            queries: &queries[index],
            observe: observed[index],
        });
    }
    let rows = worlds[0].2 + worlds[1].2;
    let mut out = vec![0f32; rows * SMOLLM2.heads * SMOLLM2.head_dim];
    let pool = BarrierPool::new(2);
    paged_attention(Tier::detect(), &pool, &SMOLLM2, &sequences, arena, scratch, &mut out);
    [0, 1].map(|index| scratch.masses(index).to_vec())
}

#[test]
fn who_else_is_observed_changes_nothing_and_who_is_not_has_none() {
    let mut world = World::new(SMOLLM2, 900, 2, 5, |block| Some(format_of(u64::MAX / 7, block)));
    let arena = std::mem::take(&mut world.arena);
    let mut scratch = AttentionScratch::default();
    let alone = |first, rows, arena: &[u8]| {
        let queries = world.queries(first, rows);
        let (pages, first_position) = (&world.pages[..], first as u32);
        let sequence =
            SequenceRows { pages, first_position, rows, queries: &queries, observe: true };
        attend(Tier::detect(), 1, &SMOLLM2, &[sequence], arena).1.remove(0)
    };
    let tasks = [(&world, 500, 100), (&world, 899, 1)];
    let expected = [alone(500, 100, &arena), alone(899, 1, &arena)];
    for observed in [[true, true], [true, false], [false, true], [false, false]] {
        let masses = batch(&mut scratch, tasks, &arena, observed);
        for index in [0, 1] {
            if observed[index] {
                assert!(bits(&masses[index]) == bits(&expected[index]));
            } else {
                assert!(masses[index].is_empty());
            }
        }
    }
}

#[test]
fn a_page_that_holds_all_attention_has_all_mass() {
    // One token's key lies along every query, far beyond the others.
    let mut world = World::new(SMOLLM2, 640, 1, 11, |_| Some(reef_kv::page::PageFormat::F16));
    world.queries.iter_mut().for_each(|x| *x = 3.0);
    let shape = SMOLLM2.page();
    let page = world.pages[7].byte_offset();
    let loud = vec![9.0f32; 3 * 64];
    reef_kernels::page::write_kv(Tier::Scalar, &shape, &mut world.arena[page..], 5, &loud, &loud);
    for tier in Tier::available() {
        let masses = world.attend_and_observe(tier, 2, (639, 1), true).1;
        assert!((masses[7] - 9.0).abs() < 1e-4, "{masses:?}");
    }
}
