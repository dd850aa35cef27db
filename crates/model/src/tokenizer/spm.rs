//! SentencePiece-BPE (`tokenizer.ggml.model` = `llama`): Llama 2, Gemma.
//!
//! Adjacent symbols whose joined text is a token are joined, the best score first, then the leftmost
//! (Kudo & Richardson 2018, arXiv:1808.06226, in the form of llama.cpp). Characters without a token
//! become the byte tokens `<0x00>` to `<0xFF>`.

use super::merge::{Join, Symbols};
use super::vocabulary::Vocabulary;

/// What the vocabulary has in place of a space.
pub(super) const SPACE: &str = "\u{2581}";

/// The joining of one vocabulary.
#[derive(Debug)]
pub(super) struct Spm {
    /// Per token, its place when tokens are ordered by score, best first; equal scores have equal places.
    places: Vec<u32>,
    /// The token of each byte; its unknown token, if any, where the vocabulary has none.
    bytes: Box<[Option<u32>; 256]>,
}

impl Spm {
    /// Prepares `vocabulary`, whose token `id` has score `scores[id]`; no scores count as zeros.
    pub(super) fn new(vocabulary: &Vocabulary, scores: &[f32]) -> Spm {
        let place = |id: usize| scores.get(id).map_or(0, |score| descending(*score));
        let bytes = std::array::from_fn(|byte| {
            let named = vocabulary.find(&format!("<0x{byte:02X}>"));
            let plain = || vocabulary.find_bytes(&[byte as u8]);
            named.or_else(plain).or(vocabulary.special().unknown)
        });
        Spm { places: (0..vocabulary.len()).map(place).collect(), bytes: Box::new(bytes) }
    }

    /// Appends the tokens of `text`, in which spaces are already [`SPACE`].
    pub(super) fn encode(
        &self,
        vocabulary: &Vocabulary,
        text: &str,
        symbols: &mut Symbols,
        ids: &mut Vec<u32>,
    ) {
        symbols.clear();
        let mut buffer = [0; 4];
        for char in text.chars() {
            symbols.push(char.len_utf8(), vocabulary.find(char.encode_utf8(&mut buffer)));
        }
        symbols.join_all(|left, right| {
            let both = left.start as usize..(right.start + right.len) as usize;
            let token = vocabulary.find(&text[both])?;
            Some(Join { order: self.places[token as usize], token })
        });
        for symbol in symbols.iter() {
            match symbol.token {
                Some(token) => ids.push(token),
                None => {
                    let start = symbol.start as usize;
                    let bytes = &text.as_bytes()[start..start + symbol.len as usize];
                    ids.extend(bytes.iter().filter_map(|byte| self.bytes[usize::from(*byte)]));
                }
            }
        }
    }
}

/// The byte that `<0x0A>` and its like stand for.
pub(super) fn byte(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    u8::from_str_radix(digits, 16).ok()
}

/// Maps scores to integers in the opposite order: the highest score becomes the lowest number.
fn descending(score: f32) -> u32 {
    let bits = (score + 0.0).to_bits(); // -0.0 + 0.0 = 0.0: the two zeros are one score
    if bits >> 31 == 0 { !(bits | 1 << 31) } else { bits }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn higher_scores_come_first() {
        let scores = [f32::INFINITY, 3.5, 1e-30, 0.0, -1e-30, -2.0, -1000.0, f32::NEG_INFINITY];
        let places = scores.map(descending);
        assert!(places.is_sorted_by(|left, right| left < right), "{places:?}");
        assert_eq!(descending(-0.0), descending(0.0));
    }
}
