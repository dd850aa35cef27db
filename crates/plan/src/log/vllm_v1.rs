//! vLLM's second engine: weights, graphs and the pool; not the parts between them.

use super::facts::{Quantity, Word};
use super::pattern::{Pattern, Take, gib, plain};

/// The second engine's lines.
pub const PATTERNS: &[Pattern] = &[
    Pattern::new(
        "Model loading took ",
        r"Model loading took # GiB",
        &[gib(Quantity::Weights)],
        "vllm-project/vllm#38820, noonghunna/club-3090#1047",
    ),
    Pattern::new(
        "Available KV cache memory: ",
        r"Available KV cache memory: # GiB",
        &[gib(Quantity::Kv)],
        "vllm-project/vllm#21348, gpustack/runner#251",
    ),
    Pattern::new(
        "GPU KV cache size: ",
        r"GPU KV cache size: # tokens",
        &[plain(Quantity::Tokens)],
        "vllm-project/vllm#13596, vllm-project/vllm#49011",
    ),
    Pattern::new(
        "Estimated CUDA graph memory: ",
        r"Estimated CUDA graph memory: # GiB",
        &[gib(Quantity::Graphs)],
        "gpustack/runner#251",
    ),
    // What graphs took in the end; an estimate before it was what the pool was sized with.
    Pattern::new(
        "Graph capturing finished in ",
        r"Graph capturing finished in [0-9.]+ secs, took # GiB",
        &[Take::Number(Quantity::Graphs, super::pattern::GIB, super::facts::Join::First)],
        "aivrar/vllm-windows-build#17",
    ),
    Pattern::new(
        "CUDA graph memory profiling is enabled",
        r"The current --gpu-memory-utilization=# is equivalent",
        &[plain(Quantity::Utilization)],
        "gpustack/runner#251",
    ),
    Pattern::new(
        "Setting attention block size to ",
        r"Setting attention block size to ([0-9]{1,6}) tokens",
        &[plain(Quantity::BlockSize)],
        "noonghunna/club-3090#1047",
    ),
    Pattern::new(
        "To serve at least one request with the model",
        r"max seq len \(#\), \(# GiB KV cache is needed, which is larger than the available KV cache memory \(# GiB\)",
        &[plain(Quantity::MaxModelLen), gib(Quantity::KvNeeded), gib(Quantity::Kv)],
        "vllm-project/tpu-inference#223, SergiioB/intel-arc-pro-b70-inference-cookbook#4",
    ),
    Pattern::new(
        "the estimated maximum model length is ",
        r"the estimated maximum model length is #",
        &[plain(Quantity::MaxLen)],
        "xorbitsai/inference#4926",
    ),
    Pattern::new(
        "To serve at least one request with the model",
        r"To serve at least one request with the models?'s max seq len.*",
        &[Take::Line(Word::Refusal)],
        "xorbitsai/inference#4926",
    ),
];
