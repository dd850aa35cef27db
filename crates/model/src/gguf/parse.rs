//! Reads and checks the header of a GGUF file: an index of spans into its bytes, no copies.
//!
//! Format: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>, versions 2 and 3. Every count is
//! compared with the bytes that are left before anything is read or allocated, so that a header can
//! never cost more memory than a small multiple of the file.

use super::error::{Field, GgufError, shown};
use super::types::TensorType;
use super::value::ValueType;

/// Longest string, in bytes.
const STRING_BYTES_MAX: u64 = 1 << 30;
/// Longest metadata key, in bytes (the specification's limit).
const KEY_BYTES_MAX: u64 = 65_535;
/// Longest tensor name, in bytes; the specification says 64, some converters write more.
const TENSOR_NAME_BYTES_MAX: u64 = 256;
/// Most metadata keys; real files have tens, test files hundreds.
const KEYS_MAX: u64 = 1 << 16;
/// Most tensors; the largest mixture-of-experts models have tens of thousands.
const TENSORS_MAX: u64 = 1 << 20;
/// Most dimensions of a tensor.
pub(super) const DIMENSIONS_MAX: usize = 4;
/// Bytes of the smallest key with its value: length, type, one byte.
const KEY_BYTES_MIN: u64 = 8 + 4 + 1;
/// Bytes of the smallest tensor description: length of its name, dimension count, type, offset.
const TENSOR_BYTES_MIN: u64 = 8 + 4 + 4 + 8;
/// Alignment of tensor data when the file names none, in bytes.
const ALIGNMENT_DEFAULT: usize = 32;
/// Least and largest alignment accepted, in bytes.
const ALIGNMENT_MIN: usize = 8;
const ALIGNMENT_MAX: usize = 1 << 20;

/// Bytes `start .. start + len` of the file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    pub(super) start: usize,
    pub(super) len: usize,
}

impl Span {
    /// The bytes of this span; it lies inside the file by construction.
    pub(super) fn of(self, bytes: &[u8]) -> &[u8] {
        &bytes[self.start..self.start + self.len]
    }
}

/// One metadata key and where its value is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    pub(super) key: Span,
    pub(super) value_type: ValueType,
    /// For arrays, the type and number of the elements.
    pub(super) elements: Option<(ValueType, usize)>,
    /// The value; of a string with its length field, of an array only the elements.
    pub(super) value: Span,
}

/// One tensor and where its data is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tensor {
    pub(super) name: Span,
    pub(super) dims: [usize; DIMENSIONS_MAX],
    pub(super) dims_len: usize,
    pub(super) tensor_type: TensorType,
    pub(super) data: Span,
    /// Byte of the description in the header, for messages.
    described_at: usize,
    /// Offset of the data as the file gives it, from the start of the data section.
    relative: u64,
}

/// The checked index of a file.
#[derive(Debug)]
pub(super) struct Header {
    pub(super) version: u32,
    pub(super) alignment: usize,
    pub(super) entries: Vec<Entry>,
    pub(super) tensors: Vec<Tensor>,
    /// Indices into `entries`, sorted by key.
    pub(super) by_key: Vec<u32>,
    /// Indices into `tensors`, sorted by name.
    pub(super) by_name: Vec<u32>,
}

impl Header {
    /// Reads and checks the header in `bytes`, the whole file.
    pub(super) fn parse(bytes: &[u8]) -> Result<Header, GgufError> {
        let mut cursor = Cursor { bytes, at: 0 };
        let version = read_version(&mut cursor)?;
        let tensor_count = cursor.count(&"tensor count", TENSOR_BYTES_MIN, TENSORS_MAX)?;
        let key_count = cursor.count(&"metadata key count", KEY_BYTES_MIN, KEYS_MAX)?;
        let mut header = Header {
            version,
            alignment: ALIGNMENT_DEFAULT,
            entries: Vec::new(),
            tensors: Vec::new(),
            by_key: Vec::new(),
            by_name: Vec::new(),
        };
        for index in 0..key_count {
            header.entries.push(read_entry(&mut cursor, index)?);
        }
        header.by_key = sorted(
            bytes,
            header.entries.len(),
            |i| header.entries[i].key,
            |key| GgufError::DuplicateKey { offset: key.start, key: shown(key.of(bytes)) },
        )?;
        header.alignment = alignment(bytes, &header)?;
        refuse_split(bytes, &header)?;
        for index in 0..tensor_count {
            header.tensors.push(read_tensor(&mut cursor, index)?);
        }
        header.by_name = sorted(
            bytes,
            header.tensors.len(),
            |i| header.tensors[i].name,
            |name| GgufError::DuplicateTensor { offset: name.start, tensor: shown(name.of(bytes)) },
        )?;
        place_tensors(bytes, cursor.at, &mut header)?;
        Ok(header)
    }

    /// The entry with this key.
    pub(super) fn entry(&self, bytes: &[u8], key: &str) -> Option<&Entry> {
        let found = self
            .by_key
            .binary_search_by(|&i| self.entries[i as usize].key.of(bytes).cmp(key.as_bytes()));
        Some(&self.entries[self.by_key[found.ok()?] as usize])
    }

    /// The tensor with this name.
    pub(super) fn tensor(&self, bytes: &[u8], name: &str) -> Option<&Tensor> {
        let found = self
            .by_name
            .binary_search_by(|&i| self.tensors[i as usize].name.of(bytes).cmp(name.as_bytes()));
        Some(&self.tensors[self.by_name[found.ok()?] as usize])
    }
}

/// A position in the file; every read is checked against its end.
struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    fn take(&mut self, length: u64, field: Field) -> Result<Span, GgufError> {
        match usize::try_from(length) {
            Ok(len) if len <= self.left() => {
                let span = Span { start: self.at, len };
                self.at += len;
                Ok(span)
            }
            _ => Err(GgufError::Truncated {
                offset: self.at,
                field: field.to_string(),
                needed: length,
                left: self.left(),
            }),
        }
    }

    fn u32(&mut self, field: Field) -> Result<u32, GgufError> {
        let span = self.take(4, field)?;
        let mut raw = [0; 4];
        raw.copy_from_slice(span.of(self.bytes));
        Ok(u32::from_le_bytes(raw))
    }

    fn u64(&mut self, field: Field) -> Result<u64, GgufError> {
        let span = self.take(8, field)?;
        let mut raw = [0; 8];
        raw.copy_from_slice(span.of(self.bytes));
        Ok(u64::from_le_bytes(raw))
    }

    /// A number of things of at least `bytes_min` bytes each, at most `most` of them.
    fn count(&mut self, field: Field, bytes_min: u64, most: u64) -> Result<usize, GgufError> {
        let offset = self.at;
        let count = self.u64(field)?;
        let max = most.min(self.left() as u64 / bytes_min);
        match usize::try_from(count) {
            Ok(fitting) if count <= max => Ok(fitting),
            _ => Err(GgufError::TooMany { offset, field: field.to_string(), count, max }),
        }
    }

    /// A length-prefixed UTF-8 string of at most `bytes_max` bytes; the span is of its text.
    fn string(&mut self, field: Field, bytes_max: u64) -> Result<Span, GgufError> {
        let offset = self.at;
        let length = self.u64(&format_args!("length of {field}"))?;
        if length > bytes_max {
            let field = format!("length of {field}");
            return Err(GgufError::TooMany { offset, field, count: length, max: bytes_max });
        }
        let span = self.take(length, field)?;
        if let Err(error) = std::str::from_utf8(span.of(self.bytes)) {
            let (offset, field) = (span.start, field.to_string());
            return Err(GgufError::NotUtf8 { offset, field, valid: error.valid_up_to() });
        }
        Ok(span)
    }

    /// A name: a string that is not empty.
    fn name(&mut self, field: Field, bytes_max: u64) -> Result<Span, GgufError> {
        let offset = self.at;
        let span = self.string(field, bytes_max)?;
        if span.len == 0 {
            return Err(GgufError::EmptyName { offset, field: field.to_string() });
        }
        Ok(span)
    }
}

fn read_version(cursor: &mut Cursor) -> Result<u32, GgufError> {
    let magic = cursor.take(4, &"magic")?.of(cursor.bytes);
    if magic != b"GGUF" {
        let found = format!("\"{}\"", magic.escape_ascii());
        return Err(GgufError::Magic { found });
    }
    let version = cursor.u32(&"version")?;
    match version {
        2 | 3 => Ok(version),
        _ if matches!(version.swap_bytes(), 1..=3) => Err(GgufError::BigEndian),
        _ => Err(GgufError::Version { version }),
    }
}

fn read_entry(cursor: &mut Cursor, index: usize) -> Result<Entry, GgufError> {
    let bytes = cursor.bytes;
    let key = cursor.name(&format_args!("metadata key {index}"), KEY_BYTES_MAX)?;
    let shown_key = || shown(key.of(bytes));
    let value_type = read_value_type(cursor, key)?;
    let start = cursor.at;
    if value_type != ValueType::Array {
        read_value(cursor, key, value_type)?;
        let value = Span { start, len: cursor.at - start };
        return Ok(Entry { key, value_type, elements: None, value });
    }
    let element = read_value_type(cursor, key)?;
    if element == ValueType::Array {
        return Err(GgufError::NestedArray { offset: start, key: shown_key() });
    }
    let field = Lazy(|| format!("length of array {}", shown_key()));
    let count = cursor.count(&field, element.bytes_min() as u64, u64::MAX)?;
    let start = cursor.at;
    match element {
        ValueType::Str | ValueType::Bool => {
            for _ in 0..count {
                read_value(cursor, key, element)?;
            }
        }
        _ => {
            // `count` keeps the product below the bytes that are left.
            cursor.take((count * element.bytes_min()) as u64, &Lazy(shown_key))?;
        }
    }
    let value = Span { start, len: cursor.at - start };
    Ok(Entry { key, value_type, elements: Some((element, count)), value })
}

fn read_value_type(cursor: &mut Cursor, key: Span) -> Result<ValueType, GgufError> {
    let offset = cursor.at;
    let bytes = cursor.bytes;
    let id = cursor.u32(&Lazy(|| format!("type of key {}", shown(key.of(bytes)))))?;
    let unknown = || GgufError::ValueType { offset, key: shown(key.of(bytes)), id };
    ValueType::from_id(id).ok_or_else(unknown)
}

fn read_value(cursor: &mut Cursor, key: Span, value_type: ValueType) -> Result<(), GgufError> {
    let bytes = cursor.bytes;
    let field = Lazy(|| format!("value of key {}", shown(key.of(bytes))));
    match value_type {
        ValueType::Str => {
            cursor.string(&field, STRING_BYTES_MAX)?;
        }
        ValueType::Bool => {
            let span = cursor.take(1, &field)?;
            let found = span.of(bytes)[0];
            if found > 1 {
                let key = shown(key.of(bytes));
                return Err(GgufError::Bool { offset: span.start, key, found });
            }
        }
        _ => {
            cursor.take(value_type.bytes_min() as u64, &field)?;
        }
    }
    Ok(())
}

/// The number `general.alignment` gives, else the default.
fn alignment(bytes: &[u8], header: &Header) -> Result<usize, GgufError> {
    let Some(entry) = header.entry(bytes, "general.alignment") else {
        return Ok(ALIGNMENT_DEFAULT);
    };
    let wrong = |found: String| GgufError::Alignment {
        offset: entry.value.start,
        found,
        max: ALIGNMENT_MAX,
    };
    if entry.value_type != ValueType::U32 {
        return Err(wrong(format!("a value of type {}", entry.value_type)));
    }
    let found =
        entry.value.of(bytes).iter().rev().fold(0, |sum, &byte| sum << 8 | usize::from(byte));
    if !found.is_power_of_two() || !(ALIGNMENT_MIN..=ALIGNMENT_MAX).contains(&found) {
        return Err(wrong(found.to_string()));
    }
    Ok(found)
}

/// Refuses one part of a model that was split over several files.
fn refuse_split(bytes: &[u8], header: &Header) -> Result<(), GgufError> {
    let Some(entry) = header.entry(bytes, "split.count") else { return Ok(()) };
    let offset = entry.value.start;
    let value = super::value::Value::decode(entry.value_type, entry.value.of(bytes));
    match value.and_then(|(value, _)| value.integer()) {
        Some(0 | 1) => Ok(()),
        Some(count) => Err(GgufError::Split { offset, count: count.to_string() }),
        None => Err(GgufError::WrongType {
            offset,
            key: "split.count".to_owned(),
            found: entry.value_type.to_string(),
            expected: "an integer",
        }),
    }
}

/// Reads one tensor description; its data span is set by `place_tensors`.
fn read_tensor(cursor: &mut Cursor, index: usize) -> Result<Tensor, GgufError> {
    let bytes = cursor.bytes;
    let described_at = cursor.at;
    let name = cursor.name(&format_args!("name of tensor {index}"), TENSOR_NAME_BYTES_MAX)?;
    let tensor = || shown(name.of(bytes));
    let offset = cursor.at;
    let count = cursor.u32(&Lazy(|| format!("dimension count of tensor {}", tensor())))?;
    let dims_len = count as usize;
    if dims_len > DIMENSIONS_MAX {
        return Err(GgufError::DimensionCount { offset, tensor: tensor(), count });
    }
    let mut dims = [1; DIMENSIONS_MAX];
    for (dimension, size) in dims[..dims_len].iter_mut().enumerate() {
        let offset = cursor.at;
        let field = Lazy(|| format!("dimension {dimension} of tensor {}", tensor()));
        *size = usize::try_from(cursor.u64(&field)?)
            .map_err(|_| GgufError::SizeOverflow { offset, tensor: tensor() })?;
        if *size == 0 {
            return Err(GgufError::ZeroDimension { offset, tensor: tensor(), dimension });
        }
    }
    let type_at = cursor.at;
    let id = cursor.u32(&Lazy(|| format!("type of tensor {}", tensor())))?;
    let tensor_type = TensorType::from_id(id).ok_or_else(|| GgufError::UnknownTensorType {
        offset: type_at,
        tensor: tensor(),
        id,
    })?;
    let (row, block) = (dims[0], tensor_type.block_elements());
    if !row.is_multiple_of(block) {
        let offset = described_at;
        return Err(GgufError::RowLength { offset, tensor: tensor(), row, tensor_type, block });
    }
    let len = dims
        .iter()
        .try_fold(1usize, |product, &size| product.checked_mul(size))
        .and_then(|elements| tensor_type.bytes_of(elements))
        .ok_or_else(|| GgufError::SizeOverflow { offset, tensor: tensor() })?;
    let relative = cursor.u64(&Lazy(|| format!("data offset of tensor {}", tensor())))?;
    let data = Span { start: 0, len };
    Ok(Tensor { name, dims, dims_len, tensor_type, data, described_at, relative })
}

/// Turns relative data offsets into spans of the file: aligned, inside it, none over another.
fn place_tensors(bytes: &[u8], header_end: usize, header: &mut Header) -> Result<(), GgufError> {
    let alignment = header.alignment;
    // The header ends inside the file and the alignment is small: no overflow.
    let data_start = header_end.next_multiple_of(alignment);
    for tensor in &mut header.tensors {
        let name = || shown(tensor.name.of(bytes));
        let (offset, found, len) = (tensor.described_at, tensor.relative, tensor.data.len);
        if !found.is_multiple_of(alignment as u64) {
            return Err(GgufError::Misaligned { offset, tensor: name(), found, alignment });
        }
        let start = usize::try_from(found).ok().and_then(|found| found.checked_add(data_start));
        tensor.data.start = start
            .filter(|start| start.checked_add(len).is_some_and(|end| end <= bytes.len()))
            .ok_or_else(|| {
                let (bytes, size) = (len, bytes.len());
                GgufError::OutsideFile { offset, tensor: name(), found, bytes, size }
            })?;
    }
    let mut by_start: Vec<&Tensor> = header.tensors.iter().collect();
    by_start.sort_by_key(|tensor| tensor.data.start);
    for pair in by_start.windows(2) {
        if pair[0].data.start + pair[0].data.len > pair[1].data.start {
            return Err(GgufError::Overlap {
                offset: pair[1].described_at,
                tensor: shown(pair[1].name.of(bytes)),
                other: shown(pair[0].name.of(bytes)),
            });
        }
    }
    Ok(())
}

/// Indices `0..count` sorted by the name each has; `duplicate` makes the error for a name seen twice.
fn sorted(
    bytes: &[u8],
    count: usize,
    name: impl Fn(usize) -> Span,
    duplicate: impl Fn(Span) -> GgufError,
) -> Result<Vec<u32>, GgufError> {
    let mut order: Vec<u32> = (0..count as u32).collect();
    // Stable, so that of two equal names the second in the file is the one reported.
    order.sort_by(|&a, &b| name(a as usize).of(bytes).cmp(name(b as usize).of(bytes)));
    for pair in order.windows(2) {
        let (first, second) = (name(pair[0] as usize), name(pair[1] as usize));
        if first.of(bytes) == second.of(bytes) {
            return Err(duplicate(second));
        }
    }
    Ok(order)
}

/// A field name made only when an error shows it.
struct Lazy<F: Fn() -> String>(F);

impl<F: Fn() -> String> std::fmt::Display for Lazy<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&(self.0)())
    }
}
