//! Many requests in a part of the KV memory that they need.

use reef_engine::AdmissionPolicy;
use reef_engine::event::PauseKind;
use reef_kv::Fidelity;
use serde_json::{Value, json};

use super::drive::Drive;
use super::{Setting, request};

const REQUESTS: usize = 64;
const TOKENS: usize = 512;
/// The pool holds this part of them at f16.
const PART: usize = 4;

/// Tokens a second over all requests, by contract, and of an ideal that is never short: a quarter of the
/// requests, which fit, at a time.
pub fn measure(setting: &Setting) -> anyhow::Result<Value> {
    // Besides the pages of the quarter: tables and the reserve.
    let budget = setting.bytes(REQUESTS * 2 * TOKENS / PART)?;
    let budget = budget + budget / 100 + (1 << 20);
    let (reserve, utilize) = (AdmissionPolicy::Reserve, AdmissionPolicy::Utilize);
    let (ideal_s, _) = run(setting, budget, REQUESTS / PART, Fidelity::Exact, reserve)?;
    let ideal = (REQUESTS / PART * TOKENS) as f64 / ideal_s;
    let (exact_s, exact) = run(setting, budget, REQUESTS, Fidelity::Exact, reserve)?;
    let (preempting_s, preempting) = run(setting, budget, REQUESTS, Fidelity::Exact, utilize)?;
    let (int4_s, int4) = run(setting, budget, REQUESTS, Fidelity::Int4, reserve)?;
    let tokens = (REQUESTS * TOKENS) as f64;
    let pauses = |drive: &Drive| {
        let counters = drive.engine.stats().counters;
        PauseKind::ALL.iter().map(|kind| counters.pauses(*kind)).sum::<u64>()
    };
    Ok(json!({
        "ideal_tok_s": ideal,
        "exact_tok_s": tokens / exact_s,
        "preempting_tok_s": tokens / preempting_s,
        "int4_tok_s": tokens / int4_s,
        "exact_over_ideal": tokens / exact_s / ideal,
        "int4_over_exact": exact_s / int4_s,
        "int4_over_preempting": preempting_s / int4_s,
        "exact_most_running": exact.most_running,
        "int4_most_running": int4.most_running,
        "exact_pauses": pauses(&exact),
        "preempting_pauses": pauses(&preempting),
        "int4_pauses": pauses(&int4),
        "int4_re_encoded_blocks": int4.engine.stats().counters.encoded_blocks,
    }))
}

/// Seconds for `count` requests that come at once.
fn run(
    setting: &Setting,
    budget: usize,
    count: usize,
    fidelity: Fidelity,
    admission: AdmissionPolicy,
) -> anyhow::Result<(f64, Drive)> {
    let mut drive =
        Drive::new(setting.engine(budget, |config| config.scheduling.admission = admission)?);
    let start = drive.now();
    let mut streams = Vec::new();
    for seed in 0..count as u64 {
        streams.push(drive.submit(request(seed, TOKENS, TOKENS, fidelity))?);
    }
    drive.finish(&streams)?;
    Ok((drive.now() - start, drive))
}
