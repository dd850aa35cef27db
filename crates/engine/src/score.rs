//! Teacher-forced scoring: the likelihood of a given text, through the pages that generation uses.

use reef_kv::{Fidelity, SequenceConfig};
use reef_model::runner::ModelRunner;

use crate::sampler::greedy;
use crate::session::{EngineError, Rules, Session};
use crate::step::roomy_pool;

/// What to score and under which treatment of KV memory.
pub struct ScoreOptions {
    /// Tokens of a window; windows do not overlap and the first token of each is not scored. With a
    /// token budget one window may be longer than the trained context.
    pub context: usize,
    /// Tokens of a block; as the runner was loaded with.
    pub block_size: usize,
    /// How KV memory gives way.
    pub rules: Rules,
    /// Score the same tokens with untouched f16 KV beside, and compare.
    pub compare: bool,
}

/// One scored token.
#[derive(Clone, Copy, Debug)]
pub struct TokenScore {
    /// Index in the text.
    pub index: usize,
    /// Negative log-likelihood in nats.
    pub nll: f64,
    /// Kullback-Leibler divergence from f16 KV to this treatment in nats, where compared.
    pub kld: Option<f64>,
    /// Whether the most likely token is that of f16 KV, where compared.
    pub same_top: Option<bool>,
}

/// What scoring left behind.
#[derive(Clone, Copy, Debug, Default)]
pub struct ScoreSummary {
    /// Tokens dropped, over all windows (token-layers / layers).
    pub dropped_tokens: f64,
}

/// Scores `ids` window by window and hands every score to `sink`.
///
/// Tokens are computed a block at a time, so that a row attends sealed blocks in their final format and
/// its own block in f16, exactly as in decode; untouched f16 KV is computed in larger chunks, which
/// gives the same bits.
///
/// # Errors
/// A token outside the vocabulary. The pool is sized so that memory never runs short.
pub fn score(
    runner: &mut ModelRunner,
    ids: &[u32],
    options: &ScoreOptions,
    sink: &mut dyn FnMut(TokenScore),
) -> Result<ScoreSummary, EngineError> {
    runner.check_tokens(ids)?; // a target is looked up a block before it is computed
    let plain = Rules::default();
    let mut summary = ScoreSummary::default();
    for (window, tokens) in ids.chunks(options.context).enumerate() {
        let kept = options.rules.token_budget.map_or(tokens.len(), |most| most.min(tokens.len()));
        let pool = roomy_pool(runner.spec(), options.block_size, kept)?;
        let reference_pool = roomy_pool(runner.spec(), options.block_size, tokens.len())?;
        let mut session = Session::new(&pool, &options.rules, config(runner, tokens.len()));
        let mut reference = Session::new(
            &reference_pool,
            &plain,
            SequenceConfig { contract: Fidelity::Exact, ..config(runner, tokens.len()) },
        );
        let mut expected = Vec::new();
        for (block, chunk) in tokens.chunks(options.block_size).enumerate() {
            let start = block * options.block_size;
            let rows: Vec<usize> = (0..chunk.len().min(tokens.len() - start - 1)).collect();
            if options.compare {
                reference.advance(runner, chunk)?;
                expected.clear();
                expected.extend_from_slice(runner.logits(&rows));
            }
            session.advance(runner, chunk)?;
            let logits = runner.logits(&rows);
            let vocabulary = logits.len() / rows.len().max(1);
            for row in rows {
                let logits = &logits[row * vocabulary..][..vocabulary];
                let target = tokens[start + row + 1];
                let expected = options.compare.then(|| &expected[row * vocabulary..][..vocabulary]);
                let index = window * options.context + start + row + 1;
                let scored = score_row(index, logits, target, expected);
                if !scored.nll.is_finite() {
                    return Err(EngineError::NotFinite { tokens: index });
                }
                sink(scored);
            }
        }
        summary.dropped_tokens += session.sequence().usage().dropped_tokens;
    }
    Ok(summary)
}

fn config(runner: &ModelRunner, tokens: usize) -> SequenceConfig {
    SequenceConfig {
        request: 0,
        contract: Fidelity::Evict,
        priority: 0,
        trained_context: runner.spec().trained_context,
        max_tokens: Some(tokens),
    }
}

fn score_row(index: usize, logits: &[f32], target: u32, expected: Option<&[f32]>) -> TokenScore {
    let normalizer = log_sum_exp(logits);
    let nll = normalizer - f64::from(logits[target as usize]);
    let kld = expected.map(|expected| {
        let from = log_sum_exp(expected);
        let terms = expected.iter().zip(logits).map(|(e, l)| {
            let log_p = f64::from(*e) - from;
            log_p.exp() * (log_p - (f64::from(*l) - normalizer))
        });
        terms.sum::<f64>().max(0.0)
    });
    let same_top = expected.map(|expected| greedy(expected) == greedy(logits));
    TokenScore { index, nll, kld, same_top }
}

fn log_sum_exp(logits: &[f32]) -> f64 {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|l| f64::from(*l - largest).exp()).sum();
    f64::from(largest) + sum.ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scores_follow_their_definitions() {
        let logits = [1.0, 2.0, 3.0];
        let sum = 1f64.exp() + 2f64.exp() + 3f64.exp();
        let scored = score_row(5, &logits, 1, Some(&logits));
        assert!((scored.nll - (sum.ln() - 2.0)).abs() < 1e-9);
        assert!(scored.kld.is_some_and(|kld| kld < 1e-12));
        assert_eq!(scored.same_top, Some(true));
        let other = score_row(5, &[3.0, 2.0, 1.0], 1, Some(&logits));
        let p = |x: f64| x.exp() / sum;
        let expected = p(1.0) * (1.0 - 3.0) + p(3.0) * (3.0 - 1.0);
        assert!((other.kld.unwrap() - expected).abs() < 1e-6);
        assert_eq!(other.same_top, Some(false));
    }
}
