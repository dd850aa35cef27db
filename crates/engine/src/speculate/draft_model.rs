//! Drafts by a smaller model with the same tokenizer.
//!
//! It computes on the caller's thread, in a small KV pool of its own. That pool never gives way by
//! relief and never makes anybody wait: a run that does not fit gives back what it holds and gets no
//! drafts until there is room again.

use std::collections::HashMap;

use reef_kernels::dispatch::Tier;
use reef_kernels::logits::{argmax, exp_weights, sums_len};
use reef_kv::page::PageFormat;
use reef_kv::{BlockPool, ConfigError, Fidelity, Sequence, SequenceConfig, Shortage};
use reef_model::gguf::{Gguf, GgufError};
use reef_model::runner::{
    Activations, BatchSequence, KeyRotation, LoadError, ModelRunner, RunnerOptions,
};
use reef_model::tokenizer::Vocabulary;

use super::{Drafter, RunKey};
use crate::config::pool_config;

/// Tokens computed before the first draft of a call: a long prompt is caught up with over several steps,
/// each of which goes without drafts, rather than in one long one.
const CATCH_UP_TOKENS: usize = 128;
/// A usual [`DraftModelOptions::least_probability`].
pub const LEAST_PROBABILITY: f64 = 0.4;

/// Why a draft model cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DraftModelError {
    /// The file is damaged or has no tokenizer.
    #[error("--draft: {0}")]
    File(#[from] GgufError),
    /// The weights cannot be loaded.
    #[error("--draft: {0}")]
    Load(#[from] LoadError),
    /// No memory for its KV.
    #[error("--draft: {0}")]
    Pool(#[from] ConfigError),
    /// It has another number of tokens than the model it drafts for.
    #[error(
        "--draft has a vocabulary of {draft} tokens, the model of {target}: give a GGUF of the same \
         family, with the same tokenizer"
    )]
    VocabularySize {
        /// Tokens of the draft model.
        draft: usize,
        /// Tokens of the model it drafts for.
        target: usize,
    },
    /// A token is written otherwise than in the model it drafts for.
    #[error(
        "--draft: token {token} is {draft:?}, in the model it is {target:?}: give a GGUF of the same \
         family, with the same tokenizer"
    )]
    Token {
        /// The first that differs.
        token: usize,
        /// Its text in the draft model.
        draft: String,
        /// Its text in the model it drafts for.
        target: String,
    },
}

/// How a draft model runs.
#[derive(Clone, Copy, Debug)]
pub struct DraftModelOptions {
    /// Threads, at least 1.
    pub threads: usize,
    /// CPU tier.
    pub tier: Tier,
    /// Tokens of a KV block.
    pub block_size: usize,
    /// Bytes of its KV memory.
    pub budget_bytes: usize,
    /// Drafting ends at a token that the draft model itself gives a smaller probability than this.
    pub least_probability: f64,
}

/// A model that drafts.
pub struct DraftModel {
    runner: ModelRunner,
    pool: BlockPool,
    runs: HashMap<RunKey, Run>,
    /// Sequences made so far; names them in the pool.
    made: u64,
    least_probability: f64,
    weights: Vec<f32>,
    sums: Vec<f32>,
}

/// What is computed of a run.
struct Run {
    sequence: Sequence,
    /// Tokens whose KV is committed.
    computed: Vec<u32>,
    /// Drafts whose KV was computed behind them, not committed: valid as far as they were accepted.
    ahead: Vec<u32>,
    /// It did not fit: bytes that have to be free before it is tried again.
    waits_for_bytes: Option<usize>,
}

impl DraftModel {
    /// Loads the weights of `draft`, which drafts for the model with `target`'s tokens.
    ///
    /// # Errors
    /// Another tokenizer, told by the first token that differs; a file that cannot be run; memory that
    /// cannot be had.
    pub fn load(
        draft: &Gguf,
        target: &Vocabulary,
        options: DraftModelOptions,
    ) -> Result<DraftModel, DraftModelError> {
        check_same_tokens(draft, target)?;
        let DraftModelOptions { threads, tier, block_size, budget_bytes, .. } = options;
        let runner_options = RunnerOptions {
            threads,
            tier,
            activations: Activations::Int8,
            block_size,
            key_rotation: KeyRotation::None,
        };
        let runner = ModelRunner::load(draft, runner_options)?;
        if runner.spec().vocabulary != target.len() {
            let (draft, target) = (runner.spec().vocabulary, target.len());
            return Err(DraftModelError::VocabularySize { draft, target });
        }
        let pool = BlockPool::new(pool_config(runner.spec(), block_size, budget_bytes))?;
        Ok(DraftModel {
            runner,
            pool,
            runs: HashMap::new(),
            made: 0,
            least_probability: options.least_probability,
            weights: Vec::new(),
            sums: Vec::new(),
        })
    }

    /// Its KV memory.
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    fn new_run(&mut self) -> Run {
        let config = SequenceConfig {
            request: self.made,
            contract: Fidelity::Exact,
            priority: 0,
            trained_context: self.runner.spec().trained_context,
            max_tokens: None,
        };
        self.made += 1;
        let sequence = Sequence::new(&self.pool, config);
        Run { sequence, computed: Vec::new(), ahead: Vec::new(), waits_for_bytes: None }
    }

    fn draft_into(
        &mut self,
        run: &mut Run,
        tokens: &[u32],
        most: usize,
        out: &mut Vec<u32>,
    ) -> Result<(), Shortage> {
        run.take_accepted(tokens);
        let behind = tokens.len() - run.computed.len();
        let chunk = &tokens[run.computed.len()..][..behind.min(CATCH_UP_TOKENS)];
        run.sequence.grow(chunk.len())?;
        if !self.compute(&run.sequence, run.computed.len(), chunk) {
            return Ok(());
        }
        run.sequence.commit(chunk.len());
        run.computed.extend_from_slice(chunk);
        if chunk.len() < behind {
            return Ok(());
        }
        let mut last_row = chunk.len() - 1;
        while out.len() < most {
            let Some(draft) = self.likely(last_row) else { break };
            out.push(draft);
            // The last draft's KV is not needed before it is known to be right.
            if out.len() == most || run.sequence.grow(run.ahead.len() + 1).is_err() {
                break;
            }
            if !self.compute(&run.sequence, tokens.len() + run.ahead.len(), &[draft]) {
                break;
            }
            run.ahead.push(draft);
            last_row = 0;
        }
        Ok(())
    }

    /// Computes `tokens` at `position`, whose pages exist. False where the model lacks one of them.
    fn compute(&mut self, sequence: &Sequence, position: usize, tokens: &[u32]) -> bool {
        let view = sequence.view();
        let part = BatchSequence { tokens, first_position: position as u32, view, observe: false };
        self.runner.forward(self.pool.arena(), &[part]).is_ok()
    }

    /// The likeliest token by `row` of the last pass, where it is likely enough.
    fn likely(&mut self, row: usize) -> Option<u32> {
        let tier = self.runner.compute().tier;
        let logits = self.runner.logits(&[row]);
        let best = argmax(tier, logits);
        let largest = logits.get(best as usize).copied().filter(|logit| logit.is_finite())?;
        self.weights.resize(logits.len(), 0.0);
        self.sums.resize(sums_len(logits.len()), 0.0);
        exp_weights(tier, logits, largest, 1.0, &mut self.weights, &mut self.sums);
        let total: f64 = self.sums.iter().map(|sum| f64::from(*sum)).sum();
        (1.0 / total >= self.least_probability).then_some(best)
    }
}

impl Run {
    /// Commits the drafts that were accepted, so that `computed` is a prefix of `tokens`, at least one
    /// token shorter.
    fn take_accepted(&mut self, tokens: &[u32]) {
        if self.computed.len() >= tokens.len() || !tokens.starts_with(&self.computed) {
            self.sequence.clear();
            self.computed.clear();
            self.ahead.clear();
        }
        let new = &tokens[self.computed.len()..tokens.len() - 1];
        let accepted = new.iter().zip(&self.ahead).take_while(|(new, draft)| new == draft).count();
        self.sequence.commit(accepted);
        self.computed.extend_from_slice(&new[..accepted]);
        self.ahead.clear();
    }

    /// Gives back all it holds; it is computed anew once so many bytes are free.
    fn wait_for(&mut self, bytes: usize) {
        self.sequence.clear();
        self.computed.clear();
        self.ahead.clear();
        self.waits_for_bytes = Some(bytes);
    }
}

impl Drafter for DraftModel {
    fn draft(&mut self, key: RunKey, tokens: &[u32], most: usize, out: &mut Vec<u32>) {
        out.clear();
        let fits_context = tokens.len() + most <= self.runner.spec().trained_context;
        if tokens.is_empty() || most == 0 || !fits_context {
            return;
        }
        let mut run = self.runs.remove(&key).unwrap_or_else(|| self.new_run());
        let waits = run.waits_for_bytes.unwrap_or(0);
        if waits <= self.pool.accounts().free_bytes {
            run.waits_for_bytes = None;
            if self.draft_into(&mut run, tokens, most, out).is_err() {
                let block_size = self.pool.config().block_size();
                let bytes_per_token =
                    self.runner.spec().bytes_per_token(PageFormat::F16, block_size);
                // With a chunk to spare, so that it does not stop again at once.
                run.wait_for((bytes_per_token * (tokens.len() + CATCH_UP_TOKENS) as f64) as usize);
            }
        }
        self.runs.insert(key, run);
    }

    fn forget(&mut self, run: RunKey) {
        self.runs.remove(&run);
    }
}

/// Whether drafts of `draft` mean the same to the model with `target`'s tokens: the same texts in the same
/// order, byte for byte.
fn check_same_tokens(draft: &Gguf, target: &Vocabulary) -> Result<(), DraftModelError> {
    let texts = draft.str_array("tokenizer.ggml.tokens")?;
    if texts.len() != target.len() {
        let (draft, target) = (texts.len(), target.len());
        return Err(DraftModelError::VocabularySize { draft, target });
    }
    for (token, text) in texts.enumerate() {
        let expected = target.text(token as u32).unwrap_or_default();
        if text != expected {
            let (draft, target) = (text.to_owned(), expected.to_owned());
            return Err(DraftModelError::Token { token, draft, target });
        }
    }
    Ok(())
}
