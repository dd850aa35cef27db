//! What a request took, as JSON (stable: scripts rely on it).

use reef_engine::Usage;
use reef_engine::event::Pause;
use reef_kv::page::PageFormat;
use reef_kv::{ByFormat, LedgerEntry};
use serde_json::{Map, Value, json};

/// The `usage` of OpenAI's responses, with the `kv` object of `reef run --json`: of one request, or of those
/// for the prompts of one (then `kv` is a list). `taken`: what each took, and the tokens it was given.
pub fn usage_document(taken: &[(Usage, usize)]) -> Value {
    let prompt: usize = taken.iter().map(|(usage, _)| usage.prompt_tokens).sum();
    let cached: usize = taken.iter().map(|(usage, _)| usage.cached_tokens).sum();
    let completion: usize = taken.iter().map(|(_, tokens)| tokens).sum();
    let mut kv = taken.iter().map(|(usage, _)| kv_document(usage));
    json!({
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "kv": if taken.len() == 1 { kv.next() } else { Some(kv.collect()) },
    })
}

/// What a request's KV memory went through.
pub fn kv_document(usage: &Usage) -> Value {
    let mut steps: Vec<Value> = usage.kv.relief.iter().map(relief).collect();
    steps.extend(usage.pauses.iter().map(pause));
    steps.sort_by_key(|step| step["step"].as_u64());
    json!({
        "fidelity": usage.fidelity.name(),
        "budget_bytes": usage.budget_bytes,
        "peak_bytes": usage.kv.peak_bytes,
        "bytes_at_f16": usage.kv.bytes_at_f16,
        "max_tokens_limit": usage.max_tokens_limit,
        "tokens_by_format": tokens_by_format(&usage.kv.tokens_by_format),
        "dropped_tokens": number(usage.kv.dropped_tokens),
        "pauses": usage.pauses.len(),
        "relief": steps,
    })
}

/// A header's value of what was degraded: `int8=64, int4=128, dropped=32` tokens. `None`: nothing was.
pub fn degraded_header(usage: &Usage) -> Option<String> {
    let lossy = usage.kv.tokens_by_format.iter().filter(|(format, _)| *format != PageFormat::F16);
    let formats = lossy.map(|(format, tokens)| (format.name(), *tokens));
    let parts = formats.chain([("dropped", usage.kv.dropped_tokens)]);
    let parts: Vec<String> = parts
        .filter(|(_, tokens)| *tokens > 0.0)
        .map(|(name, tokens)| format!("{name}={}", tokens.ceil()))
        .collect();
    (!parts.is_empty()).then(|| parts.join(", "))
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
