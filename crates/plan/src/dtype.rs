//! Number formats of KV caches and weights, and the bytes that they take.

use serde::Serialize;

/// How a KV cache stores its elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum KvDtype {
    /// 4 bytes an element.
    F32,
    /// bfloat16 or float16: 2 bytes an element.
    Bf16,
    /// One byte an element (e4m3 or e5m2) with scales per layer at most.
    Fp8,
    /// One byte an element with scales per layer at most.
    Int8,
    /// Half a byte an element with scales per layer at most. (Reef's own int8 and int4 have scales per 32:
    /// its plan asks its pool.)
    Int4,
    /// One byte an element and an f32 scale per token and head.
    Int8PerHead,
    /// The same with fp8 codes.
    Fp8PerHead,
    /// Half a byte an element and an f32 scale per token and head.
    Int4PerHead,
    /// `fp8_ds_mla`: a latent of 512 fp8 codes, four f32 scales and 64 bf16 rope channels in 656 bytes.
    Fp8DsMla,
    /// NVFP4: half a byte an element and an fp8 scale per 16.
    Nvfp4,
    /// ggml `q8_0`: 34 bytes for 32 elements.
    Q8_0,
    /// ggml `q6_0`: 26 bytes for 32 elements.
    Q6_0,
    /// ggml `q5_1`: 24 bytes for 32 elements.
    Q5_1,
    /// ggml `q5_0`: 22 bytes for 32 elements.
    Q5_0,
    /// ggml `q4_1`: 20 bytes for 32 elements.
    Q4_1,
    /// ggml `q4_0` and `iq4_nl`: 18 bytes for 32 elements.
    Q4_0,
}

/// Names by which engines and logs call the formats, the one we print first.
const NAMES: [(KvDtype, &[&str]); 16] = [
    (KvDtype::F32, &["f32", "fp32", "float32", "float"]),
    (KvDtype::Bf16, &["bf16", "auto", "f16", "fp16", "half", "bfloat16", "float16"]),
    (KvDtype::Fp8, &["fp8", "fp8_e4m3", "fp8_e5m2", "fp8-e4m3", "fp8-e5m2", "fp8_inc", "e4m3"]),
    (KvDtype::Int8, &["int8"]),
    (KvDtype::Int4, &["int4"]),
    (KvDtype::Int8PerHead, &["int8_per_token_head"]),
    (KvDtype::Fp8PerHead, &["fp8_per_token_head"]),
    (KvDtype::Int4PerHead, &["int4_per_token_head"]),
    (KvDtype::Fp8DsMla, &["fp8_ds_mla"]),
    (KvDtype::Nvfp4, &["nvfp4", "fp4", "fp4_e2m1"]),
    (KvDtype::Q8_0, &["q8_0"]),
    (KvDtype::Q6_0, &["q6_0"]),
    (KvDtype::Q5_1, &["q5_1"]),
    (KvDtype::Q5_0, &["q5_0"]),
    (KvDtype::Q4_1, &["q4_1"]),
    (KvDtype::Q4_0, &["q4_0", "iq4_nl"]),
];

impl KvDtype {
    /// Every name that is understood.
    pub fn known() -> impl Iterator<Item = &'static str> {
        NAMES.iter().flat_map(|(_, names)| names.iter().copied())
    }

    /// The format of that name.
    pub fn parse(name: &str) -> Option<KvDtype> {
        let name = name.trim().to_ascii_lowercase();
        NAMES.iter().find(|(_, names)| names.contains(&name.as_str())).map(|(dtype, _)| *dtype)
    }

    /// The name we print.
    pub fn name(self) -> &'static str {
        NAMES.iter().find(|(dtype, _)| *dtype == self).map_or("", |(_, names)| names[0])
    }

    /// Bytes of `elements` elements, as a ratio (bytes, per elements).
    pub fn ratio(self) -> (u64, u64) {
        match self {
            KvDtype::F32 => (4, 1),
            KvDtype::Bf16 => (2, 1),
            KvDtype::Fp8 | KvDtype::Int8 | KvDtype::Int8PerHead | KvDtype::Fp8PerHead => (1, 1),
            KvDtype::Int4 | KvDtype::Int4PerHead => (1, 2),
            KvDtype::Fp8DsMla => (656, 576),
            KvDtype::Nvfp4 => (9, 16),
            KvDtype::Q8_0 => (34, 32),
            KvDtype::Q6_0 => (26, 32),
            KvDtype::Q5_1 => (24, 32),
            KvDtype::Q5_0 => (22, 32),
            KvDtype::Q4_1 => (20, 32),
            KvDtype::Q4_0 => (18, 32),
        }
    }

    /// Bytes of scales beside each head's vector of one token.
    pub fn scale_bytes(self) -> u64 {
        match self {
            KvDtype::Int8PerHead | KvDtype::Fp8PerHead | KvDtype::Int4PerHead => 4,
            _ => 0,
        }
    }

    /// Bytes of `elements` elements, rounded up to whole groups.
    pub fn bytes(self, elements: u64) -> u64 {
        let (bytes, group) = self.ratio();
        elements.div_ceil(group) * bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_sizes() {
        assert_eq!(KvDtype::parse("fp8_e4m3"), Some(KvDtype::Fp8));
        assert_eq!(KvDtype::parse("FP16"), Some(KvDtype::Bf16));
        assert_eq!(KvDtype::parse("fp7"), None);
        assert_eq!(KvDtype::Q8_0.bytes(128), 136);
        assert_eq!(KvDtype::Fp8DsMla.bytes(576), 656);
        assert_eq!(KvDtype::Int4PerHead.bytes(128) + KvDtype::Int4PerHead.scale_bytes(), 68);
        for name in KvDtype::known() {
            assert!(KvDtype::parse(name).is_some(), "{name}");
        }
    }
}
