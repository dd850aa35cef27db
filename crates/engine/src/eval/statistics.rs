//! Estimates with their uncertainty: what a measurement may claim.

/// Two-sided error of every interval here: 95 % intervals.
const NORMAL_QUANTILE: f64 = 1.959963984540054;

/// Fewest batches that an interval of batch means is made from.
const BATCHES_MIN: usize = 8;

/// An estimate with its 95 % confidence interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval {
    /// The estimate.
    pub mean: f64,
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
}

impl Interval {
    /// The interval of a rising function of the estimated quantity.
    pub fn map(self, rising: impl Fn(f64) -> f64) -> Interval {
        Interval { mean: rising(self.mean), low: rising(self.low), high: rising(self.high) }
    }
}

/// Arithmetic mean; 0 for no values.
pub fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

/// Mean of a correlated series with a 95 % interval by the method of non-overlapping batch means (Law
/// and Kelton, "Simulation Modeling and Analysis", 9.5.3): the means of consecutive batches of
/// `batch` values are nearly independent where `batch` is long against the correlation, and Student's
/// t with (batches - 1) degrees of freedom gives the interval. `None` with fewer than eight batches.
///
/// Chosen over a block bootstrap, which answers the same question with random resampling: this is
/// exact for independent normal batches, the same on every run, and a slow drift inside a window (the
/// error of a compressed cache grows with depth) widens it, so it errs to the safe side. The last,
/// shorter batch counts for the mean and not for the spread.
pub fn batch_means(values: &[f64], batch: usize) -> Option<Interval> {
    let means: Vec<f64> = values.chunks_exact(batch.max(1)).map(mean).collect();
    let count = means.len();
    if count < BATCHES_MIN {
        return None;
    }
    let center = mean(&means);
    let squares: f64 = means.iter().map(|value| (value - center).powi(2)).sum();
    let standard_error = (squares / ((count - 1) * count) as f64).sqrt();
    let half = student_quantile(count - 1) * standard_error;
    let mean = mean(values);
    Some(Interval { mean, low: mean - half, high: mean + half })
}

/// The 0.975 quantile of Student's t with `freedom` >= 7 degrees of freedom, by the Cornish-Fisher
/// expansion around the normal quantile (Abramowitz and Stegun 26.7.5); within 2e-4 of the tables.
fn student_quantile(freedom: usize) -> f64 {
    let z = NORMAL_QUANTILE;
    let n = freedom as f64;
    let z2 = z * z;
    let first = (z2 + 1.0) / 4.0;
    let second = ((5.0 * z2 + 16.0) * z2 + 3.0) / 96.0;
    let third = (((3.0 * z2 + 19.0) * z2 + 17.0) * z2 - 15.0) / 384.0;
    let fourth = ((((79.0 * z2 + 776.0) * z2 + 1482.0) * z2 - 1920.0) * z2 - 945.0) / 92160.0;
    z * (1.0 + first / n + second / n.powi(2) + third / n.powi(3) + fourth / n.powi(4))
}

/// The share `hits / trials` with Wilson's 95 % score interval (Wilson 1927), which stays within 0 and
/// 1 and holds its level near both ends, where the usual one collapses. No trials say nothing: 0 to 1.
pub fn wilson(hits: usize, trials: usize) -> Interval {
    if trials == 0 {
        return Interval { mean: 0.0, low: 0.0, high: 1.0 };
    }
    let n = trials as f64;
    let share = hits as f64 / n;
    let z2 = NORMAL_QUANTILE * NORMAL_QUANTILE;
    let center = (share + z2 / (2.0 * n)) / (1.0 + z2 / n);
    let spread = share * (1.0 - share) / n + z2 / (4.0 * n * n);
    let half = NORMAL_QUANTILE / (1.0 + z2 / n) * spread.sqrt();
    Interval { mean: share, low: (center - half).max(0.0), high: (center + half).min(1.0) }
}

/// The smallest value that at least `share` of the values do not exceed (nearest rank); 0 for none.
pub fn quantile(values: &[f64], share: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.clamp(1, sorted.len().max(1)) - 1).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampler::SplitMix64;

    #[test]
    fn quantiles_of_t_are_those_of_the_tables() {
        let tables = [(7, 2.364624), (10, 2.228139), (30, 2.042272), (120, 1.979930)];
        for (freedom, expected) in tables {
            let found = student_quantile(freedom);
            assert!((found - expected).abs() < 2e-4, "{freedom}: {found}, {expected}");
        }
        assert!((student_quantile(1_000_000) - NORMAL_QUANTILE).abs() < 1e-5);
    }

    #[test]
    fn batch_means_of_constant_batches_have_a_closed_form() {
        // Batches of four equal values 0 to 8: the means' variance is 7.5, the standard error
        // sqrt(7.5 / 9), the half width that times t(8) = 2.306004.
        let values: Vec<f64> = (0..36).map(|index| (index / 4) as f64).collect();
        let interval = batch_means(&values, 4).unwrap();
        let half = 2.306004 * (7.5f64 / 9.0).sqrt();
        assert!((interval.mean - 4.0).abs() < 1e-12);
        assert!((interval.high - 4.0 - half).abs() < 3e-4, "{interval:?}");
        assert!((interval.low + interval.high - 8.0).abs() < 1e-12);
        assert_eq!(batch_means(&values, 5), None);
        let same = batch_means(&[0.25; 64], 8).unwrap();
        assert_eq!((same.low, same.high), (0.25, 0.25));
    }

    /// A series whose every value is repeated r times has standard error sqrt(r) times that of r times
    /// as many independent ones; intervals that ignore it would be too narrow by that factor.
    #[test]
    fn correlation_widens_the_interval() {
        let mut random = SplitMix64(7);
        let independent: Vec<f64> = (0..512).map(|_| random.unit()).collect();
        let repeated: Vec<f64> =
            independent.iter().flat_map(|value| std::iter::repeat_n(*value, 16)).collect();
        let width = |batch| {
            let interval = batch_means(&repeated, batch).unwrap();
            interval.high - interval.low
        };
        let ratio = width(64) / width(1);
        // A standard deviation from 128 means is uncertain by 6 %.
        assert!((3.3..4.7).contains(&ratio), "{ratio}, expected sqrt(16)");
    }

    /// Nineteen of twenty intervals hold the true mean.
    #[test]
    fn intervals_hold_their_level() {
        let mut random = SplitMix64(7);
        let runs = 2000;
        let held = (0..runs).filter(|_| {
            // An autoregressive series with mean 0 and correlation 0.5.
            let mut last = 0.0;
            let series: Vec<f64> = (0..640)
                .map(|_| {
                    last = 0.5 * last + random.unit() + random.unit() + random.unit() - 1.5;
                    last
                })
                .collect();
            let interval = batch_means(&series, 32).unwrap();
            interval.low <= 0.0 && interval.high >= 0.0
        });
        let share = held.count() as f64 / runs as f64;
        assert!((0.93..0.97).contains(&share), "{share}");
    }

    #[test]
    fn wilson_has_the_published_values() {
        // Newcombe 1998, table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29.
        let published = [
            (81, 263, 0.2553, 0.3662),
            (15, 148, 0.0624, 0.1605),
            (0, 20, 0.0, 0.1611),
            (1, 29, 0.0061, 0.1718),
        ];
        for (hits, trials, low, high) in published {
            let found = wilson(hits, trials);
            let close = (found.low - low).abs() < 6e-5 && (found.high - high).abs() < 6e-5;
            assert!(close, "{hits} of {trials}: {found:?}");
        }
        assert_eq!(wilson(0, 0), Interval { mean: 0.0, low: 0.0, high: 1.0 });
    }

    #[test]
    fn quantiles_are_nearest_ranks() {
        let values: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        assert_eq!(
            [0.0, 0.5, 0.99, 1.0].map(|share| quantile(&values, share)),
            [1.0, 50.0, 99.0, 100.0]
        );
        assert_eq!(quantile(&[], 0.5), 0.0);
    }
}
