//! SGLang: memory before and after each phase, the pool's keys and values apart. Its "GB" is GiB.

use super::facts::{Join, Quantity, Word};
use super::pattern::{GIB, Pattern, Role, Take, plain};

/// GiB; a draft model that is loaded later prints the same line, so the first counts.
const fn first(quantity: Quantity) -> Take {
    Take::Number(quantity, GIB, Join::First)
}

/// SGLang's lines.
pub const PATTERNS: &[Pattern] = &[
    Pattern {
        marker: "server_args=ServerArgs(",
        expression: r"server_args=ServerArgs\(model_path='([^']{1,400})'",
        takes: &[Take::Text(Word::Model)],
        source: "sgl-project/sglang#13023",
        role: Role::Begins,
    },
    Pattern::new(
        "server_args=ServerArgs(",
        r"\bmem_fraction_static=#",
        &[plain(Quantity::Utilization)],
        "sgl-project/sglang#13023",
    ),
    Pattern::new(
        "server_args=ServerArgs(",
        r"\btp_size=([0-9]{1,6})\b",
        &[plain(Quantity::TensorParallel)],
        "sgl-project/sglang#13023",
    ),
    Pattern::new(
        "server_args=ServerArgs(",
        r"\bpage_size=([0-9]{1,6})\b",
        &[plain(Quantity::BlockSize)],
        "sgl-project/sglang#13023",
    ),
    Pattern::new(
        "server_args=ServerArgs(",
        r"\bquantization='([\w-]{1,40})'",
        &[Take::Text(Word::Quantization)],
        "sgl-project/sglang#13023",
    ),
    Pattern::new(
        "server_args=ServerArgs(",
        r"\bkv_cache_dtype='([\w-]{1,40})'",
        &[Take::Text(Word::KvDtype)],
        "sgl-project/sglang#13023",
    ),
    Pattern::new(
        "Init torch distributed ends. mem usage=",
        r"Init torch distributed ends\..*? mem usage=# GB",
        &[first(Quantity::NonTorch)],
        "sgl-project/sglang#11716",
    ),
    Pattern {
        marker: "Load weight end. ",
        expression: r"Load weight end\..*? type=(\w{1,80}),.*?mem usage=# GB",
        takes: &[Take::FirstText(Word::Architecture), first(Quantity::Weights)],
        source: "sgl-project/sglang#4826, sgl-project/sglang#18263",
        role: Role::Model,
    },
    Pattern::new(
        "Using KV cache dtype: ",
        r"Using KV cache dtype: torch\.(\w{1,40})",
        &[Take::Text(Word::KvDtype)],
        "sgl-project/sglang#11830",
    ),
    Pattern::new(
        "KV Cache is allocated. ",
        r"KV Cache is allocated\. (?:dtype: torch\.(\w{1,40}), )?\x23tokens: #, K size: # GB, V size: # GB",
        &[
            Take::Text(Word::KvDtype),
            Take::Number(Quantity::Tokens, 1.0, Join::First),
            Take::Number(Quantity::Kv, GIB, Join::Sum),
            Take::Number(Quantity::Kv, GIB, Join::Sum),
        ],
        "sgl-project/sglang#4826, sgl-project/sglang#18263",
    ),
    // A latent (MLA) has no values of its own.
    Pattern::new(
        "KV Cache is allocated. ",
        r"KV Cache is allocated\. \x23tokens: #, KV size: # GB",
        &[
            Take::Number(Quantity::Tokens, 1.0, Join::First),
            Take::Number(Quantity::Kv, GIB, Join::Sum),
        ],
        "sgl-project/sglang#11309",
    ),
    Pattern::new(
        "Use sliding window memory pool. ",
        r"Use sliding window memory pool\. full_layer_tokens=#",
        &[Take::Number(Quantity::Tokens, 1.0, Join::First)],
        "sgl-project/sglang#18039",
    ),
    Pattern::new(
        "Capture cuda graph end. ",
        r"Capture cuda graph end\..*? mem usage=# GB",
        &[first(Quantity::Graphs)],
        "sgl-project/sglang#12978",
    ),
    Pattern::new(
        "max_total_num_tokens=",
        r"max_total_num_tokens=#, chunked_prefill_size=#, max_prefill_tokens=[0-9]+, max_running_requests=#, context_len=#",
        &[
            plain(Quantity::Tokens),
            plain(Quantity::BatchedTokens),
            plain(Quantity::Sequences),
            plain(Quantity::MaxModelLen),
        ],
        "sgl-project/sglang#29575",
    ),
];
