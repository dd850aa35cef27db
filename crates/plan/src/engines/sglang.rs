//! SGLang: a static share of the device for weights and KV, cut into tokens.
//!
//! `max_total_num_tokens = (free after weights - total * (1 - mem_fraction_static)) / bytes per token`
//! (`ModelRunner.profile_max_num_token`); K and V are printed apart, in GiB. Recurrent models set states
//! aside first, one more than there are slots.

use super::memory;
use super::mend;
use super::setup::Setup;
use super::vllm::pool::draft_layers;
use super::weights;
use super::{Engine, GIB, Ledger, Plan, PlanError, Pool, PoolGroup, Verdict, gib, through};
use crate::figure::{Figure, Unit};
use crate::model::{Cache, Model};

/// SGLang.
#[derive(Debug)]
pub struct Sglang;

/// Bytes of one token's keys and values, all layers of one rank; windows are charged in full, as without
/// `--swa-full-tokens-ratio` the pool is sized by the full layers.
pub fn token_bytes(model: &Model, setup: &Setup) -> (u64, u64) {
    let split = |layer: &Cache| match layer {
        Cache::Latent(latent) => (layer.token_bytes(latent.stored_as(setup.kv_keys), setup.tp), 0),
        layer => layer.heads().map_or((0, 0), |heads| {
            let kv = heads.per_rank(setup.tp);
            let keys = setup.kv_keys.bytes(kv * heads.key_dim);
            (keys, setup.kv_values.bytes(kv * heads.value_dim))
        }),
    };
    model.layers.iter().map(split).fold((0, 0), |sum, layer| (sum.0 + layer.0, sum.1 + layer.1))
}

/// The default of `--mem-fraction-static`: what activations and graphs need is kept free, more on large
/// devices and with more ranks.
fn default_fraction(setup: &Setup) -> f64 {
    let ranks = setup.tp as f64;
    (0.9 - 0.005 * (ranks - 1.0)).clamp(0.75, 0.9)
}

fn state_bytes(model: &Model, setup: &Setup) -> u64 {
    let state = |layer: &Cache| match layer {
        Cache::Recurrent(state) => {
            state.bytes(setup.tp, setup.draft_tokens(), 2, setup.state_bytes.unwrap_or(2))
        }
        _ => 0,
    };
    model.layers.iter().map(state).sum()
}

/// States kept for sequences: `--max-running-requests` and one spare.
fn states(setup: &Setup) -> u64 {
    setup.max_num_seqs.unwrap_or(48) + 1
}

impl Engine for Sglang {
    fn name(&self) -> &'static str {
        "sglang"
    }

    fn plan(&self, model: &Model, setup: &Setup) -> Result<Plan, PlanError> {
        setup.check()?;
        let (keys, values) = token_bytes(model, setup);
        let draft: u64 = draft_layers(model, setup)
            .iter()
            .map(|layer| layer.token_bytes(setup.kv_keys, setup.tp))
            .sum();
        let per_token = (keys + values + draft).max(1);
        let fixed = state_bytes(model, setup).saturating_mul(states(setup));
        let ledger = ledger(model, setup, fixed)?;
        let formula = format!("keys {keys} + values {values} + draft {draft}");
        let mut plan = Plan::new(self.name(), model, setup, ledger);
        plan.kv_bytes_per_token =
            Some(Figure::derived(per_token as f64, Unit::BytesPerToken, formula));
        if fixed > 0 {
            let states = states(setup);
            plan.notes
                .push(format!("{:.2} GiB are set aside for {states} states", fixed as f64 / GIB));
        }
        if let Some(kv) = plan.ledger.kv.clone() {
            let page = setup.block_size.unwrap_or(1);
            fill(&mut plan, &kv, per_token, page, model);
        }
        Ok(plan)
    }

    fn changes(&self, model: &Model, setup: &Setup, plan: &Plan) -> Vec<(String, Setup)> {
        let fraction = setup.utilization.unwrap_or_else(|| default_fraction(setup));
        let changes = mend::general_changes(model, setup, plan, fraction);
        let renamed = |flag: String| {
            let names = [
                ("--gpu-memory-utilization", "--mem-fraction-static"),
                ("--max-model-len", "--context-length"),
                ("--tensor-parallel-size", "--tp"),
                ("--kv-cache-dtype fp8", "--kv-cache-dtype fp8_e4m3"),
            ];
            names.iter().fold(flag, |flag, (from, to)| flag.replace(from, to))
        };
        changes.into_iter().map(|(flag, changed)| (renamed(flag), changed)).collect()
    }
}

fn ledger(model: &Model, setup: &Setup, fixed: u64) -> Result<Ledger, PlanError> {
    let reserved = memory::reserved(setup, default_fraction(setup));
    let given = setup.kv_budget.clone().or_else(|| setup.measured.kv.clone());
    let weights = match weights::per_gpu(model, setup) {
        Ok(weights) => Some(weights),
        Err(missing) if given.is_none() && reserved.is_some() => return Err(missing.into()),
        Err(_) => None,
    };
    let non_torch = Some(memory::non_torch(setup));
    let graphs = Some(memory::graphs(model, setup));
    let total = setup.total.clone();
    let mut ledger =
        Ledger { total, reserved, weights, activation: None, non_torch, graphs, kv: given };
    if ledger.kv.is_none()
        && let (Some(reserved), Some(weights), Some(other)) =
            (&ledger.reserved, &ledger.weights, &ledger.non_torch)
    {
        let states = Figure::derived(fixed as f64, Unit::Bytes, "states of recurrent layers");
        let parts = [("weights", weights), ("non-torch", other), ("states", &states)];
        ledger.kv = Some(memory::left_over(reserved, &parts));
    }
    Ok(ledger)
}

fn fill(plan: &mut Plan, kv: &Figure, per_token: u64, page: u64, model: &Model) {
    let pages = |bytes: f64| (bytes.max(0.0) / per_token as f64 * page as f64).floor();
    let formula = format!("{} GiB / {per_token} bytes of a token", gib(kv.value));
    let tokens = through(kv, Unit::Tokens, |bytes| pages(bytes) * page as f64, formula);
    let formula = format!("{} GiB / {} bytes of a page", gib(kv.value), per_token * page);
    let blocks = through(kv, Unit::Blocks, pages, formula);
    if let Some(length) = plan.max_model_len {
        let count = |bytes: f64| pages(bytes) * page as f64 / length as f64;
        let formula = format!("{} tokens / {length}", tokens.value);
        plan.concurrency = Some(through(kv, Unit::Sequences, count, formula));
        let needed = length as f64 * per_token as f64;
        let formula = format!("{length} tokens * {per_token} bytes");
        plan.kv_needed = Some(Figure::derived(needed, Unit::Bytes, formula));
        if tokens.value < length as f64 {
            plan.notes.push(format!(
                "starts with room for {} tokens: longer requests are refused one by one",
                tokens.value
            ));
        }
    }
    let positive = |bytes: f64| pages(bytes) > 0.0;
    plan.verdict = Verdict::from_cases(positive(kv.low), positive(kv.value), positive(kv.high));
    if plan.verdict.answer() == Some(false) {
        plan.refusal =
            Some("Not enough memory. Please try to increase --mem-fraction-static.".to_string());
    }
    let layers = model.layers.len() as u64;
    let group = PoolGroup { kind: "full".into(), layers, groups: 1, block_size: page };
    let block_bytes =
        Figure::derived(per_token as f64 * page as f64, Unit::Bytes, "bytes of a page");
    plan.max_len = Some(tokens.clone());
    plan.printed_tokens = Some(tokens);
    plan.pool = Some(Pool { groups: vec![group], block_bytes, blocks, block_size: page });
}
