//! TensorRT-LLM: a share of what is free after weights and activations, cut into blocks.
//!
//! `KvCacheConfig.free_gpu_memory_fraction` (0.9) of the memory that is free once the engine has run its
//! largest batch; the log prints `Allocated X GiB for max tokens in paged KV cache (N)`.

use super::memory::{self, Profile};
use super::mend;
use super::setup::Setup;
use super::weights;
use super::{
    Engine, Ledger, Plan, PlanError, Pool, PoolGroup, Verdict, gib, layers_formula, through,
};
use crate::figure::{Figure, Unit};
use crate::model::{Cache, Model};

/// `free_gpu_memory_fraction` where it is not given.
const DEFAULT_FRACTION: f64 = 0.9;
/// `tokens_per_block` where it is not given.
const DEFAULT_BLOCK: u64 = 32;
/// `max_num_tokens` where it is not given.
const DEFAULT_BATCHED_TOKENS: u64 = 8192;

/// TensorRT-LLM.
#[derive(Debug)]
pub struct TensorRtLlm;

/// Bytes of one token's keys and values, all layers of one rank.
pub fn token_bytes(model: &Model, setup: &Setup) -> u64 {
    model.layers.iter().map(|layer| layer_bytes(layer, setup)).sum()
}

fn layer_bytes(layer: &Cache, setup: &Setup) -> u64 {
    match layer.heads() {
        Some(heads) => heads.token_bytes(setup.kv_keys, setup.kv_values, setup.tp),
        None => layer.token_bytes(setup.kv_keys, setup.tp),
    }
}

impl Engine for TensorRtLlm {
    fn name(&self) -> &'static str {
        "trtllm"
    }

    fn plan(&self, model: &Model, setup: &Setup) -> Result<Plan, PlanError> {
        setup.check()?;
        let per_token = token_bytes(model, setup).max(1);
        let ledger = ledger(model, setup)?;
        let formula = layers_formula(model, |layer| layer_bytes(layer, setup));
        let mut plan = Plan::new(self.name(), model, setup, ledger);
        plan.kv_bytes_per_token =
            Some(Figure::derived(per_token as f64, Unit::BytesPerToken, formula));
        let recurrent = model.layers.iter().any(|layer| matches!(layer, Cache::Recurrent(_)));
        if recurrent {
            plan.notes.push("states of recurrent layers are not counted: not seen in a log".into());
        }
        if let Some(kv) = plan.ledger.kv.clone() {
            fill(&mut plan, &kv, per_token, setup.block_size.unwrap_or(DEFAULT_BLOCK), model);
        }
        Ok(plan)
    }

    fn changes(&self, model: &Model, setup: &Setup, plan: &Plan) -> Vec<(String, Setup)> {
        let fraction = setup.utilization.unwrap_or(DEFAULT_FRACTION);
        let changes = mend::general_changes(model, setup, plan, fraction);
        let renamed = |flag: String| {
            let names = [
                ("--gpu-memory-utilization", "--kv_cache_free_gpu_memory_fraction"),
                ("--max-model-len", "--max_seq_len"),
                ("--tensor-parallel-size", "--tp_size"),
                ("--kv-cache-dtype", "--kv_cache_dtype"),
            ];
            names.iter().fold(flag, |flag, (from, to)| flag.replace(from, to))
        };
        changes.into_iter().map(|(flag, changed)| (renamed(flag), changed)).collect()
    }
}

fn ledger(model: &Model, setup: &Setup) -> Result<Ledger, PlanError> {
    let given = setup.kv_budget.clone().or_else(|| setup.measured.kv.clone());
    let weights = match weights::per_gpu(model, setup) {
        Ok(weights) => Some(weights),
        Err(missing) if given.is_none() && setup.total.is_some() => return Err(missing.into()),
        Err(_) => None,
    };
    let tokens = setup.max_num_batched_tokens.unwrap_or(DEFAULT_BATCHED_TOKENS);
    // Its sampler works on logits in f32 without sorting a copy: logits, softmax, result.
    let sequences = setup.max_num_seqs.unwrap_or(2048).min(tokens);
    let profile = Profile { tokens, sequences, bytes_per_logit: 8.0 };
    let activation = memory::activation(model, setup, profile);
    let non_torch = memory::non_torch(setup);
    let mut kv = given;
    if kv.is_none()
        && let (Some(total), Some(weights)) = (&setup.total, &weights)
    {
        let parts = [("weights", weights), ("activation", &activation), ("non-torch", &non_torch)];
        let free = memory::left_over(total, &parts);
        let fraction = setup.utilization.unwrap_or(DEFAULT_FRACTION);
        let formula = format!("({}) * {fraction}", free.explanation());
        kv = Some(through(&free, Unit::Bytes, |bytes| bytes * fraction, formula));
    }
    Ok(Ledger {
        total: setup.total.clone(),
        reserved: None,
        weights,
        activation: Some(activation),
        non_torch: Some(non_torch),
        graphs: None,
        kv,
    })
}

fn fill(plan: &mut Plan, kv: &Figure, per_token: u64, block: u64, model: &Model) {
    let block_bytes = per_token * block;
    let blocks_in = |bytes: f64| (bytes.max(0.0) / block_bytes as f64).floor();
    let formula = format!("{} GiB / {block_bytes} bytes of a block", gib(kv.value));
    let blocks = through(kv, Unit::Blocks, blocks_in, formula);
    let formula = format!("{} blocks * {block} tokens", blocks.value);
    let tokens = through(kv, Unit::Tokens, |bytes| blocks_in(bytes) * block as f64, formula);
    if let Some(length) = plan.max_model_len {
        let request = length.div_ceil(block);
        let count = |bytes: f64| blocks_in(bytes) / request as f64;
        let formula = format!("{} blocks / {request} per request of {length}", blocks.value);
        plan.concurrency = Some(through(kv, Unit::Sequences, count, formula));
        let formula = format!("{request} blocks of {block_bytes} bytes");
        let needed = request as f64 * block_bytes as f64;
        plan.kv_needed = Some(Figure::derived(needed, Unit::Bytes, formula));
        if tokens.value < length as f64 {
            plan.notes.push(format!(
                "max_seq_len is lowered to the {} tokens that the cache holds",
                tokens.value
            ));
        }
    }
    let positive = |bytes: f64| blocks_in(bytes) > 0.0;
    plan.verdict = Verdict::from_cases(positive(kv.low), positive(kv.value), positive(kv.high));
    if plan.verdict.answer() == Some(false) {
        plan.refusal = Some("no memory is left for the KV cache (free_gpu_memory_fraction)".into());
    }
    let layers = model.layers.len() as u64;
    let group = PoolGroup { kind: "full".into(), layers, groups: 1, block_size: block };
    let block_bytes = Figure::derived(block_bytes as f64, Unit::Bytes, "bytes of a block");
    plan.max_len = Some(tokens.clone());
    plan.printed_tokens = Some(tokens);
    plan.pool = Some(Pool { groups: vec![group], block_bytes, blocks, block_size: block });
}
