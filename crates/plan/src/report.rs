//! A plan as a table for terminals.

use std::fmt::Write as _;

use crate::engines::{GIB, Verdict};
use crate::figure::{Figure, Unit};
use crate::fit::Fit;

/// Bytes of a MiB.
const MIB: f64 = (1_u64 << 20) as f64;
/// Widest explanation printed; the JSON has all of it.
const EXPLANATION_WIDTH: usize = 110;

/// The whole answer: ledger, pool, verdict, mends, notes.
pub fn text(fit: &Fit) -> String {
    let mut text = String::new();
    let (model, plan) = (&fit.model, &fit.plan);
    let billions = |count: u64| format!("{:.2} B", count as f64 / 1e9);
    let parameters = model.parameters.map_or("unknown".into(), billions);
    let active = model.active_parameters.map_or("unknown".into(), billions);
    let _ = writeln!(
        text,
        "{} on {} {}: {} layers, {parameters} parameters ({active} a token)\n",
        model.name, plan.engine, plan.version, model.layers
    );
    let ledger = &plan.ledger;
    let lines = [
        ("device memory", &ledger.total),
        ("engine may use", &ledger.reserved),
        ("weights", &ledger.weights),
        ("activation peak", &ledger.activation),
        ("outside the tensor library", &ledger.non_torch),
        ("CUDA graphs", &ledger.graphs),
        ("left for KV", &ledger.kv),
        ("KV per token", &plan.kv_bytes_per_token),
        ("KV of one full request", &plan.kv_needed),
    ];
    for (name, figure) in lines {
        push(&mut text, name, figure.as_ref());
    }
    if let Some(pool) = &plan.pool {
        push(&mut text, "bytes of a block", Some(&pool.block_bytes));
        push(&mut text, "blocks", Some(&pool.blocks));
        for group in &pool.groups {
            let _ = writeln!(
                text,
                "  {} layers ({}) in {} group(s), blocks of {} tokens",
                group.layers, group.kind, group.groups, group.block_size
            );
        }
    }
    push(&mut text, "tokens as printed", plan.printed_tokens.as_ref());
    push(&mut text, "full requests at once", plan.concurrency.as_ref());
    push(&mut text, "longest request", plan.max_len.as_ref());
    let _ = writeln!(text, "\n{}", verdict(fit));
    if let Some(refusal) = &plan.refusal {
        let _ = writeln!(text, "  {} would say: {refusal}", plan.engine);
    }
    if !fit.mends.is_empty() {
        let _ = writeln!(text, "\nwhat helps most");
    }
    for mend in &fit.mends {
        let _ = writeln!(text, "  {:36} {}", mend.flag, mend.buys);
    }
    if !plan.notes.is_empty() {
        let _ = writeln!(text, "\nnotes");
    }
    for note in &plan.notes {
        let _ = writeln!(text, "  {note}");
    }
    text
}

/// Whether it starts, in words; `length` is the one planned for, in tokens.
pub fn verdict(fit: &Fit) -> String {
    let of =
        fit.plan.max_model_len.map_or(String::new(), |length| format!(" with {length} tokens"));
    match fit.plan.verdict {
        Verdict::Starts => format!("starts{of}"),
        Verdict::ProbablyStarts => {
            format!("probably starts{of}: not at the unlucky end of the ranges")
        }
        Verdict::ProbablyRefuses => {
            format!("probably refuses{of}: starts only at the lucky end of the ranges")
        }
        Verdict::Refuses => format!("refuses{of}"),
        Verdict::Unknown if fit.plan.ledger.kv.is_some() => {
            "whether it starts is not known: see the notes".into()
        }
        Verdict::Unknown => "whether it starts is not known: give --gpu or --kv-memory".into(),
    }
}

fn push(text: &mut String, name: &str, figure: Option<&Figure>) {
    let Some(figure) = figure else {
        return;
    };
    let range = match figure.is_exact() {
        true => String::new(),
        false => {
            format!("{} to {}", shown(figure.low, figure.unit), shown(figure.high, figure.unit))
        }
    };
    let explanation: String = figure.explanation().chars().take(EXPLANATION_WIDTH).collect();
    let value = shown(figure.value, figure.unit);
    let word = figure.provenance_word();
    let _ = writeln!(text, "{name:27} {value:>13}  {word:8}  {range:26}  {explanation}");
}

/// A number with its unit, as people read it.
pub fn shown(value: f64, unit: Unit) -> String {
    match unit {
        Unit::Bytes if value.abs() >= GIB / 10.0 => format!("{:.2} GiB", value / GIB),
        Unit::Bytes if value.abs() >= MIB => format!("{:.2} MiB", value / MIB),
        Unit::Bytes => format!("{value:.0} B"),
        Unit::BytesPerToken => format!("{value:.0} B"),
        Unit::Sequences | Unit::Ratio => format!("{value:.2}"),
        Unit::Tokens | Unit::Blocks | Unit::Count => format!("{value:.0}"),
        _ => format!("{value:.3}"),
    }
}
