//! How the numbers of a part of a page become lanes.
//!
//! A part is a run of **vectors** of sixteen values: of K a channel's tokens, of V a token's channels.
//! They are addressed by index, since two vectors of 4-bit codes share their bytes.

use crate::simd::{LANES, Simd};
use reef_kv::page::{PartFormat, Scaling};

/// What a lane of `format` counts, in units of the part's scale. Scales are multiplied by it where
/// they are folded into queries and weights, so that loads need no multiplication: 4-bit codes lie 17
/// apart on the 8-bit grid, and the bits of E4M3 read as half precision are 256 times too small.
pub(super) const fn unit(format: PartFormat) -> f32 {
    match format {
        PartFormat::F16 | PartFormat::U8 | PartFormat::E5M2 => 1.0,
        PartFormat::U4 => 17.0,
        PartFormat::E4M3 => 256.0,
    }
}

/// A [`PartFormat`] at compile time.
pub(super) trait Element {
    /// Which one it is.
    const FORMAT: PartFormat;
    /// Bytes of a vector; half of what two share.
    const BYTES: usize = Self::FORMAT.bits() * LANES / 8;
    /// Whether scales are folded in.
    const SCALED: bool = !matches!(Self::FORMAT.scaling(), Scaling::None);
    /// Whether scales and minima come in groups.
    const GROUPED: bool = matches!(Self::FORMAT.scaling(), Scaling::Grouped);
    /// Vector `index` of the part at `part`, in units of [`unit()`].
    ///
    /// # Safety
    /// Needs the tier of `S`; the part has that vector.
    unsafe fn load<S: Simd>(part: *const u8, index: usize) -> S::F;
    /// Vectors `index..index + COUNT`.
    ///
    /// # Safety
    /// The same.
    #[inline(always)]
    unsafe fn load_many<S: Simd, const COUNT: usize>(
        part: *const u8,
        index: usize,
    ) -> [S::F; COUNT] {
        // SAFETY: the caller's contract.
        unsafe { std::array::from_fn(|i| Self::load::<S>(part, index + i)) }
    }
}

/// [`PartFormat::F16`].
pub(super) struct Half;
/// [`PartFormat::U8`].
pub(super) struct Byte;
/// [`PartFormat::U4`].
pub(super) struct Nibble;
/// [`PartFormat::E4M3`].
pub(super) struct E4M3;
/// [`PartFormat::E5M2`].
pub(super) struct E5M2;

impl Element for Half {
    const FORMAT: PartFormat = PartFormat::F16;
    #[inline(always)]
    unsafe fn load<S: Simd>(part: *const u8, index: usize) -> S::F {
        // SAFETY: the caller's contract.
        unsafe { S::load_f16(part.cast::<u16>().add(index * LANES)) }
    }
}

impl Element for Byte {
    const FORMAT: PartFormat = PartFormat::U8;
    #[inline(always)]
    unsafe fn load<S: Simd>(part: *const u8, index: usize) -> S::F {
        // SAFETY: the caller's contract.
        unsafe { S::load_u8(part.add(index * LANES)) }
    }
}

impl Element for Nibble {
    const FORMAT: PartFormat = PartFormat::U4;
    #[inline(always)]
    unsafe fn load<S: Simd>(part: *const u8, index: usize) -> S::F {
        // SAFETY: the caller's contract.
        unsafe { S::load_u4(part.add(index / 2 * LANES), !index.is_multiple_of(2)) }
    }
    #[inline(always)]
    unsafe fn load_many<S: Simd, const COUNT: usize>(
        part: *const u8,
        index: usize,
    ) -> [S::F; COUNT] {
        // SAFETY: the caller's contract.
        unsafe {
            if !COUNT.is_multiple_of(2) || !index.is_multiple_of(2) {
                return std::array::from_fn(|i| Self::load::<S>(part, index + i));
            }
            let mut vectors = [S::splat(0.0); COUNT];
            for pair in 0..COUNT / 2 {
                let (low, high) = S::load_u4_pair(part.add((index / 2 + pair) * LANES));
                (vectors[2 * pair], vectors[2 * pair + 1]) = (low, high);
            }
            vectors
        }
    }
}

impl Element for E4M3 {
    const FORMAT: PartFormat = PartFormat::E4M3;
    #[inline(always)]
    unsafe fn load<S: Simd>(part: *const u8, index: usize) -> S::F {
        // SAFETY: the caller's contract.
        unsafe { S::load_e4m3_as_f16(part.add(index * LANES)) }
    }
}

impl Element for E5M2 {
    const FORMAT: PartFormat = PartFormat::E5M2;
    #[inline(always)]
    unsafe fn load<S: Simd>(part: *const u8, index: usize) -> S::F {
        // SAFETY: the caller's contract.
        unsafe { S::load_e5m2(part.add(index * LANES)) }
    }
}
