//! What a format may cost a value, from theory; and pages that cannot be quantised.

use super::pages::{Fill, Noise, decoded, encoded, f16_page, fills, pairs, shapes};
use half::f16;
use proptest::prelude::*;
use reef_kernels::dispatch::Tier;
use reef_kernels::page::NotFinite;
use reef_kv::page::{PageFormat, PageShape, PartFormat};

/// Largest error of `value` in a row (a whole head for fp8) that spans `min..=max`: half a step,
/// rounding in f32 apart.
fn bound(part: PartFormat, value: f32, row: &[f32]) -> f64 {
    let fold = |pick: fn(f32, f32) -> f32| row.iter().copied().reduce(pick).unwrap_or(0.0);
    let (min, max) = (f64::from(fold(f32::min)), f64::from(fold(f32::max)));
    let (size, absmax) = (f64::from(value).abs(), min.abs().max(max.abs()));
    // The scale as stored: rounded to f16, its subnormals 2^-24 apart (and rounded up at need).
    let scale = (max - min) / 255.0 * (1.0 + 2f64.powi(-11)) + 2f64.powi(-24);
    let half_step = match part {
        PartFormat::F16 => 0.0,
        PartFormat::U8 => 0.5 * scale,
        PartFormat::U4 => 8.5 * scale,
        PartFormat::E4M3 => (size / 16.0).max(absmax / 448.0 / 1024.0),
        PartFormat::E5M2 => (size / 8.0).max(absmax / 57_344.0 / 131_072.0),
    };
    half_step * (1.0 + 2e-4) + 2f64.powi(-23) * absmax
}

/// Values that share a scale with value `at` of a page's keys or values.
fn row_of(shape: &PageShape, part: PartFormat, kind: usize, at: usize, all: &[f32]) -> Vec<f32> {
    let (group, dim, tokens) = (shape.key_group(), shape.head_dim, shape.block_size);
    let (token, channel) = (at / dim % tokens, at % dim);
    let head = at / dim / tokens * tokens * dim;
    if matches!(part, PartFormat::E4M3 | PartFormat::E5M2) {
        return all[head..head + tokens * dim].to_vec();
    }
    if kind == 0 {
        let first = token / group * group;
        return (first..first + group).map(|t| all[head + t * dim + channel]).collect();
    }
    let first = channel / 32 * 32;
    (first..dim.min(first + 32)).map(|c| all[head + token * dim + c]).collect()
}

fn check(shape: &PageShape, page: &[u8], to: PageFormat) -> Result<(), TestCaseError> {
    let coded = encoded(Tier::detect(), shape, (PageFormat::F16, to), page).unwrap();
    let exact = decoded(shape, PageFormat::F16, page);
    let lossy = decoded(shape, to, &coded);
    for (kind, part) in [to.keys(), to.values()].into_iter().enumerate() {
        for at in 0..exact[kind].len() {
            // Whole parts are slow to collect for each value.
            if part.bits() == 8 && part != PartFormat::U8 && at % 61 != 0 {
                continue;
            }
            let value = exact[kind][at];
            let row = row_of(shape, part, kind, at, &exact[kind]);
            let error = (f64::from(lossy[kind][at]) - f64::from(value)).abs();
            let most = bound(part, value, &row);
            prop_assert!(error <= most, "{}: {value} off by {error}, {most} allowed", to.name());
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn errors_stay_within_half_a_step(shape in shapes(), fill in fills(), seed: u64) {
        let page = f16_page(&shape, fill, seed);
        for to in PageFormat::ALL {
            check(&shape, &page, to)?;
        }
    }

    /// Corrupt pages end in an error or in garbage, on every tier the same, never in a panic.
    #[test]
    fn any_bytes_can_be_reencoded(shape in shapes(), seed: u64) {
        for (from, to) in pairs() {
            let mut noise = Noise::new(seed);
            let page: Vec<u8> =
                (0..shape.page_bytes(from)).map(|_| noise.bits() as u8).collect();
            let expected = encoded(Tier::Scalar, &shape, (from, to), &page);
            for tier in Tier::available() {
                let got = encoded(tier, &shape, (from, to), &page);
                prop_assert!(got == expected, "{} {from:?} {to:?}", tier.name());
            }
        }
    }
}

#[test]
fn one_value_that_is_not_finite_refuses_the_page() {
    for tier in Tier::available() {
        for bits in [0x7e00u16, 0xfe00, 0x7c01, 0x7c00, 0xfc00] {
            for (head_dim, block_size) in [(48, 16), (64, 32), (16, 128)] {
                let shape = PageShape { kv_heads: 2, head_dim, block_size };
                let page = f16_page(&shape, Fill::Uniform(0), 5);
                for at in [0, head_dim * block_size * 2 + 2, page.len() - 2] {
                    let mut bad = page.clone();
                    bad[at..at + 2].copy_from_slice(&bits.to_le_bytes());
                    for to in &PageFormat::ALL[1..] {
                        let got = encoded(tier, &shape, (PageFormat::F16, *to), &bad);
                        assert_eq!(got, Err(NotFinite), "{} {bits:x} {to:?}", tier.name());
                    }
                }
            }
        }
    }
}

#[test]
fn an_8_bit_float_that_is_not_finite_refuses_the_page() {
    let shape = PageShape { kv_heads: 2, head_dim: 48, block_size: 16 };
    let page = f16_page(&shape, Fill::Uniform(3), 5);
    let cases = [
        (PageFormat::Fp8E4M3, vec![0x7fu8, 0xff]),
        (PageFormat::Fp8E5M2, vec![0x7c, 0xfc, 0x7d, 0x7f, 0xfe]),
    ];
    for tier in Tier::available() {
        for (from, codes) in &cases {
            let coded = encoded(tier, &shape, (PageFormat::F16, *from), &page).unwrap();
            let at = shape.head(*from, 1);
            for (code, place) in codes.iter().flat_map(|code| [(code, at.k), (code, at.v + 77)]) {
                let mut bad = coded.clone();
                bad[place] = *code;
                for to in [PageFormat::K8V4, PageFormat::Int4] {
                    assert_eq!(encoded(tier, &shape, (*from, to), &bad), Err(NotFinite));
                    assert!(encoded(tier, &shape, (*from, to), &coded).is_ok());
                }
            }
        }
    }
}

const SHAPE: PageShape = PageShape { kv_heads: 1, head_dim: 16, block_size: 32 };

#[test]
fn constant_rows_and_the_extremes_of_f16_survive() {
    let halves = |channel: usize, token: usize| match (channel, token) {
        (1, 3) => f16::MAX,
        (1, _) => f16::MIN,
        (2, 3) => f16::from_bits(1),
        (2, _) => f16::from_bits(0x8001),
        _ => f16::from_f32(-2.5),
    };
    let keys = (0..16).flat_map(|channel| (0..32).map(move |token| halves(channel, token)));
    let values = std::iter::repeat_n(f16::from_f32(0.1), 32 * 16);
    let page: Vec<u8> = keys.chain(values).flat_map(f16::to_le_bytes).collect();
    for tier in Tier::available() {
        for to in [PageFormat::Int8, PageFormat::K8V4, PageFormat::Int4] {
            let out = encoded(tier, &SHAPE, (PageFormat::F16, to), &page).unwrap();
            let [keys, values] = decoded(&SHAPE, to, &out);
            assert!(keys.iter().chain(&values).all(|x| x.is_finite()));
            assert_eq!(keys[0], -2.5);
            assert_eq!(keys[1], -65504.0);
            // The scale is rounded to f16, and the top code stands for the maximum.
            assert!((keys[3 * 16 + 1] - 65504.0).abs() < 131_008.0 / 255.0);
            if to.keys() == PartFormat::U8 {
                assert_eq!(keys[3 * 16 + 2], f16::from_bits(1).to_f32());
            }
            assert!(values.iter().all(|v| *v == f16::from_f32(0.1).to_f32()));
        }
    }
}
