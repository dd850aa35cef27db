//! Text to token ids and back, from the tokenizer in a GGUF file. Ids are those of llama.cpp.
//!
//! Two models are known: byte-level BPE (`gpt2`: SmolLM2, Llama 3, Qwen) and SentencePiece-BPE (`llama`:
//! Llama 2, Gemma). Both cut special tokens out of the text first, then join adjacent symbols (`merge`);
//! they differ in what may be joined and in which order.

mod bpe;
mod cut_out;
mod detokenizer;
mod index;
mod merge;
mod pretokenizer;
mod roles;
mod spm;
mod vocabulary;

use std::fmt;

pub use detokenizer::{Decode, Detokenizer};
pub use vocabulary::{SpecialIds, TokenType, Vocabulary};

use bpe::Bpe;
use cut_out::{CutOuts, Part};
use merge::Symbols;
use pretokenizer::PreTokenizer;
use spm::Spm;

use crate::gguf::{Gguf, GgufError, Optional};

/// Why a tokenizer cannot be built or used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // the message of each variant says what its fields are
pub enum TokenizerError {
    #[error(transparent)]
    Gguf(#[from] GgufError),
    #[error(
        "this file has no tokenizer (no tokenizer.ggml.model); give token ids, or another file"
    )]
    NoTokenizer,
    #[error(
        "tokenizer.ggml.model is `{name}`, which Reef does not know; known: gpt2 (byte-level BPE) and llama (SentencePiece-BPE)"
    )]
    UnknownModel { name: String },
    #[error("tokenizer.ggml.pre is `{name}`, which Reef does not know; known: {known}")]
    UnknownPreTokenizer { name: String, known: String },
    #[error("{key} has {found} elements but there are {expected} tokens; convert the model again")]
    Length { key: &'static str, found: usize, expected: usize },
    #[error("{key} is {id} but there are {count} tokens; convert the model again")]
    NoSuchToken { key: &'static str, id: u32, count: usize },
    #[error(
        "tokenizer.ggml.add_bos_token is true but there is no tokenizer.ggml.bos_token_id; convert the model again"
    )]
    NoBos,
    #[error(
        "tokenizer.ggml.merges, element {row}: `{text}` has no two parts with a space between; convert the model again"
    )]
    BadMerge { row: usize, text: String },
    #[error(
        "text or vocabulary too long: texts end at 1.3 GiB, vocabularies at 4 GiB; give it in parts"
    )]
    TooLong,
}

fn require_len(key: &'static str, found: usize, expected: usize) -> Result<(), TokenizerError> {
    if found == expected {
        return Ok(());
    }
    Err(TokenizerError::Length { key, found, expected })
}

/// How text becomes tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Encode {
    /// Add the BOS and EOS tokens that the file asks for.
    pub add_special: bool,
    /// Find control tokens (`<|im_start|>`) in the text; else they are text like any other. Tokens that
    /// a user defined are always found.
    pub parse_special: bool,
}

impl Default for Encode {
    /// As a prompt is read: both.
    fn default() -> Encode {
        Encode { add_special: true, parse_special: true }
    }
}

/// What a tokenizer is made of, borrowed from where it is stored.
pub struct Source<'a> {
    /// `gpt2` or `llama` (`tokenizer.ggml.model`).
    pub model: &'a str,
    /// How text is cut into words; `gpt2` only (`tokenizer.ggml.pre`).
    pub pre: Option<&'a str>,
    /// The text of each token.
    pub tokens: Box<dyn ExactSizeIterator<Item = &'a str> + 'a>,
    /// The type of each token, as numbered in GGUF; empty: all normal.
    pub types: Vec<i32>,
    /// The score of each token, `llama` only; empty: all zero.
    pub scores: Vec<f32>,
    /// `left right` pairs, `gpt2` only, the first joined first.
    pub merges: Box<dyn ExactSizeIterator<Item = &'a str> + 'a>,
    /// Ids with a role, as far as they are known.
    pub special: SpecialIds,
    /// Whether texts begin with BOS; `None`: as is usual for the model.
    pub add_bos: Option<bool>,
    /// Whether texts end with EOS; `None`: no.
    pub add_eos: Option<bool>,
    /// Whether `llama` puts a space before a text; `None`: yes.
    pub add_space_prefix: Option<bool>,
    /// Whether special tokens take the spaces after them along (Phi-3).
    pub special_takes_spaces: bool,
}

/// The two ways to tokenize.
#[derive(Debug)]
enum Model {
    Bpe(Box<Bpe>),
    Spm(Spm),
}

/// The tokenizer of a model.
pub struct Tokenizer {
    vocabulary: Vocabulary,
    model: Model,
    cut_outs: CutOuts,
    adds_bos: bool,
    adds_eos: bool,
    adds_space_prefix: bool,
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let model = match self.model {
            Model::Bpe(_) => "gpt2",
            Model::Spm(_) => "llama",
        };
        write!(f, "Tokenizer {{ model: {model}, tokens: {} }}", self.vocabulary.len())
    }
}

impl Tokenizer {
    /// The tokenizer in `file`. Keeps nothing borrowed from it. Fails if there is none, if its model or
    /// pre-tokenizer is not known (by name), or if its arrays do not fit together.
    pub fn from_gguf(file: &Gguf) -> Result<Tokenizer, TokenizerError> {
        let Some(model) = file.str("tokenizer.ggml.model").optional()? else {
            return Err(TokenizerError::NoTokenizer);
        };
        require_known(model)?;
        let mut special = SpecialIds::default();
        for (key, id) in special.keyed() {
            // Some converters write -1 for "none".
            *id = file.u32(key).optional()?.filter(|id| *id != u32::MAX);
        }
        let merges = file.str_array("tokenizer.ggml.merges").optional()?;
        let name = file.str("general.name").optional()?.unwrap_or_default().to_lowercase();
        Tokenizer::new(Source {
            model,
            pre: file.str("tokenizer.ggml.pre").optional()?,
            tokens: Box::new(file.str_array("tokenizer.ggml.tokens")?),
            types: file.i32_array("tokenizer.ggml.token_type").optional()?.unwrap_or_default(),
            scores: file.f32_array("tokenizer.ggml.scores").optional()?.unwrap_or_default(),
            merges: merges
                .map_or_else(|| Box::new(std::iter::empty()) as _, |all| Box::new(all) as _),
            special,
            add_bos: file.bool("tokenizer.ggml.add_bos_token").optional()?,
            add_eos: file.bool("tokenizer.ggml.add_eos_token").optional()?,
            add_space_prefix: file.bool("tokenizer.ggml.add_space_prefix").optional()?,
            special_takes_spaces: name.contains("phi-3") || name.contains("phi3"),
        })
    }

    /// The tokenizer that `source` describes. Fails as [`Tokenizer::from_gguf`] does.
    pub fn new(source: Source<'_>) -> Result<Tokenizer, TokenizerError> {
        require_known(source.model)?;
        let is_bpe = source.model == "gpt2";
        let count = source.tokens.len();
        let mut special = source.special;
        if !is_bpe {
            // The ids of Llama's own vocabulary, which files of that time do not repeat.
            let usual = |id: u32| Some(id).filter(|id| (*id as usize) < count);
            special.unknown = special.unknown.or(usual(0));
            special.bos = special.bos.or(usual(1));
            special.eos = special.eos.or(usual(2));
        }
        if source.add_bos == Some(true) && special.bos.is_none() {
            return Err(TokenizerError::NoBos);
        }
        // Before the vocabulary is read: an unknown name is told at once.
        let pre_tokenizer = if is_bpe { Some(PreTokenizer::named(source.pre)?) } else { None };
        let vocabulary = Vocabulary::new(source.tokens, &source.types, special)?;
        let model = match pre_tokenizer {
            Some(cutter) => Model::Bpe(Box::new(Bpe::new(&vocabulary, source.merges, cutter)?)),
            None => {
                let scores = if source.scores.is_empty() { count } else { source.scores.len() };
                require_len("tokenizer.ggml.scores", scores, count)?;
                Model::Spm(Spm::new(&vocabulary, &source.scores))
            }
        };
        let usually_bos = match &model {
            Model::Bpe(bpe) => bpe.adds_bos(),
            Model::Spm(_) => true,
        };
        Ok(Tokenizer {
            adds_bos: source.add_bos.unwrap_or(usually_bos),
            adds_eos: source.add_eos.unwrap_or(false),
            adds_space_prefix: !is_bpe && source.add_space_prefix.unwrap_or(true),
            cut_outs: CutOuts::new(&vocabulary, source.special_takes_spaces),
            vocabulary,
            model,
        })
    }

    /// The tokens of `text`. Fails only for texts of 1.3 GiB or more.
    pub fn encode(&self, text: &str, options: Encode) -> Result<Vec<u32>, TokenizerError> {
        // A space grows to the three bytes of U+2581, and one may come before the text.
        if text.len() >= u32::MAX as usize / 3 {
            return Err(TokenizerError::TooLong);
        }
        let mut ids = Vec::with_capacity(text.len() / 3 + 2);
        let special = self.vocabulary.special();
        ids.extend(special.bos.filter(|_| options.add_special && self.adds_bos));
        let mut symbols = Symbols::default();
        let mut after_special = true;
        for part in self.cut_outs.split(&self.vocabulary, text, options.parse_special) {
            match part {
                Part::Token(id) => {
                    ids.push(id);
                    after_special = true;
                }
                Part::Text(range) => {
                    self.encode_part(&text[range], after_special, &mut symbols, &mut ids);
                    after_special = false;
                }
            }
        }
        ids.extend(special.eos.filter(|_| options.add_special && self.adds_eos));
        Ok(ids)
    }

    /// Appends the tokens of text without special tokens.
    fn encode_part(
        &self,
        text: &str,
        after_special: bool,
        symbols: &mut Symbols,
        ids: &mut Vec<u32>,
    ) {
        match &self.model {
            Model::Bpe(bpe) => bpe.encode(&self.vocabulary, text, symbols, ids),
            Model::Spm(spm) => {
                let prefix = if self.adds_space_prefix && after_special { spm::SPACE } else { "" };
                let text = format!("{prefix}{}", text.replace(' ', spm::SPACE));
                spm.encode(&self.vocabulary, &text, symbols, ids);
            }
        }
    }

    /// The text of `ids`; bytes that are no UTF-8 become U+FFFD, ids that are no token nothing.
    pub fn decode(&self, ids: &[u32], options: Decode) -> String {
        let mut detokenizer = self.detokenizer(options);
        let mut text: String = ids.iter().map(|id| detokenizer.push(*id)).collect();
        text.push_str(&detokenizer.finish());
        text
    }

    /// Decodes one token at a time.
    pub fn detokenizer(&self, options: Decode) -> Detokenizer<&Tokenizer> {
        Detokenizer::new(self, options)
    }

    /// The bytes that token `id` stands for, which may be part of a character; special tokens as they are
    /// written. `None` if there is no such token.
    pub fn token_bytes(&self, id: u32) -> Option<Vec<u8>> {
        self.vocabulary.token_type(id)?;
        let mut bytes = Vec::new();
        self.append_bytes(id, &mut bytes);
        Some(bytes)
    }

    /// Appends [`Tokenizer::token_bytes`].
    fn append_bytes(&self, id: u32, bytes: &mut Vec<u8>) {
        let Some(text) = self.vocabulary.text(id) else { return };
        match (self.vocabulary.token_type(id), &self.model) {
            (Some(TokenType::Control | TokenType::Unknown | TokenType::UserDefined), _) => {
                bytes.extend_from_slice(text.as_bytes());
            }
            (Some(TokenType::Normal), Model::Bpe(bpe)) => bpe.letters.decode(text, bytes),
            (Some(TokenType::Normal), Model::Spm(_)) => {
                bytes.extend_from_slice(text.replace(spm::SPACE, " ").as_bytes());
            }
            (Some(TokenType::Byte), Model::Spm(_)) => bytes.extend(spm::byte(text)),
            _ => {}
        }
    }

    /// Whether token `id` is no part of the text: a mark for the model.
    fn is_hidden(&self, id: u32) -> bool {
        let token_type = self.vocabulary.token_type(id);
        matches!(token_type, Some(TokenType::Control | TokenType::Unknown))
    }

    /// Whether a generation ends with token `id`: EOS, the end of a turn, and tokens with such names.
    pub fn is_end_of_generation(&self, id: u32) -> bool {
        self.vocabulary.end_of_generation().binary_search(&id).is_ok()
    }

    /// The tokens, their types and roles.
    pub fn vocabulary(&self) -> &Vocabulary {
        &self.vocabulary
    }

    /// Whether texts begin with the BOS token.
    pub fn adds_bos(&self) -> bool {
        self.adds_bos
    }

    /// Whether texts end with the EOS token.
    pub fn adds_eos(&self) -> bool {
        self.adds_eos
    }
}

fn require_known(model: &str) -> Result<(), TokenizerError> {
    match model {
        "gpt2" | "llama" => Ok(()),
        _ => Err(TokenizerError::UnknownModel { name: crate::gguf::escape(model) }),
    }
}
