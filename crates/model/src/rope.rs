//! Rotary position embedding: the frequencies of a model and the angles of a position.
//!
//! Su et al., arXiv 2104.09864. Scaling: linear (Chen et al., arXiv 2306.15595), per-frequency factors
//! (Llama 3's `rope_freqs.weight`), YaRN (Peng et al., arXiv 2309.00071) with ggml's conventions.

use reef_kernels::ops::RopeStyle;

/// How positions beyond the original training length are brought into range.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    /// Positions as they are.
    None,
    /// Positions divided by the factor.
    Linear {
        /// Extension factor, > 0.
        factor: f64,
    },
    /// Low frequencies interpolated, high ones kept, with a temperature on the angles.
    Yarn {
        /// Extension factor, > 0.
        factor: f64,
        /// Context length before the extension, in tokens.
        original_context: f64,
        /// Rotations above which a frequency is kept.
        beta_fast: f64,
        /// Rotations below which a frequency is interpolated.
        beta_slow: f64,
        /// Multiplier of the temperature.
        attention_factor: f64,
    },
}

/// Rotary embedding of a set of layers.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeSpec {
    /// Channels rotated; even, at most the head dimension.
    pub dim: usize,
    /// Base of the geometric progression of wavelengths.
    pub base: f64,
    /// Which channels form a pair.
    pub style: RopeStyle,
    /// Context extension.
    pub scaling: RopeScaling,
    /// Divisors of the `dim / 2` frequencies, if the model has them.
    pub factors: Option<Vec<f32>>,
}

/// Frequencies ready for use; angles are computed in f64 from integer positions, so that they do not
/// lose precision at positions of 10^7 (kv-memory point 14).
#[derive(Clone, Debug)]
pub struct Rope {
    /// Which channels form a pair.
    pub style: RopeStyle,
    /// Channels rotated.
    pub dim: usize,
    frequencies: Vec<f64>,
    magnitude: f64,
}

impl Rope {
    /// Frequencies of `spec`.
    pub fn new(spec: &RopeSpec) -> Rope {
        let pairs = spec.dim / 2;
        let magnitude = match spec.scaling {
            RopeScaling::Yarn { factor, attention_factor, .. } => {
                attention_factor * (1.0 + 0.1 * factor.ln())
            }
            _ => 1.0,
        };
        let frequencies = (0..pairs).map(|pair| frequency(spec, pair)).collect();
        Rope { style: spec.style, dim: spec.dim, frequencies, magnitude }
    }

    /// Floats that [`Rope::angles`] writes for a position.
    pub fn angle_len(&self) -> usize {
        self.dim
    }

    /// Writes `[cos; dim / 2]` then `[sin; dim / 2]` of `position` to `out` (`angle_len()` floats).
    pub fn angles(&self, position: u32, out: &mut [f32]) {
        let (cos, sin) = out.split_at_mut(self.frequencies.len());
        for ((c, s), frequency) in cos.iter_mut().zip(sin).zip(&self.frequencies) {
            let (sine, cosine) = (f64::from(position) * frequency).sin_cos();
            *c = (cosine * self.magnitude) as f32;
            *s = (sine * self.magnitude) as f32;
        }
    }
}

/// Angle per position of pair `pair`, in radians.
fn frequency(spec: &RopeSpec, pair: usize) -> f64 {
    let divisor = spec.factors.as_ref().map_or(1.0, |f| f64::from(f[pair]));
    let plain = spec.base.powf(-2.0 * pair as f64 / spec.dim as f64) / divisor;
    match spec.scaling {
        RopeScaling::None => plain,
        RopeScaling::Linear { factor } => plain / factor,
        RopeScaling::Yarn { factor, original_context, beta_fast, beta_slow, .. } => {
            let kept = yarn_kept_share(spec, original_context, beta_fast, beta_slow, pair);
            plain / factor * (1.0 - kept) + plain * kept
        }
    }
}

/// Share of the un-interpolated frequency in pair `pair`: 1 for fast pairs, 0 for slow ones, a linear
/// ramp between (YaRN, section 3.2).
fn yarn_kept_share(spec: &RopeSpec, context: f64, fast: f64, slow: f64, pair: usize) -> f64 {
    let dim = spec.dim as f64;
    let pair_of = |rotations: f64| {
        dim * (context / (rotations * 2.0 * std::f64::consts::PI)).ln() / (2.0 * spec.base.ln())
    };
    let low = pair_of(fast).floor().max(0.0);
    let high = pair_of(slow).ceil().min(dim - 1.0);
    let ramp = (pair as f64 - low) / (high - low).max(0.001);
    1.0 - ramp.clamp(0.0, 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(scaling: RopeScaling) -> RopeSpec {
        RopeSpec { dim: 64, base: 10_000.0, style: RopeStyle::Half, scaling, factors: None }
    }

    #[test]
    fn angles_hold_their_precision_at_ten_million() {
        let rope = Rope::new(&spec(RopeScaling::None));
        let mut out = [0.0; 64];
        rope.angles(10_000_000, &mut out);
        for pair in 0..32 {
            let angle = 1e7_f64 * 10_000f64.powf(-2.0 * pair as f64 / 64.0);
            assert!((f64::from(out[pair]) - angle.cos()).abs() < 1e-6);
            assert!((f64::from(out[32 + pair]) - angle.sin()).abs() < 1e-6);
        }
    }

    #[test]
    fn linear_scaling_divides_positions() {
        let (plain, scaled) = (
            Rope::new(&spec(RopeScaling::None)),
            Rope::new(&spec(RopeScaling::Linear { factor: 4.0 })),
        );
        let (mut a, mut b) = ([0.0; 64], [0.0; 64]);
        plain.angles(25, &mut a);
        scaled.angles(100, &mut b);
        assert!(a.iter().zip(&b).all(|(x, y)| (x - y).abs() < 1e-6));
    }

    #[test]
    fn yarn_keeps_fast_pairs_and_interpolates_slow_ones() {
        let yarn = RopeScaling::Yarn {
            factor: 4.0,
            original_context: 4096.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: 1.0,
        };
        let (plain, scaled) = (Rope::new(&spec(RopeScaling::None)), Rope::new(&spec(yarn)));
        assert_eq!(plain.frequencies[0], scaled.frequencies[0]);
        assert!((plain.frequencies[31] / scaled.frequencies[31] - 4.0).abs() < 1e-9);
        assert!((scaled.magnitude - (1.0 + 0.1 * 4f64.ln())).abs() < 1e-12);
    }
}
