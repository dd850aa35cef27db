//! The small operations between matrices, one row at a time.
//!
//! Every function gives the same bits on every tier. Where lanes do not meet, the tiers are the same
//! loop compiled with other instructions; where they do (sums), there are sixteen virtual lanes.

use crate::dispatch::Tier;
use crate::scalar;
#[cfg(target_arch = "x86_64")]
use crate::simd::{LANES, Simd, avx2::Avx2, avx512::Avx512, exp};

/// Which values of a head rotate together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RopeStyle {
    /// Pairs (2i, 2i + 1), as the Llama files of GGUF are permuted.
    Interleaved,
    /// Pairs (i, i + half), half of the rotated values apart (NeoX, Qwen, Gemma).
    Half,
}

/// Defines a function per tier that enables its features and inlines a body, and the dispatch over them.
macro_rules! tiered {
    (
        $(#[$doc:meta])*
        pub fn $name:ident($($arg:ident: $type:ty),* $(,)?) $(-> $result:ident)?
        checks { $($check:stmt;)* }
        scalar $scalar:expr;
        avx2 $avx2:expr;
        avx512 $avx512:expr;
    ) => {
        $(#[$doc])*
        pub fn $name(tier: Tier, $($arg: $type),*) $(-> $result)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            fn avx2($($arg: $type),*) $(-> $result)? {
                // SAFETY: the features are enabled here; shapes were checked.
                #[allow(unused_unsafe)]
                unsafe { $avx2 }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
            fn avx512($($arg: $type),*) $(-> $result)? {
                // SAFETY: the features are enabled here; shapes were checked.
                #[allow(unused_unsafe)]
                unsafe { $avx512 }
            }
            $($check)*
            match tier {
                Tier::Scalar => $scalar,
                // SAFETY: a tier is only named on a CPU that has it.
                #[cfg(target_arch = "x86_64")]
                Tier::Avx2 => unsafe { avx2($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                Tier::Avx512 => unsafe { avx512($($arg),*) },
                #[cfg(not(target_arch = "x86_64"))]
                _ => $scalar,
            }
        }
    };
}
pub(crate) use tiered;

tiered! {
    /// `out[i] = x[i] / sqrt(mean(x²) + epsilon) * weight[i]` (Zhang & Sennrich, arXiv 1910.07467).
    ///
    /// # Panics
    /// If the three are not of one length.
    pub fn rms_norm(x: &[f32], weight: &[f32], epsilon: f32, out: &mut [f32])
    checks { assert!(x.len() == weight.len() && x.len() == out.len(), "one length"); }
    scalar scalar::rms_norm(x, weight, epsilon, out);
    avx2 scalar::scale_by(x, weight, inverse_rms::<Avx2>(x, epsilon), out);
    avx512 scalar::scale_by(x, weight, inverse_rms::<Avx512>(x, epsilon), out);
}

tiered! {
    /// [`rms_norm`] in place (the heads of Q and K).
    ///
    /// # Panics
    /// If the two are not of one length.
    pub fn rms_norm_in_place(x: &mut [f32], weight: &[f32], epsilon: f32)
    checks { assert_eq!(x.len(), weight.len(), "one length"); }
    scalar scalar::rms_norm_in_place(x, weight, epsilon);
    avx2 {
        let inverse = inverse_rms::<Avx2>(x, epsilon);
        scalar::scale_in_place_by(x, weight, inverse);
    };
    avx512 {
        let inverse = inverse_rms::<Avx512>(x, epsilon);
        scalar::scale_in_place_by(x, weight, inverse);
    };
}

tiered! {
    /// Rotates the first `2 * cos.len()` values of a head by the angles of its position, given as the
    /// cosine and sine of each pair (Su et al., arXiv 2104.09864); the rest stays.
    ///
    /// # Panics
    /// If `cos` and `sin` differ in length or the head is shorter than their pairs.
    pub fn rope(style: RopeStyle, head: &mut [f32], cos: &[f32], sin: &[f32])
    checks { assert!(cos.len() == sin.len() && 2 * cos.len() <= head.len(), "pairs of the head"); }
    scalar scalar::rope(style, head, cos, sin);
    avx2 scalar::rope(style, head, cos, sin);
    avx512 scalar::rope(style, head, cos, sin);
}

tiered! {
    /// `out[i] = silu(gate[i]) * up[i]`, silu(g) = g / (1 + e^-g) (Shazeer, arXiv 2002.05202).
    ///
    /// # Panics
    /// If the three are not of one length.
    pub fn silu_mul(gate: &[f32], up: &[f32], out: &mut [f32])
    checks { assert!(gate.len() == up.len() && gate.len() == out.len(), "one length"); }
    scalar scalar::silu_mul(gate, up, out);
    avx2 gated::<Avx2>(gate, up, out, |g| g);
    avx512 gated::<Avx512>(gate, up, out, |g| g);
}

tiered! {
    /// `out[i] = gelu(gate[i]) * up[i]` with the tanh approximation (Hendrycks & Gimpel, arXiv
    /// 1606.08415), written as g * sigmoid(2 √(2/π) (g + 0.044715 g³)).
    ///
    /// # Panics
    /// If the three are not of one length.
    pub fn gelu_tanh_mul(gate: &[f32], up: &[f32], out: &mut [f32])
    checks { assert!(gate.len() == up.len() && gate.len() == out.len(), "one length"); }
    scalar scalar::gelu_tanh_mul(gate, up, out);
    avx2 gated::<Avx2>(gate, up, out, gelu_argument::<Avx2>);
    avx512 gated::<Avx512>(gate, up, out, gelu_argument::<Avx512>);
}

tiered! {
    /// Rotates each head of `heads` by the normalized Walsh-Hadamard matrix, in place: orthonormal and
    /// its own inverse, so dot products of rotated queries and keys are those of the unrotated, while
    /// a channel's outlier is spread over all channels (QuaRot, arXiv 2404.00456). Where `head_dim` is
    /// not a power of two, each of its blocks of the largest power of two that divides it is rotated.
    ///
    /// `heads`: `[any][head_dim]`.
    ///
    /// # Panics
    /// If `head_dim` is 0 or does not divide the length.
    pub fn hadamard(heads: &mut [f32], head_dim: usize)
    checks {
        assert!(head_dim > 0 && heads.len().is_multiple_of(head_dim), "whole heads");
    }
    scalar scalar::hadamard(heads, head_dim);
    avx2 scalar::hadamard(heads, head_dim);
    avx512 scalar::hadamard(heads, head_dim);
}

tiered! {
    /// `x[i] += y[i]` (a residual, a bias).
    ///
    /// # Panics
    /// If the two are not of one length.
    pub fn add(x: &mut [f32], y: &[f32])
    checks { assert_eq!(x.len(), y.len(), "one length"); }
    scalar scalar::add(x, y);
    avx2 scalar::add(x, y);
    avx512 scalar::add(x, y);
}

/// Sixteen values from `at`, zeros beyond the end.
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
        let mut padded = [0.0; LANES];
        padded[..x.len() - at].copy_from_slice(&x[at..]);
        S::load(padded.as_ptr())
    }
}

/// The vector form of [`scalar::inverse_rms`].
///
/// # Safety
/// The CPU has the tier.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn inverse_rms<S: Simd>(x: &[f32], epsilon: f32) -> f32 {
    // SAFETY: the caller has the tier.
    let sum = unsafe {
        let mut sums = S::splat(0.0);
        for at in (0..x.len()).step_by(LANES) {
            let x = load_padded::<S>(x, at);
            sums = S::fma(x, x, sums);
        }
        S::reduce_add(sums)
    };
    1.0 / (sum / x.len() as f32 + epsilon).sqrt()
}

/// `out = gate * sigmoid(argument(gate)) * up`; the vector form of [`scalar::gated`].
///
/// # Safety
/// The CPU has the tier; one length.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn gated<S: Simd>(
    gate: &[f32],
    up: &[f32],
    out: &mut [f32],
    argument: impl Fn(S::F) -> S::F,
) {
    // SAFETY: whole vectors are written only where they exist.
    unsafe {
        let (one, limit) = (S::splat(1.0), S::splat(scalar::SIGMOID_LIMIT));
        for at in (0..out.len()).step_by(LANES) {
            let g = load_padded::<S>(gate, at);
            let negative = S::sub(S::splat(0.0), argument(g));
            let denominator = S::add(one, exp::<S>(S::min(negative, limit)));
            let y = S::mul(S::div(g, denominator), load_padded::<S>(up, at));
            if at + LANES <= out.len() {
                S::store(out.as_mut_ptr().add(at), y);
            } else {
                let mut padded = [0.0; LANES];
                S::store(padded.as_mut_ptr(), y);
                let left = out.len() - at;
                out[at..].copy_from_slice(&padded[..left]);
            }
        }
    }
}

/// The vector form of [`scalar::gelu_argument`]. Only called from where its tier is enabled.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn gelu_argument<S: Simd>(g: S::F) -> S::F {
    // SAFETY: the callers are functions that enable the tier.
    unsafe {
        let cubic = S::fma(S::mul(g, g), S::splat(scalar::GELU_CUBIC), S::splat(1.0));
        S::mul(S::mul(g, S::splat(scalar::GELU_SLOPE)), cubic)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of both signs over many magnitudes, strange ones among them.
    fn values(count: usize, seed: u32) -> Vec<f32> {
        let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12_345);
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            state
        };
        let mut values: Vec<f32> = (0..count)
            .map(|_| {
                (next() as f32 / 2.0_f32.powi(31) - 1.0) * 2.0_f32.powi((next() % 12) as i32 - 6)
            })
            .collect();
        for (place, strange) in [(3, 0.0), (7, -0.0), (11, -100.0), (12, 100.0), (13, 1e-40)] {
            if place < count {
                values[place] = strange;
            }
        }
        values
    }

    fn assert_same_on_every_tier(what: &str, run: impl Fn(Tier) -> Vec<f32>) -> Vec<f32> {
        let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        let expected = run(Tier::Scalar);
        for tier in Tier::available() {
            assert_eq!(bits(&run(tier)), bits(&expected), "{what} on {}", tier.name());
        }
        expected
    }

    fn assert_close(found: f32, expected: f64, what: &str) {
        let error = (f64::from(found) - expected).abs();
        assert!(error <= 1e-6 * expected.abs() + 1e-7, "{what}: {found} not {expected}");
    }

    const LENGTHS: [usize; 9] = [1, 5, 16, 17, 31, 64, 576, 640, 1000];

    #[test]
    fn rms_norm_is_right_and_the_same_on_every_tier() {
        for length in LENGTHS {
            let (x, weight) = (values(length, 1), values(length, 2));
            let out = assert_same_on_every_tier("rms_norm", |tier| {
                let mut out = vec![0.0; length];
                rms_norm(tier, &x, &weight, 1e-5, &mut out);
                out
            });
            let in_place = assert_same_on_every_tier("rms_norm_in_place", |tier| {
                let mut x = x.clone();
                rms_norm_in_place(tier, &mut x, &weight, 1e-5);
                x
            });
            assert_eq!(out, in_place);
            let mean = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / length as f64;
            for i in 0..length {
                let expected = f64::from(x[i]) / (mean + 1e-5).sqrt() * f64::from(weight[i]);
                assert_close(out[i], expected, "rms_norm");
            }
        }
    }

    #[test]
    fn rope_rotates_pairs_and_leaves_the_rest() {
        for (length, pairs) in [(2, 1), (64, 32), (64, 20), (80, 33), (256, 128), (64, 0)] {
            let head = values(length, 3);
            let angles: Vec<f64> = (0..pairs).map(|i| 0.37 * f64::from(i)).collect();
            let cos: Vec<f32> = angles.iter().map(|a| a.cos() as f32).collect();
            let sin: Vec<f32> = angles.iter().map(|a| a.sin() as f32).collect();
            for style in [RopeStyle::Interleaved, RopeStyle::Half] {
                let out = assert_same_on_every_tier("rope", |tier| {
                    let mut head = head.clone();
                    rope(tier, style, &mut head, &cos, &sin);
                    head
                });
                let pairs = cos.len();
                for (i, angle) in angles.iter().enumerate() {
                    let (a, b) = match style {
                        RopeStyle::Interleaved => (2 * i, 2 * i + 1),
                        RopeStyle::Half => (i, i + pairs),
                    };
                    let (x, y) = (f64::from(head[a]), f64::from(head[b]));
                    let scale = x.abs() + y.abs();
                    let close = |found: f32, expected: f64| {
                        (f64::from(found) - expected).abs() <= 3e-7 * scale + 1e-12
                    };
                    assert!(close(out[a], x * angle.cos() - y * angle.sin()));
                    assert!(close(out[b], x * angle.sin() + y * angle.cos()));
                }
                assert_eq!(out[2 * pairs..], head[2 * pairs..]);
            }
        }
    }

    #[test]
    fn gates_are_right_and_the_same_on_every_tier() {
        type Gate = fn(Tier, &[f32], &[f32], &mut [f32]);
        let silu = |g: f64| g / (1.0 + (-g).exp());
        let gelu = |g: f64| {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (g + 0.044_715 * g.powi(3));
            0.5 * g * (1.0 + inner.tanh())
        };
        let gates: [(Gate, &dyn Fn(f64) -> f64); 2] = [(silu_mul, &silu), (gelu_tanh_mul, &gelu)];
        for (gate, exact) in gates {
            for length in LENGTHS {
                let (g, up) = (values(length, 4), values(length, 5));
                let out = assert_same_on_every_tier("gate", |tier| {
                    let mut out = vec![0.0; length];
                    gate(tier, &g, &up, &mut out);
                    out
                });
                for i in 0..length {
                    assert_close(out[i], exact(f64::from(g[i])) * f64::from(up[i]), "gate");
                }
            }
        }
    }

    #[test]
    fn a_broken_value_stays_broken() {
        for tier in Tier::available() {
            let mut out = [0.0; 3];
            silu_mul(tier, &[f32::NAN, f32::NEG_INFINITY, -3e38], &[1.0; 3], &mut out);
            assert!(out[0].is_nan());
            assert!(out[2] == 0.0 || out[2].abs() < 3.0, "{}", out[2]);
            let mut out = [0.0; 2];
            rms_norm(tier, &[f32::NAN, 1.0], &[1.0; 2], 1e-5, &mut out);
            assert!(out[0].is_nan());
        }
    }

    /// Entry (i, j) of the Walsh-Hadamard matrix of order `order`: the parity of the bits in common.
    fn hadamard_entry(i: usize, j: usize, order: usize) -> f64 {
        let sign = if (i & j).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
        sign / (order as f64).sqrt()
    }

    #[test]
    fn hadamard_is_the_matrix_and_the_same_on_every_tier() {
        for (heads, head_dim) in [(1, 16), (3, 64), (2, 80), (5, 48), (1, 128), (2, 256), (4, 1)] {
            let x: Vec<f32> = values(heads * head_dim, 7).iter().map(|x| x / 64.0).collect();
            let out = assert_same_on_every_tier("hadamard", |tier| {
                let mut x = x.clone();
                hadamard(tier, &mut x, head_dim);
                x
            });
            let order = 1 << head_dim.trailing_zeros();
            for (x, out) in x.chunks(order).zip(out.chunks(order)) {
                let norm = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
                for (i, out) in out.iter().enumerate() {
                    let terms = x.iter().enumerate();
                    let expected: f64 =
                        terms.map(|(j, x)| f64::from(*x) * hadamard_entry(i, j, order)).sum();
                    let error = (f64::from(*out) - expected).abs();
                    assert!(error <= 1e-6 * norm, "{out} not {expected} of {order}");
                }
            }
        }
    }

    #[test]
    fn hadamard_is_orthonormal_and_its_own_inverse() {
        for head_dim in [16, 64, 80, 128, 256] {
            let (query, key) = (values(head_dim, 8), values(head_dim, 9));
            let dot = |a: &[f32], b: &[f32]| -> f64 {
                a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
            };
            for tier in Tier::available() {
                let rotate = |x: &[f32]| {
                    let mut x = x.to_vec();
                    hadamard(tier, &mut x, head_dim);
                    x
                };
                let (rotated_query, rotated_key) = (rotate(&query), rotate(&key));
                let norms = (dot(&query, &query) * dot(&key, &key)).sqrt();
                let change = dot(&rotated_query, &rotated_key) - dot(&query, &key);
                assert!(change.abs() <= 1e-6 * norms, "{change} of {norms}");
                let largest = query.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
                for (again, x) in rotate(&rotated_query).iter().zip(&query) {
                    assert!((again - x).abs() <= 2e-6 * largest, "{again} not {x}");
                }
            }
        }
    }

    #[test]
    fn hadamard_spreads_an_outlier() {
        let mut head = [0.0_f32; 64];
        head[5] = 600.0;
        hadamard(Tier::detect(), &mut head, 64);
        assert!(head.iter().all(|x| x.abs() == 75.0));
    }

    #[test]
    fn add_adds() {
        for length in LENGTHS {
            let (x, y) = (values(length, 6), values(length, 7));
            let out = assert_same_on_every_tier("add", |tier| {
                let mut x = x.clone();
                add(tier, &mut x, &y);
                x
            });
            assert!((0..length).all(|i| out[i] == x[i] + y[i]));
        }
    }
}
