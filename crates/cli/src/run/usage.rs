//! The JSON document of `reef run --json` (stable: scripts rely on it).

use reef_kv::page::PageFormat;
use reef_kv::{ByFormat, LedgerEntry};
use serde_json::{Map, Value, json};

use reef_engine::event::{Pause, Usage};

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
    let mut steps: Vec<Value> = usage.kv.relief.iter().map(relief).collect();
    steps.extend(usage.pauses.iter().map(pause));
    steps.sort_by_key(|step| step["step"].as_u64());
    json!({
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": completion_tokens,
        "cached_tokens": usage.cached_tokens,
        "kv": {
            "fidelity": usage.fidelity.name(),
            "budget_bytes": usage.budget_bytes,
            "peak_bytes": usage.kv.peak_bytes,
            "bytes_at_f16": usage.kv.bytes_at_f16,
            "max_tokens_limit": usage.max_tokens_limit,
            "tokens_by_format": tokens_by_format(&usage.kv.tokens_by_format),
            "dropped_tokens": number(usage.kv.dropped_tokens),
            "pauses": usage.pauses.len(),
            "relief": steps,
        },
    })
}

/// Tokens a second; 0 where there was nothing to time.
pub fn rate(tokens: f64, time: std::time::Duration) -> f64 {
    let seconds = time.as_secs_f64();
    if seconds > 0.0 { tokens / seconds } else { 0.0 }
}

fn tokens_by_format(tokens: &ByFormat<f64>) -> Value {
    let field = |(format, tokens): (PageFormat, &f64)| (format.name().to_string(), number(*tokens));
    Value::Object(tokens.iter().map(field).collect::<Map<String, Value>>())
}

/// Whole numbers as integers: most counts are.
fn number(value: f64) -> Value {
    if value.fract() == 0.0 { json!(value as u64) } else { json!(value) }
}

/// A branch that stood still: the rungs behind those of the ladder.
fn pause(pause: &Pause) -> Value {
    json!({
        "step": pause.step,
        "request": pause.branch.to_string(),
        "rung": pause.kind.name(),
        "blocks": pause.blocks,
        "bytes": pause.bytes,
        "reason": pause.reason.name(),
        "harm": 0.0,
    })
}

fn relief(entry: &LedgerEntry) -> Value {
    json!({
        "step": entry.step,
        "request": entry.request.to_string(),
        "rung": entry.rung.name(),
        "blocks": entry.blocks,
        "bytes": entry.bytes,
        "reason": entry.reason.name(),
        "harm": entry.harm,
    })
}
