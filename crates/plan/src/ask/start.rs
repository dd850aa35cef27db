//! One vLLM start made from a question's inputs, worked out by the engine that `reef plan fit` uses.

use crate::ask::input::Facts;
use crate::dtype::KvDtype;
use crate::engines::setup::{Measured, Setup};
use crate::engines::vllm::Vllm;
use crate::engines::vllm::behavior::{self, Change};
use crate::engines::weights::WeightFormat;
use crate::engines::{Engine as _, Plan};
use crate::figure::{Figure, Unit};

/// The plan of a start with the model, device, ranks, formats and flags that the question declares; `None`
/// where it declares no model, or the engine does not run it.
pub fn plan(facts: &Facts, pool_bytes: Option<f64>) -> Option<Plan> {
    let pool = pool_bytes.map(|pool| Figure::measured(pool, Unit::Bytes, "the pool asked about"));
    let measured = Measured { kv: pool, ..Measured::default() };
    Vllm.plan(facts.model?, &Setup { measured, ..setup(facts) }).ok()
}

fn setup(facts: &Facts) -> Setup {
    let whole = |name| facts.number(name).ok().map(|number| number as u64);
    let bytes = |name| {
        let number = facts.number(name).ok()?;
        Some(Figure::measured(number, Unit::Bytes, format!("the input {name}")))
    };
    let kv = facts.word("kv_cache_dtype").ok().and_then(KvDtype::parse).unwrap_or(KvDtype::Bf16);
    let weights = facts.word("weights").ok().and_then(WeightFormat::parse);
    Setup {
        device: facts.device.map_or_else(String::new, |device| device.name.to_string()),
        architecture: facts
            .device
            .map_or_else(String::new, |device| device.architecture.to_string()),
        total: bytes("memory"),
        tp: whole("tp").unwrap_or(1),
        weights: weights.unwrap_or(WeightFormat::Bf16),
        kv_keys: kv,
        kv_values: kv,
        utilization: facts.number("utilization").ok(),
        max_model_len: whole("max_model_len"),
        block_size: whole("block_size"),
        ..Setup::default()
    }
}

/// Bytes that the engine takes of its budget beside weights and KV: activations, what lies outside the
/// tensor library, and graphs where the version counts them. `None` where it cannot be said.
pub fn overhead_bytes(facts: &Facts) -> Option<f64> {
    let ledger = plan(facts, None)?.ledger;
    let graphs = match behavior::has(Change::GraphsSubtracted, &setup(facts)) {
        true => ledger.graphs?.value,
        false => 0.0,
    };
    Some(ledger.activation?.value + ledger.non_torch?.value + graphs)
}
