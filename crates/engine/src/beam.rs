//! Beam search: which continuations go on, and which are done.
//!
//! Pure selection: it is given the logits of the live beams and says which of them to fork, to go on with
//! and to drop. The rules are those of Hugging Face transformers' `generate`: of the best candidates of a
//! step, those that end and rank among the first `width` are done, the others go on; a finished one is
//! scored by its cumulative log-probability over its length to the power of `length_penalty`.

use crate::sampler::{NoToken, likeliest_logprobs};

/// How to search.
#[derive(Clone, Debug, PartialEq)]
pub struct BeamRules {
    /// Beams side by side, at least 1.
    pub width: usize,
    /// Scores are cumulative log-probabilities over length to this power: above 0 favors long
    /// continuations, below 0 short ones.
    pub length_penalty: f32,
    /// End as soon as `width` continuations are done. Otherwise only when none that is live can still get
    /// better than the worst of those: as `early_stopping="never"` of transformers, and with the same
    /// result as a search to the limit.
    pub early_stopping: bool,
    /// Tokens generated at most, at least 1; what reaches it is done.
    pub max_tokens: usize,
    /// Tokens that end a continuation.
    pub end_ids: Vec<u32>,
}

/// A continuation that is done.
#[derive(Clone, Debug, PartialEq)]
pub struct Hypothesis {
    /// Its tokens, without the end token.
    pub tokens: Vec<u32>,
    /// Whether an end token ended it, or a constraint that allowed no more (or else the limit).
    pub ended: bool,
    /// Sum of the log-probabilities of its tokens, end token included.
    pub cumulative_logprob: f64,
    /// The same over its length to the power of `length_penalty`.
    pub score: f64,
}

/// A beam of the next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descent {
    /// The live beam that it extends, by its index in the last step.
    pub parent: usize,
    /// By this token.
    pub token: u32,
    /// It takes its parent's sequence over; the others of the same parent, which all stand before it, fork
    /// theirs off. So the last that shares a block writes in place.
    pub takes_over: bool,
}

/// A beam that goes on.
#[derive(Clone, Debug)]
struct Beam {
    tokens: Vec<u32>,
    cumulative_logprob: f64,
}

/// A live beam extended by a token.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    parent: usize,
    token: u32,
    cumulative_logprob: f64,
}

/// A search in progress.
#[derive(Clone, Debug)]
pub struct BeamSearch {
    rules: BeamRules,
    live: Vec<Beam>,
    /// Best first, at most `width`.
    finished: Vec<Hypothesis>,
}

impl BeamSearch {
    /// One live beam: the prompt.
    pub fn new(rules: BeamRules) -> BeamSearch {
        let live = vec![Beam { tokens: Vec::new(), cumulative_logprob: 0.0 }];
        BeamSearch { rules, live, finished: Vec::new() }
    }

    /// Number of live beams: rows that the next step takes. 0: the search has ended.
    pub fn live(&self) -> usize {
        self.live.len()
    }

    /// Goes on from `rows`, the logits (`[vocabulary]` each) of every live beam in order. Returns the next
    /// live beams, likeliest first; none: the search has ended. Parents without a descent are dropped.
    ///
    /// # Errors
    /// [`NoToken::NotFinite`] where the logits of a beam are not finite; nothing has changed. A beam after
    /// which nothing is allowed (all its logits are minus infinity) is done as it stands.
    pub fn step(&mut self, rows: &[&[f32]]) -> Result<Vec<Descent>, NoToken> {
        debug_assert_eq!(rows.len(), self.live.len(), "a row for every live beam");
        let (candidates, complete) = self.candidates(rows)?;
        let width = self.rules.width.max(1);
        let length = self.live.first().map_or(0, |beam| beam.tokens.len()) + 1;
        let at_limit = length >= self.rules.max_tokens;
        for parent in complete {
            let Beam { tokens, cumulative_logprob } = self.live[parent].clone();
            self.finish(tokens, true, cumulative_logprob, length - 1);
        }
        let mut next: Vec<Candidate> = Vec::with_capacity(width);
        for (rank, candidate) in candidates.into_iter().enumerate() {
            let ended = self.rules.end_ids.contains(&candidate.token);
            if (ended || at_limit) && rank < width {
                let mut tokens = self.live[candidate.parent].tokens.clone();
                tokens.extend((!ended).then_some(candidate.token));
                self.finish(tokens, ended, candidate.cumulative_logprob, length);
            } else if !ended && next.len() < width {
                next.push(candidate);
            }
        }
        if at_limit || self.is_decided(next.first(), length) {
            next.clear();
        }
        let extend = |candidate: &Candidate| {
            let mut tokens = self.live[candidate.parent].tokens.clone();
            tokens.push(candidate.token);
            Beam { tokens, cumulative_logprob: candidate.cumulative_logprob }
        };
        self.live = next.iter().map(extend).collect();
        Ok(descents(&next))
    }

    /// The best `count` continuations, best first. Where the search was cut short and fewer are done, live
    /// beams as they stand fill up.
    pub fn best(&self, count: usize) -> Vec<Hypothesis> {
        let mut best = self.finished.clone();
        let as_it_stands = |beam: &Beam| Hypothesis {
            tokens: beam.tokens.clone(),
            ended: false,
            cumulative_logprob: beam.cumulative_logprob,
            score: self.score(beam.cumulative_logprob, beam.tokens.len()),
        };
        best.extend(self.live.iter().map(as_it_stands).take(count.saturating_sub(best.len())));
        best.truncate(count);
        best
    }

    /// The likeliest extensions of all live beams, likeliest first: so many that `width` of them go on even
    /// if every beam could end in each of the ways there are. Then the beams that nothing may follow.
    fn candidates(&self, rows: &[&[f32]]) -> Result<(Vec<Candidate>, Vec<usize>), NoToken> {
        let count = (1 + self.rules.end_ids.len().max(1)) * self.rules.width.max(1);
        let (mut candidates, mut complete) = (Vec::new(), Vec::new());
        for (parent, (row, beam)) in rows.iter().zip(&self.live).enumerate() {
            let likeliest = likeliest_logprobs(row, count)?;
            if likeliest.is_empty() {
                complete.push(parent);
            }
            for (token, logprob) in likeliest {
                let cumulative_logprob = beam.cumulative_logprob + logprob;
                candidates.push(Candidate { parent, token, cumulative_logprob });
            }
        }
        // Stable: of equals the better parent, then the likelier token, then the lower id.
        candidates.sort_by(|a, b| b.cumulative_logprob.total_cmp(&a.cumulative_logprob));
        candidates.truncate(count);
        Ok((candidates, complete))
    }

    fn score(&self, cumulative_logprob: f64, length: usize) -> f64 {
        cumulative_logprob / (length.max(1) as f64).powf(f64::from(self.rules.length_penalty))
    }

    fn finish(&mut self, tokens: Vec<u32>, ended: bool, cumulative_logprob: f64, length: usize) {
        let score = self.score(cumulative_logprob, length);
        let at = self.finished.partition_point(|other| other.score >= score);
        self.finished.insert(at, Hypothesis { tokens, ended, cumulative_logprob, score });
        self.finished.truncate(self.rules.width.max(1));
    }

    /// Whether what is done cannot change any more, `best` being the likeliest beam that could go on.
    fn is_decided(&self, best: Option<&Candidate>, length: usize) -> bool {
        let Some(best) = best else { return true };
        if self.finished.len() < self.rules.width.max(1) {
            return false;
        }
        // A continuation's log-probability only falls; where length makes up for it, by the most it can.
        let most = if self.rules.length_penalty > 0.0 { self.rules.max_tokens } else { length + 1 };
        let bound = self.score(best.cumulative_logprob, most);
        self.rules.early_stopping || self.finished.last().is_some_and(|worst| worst.score >= bound)
    }
}

fn descents(next: &[Candidate]) -> Vec<Descent> {
    let of = |(place, candidate): (usize, &Candidate)| {
        let Candidate { parent, token, .. } = *candidate;
        let takes_over = next[place + 1..].iter().all(|other| other.parent != parent);
        Descent { parent, token, takes_over }
    };
    next.iter().enumerate().map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampler::SplitMix64;

    fn rules(width: usize, length_penalty: f32, max_tokens: usize) -> BeamRules {
        BeamRules { width, length_penalty, early_stopping: false, max_tokens, end_ids: vec![0] }
    }

    /// Logits after `tokens`, of a model that is a hash of them; token 0 ends.
    fn logits(seed: u64, vocabulary: usize, tokens: &[u32]) -> Vec<f32> {
        let mix = |hash: u64, token: &u32| {
            SplitMix64(hash ^ u64::from(*token)).unit().to_bits().rotate_left(20)
        };
        let mut random = SplitMix64(tokens.iter().fold(seed, mix));
        (0..vocabulary).map(|_| (random.unit() * 5.0) as f32).collect()
    }

    fn log_softmax(logits: &[f32]) -> Vec<f64> {
        let sum: f64 = logits.iter().map(|logit| f64::from(*logit).exp()).sum();
        logits.iter().map(|logit| f64::from(*logit) - sum.ln()).collect()
    }

    /// Runs a search as an engine does: sequences are forked, taken over and dropped as it says.
    fn search(rules: &BeamRules, seed: u64, vocabulary: usize) -> (Vec<Hypothesis>, usize) {
        let mut search = BeamSearch::new(rules.clone());
        let (mut sequences, mut steps) = (vec![Vec::new()], 0);
        while search.live() > 0 {
            let rows: Vec<Vec<f32>> =
                sequences.iter().map(|tokens| logits(seed, vocabulary, tokens)).collect();
            let rows: Vec<&[f32]> = rows.iter().map(Vec::as_slice).collect();
            let descents = search.step(&rows).unwrap();
            steps += 1;
            let mut parents: Vec<Option<Vec<u32>>> = sequences.into_iter().map(Some).collect();
            let descend = |descent: &Descent| {
                let parent = &mut parents[descent.parent];
                let mut tokens =
                    if descent.takes_over { parent.take() } else { parent.clone() }.unwrap();
                tokens.push(descent.token);
                tokens
            };
            sequences = descents.iter().map(descend).collect();
        }
        (search.best(rules.width), steps)
    }

    /// The same over whole lists of tokens and all of the vocabulary, to the limit.
    fn reference(rules: &BeamRules, seed: u64, vocabulary: usize) -> Vec<(Vec<u32>, f64)> {
        let mut live = vec![(Vec::new(), 0.0)];
        let mut finished: Vec<(Vec<u32>, f64)> = Vec::new();
        for length in 1..=rules.max_tokens {
            let mut all: Vec<(Vec<u32>, f64)> = Vec::new();
            for (tokens, sum) in &live {
                let logprobs = log_softmax(&logits(seed, vocabulary, tokens));
                all.extend(logprobs.iter().enumerate().map(|(token, logprob)| {
                    ([&tokens[..], &[token as u32]].concat(), sum + logprob)
                }));
            }
            all.sort_by(|a, b| b.1.total_cmp(&a.1));
            let ends = |tokens: &[u32]| tokens.last() == Some(&0) || length == rules.max_tokens;
            let first = &all[..all.len().min(rules.width)];
            for (tokens, sum) in first.iter().filter(|(tokens, _)| ends(tokens)) {
                let score = sum / (length as f64).powf(f64::from(rules.length_penalty));
                let tokens = tokens.strip_suffix(&[0]).unwrap_or(tokens);
                finished.push((tokens.to_vec(), score));
            }
            all.retain(|(tokens, _)| tokens.last() != Some(&0));
            all.truncate(rules.width);
            live = all;
        }
        finished.sort_by(|a, b| b.1.total_cmp(&a.1));
        finished.truncate(rules.width);
        finished
    }

    #[test]
    fn a_search_is_that_over_whole_lists() {
        let mut shorter = 0;
        for seed in 0..300 {
            let rules = rules(
                [1, 2, 4, 7][seed as usize % 4],
                [1.0, 0.0, -0.5, 2.0, 0.3][seed as usize % 5],
                [1, 3, 8, 14][seed as usize / 4 % 4],
            );
            let vocabulary = [3, 6, 40][seed as usize % 3];
            let (found, steps) = search(&rules, seed, vocabulary);
            let expected = reference(&rules, seed, vocabulary);
            let tokens: Vec<_> = found.iter().map(|found| &found.tokens).collect();
            assert_eq!(tokens, expected.iter().map(|(t, _)| t).collect::<Vec<_>>(), "{rules:?}");
            for (found, (_, score)) in found.iter().zip(&expected) {
                assert!((found.score - score).abs() < 1e-5 * score.abs());
            }
            shorter += usize::from(steps < rules.max_tokens);
        }
        // Ending when nothing better can come is most of what makes it affordable.
        assert!(shorter > 50, "{shorter}");
    }

    #[test]
    fn a_wide_enough_beam_finds_the_best_of_all() {
        for seed in 0..40 {
            let (vocabulary, max_tokens) = (4, 4);
            let (found, _) = search(&rules(300, 1.0, max_tokens), seed, vocabulary);
            let mut best = (Vec::new(), f64::NEG_INFINITY);
            let mut open = vec![(Vec::new(), 0.0)];
            while let Some((tokens, sum)) = open.pop() {
                let logprobs = log_softmax(&logits(seed, vocabulary, &tokens));
                for (token, logprob) in logprobs.iter().enumerate() {
                    let longer = [&tokens[..], &[token as u32]].concat();
                    let score = (sum + logprob) / longer.len() as f64;
                    let ends = token == 0 || longer.len() == max_tokens;
                    if ends && score > best.1 {
                        best = (longer.strip_suffix(&[0]).unwrap_or(&longer).to_vec(), score);
                    }
                    if !ends {
                        open.push((longer, sum + logprob));
                    }
                }
            }
            assert_eq!(found[0].tokens, best.0);
        }
    }

    #[test]
    fn early_stopping_ends_with_the_first_width_that_are_done() {
        let mut earlier = 0;
        for seed in 0..50 {
            let late = rules(3, 1.0, 20);
            let early = BeamRules { early_stopping: true, ..late.clone() };
            let (found, steps) = search(&early, seed, 6);
            let (best, most_steps) = search(&late, seed, 6);
            assert!(steps <= most_steps && found.len() == 3);
            assert!(best[0].score >= found[0].score);
            earlier += usize::from(steps < most_steps);
        }
        assert!(earlier > 10);
    }

    #[test]
    fn one_beam_is_greedy_decoding() {
        for seed in 0..20 {
            let rules = BeamRules { end_ids: vec![], ..rules(1, 1.0, 12) };
            let mut tokens = Vec::new();
            for _ in 0..12 {
                tokens.push(crate::sampler::greedy(&logits(seed, 30, &tokens)));
            }
            assert_eq!(search(&rules, seed, 30).0[0].tokens, tokens);
        }
    }

    #[test]
    fn the_last_of_a_parents_descents_takes_over() {
        let mut search = BeamSearch::new(rules(3, 1.0, 10));
        let first = search.step(&[&[0.0, 5.0, 4.0, 3.0]]).unwrap();
        let of = |parent, token, takes_over| Descent { parent, token, takes_over };
        assert_eq!(first, [of(0, 1, false), of(0, 2, false), of(0, 3, true)]);
        // Nothing is allowed after the second, and the third is far behind: the first goes on alone.
        let nothing = [f32::NEG_INFINITY; 4];
        let rows: [&[f32]; 3] = [&[-9.0, 5.0, 5.0, 5.0], &nothing, &[-9.0, 5.0, 5.0, 5.0]];
        let second = search.step(&rows).unwrap();
        assert_eq!(second, [of(0, 1, false), of(0, 2, false), of(0, 3, true)]);
        // The second is done as it stood.
        let done = &search.best(1)[0];
        assert_eq!((&done.tokens[..], done.ended), (&[2][..], true));
    }

    #[test]
    fn a_search_cut_short_gives_what_it_has() {
        let mut search = BeamSearch::new(rules(2, 1.0, 10));
        search.step(&[&[9.0, 8.0, 7.0]]).unwrap();
        let best = search.best(2);
        assert_eq!((best[0].tokens.len(), best[0].ended), (0, true));
        assert_eq!((&best[1].tokens[..], best[1].ended), (&[1][..], false));
    }

    #[test]
    fn broken_logits_are_an_error_and_change_nothing() {
        let mut search = BeamSearch::new(rules(2, 1.0, 10));
        assert_eq!(search.step(&[&[f32::NAN; 3]]), Err(NoToken::NotFinite));
        assert_eq!(search.live(), 1);
        let nothing = [f32::NEG_INFINITY; 3];
        assert_eq!(search.step(&[&nothing]), Ok(vec![]));
        assert_eq!((search.live(), search.best(2)[0].tokens.len()), (0, 0));
    }
}
