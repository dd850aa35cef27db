//! Speculation: cheap guesses of the next tokens are computed together with the last one, and kept as far
//! as they are what would have been sampled anyway.
//!
//! Each row is sampled as it always is, with one random number, whether or not a draft stood there. A draft
//! is kept while it equals the sampled token; the first sampled token that differs stands in its place. At
//! temperature 0 that is the longest prefix which greedy decoding would have chosen. Otherwise a draft `x`
//! is accepted with probability `p(x)`, and what replaces it is distributed as `p` without `x`, which is
//! rejection sampling (Leviathan et al., arXiv 2211.17192) for a drafter that puts all its mass on `x`.
//! So the output is the same with and without drafts, to the token.

mod draft_model;
mod ngram;
mod pace;

pub use draft_model::{DraftModel, DraftModelError, DraftModelOptions, LEAST_PROBABILITY};
pub use ngram::Ngram;
pub use pace::{DraftCosts, Room, SpeculationCounters, Speculator};

use crate::sampler::{NoToken, Sampled, Sampler};

/// Names a sequence that is being generated; never used again for another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RunKey(pub u64);

/// Guesses what comes next. A guess costs time when it is wrong and nothing else, so any failure of a
/// drafter is an empty guess.
pub trait Drafter: Send {
    /// Replaces `out` by at most `most` tokens that may follow `tokens`, which are all tokens of `run`,
    /// prompt included. Between two calls for a run, `tokens` normally only grows.
    fn draft(&mut self, run: RunKey, tokens: &[u32], most: usize, out: &mut Vec<u32>);

    /// `run` will not be asked for again: what was kept for it is given back.
    fn forget(&mut self, run: RunKey);
}

/// How far drafts came.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    /// Drafts that were what was sampled.
    pub accepted: usize,
    /// Tokens sampled: so many rows hold KV of the sequence and are to be committed, since each sampled
    /// token but the last is the input of the next row.
    pub sampled: usize,
    /// Set where a row had no next token; what was sampled before it stands.
    pub no_token: Option<NoToken>,
}

/// Samples from the rows of a step that computed a token and `drafts` after it: `row(i)` are the logits,
/// `[vocabulary]`, after draft `i - 1`. Hands out each sampled token in order and ends where a draft
/// differs from it, `goes_on` says no (an end token, a limit), the constraint is complete, or after the row
/// of the last draft. With no drafts it is a plain step.
pub fn verify<'a>(
    sampler: &mut Sampler,
    drafts: &[u32],
    row: impl Fn(usize) -> &'a [f32],
    logprobs: Option<usize>,
    goes_on: &mut dyn FnMut(Sampled) -> bool,
) -> Verdict {
    let mut verdict = Verdict::default();
    loop {
        let sampled = match sampler.next(row(verdict.sampled), logprobs) {
            Ok(sampled) => sampled,
            Err(reason) => return Verdict { no_token: Some(reason), ..verdict },
        };
        let is_draft = drafts.get(verdict.sampled) == Some(&sampled.token);
        #[cfg(feature = "mutants")]
        let is_draft = is_draft
            || (crate::mutant::is_active(crate::mutant::Mutant::TrustDrafts)
                && verdict.sampled < drafts.len());
        verdict.sampled += 1;
        verdict.accepted += usize::from(is_draft);
        let ends = !goes_on(sampled) || sampler.is_complete();
        if ends || !is_draft {
            return verdict;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampler::{Sampling, SplitMix64};

    const VOCABULARY: usize = 5;

    /// A model of the two last tokens.
    fn logits(tokens: &[u32]) -> Vec<f32> {
        let (last, before) = (tokens[tokens.len() - 1], tokens[tokens.len() - 2]);
        let mut random = SplitMix64(u64::from(7 * last + 31 * before));
        (0..VOCABULARY).map(|_| (random.unit() * 4.0) as f32).collect()
    }

    fn sampling(temperature: f32, seed: u64) -> Sampling {
        let penalties = Sampling { frequency_penalty: 0.1, top_p: 0.95, ..Sampling::default() };
        Sampling { temperature, seed, ..penalties }
    }

    fn plain(sampling: Sampling, count: usize) -> Vec<u32> {
        let mut sampler = Sampler::begin(sampling, &[0, 1], &[], None);
        let mut tokens = vec![0, 1];
        (0..count).for_each(|_| tokens.push(sampler.sample(&logits(&tokens))));
        tokens
    }

    /// The same with `draft` asked at each step; returns (drafts, accepted) too.
    fn speculative(
        sampling: Sampling,
        count: usize,
        draft: &mut dyn FnMut(&[u32]) -> Vec<u32>,
    ) -> (Vec<u32>, usize, usize) {
        let mut sampler = Sampler::begin(sampling, &[0, 1], &[], None);
        let (mut tokens, mut proposed, mut accepted) = (vec![0, 1], 0, 0);
        while tokens.len() < count + 2 {
            let drafts = draft(&tokens);
            let mut all = tokens.clone();
            let mut rows = vec![logits(&all)];
            for draft in &drafts {
                all.push(*draft);
                rows.push(logits(&all));
            }
            let limit = count + 2;
            let before = tokens.len();
            let verdict = verify(&mut sampler, &drafts, |i| &rows[i], None, &mut |sampled| {
                tokens.push(sampled.token);
                tokens.len() < limit
            });
            assert_eq!((verdict.sampled, verdict.no_token), (tokens.len() - before, None));
            assert!(verdict.sampled - verdict.accepted <= 1);
            proposed += drafts.len();
            accepted += verdict.accepted;
        }
        (tokens, proposed, accepted)
    }

    #[test]
    fn output_is_the_same_with_any_drafts() {
        let mut random = SplitMix64(4);
        let mut some_accepted = 0;
        for seed in 0..60 {
            let sampling = sampling([0.0, 0.7, 1.5][seed as usize % 3], seed);
            let expected = plain(sampling.clone(), 40);
            let mut any = |_: &[u32]| {
                let length = (random.unit() * 5.0) as usize;
                (0..length).map(|_| (random.unit() * VOCABULARY as f64) as u32).collect()
            };
            let (tokens, proposed, accepted) = speculative(sampling.clone(), 40, &mut any);
            assert_eq!(tokens, expected);
            assert!(accepted < proposed);
            some_accepted += accepted;
            // A drafter that knows the answer: all accepted, five tokens a step.
            let mut oracle =
                |t: &[u32]| expected[t.len()..expected.len().min(t.len() + 4)].to_vec();
            let (tokens, proposed, accepted) = speculative(sampling, 40, &mut oracle);
            assert_eq!((tokens, proposed), (expected.clone(), accepted));
        }
        assert!(some_accepted > 100);
    }

    #[test]
    fn acceptance_and_replacement_follow_rejection_sampling() {
        let row = [0.0, 2f32.ln(), 3f32.ln(), 4f32.ln()];
        const DRAWS: usize = 40_000;
        for draft in 0..4_u32 {
            let sampling = Sampling { temperature: 1.0, seed: 77, ..Sampling::default() };
            let mut sampler = Sampler::new(sampling);
            let (mut accepted, mut replaced) = (0, [0; 4]);
            for _ in 0..DRAWS {
                let verdict = verify(&mut sampler, &[draft], |_| &row, None, &mut |sampled| {
                    replaced[sampled.token as usize] += usize::from(sampled.token != draft);
                    false
                });
                accepted += verdict.accepted;
            }
            // p = 1/10, 2/10, 3/10, 4/10.
            let p = |token: usize| (token + 1) as f64 / 10.0;
            let close = |count: usize, expected: f64| {
                (count as f64 - expected * DRAWS as f64).abs() < 0.012 * DRAWS as f64
            };
            assert!(close(accepted, p(draft as usize)), "{accepted} of draft {draft}");
            for (token, count) in replaced.iter().enumerate() {
                let rejected = 1.0 - p(draft as usize);
                let share = if token == draft as usize { 0.0 } else { p(token) / rejected };
                assert!(close(*count, rejected * share), "{replaced:?} for draft {draft}");
            }
        }
    }

    #[test]
    fn an_end_inside_the_drafts_ends_there() {
        let row = [0.0, 5.0, 0.0];
        let mut sampler = Sampler::new(Sampling::default());
        let mut seen = 0;
        let verdict = verify(&mut sampler, &[1, 1, 1], |_| &row, Some(1), &mut |sampled| {
            assert_eq!((sampled.token, sampled.top.len()), (1, 1));
            seen += 1;
            seen < 2
        });
        assert_eq!(verdict, Verdict { accepted: 2, sampled: 2, no_token: None });
    }

    #[test]
    fn a_row_without_a_token_keeps_what_was_before() {
        let rows = [[0.0, 5.0], [f32::NAN, f32::NAN]];
        let mut sampler = Sampler::new(Sampling::default());
        let verdict = verify(&mut sampler, &[1, 1], |i| &rows[i], None, &mut |_| true);
        let no_token = Some(NoToken::NotFinite);
        assert_eq!(verdict, Verdict { accepted: 1, sampled: 1, no_token });
    }
}
