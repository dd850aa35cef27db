//! What steps, swaps and recomputation cost: measured values that decisions are made with.

use crate::executor::StepCosts;

/// Weight of a new measurement against the running mean.
const LEARNING_RATE: f64 = 0.05;
/// Factor by which a measurement may differ from what was expected and still be learnt from whole: a
/// machine that stands still for a moment must not stop the engine's prefill.
const OUTLIER_FACTOR: f64 = 3.0;

/// Rows of prefill and decode in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StepRows {
    pub decode: usize,
    pub prefill: usize,
}

/// Running estimates. Their inputs are events (what the executor and the spill store measured), so that a
/// log replays to the same decisions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CostModel {
    costs: StepCosts,
    spill_bytes_per_us: f64,
}

impl CostModel {
    pub(crate) fn new(costs: StepCosts, spill_bytes_per_second: f64) -> CostModel {
        CostModel { costs, spill_bytes_per_us: spill_bytes_per_second / 1e6 }
    }

    /// What steps cost now.
    pub(crate) fn costs(&self) -> StepCosts {
        self.costs
    }

    /// Microseconds of a step.
    pub(crate) fn step_us(&self, rows: StepRows) -> f64 {
        let StepCosts { base_us, row_us, prefill_token_us } = self.costs;
        base_us
            + row_us * rows.decode.saturating_sub(1) as f64
            + prefill_token_us * rows.prefill as f64
    }

    /// Prefill tokens that a step of `decode` rows takes beside them within `limit_us`.
    pub(crate) fn prefill_tokens(&self, decode: usize, limit_us: f64) -> usize {
        let left = limit_us - self.step_us(StepRows { decode, prefill: 0 });
        (left / self.costs.prefill_token_us.max(1e-3)).max(0.0) as usize
    }

    /// Learns from a step that took `elapsed_us`: all three costs move by the ratio that it took.
    pub(crate) fn learn_step(&mut self, rows: StepRows, elapsed_us: u64) {
        let expected = self.step_us(rows).max(1.0);
        let ratio = (elapsed_us as f64 / expected).clamp(1.0 / OUTLIER_FACTOR, OUTLIER_FACTOR);
        let factor = 1.0 + LEARNING_RATE * (ratio - 1.0);
        let StepCosts { base_us, row_us, prefill_token_us } = &mut self.costs;
        if rows.prefill > rows.decode {
            *prefill_token_us *= factor;
        } else {
            *base_us *= factor;
            *row_us *= factor;
        }
    }

    /// Learns from a piece of I/O.
    pub(crate) fn learn_spill(&mut self, bytes: usize, elapsed_us: u64) {
        let seen = bytes as f64 / (elapsed_us.max(1)) as f64;
        let expected = self.spill_bytes_per_us;
        let seen = seen.clamp(expected / OUTLIER_FACTOR, expected * OUTLIER_FACTOR);
        self.spill_bytes_per_us += LEARNING_RATE * 4.0 * (seen - expected);
    }

    /// Microseconds to store `bytes` and load them again.
    pub(crate) fn swap_us(&self, bytes: usize) -> f64 {
        2.0 * bytes as f64 / self.spill_bytes_per_us
    }

    /// Microseconds to compute `tokens` again.
    pub(crate) fn recompute_us(&self, tokens: usize) -> f64 {
        self.costs.prefill_token_us * tokens as f64
    }

    /// Decode rows at which the arithmetic of the rows takes as long as reading the weights: the ridge of
    /// the roofline. Beyond it more rows bring less and less.
    pub(crate) fn ridge_rows(&self) -> usize {
        let StepCosts { base_us, row_us, .. } = self.costs;
        ((base_us / row_us.max(1e-3)) as usize).max(1)
    }

    /// Decode rows at which a step takes `limit_us`; at least 1.
    pub(crate) fn rows_within(&self, limit_us: f64) -> usize {
        let StepCosts { base_us, row_us, .. } = self.costs;
        1 + ((limit_us - base_us) / row_us.max(1e-3)).max(0.0) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model() -> CostModel {
        let costs = StepCosts { base_us: 2000.0, row_us: 250.0, prefill_token_us: 500.0 };
        CostModel::new(costs, 1e9)
    }

    #[test]
    fn estimates_follow_the_formula() {
        let model = model();
        assert_eq!(model.step_us(StepRows { decode: 9, prefill: 0 }), 4000.0);
        assert_eq!(model.prefill_tokens(9, 8000.0), 8);
        assert_eq!(model.prefill_tokens(9, 100.0), 0);
        assert_eq!(model.ridge_rows(), 8);
        assert_eq!(model.rows_within(4000.0), 9);
        assert_eq!(model.rows_within(1.0), 1);
        assert_eq!(model.swap_us(1_000_000), 2000.0);
        assert_eq!(model.recompute_us(4), 2000.0);
    }

    #[test]
    fn measurements_move_estimates_slowly_and_not_without_bound() {
        let mut model = model();
        for _ in 0..200 {
            model.learn_step(StepRows { decode: 1, prefill: 0 }, 4000);
        }
        assert!((3900.0..4001.0).contains(&model.step_us(StepRows { decode: 1, prefill: 0 })));
        model.learn_step(StepRows { decode: 1, prefill: 0 }, 4_000_000);
        assert!(model.costs().base_us < 4500.0);
        model.learn_spill(1_000_000, 2000);
        assert!(model.swap_us(1_000_000) > 2000.0);
    }
}
