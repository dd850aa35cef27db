//! Log-probabilities of tokens, as reported to clients and as beams are ranked by.

use reef_kernels::dispatch::Tier;
use reef_kernels::logits;

use super::candidates::Candidates;
use super::{NoToken, SCRATCH};

/// Natural logarithm of the probability of `token` by `logits`, `[vocabulary]`, and (token, the same) of
/// the `count` likeliest tokens, likeliest first, ties by id. One token's value is the same number in both.
/// NaN where the logits are not finite; minus infinity for a token that the vocabulary lacks.
pub fn token_logprobs(logits: &[f32], token: u32, count: usize) -> (f32, Vec<(u32, f32)>) {
    SCRATCH.with_borrow_mut(|scratch| {
        of_token(Tier::detect(), logits, token, count, &mut scratch.candidates)
    })
}

/// (token, natural logarithm of its probability) of the `count` likeliest tokens by `logits`, likeliest
/// first, ties by id; fewer where fewer are possible.
///
/// # Errors
/// [`NoToken::NotFinite`] where a logit is NaN and none is finite, or one is plus infinity. Where all are
/// minus infinity, nothing is possible and the list is empty.
pub fn likeliest_logprobs(logits: &[f32], count: usize) -> Result<Vec<(u32, f64)>, NoToken> {
    SCRATCH.with_borrow_mut(|scratch| {
        let (tier, candidates) = (Tier::detect(), &mut scratch.candidates);
        let Some(normalizer) = normalizer(tier, logits, candidates) else {
            let barred = logits.iter().all(|logit| *logit == f32::NEG_INFINITY);
            return if barred { Ok(Vec::new()) } else { Err(NoToken::NotFinite) };
        };
        let of = |token: &u32| (*token, f64::from(logits[*token as usize]) - normalizer);
        Ok(candidates.likeliest(tier, logits, count).iter().map(of).collect())
    })
}

pub(super) fn of_token(
    tier: Tier,
    row: &[f32],
    token: u32,
    count: usize,
    candidates: &mut Candidates,
) -> (f32, Vec<(u32, f32)>) {
    let Some(normalizer) = normalizer(tier, row, candidates) else {
        return (f32::NAN, Vec::new());
    };
    let of = |token: u32| {
        let logit = row.get(token as usize).copied().unwrap_or(f32::NEG_INFINITY);
        (f64::from(logit) - normalizer) as f32
    };
    let top = candidates.likeliest(tier, row, count);
    (of(token), top.iter().map(|token| (*token, of(*token))).collect())
}

/// `ln Σ e^logit`; `None` where it is not finite.
fn normalizer(tier: Tier, row: &[f32], candidates: &mut Candidates) -> Option<f64> {
    let best = logits::argmax(tier, row);
    let largest = row.get(best as usize).copied().filter(|logit| logit.is_finite())?;
    candidates.weigh(tier, row, largest, 1.0);
    Some(f64::from(largest) + candidates.total().ln())
}
