//! TensorRT-LLM, the engine built ahead and the PyTorch one.

use super::facts::{Quantity, Word};
use super::pattern::{GIB, Pattern, Role, Take, gib, plain};

/// TensorRT-LLM's lines.
pub const PATTERNS: &[Pattern] = &[
    Pattern {
        marker: "TensorRT-LLM version: ",
        expression: r"TensorRT-LLM version: ([0-9][\w.+-]{1,40})",
        takes: &[Take::Text(Word::Version)],
        source: "NVIDIA/TensorRT-LLM#6294",
        role: Role::Plain,
    },
    // A decimal "GB": bytes of the checkpoint over 2^30 in the code that was read.
    Pattern::new(
        " for model weights.",
        r"Rank [0-9]+ uses # GB for model weights",
        &[gib(Quantity::Weights)],
        "NVIDIA/TensorRT-LLM#6294",
    ),
    Pattern::new(
        "prefetching ",
        r"prefetching (/.{1,400}?)/[\w.-]+\.safetensors to memory",
        &[Take::FirstText(Word::Model)],
        "NVIDIA/TensorRT-LLM#6294",
    ),
    Pattern::new(
        "Memory usage when calculating max tokens in paged kv cache",
        r"Memory usage when calculating max tokens in paged kv cache: total: # GiB",
        &[gib(Quantity::Total)],
        "NVIDIA/TensorRT-LLM#2268, NVIDIA/TensorRT-LLM#4275",
    ),
    Pattern::new(
        "Number of blocks in KV cache primary pool",
        r"Number of blocks in KV cache primary pool: #",
        &[plain(Quantity::Blocks)],
        "NVIDIA/TensorRT-LLM#2268, NVIDIA/TensorRT-LLM#4275",
    ),
    Pattern::new(
        "Number of tokens per block: ",
        r"Number of tokens per block: ([0-9]{1,6})",
        &[plain(Quantity::BlockSize)],
        "NVIDIA/TensorRT-LLM#4275, NVIDIA/TensorRT-LLM#8961",
    ),
    Pattern::new(
        "tokens per block=",
        r"tokens per block=([0-9]{1,6}), primary blocks=#",
        &[plain(Quantity::BlockSize), plain(Quantity::Blocks)],
        "NVIDIA/TensorRT-LLM#8961",
    ),
    // Printed for a trial pool and again for the last one.
    Pattern::new(
        " for max tokens in paged KV cache",
        r"Allocated # GiB for max tokens in paged KV cache \(#\)",
        &[gib(Quantity::Kv), plain(Quantity::Tokens)],
        "NVIDIA/TensorRT-LLM#4275, NVIDIA/TensorRT-LLM#15734",
    ),
    Pattern::new(
        "Allocate ",
        r"\[TensorRT-LLM\]\[INFO\] Allocate ([0-9]{1,15}) bytes for k/v cache",
        &[plain(Quantity::Kv)],
        "triton-inference-server/tensorrtllm_backend#361",
    ),
    Pattern::new(
        " total tokens in paged KV cache",
        r"Using # total tokens in paged KV cache",
        &[plain(Quantity::Tokens)],
        "triton-inference-server/tensorrtllm_backend#361",
    ),
    Pattern::new(
        "max_seq_len=",
        r"\[TRT-LLM\] \[I\].* max_seq_len=#, max_num_requests=[0-9]+, max_num_tokens=#, max_batch_size=#",
        &[plain(Quantity::MaxModelLen), plain(Quantity::BatchedTokens), plain(Quantity::Sequences)],
        "NVIDIA/TensorRT-LLM#8961",
    ),
    Pattern::new(
        "during memory usage profiling",
        r"fraction is set #, kv size per token is # bytes/token\. device total memory # GiB",
        &[
            plain(Quantity::Utilization),
            plain(Quantity::BytesPerToken),
            Take::Number(Quantity::Total, GIB, super::facts::Join::Last),
        ],
        "NVIDIA/TensorRT-LLM#15734",
    ),
    Pattern::new(
        "free_gpu_memory_fraction and max_tokens are set",
        r"are set \(to # and [0-9]+ with free memory [0-9.]+ of total memory [0-9.]+",
        &[plain(Quantity::Utilization)],
        "NVIDIA/TensorRT-LLM#8961",
    ),
];
