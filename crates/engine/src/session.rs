//! One sequence being computed: room is made, pages are grown, the model runs, tokens are committed.

use reef_kv::policy::{EvictionPolicy, Observation, Protection, Sinks};
use reef_kv::relief::ReliefError;
use reef_kv::{
    BlockPool, ConfigError, Demand, EncodeJob, LedgerEntry, ReliefPlan, Sequence, SequenceConfig,
    Shortage, TAIL_TOKENS, apply_relief, page::PageFormat, plan_format_at_seal, plan_relief,
    plan_token_budget,
};
use reef_model::runner::{BatchError, BatchSequence, Compute, ModelRunner};

use crate::admission::Refusal;
use crate::executor::inline::encode_pages;
use crate::observe::{KeyObserver, most_rows, observation, observe_masses};

/// Tokens ahead for which relief makes room. Two blocks: late enough that a short request keeps its
/// precision, early enough that blocks give way in batches.
pub const HORIZON_TOKENS: usize = 64;

/// Tokens ahead for which room is made once relief has begun, so that it does not come back every few
/// steps: four horizons.
pub const STRETCH_TOKENS: usize = 4 * HORIZON_TOKENS;

/// Queries of a layer are rotated once for each run of kept blocks: rows times runs of a step at most,
/// sixteen runs of a whole prefill chunk (9 MB of queries for SmolLM2, 64 MB for a model of width 4,096).
const RUN_ROWS: usize = 4096;

/// Why the engine could not do its work.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The request can never be served under its contract.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// No permitted rung is left.
    #[error(transparent)]
    Shortage(#[from] Shortage),
    /// KV memory that cannot be had.
    #[error(transparent)]
    Pool(#[from] ConfigError),
    /// A token the model does not know.
    #[error(transparent)]
    Batch(#[from] BatchError),
    /// No logit of a token is finite: the weights are damaged, or their numbers overflow.
    #[error(
        "the logits after {tokens} tokens are not finite: the weights hold NaN or infinity, or overflow; \
         fetch or convert the model again"
    )]
    NotFinite {
        /// Tokens computed when it showed.
        tokens: usize,
    },
    /// What the text must be can no longer be told: the text would break off in the middle.
    #[error(
        "what the text must be takes too much work: {reason}; make the schema or grammar simpler"
    )]
    Constraint {
        /// The constraint's own words.
        reason: String,
    },
    /// A text too short to measure a model on.
    #[error("the text to measure on has {tokens} tokens: give at least {minimum}")]
    ShortText {
        /// Tokens of the text, after what the trained context cuts off.
        tokens: usize,
        /// Tokens needed.
        minimum: usize,
    },
    /// Relief at a time when pages may be in use.
    #[error(transparent)]
    Relief(#[from] ReliefError),
    /// A recall task that cannot be set.
    #[error(transparent)]
    Task(#[from] crate::eval::recall::TaskError),
    /// Nobody computes any more.
    #[error(transparent)]
    Executor(#[from] crate::executor::ExecutorDead),
    /// The engine's own fault: nothing ran although somebody waited and memory was free.
    #[error(
        "the engine stood still although memory was free: a fault of its own, please report it with its log"
    )]
    Stalled,
    /// What ended a request, as it was told.
    #[error(transparent)]
    Failed(std::sync::Arc<EngineError>),
}

/// How KV memory gives way, beside the contract.
pub struct Rules {
    /// Which blocks are dropped first when memory is short.
    pub policy: Box<dyn EvictionPolicy>,
    /// Format of every sealed block from the moment it is sealed.
    pub format_at_seal: PageFormat,
    /// Tokens at the start kept in f16 despite `format_at_seal`.
    pub sink_tokens: usize,
    /// Tokens at the end kept in f16 despite `format_at_seal`.
    pub tail_tokens: usize,
    /// Most tokens kept, if limited; then blocks go one at a time.
    pub token_budget: Option<usize>,
}

impl Default for Rules {
    fn default() -> Rules {
        Rules {
            policy: Box::new(Sinks { tail_tokens: TAIL_TOKENS }),
            format_at_seal: PageFormat::F16,
            sink_tokens: 0,
            tail_tokens: 0,
            token_budget: None,
        }
    }
}

impl Rules {
    /// Tokens that the policy never drops, the block being computed apart, marked spans left out.
    pub(crate) fn protected_tokens(&self, block_size: usize) -> usize {
        match self.policy.protection() {
            Protection::SinksTailAndKept { tail_tokens } => {
                block_size + tail_tokens.next_multiple_of(block_size)
            }
            Protection::OpenBlocksOnly => 0,
        }
    }
}

impl Rules {
    /// Most tokens of `sequence` to compute in one step, whatever fits in the pool: so many that a token
    /// budget is kept to, and that observing them takes bounded memory. At least 1.
    pub(crate) fn most_tokens(&self, sequence: &Sequence) -> usize {
        let block_size = sequence.pool().config().block_size();
        let protected = self.protected_tokens(block_size);
        let budget = self.token_budget.unwrap_or(usize::MAX);
        let incoming = budget.saturating_sub(protected) / block_size * block_size;
        let runs = sequence.view().groups.iter().flat_map(|group| &group.runs).map(Vec::len);
        let rotated = RUN_ROWS / runs.max().unwrap_or(1).max(1);
        incoming.min(rotated).max(1).min(most_rows(&*self.policy, sequence))
    }

    /// Whether what the queries of `sequence` attend to is to be kept for its policy.
    pub(crate) fn observes_masses(&self, sequence: &Sequence) -> bool {
        matches!(observation(&*self.policy, sequence), Observation::AttentionMass { .. })
    }
}

/// One sequence being computed.
pub struct Session<'a> {
    pool: &'a BlockPool,
    rules: &'a Rules,
    sequence: Sequence,
    keys: KeyObserver,
    step: u64,
    reported: usize,
}

impl<'a> Session<'a> {
    /// An empty sequence in `pool`.
    pub fn new(pool: &'a BlockPool, rules: &'a Rules, config: SequenceConfig) -> Session<'a> {
        let sequence = Sequence::new(pool, config);
        Session { pool, rules, sequence, keys: KeyObserver::default(), step: 0, reported: 0 }
    }

    /// The sequence.
    pub fn sequence(&self) -> &Sequence {
        &self.sequence
    }

    /// Steps taken so far.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Most tokens to compute in one step, whatever fits in the pool: so many that a token budget is kept
    /// to, and that observing them takes bounded memory. At least 1.
    pub fn most_tokens(&self) -> usize {
        self.rules.most_tokens(&self.sequence)
    }

    fn observation(&self) -> Observation {
        observation(&*self.rules.policy, &self.sequence)
    }

    /// Ledger entries written since the last call.
    pub fn new_entries(&mut self) -> impl Iterator<Item = LedgerEntry> + '_ {
        let entries = self.sequence.ledger().entries();
        let from = std::mem::replace(&mut self.reported, entries.len());
        entries[from..].iter().copied()
    }

    /// Computes `tokens` at the next positions: relieves, grows, runs the model, commits. Their logits
    /// can then be asked of `runner`, row `i` for `tokens[i]`.
    ///
    /// # Errors
    /// [`Shortage`] where no permitted rung makes room; the sequence then holds what it held, perhaps
    /// in fewer bytes, and a shorter `tokens` may fit.
    pub fn advance(&mut self, runner: &mut ModelRunner, tokens: &[u32]) -> Result<(), EngineError> {
        Session::advance_all(runner, std::slice::from_mut(self), tokens)
    }

    /// [`advance`](Self::advance) for several sequences of one pool in one batch; every session takes an
    /// equal share of `tokens`, in order. Room is made for each alone.
    pub fn advance_all(
        runner: &mut ModelRunner,
        sessions: &mut [Session<'_>],
        tokens: &[u32],
    ) -> Result<(), EngineError> {
        Session::probe_all(runner, sessions, tokens)?;
        let share = tokens.len() / sessions.len().max(1);
        for (place, session) in sessions.iter_mut().enumerate() {
            if let Observation::AttentionMass { decay } = session.observation() {
                observe_masses(runner, place, &mut session.sequence, decay);
            }
            session.commit(runner.compute(), share)?;
        }
        Ok(())
    }

    /// [`advance_all`](Self::advance_all) without accepting the tokens: their logits can be asked of
    /// `runner`, then the next call takes the same positions again. Room that was made stays made.
    ///
    /// # Errors
    /// As [`advance`](Self::advance).
    pub fn probe_all(
        runner: &mut ModelRunner,
        sessions: &mut [Session<'_>],
        tokens: &[u32],
    ) -> Result<(), EngineError> {
        let Some(pool) = sessions.first().map(|session| session.pool) else {
            return Ok(());
        };
        let share = tokens.len() / sessions.len();
        for session in &mut *sessions {
            session.make_room(runner.compute(), share)?;
            session.sequence.grow(share)?;
        }
        let batch: Vec<BatchSequence<'_>> = sessions
            .iter()
            .zip(tokens.chunks(share))
            .map(|(session, tokens)| BatchSequence {
                tokens,
                first_position: session.sequence.next_position() as u32,
                view: session.sequence.view(),
                observe: session.rules.observes_masses(&session.sequence),
            })
            .collect();
        let fence = pool.begin_step();
        runner.forward(pool.arena(), &batch)?;
        fence.pass();
        Ok(())
    }

    /// Brings every sealed block to `format` now, except those with a token among the first
    /// `sink_tokens` or the last `tail_tokens`; blocks of lesser precision stay as they are. Blocks
    /// sealed from now on follow the rules.
    ///
    /// # Errors
    /// Relief at a time when pages may be in use.
    pub fn re_encode(
        &mut self,
        compute: &Compute,
        format: PageFormat,
        sink_tokens: usize,
        tail_tokens: usize,
    ) -> Result<(), EngineError> {
        let plan = plan_format_at_seal(&self.sequence, format, sink_tokens, tail_tokens);
        self.carry_out(compute, &plan)
    }

    /// Accepts the step's tokens, has newly sealed blocks scored and brings them to their format.
    fn commit(&mut self, compute: &Compute, tokens: usize) -> Result<(), EngineError> {
        let before = self.sequence.next_position();
        self.sequence.commit(tokens);
        if self.observation() == Observation::Keys {
            self.keys.observe(compute, &mut self.sequence, before);
        }
        let Rules { format_at_seal, sink_tokens, tail_tokens, .. } = *self.rules;
        let sealed = plan_format_at_seal(&self.sequence, format_at_seal, sink_tokens, tail_tokens);
        self.carry_out(compute, &sealed)?;
        self.step += 1;
        Ok(())
    }

    /// Keeps to the token budget and makes room for `tokens` now and the horizon after.
    fn make_room(&mut self, compute: &Compute, tokens: usize) -> Result<(), EngineError> {
        let policy = &*self.rules.policy;
        if let Some(budget) = self.rules.token_budget {
            let plan = plan_token_budget(&self.sequence, policy, budget, tokens);
            self.carry_out(compute, &plan)?;
        }
        let ahead = |horizon, stretch_tokens| Demand {
            sequence: &self.sequence,
            tokens: horizon,
            step_tokens: tokens,
            stretch_tokens,
        };
        let horizon = self.sequence.remaining(tokens.max(HORIZON_TOKENS));
        let mut plan = plan_relief(self.pool, &[ahead(horizon, STRETCH_TOKENS)], policy);
        if plan.shortage.is_some() {
            // The horizon is a wish; this step is a need.
            plan = plan_relief(self.pool, &[ahead(tokens, tokens)], policy);
        }
        if let Some(shortage) = plan.shortage {
            return Err(shortage.into());
        }
        self.carry_out(compute, &plan)
    }

    fn carry_out(&mut self, compute: &Compute, plan: &ReliefPlan) -> Result<(), EngineError> {
        if !plan.is_empty() {
            let mut encode = |jobs: &mut [EncodeJob<'_>]| encode_pages(compute, jobs);
            apply_relief(self.pool, &mut [&mut self.sequence], plan, self.step, &mut encode)?;
        }
        Ok(())
    }
}
