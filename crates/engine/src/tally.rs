//! How values are spread: counts by fixed bounds, as a scrape of metrics wants them.

/// Seconds of a step.
pub const STEP_SECONDS: [f64; 12] =
    [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0];

/// Rows of a step: vLLM's bounds of `iteration_tokens`.
pub const STEP_ROWS: [f64; 13] =
    [1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0];

/// Counts of values by `N` upper bounds, ascending; what is above the last counts in `above`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tally<const N: usize> {
    /// The bounds, inclusive.
    pub bounds: &'static [f64; N],
    /// Values up to each bound and above the one before.
    pub counts: [u64; N],
    /// Values above the last bound.
    pub above: u64,
    /// Sum of all values.
    pub sum: f64,
}

impl<const N: usize> Tally<N> {
    /// No values.
    pub const fn new(bounds: &'static [f64; N]) -> Tally<N> {
        Tally { bounds, counts: [0; N], above: 0, sum: 0.0 }
    }

    /// Counts `value`.
    pub fn record(&mut self, value: f64) {
        let at = self.bounds.partition_point(|bound| *bound < value);
        *self.counts.get_mut(at).unwrap_or(&mut self.above) += 1;
        self.sum += value;
    }

    /// Values counted.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum::<u64>() + self.above
    }
}

/// Every step that has ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepTallies {
    /// Seconds, of the steps whose executor has measured them.
    pub seconds: Tally<{ STEP_SECONDS.len() }>,
    /// Rows computed: prefill, decode and drafts.
    pub rows: Tally<{ STEP_ROWS.len() }>,
}

impl Default for StepTallies {
    fn default() -> StepTallies {
        StepTallies { seconds: Tally::new(&STEP_SECONDS), rows: Tally::new(&STEP_ROWS) }
    }
}

impl StepTallies {
    pub(crate) fn record(&mut self, rows: usize, elapsed_us: Option<u64>) {
        self.rows.record(rows as f64);
        if let Some(elapsed_us) = elapsed_us {
            self.seconds.record(elapsed_us as f64 / 1e6);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_is_inclusive_and_nothing_is_lost_above_the_last() {
        let mut tally = Tally::new(&[1.0, 2.0]);
        [0.0, 1.0, 1.5, 2.0, 2.5, 9.0].into_iter().for_each(|value| tally.record(value));
        assert_eq!((tally.counts, tally.above), ([2, 2], 2));
        assert_eq!((tally.count(), tally.sum), (6, 16.0));
    }
}
