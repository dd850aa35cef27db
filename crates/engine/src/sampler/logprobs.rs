//! Log-probabilities of tokens, as reported to clients.

use reef_kernels::dispatch::Tier;
use reef_kernels::logits;

use super::SCRATCH;
use super::candidates::Candidates;

/// Natural logarithm of the probability of `token` by `logits`, `[vocabulary]`, and (token, the same) of
/// the `count` likeliest tokens, likeliest first, ties by id. One token's value is the same number in both.
/// NaN where the logits are not finite; minus infinity for a token that the vocabulary lacks.
pub fn token_logprobs(logits: &[f32], token: u32, count: usize) -> (f32, Vec<(u32, f32)>) {
    SCRATCH.with_borrow_mut(|scratch| {
        of_token(Tier::detect(), logits, token, count, &mut scratch.candidates)
    })
}

pub(super) fn of_token(
    tier: Tier,
    row: &[f32],
    token: u32,
    count: usize,
    candidates: &mut Candidates,
) -> (f32, Vec<(u32, f32)>) {
    let best = logits::argmax(tier, row);
    let largest = row.get(best as usize).copied().unwrap_or(f32::NAN);
    if !largest.is_finite() {
        return (f32::NAN, Vec::new());
    }
    candidates.weigh(tier, row, largest, 1.0);
    let normalizer = f64::from(largest) + candidates.total().ln();
    let of = |token: u32| {
        let logit = row.get(token as usize).copied().unwrap_or(f32::NEG_INFINITY);
        (f64::from(logit) - normalizer) as f32
    };
    let top = candidates.likeliest(tier, row, count);
    (of(token), top.iter().map(|token| (*token, of(*token))).collect())
}
