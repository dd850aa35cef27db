//! Each way down the ladder ends in the same bytes, whatever the tier.

use super::pages::{Fill, decoded, encoded, f16_page, fills, pairs, shapes};
use half::f16;
use proptest::prelude::*;
use reef_kernels::dispatch::Tier;
use reef_kernels::page::{reencode, write_kv};
use reef_kv::page::{PageFormat, PageShape};

use PageFormat::{F16, Fp8E4M3, Fp8E5M2, Int4, Int8, K8V4};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn tiers_reencode_to_the_same_bytes(shape in shapes(), fill in fills(), seed: u64) {
        let page = f16_page(&shape, fill, seed);
        for (from, to) in pairs() {
            let source = if from == F16 {
                page.clone()
            } else {
                encoded(Tier::Scalar, &shape, (F16, from), &page).unwrap()
            };
            let expected = encoded(Tier::Scalar, &shape, (from, to), &source).unwrap();
            for tier in Tier::available() {
                let got = encoded(tier, &shape, (from, to), &source).unwrap();
                prop_assert!(got == expected, "{} {from:?} to {to:?}", tier.name());
                // Gaps are not left as they were found.
                let mut other = vec![0x5a; expected.len()];
                reencode(tier, &shape, from, to, &source, &mut other).unwrap();
                prop_assert!(other == expected, "{} {from:?} to {to:?}: gaps", tier.name());
            }
        }
    }

    #[test]
    fn every_way_down_ends_in_the_same_bytes(shape in shapes(), fill in fills(), seed: u64) {
        let page = f16_page(&shape, fill, seed);
        for tier in Tier::available() {
            check_ways(tier, &shape, &page)?;
        }
    }

    #[test]
    fn fp8_goes_on_as_its_decoded_values_would(shape in shapes(), fill in fills(), seed: u64) {
        let page = f16_page(&shape, fill, seed);
        for from in [Fp8E4M3, Fp8E5M2] {
            let coded = encoded(Tier::Scalar, &shape, (F16, from), &page).unwrap();
            let halves = rewritten(&shape, &decoded(&shape, from, &coded));
            for tier in Tier::available() {
                for to in [K8V4, Int4] {
                    let direct = encoded(tier, &shape, (from, to), &coded).unwrap();
                    let expected = encoded(tier, &shape, (F16, to), &halves).unwrap();
                    prop_assert!(direct == expected, "{} {from:?} to {to:?}", tier.name());
                }
                let k8v4 = encoded(tier, &shape, (from, K8V4), &coded).unwrap();
                let by_k8v4 = encoded(tier, &shape, (K8V4, Int4), &k8v4).unwrap();
                prop_assert!(by_k8v4 == encoded(tier, &shape, (from, Int4), &coded).unwrap());
            }
        }
    }
}

fn check_ways(tier: Tier, shape: &PageShape, page: &[u8]) -> Result<(), TestCaseError> {
    let step = |pair, bytes: &[u8]| encoded(tier, shape, pair, bytes).unwrap();
    let int8 = step((F16, Int8), page);
    let k8v4 = step((F16, K8V4), page);
    let int4 = step((F16, Int4), page);
    prop_assert!(step((Int8, K8V4), &int8) == k8v4, "{}: int8 to k8v4", tier.name());
    prop_assert!(step((Int8, Int4), &int8) == int4, "{}: int8 to int4", tier.name());
    prop_assert!(step((K8V4, Int4), &k8v4) == int4, "{}: k8v4 to int4", tier.name());
    // By the definition, code by code: 4 bits are a seventeenth of 8, rounded.
    let (wide, narrow) = (codes(shape, Int8, &int8), codes(shape, Int4, &int4));
    for (wide, narrow) in wide.iter().zip(narrow) {
        prop_assert_eq!((f64::from(*wide) / 17.0).round(), f64::from(narrow));
    }
    Ok(())
}

/// The codes of a page in the order of values, as the layout's description says.
fn codes(shape: &PageShape, format: PageFormat, page: &[u8]) -> Vec<u8> {
    let count = shape.block_size * shape.head_dim;
    let mut codes = Vec::new();
    for head in 0..shape.kv_heads {
        let at = shape.head(format, head);
        for (part, bits) in [(at.k, format.keys().bits()), (at.v, format.values().bits())] {
            codes.extend((0..count).map(|index| {
                let (vector, lane) = (index / 16, index % 16);
                match bits {
                    8 => page[part + index],
                    _ if vector % 2 == 0 => page[part + vector / 2 * 16 + lane] & 15,
                    _ => page[part + vector / 2 * 16 + lane] >> 4,
                }
            }));
        }
    }
    codes
}

/// An f16 page of these keys and values.
fn rewritten(shape: &PageShape, [keys, values]: &[Vec<f32>; 2]) -> Vec<u8> {
    let (dim, tokens) = (shape.head_dim, shape.block_size);
    let mut page = vec![0; shape.page_bytes(F16)];
    for slot in 0..tokens {
        let token = |all: &[f32]| -> Vec<f32> {
            let head = |head: usize| &all[(head * tokens + slot) * dim..][..dim];
            (0..shape.kv_heads).flat_map(head).copied().collect()
        };
        write_kv(Tier::Scalar, shape, &mut page, slot, &token(keys), &token(values));
    }
    page
}

#[test]
fn real_blocks_go_down_the_ladder_exactly() {
    // Blocks of SmolLM2-135M over English text: layers 0, 14 and 29.
    let shape = PageShape { kv_heads: 3, head_dim: 64, block_size: 32 };
    let pages = include_bytes!("../data/page/smollm2-blocks.bin");
    let bytes = shape.page_bytes(F16);
    assert_eq!(pages.len(), 3 * bytes);
    for page in pages.chunks_exact(bytes) {
        for tier in Tier::available() {
            check_ways(tier, &shape, page).unwrap();
        }
    }
}

#[test]
fn a_4_bit_code_is_the_nearest_of_all_sixteen() {
    // Every half from 0 to 255 in steps that cross every midpoint of both grids: scale is 1.
    let shape = PageShape { kv_heads: 1, head_dim: 32, block_size: 32 };
    let halves = (0..2048).map(|i| match i % 32 {
        0 => 0.0,
        1 => 255.0,
        _ => (i as f32 * 0.125) % 255.0,
    });
    let page: Vec<u8> = halves.flat_map(|x| f16::from_f32(x).to_le_bytes()).collect();
    let exact = decoded(&shape, F16, &page);
    for tier in Tier::available() {
        let int4 = encoded(tier, &shape, (F16, Int4), &page).unwrap();
        let lossy = decoded(&shape, Int4, &int4);
        for (exact, lossy) in exact.iter().flatten().zip(lossy.iter().flatten()) {
            assert!((exact - lossy).abs() <= 8.5 && lossy % 17.0 == 0.0, "{exact} {lossy}");
        }
    }
}

#[test]
#[should_panic(expected = "would need bits that are gone")]
fn precision_does_not_come_back() {
    let shape = PageShape { kv_heads: 1, head_dim: 16, block_size: 16 };
    let page = f16_page(&shape, Fill::Uniform(0), 1);
    let _ = encoded(Tier::Scalar, &shape, (Int4, Int8), &page);
}
