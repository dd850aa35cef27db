//! Scores of one treatment, gathered, and what they say.

use super::statistics::{Interval, batch_means, mean, quantile};
use crate::score::TokenScore;

/// Fewest tokens of a batch of [`batch_means`]: a paragraph.
const BATCH_TOKENS_MIN: usize = 128;
/// Most batches: more buy no power worth having (Schmeiser, "Batch size effects in the analysis of
/// simulation output", 1982), fewer and longer ones see slow drifts.
const BATCHES_MAX: usize = 30;

/// Tokens of a batch for `tokens` scored ones.
///
/// Measured on SmolLM2: paired differences of int4 and f16 KV hardly correlate (below 0.04 at every lag;
/// standard error 0.0025 nats with batches of 1, 0.0026 with 128), but those of two policies differ from
/// passage to passage (0.009 with batches of 1, 0.013 with 128, 0.021 with 512).
pub fn batch_tokens(tokens: usize) -> usize {
    tokens.div_ceil(BATCHES_MAX).max(BATCH_TOKENS_MIN)
}

/// Scores of one treatment in the order of the text, beside those of its reference where compared.
#[derive(Clone, Debug, Default)]
pub struct Comparison {
    /// Negative log-likelihoods in nats.
    pub nll: Vec<f64>,
    /// Those of the reference, of the same tokens; empty where not compared.
    pub reference_nll: Vec<f64>,
    /// Divergences from the reference in nats; empty where not compared.
    pub kld: Vec<f64>,
    /// Tokens whose likeliest next token is that of the reference.
    pub same_top: usize,
}

impl Comparison {
    /// Adds a scored token.
    pub fn add(&mut self, scored: &TokenScore) {
        self.nll.push(scored.nll);
        self.reference_nll.extend(scored.reference_nll);
        self.kld.extend(scored.kld);
        self.same_top += usize::from(scored.same_top == Some(true));
    }

    /// Tokens scored.
    pub fn tokens(&self) -> usize {
        self.nll.len()
    }

    /// Mean negative log-likelihood in nats.
    pub fn mean_nll(&self) -> f64 {
        mean(&self.nll)
    }

    /// Mean negative log-likelihood less that of the reference, token by token. The mean stands alone
    /// (its interval is empty) where the text is too short for one. `None` where not compared.
    pub fn nll_difference(&self) -> Option<Difference> {
        Difference::of(&self.nll, &self.reference_nll)
    }

    /// Mean divergence in nats, with its interval where the text is long enough.
    pub fn mean_kld(&self) -> Option<Difference> {
        (!self.kld.is_empty()).then(|| Difference {
            mean: mean(&self.kld),
            interval: batch_means(&self.kld, batch_tokens(self.kld.len())),
        })
    }

    /// The divergence that 99 % of tokens do not exceed, in nats.
    pub fn kld_p99(&self) -> Option<f64> {
        (!self.kld.is_empty()).then(|| quantile(&self.kld, 0.99))
    }

    /// Share of tokens whose likeliest next token is that of the reference.
    pub fn top1_agreement(&self) -> Option<f64> {
        (!self.kld.is_empty()).then(|| self.same_top as f64 / self.tokens() as f64)
    }
}

/// A mean with its 95 % interval, where there are enough values for one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Difference {
    /// The mean.
    pub mean: f64,
    /// The interval around it.
    pub interval: Option<Interval>,
}

impl Difference {
    /// Mean of `values[i] - reference[i]`. `None` where nothing is compared.
    ///
    /// # Panics
    /// If the two are of different length: they would not be of the same tokens.
    pub fn of(values: &[f64], reference: &[f64]) -> Option<Difference> {
        if reference.is_empty() {
            return None;
        }
        assert_eq!(values.len(), reference.len(), "both sides score the same tokens");
        let differences: Vec<f64> = values.iter().zip(reference).map(|(a, b)| a - b).collect();
        Some(Difference {
            mean: mean(&differences),
            interval: batch_means(&differences, batch_tokens(differences.len())),
        })
    }

    /// The same of a rising function of it.
    pub fn map(self, rising: impl Fn(f64) -> f64) -> Difference {
        Difference {
            mean: rising(self.mean),
            interval: self.interval.map(|interval| interval.map(&rising)),
        }
    }

    /// A difference of mean NLL as a change of perplexity in percent.
    pub fn ppl_percent(self) -> Difference {
        self.map(|nats| nats.exp_m1() * 100.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_paired() {
        // Values vary by hundreds from token to token, their differences by nothing.
        let reference: Vec<f64> = (0..1280).map(|index| (index % 97) as f64 * 7.0).collect();
        let values: Vec<f64> = reference.iter().map(|value| value + 0.5).collect();
        let difference = Difference::of(&values, &reference).unwrap();
        let interval = difference.interval.unwrap();
        assert!((difference.mean - 0.5).abs() < 1e-9 && interval.high - interval.low < 1e-9);
        let percent = difference.ppl_percent();
        assert!((percent.mean - (0.5f64.exp() - 1.0) * 100.0).abs() < 1e-9);
        assert_eq!(Difference::of(&values, &[]), None);
    }

    #[test]
    fn batches_are_long_and_never_many() {
        assert_eq!([100, 3840, 16_384, 163_840].map(batch_tokens), [128, 128, 547, 5462]);
        assert!((1..200_000).step_by(997).all(|n| n / batch_tokens(n) <= BATCHES_MAX));
    }

    #[test]
    fn short_texts_have_no_interval() {
        let score = |nll| TokenScore {
            index: 1,
            nll,
            reference_nll: Some(1.0),
            kld: Some(0.25),
            same_top: Some(nll < 2.0),
        };
        let mut comparison = Comparison::default();
        [1.0, 3.0].iter().for_each(|nll| comparison.add(&score(*nll)));
        let difference = comparison.nll_difference().unwrap();
        assert_eq!((difference.mean, difference.interval), (1.0, None));
        assert_eq!(comparison.top1_agreement(), Some(0.5));
        assert_eq!(comparison.kld_p99(), Some(0.25));
        assert_eq!(comparison.tokens(), 2);
    }
}
