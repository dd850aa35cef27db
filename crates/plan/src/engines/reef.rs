//! Reef itself: the numbers are asked of the pool, `reef-kv`'s own, never worked out a second time.

use reef_kv::page::{PageFormat, PageShape};
use reef_kv::{
    BlockPool, ConfigError as PoolError, Fidelity, GroupConfig, Ladder, PoolConfig,
    minimum_budget_bytes,
};
use reef_model::spec::Architecture;

use super::setup::Setup;
use super::weights;
use super::{Engine, Ledger, Plan, PlanError, Pool, PoolGroup, Verdict};
use crate::dtype::KvDtype;
use crate::figure::{Figure, Unit};
use crate::model::{Cache, Heads, Model};

/// `--block-size` where it is not given.
const DEFAULT_BLOCK: u64 = 32;
/// Smallest and largest of the default budget in bytes.
const BUDGET_RANGE: (usize, usize) = (1 << 20, 1 << 40);

/// Reef.
#[derive(Debug)]
pub struct Reef;

/// The pool's configuration, as `reef run` makes it: full layers, then window layers.
///
/// # Errors
/// What Reef does not run: other kinds of layers, layers of different shapes.
pub fn pool_config(
    model: &Model,
    block_size: usize,
    budget_bytes: usize,
) -> Result<PoolConfig, PlanError> {
    let unsupported = |what: &str| PlanError::Unsupported {
        engine: "reef",
        what: format!("{} ({what})", model.name),
        mend: format!("Reef runs {}", Architecture::ALL.map(|(name, _)| name).join(", ")),
    };
    let mut full = 0;
    let mut windowed = 0;
    let mut window_tokens = None;
    let mut shape: Option<Heads> = None;
    for layer in &model.layers {
        match layer {
            Cache::Full { .. } => full += 1,
            Cache::Sliding { window, .. } if window_tokens.is_none_or(|known| known == *window) => {
                windowed += 1;
                window_tokens = Some(*window);
            }
            _ => return Err(unsupported("it has layers that are neither full nor of one window")),
        }
        let heads = layer.heads();
        let differs = shape.is_some() && shape != heads;
        if differs || heads.is_some_and(|heads| heads.key_dim != heads.value_dim) {
            return Err(unsupported("its layers differ in heads"));
        }
        shape = heads;
    }
    let heads = shape.ok_or_else(|| unsupported("it has no layers"))?;
    let shape =
        PageShape { kv_heads: heads.kv as usize, head_dim: heads.key_dim as usize, block_size };
    let groups = [
        GroupConfig { layers: full, shape, window: None, pinned: Vec::new() },
        GroupConfig {
            layers: windowed,
            shape,
            window: window_tokens.map(|window| window as usize),
            pinned: Vec::new(),
        },
    ];
    let groups = groups.into_iter().filter(|group| group.layers > 0).collect();
    Ok(PoolConfig { groups, budget_bytes, prefault: false, ladder: Ladder::default() })
}

fn page_format(setup: &Setup) -> Result<PageFormat, PlanError> {
    match (setup.kv_keys, setup.kv_values) {
        (KvDtype::Bf16, KvDtype::Bf16) => Ok(PageFormat::F16),
        (KvDtype::Int8, KvDtype::Int8) => Ok(PageFormat::Int8),
        // E5M2 takes the same bytes.
        (KvDtype::Fp8, KvDtype::Fp8) => Ok(PageFormat::Fp8E4M3),
        (KvDtype::Int8, KvDtype::Int4) => Ok(PageFormat::K8V4),
        (KvDtype::Int4, KvDtype::Int4) => Ok(PageFormat::Int4),
        (keys, values) => Err(PlanError::Flag {
            flag: "--kv-cache-dtype",
            why: format!(
                "Reef keeps KV in f16, int8, fp8, int8/int4 (k8v4) or int4, not {}/{}",
                keys.name(),
                values.name()
            ),
        }),
    }
}

/// The budget: as given, else what the length needs at f16 (`reef run` takes the smallest of that, half
/// of the memory available then, and the cgroup's limit).
fn budget(setup: &Setup, config: &PoolConfig, length: Option<u64>) -> Figure {
    if let Some(given) = setup.kv_budget.as_ref().or(setup.measured.kv.as_ref()) {
        return given.clone();
    }
    let tokens = length.unwrap_or(4096) as f64;
    let per_token = config.bytes_per_token(PageFormat::F16) as f64;
    // A twentieth more than the context's pages, as `reef run` adds for tables and the reserve.
    let bytes = (tokens * per_token * 1.05).floor() + f64::from(4 << 20);
    let formula =
        format!("{tokens} tokens * {per_token} bytes * 1.05 + 4 MiB (--kv-memory changes it)");
    Figure::derived(bytes, Unit::Bytes, formula)
}

impl Engine for Reef {
    fn name(&self) -> &'static str {
        "reef"
    }

    fn plan(&self, model: &Model, setup: &Setup) -> Result<Plan, PlanError> {
        setup.check()?;
        let format = page_format(setup)?;
        let block_size = setup.block_size.unwrap_or(DEFAULT_BLOCK) as usize;
        let length = setup.max_model_len.or(model.trained_context);
        let mut config = pool_config(model, block_size, 0)?;
        let budget = budget(setup, &config, length);
        config.budget_bytes = (budget.value as usize).clamp(BUDGET_RANGE.0, BUDGET_RANGE.1);
        let ledger = Ledger {
            total: setup.total.clone(),
            weights: weights::per_gpu(model, setup).ok(),
            kv: Some(budget),
            ..Ledger::default()
        };
        let per_token = config.bytes_per_token(format) as f64;
        let formula = format!("PoolConfig::bytes_per_token({})", format.name());
        let mut plan = Plan {
            kv_bytes_per_token: Some(Figure::derived(per_token, Unit::BytesPerToken, formula)),
            ..Plan::new(self.name(), model, setup, ledger)
        };
        match BlockPool::new(config) {
            Ok(pool) => fill(&mut plan, &pool, format),
            Err(error @ (PoolError::BudgetTooSmall { .. } | PoolError::BudgetTooLarge { .. })) => {
                plan.verdict = Verdict::Refuses;
                plan.refusal = Some(error.to_string());
            }
            Err(error) => {
                return Err(PlanError::Flag { flag: "--model", why: error.to_string() });
            }
        }
        Ok(plan)
    }

    fn changes(&self, _: &Model, setup: &Setup, plan: &Plan) -> Vec<(String, Setup)> {
        let mut changes = Vec::new();
        let mut permit = |flag: &str, dtype| {
            let (kv_keys, kv_values) = (dtype, dtype);
            changes.push((flag.into(), Setup { kv_keys, kv_values, ..setup.clone() }));
        };
        if setup.kv_keys == KvDtype::Bf16 {
            permit("--fidelity int8", KvDtype::Int8);
        }
        if setup.kv_values != KvDtype::Int4 {
            permit("--fidelity int4", KvDtype::Int4);
        }
        if let Some(needed) = &plan.kv_needed {
            let bytes = needed.value;
            let budget = Figure::measured(bytes, Unit::Bytes, "--kv-memory");
            let flag = format!("--kv-memory {}KiB", (bytes / 1024.0).ceil());
            changes.push((flag, Setup { kv_budget: Some(budget), ..setup.clone() }));
        }
        changes
    }
}

/// Asks the pool.
fn fill(plan: &mut Plan, pool: &BlockPool, format: PageFormat) {
    let config = pool.config();
    let block_size = config.block_size() as u64;
    let name = format.name();
    let capacity = pool.capacity_tokens(format).map(|tokens| tokens as u64);
    // Only window layers: no length is too long.
    let tokens = capacity.or(plan.max_model_len).unwrap_or(u64::from(u32::MAX));
    let formula = format!("BlockPool::capacity_tokens({name})");
    let printed = Figure::derived(tokens as f64, Unit::Tokens, formula);
    if let Some(length) = plan.max_model_len {
        let needed = pool.bytes_for_tokens(length as usize, format, 1);
        let formula = format!("BlockPool::bytes_for_tokens({length}, {name}, 1)");
        plan.kv_needed = Some(Figure::derived(needed as f64, Unit::Bytes, formula));
        let formula = format!("{tokens} tokens / {length}");
        let concurrency = tokens as f64 / length.max(1) as f64;
        plan.concurrency = Some(Figure::derived(concurrency, Unit::Sequences, formula));
        let fits = pool.fits(length as usize, format, 1);
        plan.verdict = if fits { Verdict::Starts } else { Verdict::Refuses };
        if !fits {
            plan.refusal = Some(format!(
                "{length} tokens need {needed} bytes of KV memory in {name}, the budget is {}, which \
                 holds {tokens} tokens: lower max_tokens, raise --kv-memory, or permit a lower fidelity",
                config.budget_bytes
            ));
        }
    } else {
        plan.verdict = Verdict::Starts;
    }
    let least = minimum_budget_bytes(config, Fidelity::Evict);
    plan.notes.push(format!(
        "with `--fidelity evict` any length runs in a budget of {least} bytes or more: blocks are dropped"
    ));
    let accounts = pool.accounts();
    plan.notes.push(format!(
        "of {} bytes: {} for pages, {} reserved for re-encoding, {} tables, {} fragmentation",
        accounts.budget_bytes,
        accounts.free_bytes,
        accounts.reserved_bytes,
        accounts.table_bytes,
        accounts.fragmentation_bytes
    ));
    let groups = config.groups.iter().map(|group| PoolGroup {
        kind: group.window.map_or("full".into(), |window| format!("window {window}")),
        layers: group.layers as u64,
        groups: 1,
        block_size,
    });
    let block: usize = config.groups.iter().map(|group| group.block_bytes(format)).sum();
    let block_bytes = Figure::derived(block as f64, Unit::Bytes, "GroupConfig::block_bytes");
    let blocks = Figure::derived((tokens / block_size) as f64, Unit::Blocks, "tokens / block size");
    plan.pool = Some(Pool { groups: groups.collect(), block_bytes, blocks, block_size });
    plan.max_len = Some(printed.clone());
    plan.printed_tokens = Some(printed);
}
