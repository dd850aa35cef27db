//! Metadata values, borrowed from the file; arrays are views decoded as they are read.

use std::fmt;

/// The type of a metadata value, without its contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // the names say all
pub enum ValueType {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    Str,
    Array,
    U64,
    I64,
    F64,
}

impl ValueType {
    /// The type with this id in a GGUF file (0 to 12).
    pub(super) fn from_id(id: u32) -> Option<ValueType> {
        use ValueType::*;
        const BY_ID: [ValueType; 13] =
            [U8, I8, U16, I16, U32, I32, F32, Bool, Str, Array, U64, I64, F64];
        BY_ID.get(usize::try_from(id).ok()?).copied()
    }

    /// Bytes of a scalar; for a string or an array, of its smallest encoding.
    pub(super) fn bytes_min(self) -> usize {
        use ValueType::*;
        match self {
            U8 | I8 | Bool => 1,
            U16 | I16 => 2,
            U32 | I32 | F32 => 4,
            U64 | I64 | F64 | Str => 8,
            Array => 12,
        }
    }

    /// The name used in messages.
    pub fn name(self) -> &'static str {
        use ValueType::*;
        match self {
            U8 => "u8",
            I8 => "i8",
            U16 => "u16",
            I16 => "i16",
            U32 => "u32",
            I32 => "i32",
            F32 => "f32",
            Bool => "bool",
            Str => "string",
            Array => "array",
            U64 => "u64",
            I64 => "i64",
            F64 => "f64",
        }
    }
}

impl fmt::Display for ValueType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// One metadata value; strings and arrays borrow from the file.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs)] // the names say all
pub enum Value<'a> {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    Str(&'a str),
    Array(Array<'a>),
    U64(u64),
    I64(i64),
    F64(f64),
}

impl<'a> Value<'a> {
    /// The type of this value.
    pub fn value_type(&self) -> ValueType {
        match self {
            Value::U8(_) => ValueType::U8,
            Value::I8(_) => ValueType::I8,
            Value::U16(_) => ValueType::U16,
            Value::I16(_) => ValueType::I16,
            Value::U32(_) => ValueType::U32,
            Value::I32(_) => ValueType::I32,
            Value::F32(_) => ValueType::F32,
            Value::Bool(_) => ValueType::Bool,
            Value::Str(_) => ValueType::Str,
            Value::Array(_) => ValueType::Array,
            Value::U64(_) => ValueType::U64,
            Value::I64(_) => ValueType::I64,
            Value::F64(_) => ValueType::F64,
        }
    }

    /// The value of an integer of any width; `None` for other types.
    pub fn integer(&self) -> Option<i128> {
        match *self {
            Value::U8(value) => Some(value.into()),
            Value::I8(value) => Some(value.into()),
            Value::U16(value) => Some(value.into()),
            Value::I16(value) => Some(value.into()),
            Value::U32(value) => Some(value.into()),
            Value::I32(value) => Some(value.into()),
            Value::U64(value) => Some(value.into()),
            Value::I64(value) => Some(value.into()),
            _ => None,
        }
    }

    /// The value of an f32 or f64, the latter rounded; `None` for other types.
    pub fn float(&self) -> Option<f32> {
        match *self {
            Value::F32(value) => Some(value),
            Value::F64(value) => Some(value as f32),
            _ => None,
        }
    }

    /// The type in words: `u32`, or for an array `array of 3 u32`.
    pub fn type_name(&self) -> String {
        match self {
            Value::Array(array) => format!("array of {} {}", array.len(), array.element_type()),
            other => other.value_type().to_string(),
        }
    }

    /// Reads one value at the start of `bytes` and returns it with its length in bytes. The bytes were
    /// checked when the file was opened; should the file have changed since, a string that is no longer
    /// whole or UTF-8 reads as empty and a number that is no longer there as absent.
    pub(super) fn decode(value_type: ValueType, bytes: &'a [u8]) -> Option<(Value<'a>, usize)> {
        let number = bytes.get(..value_type.bytes_min())?;
        macro_rules! number {
            ($variant:ident, $type:ty) => {
                Value::$variant(<$type>::from_le_bytes(number.try_into().ok()?))
            };
        }
        let value = match value_type {
            ValueType::U8 => number!(U8, u8),
            ValueType::I8 => number!(I8, i8),
            ValueType::U16 => number!(U16, u16),
            ValueType::I16 => number!(I16, i16),
            ValueType::U32 => number!(U32, u32),
            ValueType::I32 => number!(I32, i32),
            ValueType::F32 => number!(F32, f32),
            ValueType::U64 => number!(U64, u64),
            ValueType::I64 => number!(I64, i64),
            ValueType::F64 => number!(F64, f64),
            ValueType::Bool => Value::Bool(number[0] != 0),
            ValueType::Str => {
                let length = usize::try_from(u64::from_le_bytes(number.try_into().ok()?)).ok()?;
                let end = length.checked_add(number.len())?;
                let text = std::str::from_utf8(bytes.get(number.len()..end)?).unwrap_or("");
                return Some((Value::Str(text), end));
            }
            ValueType::Array => return None, // arrays carry their element type beside their bytes
        };
        Some((value, number.len()))
    }
}

/// An array of scalars or strings, decoded while iterating. Copying it copies no element.
#[derive(Clone, Copy, PartialEq)]
pub struct Array<'a> {
    pub(super) element: ValueType,
    pub(super) len: usize,
    pub(super) bytes: &'a [u8],
}

impl<'a> Array<'a> {
    /// Type of the elements; never `ValueType::Array`.
    pub fn element_type(&self) -> ValueType {
        self.element
    }

    /// Elements in the array.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True when there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The elements in order.
    pub fn iter(&self) -> Elements<'a> {
        Elements { element: self.element, left: self.len, bytes: self.bytes }
    }

    /// The elements of an array of strings; `None` for other types.
    pub fn strings(&self) -> Option<Strings<'a>> {
        (self.element == ValueType::Str).then(|| Strings(self.iter()))
    }
}

impl fmt::Debug for Array<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{} {}]", self.len, self.element)
    }
}

/// Iterator over the elements of an [`Array`].
#[derive(Clone, Debug)]
pub struct Elements<'a> {
    element: ValueType,
    left: usize,
    bytes: &'a [u8],
}

impl<'a> Iterator for Elements<'a> {
    type Item = Value<'a>;

    fn next(&mut self) -> Option<Value<'a>> {
        self.left = self.left.checked_sub(1)?;
        let (value, length) = Value::decode(self.element, self.bytes)?;
        self.bytes = &self.bytes[length..];
        Some(value)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

/// Iterator over the elements of an array of strings.
#[derive(Clone, Debug)]
pub struct Strings<'a>(Elements<'a>);

impl<'a> Iterator for Strings<'a> {
    type Item = &'a str;

    fn next(&mut self) -> Option<&'a str> {
        match self.0.next()? {
            Value::Str(text) => Some(text),
            _ => None,
        }
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.0.size_hint()
    }
}

impl ExactSizeIterator for Strings<'_> {}
