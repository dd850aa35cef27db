//! Lines that both generations of vLLM print: the engine's configuration, the arguments, concurrency.

use super::facts::{Quantity, Word};
use super::pattern::{Pattern, Role, Take, gib, plain};

/// Both generations' lines.
pub const PATTERNS: &[Pattern] = &[
    Pattern {
        marker: "LLM engine (v",
        expression: r"Initializing an? (?:(V[01]) )?LLM engine \(v([^)\s]{1,60})\)",
        takes: &[Take::Text(Word::Generation), Take::Text(Word::Version)],
        // "Initializing an LLM engine (v0.5.4)", "a V0 LLM engine (v0.8.5.post1)", "a V1 LLM engine (v0.25.1)"
        source: "vllm-project/vllm#10517, kserve/kserve#4470, vllm-project/vllm#49011",
        role: Role::Begins,
    },
    Pattern {
        marker: "Initializing an LLM engine with config",
        expression: r"Initializing an LLM engine with config: model=",
        takes: &[],
        source: "vllm-project/vllm#3120",
        role: Role::Begins,
    },
    // The fields of the configuration, on the same line or the next.
    Pattern::new(
        "max_seq_len=",
        r"\bmodel='([^']{1,400})',",
        &[Take::Text(Word::Model)],
        "vllm-project/vllm#10517, vllm-project/vllm#49011",
    ),
    Pattern::new(
        "max_seq_len=",
        r"\bdtype=torch\.(\w{1,20})",
        &[Take::Text(Word::Dtype)],
        "vllm-project/vllm#49011",
    ),
    Pattern::new(
        "max_seq_len=",
        r"\bmax_seq_len=([0-9]{1,12})\b",
        &[plain(Quantity::MaxModelLen)],
        "vllm-project/vllm#10517, vllm-project/vllm#49011",
    ),
    Pattern::new(
        "max_seq_len=",
        r"\btensor_parallel_size=([0-9]{1,6})\b",
        &[plain(Quantity::TensorParallel)],
        "vllm-project/vllm#10517",
    ),
    Pattern::new(
        "max_seq_len=",
        r"\bpipeline_parallel_size=([0-9]{1,6})\b",
        &[plain(Quantity::PipelineParallel)],
        "kserve/kserve#4470",
    ),
    Pattern::new(
        "max_seq_len=",
        r"\bdata_parallel_size=([0-9]{1,6})\b",
        &[plain(Quantity::DataParallel)],
        "vllm-project/vllm#49011",
    ),
    Pattern::new(
        "max_seq_len=",
        r"\bdecode_context_parallel_size=([0-9]{1,6})\b",
        &[plain(Quantity::ContextParallel)],
        "vllm-project/vllm#49011",
    ),
    Pattern::new(
        "max_seq_len=",
        r"\bquantization=([\w-]{1,40})",
        &[Take::Text(Word::Quantization)],
        "vllm-project/vllm#49011",
    ),
    Pattern::new(
        "max_seq_len=",
        r"\benforce_eager=(True|False)",
        &[Take::Text(Word::Eager)],
        "vllm-project/vllm#9532",
    ),
    Pattern::new(
        "max_seq_len=",
        r"\bkv_cache_dtype=([\w-]{1,40})",
        &[Take::Text(Word::KvDtype)],
        "vllm-project/vllm#49011",
    ),
    Pattern::new(
        "max_seq_len=",
        r"\benable_prefix_caching=(True|False)",
        &[Take::Text(Word::PrefixCaching)],
        "containers/ramalama#912",
    ),
    Pattern::new(
        "num_spec_tokens=",
        r"SpeculativeConfig\(method='(\w{1,40})', model=[^)]{0,400}?num_spec_tokens=([0-9]{1,4})",
        &[Take::Text(Word::Draft), plain(Quantity::DraftTokens)],
        "vllm-project/vllm#49011",
    ),
    // The arguments as the server was given them.
    Pattern::new(
        "non-default args: {",
        r"'gpu_memory_utilization': #",
        &[plain(Quantity::Utilization)],
        "LMCache/LMCache#1088",
    ),
    Pattern::new(
        "non-default args: {",
        r"'max_num_batched_tokens': ([0-9]{1,9})",
        &[plain(Quantity::BatchedTokens)],
        "noonghunna/club-3090#612",
    ),
    Pattern::new(
        "non-default args: {",
        r"'max_num_seqs': ([0-9]{1,9})",
        &[plain(Quantity::Sequences)],
        "noonghunna/club-3090#612",
    ),
    Pattern::new(
        "non-default args: {",
        r"'model': '([^']{1,400})'",
        &[Take::FirstText(Word::Model)],
        "LMCache/LMCache#1088, noonghunna/club-3090#612",
    ),
    Pattern::new(
        "non-default args: {",
        r"'tensor_parallel_size': ([0-9]{1,6})\b",
        &[plain(Quantity::TensorParallel)],
        "LMCache/LMCache#1088",
    ),
    Pattern::new(
        "non-default args: {",
        r"'quantization': '([\w-]{1,40})'",
        &[Take::FirstText(Word::Quantization)],
        "noonghunna/club-3090#612",
    ),
    Pattern::new(
        "non-default args: {",
        r"'kv_cache_dtype': '([\w-]{1,40})'",
        &[Take::FirstText(Word::KvDtype)],
        "noonghunna/club-3090#612",
    ),
    Pattern::new(
        "non-default args: {",
        r"'enable_prefix_caching': (True|False)",
        &[Take::FirstText(Word::PrefixCaching)],
        "LMCache/LMCache#1088, noonghunna/club-3090#612",
    ),
    Pattern::new(
        "Chunked prefill is enabled with max_num_batched_tokens=",
        r"Chunked prefill is enabled with max_num_batched_tokens=([0-9]{1,9})",
        &[plain(Quantity::BatchedTokens)],
        "LMCache/LMCache#1088",
    ),
    // "GB" of V0 and early V1 is GiB.
    Pattern::new(
        "Loading model weights took",
        r"Loading model weights took # GB",
        &[gib(Quantity::Weights)],
        "vllm-project/vllm#10517, vllm-project/vllm#12569",
    ),
    Pattern::new(
        "GPU blocks: ",
        r"GPU blocks: #",
        &[plain(Quantity::Blocks)],
        "vllm-project/vllm#10517, vllm-project/vllm#12569",
    ),
    Pattern::new(
        "Maximum concurrency for ",
        r"Maximum concurrency for # tokens per request: #x",
        &[plain(Quantity::MaxModelLen), plain(Quantity::Concurrency)],
        "vllm-project/vllm#10517, vllm-project/vllm#13596",
    ),
];
