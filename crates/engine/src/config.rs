//! What an engine is made with, and the KV pool that follows from it.

use std::time::Duration;

use reef_kv::page::PageFormat;
use reef_kv::prefix::IndexKind;
use reef_kv::{BlockPool, ConfigError, GroupConfig, Ladder, PoolConfig};
use reef_model::spec::ModelSpec;

use crate::admission::Refusal;
use crate::session::{EngineError, Rules};
use crate::tenant::Tenant;

/// Prompt tokens computed in one step at most. Large enough that weights are read seldom, small enough
/// that open blocks take a small part of a small pool and activations stay in the L2 cache.
pub const PREFILL_CHUNK_TOKENS: usize = 256;

/// What an engine is made with.
pub struct EngineConfig {
    /// Bytes of KV memory.
    pub budget_bytes: usize,
    /// Commit the memory at start.
    pub prefault: bool,
    /// Tokens of a block; as the runner was loaded with.
    pub block_size: usize,
    /// How memory gives way.
    pub rules: Rules,
    /// The rungs that relief may use, and in what order.
    pub ladder: Ladder,
    /// Layers of the model (index in the model) whose pages stay f16 whatever happens.
    pub pinned_layers: Vec<usize>,
    /// Who runs when.
    pub scheduling: Scheduling,
    /// Whose requests there are; at least one. [`Request::tenant`](crate::Request::tenant) is an index.
    pub tenants: Vec<Tenant>,
    /// How prefixes are found again; `None`: not at all.
    pub prefix: Option<PrefixSettings>,
    /// How long to measure at start what steps cost; zero: costs are assumed at first, and corrected by
    /// what is seen.
    pub calibration: Duration,
}

impl EngineConfig {
    /// Blocks of 32 tokens, every rung, one tenant without limits, the prefix cache on.
    pub fn new(budget_bytes: usize) -> EngineConfig {
        EngineConfig {
            budget_bytes,
            prefault: false,
            block_size: 32,
            rules: Rules::default(),
            ladder: Ladder::default(),
            pinned_layers: Vec::new(),
            scheduling: Scheduling::default(),
            tenants: vec![Tenant::default()],
            prefix: Some(PrefixSettings::default()),
            calibration: Duration::ZERO,
        }
    }
}

impl EngineConfig {
    pub(crate) fn check(&self) -> Result<(), Refusal> {
        let wrong = |text: &str| Err(Refusal::Field(text.into()));
        let Scheduling { max_running, chunk_tokens, gap_factor, batch_share, .. } = self.scheduling;
        if self.tenants.is_empty() {
            return wrong("tenants: none is given: give at least one");
        }
        let weights_good = self.tenants.iter().all(|t| t.weight > 0.0 && t.weight.is_finite());
        if !weights_good {
            return wrong("tenants: a weight is not above 0: give each a positive weight");
        }
        if max_running == 0 || chunk_tokens == 0 {
            return wrong("max_running and chunk_tokens must be at least 1");
        }
        if !(gap_factor >= 1.0 && (0.0..=1.0).contains(&batch_share)) {
            return wrong("gap_factor must be at least 1 and batch_share from 0 to 1");
        }
        Ok(())
    }

    /// The KV pool for a model of `spec`.
    pub(crate) fn pool(&self, spec: &ModelSpec) -> Result<BlockPool, EngineError> {
        let plain = pool_config(spec, self.block_size, self.budget_bytes);
        let pinned = with_pinned(plain, spec, &self.pinned_layers)?;
        let (prefault, ladder) = (self.prefault, self.ladder.clone());
        Ok(BlockPool::new(PoolConfig { prefault, ladder, ..pinned })?)
    }

    /// Tokens of a prompt's chunk at most: its open f16 blocks take at most a quarter of a small pool, so
    /// that they do not push out what could have been kept. Where prefixes are to be found again it is
    /// shorter than any window: a block that is sealed and leaves its window in one step has no name.
    pub(crate) fn chunk_tokens(&self, pool: &BlockPool) -> usize {
        let block_size = pool.config().block_size();
        let windows = pool.config().groups.iter().filter_map(|group| group.window);
        let shortest = windows.min().filter(|_| self.prefix.is_some());
        let within = shortest
            .map_or(usize::MAX, |window| window.saturating_sub(1) / block_size * block_size);
        let tokens = pool.capacity_tokens(PageFormat::F16);
        let quarter = tokens.map_or(usize::MAX, |tokens| tokens / 4);
        let most = self.scheduling.chunk_tokens;
        (quarter / block_size * block_size).min(within).max(block_size).min(most)
    }
}

/// How prefixes are found again.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PrefixSettings {
    /// Which index.
    pub kind: IndexKind,
    /// What makes KV of one model worthless to another: a hash of its file.
    pub fingerprint: Vec<u8>,
    /// How its keys are rotated, by name.
    pub rotation: String,
}

/// When a request is let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AdmissionPolicy {
    /// When all that run, and it, fit to their ends under their lowest permitted rungs: nobody has to
    /// stand still, unless generations without `max_tokens` get longer than expected.
    Reserve,
    /// When all that run, and it, fit for the near future: more at once, at the price of preemptions.
    Utilize,
}

/// Who runs when.
#[derive(Clone, Debug, PartialEq)]
pub struct Scheduling {
    /// When a request is let in.
    pub admission: AdmissionPolicy,
    /// Sequences running at once at most, whatever memory says.
    pub max_running: usize,
    /// Requests waiting at most; those that were preempted do not count.
    pub max_waiting: usize,
    /// Prompt tokens of one sequence in a step at most.
    pub chunk_tokens: usize,
    /// A step that has both decodes and prefill takes at most so long, in microseconds.
    pub step_limit_us: u64,
    /// And at most so many times the step without the prefill. Those of lower priority than who is prefilled
    /// are left out of the step.
    pub gap_factor: f64,
    /// Mean microseconds between two tokens of a stream that are aimed at; limits how many run at once.
    pub latency_target_us: Option<u64>,
    /// Share of the pool that requests of negative priority may hold, from 0 to 1.
    pub batch_share: f64,
    /// Tokens that a request without `max_tokens` is expected to generate, until some have ended.
    pub expected_tokens: usize,
    /// Bytes a second of the spill store, until some were measured.
    pub spill_bytes_per_second: f64,
    /// Draft tokens tried in a step at most.
    pub draft_tokens: usize,
}

impl Default for Scheduling {
    fn default() -> Scheduling {
        Scheduling {
            admission: AdmissionPolicy::Reserve,
            max_running: 64,
            max_waiting: 4096,
            chunk_tokens: PREFILL_CHUNK_TOKENS,
            step_limit_us: 100_000,
            gap_factor: 1.8,
            latency_target_us: None,
            batch_share: 1.0,
            expected_tokens: 256,
            spill_bytes_per_second: 1e9,
            draft_tokens: 5,
        }
    }
}

/// The KV pool's configuration for a model: every rung, nothing pinned.
pub fn pool_config(spec: &ModelSpec, block_size: usize, budget_bytes: usize) -> PoolConfig {
    let shape = spec.page_shape(block_size);
    let group = |group: &reef_model::spec::GroupSpec| GroupConfig {
        layers: group.layers.len(),
        shape,
        window: group.window,
        pinned: Vec::new(),
    };
    let groups = spec.groups.iter().map(group).collect();
    PoolConfig { groups, budget_bytes, prefault: false, ladder: Ladder::default() }
}

/// `config`, made by [`pool_config`] for `spec`, with the pages of `layers` (index in the model) held in
/// f16 whatever happens; a layer named twice is pinned once.
///
/// # Errors
/// A layer that the model does not have.
pub fn with_pinned(
    mut config: PoolConfig,
    spec: &ModelSpec,
    layers: &[usize],
) -> Result<PoolConfig, Refusal> {
    for &layer in layers {
        if layer >= spec.layers {
            return Err(Refusal::PinnedLayer { layer, layers: spec.layers });
        }
        let (group, index) = spec.group_of(layer);
        let pinned = &mut config.groups[group].pinned;
        if let Err(place) = pinned.binary_search(&index) {
            pinned.insert(place, index);
        }
    }
    Ok(config)
}

/// Configuration of a pool that holds `tokens` tokens at f16 and the open blocks of a prefill chunk, so
/// that relief never comes from demand: for measuring.
pub fn roomy_config(spec: &ModelSpec, block_size: usize, tokens: usize) -> PoolConfig {
    let held = tokens.next_multiple_of(block_size) + PREFILL_CHUNK_TOKENS;
    let bytes = spec.bytes_per_token(PageFormat::F16, block_size) * held as f64;
    // Half as much again covers spans that serve one page size, tables and the reserve.
    pool_config(spec, block_size, (bytes * 1.5) as usize + (16 << 20))
}

/// A pool of [`roomy_config`].
///
/// # Errors
/// Memory that the system does not give.
pub fn roomy_pool(
    spec: &ModelSpec,
    block_size: usize,
    tokens: usize,
) -> Result<BlockPool, ConfigError> {
    BlockPool::new(roomy_config(spec, block_size, tokens))
}
