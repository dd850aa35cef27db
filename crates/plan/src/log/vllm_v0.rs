//! vLLM's first engine: the ledger in one line, or in one line per entry, and blocks on both sides.

use super::facts::{Quantity, Word};
use super::pattern::{Pattern, Take, gib, plain};

/// The first engine's lines.
pub const PATTERNS: &[Pattern] = &[
    Pattern::new(
        "Memory profiling results: total_gpu_memory=",
        r"total_gpu_memory=#GiB .*peak_torch_memory=#GiB .*non_torch_memory=#GiB kv_cache_size=#GiB gpu_memory_utilization=#",
        &[
            gib(Quantity::Total),
            gib(Quantity::PeakTorch),
            gib(Quantity::NonTorch),
            gib(Quantity::Kv),
            plain(Quantity::Utilization),
        ],
        "vllm-project/vllm#10517",
    ),
    Pattern::new(
        "the current vLLM instance can use total_gpu_memory (",
        r"total_gpu_memory \(#GiB\) x gpu_memory_utilization \(#\) = #GiB",
        &[gib(Quantity::Total), plain(Quantity::Utilization), gib(Quantity::Reserved)],
        "vllm-project/vllm#14447",
    ),
    Pattern::new(
        "the rest of the memory reserved for KV Cache is",
        r"model weights take #GiB; non_torch_memory takes #GiB; PyTorch activation peak memory takes #GiB; the rest of the memory reserved for KV Cache is #GiB",
        &[
            gib(Quantity::Weights),
            gib(Quantity::NonTorch),
            gib(Quantity::Activation),
            gib(Quantity::Kv),
        ],
        "vllm-project/vllm#14447",
    ),
    // The same, one entry a line, for a few weeks of December 2024.
    Pattern::new(
        "] total_gpu_memory ",
        r"\] total_gpu_memory +#GiB",
        &[gib(Quantity::Total)],
        "vllm-project/vllm#10511",
    ),
    Pattern::new(
        "] gpu_memory_utilization ",
        r"\] gpu_memory_utilization +#",
        &[plain(Quantity::Utilization)],
        "vllm-project/vllm#10511",
    ),
    Pattern::new(
        "the current vLLM instance can use ",
        r"the current vLLM instance can use +#GiB",
        &[gib(Quantity::Reserved)],
        "vllm-project/vllm#10511",
    ),
    Pattern::new(
        "] model weights take ",
        r"\] model weights take +#GiB$",
        &[gib(Quantity::Weights)],
        "vllm-project/vllm#10511",
    ),
    Pattern::new(
        "] non_torch_memory ",
        r"\] non_torch_memory +#GiB",
        &[gib(Quantity::NonTorch)],
        "vllm-project/vllm#10511",
    ),
    Pattern::new(
        "] PyTorch activation peak memory ",
        r"\] PyTorch activation peak memory +#GiB$",
        &[gib(Quantity::Activation)],
        "vllm-project/vllm#10511",
    ),
    Pattern::new(
        "] available_kv_cache_memory ",
        r"\] available_kv_cache_memory +#GiB",
        &[gib(Quantity::Kv)],
        "vllm-project/vllm#10511",
    ),
    Pattern::new(
        ", # CPU blocks: ",
        r"GPU blocks: #, \x23 CPU blocks: [0-9]",
        &[plain(Quantity::Blocks)],
        "vllm-project/vllm#10517",
    ),
    Pattern::new(
        "is larger than the maximum number of tokens that can be stored in KV cache",
        r"The model's max seq len \(#\) is larger than the maximum number of tokens that can be stored in KV cache \(#\)",
        &[plain(Quantity::MaxModelLen), plain(Quantity::MaxLen)],
        "vllm-project/vllm#10517",
    ),
    Pattern::new(
        "is larger than the maximum number of tokens that can be stored in KV cache",
        r"The model's max seq len \([0-9]+\) is larger than the maximum number of tokens that can be stored in KV cache \([0-9]+\).*",
        &[Take::Line(Word::Refusal)],
        "vllm-project/vllm#10517",
    ),
];
