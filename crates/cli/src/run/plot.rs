//! `reef run --plot`: the pool over time by format, with the rungs as they were used.

use reef_kv::Rung;
use reef_kv::page::PageFormat;

use super::stream::{Sample, Streamed};
use crate::chart::{Axis, Layer, Mark, Scale, Stack};
use crate::sizes;

/// Places along the x axis at most: more than a chart has pixels.
const COLUMNS: usize = 1000;

/// Bytes of the unit of the y axis.
const MIB: f64 = (1u64 << 20) as f64;

/// The chart as SVG.
pub fn svg(streamed: &Streamed, model: &str) -> String {
    let usage = &streamed.generation.usage;
    let samples = pick(&streamed.memory);
    let budget = usage.budget_bytes as f64 / MIB;
    let places: Vec<f64> = samples.iter().map(|sample| sample.tokens as f64).collect();
    let computed = places.last().copied().unwrap_or(0.0);
    let bytes = |format| samples.iter().map(move |sample| sample.used[format] as f64 / MIB);
    let used = PageFormat::ALL.into_iter().enumerate().rev();
    let used = used.filter(|(_, format)| bytes(*format).any(|bytes| bytes > 0.0));
    let layers = used.map(|(color, format)| Layer {
        name: format.name().into(),
        color,
        heights: bytes(format).collect(),
    });
    Stack {
        title: format!("KV memory of one request, {model}"),
        subtitle: format!(
            "{computed:.0} tokens; all of them in f16 would be {}; {:.0} dropped",
            sizes::display(usage.kv.bytes_at_f16 as u64),
            usage.kv.dropped_tokens
        ),
        x: Axis {
            label: "tokens computed".into(),
            scale: Scale::Linear { low: 0.0, high: computed.max(1.0) },
            tick: |tokens| format!("{tokens:.0}"),
        },
        y: Axis {
            label: "pages held".into(),
            scale: Scale::Linear { low: 0.0, high: 1.1 * budget },
            tick: |mib| format!("{mib} MiB"),
        },
        layers: layers.collect(),
        places,
        limit: (budget, format!("budget {}", sizes::display(usage.budget_bytes as u64))),
        marks: marks(streamed),
    }
    .svg()
}

/// At most [`COLUMNS`] samples, evenly, the last among them.
fn pick(samples: &[Sample]) -> Vec<&Sample> {
    let count = samples.len().min(COLUMNS);
    (1..=count).map(|column| &samples[column * samples.len() / count - 1]).collect()
}

/// Where each rung was used, in the order of first use.
fn marks(streamed: &Streamed) -> Vec<Mark> {
    let memory = &streamed.memory;
    let tokens_at = |step: u64| {
        let index = memory.partition_point(|sample| sample.step < step);
        memory.get(index).or(memory.last()).map_or(0.0, |sample| sample.tokens as f64)
    };
    let mut marks: Vec<Mark> = Vec::new();
    for rung in Rung::ALL {
        let entries = || streamed.generation.usage.kv.relief.iter().filter(|e| e.rung == rung);
        let places: Vec<f64> = entries().map(|entry| tokens_at(entry.step)).collect();
        let Some(first) = places.first() else { continue };
        let bytes: usize = entries().map(|entry| entry.bytes).sum();
        let verb = match rung.format() {
            Some(format) => format!("to {}", format.name()),
            None => "dropped".into(),
        };
        let label = format!("{verb} from token {first:.0}: {} back", sizes::display(bytes as u64));
        let color = rung.format().map_or(7, |format| format as usize);
        marks.push(Mark { label, color, places });
    }
    marks.sort_by(|a, b| a.places[0].total_cmp(&b.places[0]));
    marks
}
