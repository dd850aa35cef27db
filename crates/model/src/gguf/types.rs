//! Storage types of tensors in a GGUF file.

use std::fmt;

macro_rules! tensor_types {
    ($($variant:ident = $id:literal, $name:literal, $elements:literal, $bytes:literal;)*) => {
        /// How the elements of a tensor are stored: every type ggml defines today, whether Reef computes
        /// with it or not. Ids, block sizes and bytes are those of ggml's `ggml_type` (ggml.h,
        /// ggml-common.h); they agree with the PyPI package `gguf` (`GGML_QUANT_SIZES`) but for Q8_1, a type of
        /// activations that no file holds: 36 bytes in ggml, 40 in the package.
        #[allow(non_camel_case_types, missing_docs)] // ggml's own spelling, which users search for
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum TensorType { $($variant,)* }

        impl TensorType {
            /// Every known type, in the order of their ids.
            pub const ALL: &[TensorType] = &[$(TensorType::$variant,)*];

            /// The type with ggml id `id`, if it is known. Ids ggml has removed (4, 5, 31-33, 36-38) are not.
            pub fn from_id(id: u32) -> Option<TensorType> {
                match id { $($id => Some(TensorType::$variant),)* _ => None }
            }

            /// The ggml id, as stored in a file.
            pub fn id(self) -> u32 {
                match self { $(TensorType::$variant => $id,)* }
            }

            /// ggml's name of the type, such as `Q4_K`.
            pub fn name(self) -> &'static str {
                match self { $(TensorType::$variant => $name,)* }
            }

            /// Elements of one block (1 for plain numbers). A row is a whole number of blocks.
            pub fn block_elements(self) -> usize {
                match self { $(TensorType::$variant => $elements,)* }
            }

            /// Bytes of one block.
            pub fn block_bytes(self) -> usize {
                match self { $(TensorType::$variant => $bytes,)* }
            }
        }
    };
}

tensor_types! {
    F32 = 0, "F32", 1, 4;
    F16 = 1, "F16", 1, 2;
    Q4_0 = 2, "Q4_0", 32, 18;
    Q4_1 = 3, "Q4_1", 32, 20;
    Q5_0 = 6, "Q5_0", 32, 22;
    Q5_1 = 7, "Q5_1", 32, 24;
    Q8_0 = 8, "Q8_0", 32, 34;
    Q8_1 = 9, "Q8_1", 32, 36;
    Q2_K = 10, "Q2_K", 256, 84;
    Q3_K = 11, "Q3_K", 256, 110;
    Q4_K = 12, "Q4_K", 256, 144;
    Q5_K = 13, "Q5_K", 256, 176;
    Q6_K = 14, "Q6_K", 256, 210;
    Q8_K = 15, "Q8_K", 256, 292;
    IQ2_XXS = 16, "IQ2_XXS", 256, 66;
    IQ2_XS = 17, "IQ2_XS", 256, 74;
    IQ3_XXS = 18, "IQ3_XXS", 256, 98;
    IQ1_S = 19, "IQ1_S", 256, 50;
    IQ4_NL = 20, "IQ4_NL", 32, 18;
    IQ3_S = 21, "IQ3_S", 256, 110;
    IQ2_S = 22, "IQ2_S", 256, 82;
    IQ4_XS = 23, "IQ4_XS", 256, 136;
    I8 = 24, "I8", 1, 1;
    I16 = 25, "I16", 1, 2;
    I32 = 26, "I32", 1, 4;
    I64 = 27, "I64", 1, 8;
    F64 = 28, "F64", 1, 8;
    IQ1_M = 29, "IQ1_M", 256, 56;
    BF16 = 30, "BF16", 1, 2;
    TQ1_0 = 34, "TQ1_0", 256, 54;
    TQ2_0 = 35, "TQ2_0", 256, 66;
    MXFP4 = 39, "MXFP4", 32, 17;
    NVFP4 = 40, "NVFP4", 64, 36;
    Q1_0 = 41, "Q1_0", 128, 18;
}

impl TensorType {
    /// The types Reef computes with; the others are listed by `reef inspect` and refused on loading.
    pub const READABLE: [TensorType; 11] = [
        TensorType::Q4_0,
        TensorType::Q4_1,
        TensorType::Q5_0,
        TensorType::Q5_1,
        TensorType::Q8_0,
        TensorType::Q4_K,
        TensorType::Q5_K,
        TensorType::Q6_K,
        TensorType::F16,
        TensorType::BF16,
        TensorType::F32,
    ];

    /// True when Reef computes with this type.
    pub fn is_readable(self) -> bool {
        Self::READABLE.contains(&self)
    }

    /// Bytes of `elements` elements, a whole number of blocks; `None` if it is not, or on overflow.
    pub fn bytes_of(self, elements: usize) -> Option<usize> {
        if !elements.is_multiple_of(self.block_elements()) {
            return None;
        }
        (elements / self.block_elements()).checked_mul(self.block_bytes())
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
