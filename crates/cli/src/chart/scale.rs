//! From values to places, and the values worth a tick.

/// How values are spread over an axis.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scale {
    /// Evenly from `low` to `high`.
    Linear {
        /// Value at the start of the axis.
        low: f64,
        /// Value at its end, above `low`.
        high: f64,
    },
    /// By the logarithm, from `low` to `high`, both above 0.
    Log {
        /// Value at the start of the axis.
        low: f64,
        /// Value at its end, above `low`.
        high: f64,
    },
}

impl Scale {
    /// A linear scale from 0 to a round number at or above every value.
    pub fn from_zero(values: impl Iterator<Item = f64>) -> Scale {
        let most = values.filter(|value| value.is_finite()).fold(0.0, f64::max);
        let high = if most > 0.0 { most } else { 1.0 };
        let step = round_step(high / 5.0);
        Scale::Linear { low: 0.0, high: (high / step).ceil() * step }
    }

    /// A logarithmic scale over the positive values, with a little room at both ends.
    pub fn log_around(values: impl Iterator<Item = f64>) -> Scale {
        let positive = values.filter(|value| value.is_finite() && *value > 0.0);
        let ends = positive.fold(None, |ends: Option<(f64, f64)>, value| {
            Some(ends.map_or((value, value), |(low, high)| (low.min(value), high.max(value))))
        });
        let (low, high) = ends.unwrap_or((0.1, 1.0));
        Scale::Log { low: low / 1.5, high: high * 1.5 }
    }

    /// Place of `value` along the axis: 0 at its start, 1 at its end, no further.
    pub fn place(&self, value: f64) -> f64 {
        let place = match *self {
            Scale::Linear { low, high } => (value - low) / (high - low),
            Scale::Log { low, high } => (value / low).ln() / (high / low).ln(),
        };
        if place.is_nan() { 0.0 } else { place.clamp(0.0, 1.0) }
    }

    /// Values that get a tick, in order: a handful, round.
    pub fn ticks(&self) -> Vec<f64> {
        match *self {
            Scale::Linear { low, high } => {
                let step = round_step((high - low) / 5.0);
                let first = (low / step).ceil() as i64;
                let last = (high / step + 1e-9).floor() as i64;
                (first..=last).map(|number| number as f64 * step).collect()
            }
            Scale::Log { low, high } => {
                let decades = (high / low).log10();
                let steps: &[f64] = match decades {
                    d if d > 2.5 => &[1.0],
                    d if d > 1.2 => &[1.0, 3.0],
                    _ => &[1.0, 2.0, 5.0],
                };
                let exponents = low.log10().floor() as i32..=high.log10().ceil() as i32;
                let of = |exponent: i32| steps.iter().map(move |step| step * 10f64.powi(exponent));
                exponents.flat_map(of).filter(|tick| (low..=high).contains(tick)).collect()
            }
        }
    }
}

/// The smallest of 1, 2, 2.5, 5 times a power of ten that is at least `step`.
fn round_step(step: f64) -> f64 {
    let power = 10f64.powf(step.log10().floor());
    let factors = [1.0, 2.0, 2.5, 5.0, 10.0];
    let found = factors.into_iter().find(|factor| factor * power >= step * (1.0 - 1e-9));
    found.unwrap_or(10.0) * power
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn linear_axes_end_at_a_round_number() {
        let scale = Scale::from_zero([3.0, 23_040.0].into_iter());
        assert_eq!(scale, Scale::Linear { low: 0.0, high: 25_000.0 });
        assert_eq!(scale.ticks(), [0.0, 5e3, 1e4, 1.5e4, 2e4, 2.5e4]);
        assert_eq!(scale.place(12_500.0), 0.5);
        assert_eq!(scale.place(1e9), 1.0);
    }

    #[test]
    fn logarithmic_axes_have_round_ticks() {
        let scale = Scale::log_around([1e-4, 0.3, 0.0, f64::NAN].into_iter());
        assert_eq!(
            scale.ticks().iter().map(|t| t.log10().round()).collect::<Vec<_>>(),
            [-4.0, -3.0, -2.0, -1.0]
        );
        assert!((scale.place((1e-4f64 * 0.3).sqrt()) - 0.5).abs() < 1e-9);
        assert_eq!(Scale::Log { low: 1.0, high: 12.0 }.ticks(), [1.0, 2.0, 5.0, 10.0]);
    }

    #[test]
    fn nothing_to_show_is_no_trouble() {
        for scale in [Scale::from_zero([].into_iter()), Scale::log_around([].into_iter())] {
            assert!(!scale.ticks().is_empty() && scale.place(f64::NAN) == 0.0);
        }
    }
}
