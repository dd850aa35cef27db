//! vLLM, first and second engine.

pub mod behavior;
pub mod pool;

use behavior::Change;
use pool::{Kind, Layout};

use super::memory::{self, Profile};
use super::mend;
use super::setup::Setup;
use super::{
    Engine, GIB, Ledger, Plan, PlanError, Pool, PoolGroup, Verdict, gib, through, weights,
};
use crate::figure::{Figure, Unit};
use crate::model::{Cache, Model};

/// Bytes alive per logit at the sampler's peak in the second engine: about 2 + 4 + 4 + 8 + 4 + 4.
const BYTES_PER_LOGIT: f64 = 28.0;
/// The same in the first engine, whose profile samples with top-p and top-k and keeps log-probabilities.
const BYTES_PER_LOGIT_FIRST: f64 = 44.0;

/// vLLM.
#[derive(Debug)]
pub struct Vllm;

impl Engine for Vllm {
    fn name(&self) -> &'static str {
        "vllm"
    }

    fn plan(&self, model: &Model, setup: &Setup) -> Result<Plan, PlanError> {
        setup.check()?;
        let max_model_len = setup.max_model_len.or(model.trained_context);
        let batched_tokens = behavior::batched_tokens(model, setup, max_model_len);
        let ledger = ledger(model, setup, batched_tokens, max_model_len)?;
        let layout = match Layout::new(model, setup, batched_tokens) {
            Ok(layout) => layout,
            // The ledger still stands.
            Err(error @ PlanError::Unsupported { .. }) => {
                return Ok(self.without_pool(setup, ledger, max_model_len, error.to_string()));
            }
            Err(error) => return Err(error),
        };
        let mut plan = Plan {
            version: setup.version.shown() + if setup.first_engine { " (V0)" } else { "" },
            kv_bytes_per_token: Some(token_bytes(&layout)),
            kv_needed: max_model_len.map(|length| needed(&layout, length)),
            max_model_len,
            notes: notes(model, setup, &layout, batched_tokens),
            ..Plan::new(self.name(), model, setup, ledger)
        };
        if let Some(kv) = plan.ledger.kv.clone() {
            fill(&mut plan, &layout, setup, model, &kv);
        }
        Ok(plan)
    }

    fn changes(&self, model: &Model, setup: &Setup, plan: &Plan) -> Vec<(String, Setup)> {
        let utilization = behavior::utilization(setup);
        let mut changes = mend::general_changes(model, setup, plan, utilization);
        let batched = behavior::batched_tokens(model, setup, plan.max_model_len);
        if batched > 2048 {
            let max_num_batched_tokens = Some(2048);
            let flag = "--max-num-batched-tokens 2048".to_string();
            changes.push((flag, Setup { max_num_batched_tokens, ..setup.clone() }));
        }
        let sequences = behavior::sequences(setup);
        if sequences > 64 {
            let flag = "--max-num-seqs 64".to_string();
            changes.push((flag, Setup { max_num_seqs: Some(64), ..setup.clone() }));
        }
        if setup.graphs && behavior::has(Change::GraphsSubtracted, setup) {
            changes.push(("--enforce-eager".into(), Setup { graphs: false, ..setup.clone() }));
        }
        changes
    }
}

impl Vllm {
    /// A plan of which only the ledger is known.
    fn without_pool(
        &self,
        setup: &Setup,
        ledger: Ledger,
        max_model_len: Option<u64>,
        note: String,
    ) -> Plan {
        let starved = ledger.kv.as_ref().is_some_and(|kv| kv.high <= 0.0);
        Plan {
            engine: self.name(),
            version: setup.version.shown(),
            ledger,
            kv_bytes_per_token: None,
            kv_needed: None,
            pool: None,
            printed_tokens: None,
            concurrency: None,
            max_len: None,
            max_model_len,
            verdict: if starved { Verdict::Refuses } else { Verdict::Unknown },
            refusal: None,
            notes: vec![note],
        }
    }
}

/// `total * utilization - weights - activation peak - non-torch (- graphs since 0.21)`.
fn ledger(
    model: &Model,
    setup: &Setup,
    batched_tokens: u64,
    max_model_len: Option<u64>,
) -> Result<Ledger, PlanError> {
    let total = setup.total.clone();
    let reserved = memory::reserved(setup, behavior::utilization(setup));
    let chunked_first = setup.first_engine && max_model_len.is_some_and(|length| length > 32_768);
    let sequences = behavior::sequences(setup).min(batched_tokens);
    let profile = Profile {
        tokens: batched_tokens,
        // The first engine's profile with chunked prefill samples nothing.
        sequences: if chunked_first { 0 } else { sequences },
        bytes_per_logit: if setup.first_engine { BYTES_PER_LOGIT_FIRST } else { BYTES_PER_LOGIT },
    };
    let given = setup.kv_budget.clone().or_else(|| setup.measured.kv.clone());
    let weights = match weights::per_gpu(model, setup) {
        Ok(weights) => Some(weights),
        Err(missing) if given.is_none() && reserved.is_some() => return Err(missing.into()),
        Err(_) => None,
    };
    let activation = Some(memory::activation(model, setup, profile));
    let non_torch = Some(memory::non_torch(setup));
    let graphs = Some(memory::graphs(model, setup));
    let mut ledger = Ledger { total, reserved, weights, activation, non_torch, graphs, kv: given };
    if ledger.kv.is_none() {
        ledger.kv = remainder(&ledger, behavior::has(Change::GraphsSubtracted, setup));
    }
    Ok(ledger)
}

fn remainder(ledger: &Ledger, with_graphs: bool) -> Option<Figure> {
    let reserved = ledger.reserved.as_ref()?;
    let mut parts = vec![
        ("weights", ledger.weights.as_ref()?),
        ("activation", ledger.activation.as_ref()?),
        ("non-torch", ledger.non_torch.as_ref()?),
    ];
    parts.extend(ledger.graphs.as_ref().filter(|_| with_graphs).map(|graphs| ("graphs", graphs)));
    Some(memory::left_over(reserved, &parts))
}

fn token_bytes(layout: &Layout) -> Figure {
    Figure::derived(layout.token_bytes as f64, Unit::BytesPerToken, layout.token_formula.clone())
}

fn needed(layout: &Layout, length: u64) -> Figure {
    let blocks = layout.request_blocks(length);
    let bytes = layout.needed_bytes(length) as f64;
    let formula = format!("{blocks} blocks of {} bytes for {length} tokens", layout.block_bytes);
    Figure::derived(bytes, Unit::Bytes, formula)
}

/// Everything that follows from the size of the pool.
fn fill(plan: &mut Plan, layout: &Layout, setup: &Setup, model: &Model, kv: &Figure) {
    let blocks_in = |bytes: f64| layout.blocks(bytes);
    let formula = format!("{} GiB / {} bytes of a block", gib(kv.value), layout.block_bytes);
    let blocks = through(kv, Unit::Blocks, |bytes| blocks_in(bytes) as f64, formula);
    let from_concurrency = behavior::has(Change::TokensFromConcurrency, setup);
    let length = plan.max_model_len;
    let tokens_of = |bytes: f64| match length.filter(|_| from_concurrency) {
        Some(length) => layout.tokens_from_concurrency(blocks_in(bytes), length) as f64,
        None => layout.tokens_of_one_group(blocks_in(bytes)) as f64,
    };
    let formula = match length.filter(|_| from_concurrency) {
        Some(length) => {
            let request = layout.request_blocks(length);
            format!("int({} blocks / {request} per request * {length} tokens)", blocks.value)
        }
        None => format!(
            "{} blocks // {} groups * {} tokens",
            blocks.value,
            layout.group_count(),
            layout.block_size()
        ),
    };
    plan.printed_tokens = Some(through(kv, Unit::Tokens, tokens_of, formula));
    if let Some(length) = length {
        let concurrency = |bytes: f64| layout.concurrency(blocks_in(bytes), length);
        let request = layout.request_blocks(length);
        let formula = format!("{} blocks / {request} per request of {length} tokens", blocks.value);
        plan.concurrency = Some(through(kv, Unit::Sequences, concurrency, formula));
    }
    let limit = length.unwrap_or(1 << 32).max(model.trained_context.unwrap_or(0));
    let longest = |bytes: f64| layout.longest(bytes, limit) as f64;
    let formula = format!("longest request whose blocks fit in {} blocks", blocks.value);
    plan.max_len = Some(through(kv, Unit::Tokens, longest, formula));
    let fits = |bytes: f64| {
        let blocks = blocks_in(bytes);
        let length = length.unwrap_or(1);
        let enough = match setup.first_engine {
            true => layout.tokens_of_one_group(blocks) >= length,
            false => layout.needed_bytes(length) as f64 <= bytes,
        };
        blocks > 0 && enough
    };
    plan.verdict = Verdict::from_cases(fits(kv.low), fits(kv.value), fits(kv.high));
    if plan.verdict.answer() == Some(false) {
        plan.refusal = Some(refusal(plan, layout, setup, kv.value));
    }
    let groups = layout.groups.iter().map(shown_group).collect();
    let block_size = layout.block_size();
    let formula = layout.block_formula.clone();
    let block_bytes = Figure::derived(layout.block_bytes as f64, Unit::Bytes, formula);
    plan.pool = Some(Pool { groups, block_bytes, blocks, block_size });
}

fn shown_group(group: &pool::Group) -> PoolGroup {
    let kind = match group.kind {
        Kind::Full => "full".to_string(),
        Kind::Window(window) => format!("window {window}"),
        Kind::Chunk(chunk) => format!("chunk {chunk}"),
        Kind::State => "state".to_string(),
    };
    PoolGroup { kind, layers: group.layers, groups: group.groups, block_size: group.block }
}

/// What vLLM says, in its words.
fn refusal(plan: &Plan, layout: &Layout, setup: &Setup, kv_bytes: f64) -> String {
    let blocks = layout.blocks(kv_bytes);
    if blocks == 0 {
        return "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when \
                initializing the engine."
            .into();
    }
    let length = plan.max_model_len.unwrap_or(0);
    if setup.first_engine {
        return format!(
            "The model's max seq len ({length}) is larger than the maximum number of tokens that can be \
             stored in KV cache ({}). Try increasing `gpu_memory_utilization` or decreasing \
             `max_model_len` when initializing the engine.",
            layout.tokens_of_one_group(blocks)
        );
    }
    let needed = layout.needed_bytes(length) as f64;
    format!(
        "To serve at least one request with the models's max seq len ({length}), ({} GiB KV cache is \
         needed, which is larger than the available KV cache memory ({} GiB). Based on the available \
         memory, the estimated maximum model length is {}. Try increasing `gpu_memory_utilization` or \
         decreasing `max_model_len` when initializing the engine.",
        gib(needed),
        gib(kv_bytes),
        layout.longest(kv_bytes, length)
    )
}

fn notes(model: &Model, setup: &Setup, layout: &Layout, batched_tokens: u64) -> Vec<String> {
    let mut notes = model.notes.clone();
    notes.extend(layout.notes.iter().cloned());
    if layout.padding > 0 {
        let share =
            100.0 * layout.padding as f64 / (layout.group_size * layout.group_count()) as f64;
        notes.push(format!("{} layers of padding waste {share:.1} % of the pool", layout.padding));
    }
    let heads = model.kv_heads().unwrap_or(u64::MAX);
    if setup.tp > heads {
        let copies = setup.tp / heads.max(1);
        notes.push(format!("tp {} over {heads} KV heads keeps {copies} copies", setup.tp));
    }
    let latent = model.layers.iter().any(|layer| matches!(layer, Cache::Latent(_)));
    if latent && setup.tp > 1 {
        notes.push(format!(
            "tp does not split a latent cache: each of {} ranks keeps all of it; attention replicas \
             (--dp with experts over all ranks) keep one part each",
            setup.tp
        ));
    }
    if setup.dp > 1 {
        notes.push(format!("all numbers are of one of {} replicas", setup.dp));
    }
    let windows = layout.groups.iter().any(|g| matches!(g.kind, Kind::Window(_) | Kind::Chunk(_)));
    if windows {
        notes.push(format!(
            "window layers reserve window + max_num_batched_tokens ({batched_tokens}) tokens a request"
        ));
    }
    if setup.graphs && !behavior::has(Change::GraphsSubtracted, setup) {
        notes.push("CUDA graphs are captured after the pool is sized, outside this ledger".into());
    }
    if setup.total.as_ref().is_some_and(|total| total.value < 2.0 * GIB) {
        notes.push("the device has less than 2 GiB".into());
    }
    notes
}

#[cfg(test)]
mod tests;
