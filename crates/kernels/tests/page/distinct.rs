//! KeyDiff scores against f64.

use super::pages::{Fill, decoded, f16_page, shapes};
use half::f16;
use proptest::prelude::*;
use reef_kernels::dispatch::Tier;
use reef_kernels::page::key_distinctness;
use reef_kv::page::{PageFormat, PageShape};

/// The paper's score, token by token in f64; the anchor holds unit keys of all blocks so far.
fn naive(shape: &PageShape, page: &[u8], anchor: &mut [f64]) -> f64 {
    let [keys, _] = decoded(shape, PageFormat::F16, page);
    let (dim, tokens) = (shape.head_dim, shape.block_size);
    let norm = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
    let mut total = 0.0;
    for (head, anchor) in anchor.chunks_exact_mut(dim).enumerate() {
        let keys = &keys[head * tokens * dim..(head + 1) * tokens * dim];
        let units: Vec<Vec<f64>> = keys
            .chunks_exact(dim)
            .map(|key| {
                let key: Vec<f64> = key.iter().copied().map(f64::from).collect();
                let norm = norm(&key);
                key.iter().map(|x| if norm == 0.0 { 0.0 } else { x / norm }).collect()
            })
            .collect();
        for unit in &units {
            anchor.iter_mut().zip(unit).for_each(|(anchor, x)| *anchor += x);
        }
        let length = norm(anchor);
        for unit in &units {
            let dot: f64 = unit.iter().zip(&*anchor).map(|(x, y)| x * y).sum();
            total -= if length == 0.0 { 0.0 } else { dot / length };
        }
    }
    total / (shape.kv_heads * tokens) as f64
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn scores_are_those_of_the_definition(shape in shapes(), exponent in -20i32..14, seed: u64) {
        let pages: Vec<_> = (0..3).map(|block| {
            let mut page = f16_page(&shape, Fill::Uniform(exponent), seed ^ block);
            // A common direction, as real keys have: the anchor is then far from zero.
            let common = f16::from_f32(2f32.powi(exponent)).to_le_bytes();
            for half in page.chunks_exact_mut(2).step_by(3) {
                half.copy_from_slice(&common);
            }
            page
        }).collect();
        let channels = shape.kv_heads * shape.head_dim;
        let scores = |tier| {
            let mut anchor = vec![0f32; channels];
            let scores: Vec<f32> =
                pages.iter().map(|page| key_distinctness(tier, &shape, page, &mut anchor)).collect();
            (scores, anchor)
        };
        let mut exact_anchor = vec![0f64; channels];
        let exact: Vec<f64> =
            pages.iter().map(|page| naive(&shape, page, &mut exact_anchor)).collect();
        let (expected, anchor) = scores(Tier::Scalar);
        for (got, exact) in expected.iter().zip(&exact) {
            prop_assert!((f64::from(*got) - exact).abs() < 2e-6, "{got} for {exact}");
        }
        for (got, exact) in anchor.iter().zip(&exact_anchor) {
            prop_assert!((f64::from(*got) - exact).abs() < 1e-4, "anchor {got} for {exact}");
        }
        for tier in Tier::available() {
            prop_assert_eq!(scores(tier), (expected.clone(), anchor.clone()), "{}", tier.name());
        }
    }
}

const SHAPE: PageShape = PageShape { kv_heads: 2, head_dim: 16, block_size: 32 };

/// A page whose key channel `c` is `key(token, c)` in both heads.
fn page_of(key: impl Fn(usize, usize) -> f32) -> Vec<u8> {
    let mut page = Vec::new();
    for _ in 0..SHAPE.kv_heads {
        let keys = (0..16).flat_map(|channel| (0..32).map(move |token| (token, channel)));
        page.extend(
            keys.flat_map(|(token, channel)| f16::from_f32(key(token, channel)).to_le_bytes()),
        );
        page.extend([0x42; 2 * 16 * 32]);
    }
    page
}

#[test]
fn alike_is_minus_one_unlike_is_more_and_no_direction_is_zero() {
    for tier in Tier::available() {
        let mut anchor = vec![0f32; 32];
        let mut score = |page: &[u8]| key_distinctness(tier, &SHAPE, page, &mut anchor);
        // Length does not matter, direction does.
        let same = score(&page_of(|token, channel| (token + 1) as f32 * (channel as f32 - 3.0)));
        assert!((same + 1.0).abs() < 1e-6, "{same}");
        assert_eq!(score(&page_of(|_, _| 0.0)), 0.0);
        let opposite = score(&page_of(|token, channel| {
            (channel as f32 - 3.0) * if token < 4 { -1.0 } else { 1.0 }
        }));
        assert!((opposite - (4.0 - 28.0) / 32.0).abs() < 1e-6, "{opposite}");
    }
}

#[test]
fn the_largest_keys_do_not_overflow() {
    for tier in Tier::available() {
        let score = key_distinctness(tier, &SHAPE, &page_of(|_, _| 65504.0), &mut [0f32; 32]);
        assert!((score + 1.0).abs() < 1e-6, "{score}");
        let tiny = page_of(|_, _| f16::from_bits(1).to_f32());
        let score = key_distinctness(tier, &SHAPE, &tiny, &mut [0f32; 32]);
        assert!((score + 1.0).abs() < 1e-6, "{score}");
    }
}
