//! What a grammar, a schema or a choice allows next: the engine asks for a mask of tokens and says what
//! was chosen. The grammars themselves live with whoever makes the request.

use std::fmt::Debug;

/// A set of tokens of a vocabulary, one bit each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenMask {
    words: Vec<u32>,
    tokens: usize,
}

impl TokenMask {
    /// Makes it the empty set over a vocabulary of `tokens`.
    pub fn reset(&mut self, tokens: usize) {
        self.words.clear();
        self.words.resize(tokens.div_ceil(32), 0);
        self.tokens = tokens;
    }

    /// Tokens of the vocabulary.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Adds `token`; nothing if the vocabulary lacks it.
    pub fn insert(&mut self, token: u32) {
        if (token as usize) < self.tokens {
            self.words[token as usize / 32] |= 1 << (token % 32);
        }
    }

    /// Whether `token` is in the set.
    pub fn contains(&self, token: u32) -> bool {
        let word = self.words.get(token as usize / 32).copied().unwrap_or(0);
        word >> (token % 32) & 1 == 1
    }

    /// Token `t` is bit `t % 32` of word `t / 32`, the layout of xgrammar and llguidance.
    pub fn words(&self) -> &[u32] {
        &self.words
    }

    /// The same, to be filled in whole; bits beyond the vocabulary mean nothing.
    pub fn words_mut(&mut self) -> &mut [u32] {
        &mut self.words
    }
}

/// Narrows the tokens that may come next. Belongs to one sequence; a fork or a preempted sequence keeps
/// its own copy, so all state must be in what [`clone_box`](Constraint::clone_box) copies.
pub trait Constraint: Debug + Send + Sync {
    /// Adds the tokens that may come next to `mask`, which is empty: the end tokens too, where the text may
    /// end here. An empty mask ends the generation. The same however often it is asked.
    fn allow(&mut self, mask: &mut TokenMask);

    /// `token`, which was allowed, was chosen.
    fn accept(&mut self, token: u32);

    /// Whether nothing may follow, so that the generation ends without an end token.
    fn is_complete(&self) -> bool {
        false
    }

    /// Why it can say no more, so that the text may break off in the middle; nothing is allowed from then on,
    /// and the request fails.
    fn fault(&self) -> Option<String> {
        None
    }

    /// A copy that goes on by itself.
    fn clone_box(&self) -> Box<dyn Constraint>;
}

impl Clone for Box<dyn Constraint> {
    fn clone(&self) -> Box<dyn Constraint> {
        (**self).clone_box()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mask_holds_what_was_added_and_no_more() {
        let mut mask = TokenMask::default();
        assert!(!mask.contains(0));
        mask.reset(70);
        for token in [0, 31, 32, 69, 70, 4_000_000_000] {
            mask.insert(token);
        }
        let held: Vec<u32> = (0..200).filter(|token| mask.contains(*token)).collect();
        assert_eq!(held, [0, 31, 32, 69]);
        assert_eq!((mask.words().len(), mask.tokens()), (3, 70));
        mask.reset(70);
        assert!(!(0..200).any(|token| mask.contains(token)));
    }
}
