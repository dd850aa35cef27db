//! llama.cpp and ik_llama.cpp: one buffer of cells per context, sized by `-c` alone.
//!
//! A layer of full attention has `n_ctx` cells; a window layer `pad(window * sequences + n_ubatch, 256)`
//! at most (`--swa-full` and versions before May 2025 keep all cells); a latent (MLA) keeps keys only. Nothing checks the size against free memory: a buffer that
//! does not fit fails to allocate.

use super::memory;
use super::setup::Setup;
use super::weights;
use super::{Engine, GIB, Ledger, Plan, PlanError, Pool, PoolGroup, Verdict, layers_formula};
use crate::dtype::KvDtype;
use crate::figure::{Figure, Unit};
use crate::model::{Cache, Model};

/// Cells are rounded up to this many.
const PADDING: u64 = 256;
/// `-c` where the model's training says nothing.
const DEFAULT_CONTEXT: u64 = 4096;

/// llama.cpp.
#[derive(Debug)]
pub struct LlamaCpp;

/// Cells and bytes of one kind of layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Part {
    /// Cells a layer.
    pub cells: u64,
    /// Layers.
    pub layers: u64,
    /// Bytes of all of them.
    pub bytes: u64,
}

/// The KV buffers of a context of `context` cells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Buffers {
    /// Layers that attend to everything.
    pub full: Part,
    /// Window layers.
    pub window: Part,
    /// Recurrent states of all sequences.
    pub state: Part,
}

impl Buffers {
    /// Sizes the buffers.
    pub fn new(model: &Model, setup: &Setup, context: u64) -> Buffers {
        let context = context.next_multiple_of(PADDING);
        let mut buffers = Buffers::default();
        for layer in &model.layers {
            let (part, cells, bytes) = match layer {
                Cache::Sliding { window, .. } if setup.hybrid_manager => {
                    let held = window * setup.sequences + setup.micro_batch;
                    let cells = held.next_multiple_of(PADDING).min(context);
                    (&mut buffers.window, cells, cell_bytes(layer, setup))
                }
                Cache::Recurrent(state) => {
                    // f32 throughout; one state more for every drafted token that may be taken back.
                    let states = setup.sequences * (1 + setup.draft_tokens());
                    (&mut buffers.state, states, state.bytes(1, 0, 4, 4))
                }
                Cache::Shared { .. } | Cache::Nothing => continue,
                layer => (&mut buffers.full, context, cell_bytes(layer, setup)),
            };
            part.cells = cells;
            part.layers += 1;
            part.bytes = part.bytes.saturating_add(cells.saturating_mul(bytes));
        }
        buffers
    }

    /// Bytes of all buffers.
    pub fn bytes(&self) -> u64 {
        self.full.bytes.saturating_add(self.window.bytes).saturating_add(self.state.bytes)
    }
}

/// Bytes of a cell in one layer. A row of each head is rounded to whole groups of the type.
fn cell_bytes(layer: &Cache, setup: &Setup) -> u64 {
    let (key, value) = (setup.kv_keys, setup.kv_values);
    let per_head = |heads: crate::model::Heads| {
        heads.kv * (key.bytes(heads.key_dim) + value.bytes(heads.value_dim))
    };
    match layer {
        Cache::Latent(latent) => match latent.expanded.filter(|_| setup.expanded_mla) {
            Some(heads) => per_head(heads),
            None => key.bytes(latent.rank + latent.rope_dim),
        },
        layer => layer.heads().map_or(0, per_head),
    }
}

impl Engine for LlamaCpp {
    fn name(&self) -> &'static str {
        "llamacpp"
    }

    fn plan(&self, model: &Model, setup: &Setup) -> Result<Plan, PlanError> {
        setup.check()?;
        let context = setup.max_model_len.or(model.trained_context).unwrap_or(DEFAULT_CONTEXT);
        let buffers = Buffers::new(model, setup, context);
        let parts = [("full", buffers.full), ("window", buffers.window), ("state", buffers.state)];
        let shown: Vec<String> = parts
            .iter()
            .filter(|(_, part)| part.layers > 0)
            .map(|(name, p)| {
                format!("{} {name} layers of {} cells: {} B", p.layers, p.cells, p.bytes)
            })
            .collect();
        let kv = Figure::derived(buffers.bytes() as f64, Unit::Bytes, shown.join(" + "));
        let per_token =
            model.layers.iter().map(|layer| cell_bytes(layer, setup)).sum::<u64>() as f64;
        let ledger = ledger(model, setup, kv.clone())?;
        let verdict = verdict(setup, &ledger);
        let context = context.next_multiple_of(PADDING);
        let formula = layers_formula(model, |layer| cell_bytes(layer, setup));
        let mut plan = Plan {
            kv_bytes_per_token: Some(Figure::derived(per_token, Unit::BytesPerToken, formula)),
            kv_needed: Some(kv),
            printed_tokens: Some(Figure::derived(context as f64, Unit::Tokens, "n_ctx")),
            max_model_len: Some(context),
            verdict,
            ..Plan::new(self.name(), model, setup, ledger)
        };
        let sequences = setup.sequences as f64;
        plan.concurrency = Some(Figure::measured(sequences, Unit::Sequences, "-np"));
        let groups = parts.iter().filter(|(_, part)| part.layers > 0).map(|(name, part)| {
            PoolGroup { kind: (*name).into(), layers: part.layers, groups: 1, block_size: 1 }
        });
        let block_bytes = Figure::derived(per_token, Unit::Bytes, "bytes of a cell, all layers");
        let blocks = Figure::derived(context as f64, Unit::Blocks, "cells of the full layers");
        plan.pool = Some(Pool { groups: groups.collect(), block_bytes, blocks, block_size: 1 });
        if plan.verdict.answer() == Some(false) {
            plan.refusal = Some("failed to allocate the KV buffer, or the compute buffers".into());
        }
        Ok(plan)
    }

    fn changes(&self, _: &Model, setup: &Setup, plan: &Plan) -> Vec<(String, Setup)> {
        let mut changes = Vec::new();
        if setup.kv_keys == KvDtype::Bf16 {
            let (kv_keys, kv_values) = (KvDtype::Q8_0, KvDtype::Q8_0);
            changes.push((
                "-ctk q8_0 -ctv q8_0".into(),
                Setup { kv_keys, kv_values, ..setup.clone() },
            ));
        }
        if let Some(context) = plan.max_model_len.filter(|context| *context > 8192) {
            let half = context / 2;
            changes
                .push((format!("-c {half}"), Setup { max_model_len: Some(half), ..setup.clone() }));
        }
        changes
    }
}

fn ledger(model: &Model, setup: &Setup, kv: Figure) -> Result<Ledger, PlanError> {
    let weights = match weights::per_gpu(model, setup) {
        Ok(weights) => Some(weights),
        Err(missing) if setup.total.is_some() => return Err(missing.into()),
        Err(_) => None,
    };
    let tokens = setup.micro_batch as f64;
    let vocabulary = model.vocabulary.unwrap_or(128_000) as f64;
    let width = model.intermediate.unwrap_or(14_336) as f64 * 2.0
        + model.hidden.unwrap_or(4096) as f64 * 4.0;
    let compute = tokens * (vocabulary + width) * 4.0;
    let reason = format!("compute buffer: {tokens} rows of f32 logits and of the widest layer");
    let activation = Figure::assumed(compute, compute * 0.3, compute * 2.5, Unit::Bytes, reason);
    let non_torch = Some(memory::non_torch(setup)).filter(|_| setup.total.is_some());
    Ok(Ledger {
        total: setup.total.clone(),
        reserved: setup.total.clone(),
        weights,
        activation: Some(activation),
        non_torch,
        graphs: None,
        kv: Some(kv),
    })
}

/// Whether all of it fits the device, where that is known: llama.cpp itself does not look.
fn verdict(setup: &Setup, ledger: &Ledger) -> Verdict {
    let (Some(total), Some(weights), Some(kv), Some(compute)) =
        (&setup.total, &ledger.weights, &ledger.kv, &ledger.activation)
    else {
        return Verdict::Starts;
    };
    let ranks = (setup.tp * setup.pp) as f64;
    let other = ledger.non_torch.as_ref();
    let fits = |pick: fn(&Figure) -> f64| {
        let used = pick(weights) + kv.value / ranks + pick(compute) + other.map_or(0.0, pick);
        used <= total.value.max(0.1 * GIB)
    };
    Verdict::from_cases(fits(|figure| figure.high), fits(|figure| figure.value), fits(|f| f.low))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source;

    fn mib(model: &str, setup: &Setup, context: u64) -> f64 {
        let model = source::read(model, &[]).unwrap();
        Buffers::new(&model, setup, context).bytes() as f64 / (1 << 20) as f64
    }

    #[test]
    fn buffers_are_those_of_logs() {
        let q8_0 = Setup { kv_keys: KvDtype::Q8_0, kv_values: KvDtype::Q8_0, ..Setup::default() };
        // ik_llama.cpp#538, #305, #285, #503.
        assert!((mib("DeepSeek-R1", &q8_0, 16384) - 583.31).abs() < 0.01);
        assert!((mib("DeepSeek-V3", &Setup::default(), 8192) - 549.0).abs() < 0.01);
        let expanded = Setup { expanded_mla: true, ..Setup::default() };
        assert!((mib("DeepSeek-R1", &expanded, 512) - 2440.0).abs() < 0.01);
        assert!((mib("Qwen3-32B", &q8_0, 16896) - 2244.0).abs() < 0.01);
        // 12 layers of 131,072 cells and 12 of pad(128 + 512, 256) = 768.
        let gpt_oss = source::read("gpt-oss-20b", &[]).unwrap();
        let buffers = Buffers::new(&gpt_oss, &Setup::default(), 131_072);
        assert_eq!((buffers.full.cells, buffers.window.cells), (131_072, 768));
        assert_eq!((buffers.full.layers, buffers.window.layers), (12, 12));
    }
}
