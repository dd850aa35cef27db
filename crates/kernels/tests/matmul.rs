//! Quantised matmul against independent arithmetic, and bit for bit against itself.

mod support;

use proptest::prelude::*;
use reef_kernels::dispatch::Tier;
use reef_kernels::matmul::{
    Job, PackError, PackedMatrix, QuantizedRows, Rows, WEIGHT_FORMATS, WeightFormat, matmul,
};
use reef_kernels::pool::BarrierPool;
use support::{Random, dequantize, random_tensor};

const QUANTIZED: [WeightFormat; 8] = [
    WeightFormat::Q4_0,
    WeightFormat::Q4_1,
    WeightFormat::Q5_0,
    WeightFormat::Q5_1,
    WeightFormat::Q8_0,
    WeightFormat::Q4_K,
    WeightFormat::Q5_K,
    WeightFormat::Q6_K,
];

/// One matrix times int8 (`int8`) or f32 rows.
fn product(tier: Tier, threads: usize, weights: &PackedMatrix, x: &[f32], int8: bool) -> Vec<f32> {
    let pool = BarrierPool::new(threads);
    let (rows, cols) = (x.len() / weights.cols(), weights.cols());
    let mut out = vec![f32::NAN; rows * weights.rows()];
    let mut quantized = QuantizedRows::new();
    let jobs = [Job { weights, out_column: 0 }];
    let x = if int8 {
        quantized.quantize(tier, &pool, x, cols);
        Rows::Int8(&quantized)
    } else {
        Rows::F32 { values: x, rows }
    };
    matmul(tier, &pool, &jobs, x, &mut out, weights.rows());
    out
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Every thirty-second of a row: scale = largest magnitude / 127, codes to nearest.
fn fake_quantize(x: &[f32]) -> Vec<f64> {
    let group = |x: &[f32]| {
        let largest = x.iter().fold(0.0_f32, |a, b| a.max(b.abs()));
        let scale = f64::from(largest / 127.0);
        let inverse = 127.0 / largest;
        x.iter().map(|x| f64::from((x * inverse).round_ties_even()) * scale).collect::<Vec<_>>()
    };
    x.chunks(32).flat_map(group).collect()
}

/// `weights [n, k] · x [m, k]` and the sum of the magnitudes of the products.
fn reference(weights: &[f64], x: &[f64], cols: usize) -> Vec<(f64, f64)> {
    let mut out = Vec::new();
    for x in x.chunks(cols) {
        for w in weights.chunks(cols) {
            let products = w.iter().zip(x).map(|(w, x)| w * x);
            out.push((products.clone().sum(), products.map(f64::abs).sum()));
        }
    }
    out
}

fn assert_close(out: &[f32], expected: &[(f64, f64)], tolerance: f64, what: &str) {
    assert_eq!(out.len(), expected.len());
    for (i, (out, (expected, magnitude))) in out.iter().zip(expected).enumerate() {
        let error = (f64::from(*out) - expected).abs();
        assert!(error <= magnitude * tolerance + 1e-12, "{what}: output {i}: {out} not {expected}");
    }
}

#[test]
fn every_format_agrees_with_a_plain_dot_product() {
    let mut random = Random::new(1);
    for format in WEIGHT_FORMATS {
        let (rows, cols, m) = (37, 768, 13);
        let raw = random_tensor(format, rows, cols, &mut random);
        let weights = PackedMatrix::pack(format, rows, cols, &raw).unwrap();
        let values: Vec<f64> = dequantize(format, &raw);
        let x: Vec<f32> = (0..m * cols).map(|_| random.normal()).collect();
        let exact: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
        for tier in Tier::available() {
            let name = format!("{format} {}", tier.name());
            let out = product(tier, 2, &weights, &x, false);
            assert_close(&out, &reference(&values, &exact, cols), 3e-6, &name);
            if format.is_quantized() {
                let out = product(tier, 2, &weights, &x, true);
                // Rounding of f32 sums only: the codes of the activations are the same.
                assert_close(&out, &reference(&values, &fake_quantize(&x), cols), 3e-6, &name);
            }
        }
    }
}

#[test]
fn extreme_codes_do_not_overflow() {
    for format in QUANTIZED {
        let cols = 512;
        for fill in [0x00, 0xff] {
            let mut raw = vec![fill; 16 * format.row_bytes(cols)];
            for block in raw.chunks_exact_mut(format.block_bytes()) {
                support::set_scales(format, block, 1.0, 0.5);
            }
            if format == WeightFormat::Q8_0 && fill == 0 {
                // -128, which no quantiser writes but a file may hold.
                raw.chunks_exact_mut(34).for_each(|block| block[2..].fill(0x80));
            }
            let weights = PackedMatrix::pack(format, 16, cols, &raw).unwrap();
            let values = dequantize(format, &raw);
            for sign in [1.0, -1.0] {
                let x = vec![sign * 2.0; 3 * cols];
                let expected = reference(&values, &fake_quantize(&x), cols);
                for tier in Tier::available() {
                    let out = product(tier, 1, &weights, &x, true);
                    assert_close(&out, &expected, 3e-6, &format!("{format} {}", tier.name()));
                }
            }
        }
    }
}

#[test]
fn long_rows_go_slab_by_slab_without_changing_a_bit() {
    let mut random = Random::new(2);
    for format in [WeightFormat::Q4_1, WeightFormat::Q6_K, WeightFormat::Q8_0, WeightFormat::F16] {
        let (rows, cols) = (16, 5120);
        let raw = random_tensor(format, rows, cols, &mut random);
        let weights = PackedMatrix::pack(format, rows, cols, &raw).unwrap();
        let x: Vec<f32> = (0..14 * cols).map(|_| random.normal()).collect();
        let int8 = format.is_quantized();
        let expected = bits(&product(Tier::Scalar, 1, &weights, &x, int8));
        for tier in Tier::available() {
            assert_eq!(bits(&product(tier, 1, &weights, &x, int8)), expected, "{format}");
            for m in 1..=14 {
                let out = product(tier, 1, &weights, &x[..m * cols], int8);
                assert_eq!(bits(&out), expected[..m * rows], "{format} {} rows {m}", tier.name());
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    /// The property everything above rests on: a row's outputs do not depend on its company.
    #[test]
    fn a_row_has_the_same_bits_in_every_company(
        format in prop::sample::select(&WEIGHT_FORMATS[..]),
        rows in 1_usize..70,
        blocks in 1_usize..5,
        m in 1_usize..40,
        threads in 1_usize..4,
        int8: bool,
        seed: u64,
    ) {
        let mut random = Random::new(seed);
        let cols = blocks * format.block_values().max(32);
        let raw = random_tensor(format, rows, cols, &mut random);
        let weights = PackedMatrix::pack(format, rows, cols, &raw).unwrap();
        let x: Vec<f32> = (0..m * cols).map(|_| random.normal()).collect();
        let int8 = int8 && format.is_quantized();
        let mut alone = Vec::new();
        for x in x.chunks(cols) {
            alone.extend(bits(&product(Tier::Scalar, 1, &weights, x, int8)));
        }
        for tier in Tier::available() {
            let together = product(tier, threads, &weights, &x, int8);
            prop_assert_eq!(&bits(&together), &alone, "{} {}", format, tier.name());
            let first = product(tier, threads, &weights, &x[..cols], int8);
            prop_assert_eq!(&bits(&first)[..], &alone[..rows], "{} {}", format, tier.name());
        }
    }
}

#[test]
fn jobs_share_an_input_and_leave_other_columns_alone() {
    let mut random = Random::new(3);
    let cols = 256;
    let formats = [WeightFormat::Q4_1, WeightFormat::Q6_K, WeightFormat::Q8_0];
    let sizes = [40, 17, 5];
    let matrices: Vec<PackedMatrix> = formats
        .iter()
        .zip(sizes)
        .map(|(format, rows)| {
            let raw = random_tensor(*format, rows, cols, &mut random);
            PackedMatrix::pack(*format, rows, cols, &raw).unwrap()
        })
        .collect();
    let starts = [3, 43, 62];
    let jobs: Vec<Job> = matrices
        .iter()
        .zip(starts)
        .map(|(weights, out_column)| Job { weights, out_column })
        .collect();
    let x: Vec<f32> = (0..9 * cols).map(|_| random.normal()).collect();
    for tier in Tier::available() {
        let pool = BarrierPool::new(2);
        let mut quantized = QuantizedRows::new();
        quantized.quantize(tier, &pool, &x, cols);
        let stride = 70;
        let mut out = vec![7.0_f32; 9 * stride];
        matmul(tier, &pool, &jobs, Rows::Int8(&quantized), &mut out, stride);
        for (job, weights) in jobs.iter().zip(&matrices) {
            let expected = product(tier, 1, weights, &x, true);
            for (row, expected) in expected.chunks(weights.rows()).enumerate() {
                let found = &out[row * stride + job.out_column..][..weights.rows()];
                assert_eq!(bits(found), bits(expected));
            }
        }
        for row in out.chunks(stride) {
            for untouched in [0..3, 60..62, 67..70] {
                assert!(row[untouched].iter().all(|value| *value == 7.0));
            }
        }
    }
}

#[test]
fn buffers_are_reused_across_shapes() {
    let mut random = Random::new(4);
    let raw = random_tensor(WeightFormat::Q4_0, 20, 64, &mut random);
    let weights = PackedMatrix::pack(WeightFormat::Q4_0, 20, 64, &raw).unwrap();
    let pool = BarrierPool::new(1);
    let mut quantized = QuantizedRows::new();
    quantized.reserve(30, 64);
    for m in [30, 1, 13, 5, 0, 7, 25] {
        let x: Vec<f32> = (0..m * 64).map(|_| random.normal()).collect();
        quantized.quantize(Tier::detect(), &pool, &x, 64);
        let mut out = vec![0.0; m * 20];
        let jobs = [Job { weights: &weights, out_column: 0 }];
        matmul(Tier::detect(), &pool, &jobs, Rows::Int8(&quantized), &mut out, 20);
        assert_eq!(bits(&out), bits(&product(Tier::Scalar, 1, &weights, &x, true)));
    }
}

#[test]
fn strange_activations_give_the_same_bits_on_every_tier() {
    let mut random = Random::new(5);
    let raw = random_tensor(WeightFormat::Q4_1, 16, 64, &mut random);
    let weights = PackedMatrix::pack(WeightFormat::Q4_1, 16, 64, &raw).unwrap();
    for strange in [0.0, -0.0, f32::NAN, f32::INFINITY, f32::MIN_POSITIVE, 1e-42, 3e38, -3e38] {
        let mut x: Vec<f32> = (0..64).map(|_| random.normal()).collect();
        x[5] = strange;
        x[32..].fill(strange);
        let expected = bits(&product(Tier::Scalar, 1, &weights, &x, true));
        for tier in Tier::available() {
            let out = bits(&product(tier, 1, &weights, &x, true));
            assert_eq!(out, expected, "{strange} {}", tier.name());
        }
    }
}

#[test]
fn wrong_shapes_are_told() {
    let error = PackedMatrix::pack(WeightFormat::Q4_K, 2, 576, &[]).err().unwrap();
    assert_eq!(error, PackError::Columns { format: WeightFormat::Q4_K, cols: 576 });
    let text = error.to_string();
    assert!(text.contains("576") && text.contains("256") && text.contains("Q4_K"), "{text}");
    let error = PackedMatrix::pack(WeightFormat::Q8_0, 2, 64, &[0; 100]).err().unwrap();
    let text = error.to_string();
    assert!(text.contains("136") && text.contains("100"), "{text}");
    assert!(PackedMatrix::pack(WeightFormat::F32, usize::MAX, 1 << 40, &[]).is_err());
    assert!(PackedMatrix::pack(WeightFormat::F32, 3, 0, &[]).is_err());
    let empty = PackedMatrix::pack(WeightFormat::F32, 0, 8, &[]).unwrap();
    assert_eq!(empty.bytes(), 0);
}

#[test]
fn type_numbers_are_those_of_ggml() {
    for format in WEIGHT_FORMATS {
        assert_eq!(WeightFormat::from_ggml_type(format.ggml_type()), Some(format));
    }
    assert_eq!(WeightFormat::from_ggml_type(10), None, "Q2_K");
}

/// Rows with their rests, the two products added.
fn product_with_rest(tier: Tier, weights: &PackedMatrix, x: &[f32]) -> Vec<f32> {
    let pool = BarrierPool::new(2);
    let (rows, cols, outputs) = (x.len() / weights.cols(), weights.cols(), weights.rows());
    let mut quantized = QuantizedRows::new();
    quantized.quantize_with_rest(tier, &pool, x, cols);
    assert_eq!(quantized.rows(), 2 * rows);
    let mut out = vec![f32::NAN; 2 * rows * outputs];
    let jobs = [Job { weights, out_column: 0 }];
    matmul(tier, &pool, &jobs, Rows::Int8(&quantized), &mut out, outputs);
    let pairs = out.chunks_exact(2 * outputs);
    pairs.flat_map(|pair| (0..outputs).map(|n| pair[n] + pair[outputs + n])).collect()
}

#[test]
fn rests_bring_back_what_eight_bits_lose() {
    let mut random = Random::new(11);
    let (outputs, cols, rows) = (48, 256, 5);
    for format in QUANTIZED {
        let raw = random_tensor(format, outputs, cols, &mut random);
        let weights = PackedMatrix::pack(format, outputs, cols, &raw).unwrap();
        let x: Vec<f32> = (0..rows * cols).map(|_| random.normal()).collect();
        let exact = reference(
            &dequantize(format, &raw),
            &x.iter().map(|x| f64::from(*x)).collect::<Vec<_>>(),
            cols,
        );
        let error = |out: &[f32]| -> f64 {
            let differences = out.iter().zip(&exact).map(|(y, (e, _))| (f64::from(*y) - e).powi(2));
            differences.sum::<f64>().sqrt()
        };
        let coarse = error(&product(Tier::Scalar, 1, &weights, &x, true));
        let fine = product_with_rest(Tier::Scalar, &weights, &x);
        assert!(error(&fine) < coarse / 50.0, "{format:?}: {} of {coarse}", error(&fine));
        for tier in Tier::available() {
            assert_eq!(bits(&product_with_rest(tier, &weights, &x)), bits(&fine), "{tier:?}");
        }
    }
}
