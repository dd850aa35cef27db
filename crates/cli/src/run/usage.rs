//! The JSON document of `reef run --json` (stable: scripts rely on it).

use reef_engine::event::Usage;
use reef_server::usage::kv_document;
use serde_json::{Value, json};

use super::stream::Streamed;

/// The document.
pub fn document(streamed: &Streamed) -> Value {
    let generation = &streamed.generation;
    let usage = &generation.usage;
    let prompt = usage.prompt_tokens as f64;
    let decoded = generation.token_ids.len().saturating_sub(1) as f64;
    json!({
        "text": streamed.text,
        "token_ids": generation.token_ids,
        "finish_reason": generation.finish_reason.name(),
        "usage": document_of_usage(usage, generation.token_ids.len()),
        "timings": {
            "ttft_ms": streamed.time_to_first_token.as_secs_f64() * 1e3,
            "prefill_tok_s": rate(prompt, streamed.prefill_time),
            "decode_tok_s": rate(decoded, streamed.decode_time),
        },
    })
}

/// The `usage` of a document.
pub fn document_of_usage(usage: &Usage, completion_tokens: usize) -> Value {
    json!({
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": completion_tokens,
        "cached_tokens": usage.cached_tokens,
        "kv": kv_document(usage),
    })
}

/// Tokens a second; 0 where there was nothing to time.
pub fn rate(tokens: f64, time: std::time::Duration) -> f64 {
    let seconds = time.as_secs_f64();
    if seconds > 0.0 { tokens / seconds } else { 0.0 }
}
