//! The tokens of a model: their texts, types and special roles.

use super::TokenizerError;
use super::index::RowIndex;
use super::roles;

/// What a token is for (`tokenizer.ggml.token_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenType {
    /// A piece of text.
    Normal,
    /// Stands for text that the vocabulary cannot say.
    Unknown,
    /// A mark for the model, such as BOS; not part of the text.
    Control,
    /// Text that is found as it stands before anything else is tokenized.
    UserDefined,
    /// Never used.
    Unused,
    /// One byte, written `<0x0A>`.
    Byte,
}

impl TokenType {
    /// The type with this number in a GGUF file; numbers that mean nothing are normal, as in llama.cpp.
    fn from_number(number: i32) -> TokenType {
        match number {
            2 => TokenType::Unknown,
            3 => TokenType::Control,
            4 => TokenType::UserDefined,
            5 => TokenType::Unused,
            6 => TokenType::Byte,
            _ => TokenType::Normal,
        }
    }
}

/// Token ids with a role; `None` where the model has none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpecialIds {
    /// Begins a text.
    pub bos: Option<u32>,
    /// Ends a text.
    pub eos: Option<u32>,
    /// Ends a turn of a conversation.
    pub eot: Option<u32>,
    /// Ends a message that is continued after a tool call.
    pub eom: Option<u32>,
    /// Stands for what the vocabulary cannot say.
    pub unknown: Option<u32>,
    /// Fills a batch.
    pub padding: Option<u32>,
}

impl SpecialIds {
    /// Each role that the file may set, with its key.
    pub(super) fn keyed(&mut self) -> [(&'static str, &mut Option<u32>); 6] {
        [
            ("tokenizer.ggml.bos_token_id", &mut self.bos),
            ("tokenizer.ggml.eos_token_id", &mut self.eos),
            ("tokenizer.ggml.eot_token_id", &mut self.eot),
            ("tokenizer.ggml.eom_token_id", &mut self.eom),
            ("tokenizer.ggml.unknown_token_id", &mut self.unknown),
            ("tokenizer.ggml.padding_token_id", &mut self.padding),
        ]
    }
}

/// The texts, types and roles of all tokens; the texts are stored once, end to end.
#[derive(Debug)]
pub struct Vocabulary {
    texts: Vec<u8>,
    /// Token `id` is `texts[starts[id]..starts[id + 1]]`.
    starts: Vec<u32>,
    types: Vec<TokenType>,
    by_text: RowIndex,
    special: SpecialIds,
    /// Sorted; see [`Vocabulary::end_of_generation`].
    ends: Vec<u32>,
}

impl Vocabulary {
    /// Token `id` has the `id`-th of `texts` and the type with number `types[id]` (as in GGUF; empty:
    /// all normal). Of tokens with equal texts, the last is found by its text, as in llama.cpp. Roles
    /// that `special` leaves open are given to tokens with well-known names.
    ///
    /// Fails if the lengths differ, an id of `special` is not a token, or the texts pass 4 GiB.
    pub fn new<'a>(
        texts: impl ExactSizeIterator<Item = &'a str>,
        types: &[i32],
        special: SpecialIds,
    ) -> Result<Vocabulary, TokenizerError> {
        let count = texts.len();
        let types = match types.len() {
            0 => vec![TokenType::Normal; count],
            _ => types.iter().map(|number| TokenType::from_number(*number)).collect(),
        };
        super::require_len("tokenizer.ggml.token_type", types.len(), count)?;
        let mut vocabulary = Vocabulary {
            texts: Vec::with_capacity(count * 8),
            starts: Vec::with_capacity(count + 1),
            types,
            by_text: RowIndex::with_capacity(count),
            special,
            ends: Vec::new(),
        };
        vocabulary.starts.push(0);
        for (id, text) in texts.enumerate() {
            vocabulary.push(id as u32, text)?;
        }
        // The file may have been changed under the map since its arrays were counted.
        super::require_len("tokenizer.ggml.tokens", vocabulary.starts.len() - 1, count)?;
        vocabulary.texts.shrink_to_fit();
        for (key, id) in vocabulary.special.keyed() {
            if let Some(id) = id.filter(|id| *id as usize >= count) {
                return Err(TokenizerError::NoSuchToken { key, id, count });
            }
        }
        roles::assign(&mut vocabulary);
        Ok(vocabulary)
    }

    fn push(&mut self, id: u32, text: &str) -> Result<(), TokenizerError> {
        self.texts.extend_from_slice(text.as_bytes());
        let end = u32::try_from(self.texts.len()).map_err(|_| TokenizerError::TooLong)?;
        self.starts.push(end);
        if text.is_empty() {
            return Ok(()); // nothing can be written with it
        }
        let (texts, starts) = (&self.texts, &self.starts);
        let is_text = |other| slice(texts, starts, other) == text.as_bytes();
        self.by_text.insert(text.as_bytes(), id, true, is_text);
        Ok(())
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.types.len()
    }

    /// True when there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.types.is_empty()
    }

    /// The text of token `id` as the file has it (byte-level BPE: in GPT-2's letters for bytes).
    pub fn text(&self, id: u32) -> Option<&str> {
        let bytes = ((id as usize) < self.len()).then(|| slice(&self.texts, &self.starts, id))?;
        std::str::from_utf8(bytes).ok() // always: they were copied from a `str`
    }

    /// The type of token `id`.
    pub fn token_type(&self, id: u32) -> Option<TokenType> {
        self.types.get(id as usize).copied()
    }

    /// The token with exactly this text in the file.
    pub fn find(&self, text: &str) -> Option<u32> {
        self.find_bytes(text.as_bytes())
    }

    /// The token with exactly these bytes as its text.
    pub(super) fn find_bytes(&self, bytes: &[u8]) -> Option<u32> {
        self.by_text.find(bytes, |id| slice(&self.texts, &self.starts, id) == bytes)
    }

    /// Ids with a role.
    pub fn special(&self) -> &SpecialIds {
        &self.special
    }

    /// Tokens after which a model has said all: EOS, EOT, EOM and tokens with such names; sorted.
    pub fn end_of_generation(&self) -> &[u32] {
        &self.ends
    }

    /// Sets the roles found by name: `special`, and the sorted `ends`. Those become control tokens
    /// whatever the file says, as in llama.cpp.
    pub(super) fn set_roles(&mut self, special: SpecialIds, ends: Vec<u32>, control: &[u32]) {
        for id in control {
            self.types[*id as usize] = TokenType::Control;
        }
        self.special = special;
        self.ends = ends;
    }
}

fn slice<'a>(texts: &'a [u8], starts: &[u32], id: u32) -> &'a [u8] {
    &texts[starts[id as usize] as usize..starts[id as usize + 1] as usize]
}
