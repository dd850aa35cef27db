//! Page encoding: tiers agree with the scalar specification, and both with plain arithmetic.

use half::f16;
use proptest::prelude::*;
use reef_kernels::dispatch::Tier;
use reef_kernels::page::{NotFinite, decode_page, reencode, write_kv};
use reef_kv::page::{PageFormat, PageShape};

fn shapes() -> impl Strategy<Value = PageShape> {
    let head_dims = proptest::sample::select(vec![16usize, 32, 48, 64, 80, 128, 256]);
    (1usize..4, head_dims, proptest::sample::select(vec![16usize, 32, 64, 128]))
        .prop_map(|(kv_heads, head_dim, block_size)| PageShape { kv_heads, head_dim, block_size })
}

/// Deterministic numbers in -1..1.
fn noise(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..count)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1u32 << 23) as f32 - 1.0
        })
        .collect()
}

/// A full f16 page of random tokens, and the tokens.
fn full_page(tier: Tier, shape: &PageShape, seed: u64, magnitude: f32) -> (Vec<u8>, Vec<f32>) {
    let channels = shape.kv_heads * shape.head_dim;
    let tokens: Vec<f32> =
        noise(seed, 2 * shape.block_size * channels).iter().map(|x| x * magnitude).collect();
    let mut page = vec![0xff; shape.page_bytes(PageFormat::F16)];
    for slot in 0..shape.block_size {
        let (k, v) = tokens[2 * slot * channels..2 * (slot + 1) * channels].split_at(channels);
        write_kv(tier, shape, &mut page, slot, k, v);
    }
    (page, tokens)
}

fn decoded(shape: &PageShape, format: PageFormat, page: &[u8]) -> [Vec<f32>; 2] {
    let count = shape.kv_heads * shape.block_size * shape.head_dim;
    let (mut keys, mut values) = (vec![0.0; count], vec![0.0; count]);
    decode_page(shape, format, page, &mut keys, &mut values);
    [keys, values]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn written_tokens_come_back_rounded_to_f16(shape in shapes(), seed: u64) {
        for tier in Tier::available() {
            let (page, tokens) = full_page(tier, &shape, seed, 3.0);
            let [keys, values] = decoded(&shape, PageFormat::F16, &page);
            let (dim, channels) = (shape.head_dim, shape.kv_heads * shape.head_dim);
            for slot in 0..shape.block_size {
                for channel in 0..channels {
                    let (head, lane) = (channel / dim, channel % dim);
                    let at = (head * shape.block_size + slot) * dim + lane;
                    let round = |x: f32| f16::from_f32(x).to_f32();
                    prop_assert_eq!(keys[at], round(tokens[2 * slot * channels + channel]));
                    let value = tokens[(2 * slot + 1) * channels + channel];
                    prop_assert_eq!(values[at], round(value));
                }
            }
        }
    }

    #[test]
    fn tiers_reencode_to_the_same_bytes(shape in shapes(), seed: u64, exponent in -24i32..16) {
        let (page, _) = full_page(Tier::Scalar, &shape, seed, 2f32.powi(exponent));
        let encode = |tier| {
            let mut bytes = vec![0u8; shape.page_bytes(PageFormat::Int8)];
            reencode(tier, &shape, PageFormat::F16, PageFormat::Int8, &page, &mut bytes).unwrap();
            bytes
        };
        let expected = encode(Tier::Scalar);
        for tier in Tier::available() {
            prop_assert!(encode(tier) == expected, "{} differs from scalar", tier.name());
        }
        check_error(&shape, &page, &expected)?;
    }
}

/// Every value is within half a step of its row, but for the rounding of the scale.
fn check_error(shape: &PageShape, page: &[u8], coded: &[u8]) -> Result<(), TestCaseError> {
    let exact = decoded(shape, PageFormat::F16, page);
    let lossy = decoded(shape, PageFormat::Int8, coded);
    let (group, dim) = (shape.key_group(), shape.head_dim);
    for kind in 0..2 {
        for at in 0..exact[kind].len() {
            let (token, channel) = (at / dim, at % dim);
            let row: Vec<f32> = if kind == 0 {
                let first = token / group * group;
                (first..first + group).map(|t| exact[0][t * dim + channel]).collect()
            } else {
                let first = channel / 32 * 32;
                (first..dim.min(first + 32)).map(|c| exact[1][token * dim + c]).collect()
            };
            let max = row.iter().copied().fold(f32::MIN, f32::max);
            let min = row.iter().copied().fold(f32::MAX, f32::min);
            // The step as stored: a subnormal scale may be one subnormal larger.
            let step = (max - min) / 255.0 + 2f32.powi(-24);
            let error = (lossy[kind][at] - exact[kind][at]).abs();
            prop_assert!(error <= 0.51 * step, "error {error} of a step of {step}");
        }
    }
    Ok(())
}

const SHAPE: PageShape = PageShape { kv_heads: 1, head_dim: 16, block_size: 32 };

#[test]
fn values_outside_f16_are_clamped_and_nan_stays() {
    for tier in Tier::available() {
        let mut page = vec![0u8; SHAPE.page_bytes(PageFormat::F16)];
        let mut k = vec![0f32; 16];
        k[..5].copy_from_slice(&[1e9, -1e9, f32::INFINITY, f32::NAN, 65_519.0]);
        write_kv(tier, &SHAPE, &mut page, 7, &k, &k);
        let [keys, values] = decoded(&SHAPE, PageFormat::F16, &page);
        for row in [&keys[7 * 16..8 * 16], &values[7 * 16..8 * 16]] {
            assert_eq!(row[..3], [65504.0, -65504.0, 65504.0], "{}", tier.name());
            assert!(row[3].is_nan() && row[4] == 65504.0, "{}", tier.name());
        }
    }
}

#[test]
fn one_value_that_is_not_finite_refuses_the_page() {
    for tier in Tier::available() {
        for bits in [0x7e00u16, 0x7c00, 0xfc00] {
            for (head_dim, block_size) in [(48, 16), (64, 32), (16, 128)] {
                let shape = PageShape { kv_heads: 2, head_dim, block_size };
                let (page, _) = full_page(tier, &shape, 5, 1.0);
                let end = shape.head(PageFormat::F16, 1).end;
                for at in [0, head_dim * block_size * 2 + 2, end - 2] {
                    let mut bad = page.clone();
                    bad[at..at + 2].copy_from_slice(&bits.to_le_bytes());
                    let mut out = vec![0u8; shape.page_bytes(PageFormat::Int8)];
                    let (from, to) = (PageFormat::F16, PageFormat::Int8);
                    assert_eq!(reencode(tier, &shape, from, to, &bad, &mut out), Err(NotFinite));
                }
            }
        }
    }
}

#[test]
fn constant_rows_and_the_extremes_of_f16_survive() {
    for tier in Tier::available() {
        let mut page = vec![0u8; SHAPE.page_bytes(PageFormat::F16)];
        for slot in 0..32 {
            let mut k = vec![-2.5f32; 16];
            k[1] = if slot == 3 { 65504.0 } else { -65504.0 };
            k[2] = if slot == 3 { 6e-8 } else { -6e-8 };
            write_kv(tier, &SHAPE, &mut page, slot, &k, &[0.1; 16]);
        }
        let mut out = vec![0u8; SHAPE.page_bytes(PageFormat::Int8)];
        reencode(tier, &SHAPE, PageFormat::F16, PageFormat::Int8, &page, &mut out).unwrap();
        let [keys, values] = decoded(&SHAPE, PageFormat::Int8, &out);
        assert!(keys.iter().chain(&values).all(|x| x.is_finite()));
        assert_eq!(keys[0], -2.5);
        assert_eq!(keys[1], -65504.0);
        assert!((keys[3 * 16 + 1] - 65504.0).abs() < 131_008.0 / 255.0);
        assert_eq!(keys[3 * 16 + 2], f16::from_f32(6e-8).to_f32());
        assert!(values.iter().all(|v| *v == f16::from_f32(0.1).to_f32()));
    }
}
