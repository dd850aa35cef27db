//! Who computes: a step's work goes in, completions come out.
//!
//! The engine's loop knows nothing of threads or weights. [`Executor`] is what it asks: the model on a
//! thread of its own in production, an inline model in tests, a fake that writes real pages in the
//! simulation.

pub mod calibrate;
pub mod inline;
pub mod model;

use std::sync::Arc;

use reef_kv::page::SequenceView;
use reef_kv::{EncodeJob, Sequence};

/// Called from any thread when there is something to poll.
pub type Waker = Arc<dyn Fn() + Send + Sync>;

/// Whom a piece of work is for. A slot is used again by others, a request id too; the generation never.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlotKey {
    /// Place among the running ones.
    pub slot: u32,
    /// The request, as its caller named it.
    pub request: u64,
    /// Rises each time a slot is given out, engine-wide.
    pub generation: u32,
}

/// The part of a step that one sequence takes: tokens at consecutive positions, whose pages exist.
#[derive(Clone, Debug)]
pub struct SlotWork {
    /// Whom it is for.
    pub key: SlotKey,
    /// Token ids, at least one, all in the vocabulary.
    pub tokens: Vec<u32>,
    /// Original position of the first token.
    pub first_position: u32,
    /// Pages of the sequence up to the last token's position. To be let go of before the completion is
    /// handed out: whoever changes a view that is still held copies it.
    pub view: Arc<SequenceView>,
    /// Whether [`Executor::observe_masses`] is asked for afterwards.
    pub observe: bool,
    /// Logits are wanted of `tokens[logits_from..]`; none where it equals their number.
    pub logits_from: usize,
}

/// One step.
#[derive(Clone, Debug, Default)]
pub struct StepWork {
    /// Its number; never used again.
    pub step: u64,
    /// The sequences in it, at least one; at most one piece of work each.
    pub slots: Vec<SlotWork>,
}

/// Rows of logits of one sequence in a step. Cheap to clone: all of a step share one buffer.
#[derive(Clone, Debug, Default)]
pub struct Logits {
    buffer: Arc<Vec<f32>>,
    first_row: usize,
    rows: usize,
    vocabulary: usize,
}

impl Logits {
    /// `rows` rows from `first_row` on of `buffer`, `[rows of the step][vocabulary]`.
    pub fn new(buffer: Arc<Vec<f32>>, first_row: usize, rows: usize, vocabulary: usize) -> Logits {
        debug_assert!((first_row + rows) * vocabulary <= buffer.len());
        Logits { buffer, first_row, rows, vocabulary }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Row `index`, `[vocabulary]`.
    pub fn row(&self, index: usize) -> &[f32] {
        debug_assert!(index < self.rows);
        &self.buffer[(self.first_row + index) * self.vocabulary..][..self.vocabulary]
    }

    /// The buffer, where nobody else of the step holds it any more.
    pub fn into_buffer(self) -> Option<Vec<f32>> {
        Arc::try_unwrap(self.buffer).ok()
    }
}

/// One sequence's part of a step is computed: K and V of its tokens are in their pages.
#[derive(Clone, Debug)]
pub struct Completion {
    /// The step.
    pub step: u64,
    /// Whom the work was for.
    pub key: SlotKey,
    /// Row `i` is of `tokens[logits_from + i]`.
    pub logits: Logits,
}

/// What has come in since the last look.
#[derive(Debug, Default)]
pub struct Polled {
    /// In any order; the engine checks step and key, so late and duplicate ones change nothing.
    pub completions: Vec<Completion>,
    /// Nothing that was submitted is being computed any more, nor will be. A step without a completion
    /// then is lost: the engine computes the same positions again.
    pub idle: bool,
    /// Step number and microseconds of the step that ended, for the cost model.
    pub elapsed_us: Option<(u64, u64)>,
}

/// The executor cannot work any more.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the executor has died: {reason}; restart the process")]
pub struct ExecutorDead {
    /// What it said last.
    pub reason: String,
}

/// What the engine needs to know of whoever computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExecutorFacts {
    /// Tokens of the vocabulary: length of a row of logits.
    pub vocabulary: usize,
    /// Trained context of the model in tokens.
    pub trained_context: usize,
}

/// What one step costs, as measured: `step_us = base_us + (decode rows - 1) x row_us + prefill tokens x
/// prefill_token_us + context_us x (tokens attended, summed over all rows)`. An input to the engine's
/// decisions, recorded in its log.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepCosts {
    /// Microseconds of a step of one decode row, weights read once.
    pub base_us: f64,
    /// Microseconds that each further decode row adds.
    pub row_us: f64,
    /// Microseconds that each prefill token adds, attention apart.
    pub prefill_token_us: f64,
    /// Microseconds that a row takes to attend one token.
    pub context_us: f64,
}

/// Computes steps, one at a time.
pub trait Executor: Send {
    /// What it computes with.
    fn facts(&self) -> ExecutorFacts;

    /// What steps cost, measured at start; the engine corrects it by what it sees.
    fn costs(&self) -> StepCosts;

    /// Called when there is something to poll; executors that are done within `submit` ignore it.
    fn set_waker(&mut self, _waker: Waker) {}

    /// Starts a step and returns. The engine submits the next one only when all completions of the last are
    /// in, or it was idle without them.
    ///
    /// # Errors
    /// The executor has died.
    fn submit(&mut self, work: StepWork) -> Result<(), ExecutorDead>;

    /// What has come in; does not wait.
    ///
    /// # Errors
    /// The executor has died.
    fn poll(&mut self) -> Result<Polled, ExecutorDead>;

    /// Re-encodes pages, between steps; see [`reef_kv::apply_relief`].
    fn encode(&mut self, jobs: &mut [EncodeJob<'_>]);

    /// Tells `sequence` what the last step's queries attended to: work number `place` in its
    /// [`StepWork::slots`], which had `observe` set. Before its tokens are committed.
    fn observe_masses(&mut self, _place: usize, _sequence: &mut Sequence, _decay: f32) {}

    /// Scores the blocks of `sequence` that were sealed since it had `before` tokens, between steps,
    /// for policies that observe [`Observation::Keys`](reef_kv::policy::Observation::Keys).
    fn observe_keys(&mut self, _sequence: &mut Sequence, _before: usize) {}

    /// Takes the logits of a step back, to be used again.
    fn recycle(&mut self, _logits: Logits) {}
}
