//! Which flags would mend a refusal, or buy the most room: each change is planned and compared.

use serde::Serialize;

use super::setup::Setup;
use super::weights::WeightFormat;
use super::{Engine, Plan};
use crate::dtype::KvDtype;
use crate::model::Model;

/// Most mends shown.
const SHOWN: usize = 3;

/// A change of flags and what it buys.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Mend {
    /// The flag to set.
    pub flag: String,
    /// Whether the engine starts with it.
    pub starts: bool,
    /// KV memory with it less without it, in bytes per GPU.
    pub kv_bytes_gained: f64,
    /// Sequences of the planned length at once with it.
    pub concurrency: f64,
    /// In words.
    pub buys: String,
}

/// The two or three changes that help most: those that make it start first, then by concurrency.
pub fn mends(engine: &dyn Engine, model: &Model, setup: &Setup, plan: &Plan) -> Vec<Mend> {
    let tried = engine.changes(model, setup, plan).into_iter().filter_map(|(flag, changed)| {
        let after = engine.plan(model, &changed).ok()?;
        Some(compare(flag, plan, &after))
    });
    let before = plan.concurrency.as_ref().map_or(0.0, |figure| figure.value);
    let starts = plan.verdict.answer() == Some(true);
    let helps = |mend: &Mend| (mend.starts && !starts) || mend.concurrency > before * 1.01;
    let mut mends: Vec<Mend> = tried.filter(helps).collect();
    mends.sort_by(|a, b| {
        (b.starts, b.concurrency).partial_cmp(&(a.starts, a.concurrency)).expect("finite numbers")
    });
    mends.truncate(SHOWN);
    mends
}

fn compare(flag: String, before: &Plan, after: &Plan) -> Mend {
    let kv = |plan: &Plan| plan.ledger.kv.as_ref().map_or(0.0, |figure| figure.value);
    let concurrency = |plan: &Plan| plan.concurrency.as_ref().map_or(0.0, |figure| figure.value);
    let starts = after.verdict.answer() == Some(true);
    let gained = kv(after) - kv(before);
    let mut buys = format!("{:.2} -> {:.2} sequences", concurrency(before), concurrency(after));
    if let Some(length) = after.max_model_len {
        buys += &format!(" of {length} tokens");
    }
    if gained.abs() > 1e6 {
        buys += &format!(", {:+.2} GiB of KV memory", gained / super::GIB);
    }
    if starts && before.verdict.answer() == Some(false) {
        buys = format!("starts: {buys}");
    }
    Mend { flag, starts, kv_bytes_gained: gained, concurrency: concurrency(after), buys }
}

/// Changes that any GPU engine understands, under vLLM's flag names.
pub fn general_changes(
    model: &Model,
    setup: &Setup,
    plan: &Plan,
    utilization: f64,
) -> Vec<(String, Setup)> {
    let mut changes = Vec::new();
    let mut add = |flag: String, changed: Setup| changes.push((flag, changed));
    if utilization < 0.95 && setup.measured.kv.is_none() {
        let changed = Setup { utilization: Some(0.95), ..setup.clone() };
        add("--gpu-memory-utilization 0.95".into(), changed);
    }
    if setup.kv_keys == KvDtype::Bf16 {
        let (kv_keys, kv_values) = (KvDtype::Fp8, KvDtype::Fp8);
        add("--kv-cache-dtype fp8".into(), Setup { kv_keys, kv_values, ..setup.clone() });
    }
    let longest = plan.max_len.as_ref().map_or(0.0, |figure| figure.low) as u64;
    if plan.verdict.answer() == Some(false) && longest > 0 {
        let changed = Setup { max_model_len: Some(longest), ..setup.clone() };
        add(format!("--max-model-len {longest}"), changed);
    }
    let heads = model.heads.unwrap_or(u64::MAX);
    let tp = setup.tp * 2;
    if setup.measured.kv.is_none() && heads.is_multiple_of(tp) && tp <= 64 {
        add(format!("--tensor-parallel-size {tp}"), Setup { tp, ..setup.clone() });
    }
    if setup.weights == WeightFormat::Bf16 && setup.measured.weights.is_none() {
        let changed = Setup { weights: WeightFormat::Fp8, ..setup.clone() };
        add("--quantization fp8".into(), changed);
    }
    changes
}
