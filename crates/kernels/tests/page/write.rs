//! Tokens into f16 pages.

use super::pages::{Noise, decoded, shapes};
use half::f16;
use proptest::prelude::*;
use reef_kernels::dispatch::Tier;
use reef_kernels::page::write_kv;
use reef_kv::page::{PageFormat, PageShape};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn written_tokens_come_back_rounded_to_f16(shape in shapes(), seed: u64) {
        let channels = shape.kv_heads * shape.head_dim;
        let mut noise = Noise::new(seed);
        let tokens: Vec<f32> =
            (0..2 * shape.block_size * channels).map(|_| 3.0 * noise.unit()).collect();
        for tier in Tier::available() {
            let mut page = vec![0xff; shape.page_bytes(PageFormat::F16)];
            for slot in 0..shape.block_size {
                let (k, v) =
                    tokens[2 * slot * channels..2 * (slot + 1) * channels].split_at(channels);
                write_kv(tier, &shape, &mut page, slot, k, v);
            }
            let [keys, values] = decoded(&shape, PageFormat::F16, &page);
            let dim = shape.head_dim;
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
