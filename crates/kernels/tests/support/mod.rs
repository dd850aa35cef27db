//! Random tensors and a second, independent reading of the GGUF block formats: straight from the
//! format's description, value by value, in f64.
#![allow(dead_code)] // each test binary uses a part

use half::f16;
use reef_kernels::matmul::WeightFormat;

/// SplitMix64.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in 0..1.
    pub fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 24) as f32
    }

    /// About normal, mean 0, variance 1.
    pub fn normal(&mut self) -> f32 {
        (0..12).map(|_| self.unit()).sum::<f32>() - 6.0
    }
}

/// A tensor with random codes and scales of ordinary size.
pub fn random_tensor(
    format: WeightFormat,
    rows: usize,
    cols: usize,
    random: &mut Random,
) -> Vec<u8> {
    let blocks = rows * cols / format.block_values();
    let mut raw = Vec::with_capacity(blocks * format.block_bytes());
    for _ in 0..blocks {
        let value = random.normal();
        match format {
            WeightFormat::F32 => raw.extend(value.to_le_bytes()),
            WeightFormat::F16 => raw.extend(f16::from_f32(value).to_le_bytes()),
            WeightFormat::BF16 => raw.extend(&value.to_le_bytes()[2..]),
            _ => {
                let start = raw.len();
                raw.extend((0..format.block_bytes()).map(|_| random.next() as u8));
                set_scales(format, &mut raw[start..], 0.01 * value, 0.02 * random.normal());
            }
        }
    }
    raw
}

/// Puts d and (where there is one) m or dmin into a block.
pub fn set_scales(format: WeightFormat, block: &mut [u8], d: f32, m: f32) {
    let at = if format == WeightFormat::Q6_K { 208 } else { 0 };
    block[at..at + 2].copy_from_slice(&f16::from_f32(d).to_le_bytes());
    let has_minimum = matches!(
        format,
        WeightFormat::Q4_1 | WeightFormat::Q5_1 | WeightFormat::Q4_K | WeightFormat::Q5_K
    );
    if has_minimum {
        block[2..4].copy_from_slice(&f16::from_f32(m).to_le_bytes());
    }
}

/// All values of a tensor, exact.
pub fn dequantize(format: WeightFormat, raw: &[u8]) -> Vec<f64> {
    let block = |block: &[u8]| -> Vec<f64> {
        (0..format.block_values()).map(|k| value(format, block, k)).collect()
    };
    raw.chunks_exact(format.block_bytes()).flat_map(block).collect()
}

/// Value k of a block.
fn value(format: WeightFormat, b: &[u8], k: usize) -> f64 {
    let half = |at: usize| f16::from_le_bytes([b[at], b[at + 1]]).to_f64();
    // The nibble of a run of `2 * width` codes: the first half low, the second high.
    let nibble = |at: usize, k: usize, width: usize| {
        let byte = b[at + k / (2 * width) * width + k % width];
        i32::from(if (k / width).is_multiple_of(2) { byte & 15 } else { byte >> 4 })
    };
    let bit = |at: usize, k: usize| i32::from(b[at + k / 8] >> (k % 8) & 1);
    match format {
        WeightFormat::F32 => f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]])),
        WeightFormat::F16 => half(0),
        WeightFormat::BF16 => f64::from(f32::from_bits(u32::from_le_bytes([0, 0, b[0], b[1]]))),
        WeightFormat::Q4_0 => half(0) * f64::from(nibble(2, k, 16) - 8),
        WeightFormat::Q4_1 => half(0) * f64::from(nibble(4, k, 16)) + half(2),
        WeightFormat::Q5_0 => half(0) * f64::from(nibble(6, k, 16) + 16 * bit(2, k) - 16),
        WeightFormat::Q5_1 => half(0) * f64::from(nibble(8, k, 16) + 16 * bit(4, k)) + half(2),
        WeightFormat::Q8_0 => half(0) * f64::from(b[2 + k] as i8),
        WeightFormat::Q4_K | WeightFormat::Q5_K => {
            let (scale, minimum) = six_bits(&b[4..16], k / 32);
            let code = if format == WeightFormat::Q4_K {
                nibble(16, k, 32)
            } else {
                let high = b[16 + k % 32] >> (k / 32) & 1;
                nibble(48, k, 32) + 16 * i32::from(high)
            };
            half(0) * f64::from(scale) * f64::from(code) - half(2) * f64::from(minimum)
        }
        WeightFormat::Q6_K => {
            let (part, run, l) = (k / 128, k / 32 % 4, k % 32);
            let low = b[64 * part + 32 * (run & 1) + l] >> (4 * (run >> 1)) & 15;
            let high = b[128 + 32 * part + l] >> (2 * run) & 3;
            let code = i32::from(low) + 16 * i32::from(high) - 32;
            half(208) * f64::from(b[192 + k / 16] as i8) * f64::from(code)
        }
    }
}

/// Scale and minimum of sub-block j from the twelve bytes of a k-quant.
fn six_bits(q: &[u8], j: usize) -> (u8, u8) {
    if j < 4 {
        (q[j] & 63, q[j + 4] & 63)
    } else {
        ((q[j + 4] & 15) | (q[j - 4] >> 6) << 4, (q[j + 4] >> 4) | (q[j] >> 6) << 4)
    }
}
