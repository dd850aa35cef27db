//! Byte-level BPE (`tokenizer.ggml.model` = `gpt2`): SmolLM2, Llama 3, Qwen (Radford et al. 2019).
//!
//! Text is cut into words, each byte of a word becomes one of GPT-2's 256 letters, and adjacent symbols
//! are joined in the order of the file's merges. Own code rather than HF's `tokenizers`: that crate keeps
//! two hash maps of owned strings and builds them from owned merges: Llama 3's vocabulary costs it 78 MiB at
//! its peak, this 11 MiB.

use super::TokenizerError;
use super::index::RowIndex;
use super::merge::{Join, Symbols};
use super::pretokenizer::PreTokenizer;
use super::vocabulary::Vocabulary;

/// GPT-2's letter for `byte`: itself where it is printable, else one from U+0100 on.
fn letter(byte: u8) -> char {
    let is_own = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    if is_own(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|other| !is_own(*other)).count() as u32;
    char::from_u32(0x100 + before).expect("at most 68 letters from U+0100 on")
}

/// Letters of all bytes, and back.
#[derive(Debug)]
pub(super) struct Letters {
    of_bytes: [char; 256],
    /// The byte of each letter, by code point; all letters are below U+0144.
    bytes: [Option<u8>; 0x144],
}

impl Letters {
    fn new() -> Letters {
        let of_bytes = std::array::from_fn(|byte| letter(byte as u8));
        let mut bytes = [None; 0x144];
        for (byte, letter) in of_bytes.iter().enumerate() {
            bytes[*letter as usize] = Some(byte as u8);
        }
        Letters { of_bytes, bytes }
    }

    /// Appends the bytes that the letters of a token mean; other characters mean themselves.
    pub(super) fn decode(&self, letters: &str, bytes: &mut Vec<u8>) {
        for char in letters.chars() {
            match self.bytes.get(char as usize).copied().flatten() {
                Some(byte) => bytes.push(byte),
                None => bytes.extend_from_slice(char.encode_utf8(&mut [0; 4]).as_bytes()),
            }
        }
    }
}

/// A merge: two tokens and the one that they become.
#[derive(Clone, Copy, Debug)]
struct Merge {
    pair: (u32, u32),
    token: u32,
}

/// The merges of one vocabulary.
#[derive(Debug)]
pub(super) struct Bpe {
    pre_tokenizer: PreTokenizer,
    pub(super) letters: Letters,
    /// The token of each byte's letter.
    byte_tokens: Box<[Option<u32>; 256]>,
    /// In the file's order: the first is joined first.
    merges: Vec<Merge>,
    by_pair: RowIndex,
}

impl Bpe {
    /// Prepares `merges` (`"left right"` each, the first is joined first). A merge one of whose parts or
    /// whose result is no token can lead to no token and is left out. Fails at a merge of one part.
    pub(super) fn new<'a>(
        vocabulary: &Vocabulary,
        merges: impl ExactSizeIterator<Item = &'a str>,
        pre_tokenizer: PreTokenizer,
    ) -> Result<Bpe, TokenizerError> {
        let letters = Letters::new();
        let mut buffer = [0; 4];
        let byte_tokens =
            letters.of_bytes.map(|char| vocabulary.find(char.encode_utf8(&mut buffer)));
        let mut by_pair = RowIndex::with_capacity(merges.len());
        let mut kept: Vec<Merge> = Vec::with_capacity(merges.len());
        let mut joined = String::new();
        for (row, merge) in merges.enumerate() {
            // A part may be a space of its own, but an empty part is none: look from the second byte on.
            let space = merge.bytes().skip(1).position(|byte| byte == b' ').map(|at| at + 1);
            let Some((left, right)) = space.map(|at| (&merge[..at], &merge[at + 1..])) else {
                return Err(TokenizerError::BadMerge { row, text: crate::gguf::escape(merge) });
            };
            joined.clear();
            joined.extend([left, right]);
            let (left, right) = (vocabulary.find(left), vocabulary.find(right));
            let (Some(left), Some(right), Some(token)) = (left, right, vocabulary.find(&joined))
            else {
                continue;
            };
            let pair = (left, right);
            let is_pair = |other: u32| kept[other as usize].pair == pair;
            if by_pair.insert(&pair, kept.len() as u32, false, is_pair).is_none() {
                kept.push(Merge { pair, token });
            }
        }
        kept.shrink_to_fit();
        let byte_tokens = Box::new(byte_tokens);
        Ok(Bpe { pre_tokenizer, letters, byte_tokens, merges: kept, by_pair })
    }

    /// Whether texts begin with the BOS token when the file does not say.
    pub(super) fn adds_bos(&self) -> bool {
        self.pre_tokenizer.adds_bos
    }

    /// Appends the tokens of `text`. A byte without a token is left out, as in llama.cpp.
    pub(super) fn encode(
        &self,
        vocabulary: &Vocabulary,
        text: &str,
        symbols: &mut Symbols,
        ids: &mut Vec<u32>,
    ) {
        let mut letters = String::new();
        self.pre_tokenizer.words(text, |word| {
            if self.pre_tokenizer.whole_words {
                letters.clear();
                letters.extend(word.bytes().map(|byte| self.letters.of_bytes[usize::from(byte)]));
                if let Some(token) = vocabulary.find(&letters) {
                    return ids.push(token);
                }
            }
            symbols.clear();
            word.bytes().for_each(|byte| symbols.push(1, self.byte_tokens[usize::from(byte)]));
            symbols.join_all(|left, right| {
                let pair = (left.token?, right.token?);
                let row = self.by_pair.find(&pair, |row| self.merges[row as usize].pair == pair)?;
                Some(Join { order: row, token: self.merges[row as usize].token })
            });
            ids.extend(symbols.iter().filter_map(|symbol| symbol.token));
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn letters_are_those_of_gpt_2() {
        assert_eq!(letter(b' '), '\u{120}');
        assert_eq!(letter(b'\n'), '\u{10a}');
        assert_eq!(letter(b'a'), 'a');
        assert_eq!(letter(0xAD), '\u{143}');
        assert_eq!(letter(0xFF), '\u{ff}');
    }

    #[test]
    fn letters_come_back_as_bytes() {
        let letters = Letters::new();
        let text: String = letters.of_bytes.iter().collect();
        let mut bytes = Vec::new();
        letters.decode(&text, &mut bytes);
        assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
        bytes.clear();
        letters.decode("\u{2581}\u{150} a", &mut bytes);
        assert_eq!(bytes, "\u{2581}\u{150} a".as_bytes());
    }
}
