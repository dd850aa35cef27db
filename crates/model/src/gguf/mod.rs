//! The GGUF model file: memory-mapped, checked in full on opening, read without copies.
//!
//! [`Gguf::open`] maps a file and checks its whole header (see `parse`); afterwards metadata and tensors
//! are borrowed from the mapping. Nothing in a file, however damaged, panics or makes Reef allocate more
//! than a small multiple of the file's size.

mod error;
mod map;
mod parse;
mod types;
mod value;

use std::ops::Range;
use std::path::Path;

pub use error::{GgufError, Optional, escape};
pub use types::TensorType;
pub use value::{Array, Elements, Strings, Value, ValueType};

use map::Bytes;
use parse::{Entry, Header, Tensor};

/// An open GGUF file.
#[derive(Debug)]
pub struct Gguf {
    bytes: Bytes,
    header: Header,
}

/// One tensor of the file.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TensorInfo<'a> {
    /// Its name, such as `blk.0.attn_q.weight`.
    pub name: &'a str,
    /// Sizes in ggml's order, as in the file: `dims[0]` is the length of a row (the input width of a
    /// linear layer), `dims[1]` the number of rows. At most 4; empty for a single number.
    pub dims: &'a [usize],
    /// How the elements are stored.
    pub tensor_type: TensorType,
    /// Byte of the file at which the data starts; a multiple of the file's alignment.
    pub offset: usize,
    /// The stored elements, row after row, each row a whole number of blocks.
    pub data: &'a [u8],
}

impl TensorInfo<'_> {
    /// Number of elements; the file's size bounds it.
    pub fn elements(&self) -> usize {
        self.dims.iter().product()
    }

    /// Fails with `GgufError::UnreadableType` unless Reef computes with this type.
    pub fn require_readable(&self) -> Result<(), GgufError> {
        if self.tensor_type.is_readable() {
            return Ok(());
        }
        let tensor = error::shown(self.name.as_bytes());
        Err(GgufError::UnreadableType { tensor, tensor_type: self.tensor_type })
    }
}

impl Gguf {
    /// Maps and checks the file at `path`. Errors are `GgufError::InFile`, which names it.
    pub fn open(path: impl AsRef<Path>) -> Result<Gguf, GgufError> {
        let path = path.as_ref();
        let opened = Bytes::map(path).map_err(GgufError::Io).and_then(Gguf::with_bytes);
        opened.map_err(|error| GgufError::InFile {
            path: escape(&path.to_string_lossy()),
            error: Box::new(error),
        })
    }

    /// Checks a file that is in memory. The data of its tensors has no particular alignment in memory.
    pub fn from_bytes(bytes: impl Into<Vec<u8>>) -> Result<Gguf, GgufError> {
        Gguf::with_bytes(Bytes::Owned(bytes.into()))
    }

    fn with_bytes(bytes: Bytes) -> Result<Gguf, GgufError> {
        let header = Header::parse(bytes.as_slice())?;
        Ok(Gguf { bytes, header })
    }

    /// Version of the format: 2 or 3.
    pub fn version(&self) -> u32 {
        self.header.version
    }

    /// Alignment of tensor data in the file, in bytes.
    pub fn alignment(&self) -> usize {
        self.header.alignment
    }

    /// Size of the file, in bytes.
    pub fn file_size(&self) -> usize {
        self.bytes.as_slice().len()
    }

    /// The bytes before the first tensor's data: header, metadata and tensor table. With the file's
    /// size they tell a model from others without reading its weights.
    pub fn preamble(&self) -> &[u8] {
        let end = self.tensors().map(|tensor| tensor.offset).min();
        &self.bytes.as_slice()[..end.unwrap_or(self.file_size())]
    }

    /// The architecture's name (`general.architecture`), such as `llama`.
    pub fn architecture(&self) -> Result<&str, GgufError> {
        self.str("general.architecture")
    }

    /// Every metadata key with its value, in file order.
    pub fn metadata(&self) -> impl ExactSizeIterator<Item = (&str, Value<'_>)> {
        let bytes = self.bytes.as_slice();
        self.header.entries.iter().map(|entry| (self.text(entry.key), value_of(bytes, entry)))
    }

    /// The value of `key`, if the file has it.
    pub fn get(&self, key: &str) -> Option<Value<'_>> {
        self.entry(key).ok().map(|(_, value)| value)
    }

    /// The integer `key`, of any width in the file. See [`Optional`] for keys that may be missing.
    pub fn u32(&self, key: &str) -> Result<u32, GgufError> {
        self.integer(key, "a 32-bit unsigned integer")
    }

    /// The integer `key`, of any width in the file.
    pub fn u64(&self, key: &str) -> Result<u64, GgufError> {
        self.integer(key, "a 64-bit unsigned integer")
    }

    /// The integer `key`, of any width in the file, as a size.
    pub fn usize(&self, key: &str) -> Result<usize, GgufError> {
        self.integer(key, "a size")
    }

    /// The number `key`, f32 or f64 in the file.
    pub fn f32(&self, key: &str) -> Result<f32, GgufError> {
        self.scalar(key, "a float", |value| value.float())
    }

    /// The truth value `key`.
    pub fn bool(&self, key: &str) -> Result<bool, GgufError> {
        self.scalar(key, "a bool", |value| match value {
            Value::Bool(truth) => Some(truth),
            _ => None,
        })
    }

    /// The string `key`.
    pub fn str(&self, key: &str) -> Result<&str, GgufError> {
        self.scalar(key, "a string", |value| match value {
            Value::Str(text) => Some(text),
            _ => None,
        })
    }

    /// The strings of array `key`, read from the file as they are asked for.
    pub fn str_array(&self, key: &str) -> Result<Strings<'_>, GgufError> {
        self.scalar(key, "an array of strings", |value| match value {
            Value::Array(array) => array.strings(),
            _ => None,
        })
    }

    /// The numbers of array `key`, f32 or f64 in the file.
    pub fn f32_array(&self, key: &str) -> Result<Vec<f32>, GgufError> {
        self.scalar(key, "an array of floats", |value| match value {
            Value::Array(array) => array.iter().map(|element| element.float()).collect(),
            _ => None,
        })
    }

    /// The integers of array `key`, of any width in the file; bools count as 0 and 1.
    pub fn u32_array(&self, key: &str) -> Result<Vec<u32>, GgufError> {
        self.integers(key, "an array of 32-bit unsigned integers")
    }

    /// The integers of array `key`, of any width in the file; bools count as 0 and 1.
    pub fn i32_array(&self, key: &str) -> Result<Vec<i32>, GgufError> {
        self.integers(key, "an array of 32-bit integers")
    }

    /// One integer per layer: `key` is an array of `layers` integers, or one integer for all of them.
    pub fn u32_per_layer(&self, key: &str, layers: usize) -> Result<Vec<u32>, GgufError> {
        let (entry, value) = self.entry(key)?;
        if !matches!(value, Value::Array(_)) {
            return Ok(vec![self.u32(key)?; layers]);
        }
        let found = self.u32_array(key)?;
        if found.len() == layers {
            return Ok(found);
        }
        Err(GgufError::ArrayLength {
            offset: entry.value.start,
            key: error::shown(key.as_bytes()),
            found: found.len(),
            expected: layers,
        })
    }

    /// Every tensor, in file order.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = TensorInfo<'_>> {
        self.header.tensors.iter().map(|tensor| self.info(tensor))
    }

    /// The tensor called `name`; `GgufError::MissingTensor` if there is none (see [`Optional`]).
    pub fn tensor(&self, name: &str) -> Result<TensorInfo<'_>, GgufError> {
        let found = self.header.tensor(self.bytes.as_slice(), name);
        let missing = || GgufError::MissingTensor { tensor: error::shown(name.as_bytes()) };
        found.map(|tensor| self.info(tensor)).ok_or_else(missing)
    }

    /// Takes the tensor's pages out of this process's resident set, for use once its data has been
    /// repacked elsewhere. Its data stays readable (from the file again). Advice only: never fails.
    pub fn advise_dont_need(&self, tensor: &TensorInfo<'_>) {
        self.advise_part_not_needed(tensor, 0..tensor.data.len());
    }

    /// [`advise_dont_need`](Self::advise_dont_need) for bytes `part` of the tensor's data.
    pub fn advise_part_not_needed(&self, tensor: &TensorInfo<'_>, part: Range<usize>) {
        self.bytes.advise_dont_need(tensor.offset + part.start..tensor.offset + part.end);
    }

    fn info<'a>(&'a self, tensor: &'a Tensor) -> TensorInfo<'a> {
        TensorInfo {
            name: self.text(tensor.name),
            dims: &tensor.dims[..tensor.dims_len],
            tensor_type: tensor.tensor_type,
            offset: tensor.data.start,
            data: tensor.data.of(self.bytes.as_slice()),
        }
    }

    /// The text of a name; checked on opening, empty if the file was changed since.
    fn text(&self, span: parse::Span) -> &str {
        std::str::from_utf8(span.of(self.bytes.as_slice())).unwrap_or("")
    }

    fn entry(&self, key: &str) -> Result<(&Entry, Value<'_>), GgufError> {
        let bytes = self.bytes.as_slice();
        let missing = || GgufError::MissingKey { key: error::shown(key.as_bytes()) };
        let entry = self.header.entry(bytes, key).ok_or_else(missing)?;
        Ok((entry, value_of(bytes, entry)))
    }

    fn scalar<'a, T>(
        &'a self,
        key: &str,
        expected: &'static str,
        convert: impl FnOnce(Value<'a>) -> Option<T>,
    ) -> Result<T, GgufError> {
        let (entry, value) = self.entry(key)?;
        convert(value).ok_or_else(|| wrong_type(entry, key, &value, expected))
    }

    fn integer<T: TryFrom<i128>>(&self, key: &str, expected: &'static str) -> Result<T, GgufError> {
        let (entry, value) = self.entry(key)?;
        let integer = value.integer().ok_or_else(|| wrong_type(entry, key, &value, expected))?;
        T::try_from(integer).map_err(|_| out_of_range(entry, key, integer, expected))
    }

    fn integers<T: TryFrom<i128>>(
        &self,
        key: &str,
        expected: &'static str,
    ) -> Result<Vec<T>, GgufError> {
        let (entry, value) = self.entry(key)?;
        let wrong = || wrong_type(entry, key, &value, expected);
        let Value::Array(array) = value else { return Err(wrong()) };
        let convert = |element: Value<'_>| {
            let integer = match element {
                Value::Bool(truth) => truth.into(),
                _ => element.integer().ok_or_else(wrong)?,
            };
            T::try_from(integer).map_err(|_| out_of_range(entry, key, integer, expected))
        };
        array.iter().map(convert).collect()
    }
}

fn value_of<'a>(bytes: &'a [u8], entry: &Entry) -> Value<'a> {
    let value = entry.value.of(bytes);
    match entry.elements {
        Some((element, len)) => Value::Array(Array { element, len, bytes: value }),
        // Decoding fails only if the file was changed since it was checked.
        None => Value::decode(entry.value_type, value).map_or(Value::Str(""), |(value, _)| value),
    }
}

fn wrong_type(entry: &Entry, key: &str, value: &Value<'_>, expected: &'static str) -> GgufError {
    let (offset, key) = (entry.value.start, error::shown(key.as_bytes()));
    GgufError::WrongType { offset, key, found: value.type_name(), expected }
}

fn out_of_range(entry: &Entry, key: &str, found: i128, expected: &'static str) -> GgufError {
    let (offset, key) = (entry.value.start, error::shown(key.as_bytes()));
    GgufError::OutOfRange { offset, key, found: found.to_string(), expected }
}
