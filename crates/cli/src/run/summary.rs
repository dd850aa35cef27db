//! What the KV memory went through, on one screen.

use reef_kv::page::PageFormat;
use reef_kv::{LedgerEntry, Rung};

use super::stream::Streamed;
use super::{timeline, usage};
use crate::sizes::display;

/// The summary.
pub fn text(streamed: &Streamed) -> String {
    let generation = &streamed.generation;
    let used = &generation.usage;
    let kv = &used.kv;
    let mut lines = vec![
        String::new(),
        format!(
            "{} prompt + {} generated tokens, ended by {}; prefill {:.0} tok/s, decode {:.0} tok/s",
            used.prompt_tokens,
            generation.token_ids.len(),
            generation.finish_reason.name(),
            usage::rate(used.prompt_tokens as f64, streamed.prefill_time),
            usage::rate(generation.token_ids.len().saturating_sub(1) as f64, streamed.decode_time),
        ),
    ];
    lines.push(format!(
        "KV memory: budget {}, peak {}; all of it at f16 would be {}",
        display(used.budget_bytes as u64),
        display(kv.peak_bytes as u64),
        display(kv.bytes_at_f16 as u64),
    ));
    if !kv.relief.is_empty() {
        let rows = timeline::chart(&streamed.memory, used.budget_bytes);
        let labels = [display(used.budget_bytes as u64), "0".into()];
        for (index, row) in rows.iter().enumerate() {
            let label = match index {
                0 => &labels[0],
                _ if index + 1 == rows.len() => &labels[1],
                _ => "",
            };
            lines.push(format!("{label:>10} |{row}"));
        }
        let tokens = streamed.memory.last().map_or(0, |sample| sample.tokens);
        lines.push(format!("{:>10}  # f16  o int8, from the first token to token {tokens}", ""));
    }
    lines.extend(rungs(&kv.relief));
    lines.push(format!(
        "held at the end: {:.0} tokens in f16, {:.0} in int8; {:.0} dropped",
        kv.tokens_by_format[PageFormat::F16],
        kv.tokens_by_format[PageFormat::Int8],
        kv.dropped_tokens,
    ));
    lines.join("\n")
}

/// One line per rung used: what, when, what it bought.
fn rungs(relief: &[LedgerEntry]) -> Vec<String> {
    let line = |(rung, verb): (Rung, &str)| {
        let entries: Vec<&LedgerEntry> = relief.iter().filter(|entry| entry.rung == rung).collect();
        let (first, last) = (entries.first()?, entries.last()?);
        let blocks: usize = entries.iter().map(|entry| entry.blocks).sum();
        let bytes: usize = entries.iter().map(|entry| entry.bytes).sum();
        Some(format!(
            "{blocks} blocks {verb} in {} steps ({} to {}), which gave {} back",
            entries.len(),
            first.step,
            last.step,
            display(bytes as u64),
        ))
    };
    let verbs = [(Rung::Int8, "shrunk to int8"), (Rung::Evict, "dropped")];
    verbs.into_iter().filter_map(line).collect()
}
