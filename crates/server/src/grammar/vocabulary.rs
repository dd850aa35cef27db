//! The model's vocabulary as llguidance walks it: a trie over the bytes of its tokens.

use std::sync::Arc;

use reef_model::tokenizer::{Encode, TokenType, Tokenizer};
use toktrie::{INVALID_TOKEN, TokRxInfo, TokTrie, TokenId, TokenizerEnv};

/// Longest token that the trie holds (it counts 1024 levels); a longer one is never allowed by a grammar.
const TOKEN_BYTES_MAX: usize = 1000;

/// SentencePiece puts a space before a text, but text that a grammar forces goes on another: it is
/// tokenized behind this character, which stands alone in every vocabulary.
const BEFORE: &str = "\u{2}";

/// Tokens by their bytes, and the way that text becomes tokens where a grammar leaves no choice of text.
pub(super) struct Vocabulary {
    trie: TokTrie,
    tokenizer: Arc<Tokenizer>,
    /// Tokens of [`BEFORE`], where it is needed.
    before: Vec<u32>,
}

impl Vocabulary {
    /// `end_ids` end a text.
    ///
    /// # Panics
    /// The trie's limits are passed (4 M nodes).
    pub(super) fn new(tokenizer: Arc<Tokenizer>, end_ids: &[u32]) -> Vocabulary {
        let words: Vec<Vec<u8>> =
            (0..tokenizer.vocabulary().len() as u32).map(|id| word(&tokenizer, id)).collect();
        let ends: Vec<u32> =
            end_ids.iter().copied().filter(|id| (*id as usize) < words.len()).collect();
        let first_end = ends.first().copied().unwrap_or(INVALID_TOKEN);
        let mut trie = TokTrie::from(&TokRxInfo::new(words.len() as u32, first_end), &words);
        if ends.len() > 1 {
            trie = trie.with_eos_tokens(&ends);
        }
        let letter = encode(&tokenizer, "a");
        let begins_with_space = letter
            .first()
            .and_then(|id| tokenizer.token_bytes(*id))
            .is_some_and(|bytes| bytes.first() == Some(&b' '));
        let before = if begins_with_space { encode(&tokenizer, BEFORE) } else { Vec::new() };
        Vocabulary { trie, tokenizer, before }
    }

    /// The tokens of `text` where it goes on another.
    fn encode(&self, text: &str) -> Vec<u32> {
        if self.before.is_empty() {
            return encode(&self.tokenizer, text);
        }
        let all = encode(&self.tokenizer, &format!("{BEFORE}{text}"));
        match all.strip_prefix(self.before.as_slice()) {
            Some(ids) => ids.to_vec(),
            None => self.trie.greedy_tokenize(text.as_bytes()),
        }
    }
}

/// The bytes that the trie has for token `id`: none where it stands for no text, and behind toktrie's mark
/// where it is a mark itself, which a grammar reaches only by its name.
fn word(tokenizer: &Tokenizer, id: u32) -> Vec<u8> {
    let bytes = tokenizer.token_bytes(id).unwrap_or_default();
    if bytes.len() > TOKEN_BYTES_MAX {
        return Vec::new();
    }
    match tokenizer.vocabulary().token_type(id) {
        Some(TokenType::Control | TokenType::Unknown) => {
            [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes.as_slice()].concat()
        }
        _ => bytes,
    }
}

/// Bytes of a forced text that are tokenized: its first token is what matters, and all of a long text
/// would be tokenized again for each of its tokens.
const FORCED_BYTES_MAX: usize = 512;

/// Bytes of `bytes` to tokenize, whole characters where they are UTF-8.
fn beginning(bytes: &[u8]) -> usize {
    if bytes.len() <= FORCED_BYTES_MAX {
        return bytes.len();
    }
    let is_start = |at: &usize| !(0x80..0xC0).contains(&bytes[*at]);
    (FORCED_BYTES_MAX - 3..=FORCED_BYTES_MAX).rev().find(is_start).unwrap_or(FORCED_BYTES_MAX)
}

/// Fails for texts of more than a gigabyte only, which no grammar forces: then nothing is forced.
fn encode(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    let options = Encode { add_special: false, parse_special: false };
    tokenizer.encode(text, options).unwrap_or_default()
}

impl TokenizerEnv for Vocabulary {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        let bytes = &bytes[..beginning(bytes)];
        self.trie.tokenize_with_greedy_fallback(bytes, |text| self.encode(text))
    }
}
