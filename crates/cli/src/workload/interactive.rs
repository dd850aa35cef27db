//! Who waits for whom: interactive requests beside batch work, streams beside a long prompt.

use reef_kv::Fidelity;
use serde_json::{Value, json};

use super::drive::Drive;
use super::{Setting, percentile, request};

const INTERACTIVE: usize = 40;
const INTERACTIVE_PROMPT: usize = 128;
const INTERACTIVE_GENERATED: usize = 8;
/// Seconds between two of them.
const EVERY: f64 = 0.5;
/// Batch requests at hand at any time.
const FLOOD: usize = 24;
const FLOOD_TOKENS: usize = 256;

/// Time to the first token of interactive requests, on an idle engine and beside a flood of batch work
/// that fills the pool.
pub fn measure(setting: &Setting) -> anyhow::Result<Value> {
    let (mut idle, _) = times(setting, false)?;
    let (mut flooded, step_ms) = times(setting, true)?;
    let (idle_p99, flooded_p99) = (percentile(&mut idle, 99.0), percentile(&mut flooded, 99.0));
    Ok(json!({
        "idle_ttft_p50_ms": percentile(&mut idle, 50.0),
        "idle_ttft_p99_ms": idle_p99,
        "flooded_ttft_p50_ms": percentile(&mut flooded, 50.0),
        "flooded_ttft_p99_ms": flooded_p99,
        "step_p99_ms": step_ms,
        "allowed_ms": 1.5 * idle_p99 + step_ms,
        "over_allowed": flooded_p99 / (1.5 * idle_p99 + step_ms),
    }))
}

/// Times to the first token in milliseconds, and the 99th percentile of the time of a step.
fn times(setting: &Setting, flood: bool) -> anyhow::Result<(Vec<f64>, f64)> {
    let budget = setting.bytes(16 * 2 * FLOOD_TOKENS)?;
    let mut drive = Drive::new(setting.engine(budget, |_| {})?);
    let (mut batch, mut interactive) = (Vec::new(), Vec::new());
    let mut seed = 1_000;
    let mut next = if flood { 5.0 } else { 0.0 };
    while interactive.len() < INTERACTIVE
        || interactive.iter().any(|&index: &usize| drive.streams[index].outcome.is_none())
    {
        batch.retain(|&index: &usize| drive.streams[index].outcome.is_none());
        while flood && batch.len() < FLOOD {
            seed += 1;
            let work = request(seed, FLOOD_TOKENS, FLOOD_TOKENS, Fidelity::Int4);
            batch.push(drive.submit(reef_engine::Request { priority: -1, ..work })?);
        }
        if interactive.len() < INTERACTIVE && drive.now() >= next {
            seed += 1;
            let (prompt, generated) = (INTERACTIVE_PROMPT, INTERACTIVE_GENERATED);
            interactive.push(drive.submit(request(seed, prompt, generated, Fidelity::Int4))?);
            next += EVERY;
        }
        drive.turn()?;
    }
    let ttft = interactive.iter().map(|&index| drive.streams[index].ttft() * 1e3).collect();
    let step_ms = if flood { percentile(&mut drive.steps_ms, 99.0) } else { 0.0 };
    Ok((ttft, step_ms))
}

const STREAMS: usize = 4;
const LONG_PROMPT: usize = 4000;

/// Gaps between tokens of streams, by themselves and while a long prompt of the same priority is computed.
pub fn measure_gap(setting: &Setting) -> anyhow::Result<Value> {
    let budget = setting.bytes(LONG_PROMPT + STREAMS * 4_096)? + (8 << 20);
    let mut drive = Drive::new(setting.engine(budget, |_| {})?);
    let mut streams = Vec::new();
    for seed in 0..STREAMS as u64 {
        streams.push(drive.submit(request(seed, 64, 3_000, Fidelity::Exact))?);
    }
    while streams.iter().any(|&index| drive.streams[index].tokens.len() < 200) {
        drive.turn()?;
    }
    let before = drive.now();
    let long = drive.submit(request(99, LONG_PROMPT, 2, Fidelity::Exact))?;
    while drive.streams[long].tokens.is_empty() {
        drive.turn()?;
    }
    let during = drive.streams[long].tokens[0];
    // The streams have grown meanwhile, and their steps with them: as long again without the prompt.
    drive.finish(&[long])?;
    let after = drive.now();
    let until = streams.iter().map(|&i| drive.streams[i].tokens.len()).max().unwrap_or(0) + 200;
    while streams.iter().any(|&index| drive.streams[index].tokens.len() < until) {
        drive.turn()?;
    }
    let start = streams.iter().map(|&i| drive.streams[i].tokens[20]).fold(0.0, f64::max);
    let gaps = |from, to| -> Vec<f64> {
        streams.iter().flat_map(|&i| drive.streams[i].gaps(from, to).collect::<Vec<_>>()).collect()
    };
    let (mut alone, mut beside) = (gaps(start, before), gaps(before, during));
    alone.extend(gaps(after, drive.now()));
    let costs = drive.engine.stats().costs;
    let (alone_p99, beside_p99) = (percentile(&mut alone, 99.0), percentile(&mut beside, 99.0));
    Ok(json!({
        "alone_p50_ms": percentile(&mut alone, 50.0) * 1e3,
        "alone_p99_ms": alone_p99 * 1e3,
        "beside_p50_ms": percentile(&mut beside, 50.0) * 1e3,
        "beside_p99_ms": beside_p99 * 1e3,
        "p99_ratio": beside_p99 / alone_p99,
        "p50_ratio": percentile(&mut beside, 50.0) / percentile(&mut alone, 50.0),
        "long_ttft_ms": (during - before) * 1e3,
        "base_us": costs.base_us,
        "row_us": costs.row_us,
        "prefill_token_us": costs.prefill_token_us,
        "context_us": costs.context_us,
    }))
}
