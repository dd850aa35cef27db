//! How far rows of logits are from one reference row, whose probabilities are worked out once.

use crate::logits::log_sum_exp;
use crate::sampler::greedy;

/// A row of logits that others are compared with.
pub(crate) struct ReferenceRow {
    /// Logarithm of the sum of exponentials.
    normalizer: f64,
    /// Likeliest token.
    top: u32,
    /// Negative log-likelihood of the target in nats.
    pub nll: f64,
}

/// What a row says of its target, and how it differs from the reference.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct RowScore {
    /// Negative log-likelihood of the target in nats.
    pub nll: f64,
    /// Kullback-Leibler divergence from the reference to this row in nats.
    pub kld: f64,
    /// Whether the likeliest token is the same.
    pub same_top: bool,
}

impl ReferenceRow {
    /// Reads `logits`, whose next token is `target`, and leaves their probabilities in `probabilities`.
    pub fn new(logits: &[f32], target: u32, probabilities: &mut [f32]) -> ReferenceRow {
        let normalizer = log_sum_exp(logits);
        for (probability, logit) in probabilities.iter_mut().zip(logits) {
            *probability = ((f64::from(*logit) - normalizer) as f32).exp();
        }
        let nll = normalizer - f64::from(logits[target as usize]);
        ReferenceRow { normalizer, top: greedy(logits), nll }
    }

    /// Compares `logits` with this row, whose own logits are `reference`.
    ///
    /// KLD = sum p (log p - log q) = sum p (reference - logits) - (their normalizers' difference): the
    /// small differences are summed, not the large logs.
    pub fn compare(
        &self,
        reference: &[f32],
        probabilities: &[f32],
        logits: &[f32],
        target: u32,
    ) -> RowScore {
        let normalizer = log_sum_exp(logits);
        let terms = reference.iter().zip(logits).zip(probabilities);
        let shift: f64 =
            terms.map(|((r, l), p)| f64::from(*p) * (f64::from(*r) - f64::from(*l))).sum();
        RowScore {
            nll: normalizer - f64::from(logits[target as usize]),
            kld: (shift - (self.normalizer - normalizer)).max(0.0),
            same_top: greedy(logits) == self.top,
        }
    }
}

/// Negative log-likelihood of `target` in nats.
pub(crate) fn nll(logits: &[f32], target: u32) -> f64 {
    log_sum_exp(logits) - f64::from(logits[target as usize])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::logits::kl_divergence;

    #[test]
    fn a_row_does_not_differ_from_itself() {
        let logits = [1.0, 2.0, 3.0];
        let mut probabilities = [0.0; 3];
        let row = ReferenceRow::new(&logits, 1, &mut probabilities);
        let same = row.compare(&logits, &probabilities, &logits, 1);
        let sum = 1f64.exp() + 2f64.exp() + 3f64.exp();
        assert!((row.nll - (sum.ln() - 2.0)).abs() < 1e-12);
        assert_eq!(same, RowScore { nll: row.nll, kld: 0.0, same_top: true });
        assert_eq!(nll(&logits, 1), row.nll);
    }

    #[test]
    fn divergence_follows_its_definition() {
        let (reference, logits) = ([1.0f32, 2.0, 3.0], [3.0f32, 2.0, 1.0]);
        let mut probabilities = [0.0; 3];
        let row = ReferenceRow::new(&reference, 1, &mut probabilities);
        let expected = kl_divergence(&reference, &logits);
        let found = row.compare(&reference, &probabilities, &logits, 1);
        assert!((found.kld - expected).abs() < 1e-6, "{found:?}, {expected}");
        assert!(!found.same_top);
    }

    /// Small divergences of large vocabularies, where large logs would cancel.
    #[test]
    fn small_divergences_are_not_lost() {
        let wave = |i: usize, by: f64| ((i as f64 * by).sin() * 8.0) as f32;
        let reference: Vec<f32> = (0..50_000).map(|i| wave(i, 0.37)).collect();
        let logits: Vec<f32> =
            reference.iter().enumerate().map(|(i, r)| r + wave(i, 1.1) * 1e-3).collect();
        let mut probabilities = vec![0.0; reference.len()];
        let row = ReferenceRow::new(&reference, 7, &mut probabilities);
        let found = row.compare(&reference, &probabilities, &logits, 7).kld;
        let expected = kl_divergence(&reference, &logits);
        assert!(expected > 1e-6 && (found / expected - 1.0).abs() < 0.01, "{found}, {expected}");
    }
}
