//! The loop: prefill in chunks, then sample and decode until something ends it.

use std::ops::ControlFlow;

use reef_kv::page::PageFormat;
use reef_kv::{BlockPool, ConfigError, GroupConfig, Ladder, PoolConfig, SequenceConfig};
use reef_model::runner::ModelRunner;
use reef_model::spec::ModelSpec;

use crate::admission::{Refusal, admit};
use crate::request::{Event, FinishReason, Generation, Request, Usage};
use crate::sampler::Sampler;
use crate::session::{EngineError, Rules, Session};

/// Prompt tokens computed in one step. Large enough that weights are read seldom, small enough that
/// open blocks take a small part of a small pool and activations stay in the L2 cache.
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

/// A model and its KV memory.
pub struct Engine {
    runner: ModelRunner,
    pool: BlockPool,
    rules: Rules,
    next_request: u64,
}

/// What the caller does with an event: go on, or end the generation for a reason.
pub type Sink<'a> = dyn FnMut(Event) -> ControlFlow<FinishReason> + 'a;

impl Engine {
    /// Maps the KV memory.
    ///
    /// # Errors
    /// A budget that is too small for the model or more than the system gives; a pinned layer that the
    /// model does not have.
    pub fn new(runner: ModelRunner, config: EngineConfig) -> Result<Engine, EngineError> {
        let EngineConfig { budget_bytes, prefault, block_size, rules, ladder, pinned_layers } =
            config;
        let spec = runner.spec();
        let plain = pool_config(spec, block_size, budget_bytes);
        let pool_config = with_pinned(plain, spec, &pinned_layers)?;
        let pool = BlockPool::new(PoolConfig { prefault, ladder, ..pool_config })?;
        Ok(Engine { runner, pool, rules, next_request: 0 })
    }

    /// What the model is.
    pub fn spec(&self) -> &ModelSpec {
        self.runner.spec()
    }

    /// The KV memory.
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// Runs `request` to its end, telling `sink` what happens. A running request is never ended for
    /// want of memory: what its contract cannot hold is refused before it starts.
    ///
    /// # Errors
    /// A refusal with numbers, or a token outside the vocabulary.
    pub fn generate(
        &mut self,
        request: &Request,
        sink: &mut Sink<'_>,
    ) -> Result<Generation, EngineError> {
        let context = self.runner.spec().trained_context;
        let max_tokens = admit(&self.pool, &self.rules, context, request)?;
        let config = SequenceConfig {
            request: self.next_request,
            contract: request.fidelity,
            priority: 0,
            trained_context: context,
            max_tokens: Some(request.prompt.len().saturating_add(max_tokens).saturating_sub(1)),
        };
        self.next_request += 1;
        let mut session = Session::new(&self.pool, &self.rules, config);
        let mut token_ids = Vec::new();
        let finish = run(&mut self.runner, &mut session, request, max_tokens, &mut token_ids, sink);
        let finish_reason = finish?;
        let usage = Usage {
            prompt_tokens: request.prompt.len(),
            fidelity: request.fidelity,
            budget_bytes: self.pool.config().budget_bytes,
            max_tokens_limit: max_tokens,
            kv: session.sequence().usage(),
        };
        Ok(Generation { token_ids, finish_reason, usage })
    }
}

fn run(
    runner: &mut ModelRunner,
    session: &mut Session<'_>,
    request: &Request,
    max_tokens: usize,
    token_ids: &mut Vec<u32>,
    sink: &mut Sink<'_>,
) -> Result<FinishReason, EngineError> {
    if let ControlFlow::Break(reason) = sink(Event::Admitted { max_tokens }) {
        return Ok(reason);
    }
    let mut last_row = match prefill(runner, session, &request.prompt, sink)? {
        ControlFlow::Continue(row) => row,
        ControlFlow::Break(reason) => return Ok(reason),
    };
    let mut sampler = Sampler::new(request.sampling.clone());
    loop {
        if token_ids.len() == max_tokens {
            return Ok(FinishReason::Length);
        }
        let logits = runner.logits(&[last_row]);
        let token = sampler.sample(logits);
        if !logits[token as usize].is_finite() {
            return Err(EngineError::NotFinite { tokens: session.sequence().next_position() });
        }
        if request.end_ids.contains(&token) {
            return Ok(FinishReason::Stop);
        }
        token_ids.push(token);
        if let ControlFlow::Break(reason) = sink(Event::Token(token)) {
            return Ok(reason);
        }
        if token_ids.len() < max_tokens {
            session.advance(runner, &[token])?;
            last_row = 0;
            if let ControlFlow::Break(reason) = report(session, sink) {
                return Ok(reason);
            }
        }
    }
}

/// Tokens of a prompt's chunk: its open f16 blocks take at most a quarter of a small pool, so that
/// they do not push out what could have been kept.
fn prefill_chunk(pool: &BlockPool) -> usize {
    let block_size = pool.config().block_size();
    let quarter = pool.capacity_tokens(PageFormat::F16).map_or(usize::MAX, |tokens| tokens / 4);
    (quarter / block_size * block_size).clamp(block_size, PREFILL_CHUNK_TOKENS)
}

/// Computes the prompt in chunks; a chunk that does not fit is halved down to a single token. Returns
/// the row of the last token.
fn prefill(
    runner: &mut ModelRunner,
    session: &mut Session<'_>,
    prompt: &[u32],
    sink: &mut Sink<'_>,
) -> Result<ControlFlow<FinishReason, usize>, EngineError> {
    let (mut done, mut chunk, mut rows) = (0, prefill_chunk(session.sequence().pool()), 0);
    while done < prompt.len() {
        rows = chunk.min(session.most_tokens()).min(prompt.len() - done);
        match session.advance(runner, &prompt[done..done + rows]) {
            Err(EngineError::Shortage(_)) if chunk > 1 => {
                chunk /= 2;
                continue;
            }
            other => other?,
        }
        done += rows;
        let progress = sink(Event::Prefilled { tokens: done, total: prompt.len() });
        if let ControlFlow::Break(reason) = progress {
            return Ok(ControlFlow::Break(reason));
        }
        if let ControlFlow::Break(reason) = report(session, sink) {
            return Ok(ControlFlow::Break(reason));
        }
    }
    Ok(ControlFlow::Continue(rows - 1))
}

/// Publishes what the last step did to memory.
fn report(session: &mut Session<'_>, sink: &mut Sink<'_>) -> ControlFlow<FinishReason> {
    for entry in session.new_entries() {
        sink(Event::Relief(entry))?;
    }
    let sequence = session.sequence();
    sink(Event::Step {
        step: session.step() - 1,
        tokens: sequence.next_position(),
        used: sequence.pool().accounts().used,
    })
}
