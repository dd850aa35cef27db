//! What can be wrong with a GGUF file. Every message is one line and names the byte and the field.

use std::fmt;
use std::io;

use super::types::TensorType;

/// Why a GGUF file, one of its values or one of its tensors cannot be used.
///
/// `offset` is the byte of the file at which the field starts. Names from the file are escaped and
/// shortened, so that a message stays one printable line.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // the message of each variant says what its fields are
pub enum GgufError {
    #[error("{path}: {error}")]
    InFile { path: String, error: Box<GgufError> },
    #[error("cannot be read: {0}")]
    Io(io::Error),
    #[error("byte 0, magic: found {found}, not \"GGUF\"; this is not a GGUF file")]
    Magic { found: String },
    #[error(
        "byte 4, version: this file is big-endian, which Reef does not read; convert it to little-endian"
    )]
    BigEndian,
    #[error("byte 4, version: {version}; Reef reads versions 2 and 3, convert the model again")]
    Version { version: u32 },
    #[error(
        "byte {offset}, {field}: needs {needed} bytes but the file has {left} left; it is truncated"
    )]
    Truncated { offset: usize, field: String, needed: u64, left: usize },
    #[error("byte {offset}, {field}: {count} is more than the {max} that are possible here")]
    TooMany { offset: usize, field: String, count: u64, max: u64 },
    #[error("byte {offset}, {field}: not UTF-8 at its byte {valid}")]
    NotUtf8 { offset: usize, field: String, valid: usize },
    #[error("byte {offset}, {field}: empty")]
    EmptyName { offset: usize, field: String },
    #[error("byte {offset}, type of key {key}: {id} is not a GGUF value type (0 to 12)")]
    ValueType { offset: usize, key: String, id: u32 },
    #[error("byte {offset}, key {key}: an array of arrays, which Reef does not read")]
    NestedArray { offset: usize, key: String },
    #[error("byte {offset}, key {key}: a bool of value {found}, not 0 or 1")]
    Bool { offset: usize, key: String, found: u8 },
    #[error("byte {offset}, key {key}: given a second time")]
    DuplicateKey { offset: usize, key: String },
    #[error(
        "byte {offset}, general.alignment: {found}; must be a power of two from 8 to {max}, as u32"
    )]
    Alignment { offset: usize, found: String, max: usize },
    #[error(
        "byte {offset}, split.count: one of {count} parts; join them (llama-gguf-split --merge) and give the whole"
    )]
    Split { offset: usize, count: String },
    #[error("byte {offset}, tensor {tensor}: {count} dimensions; at most 4 are possible")]
    DimensionCount { offset: usize, tensor: String, count: u32 },
    #[error("byte {offset}, tensor {tensor}: dimension {dimension} is 0")]
    ZeroDimension { offset: usize, tensor: String, dimension: usize },
    #[error("byte {offset}, tensor {tensor}: its size overflows")]
    SizeOverflow { offset: usize, tensor: String },
    #[error(
        "byte {offset}, tensor {tensor}: type id {id} is unknown; convert the model with a current llama.cpp"
    )]
    UnknownTensorType { offset: usize, tensor: String, id: u32 },
    #[error(
        "byte {offset}, tensor {tensor}: rows of {row} elements are not whole {tensor_type} blocks of {block}"
    )]
    RowLength { offset: usize, tensor: String, row: usize, tensor_type: TensorType, block: usize },
    #[error(
        "byte {offset}, tensor {tensor}: data offset {found} is not a multiple of the alignment {alignment}"
    )]
    Misaligned { offset: usize, tensor: String, found: u64, alignment: usize },
    #[error(
        "byte {offset}, tensor {tensor}: data offset {found} with {bytes} bytes ends after the file ({size} bytes); it is truncated or damaged"
    )]
    OutsideFile { offset: usize, tensor: String, found: u64, bytes: usize, size: usize },
    #[error("byte {offset}, tensor {tensor}: its data overlaps that of tensor {other}")]
    Overlap { offset: usize, tensor: String, other: String },
    #[error("byte {offset}, tensor {tensor}: given a second time")]
    DuplicateTensor { offset: usize, tensor: String },
    #[error("key {key} is missing: the file is incomplete, fetch or convert it again")]
    MissingKey { key: String },
    #[error("byte {offset}, key {key}: has type {found}, expected {expected}")]
    WrongType { offset: usize, key: String, found: String, expected: &'static str },
    #[error("byte {offset}, key {key}: value {found} does not fit {expected}")]
    OutOfRange { offset: usize, key: String, found: String, expected: &'static str },
    #[error("byte {offset}, key {key}: {found} values, expected {expected}")]
    ArrayLength { offset: usize, key: String, found: usize, expected: usize },
    #[error("tensor {tensor} is missing: the file is incomplete, fetch or convert it again")]
    MissingTensor { tensor: String },
    #[error(
        "tensor {tensor} has type {tensor_type}, which Reef does not read; convert the model to one of {}",
        readable()
    )]
    UnreadableType { tensor: String, tensor_type: TensorType },
}

fn readable() -> String {
    TensorType::READABLE.map(TensorType::name).join(" ")
}

/// Turns "the key is missing" into `None`; other errors (wrong type, out of range) stay errors.
pub trait Optional<T> {
    /// `Ok(None)` for `GgufError::MissingKey` and `GgufError::MissingTensor`.
    fn optional(self) -> Result<Option<T>, GgufError>;
}

impl<T> Optional<T> for Result<T, GgufError> {
    fn optional(self) -> Result<Option<T>, GgufError> {
        match self {
            Ok(value) => Ok(Some(value)),
            Err(GgufError::MissingKey { .. } | GgufError::MissingTensor { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// Characters of a name shown in an error; real names are shorter.
const NAME_CHARS_MAX: usize = 80;

/// `text` on one printable line: control, format and other unprintable characters and backslashes
/// become Rust escapes; quotes stay as they are.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '"' | '\'' => out.push(character),
            _ => out.extend(character.escape_debug()),
        }
    }
    out
}

/// A name from the file as shown in an error: escaped, and shortened when very long.
pub(super) fn shown(name: &[u8]) -> String {
    let text = String::from_utf8_lossy(&name[..name.len().min(4 * NAME_CHARS_MAX)]);
    let short: String = text.chars().take(NAME_CHARS_MAX).collect();
    let mark = if short.len() < name.len() { "..." } else { "" };
    format!("{}{mark}", escape(&short))
}

/// A displayable field name, built only when an error needs it.
pub(super) type Field<'a> = &'a dyn fmt::Display;
