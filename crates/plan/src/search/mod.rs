//! `reef plan search`: configurations against traffic and latency targets.
//!
//! Every combination of device, TP, weight format, KV format and `--max-num-seqs` is worked out by
//! [`step_time`] and [`load`]; the Pareto set is what no other beats in rate, TPOT, TTFT, cost and bits at
//! once.

use serde::Serialize;

use crate::ask::AskError;
use crate::device::Device;
use crate::model::Model;

mod candidate;
pub mod load;
pub mod step_time;
pub mod trace;
pub mod traffic;

pub use candidate::{Rejection, Worked};
use load::Targets;
use step_time::Efficiency;
use traffic::Summary;

/// Most configurations of one search.
pub const CONFIGURATIONS_MAX: usize = 100_000;

/// Devices of one kind that may be used.
#[derive(Clone, Debug)]
pub struct Fleet {
    /// The device.
    pub device: &'static Device,
    /// How many there are.
    pub count: u64,
    /// Price of one, in any unit that the fleets share; 1 counts devices.
    pub price: f64,
}

/// What is searched.
#[derive(Clone, Debug)]
pub struct Search<'a> {
    /// The model.
    pub model: &'a Model,
    /// Its traffic.
    pub traffic: Summary,
    /// Requests a second to sustain; `None` = as many as can be.
    pub rate: Option<f64>,
    /// Latency targets.
    pub targets: Targets,
    /// Devices.
    pub fleets: Vec<Fleet>,
    /// Weight formats to try.
    pub weights: Vec<String>,
    /// KV formats to try.
    pub kv_cache_dtypes: Vec<String>,
    /// Values of `--max-num-seqs` to try.
    pub max_num_seqs: Vec<u64>,
    /// `--gpu-memory-utilization`.
    pub utilization: f64,
    /// Share of prompt tokens that hit the prefix cache.
    pub hit_ratio: f64,
    /// What the step-time model assumes.
    pub efficiency: Efficiency,
}

/// What a search found.
#[derive(Clone, Debug, Serialize)]
pub struct Found {
    /// Configurations worked out.
    pub configurations: usize,
    /// What no other beats, cheapest first.
    pub pareto: Vec<Worked>,
    /// How many were rejected, by reason.
    pub rejected: Vec<(Rejection, usize)>,
}

/// Works every configuration out and keeps those that none beats.
pub fn search(search: &Search) -> Result<Found, AskError> {
    let per_tp = search.weights.len() * search.kv_cache_dtypes.len() * search.max_num_seqs.len();
    let candidates: usize =
        search.fleets.iter().map(|fleet| candidate::ranks(fleet).len() * per_tp).sum();
    if candidates == 0 || candidates > CONFIGURATIONS_MAX {
        return Err(AskError::Wrong {
            field: "--gpus, --weights, --kv-cache-dtype and --max-num-seqs".into(),
            value: format!("{candidates} configurations"),
            mend: format!("give lists that make 1 to {CONFIGURATIONS_MAX}"),
        });
    }
    let mut worked = Vec::new();
    let mut rejected: Vec<(Rejection, usize)> = Vec::new();
    for fleet in &search.fleets {
        for tp in candidate::ranks(fleet) {
            for outcome in candidate::work(search, fleet, tp)? {
                match outcome {
                    Ok(configuration) => worked.push(configuration),
                    Err(reason) => match rejected.iter_mut().find(|(known, _)| *known == reason) {
                        Some((_, count)) => *count += 1,
                        None => rejected.push((reason, 1)),
                    },
                }
            }
        }
    }
    Ok(Found { configurations: candidates, pareto: pareto(worked), rejected })
}

/// The configurations that no other beats, cheapest first, then fastest.
fn pareto(mut worked: Vec<Worked>) -> Vec<Worked> {
    // Of equals the one with the fewest sequences admitted comes first and stays.
    let class = |rate: f64| (rate.ln() / (1.0 + candidate::SAME).ln()).round() as i64;
    worked.sort_by(|a, b| {
        let by_cost = a.cost.total_cmp(&b.cost).then(class(b.rate).cmp(&class(a.rate)));
        by_cost.then(a.max_num_seqs.cmp(&b.max_num_seqs)).then(b.rate.total_cmp(&a.rate))
    });
    let mut kept: Vec<Worked> = Vec::new();
    for candidate in worked {
        if kept.iter().any(|other| other.beats(&candidate)) {
            continue;
        }
        kept.retain(|other| !candidate.beats(other));
        kept.push(candidate);
    }
    kept
}

#[cfg(test)]
mod tests;
