//! What the KV memory went through, on one screen.

use std::collections::BTreeSet;

use reef_kv::page::PageFormat;
use reef_kv::{LedgerEntry, Rung};

use super::stream::{Sample, Streamed};
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
        let marks =
            formats_seen(&streamed.memory).map(|f| format!("{} {}", timeline::mark(f), f.name()));
        let marks = marks.collect::<Vec<_>>().join("  ");
        lines.push(format!("{:>10}  {marks}; from the first token to token {tokens}", ""));
    }
    lines.extend(rungs(&kv.relief));
    let held = kv.tokens_by_format.iter().filter(|(_, tokens)| **tokens > 0.0);
    let held: Vec<String> =
        held.map(|(format, tokens)| format!("{tokens:.0} in {}", format.name())).collect();
    let held = held.join(", ");
    lines.push(format!("tokens held at the end: {held}; {:.0} dropped", kv.dropped_tokens));
    lines.join("\n")
}

/// Formats that ever held bytes, most precise first.
fn formats_seen(memory: &[Sample]) -> impl Iterator<Item = PageFormat> {
    let seen = |format: &PageFormat| memory.iter().any(|sample| sample.used[*format] > 0);
    PageFormat::ALL.into_iter().filter(seen)
}

/// One line per rung used: what, when, what it bought, what it costs.
fn rungs(relief: &[LedgerEntry]) -> Vec<String> {
    let line = |(rung, verb): (Rung, &str)| {
        let entries: Vec<&LedgerEntry> = relief.iter().filter(|entry| entry.rung == rung).collect();
        let (first, last) = (entries.first()?, entries.last()?);
        let blocks: usize = entries.iter().map(|entry| entry.blocks).sum();
        let bytes: usize = entries.iter().map(|entry| entry.bytes).sum();
        let steps = entries.iter().map(|entry| entry.step).collect::<BTreeSet<_>>().len();
        Some(format!(
            "{blocks} blocks {verb} in {steps} steps ({} to {}), which gave {} back",
            first.step,
            last.step,
            display(bytes as u64),
        ))
    };
    let verbs = [
        (Rung::Int8, "shrunk to 8 bits"),
        (Rung::K8V4, "shrunk to k8v4"),
        (Rung::Int4, "shrunk to int4"),
        (Rung::Evict, "dropped"),
    ];
    verbs.into_iter().filter_map(line).collect()
}
