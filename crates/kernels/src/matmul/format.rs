//! The weight formats: what a GGUF file stores, and how one block of it reads.

use half::f16;
use std::fmt;

/// How the numbers of a weight tensor are stored in a GGUF file (ggml's block formats).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(non_camel_case_types)] // ggml's names
pub enum WeightFormat {
    /// IEEE single.
    F32,
    /// IEEE half.
    F16,
    /// The upper half of an IEEE single.
    BF16,
    /// `d * (q - 8)`, 4-bit q, 32 values per f16 d.
    Q4_0,
    /// `d * q + m`, 4-bit q, 32 values per f16 d and m.
    Q4_1,
    /// `d * (q - 16)`, 5-bit q, 32 values per f16 d.
    Q5_0,
    /// `d * q + m`, 5-bit q, 32 values per f16 d and m.
    Q5_1,
    /// `d * q`, signed 8-bit q, 32 values per f16 d.
    Q8_0,
    /// `d * s * q - dmin * t`, 4-bit q, 6-bit s and t per 32 values, f16 d and dmin per 256.
    Q4_K,
    /// As `Q4_K` with 5-bit q.
    Q5_K,
    /// `d * s * (q - 32)`, 6-bit q, signed 8-bit s per 16 values, f16 d per 256.
    Q6_K,
}

/// Every format.
pub const WEIGHT_FORMATS: [WeightFormat; 11] = [
    WeightFormat::F32,
    WeightFormat::F16,
    WeightFormat::BF16,
    WeightFormat::Q4_0,
    WeightFormat::Q4_1,
    WeightFormat::Q5_0,
    WeightFormat::Q5_1,
    WeightFormat::Q8_0,
    WeightFormat::Q4_K,
    WeightFormat::Q5_K,
    WeightFormat::Q6_K,
];

impl WeightFormat {
    /// The name (`Q4_K`), ggml's type number, values per block and bytes per block.
    const fn facts(self) -> (&'static str, u32, usize, usize) {
        match self {
            WeightFormat::F32 => ("F32", 0, 1, 4),
            WeightFormat::F16 => ("F16", 1, 1, 2),
            WeightFormat::BF16 => ("BF16", 30, 1, 2),
            WeightFormat::Q4_0 => ("Q4_0", 2, 32, 18),
            WeightFormat::Q4_1 => ("Q4_1", 3, 32, 20),
            WeightFormat::Q5_0 => ("Q5_0", 6, 32, 22),
            WeightFormat::Q5_1 => ("Q5_1", 7, 32, 24),
            WeightFormat::Q8_0 => ("Q8_0", 8, 32, 34),
            WeightFormat::Q4_K => ("Q4_K", 12, 256, 144),
            WeightFormat::Q5_K => ("Q5_K", 13, 256, 176),
            WeightFormat::Q6_K => ("Q6_K", 14, 256, 210),
        }
    }

    /// ggml's name, as `Q4_K`.
    pub const fn name(self) -> &'static str {
        self.facts().0
    }

    /// ggml's type number, as in a GGUF tensor entry.
    pub const fn ggml_type(self) -> u32 {
        self.facts().1
    }

    /// The format of a ggml type number; `None` for a type we do not read.
    pub fn from_ggml_type(ggml_type: u32) -> Option<WeightFormat> {
        WEIGHT_FORMATS.into_iter().find(|format| format.ggml_type() == ggml_type)
    }

    /// Values per block; a row must hold a whole number of blocks.
    pub const fn block_values(self) -> usize {
        self.facts().2
    }

    /// Bytes per block in the file.
    pub const fn block_bytes(self) -> usize {
        self.facts().3
    }

    /// Bytes of a row of `cols` values in the file (`cols` a multiple of [`block_values`](Self::block_values)).
    pub const fn row_bytes(self, cols: usize) -> usize {
        cols / self.block_values() * self.block_bytes()
    }

    /// True for the integer formats, which can be multiplied with int8 activations; false for F32, F16
    /// and BF16, which need f32 activations.
    pub const fn is_quantized(self) -> bool {
        self.block_values() > 1
    }
}

impl fmt::Display for WeightFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One block of a file, taken apart: codes in order of k, side numbers as stored.
///
/// The value at k is `d * scale * (code - zero) + minimum` with the format's own reading of the parts;
/// see [`WeightFormat`].
pub(super) struct RawBlock {
    /// Unsigned codes (for Q8_0 the signed value + 128).
    pub codes: [u8; 256],
    /// Sub-block scales: 6 bits (Q4_K, Q5_K) or signed + 128 (Q6_K); unused otherwise.
    pub scales: [u8; 16],
    /// Sub-block minima: 6 bits (Q4_K, Q5_K); unused otherwise.
    pub minima: [u8; 8],
    /// `d` as f16 bits.
    pub d: u16,
    /// `m` or `dmin` as f16 bits; 0 where the format has none.
    pub m: u16,
}

impl RawBlock {
    /// Reads one block of a quantised format; `bytes` holds [`WeightFormat::block_bytes`].
    pub fn read(format: WeightFormat, bytes: &[u8]) -> RawBlock {
        let mut block = RawBlock { codes: [0; 256], scales: [0; 16], minima: [0; 8], d: 0, m: 0 };
        let half = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        block.d = half(if format == WeightFormat::Q6_K { 208 } else { 0 });
        match format {
            WeightFormat::Q4_0 => block.read_nibbles(&bytes[2..18]),
            WeightFormat::Q4_1 => {
                block.m = half(2);
                block.read_nibbles(&bytes[4..20]);
            }
            WeightFormat::Q5_0 => {
                block.read_nibbles(&bytes[6..22]);
                block.read_fifth_bits(&bytes[2..6]);
            }
            WeightFormat::Q5_1 => {
                block.m = half(2);
                block.read_nibbles(&bytes[8..24]);
                block.read_fifth_bits(&bytes[4..8]);
            }
            WeightFormat::Q8_0 => {
                for (code, byte) in block.codes.iter_mut().zip(&bytes[2..34]) {
                    *code = byte ^ 0x80;
                }
            }
            WeightFormat::Q4_K => {
                block.m = half(2);
                block.read_six_bit_scales(&bytes[4..16]);
                block.read_k_nibbles(&bytes[16..144]);
            }
            WeightFormat::Q5_K => {
                block.m = half(2);
                block.read_six_bit_scales(&bytes[4..16]);
                block.read_k_nibbles(&bytes[48..176]);
                for (k, code) in block.codes.iter_mut().enumerate() {
                    *code |= (bytes[16 + k % 32] >> (k / 32) & 1) << 4;
                }
            }
            WeightFormat::Q6_K => block.read_q6_k(bytes),
            WeightFormat::F32 | WeightFormat::F16 | WeightFormat::BF16 => {
                unreachable!("{format} has no integer blocks")
            }
        }
        block
    }

    /// Sixteen bytes: low nibbles are k 0..16, high nibbles k 16..32.
    fn read_nibbles(&mut self, bytes: &[u8]) {
        for (k, byte) in bytes.iter().enumerate() {
            self.codes[k] = byte & 15;
            self.codes[k + 16] = byte >> 4;
        }
    }

    /// Bit k of a little-endian u32 is the fifth bit of code k.
    fn read_fifth_bits(&mut self, bytes: &[u8]) {
        for k in 0..32 {
            self.codes[k] |= (bytes[k / 8] >> (k % 8) & 1) << 4;
        }
    }

    /// 128 bytes: each 32 hold 64 codes, low nibbles first.
    fn read_k_nibbles(&mut self, bytes: &[u8]) {
        for (chunk, bytes) in bytes.chunks_exact(32).enumerate() {
            for (k, byte) in bytes.iter().enumerate() {
                self.codes[64 * chunk + k] = byte & 15;
                self.codes[64 * chunk + k + 32] = byte >> 4;
            }
        }
    }

    /// Twelve bytes: eight 6-bit scales and minima (ggml's `get_scale_min_k4`).
    fn read_six_bit_scales(&mut self, bytes: &[u8]) {
        for i in 0..4 {
            self.scales[i] = bytes[i] & 63;
            self.minima[i] = bytes[i + 4] & 63;
            self.scales[i + 4] = (bytes[i + 8] & 15) | (bytes[i] >> 6 << 4);
            self.minima[i + 4] = (bytes[i + 8] >> 4) | (bytes[i + 4] >> 6 << 4);
        }
    }

    /// `ql[128] qh[64] scales[16]`; each half of the block interleaves four runs of 32 codes.
    fn read_q6_k(&mut self, bytes: &[u8]) {
        for k in 0..256 {
            let (part, run, l) = (k / 128, k % 128 / 32, k % 32);
            let low = bytes[64 * part + 32 * (run % 2) + l] >> (4 * (run / 2)) & 15;
            let high = bytes[128 + 32 * part + l] >> (2 * run) & 3;
            self.codes[k] = low | high << 4;
        }
        for (scale, byte) in self.scales.iter_mut().zip(&bytes[192..208]) {
            *scale = byte ^ 0x80;
        }
    }
}

/// One value of F32, F16 or BF16 from its little-endian bytes.
pub(super) fn float_value(format: WeightFormat, bytes: &[u8]) -> f32 {
    match format {
        WeightFormat::F16 => f16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
        WeightFormat::BF16 => f32::from_le_bytes([0, 0, bytes[0], bytes[1]]),
        _ => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
    }
}
