//! The reference for a cache that keeps the most recent tokens: a window that is computed anew from
//! text every so many tokens ("sliding window with re-computation", arXiv 2309.17453).

use reef_model::runner::ModelRunner;

use super::lanes::endless;
use crate::config::{PREFILL_CHUNK_TOKENS, roomy_pool};
use crate::logits::log_sum_exp;
use crate::session::{EngineError, Rules, Session};

/// A window that is computed anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Restart {
    /// Tokens of the window, above `stride`.
    pub window: usize,
    /// Tokens scored with each; every score sees `window - stride` to `window - 1` tokens before it.
    pub stride: usize,
    /// Tokens of a block; as the runner was loaded with.
    pub block_size: usize,
}

/// Scores the tokens of `ids` from index `window - stride` on, with untouched f16 KV of a window that
/// begins anew every `stride` tokens: `sink(index in the text, negative log-likelihood in nats)`.
///
/// # Errors
/// A token outside the vocabulary; logits that are not finite.
pub fn score_re_encoded(
    runner: &mut ModelRunner,
    ids: &[u32],
    restart: &Restart,
    sink: &mut dyn FnMut(usize, f64),
) -> Result<(), EngineError> {
    runner.check_tokens(ids)?;
    let Restart { window, stride, block_size } = *restart;
    let (rules, width) = (Rules::default(), runner.spec().vocabulary);
    let pool = roomy_pool(runner.spec(), block_size, window)?;
    for start in (0..ids.len().saturating_sub(window - stride)).step_by(stride) {
        let tokens = &ids[start..ids.len().min(start + window)];
        let mut session = Session::new(&pool, &rules, endless(runner, 0, tokens.len()));
        // The last token is only a target.
        let computed = &tokens[..tokens.len() - 1];
        for (number, chunk) in computed.chunks(PREFILL_CHUNK_TOKENS).enumerate() {
            session.advance(runner, chunk)?;
            let first = number * PREFILL_CHUNK_TOKENS;
            let from = (window - stride - 1).max(first);
            let rows: Vec<usize> = (from..first + chunk.len()).map(|row| row - first).collect();
            if rows.is_empty() {
                continue;
            }
            let logits = runner.logits(&rows);
            for (row, logits) in rows.iter().zip(logits.chunks_exact(width)) {
                let target = first + row + 1;
                let nll = log_sum_exp(logits) - f64::from(logits[tokens[target] as usize]);
                if !nll.is_finite() {
                    return Err(EngineError::NotFinite { tokens: start + target });
                }
                sink(start + target, nll);
            }
        }
    }
    Ok(())
}
