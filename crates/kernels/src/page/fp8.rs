//! 8-bit floats: OCP "FP8" E4M3FN and E5M2 (OCP 8-bit Floating Point Specification, 2023;
//! arXiv 2209.05433), one number at a time: the specification.
//!
//! A code is a sign, `e` exponent bits with bias `2^(e-1) - 1` and `m` mantissa bits. Exponent field 0
//! holds the subnormals, `mantissa * 2^(1 - bias - m)`; any other stands for
//! `(1 + mantissa / 2^m) * 2^(field - bias)`. The largest finite number follows from which codes mean
//! something else:
//!
//! - **E4M3FN** (bias 7) has no infinity and one NaN, all ones, so its top exponent is `15 - 7 = 8` and
//!   the top mantissa there 110: `1.75 * 2^8` = 448. Smallest normal `2^-6`, smallest number `2^-9`.
//! - **E5M2** (bias 15) keeps its top exponent for infinity and NaN, as IEEE formats do, so the largest
//!   is `1.75 * 2^(30 - 15)` = 57,344. Smallest normal `2^-14`, smallest number `2^-16`. It is the
//!   upper byte of an f16.
//!
//! Rounding to nearest is off by half a step at most: `2^-(m+1)` of the number where it is normal
//! (6.25 % and 12.5 %), half the smallest number below.

use reef_kv::page::PartFormat;

/// One of the two 8-bit float formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fp8 {
    /// Four exponent bits, three mantissa bits, no infinity ("FN").
    E4M3,
    /// Five exponent bits, two mantissa bits.
    E5M2,
}

impl Fp8 {
    /// The 8-bit float format of `part`, if it is one.
    pub fn of(part: PartFormat) -> Option<Fp8> {
        match part {
            PartFormat::E4M3 => Some(Fp8::E4M3),
            PartFormat::E5M2 => Some(Fp8::E5M2),
            PartFormat::F16 | PartFormat::U8 | PartFormat::U4 => None,
        }
    }

    /// Mantissa bits.
    pub const fn mantissa_bits(self) -> i32 {
        match self {
            Fp8::E4M3 => 3,
            Fp8::E5M2 => 2,
        }
    }

    /// Exponent bias.
    pub const fn bias(self) -> i32 {
        match self {
            Fp8::E4M3 => 7,
            Fp8::E5M2 => 15,
        }
    }

    /// Largest finite number.
    pub const fn largest(self) -> f32 {
        match self {
            Fp8::E4M3 => 448.0,
            Fp8::E5M2 => 57_344.0,
        }
    }

    /// The number that `code` stands for: exact.
    pub fn decode(self, code: u8) -> f32 {
        let bits = self.mantissa_bits();
        let field = i32::from(code & 0x7f) >> bits;
        let mantissa = f32::from(code & ((1 << bits) - 1));
        let one = power_of_two(bits);
        let size = match self {
            Fp8::E4M3 if code & 0x7f == 0x7f => f32::NAN,
            Fp8::E5M2 if field == 31 && mantissa > 0.0 => f32::NAN,
            Fp8::E5M2 if field == 31 => f32::INFINITY,
            _ if field == 0 => mantissa / one * power_of_two(1 - self.bias()),
            _ => (1.0 + mantissa / one) * power_of_two(field - self.bias()),
        };
        if code & 0x80 == 0 { size } else { -size }
    }

    /// The nearest finite code, ties to the even mantissa; saturating, so that one large key does not
    /// become an infinity. The sign of zero is kept. NaN gives a NaN code.
    pub fn encode(self, x: f32) -> u8 {
        let sign = (x.to_bits() >> 24) as u8 & 0x80;
        if x.is_nan() {
            return sign | 0x7f;
        }
        let size = x.abs().min(self.largest());
        let (bits, smallest_normal) = (self.mantissa_bits(), power_of_two(1 - self.bias()));
        if size < smallest_normal {
            // 2^bits of them is the code of the smallest normal.
            let smallest = smallest_normal / power_of_two(bits);
            return sign | (size / smallest).round_ties_even() as u8;
        }
        // The exponent and the mantissa of an f32 count upward together: round off the low bits, carry
        // into the exponent, and move the bias.
        let dropped = 23 - bits;
        let odd = size.to_bits() >> dropped & 1;
        let rounded = (size.to_bits() + (1 << (dropped - 1)) - 1 + odd) >> dropped;
        sign | (rounded - ((127 - self.bias() as u32) << bits)) as u8
    }
}

/// `2^n` for a normal f32.
fn power_of_two(n: i32) -> f32 {
    f32::from_bits(((n + 127) as u32) << 23)
}
