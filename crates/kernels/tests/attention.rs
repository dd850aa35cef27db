//! Paged attention: against softmax in f64, and bit for bit across tiers, batches and threads.

#[path = "support/attention.rs"]
mod support;

use proptest::prelude::*;
use reef_kernels::attention::{AttentionShape, SequenceRows};
use reef_kernels::dispatch::Tier;
use reef_kernels::page::write_kv;
use reef_kv::page::{PAGE_ALIGN, PageFormat, Scaling};
use support::{SMOLLM2, World, attend, bits, format_of, shapes};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn every_tier_and_batch_gives_the_bits_of_the_specification(
        shape in shapes(),
        length in 1usize..600,
        runs in 1usize..4,
        rows in 1usize..41,
        choice in prop_oneof![0u64..6, any::<u64>()],
        drop in 0usize..6,
        seed: u64,
    ) {
        let world = World::new(shape, length, runs, seed >> 1, |block| {
            let last = length.div_ceil(shape.block_size) - 1;
            (drop == 0 || block == 0 || block == last || block % 7 != drop)
                .then(|| format_of(choice, block))
        });
        let rows = rows.min(length);
        let first = length - rows;
        let expected = world.attend(Tier::Scalar, 1, first, rows);
        prop_assert!(expected.iter().all(|x| x.is_finite()));
        let row = shape.heads * shape.head_dim;
        for tier in Tier::available() {
            for threads in [1, 3] {
                let together = world.attend(tier, threads, first, rows);
                prop_assert!(bits(&together) == bits(&expected), "{} prefill", tier.name());
                for index in [0, rows / 2, rows - 1] {
                    let alone = world.attend(tier, threads, first + index, 1);
                    let same = &expected[index * row..(index + 1) * row];
                    prop_assert!(bits(&alone) == bits(same), "{} decode", tier.name());
                }
            }
        }
        let naive = world.naive(length - 1).out;
        let largest = naive.iter().fold(0f64, |m, x| m.max(x.abs()));
        for (x, y) in expected[(rows - 1) * row..].iter().zip(&naive) {
            prop_assert!((f64::from(*x) - y).abs() <= 1e-5 * largest, "{x} is not {y}");
        }
    }
}

#[test]
fn neighbours_in_the_batch_change_nothing() {
    let mixed = |block: usize| Some(PageFormat::ALL[block % 6]);
    let a = World::new(SMOLLM2, 700, 1, 3, mixed);
    let mut b = World::new(SMOLLM2, 90, 1, 4, mixed);
    let mut arena = a.arena.clone();
    for page in &mut b.pages {
        page.offset += (arena.len() / PAGE_ALIGN) as u32;
    }
    arena.extend(&b.arena);
    let (a_queries, b_queries, c_queries) =
        (a.queries(699, 1), b.queries(0, 90), a.queries(300, 70));
    let of = |world: &World| world.pages.clone();
    let (a_pages, b_pages) = (of(&a), of(&b));
    let sequence = |pages, first_position, rows, queries| SequenceRows {
        pages,
        first_position,
        rows,
        queries,
        observe: false,
    };
    let batch = [
        sequence(&a_pages, 699, 1, &a_queries),
        sequence(&b_pages, 0, 90, &b_queries),
        sequence(&[], 0, 0, &[]),
        sequence(&a_pages, 300, 70, &c_queries),
    ];
    for tier in Tier::available() {
        let together = attend(tier, 2, &SMOLLM2, &batch, &arena).0;
        let mut apart = Vec::new();
        for one in batch {
            apart.extend(attend(tier, 1, &SMOLLM2, &[one], &arena).0);
        }
        assert!(bits(&together) == bits(&apart), "{}", tier.name());
    }
}

#[test]
fn a_token_a_row_must_not_see_cannot_reach_it() {
    // Token 40 is infinite: rows before it, in the same tile and the same key group, stay clean.
    for tier in Tier::available() {
        let mut world = World::new(SMOLLM2, 64, 1, 9, |_| Some(PageFormat::F16));
        let clean = world.attend(tier, 2, 30, 10);
        let page = world.pages[1].byte_offset();
        let bad = vec![f32::INFINITY; 3 * 64];
        write_kv(tier, &SMOLLM2.page(), &mut world.arena[page..], 8, &bad, &bad);
        let end = page + SMOLLM2.page().page_bytes(PageFormat::F16);
        let nan = SMOLLM2.page().head(PageFormat::F16, 1).v + 8 * 64 * 2;
        world.arena[page..end][nan..nan + 2].copy_from_slice(&0x7e00u16.to_le_bytes());
        let tile = world.attend(tier, 2, 30, 34);
        assert!(bits(&tile[..10 * 9 * 64]) == bits(&clean), "{}", tier.name());
        assert!(tile[33 * 9 * 64..].iter().any(|x| x.is_nan()));
    }
}

/// Puts NaN into everything that belongs to token `slot` alone: codes and numbers that can be NaN, and
/// the scales and minima of V.
fn poison(world: &mut World, page: usize, slot: usize) {
    let (format, shape) = (world.pages[page].format, world.shape.page());
    let start = world.pages[page].byte_offset();
    let bytes = &mut world.arena[start..start + shape.page_bytes(format)];
    let group = shape.key_group();
    for head in 0..shape.kv_heads {
        let at = shape.head(format, head);
        for channel in 0..shape.head_dim {
            let key = (slot / group * shape.head_dim + channel) * group + slot % group;
            let value = slot * shape.head_dim + channel;
            for index in [(at.k, key), (at.v, value)] {
                match format {
                    PageFormat::F16 => bytes[index.0 + 2 * index.1 + 1] = 0x7f,
                    PageFormat::Fp8E5M2 => bytes[index.0 + index.1] = 0x7f,
                    _ => {}
                }
            }
        }
        if format.values().scaling() == Scaling::Grouped {
            for row in slot * shape.value_groups()..(slot + 1) * shape.value_groups() {
                bytes[at.v_scale + 2 * row + 1] = 0x7f;
                bytes[at.v_min + 2 * row + 1] = 0x7f;
            }
        }
    }
}

#[test]
fn nan_beyond_the_window_reaches_neither_output_nor_masses() {
    // Rows 200 to 231 see no token before 161, the second of its block.
    let shape = AttentionShape { window: Some(40), ..SMOLLM2 };
    for format in PageFormat::ALL {
        let mut world = World::new(shape, 256, 1, 9, |_| Some(format));
        let see = |world: &World, tier, rows| world.attend_and_observe(tier, 2, (200, rows), true);
        let clean = see(&world, Tier::Scalar, 32);
        let seen = see(&world, Tier::Scalar, 1);
        for token in [0, 159, 160] {
            poison(&mut world, token / 32, token % 32);
        }
        for tier in Tier::available() {
            for (rows, clean) in [(32, &clean), (1, &seen)] {
                let (out, masses) = see(&world, tier, rows);
                let name = format!("{} {}", tier.name(), format.name());
                assert!(out.iter().chain(&masses).all(|x| x.is_finite()), "{name}");
                assert!(bits(&out) == bits(&clean.0) && bits(&masses) == bits(&clean.1), "{name}");
            }
            // The row before sees token 160.
            let all = world.attend(tier, 2, 199, 1);
            let can_be_nan = !matches!(format, PageFormat::Fp8E4M3);
            assert!(!can_be_nan || all.iter().any(|x| x.is_nan()), "{}", format.name());
        }
    }
}

#[test]
fn one_flipped_byte_of_a_page_is_seen() {
    for format in PageFormat::ALL {
        let mut world = World::new(SMOLLM2, 96, 1, 9, |_| Some(format));
        let before = world.attend(Tier::detect(), 1, 95, 1);
        let at = world.pages[1].byte_offset() + SMOLLM2.page().head(format, 2).v + 100;
        world.arena[at] ^= 0x08;
        assert!(bits(&world.attend(Tier::detect(), 1, 95, 1)) != bits(&before));
    }
}

#[test]
fn a_row_that_sees_nothing_is_zero() {
    let shape = AttentionShape { window: Some(8), ..SMOLLM2 };
    let world = World::new(shape, 64, 1, 9, |block| (block == 0).then_some(PageFormat::F16));
    for tier in Tier::available() {
        assert!(world.attend(tier, 2, 60, 2).iter().all(|x| *x == 0.0));
    }
}
