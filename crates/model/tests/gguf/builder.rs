//! A small GGUF writer: writes what it is told, right or wrong.

/// Ids of value types in the file.
pub const U8: u32 = 0;
pub const U16: u32 = 2;
pub const I16: u32 = 3;
pub const U32: u32 = 4;
pub const I32: u32 = 5;
pub const F32: u32 = 6;
pub const BOOL: u32 = 7;
pub const STRING: u32 = 8;
pub const ARRAY: u32 = 9;
pub const U64: u32 = 10;
pub const I64: u32 = 11;
pub const F64: u32 = 12;

/// Length-prefixed bytes.
pub fn string(text: impl AsRef<[u8]>) -> Vec<u8> {
    let text = text.as_ref();
    [&(text.len() as u64).to_le_bytes(), text].concat()
}

/// The value bytes of an array.
pub fn array(element: u32, count: u64, elements: &[u8]) -> Vec<u8> {
    [&element.to_le_bytes()[..], &count.to_le_bytes(), elements].concat()
}

/// One tensor description; `offset` counts from the start of the data section.
#[derive(Clone)]
pub struct TensorLine {
    pub name: Vec<u8>,
    pub dims: Vec<u64>,
    pub type_id: u32,
    pub offset: u64,
}

/// A file being put together. Counts are those of what was added, unless set.
#[derive(Clone)]
pub struct Builder {
    pub magic: [u8; 4],
    pub version: u32,
    pub tensor_count: Option<u64>,
    pub key_count: Option<u64>,
    pub keys: Vec<(Vec<u8>, u32, Vec<u8>)>,
    pub tensors: Vec<TensorLine>,
    pub alignment: usize,
    pub data: Vec<u8>,
}

impl Builder {
    /// An empty version 3 file.
    pub fn new() -> Builder {
        Builder {
            magic: *b"GGUF",
            version: 3,
            tensor_count: None,
            key_count: None,
            keys: Vec::new(),
            tensors: Vec::new(),
            alignment: 32,
            data: Vec::new(),
        }
    }

    /// A valid file with a key of every type and three tensors.
    pub fn valid() -> Builder {
        let names = [string("<s>"), string("é"), string("")].concat();
        Builder::new()
            .key("general.architecture", STRING, string("llama"))
            .key("general.alignment", U32, 32u32.to_le_bytes())
            .key("llama.block_count", U16, 2u16.to_le_bytes())
            .key("llama.rope.freq_base", F32, 1e4f32.to_le_bytes())
            .key("test.u8", U8, [7])
            .key("test.i8", 1, [0xff])
            .key("test.i16", I16, (-2i16).to_le_bytes())
            .key("test.i32", I32, (-3i32).to_le_bytes())
            .key("test.bool", BOOL, [1])
            .key("test.u64", U64, u64::MAX.to_le_bytes())
            .key("test.i64", I64, (-5i64).to_le_bytes())
            .key("test.f64", F64, 0.5f64.to_le_bytes())
            .key("tokenizer.ggml.tokens", ARRAY, array(STRING, 3, &names))
            .key("tokenizer.ggml.token_type", ARRAY, array(I32, 2, &[1, 0, 0, 0, 3, 0, 0, 0]))
            .key("test.flags", ARRAY, array(BOOL, 3, &[1, 0, 1]))
            .key("test.empty", ARRAY, array(F32, 0, &[]))
            .tensor("token_embd.weight", &[32, 3], 3, 0)
            .tensor("output_norm.weight", &[3], 0, 64)
            .tensor("blk.0.ffn_up.weight", &[32, 1], 20, 96)
            .data(114)
    }

    pub fn key(mut self, key: impl AsRef<[u8]>, value_type: u32, value: impl AsRef<[u8]>) -> Self {
        self.keys.push((key.as_ref().to_vec(), value_type, value.as_ref().to_vec()));
        self
    }

    pub fn tensor(
        mut self,
        name: impl AsRef<[u8]>,
        dims: &[u64],
        type_id: u32,
        offset: u64,
    ) -> Self {
        let (name, dims) = (name.as_ref().to_vec(), dims.to_vec());
        self.tensors.push(TensorLine { name, dims, type_id, offset });
        self
    }

    /// `len` bytes of data: 0, 1, 2, ...
    pub fn data(mut self, len: usize) -> Self {
        self.data = (0..len).map(|i| i as u8).collect();
        self
    }

    /// The file.
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = self.magic.to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend(self.tensor_count.unwrap_or(self.tensors.len() as u64).to_le_bytes());
        out.extend(self.key_count.unwrap_or(self.keys.len() as u64).to_le_bytes());
        for (key, value_type, value) in &self.keys {
            out.extend(string(key));
            out.extend(value_type.to_le_bytes());
            out.extend(value);
        }
        for tensor in &self.tensors {
            out.extend(string(&tensor.name));
            out.extend((tensor.dims.len() as u32).to_le_bytes());
            out.extend(tensor.dims.iter().flat_map(|size| size.to_le_bytes()));
            out.extend(tensor.type_id.to_le_bytes());
            out.extend(tensor.offset.to_le_bytes());
        }
        if !self.tensors.is_empty() {
            out.resize(out.len().next_multiple_of(self.alignment), 0);
        }
        out.extend(&self.data);
        out
    }
}
