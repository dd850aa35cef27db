//! Row lookup against the PyPI package `gguf` (xtask/golden/dequantize.py wrote the data) and against
//! the tests' own reading of the formats.

mod support;

use reef_kernels::matmul::{PackedMatrix, WEIGHT_FORMATS};
use support::{Random, dequantize, random_tensor};

const ROWS: usize = 2;
const COLS: usize = 512;

#[test]
fn rows_equal_those_of_the_gguf_package() {
    for format in WEIGHT_FORMATS {
        let path = format!("{}/tests/data/dequantize/{format}.bin", env!("CARGO_MANIFEST_DIR"));
        let golden = std::fs::read(&path).unwrap();
        let (raw, values) = golden.split_at(ROWS * format.row_bytes(COLS));
        let expected: Vec<f32> =
            values.chunks_exact(4).map(|v| f32::from_le_bytes(v.try_into().unwrap())).collect();
        assert_eq!(expected.len(), ROWS * COLS);
        let matrix = PackedMatrix::pack(format, ROWS, COLS, raw).unwrap();
        let mut out = vec![0.0; COLS];
        for (row, expected) in expected.chunks(COLS).enumerate() {
            matrix.dequantize_row(row, &mut out);
            for (k, (out, expected)) in out.iter().zip(expected).enumerate() {
                assert_eq!(out, expected, "{format} row {row} k {k}");
            }
        }
        let own = dequantize(format, raw);
        for (own, expected) in own.iter().zip(&expected) {
            // The package rounds the last sum to f32; ours is exact.
            assert_eq!(*own as f32, *expected, "{format}: the tests' own reading");
        }
    }
}

#[test]
fn every_row_is_found_whatever_the_padding() {
    let mut random = Random::new(1);
    for format in WEIGHT_FORMATS {
        for rows in [1, 15, 16, 17, 33] {
            let raw = random_tensor(format, rows, COLS, &mut random);
            let matrix = PackedMatrix::pack(format, rows, COLS, &raw).unwrap();
            let expected = dequantize(format, &raw);
            let mut out = vec![0.0; COLS];
            for (row, expected) in expected.chunks(COLS).enumerate() {
                matrix.dequantize_row(row, &mut out);
                assert!(out.iter().zip(expected).all(|(a, b)| *a == *b as f32), "{format} {row}");
            }
        }
    }
}
