//! Pages for tests: every shape, and the values that quantisers get wrong.

use half::f16;
use proptest::prelude::*;
use reef_kernels::dispatch::Tier;
use reef_kernels::page::{NotFinite, decode_page, reencode};
use reef_kv::page::{PageFormat, PageShape};

pub fn shapes() -> impl Strategy<Value = PageShape> {
    let head_dims = proptest::sample::select(vec![16usize, 32, 48, 64, 80, 128, 256]);
    (1usize..4, head_dims, proptest::sample::select(vec![16usize, 32, 64, 128]))
        .prop_map(|(kv_heads, head_dim, block_size)| PageShape { kv_heads, head_dim, block_size })
}

/// What the values of a page are like.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fill {
    /// Uniform in -1..1 times a power of two.
    Uniform(i32),
    /// Any finite half: every exponent as likely as any other.
    AnyHalf,
    /// Rows of one value each (max = min), a few of them with one other value.
    Constant,
    /// Below the smallest normal half.
    Subnormal,
    /// ±65504 among tiny values.
    Extremes,
    /// A few values a thousand times as large as the rest.
    Outliers,
    /// Zeros of both signs.
    Zeros,
}

pub fn fills() -> impl Strategy<Value = Fill> {
    prop_oneof![
        (-24i32..16).prop_map(Fill::Uniform),
        Just(Fill::AnyHalf),
        Just(Fill::Constant),
        Just(Fill::Subnormal),
        Just(Fill::Extremes),
        Just(Fill::Outliers),
        Just(Fill::Zeros),
    ]
}

/// Xorshift.
pub struct Noise(u64);

impl Noise {
    pub fn new(seed: u64) -> Noise {
        Noise(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn bits(&mut self) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 32) as u32
    }

    /// Uniform in -1..1.
    pub fn unit(&mut self) -> f32 {
        (self.bits() >> 8) as f32 / (1u32 << 23) as f32 - 1.0
    }
}

/// An f16 page: its halves, for f16 pages have no gaps.
pub fn f16_page(shape: &PageShape, fill: Fill, seed: u64) -> Vec<u8> {
    let mut noise = Noise::new(seed);
    let count = shape.page_bytes(PageFormat::F16) / 2;
    let mut row_value = 0;
    let halves = (0..count).map(|index| {
        let bits = noise.bits();
        if index % 16 == 0 {
            row_value = finite(bits).to_bits();
        }
        match fill {
            Fill::Uniform(exponent) => f16::from_f32(noise.unit() * 2f32.powi(exponent)),
            Fill::AnyHalf => finite(bits),
            Fill::Constant if bits.is_multiple_of(97) => finite(noise.bits()),
            Fill::Constant => f16::from_bits(row_value),
            Fill::Subnormal => f16::from_bits((bits & 0x83ff) as u16),
            Fill::Extremes if bits.is_multiple_of(9) => f16::MAX,
            Fill::Extremes if bits % 9 == 1 => f16::MIN,
            Fill::Extremes => f16::from_f32(noise.unit() * 1e-4),
            Fill::Outliers if bits.is_multiple_of(61) => f16::from_f32(noise.unit() * 2000.0),
            Fill::Outliers => f16::from_f32(noise.unit() * 2.0),
            Fill::Zeros => f16::from_bits((bits & 0x8000) as u16),
        }
    });
    halves.flat_map(f16::to_le_bytes).collect()
}

/// A half of these bits, with another exponent if it would be infinite or NaN.
fn finite(bits: u32) -> f16 {
    let half = f16::from_bits(bits as u16);
    if half.is_finite() { half } else { f16::from_bits(bits as u16 ^ 0x4000) }
}

/// `page` in another format. Before, the target holds something else at every byte.
pub fn encoded(
    tier: Tier,
    shape: &PageShape,
    (from, to): (PageFormat, PageFormat),
    page: &[u8],
) -> Result<Vec<u8>, NotFinite> {
    let mut bytes = vec![0xa5; shape.page_bytes(to)];
    reencode(tier, shape, from, to, page, &mut bytes)?;
    Ok(bytes)
}

/// Keys and values of a page.
pub fn decoded(shape: &PageShape, format: PageFormat, page: &[u8]) -> [Vec<f32>; 2] {
    let count = shape.kv_heads * shape.block_size * shape.head_dim;
    let (mut keys, mut values) = (vec![0.0; count], vec![0.0; count]);
    decode_page(shape, format, page, &mut keys, &mut values);
    [keys, values]
}

/// Every re-encoding there is.
pub fn pairs() -> impl Iterator<Item = (PageFormat, PageFormat)> {
    let all = PageFormat::ALL;
    let pairs = all.into_iter().flat_map(move |from| all.into_iter().map(move |to| (from, to)));
    pairs.filter(|(from, to)| from.can_become(*to))
}
