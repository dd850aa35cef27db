//! One vLLM start made from a question's inputs, worked out by the engine that `reef plan fit` uses.

use crate::ask::input::Facts;
use crate::dtype::KvDtype;
use crate::engines::setup::{Measured, Setup};
use crate::engines::vllm::Vllm;
use crate::engines::weights::WeightFormat;
use crate::engines::{Engine as _, Plan};
use crate::figure::{Figure, Unit};

/// The plan of a start with the model, device, ranks, formats and flags that the question declares; `None`
/// where it declares no model, or the engine does not run it.
pub fn plan(facts: &Facts, pool_bytes: Option<f64>) -> Option<Plan> {
    let whole = |name| facts.number(name).ok().map(|number| number as u64);
    let bytes = |name| {
        let number = facts.number(name).ok()?;
        Some(Figure::measured(number, Unit::Bytes, format!("the input {name}")))
    };
    let kv = facts.word("kv_cache_dtype").ok().and_then(KvDtype::parse).unwrap_or(KvDtype::Bf16);
    let weights = facts.word("weights").ok().and_then(WeightFormat::parse);
    let pool = pool_bytes.map(|pool| Figure::measured(pool, Unit::Bytes, "the pool asked about"));
    let setup = Setup {
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
        measured: Measured { kv: pool, ..Measured::default() },
        ..Setup::default()
    };
    Vllm.plan(facts.model?, &setup).ok()
}

/// Bytes that the engine takes of its budget beside weights and KV; `None` where it cannot be said.
pub fn overhead_bytes(facts: &Facts) -> Option<f64> {
    let ledger = plan(facts, None)?.ledger;
    Some(ledger.reserved?.value - ledger.weights?.value - ledger.kv?.value)
}
