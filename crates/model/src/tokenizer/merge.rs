//! The loop that SentencePiece-BPE and byte-level BPE share: join the best adjacent pair until none is left.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// No neighbor.
const NONE: u32 = u32::MAX;

/// A run of the text that has become one symbol.
#[derive(Clone, Copy, Debug)]
pub(super) struct Symbol {
    /// First byte of the symbol in the text.
    pub(super) start: u32,
    /// Bytes of the symbol; 0 once it has been joined to the one on its left.
    pub(super) len: u32,
    /// Its token, if the vocabulary has one.
    pub(super) token: Option<u32>,
    left: u32,
    right: u32,
}

/// What a pair of neighbors may become.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Join {
    /// Order among all joins that are possible: the lowest goes first, then the leftmost.
    pub(super) order: u32,
    /// The token that the two become.
    pub(super) token: u32,
}

/// A possible join, as it was when it was put on the heap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    order: u32,
    left: u32,
    right: u32,
    /// Bytes of the two; if they have changed since, the candidate is stale.
    len: u32,
    token: u32,
}

/// The symbols of one text; reused from text to text to keep its allocations.
#[derive(Debug, Default)]
pub(super) struct Symbols {
    symbols: Vec<Symbol>,
    candidates: BinaryHeap<Reverse<Candidate>>,
}

impl Symbols {
    /// Forgets the symbols of the text before.
    pub(super) fn clear(&mut self) {
        self.symbols.clear();
        self.candidates.clear();
    }

    /// Appends the symbol of the next `len` bytes of the text (under 4 GiB in all).
    pub(super) fn push(&mut self, len: usize, token: Option<u32>) {
        let index = self.symbols.len() as u32;
        let (left, start) = match self.symbols.last_mut() {
            Some(last) => {
                last.right = index;
                (index - 1, last.start + last.len)
            }
            None => (NONE, 0),
        };
        self.symbols.push(Symbol { start, len: len as u32, token, left, right: NONE });
    }

    /// Joins neighbors until `join` has no more to offer, the lowest order first. Takes
    /// O(n log n) calls of `join(left, right)` for n symbols.
    pub(super) fn join_all(&mut self, join: impl Fn(&Symbol, &Symbol) -> Option<Join>) {
        for left in 0..self.symbols.len() as u32 {
            self.offer(left, &join);
        }
        while let Some(Reverse(candidate)) = self.candidates.pop() {
            let (left, right) = (candidate.left as usize, candidate.right as usize);
            let lens = (self.symbols[left].len, self.symbols[right].len);
            if lens.0 == 0 || lens.1 == 0 || lens.0 + lens.1 != candidate.len {
                continue;
            }
            let next = self.symbols[right].right;
            self.symbols[left].len = candidate.len;
            self.symbols[left].token = Some(candidate.token);
            self.symbols[left].right = next;
            self.symbols[right].len = 0;
            if next != NONE {
                self.symbols[next as usize].left = candidate.left;
            }
            self.offer(candidate.left, &join);
            self.offer(self.symbols[left].left, &join);
        }
    }

    /// The symbols that are left, in text order.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Symbol> {
        self.symbols.iter().filter(|symbol| symbol.len > 0)
    }

    /// Puts the join of symbol `left` and its right neighbor on the heap, if there is one.
    fn offer(&mut self, left: u32, join: &impl Fn(&Symbol, &Symbol) -> Option<Join>) {
        let Some(first) = self.symbols.get(left as usize) else { return };
        let Some(second) = self.symbols.get(first.right as usize) else { return };
        if let Some(Join { order, token }) = join(first, second) {
            let (right, len) = (first.right, first.len + second.len);
            self.candidates.push(Reverse(Candidate { order, left, right, len, token }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Joins by the text of the two, from a list of texts, best first.
    fn joined(text: &str, joins: &[&str]) -> Vec<String> {
        let of = |symbol: &Symbol| symbol.start as usize..(symbol.start + symbol.len) as usize;
        let mut symbols = Symbols::default();
        text.chars().for_each(|char| symbols.push(char.len_utf8(), None));
        symbols.join_all(|left, right| {
            let both = &text[of(left).start..of(right).end];
            let order = joins.iter().position(|join| *join == both)? as u32;
            Some(Join { order, token: order })
        });
        symbols.iter().map(|symbol| text[of(symbol)].to_owned()).collect()
    }

    #[test]
    fn the_best_goes_first_and_then_the_leftmost() {
        assert_eq!(joined("abab", &["ba", "ab"]), ["a", "ba", "b"]);
        assert_eq!(joined("aaa", &["aa"]), ["aa", "a"]);
        assert_eq!(joined("aaaa", &["aa", "aaaa"]), ["aaaa"]);
        assert_eq!(joined("", &["aa"]), [""; 0]);
    }

    #[test]
    fn a_join_whose_parts_have_changed_is_not_made() {
        // "bc" is offered first but "ab" is better; "bc" must not be joined afterwards.
        assert_eq!(joined("abc", &["ab", "bc"]), ["ab", "c"]);
        assert_eq!(joined("abcd", &["bc", "ab", "cd", "abc"]), ["abc", "d"]);
    }
}
