//! Searching and weighing a row of logits: what a sampler needs, one row at a time.
//!
//! Every function gives the same result on every tier, to the bit.

use crate::dispatch::Tier;
use crate::ops::tiered;
use crate::scalar;
#[cfg(target_arch = "x86_64")]
use crate::simd::{LANES, Simd, avx2::Avx2, avx512::Avx512, exp};

/// Values whose weights [`exp_weights`] sums up together.
pub const CHUNK: usize = 1024;
/// Values of which [`lane_maxima`] takes sixteen maxima.
pub const GROUP: usize = 256;

/// Length of the `sums` of [`exp_weights`] for `count` logits.
pub fn sums_len(count: usize) -> usize {
    count.div_ceil(CHUNK)
}

/// Length of the `out` of [`lane_maxima`] for `count` values.
pub fn maxima_len(count: usize) -> usize {
    count.div_ceil(GROUP) * 16
}

tiered! {
    /// Index of the largest value, the lowest of equals; NaN never wins. 0 where nothing is above minus
    /// infinity.
    pub fn argmax(x: &[f32]) -> u32
    checks {}
    scalar scalar::argmax(x);
    avx2 argmax_lanes::<Avx2>(x);
    avx512 argmax_lanes::<Avx512>(x);
}

tiered! {
    /// Sixteen maxima of every [`GROUP`] values: maximum `i` is over the values whose index leaves `i`
    /// modulo 16. Whatever `k` of the maxima are reached, at least `k` values reach. NaN counts as minus
    /// infinity, and so do values beyond the end.
    ///
    /// # Panics
    /// If `out` is not [`maxima_len`] long.
    pub fn lane_maxima(x: &[f32], out: &mut [f32])
    checks { assert_eq!(out.len(), maxima_len(x.len()), "sixteen maxima of a group"); }
    scalar scalar::lane_maxima(x, out);
    avx2 lane_maxima_lanes::<Avx2>(x, out);
    avx512 lane_maxima_lanes::<Avx512>(x, out);
}

tiered! {
    /// Writes the indices of the values that are at least `threshold` to `out`, in order; returns how
    /// many. Neither NaN nor minus infinity is ever among them.
    ///
    /// # Panics
    /// If `out` is shorter than `x`.
    pub fn at_least(x: &[f32], threshold: f32, out: &mut [u32]) -> usize
    checks { assert!(out.len() >= x.len(), "room for every index"); }
    scalar scalar::at_least(x, threshold, out);
    avx2 at_least_lanes::<Avx2>(x, threshold, out);
    avx512 at_least_lanes::<Avx512>(x, threshold, out);
}

tiered! {
    /// `out[i] = e^((x[i] - largest) / divisor)`, within 2e-7 of it; `sums[c]` is the sum of chunk `c` of
    /// [`CHUNK`] weights. NaN and minus infinity weigh 0.
    ///
    /// `largest` is the largest of `x`, finite; `divisor` (a temperature) is above 0.
    ///
    /// # Panics
    /// If `out` is not as long as `x`, or `sums` not [`sums_len`] long.
    pub fn exp_weights(x: &[f32], largest: f32, divisor: f32, out: &mut [f32], sums: &mut [f32])
    checks {
        assert_eq!(out.len(), x.len(), "one weight a logit");
        assert_eq!(sums.len(), sums_len(x.len()), "one sum a chunk");
    }
    scalar scalar::exp_weights(x, largest, divisor, out, sums);
    avx2 exp_weights_lanes::<Avx2>(x, largest, divisor, out, sums);
    avx512 exp_weights_lanes::<Avx512>(x, largest, divisor, out, sums);
}

tiered! {
    /// Sets `x[i]` to minus infinity where bit `i % 32` of `allowed[i / 32]` is 0.
    ///
    /// # Panics
    /// If `allowed` has fewer bits than `x` values.
    pub fn mask(x: &mut [f32], allowed: &[u32])
    checks { assert!(allowed.len() * 32 >= x.len(), "a bit for every value"); }
    scalar scalar::mask(x, allowed);
    avx2 scalar::mask(x, allowed);
    avx512 scalar::mask(x, allowed);
}

/// Sixteen values from `at`, minus infinity beyond the end.
///
/// # Safety
/// The CPU has the tier; `at` is at most the length.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn load_padded<S: Simd>(x: &[f32], at: usize) -> S::F {
    // SAFETY: whole vectors are read only where they exist.
    unsafe {
        if at + LANES <= x.len() {
            return S::load(x.as_ptr().add(at));
        }
        let mut padded = [f32::NEG_INFINITY; LANES];
        padded[..x.len() - at].copy_from_slice(&x[at..]);
        S::load(padded.as_ptr())
    }
}

/// Maximum of each lane over `x`; minus infinity where a lane has nothing but NaN.
///
/// # Safety
/// The CPU has the tier.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn maxima<S: Simd>(x: &[f32]) -> S::F {
    // SAFETY: the caller has the tier.
    unsafe {
        // Four chains, so that one comparison does not wait for the other.
        let mut most = [S::splat(f32::NEG_INFINITY); 4];
        let mut at = 0;
        while at + 4 * LANES <= x.len() {
            for (chain, most) in most.iter_mut().enumerate() {
                *most = S::max(S::load(x.as_ptr().add(at + chain * LANES)), *most);
            }
            at += 4 * LANES;
        }
        while at < x.len() {
            most[0] = S::max(load_padded::<S>(x, at), most[0]);
            at += LANES;
        }
        S::max(S::max(most[0], most[1]), S::max(most[2], most[3]))
    }
}

/// The vector form of [`scalar::argmax`]: the first chunk that holds the maximum, then its place there.
///
/// # Safety
/// The CPU has the tier.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn argmax_lanes<S: Simd>(x: &[f32]) -> u32 {
    let mut best = (f32::NEG_INFINITY, 0);
    for (chunk, values) in x.chunks(CHUNK).enumerate() {
        // SAFETY: the caller has the tier.
        let most = unsafe { S::reduce_max(maxima::<S>(values)) };
        if most > best.0 {
            best = (most, chunk * CHUNK);
        }
    }
    let (most, start) = best;
    let place = x[start..].iter().position(|value| *value == most);
    if most == f32::NEG_INFINITY { 0 } else { (start + place.unwrap_or(0)) as u32 }
}

/// The vector form of [`scalar::lane_maxima`].
///
/// # Safety
/// The CPU has the tier; the length of `out` was checked.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn lane_maxima_lanes<S: Simd>(x: &[f32], out: &mut [f32]) {
    for (values, out) in x.chunks(GROUP).zip(out.chunks_exact_mut(LANES)) {
        // SAFETY: the caller has the tier; `out` has sixteen values.
        unsafe { S::store(out.as_mut_ptr(), maxima::<S>(values)) };
    }
}

/// The vector form of [`scalar::at_least`].
///
/// # Safety
/// The CPU has the tier.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn at_least_lanes<S: Simd>(x: &[f32], threshold: f32, out: &mut [u32]) -> usize {
    let mut count = 0;
    // SAFETY: the caller has the tier.
    let below = unsafe { S::splat(threshold.next_down()) };
    for at in (0..x.len()).step_by(LANES) {
        // SAFETY: as above; `at` is within `x`. What pads the end is minus infinity, so never found.
        let mut found = unsafe { S::lt_mask(below, load_padded::<S>(x, at)) };
        if found == u16::MAX {
            // Of a flat row all are found.
            let places = out[count..count + LANES].iter_mut();
            places.zip(at as u32..).for_each(|(out, index)| *out = index);
            count += LANES;
            continue;
        }
        while found != 0 {
            out[count] = at as u32 + found.trailing_zeros();
            count += 1;
            found &= found - 1;
        }
    }
    count
}

/// The vector form of [`scalar::exp_weights`].
///
/// # Safety
/// The CPU has the tier; lengths were checked.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn exp_weights_lanes<S: Simd>(
    x: &[f32],
    largest: f32,
    divisor: f32,
    out: &mut [f32],
    sums: &mut [f32],
) {
    for ((x, out), sum) in x.chunks(CHUNK).zip(out.chunks_mut(CHUNK)).zip(sums) {
        // SAFETY: the caller has the tier; whole vectors are written only where they exist. What pads
        // the end weighs 0.
        unsafe {
            let (least, largest) = (S::splat(f32::MIN), S::splat(largest));
            let divisor = S::splat(divisor);
            let mut lanes = S::splat(0.0);
            for at in (0..x.len()).step_by(LANES) {
                let x = S::max(load_padded::<S>(x, at), least);
                let weight = exp::<S>(S::div(S::sub(x, largest), divisor));
                lanes = S::add(lanes, weight);
                if at + LANES <= out.len() {
                    S::store(out.as_mut_ptr().add(at), weight);
                } else {
                    let mut padded = [0.0; LANES];
                    S::store(padded.as_mut_ptr(), weight);
                    let left = out.len() - at;
                    out[at..].copy_from_slice(&padded[..left]);
                }
            }
            *sum = S::reduce_add(lanes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LENGTHS: [usize; 12] = [0, 1, 15, 16, 17, 64, 255, 256, 257, 1024, 1500, 49_152];

    /// Logits between -8 and 8 with ties, and NaN and infinities among them.
    fn values(count: usize, seed: u64) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state =
                state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
            state >> 40
        };
        let value = |random: u64| match random % 97 {
            0 => f32::NAN,
            1 => f32::NEG_INFINITY,
            2 => -0.0,
            3 => 0.0,
            _ => (random % 4096) as f32 / 256.0 - 8.0,
        };
        (0..count).map(|_| value(next())).collect()
    }

    fn assert_same_on_every_tier<T: PartialEq + std::fmt::Debug>(run: impl Fn(Tier) -> T) -> T {
        let expected = run(Tier::Scalar);
        for tier in Tier::available() {
            assert_eq!(run(tier), expected, "{}", tier.name());
        }
        expected
    }

    fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|value| value.to_bits()).collect()
    }

    #[test]
    fn argmax_is_the_first_of_the_largest() {
        for length in LENGTHS {
            for seed in 0..20 {
                let x = values(length, seed);
                let found = assert_same_on_every_tier(|tier| argmax(tier, &x)) as usize;
                let most = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                assert_eq!(found, x.iter().position(|value| *value == most).unwrap_or(0));
            }
        }
    }

    #[test]
    fn argmax_of_nothing_finite_and_of_ties() {
        let cases: [(&[f32], u32); 6] = [
            (&[], 0),
            (&[f32::NAN, f32::NEG_INFINITY], 0),
            (&[f32::NAN, -5.0], 1),
            (&[1.0, 3.0, f32::NAN, 3.0], 1),
            (&[-0.0, 0.0], 0),
            (&[0.0, f32::INFINITY, f32::INFINITY], 1),
        ];
        for (x, expected) in cases {
            assert_eq!(assert_same_on_every_tier(|tier| argmax(tier, x)), expected, "{x:?}");
        }
        // Equals in different lanes, chains and chunks: the lowest index wins.
        for (first, second) in [(5, 4_000), (17, 33), (70, 135), (1023, 1024), (1029, 2050)] {
            let mut x = values(5_000, 1);
            (x[first], x[second]) = (9.0, 9.0);
            assert_eq!(assert_same_on_every_tier(|tier| argmax(tier, &x)), first as u32);
        }
    }

    #[test]
    fn the_kth_lane_maximum_is_reached_by_k_values() {
        for length in LENGTHS {
            let x = values(length, 3);
            let maxima = assert_same_on_every_tier(|tier| {
                let mut out = vec![0.0; maxima_len(length)];
                lane_maxima(tier, &x, &mut out);
                bits(&out)
            });
            let mut maxima: Vec<f32> = maxima.into_iter().map(f32::from_bits).collect();
            maxima.sort_by(|a, b| b.total_cmp(a));
            let finite = maxima.iter().filter(|most| most.is_finite());
            for (before, threshold) in finite.enumerate() {
                let reach = x.iter().filter(|value| *value >= threshold).count();
                assert!(reach > before, "{reach} values reach maximum {before} of {length}");
            }
        }
    }

    #[test]
    fn at_least_finds_exactly_those() {
        for length in LENGTHS {
            let x = values(length, 4);
            for threshold in [7.9, 0.0, -0.0, -3.25, -7.5, f32::MIN, f32::INFINITY] {
                let found = assert_same_on_every_tier(|tier| {
                    let mut out = vec![0; length];
                    let count = at_least(tier, &x, threshold, &mut out);
                    out.truncate(count);
                    out
                });
                let expected = (0..length as u32).filter(|i| x[*i as usize] >= threshold);
                assert_eq!(found, expected.collect::<Vec<_>>(), "{threshold} of {length}");
            }
        }
    }

    #[test]
    fn weights_are_exponentials_and_sums_theirs() {
        for length in LENGTHS {
            for divisor in [1.0, 0.7, 3.0] {
                let x = values(length, 5);
                let largest = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let found = assert_same_on_every_tier(|tier| {
                    let (mut out, mut sums) = (vec![0.0; length], vec![0.0; sums_len(length)]);
                    exp_weights(tier, &x, largest, divisor, &mut out, &mut sums);
                    (bits(&out), bits(&sums))
                });
                let weights: Vec<f32> = found.0.into_iter().map(f32::from_bits).collect();
                for (x, weight) in x.iter().zip(&weights) {
                    let exact = (f64::from(x - largest) / f64::from(divisor)).exp();
                    let exact = if x.is_nan() { 0.0 } else { exact };
                    let error = (f64::from(*weight) - exact).abs();
                    // The argument is rounded to 2^-24 of up to 16 / 0.7.
                    assert!(error <= 2e-6 * exact + 1e-37, "{x}: {weight} not {exact}");
                }
                for (weights, sum) in weights.chunks(CHUNK).zip(found.1) {
                    let exact: f64 = weights.iter().map(|weight| f64::from(*weight)).sum();
                    assert!((f64::from(f32::from_bits(sum)) - exact).abs() <= 1e-5 * exact);
                }
            }
        }
    }

    #[test]
    fn extreme_logits_weigh_nothing_or_one() {
        let x = [3e38, -3e38, f32::NAN, f32::NEG_INFINITY, 3e38];
        for divisor in [1e-40, 1.0, 100.0] {
            for tier in Tier::available() {
                let (mut out, mut sums) = ([7.0; 5], [0.0]);
                exp_weights(tier, &x, 3e38, divisor, &mut out, &mut sums);
                assert_eq!((out, sums), ([1.0, 0.0, 0.0, 0.0, 1.0], [2.0]), "{divisor}");
            }
        }
    }

    #[test]
    fn a_mask_leaves_what_it_allows() {
        for length in LENGTHS {
            let x = values(length, 6);
            let allowed: Vec<u32> =
                (0..length.div_ceil(32) as u32).map(|i| i.wrapping_mul(0x9e37_79b9)).collect();
            let masked = assert_same_on_every_tier(|tier| {
                let mut x = x.clone();
                mask(tier, &mut x, &allowed);
                bits(&x)
            });
            for (i, (bits, x)) in masked.iter().zip(&x).enumerate() {
                let kept = allowed[i / 32] >> (i % 32) & 1 == 1;
                assert_eq!(*bits, if kept { *x } else { f32::NEG_INFINITY }.to_bits());
            }
        }
    }
}
