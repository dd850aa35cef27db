//! Sixteen f32 lanes, the same on every CPU tier.
//!
//! Kernels are written once over [`Simd`] and instantiated per tier. Every operation is defined per
//! lane (fused multiply-add included) and every reduction has one fixed order, so the tiers give the
//! same bits; `scalar.rs` says the same thing in plain loops and is the specification.

#[cfg(target_arch = "x86_64")]
pub mod avx2;
#[cfg(target_arch = "x86_64")]
pub mod avx512;

/// Lanes of a vector.
pub const LANES: usize = 16;

/// Sixteen f32 lanes. Methods are `#[inline(always)]` so that they inline into a caller that has the
/// tier's `target_feature`s.
///
/// # Safety
/// Every method needs the CPU features of its tier, and pointer arguments must be valid for sixteen
/// elements (no alignment needed).
pub trait Simd: Copy + 'static {
    /// The vector.
    type F: Copy;
    /// # Safety
    /// See the trait.
    unsafe fn splat(x: f32) -> Self::F;
    /// # Safety
    /// See the trait.
    unsafe fn load(p: *const f32) -> Self::F;
    /// # Safety
    /// See the trait.
    unsafe fn store(p: *mut f32, x: Self::F);
    /// Sixteen halves to f32, exact.
    /// # Safety
    /// See the trait.
    unsafe fn load_f16(p: *const u16) -> Self::F;
    /// Sixteen pairs of halves (64 bytes read) to f32, exact: the first of each pair, and the second.
    /// # Safety
    /// See the trait.
    unsafe fn load_f16_pairs(p: *const u16) -> (Self::F, Self::F);
    /// Rounds to nearest even.
    /// # Safety
    /// See the trait.
    unsafe fn store_f16(p: *mut u16, x: Self::F);
    /// Sixteen unsigned bytes to f32, exact.
    /// # Safety
    /// See the trait.
    unsafe fn load_u8(p: *const u8) -> Self::F;
    /// Sixteen 4-bit codes to f32, exact: the low nibbles of sixteen bytes, or the high ones.
    /// # Safety
    /// See the trait.
    unsafe fn load_u4(p: *const u8, high: bool) -> Self::F;
    /// The low and the high nibbles of sixteen bytes to f32, exact.
    /// # Safety
    /// See the trait.
    unsafe fn load_u4_pair(p: *const u8) -> (Self::F, Self::F);
    /// Sixteen FP8 E4M3 numbers to f32, divided by 256, exact: sign, exponent and mantissa put in
    /// their places in f16, subnormal or not. The codes of NaN (127, 255) give ±480 / 256.
    /// # Safety
    /// See the trait.
    unsafe fn load_e4m3_as_f16(p: *const u8) -> Self::F;
    /// Sixteen FP8 E5M2 numbers (the upper bytes of f16) to f32, exact.
    /// # Safety
    /// See the trait.
    unsafe fn load_e5m2(p: *const u8) -> Self::F;
    /// Writes sixteen signed bytes; every lane is an integer in -128..=127.
    /// # Safety
    /// See the trait.
    unsafe fn store_i8(p: *mut i8, x: Self::F);
    /// Byte `J` (0..4) of each of sixteen little-endian u32 (64 bytes read) to f32, exact.
    /// # Safety
    /// See the trait.
    unsafe fn load_byte_of_u32<const J: usize>(p: *const u8) -> Self::F;
    /// # Safety
    /// See the trait.
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F;
    /// # Safety
    /// See the trait.
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F;
    /// # Safety
    /// See the trait.
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    /// # Safety
    /// See the trait.
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    /// # Safety
    /// See the trait.
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `if a > b { a } else { b }` per lane (so a NaN in `a` gives `b`).
    /// # Safety
    /// See the trait.
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F;
    /// `if a < b { a } else { b }` per lane.
    /// # Safety
    /// See the trait.
    unsafe fn min(a: Self::F, b: Self::F) -> Self::F;
    /// Nearest integer, ties to even.
    /// # Safety
    /// See the trait.
    unsafe fn round(a: Self::F) -> Self::F;
    /// `2^n` for an integral lane in -126..=127.
    /// # Safety
    /// See the trait.
    unsafe fn exp2_int(n: Self::F) -> Self::F;
    /// Lane i of `a` where bit i of `mask` is set, else of `b`.
    /// # Safety
    /// See the trait.
    unsafe fn select(mask: u16, a: Self::F, b: Self::F) -> Self::F;
    /// Bit i set where `a[i] < b[i]`.
    /// # Safety
    /// See the trait.
    unsafe fn lt_mask(a: Self::F, b: Self::F) -> u16;
    /// Sum of the lanes: halves folded, `lane[i] += lane[i + 8]`, then 4, 2, 1.
    /// # Safety
    /// See the trait.
    unsafe fn reduce_add(a: Self::F) -> f32;
    /// Maximum of the lanes (no NaN).
    /// # Safety
    /// See the trait.
    unsafe fn reduce_max(a: Self::F) -> f32;
    /// Minimum of the lanes (no NaN).
    /// # Safety
    /// See the trait.
    unsafe fn reduce_min(a: Self::F) -> f32;
    /// Lanes in 0..=255 to bytes, nearest even; other lanes give any byte.
    /// # Safety
    /// See the trait.
    unsafe fn store_u8(p: *mut u8, x: Self::F);
}

/// Below this `exp` gives exactly 0 (`e^-87` is the last well inside the normal range).
pub const EXP_MIN: f32 = -87.0;
/// `ln 2` to 10 bits, so that `n * LN2_HIGH` is exact.
pub const LN2_HIGH: f32 = 0.693_359_4;
/// `ln 2 - LN2_HIGH`.
pub const LN2_LOW: f32 = -2.121_944_4e-4;
/// `e^r` on |r| ≤ ln 2 / 2, highest power first (Cephes `expf`).
pub const EXP_POLY: [f32; 8] = [
    1.987_569_1e-4,
    1.398_199_9e-3,
    8.333_452e-3,
    4.166_579_6e-2,
    1.666_666_5e-1,
    5.0e-1,
    1.0,
    1.0,
];

/// `e^x` for x ≤ 88, relative error below 2e-7; anything under -87 gives 0 exactly.
///
/// Range reduction by `ln 2` in two parts, then a degree-6 polynomial (Cephes `expf`), as
/// [`crate::scalar::exp`] states it.
///
/// # Safety
/// See [`Simd`].
#[inline(always)]
pub unsafe fn exp<S: Simd>(x: S::F) -> S::F {
    // SAFETY: the caller has the tier's features.
    unsafe {
        let clamped = S::max(x, S::splat(EXP_MIN));
        let n = S::round(S::mul(clamped, S::splat(std::f32::consts::LOG2_E)));
        let r = S::fma(n, S::splat(-LN2_HIGH), clamped);
        let r = S::fma(n, S::splat(-LN2_LOW), r);
        let mut p = S::splat(EXP_POLY[0]);
        for c in &EXP_POLY[1..] {
            p = S::fma(p, r, S::splat(*c));
        }
        let y = S::mul(p, S::exp2_int(n));
        S::select(S::lt_mask(x, S::splat(EXP_MIN)), S::splat(0.0), y)
    }
}
