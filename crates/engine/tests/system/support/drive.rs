//! Ways to run a sequence.

use reef_engine::config::pool_config;
use reef_engine::session::{Rules, Session};
use reef_engine::{Engine, EngineConfig, Generation, Request};
use reef_kv::{BlockPool, Fidelity, SequenceConfig};
use reef_model::runner::ModelRunner;

/// A pool that holds `tokens` tokens at f16 with room to spare.
pub fn roomy_pool(runner: &ModelRunner, block_size: usize, tokens: usize) -> BlockPool {
    let f16_bytes = runner.spec().bytes_per_token(reef_kv::page::PageFormat::F16, block_size);
    let budget_bytes = ((tokens + 8 * block_size) as f64 * f16_bytes * 1.5) as usize + (8 << 20);
    BlockPool::new(pool_config(runner.spec(), block_size, budget_bytes)).unwrap()
}

/// A sequence that may go on for ever, with original positions up to `trained_context`.
pub fn endless(contract: Fidelity, trained_context: usize) -> SequenceConfig {
    SequenceConfig { request: 0, contract, priority: 0, trained_context, max_tokens: None }
}

/// Logits of every token of `ids`, computed `chunk` at a time, `[ids][vocabulary]`.
pub fn logits_in_chunks(
    runner: &mut ModelRunner,
    block_size: usize,
    rules: &Rules,
    ids: &[u32],
    chunk: usize,
) -> Vec<f32> {
    let pool = roomy_pool(runner, block_size, ids.len());
    let config = endless(Fidelity::Evict, usize::MAX);
    let mut session = Session::new(&pool, rules, config);
    let mut logits = Vec::new();
    for tokens in ids.chunks(chunk) {
        session.advance(runner, tokens).unwrap();
        let rows: Vec<usize> = (0..tokens.len()).collect();
        logits.extend_from_slice(runner.logits(&rows));
    }
    logits
}

/// What a model says of a text.
#[derive(Clone, Default)]
pub struct Scores {
    /// Negative log-likelihood of each token but the first, in nats.
    pub nll: Vec<f64>,
    /// Most likely token after each.
    pub top: Vec<u32>,
    /// Its log-probability.
    pub top_log_p: Vec<f64>,
}

impl Scores {
    pub fn mean_nll(&self) -> f64 {
        mean(&self.nll)
    }
}

/// Arithmetic mean.
pub fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// Scores `ids` with KV treated as `rules` say, a block at a time, as `reef eval ppl` does.
pub fn scores(
    runner: &mut ModelRunner,
    rules: &Rules,
    ids: &[u32],
    trained_context: usize,
) -> Scores {
    const BLOCK_SIZE: usize = 32;
    let kept = rules.token_budget.unwrap_or(ids.len()).min(ids.len());
    let pool = roomy_pool(runner, BLOCK_SIZE, kept);
    let config =
        SequenceConfig { max_tokens: Some(ids.len()), ..endless(Fidelity::Evict, trained_context) };
    let mut session = Session::new(&pool, rules, config);
    let mut scores = Scores::default();
    for (block, tokens) in ids.chunks(BLOCK_SIZE).enumerate() {
        session.advance(runner, tokens).unwrap();
        let rows: Vec<usize> = (0..tokens.len()).collect();
        let vocabulary = runner.spec().vocabulary;
        for (row, logits) in runner.logits(&rows).chunks_exact(vocabulary).enumerate() {
            add_row(&mut scores, logits, ids.get(block * BLOCK_SIZE + row + 1));
        }
    }
    scores
}

fn add_row(scores: &mut Scores, logits: &[f32], next: Option<&u32>) {
    let (top, largest) = logits
        .iter()
        .enumerate()
        .fold((0, f32::NEG_INFINITY), |best, (i, l)| if *l > best.1 { (i, *l) } else { best });
    let sum: f64 = logits.iter().map(|l| f64::from(*l - largest).exp()).sum();
    scores.top.push(top as u32);
    scores.top_log_p.push(-sum.ln());
    if let Some(&next) = next {
        scores.nll.push(sum.ln() + f64::from(largest) - f64::from(logits[next as usize]));
    }
}

/// An engine's configuration with blocks of 32, every rung, nothing pinned and no prefix cache.
pub fn engine_config(budget_bytes: usize) -> EngineConfig {
    EngineConfig { prefix: None, ..EngineConfig::new(budget_bytes) }
}

/// An engine with blocks of 32.
pub fn engine(runner: ModelRunner, budget_bytes: usize) -> Engine {
    Engine::new(runner, engine_config(budget_bytes)).unwrap()
}

/// A greedy request.
pub fn greedy(prompt: &[u32], max_tokens: usize, fidelity: Fidelity) -> Request {
    Request { max_tokens: Some(max_tokens), ..Request::new(prompt.to_vec(), fidelity) }
}

/// Runs `request` to its end.
pub fn generate(engine: &mut Engine, request: &Request) -> Generation {
    engine.generate(request, &mut |_| std::ops::ControlFlow::Continue(())).unwrap()
}
