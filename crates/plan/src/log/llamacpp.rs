//! llama.cpp and ik_llama.cpp, server and command line, and what embeds them: a line per buffer.

use super::facts::{Join, Quantity, Word};
use super::pattern::{MIB, Pattern, Role, Take};

/// MiB of one of several buffers.
const fn buffer(quantity: Quantity) -> Take {
    Take::Number(quantity, MIB, Join::Sum)
}

/// The first model's: a draft model that is loaded later prints the same lines.
const fn first(quantity: Quantity) -> Take {
    Take::Number(quantity, 1.0, Join::First)
}

/// llama.cpp's lines. `tests/data/logs/llamacpp-*.log` are logs of llama-cpp-python 0.3.36.
pub const PATTERNS: &[Pattern] = &[
    Pattern {
        marker: "build: ",
        expression: r"build: ([0-9]{1,6}) \(",
        takes: &[Take::Text(Word::Version)],
        source: "ggml-org/llama.cpp#10560",
        role: Role::Begins,
    },
    Pattern {
        marker: "llama_model_loader: loaded meta data with ",
        expression: r"tensors from (.{1,400}?) \(version GGUF",
        takes: &[Take::FirstText(Word::Model)],
        source: "ggml-org/llama.cpp#4606, tests/data/logs/llamacpp-gemma3.log",
        role: Role::Model,
    },
    Pattern::new(
        " general.name ",
        r"(?:print_info|llm_load_print_meta): general\.name += (.{1,200})",
        &[Take::FirstText(Word::Architecture)],
        "ollama/ollama#6279, tests/data/logs/llamacpp-gemma3.log",
    ),
    Pattern::new(
        ": using device ",
        r": using device \w+ \((.{1,100}?)\) (?:\([^)]*\) )?- [0-9]",
        &[Take::FirstText(Word::Device)],
        "ggml-org/llama.cpp#11200",
    ),
    Pattern::new(
        " buffer size = ",
        r"(?:llm_load_tensors|load_tensors): +[\w-]+(?: model)? buffer size = +# MiB",
        &[buffer(Quantity::Weights)],
        "ikawrakow/ik_llama.cpp#237, ggml-org/llama.cpp#9390",
    ),
    Pattern::new(
        "n_ctx ",
        r"(?:llama_context|llama_init_from_model|llama_new_context_with_model): n_ctx += ([0-9]{1,12})",
        &[first(Quantity::MaxModelLen)],
        "fedora-copr/logdetective#106, ggml-org/llama.cpp#9390",
    ),
    Pattern::new(
        "n_seq_max ",
        r"(?:llama_context|llama_init_from_model): n_seq_max += ([0-9]{1,9})",
        &[first(Quantity::Sequences)],
        "ggml-org/llama.cpp#9390",
    ),
    Pattern::new(
        "n_ubatch ",
        r"(?:llama_context|llama_init_from_model|llama_new_context_with_model): n_ubatch += ([0-9]{1,9})",
        &[first(Quantity::MicroBatch)],
        "fedora-copr/logdetective#106, ggml-org/llama.cpp#9390",
    ),
    Pattern::new(
        " KV buffer size = ",
        r"(?:llama_kv_cache(?:_init|_unified)?): +[\w-]+ KV buffer size = +# MiB",
        &[buffer(Quantity::Kv)],
        "ggml-org/llama.cpp#9390, tests/data/logs/llamacpp-gemma3.log",
    ),
    Pattern::new(
        "MiB, K (",
        r"MiB, K \((\w{1,20})\): .*?, V \((\w{1,20})\): ",
        &[Take::FirstText(Word::KvDtype), Take::FirstText(Word::ValueDtype)],
        "fedora-copr/logdetective#106, tests/data/logs/llamacpp-gemma3.log",
    ),
    Pattern::new(
        "MiB, c^KV (",
        r"KV self size += .*?, c\^KV \((\w{1,20})\): ",
        &[Take::FirstText(Word::KvDtype)],
        "ikawrakow/ik_llama.cpp#259",
    ),
    Pattern::new(
        "using full-size SWA cache",
        r"using full-size SWA cache",
        &[Take::Line(Word::FullWindows)],
        "tests/data/logs/llamacpp-gemma3.log",
    ),
    Pattern::new(
        " compute buffer size = ",
        r"(?:sched_reserve|llama_context|llama_init_from_model|llama_new_context_with_model): +[\w-]+ compute buffer size = +# MiB",
        &[buffer(Quantity::Activation)],
        "fedora-copr/logdetective#106, tests/data/logs/llamacpp-gemma3.log",
    ),
];
