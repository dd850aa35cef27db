//! Logits as probability distributions. Sums run in f64.

/// `ln Σ e^logit`.
pub fn log_sum_exp(logits: &[f32]) -> f64 {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|logit| f64::from(*logit - largest).exp()).sum();
    f64::from(largest) + sum.ln()
}

/// Kullback-Leibler divergence in nats from the distribution of `expected` to that of `found`, two rows
/// of one vocabulary: `Σ p (ln p - ln q)`. Not negative; NaN where a logit is not finite.
pub fn kl_divergence(expected: &[f32], found: &[f32]) -> f64 {
    let (from, to) = (log_sum_exp(expected), log_sum_exp(found));
    let terms = expected.iter().zip(found).map(|(expected, found)| {
        let log_p = f64::from(*expected) - from;
        log_p.exp() * (log_p - (f64::from(*found) - to))
    });
    let sum: f64 = terms.sum();
    // Rounding may bring a sum of nothing below 0; a NaN stays.
    if sum < 0.0 { 0.0 } else { sum }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divergence_follows_its_definition() {
        let (a, b) = ([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]);
        let sum = 1f64.exp() + 2f64.exp() + 3f64.exp();
        assert!((log_sum_exp(&a) - sum.ln()).abs() < 1e-12);
        let p = |x: f64| x.exp() / sum;
        let expected = p(1.0) * (1.0 - 3.0) + p(3.0) * (3.0 - 1.0);
        assert!((kl_divergence(&a, &b) - expected).abs() < 1e-12);
        assert_eq!(kl_divergence(&a, &a), 0.0);
        assert!(kl_divergence(&a, &[1.0, f32::NAN, 3.0]).is_nan());
    }

    #[test]
    fn large_logits_do_not_overflow() {
        assert!((log_sum_exp(&[1e4, 1e4]) - (1e4 + 2f64.ln())).abs() < 1e-9);
        assert!(kl_divergence(&[1e4, 0.0], &[0.0, 1e4]) > 9e3);
    }
}
