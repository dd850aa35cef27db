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
    /// Tokens attended, summed over all rows.
    pub context: usize,
}

impl StepRows {
    /// `rows` decode rows and no others, each behind `context` tokens.
    pub(crate) fn decode(rows: usize, context: usize) -> StepRows {
        StepRows { decode: rows, prefill: 0, context: rows * context }
    }
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
        let StepCosts { base_us, row_us, prefill_token_us, context_us } = self.costs;
        base_us
            + row_us * rows.decode.saturating_sub(1) as f64
            + prefill_token_us * rows.prefill as f64
            + context_us * rows.context as f64
    }

    /// Prefill tokens behind `position` tokens that take `left_us`; any number where that is infinite.
    pub(crate) fn prefill_tokens(&self, position: usize, left_us: f64) -> usize {
        if left_us == f64::INFINITY {
            return usize::MAX;
        }
        let StepCosts { prefill_token_us, context_us, .. } = self.costs;
        let tokens =
            |behind: f64| left_us.max(0.0) / (prefill_token_us + context_us * behind).max(1e-3);
        // Each attends the ones before it in the chunk too.
        let most = tokens(position as f64);
        tokens(position as f64 + most / 2.0) as usize
    }

    /// Learns from a step that took `elapsed_us`. One without prefill tells how fast the machine is now; what
    /// one with prefill took beyond its decodes tells what prefill costs.
    pub(crate) fn learn_step(&mut self, rows: StepRows, elapsed_us: u64) {
        let expected = self.step_us(rows).max(1.0);
        let prefill_us = self.costs.prefill_token_us * rows.prefill as f64;
        let (seen, expected) = match rows.prefill {
            0 => (elapsed_us as f64, expected),
            _ => (elapsed_us as f64 - expected + prefill_us, prefill_us.max(1.0)),
        };
        let ratio = (seen / expected).clamp(1.0 / OUTLIER_FACTOR, OUTLIER_FACTOR);
        let factor = 1.0 + LEARNING_RATE * (ratio - 1.0);
        let StepCosts { base_us, row_us, prefill_token_us, context_us } = &mut self.costs;
        match rows.prefill {
            0 => [base_us, row_us, context_us].into_iter().for_each(|cost| *cost *= factor),
            // Never free: what a deep context makes cheap is not cheap at the beginning of the next.
            _ => *prefill_token_us = (*prefill_token_us * factor).max(*row_us / 8.0),
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
        let context = tokens * tokens / 2;
        self.costs.prefill_token_us * tokens as f64 + self.costs.context_us * context as f64
    }

    /// Decode rows, each behind `context` tokens, that take `multiple` times as long as reading the weights
    /// does. Where that is once, it is the ridge of the roofline; beyond it more rows bring less and less.
    pub(crate) fn ridge_rows(&self, context: f64, multiple: f64) -> usize {
        ((multiple * self.costs.base_us / self.each_us(context)) as usize).max(1)
    }

    /// Decode rows, each behind `context` tokens, at which a step takes `limit_us`; at least 1.
    pub(crate) fn rows_within(&self, context: f64, limit_us: f64) -> usize {
        let left_us = limit_us - self.costs.base_us + self.costs.row_us;
        ((left_us / self.each_us(context)).max(0.0) as usize).max(1)
    }

    /// Microseconds of a decode row behind `context` tokens.
    fn each_us(&self, context: f64) -> f64 {
        (self.costs.row_us + self.costs.context_us * context).max(1e-3)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model() -> CostModel {
        let costs =
            StepCosts { base_us: 2000.0, row_us: 250.0, prefill_token_us: 500.0, context_us: 0.5 };
        CostModel::new(costs, 1e9)
    }

    #[test]
    fn estimates_follow_the_formula() {
        let model = model();
        assert_eq!(model.step_us(StepRows::decode(9, 0)), 4000.0);
        assert_eq!(model.step_us(StepRows::decode(9, 1000)), 8500.0);
        assert_eq!(model.prefill_tokens(0, 4000.0), 7);
        assert_eq!(model.prefill_tokens(3000, 4000.0), 1);
        assert_eq!(model.prefill_tokens(0, -100.0), 0);
        assert_eq!(model.prefill_tokens(7, f64::INFINITY), usize::MAX);
        assert_eq!(model.ridge_rows(0.0, 1.0), 8);
        assert_eq!(model.ridge_rows(1500.0, 4.0), 8);
        assert_eq!(model.rows_within(0.0, 4000.0), 9);
        assert_eq!(model.rows_within(1000.0, 4000.0), 3);
        assert_eq!(model.rows_within(0.0, 1.0), 1);
        assert_eq!(model.swap_us(1_000_000), 2000.0);
        assert_eq!(model.recompute_us(4), 2004.0);
    }

    #[test]
    fn measurements_move_estimates_slowly_and_not_without_bound() {
        let mut model = model();
        let one = StepRows::decode(1, 0);
        for _ in 0..200 {
            model.learn_step(one, 4000);
        }
        assert!((3900.0..4001.0).contains(&model.step_us(one)));
        model.learn_step(one, 4_000_000);
        assert!(model.costs().base_us < 4500.0);
        let mixed = StepRows { decode: 4, prefill: 2, context: 4000 };
        let before = model.costs();
        model.learn_step(mixed, 80_000);
        let after = model.costs();
        assert!(after.prefill_token_us > before.prefill_token_us);
        assert_eq!(
            StepCosts { prefill_token_us: 0.0, ..after },
            StepCosts { prefill_token_us: 0.0, ..before }
        );
        model.learn_spill(1_000_000, 2000);
        assert!(model.swap_us(1_000_000) > 2000.0);
    }
}
