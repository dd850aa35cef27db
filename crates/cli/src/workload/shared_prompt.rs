//! A long prompt that comes again.

use reef_kv::Fidelity;
use serde_json::{Value, json};

use super::drive::Drive;
use super::{Setting, request};

const PROMPT: usize = 1500;
/// Tokens of their own behind the prompt.
const OWN: usize = 8;

/// Time to the first token of a request, and of one that begins with the same prompt.
pub fn measure(setting: &Setting) -> anyhow::Result<Value> {
    let mut drive = Drive::new(setting.engine(setting.bytes(4 * PROMPT)?, |_| {})?);
    let mut ttft = Vec::new();
    for seed in [1, 2] {
        let mut shared = request(0, PROMPT, 4, Fidelity::Exact);
        shared.prompt.extend(request(seed, OWN, 0, Fidelity::Exact).prompt);
        let stream = drive.submit(shared)?;
        drive.finish(&[stream])?;
        ttft.push(drive.streams[stream].ttft() * 1e3);
    }
    let outcome = drive.streams[1].outcome.as_ref();
    Ok(json!({
        "first_ttft_ms": ttft[0],
        "second_ttft_ms": ttft[1],
        "second_over_first": ttft[1] / ttft[0],
        "cached_tokens": outcome.map_or(0, |outcome| outcome.usage.cached_tokens),
    }))
}
