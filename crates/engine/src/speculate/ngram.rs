//! Drafts copied from the text so far: where the last tokens stood before, what followed them then may
//! follow now (prompt lookup decoding; Saxena 2023, and vLLM's `ngram`).

use std::collections::HashMap;

use super::{Drafter, RunKey};

/// Tokens of a run that are looked through at most: its index takes some 24 bytes a token and length.
const MOST_INDEXED: usize = 1 << 16;

/// Looks up the longest suffix of `longest` down to `shortest` tokens that stood before, most recently.
#[derive(Debug)]
pub struct Ngram {
    shortest: usize,
    longest: usize,
    runs: HashMap<RunKey, Index>,
}

impl Default for Ngram {
    /// Suffixes of 4 down to 2 tokens.
    fn default() -> Ngram {
        Ngram::new(2, 4)
    }
}

impl Ngram {
    /// Suffixes of `longest` down to `shortest` tokens, both held to 1 to 16.
    pub fn new(shortest: usize, longest: usize) -> Ngram {
        let longest = longest.clamp(1, 16);
        Ngram { shortest: shortest.clamp(1, longest), longest, runs: HashMap::new() }
    }
}

impl Drafter for Ngram {
    fn draft(&mut self, run: RunKey, tokens: &[u32], most: usize, out: &mut Vec<u32>) {
        out.clear();
        let lengths = self.shortest..=self.longest;
        let index = self.runs.entry(run).or_default();
        index.extend(tokens, lengths.clone());
        let found = lengths.rev().zip(index.places.iter().rev());
        let place = found.filter_map(|(length, places)| places.find(tokens, length)).next();
        let Some(from) = place else { return };
        // A text that repeats itself goes on doing so: the copy runs into what it has just written.
        for place in from..from + most {
            let token = tokens.get(place).copied().unwrap_or_else(|| out[place - tokens.len()]);
            out.push(token);
        }
    }

    fn forget(&mut self, run: RunKey) {
        self.runs.remove(&run);
    }
}

/// Where a run's n-grams stood last, one table a length.
#[derive(Debug, Default)]
struct Index {
    places: Vec<Places>,
    /// N-grams that begin at or after the first and end before the second position are in the tables.
    first: usize,
    end: usize,
}

impl Index {
    /// Adds the n-grams that came with new tokens; those that end at the last token have no successor yet.
    fn extend(&mut self, tokens: &[u32], lengths: std::ops::RangeInclusive<usize>) {
        if tokens.len() < self.end {
            *self = Index::default();
        }
        if tokens.len() - self.first > MOST_INDEXED {
            *self = Index::default();
            self.first = tokens.len() - MOST_INDEXED / 2;
            self.end = self.first;
        }
        self.places.resize_with(lengths.clone().count(), Places::default);
        for (length, places) in lengths.zip(&mut self.places) {
            let ends = self.end.max(self.first + length)..tokens.len();
            places.reserve(tokens, length, ends.len());
            ends.for_each(|end| places.insert(&tokens[end - length..end], tokens, end));
        }
        self.end = tokens.len();
    }
}

/// End positions of n-grams of one length, found by their tokens: open addressing over positions alone,
/// the tokens being where they are. 0 is empty, since no n-gram ends there.
#[derive(Debug, Default)]
struct Places {
    slots: Vec<u32>,
    used: usize,
}

impl Places {
    /// The slot of the n-gram, or the empty one where it belongs. There is always an empty one.
    fn slot(&self, tokens: &[u32], gram: &[u32]) -> usize {
        let mask = self.slots.len() - 1;
        let mut slot = hash(gram) as usize & mask;
        loop {
            let end = self.slots[slot] as usize;
            // Positions of tokens that were since replaced compare as what they are now: never equal by
            // mistake.
            let found = end >= gram.len() && tokens.get(end - gram.len()..end) == Some(gram);
            if end == 0 || found {
                return slot;
            }
            slot = (slot + 1) & mask;
        }
    }

    /// `end` is where `gram` ends in `tokens`; there is room for it.
    fn insert(&mut self, gram: &[u32], tokens: &[u32], end: usize) {
        let slot = self.slot(tokens, gram);
        self.used += usize::from(self.slots[slot] == 0);
        self.slots[slot] = end as u32;
    }

    /// Makes room for `count` more n-grams: at most half of the slots are ever used.
    fn reserve(&mut self, tokens: &[u32], length: usize, count: usize) {
        let needed = 2 * (self.used + count);
        if needed <= self.slots.len() {
            return;
        }
        let slots = vec![0; needed.next_power_of_two().max(64)];
        for end in std::mem::replace(&mut self.slots, slots) {
            let start = (end as usize).saturating_sub(length);
            if let Some(gram) = tokens.get(start..end as usize)
                && end > 0
            {
                let slot = self.slot(tokens, gram);
                self.slots[slot] = end.max(self.slots[slot]);
            }
        }
    }

    /// Where the text went on after the last `length` tokens stood before.
    fn find(&self, tokens: &[u32], length: usize) -> Option<usize> {
        let start = tokens.len().checked_sub(length)?;
        if self.slots.is_empty() {
            return None;
        }
        let end = self.slots[self.slot(tokens, &tokens[start..])] as usize;
        (end > 0 && end < tokens.len()).then_some(end)
    }
}

fn hash(gram: &[u32]) -> u64 {
    let mix = |hash: u64, token: &u32| {
        (hash ^ u64::from(*token)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
    };
    let hash = gram.iter().fold(0, mix).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    hash ^ (hash >> 32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampler::SplitMix64;

    /// By looking through everything.
    fn looked_up(tokens: &[u32], lengths: (usize, usize), most: usize) -> Vec<u32> {
        for length in (lengths.0..=lengths.1).rev() {
            let Some(start) = tokens.len().checked_sub(length) else { continue };
            let suffix = &tokens[start..];
            let ends = (length..tokens.len()).rev();
            if let Some(end) = ends.into_iter().find(|end| &tokens[end - length..*end] == suffix) {
                let mut all = tokens.to_vec();
                (0..most).for_each(|i| all.push(all[end + i]));
                return all[tokens.len()..].to_vec();
            }
        }
        Vec::new()
    }

    #[test]
    fn drafts_follow_the_longest_and_most_recent_match() {
        let mut ngram = Ngram::new(1, 3);
        let mut out = vec![9, 9, 9];
        let cases: [(&[u32], &[u32]); 6] = [
            (&[], &[]),
            (&[1], &[]),
            (&[1, 2, 3, 4, 1, 2], &[3, 4, 1]),
            // Of two places the later one, even if shorter suffixes stood later still.
            (&[1, 2, 7, 1, 2, 8, 2, 9, 1, 2], &[8, 2, 9]),
            (&[5, 5], &[5, 5, 5]),
            (&[1, 2, 1, 2, 1], &[2, 1, 2]),
        ];
        for (run, (tokens, expected)) in (0..).zip(cases) {
            ngram.draft(RunKey(run), tokens, 3, &mut out);
            assert_eq!(out, expected, "{tokens:?}");
        }
        ngram.draft(RunKey(2), &[1, 2, 3, 4, 1, 2], 0, &mut out);
        assert!(out.is_empty());
    }

    #[test]
    fn a_growing_text_gives_what_a_rescan_gives() {
        let mut random = SplitMix64(2);
        let mut hits = 0;
        for (run, kinds) in [2.0, 6.0, 40.0].into_iter().enumerate() {
            for (shortest, longest) in [(1, 1), (2, 4), (3, 5)] {
                let mut ngram = Ngram::new(shortest, longest);
                let (mut tokens, mut out) = (Vec::new(), Vec::new());
                while tokens.len() < 600 {
                    let new = (random.unit() * 5.0) as usize;
                    tokens.extend((0..new).map(|_| (random.unit() * kinds) as u32));
                    ngram.draft(RunKey(run as u64), &tokens, 4, &mut out);
                    assert_eq!(out, looked_up(&tokens, (shortest, longest), 4));
                    hits += usize::from(!out.is_empty());
                }
            }
        }
        assert!(hits > 500);
    }

    #[test]
    fn runs_do_not_see_each_other_and_other_texts_give_no_wrong_place() {
        let mut ngram = Ngram::new(2, 3);
        let mut out = Vec::new();
        ngram.draft(RunKey(1), &[1, 2, 3, 1, 2], 2, &mut out);
        assert_eq!(out, [3, 1]);
        ngram.draft(RunKey(2), &[4, 1, 2], 2, &mut out);
        assert!(out.is_empty());
        // A run whose text is suddenly another, shorter, then longer: no panic, and copies of that text.
        ngram.draft(RunKey(1), &[8, 9, 7, 8, 9], 2, &mut out);
        assert!(out.is_empty() || out == [7, 8]);
        ngram.draft(RunKey(1), &[8], 2, &mut out);
        assert!(out.is_empty());
        ngram.draft(RunKey(1), &[8, 9, 7, 8, 9], 2, &mut out);
        assert_eq!(out, [7, 8]);
        ngram.forget(RunKey(1));
        assert!(!ngram.runs.contains_key(&RunKey(1)));
    }

    #[test]
    fn the_index_of_a_very_long_text_stays_bounded() {
        let mut ngram = Ngram::new(2, 2);
        let mut out = Vec::new();
        let mut tokens: Vec<u32> = (0..3 * MOST_INDEXED as u32).collect();
        for length in (1..=tokens.len()).step_by(1000) {
            ngram.draft(RunKey(0), &tokens[..length], 1, &mut out);
            assert!(ngram.runs[&RunKey(0)].places[0].used <= MOST_INDEXED);
        }
        // What is recent is still found.
        let recent = tokens.len() as u32 - 100;
        tokens.extend([recent, recent + 1]);
        ngram.draft(RunKey(0), &tokens, 1, &mut out);
        assert_eq!(out, [recent + 2]);
    }
}
