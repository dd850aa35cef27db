//! The model on the caller's thread: a step is done when `submit` returns.

use std::sync::Arc;

use reef_kernels::page::reencode;
use reef_kernels::rows::for_each_row;
use reef_kv::{BlockPool, EncodeJob, Sequence};
use reef_model::runner::{BatchSequence, Compute, ModelRunner};

use super::{
    Completion, Executor, ExecutorDead, ExecutorFacts, Logits, Polled, StepCosts, StepWork,
};
use crate::observe::{KeyObserver, observe_masses};

/// Costs where nothing was measured: those of SmolLM2 on two cores, in microseconds.
pub const ASSUMED_COSTS: StepCosts =
    StepCosts { base_us: 2100.0, row_us: 300.0, prefill_token_us: 450.0, context_us: 0.54 };

/// A model and the pool whose pages it reads and writes.
pub struct ModelWorker {
    runner: ModelRunner,
    pool: BlockPool,
    keys: KeyObserver,
    spare: Vec<f32>,
}

impl ModelWorker {
    /// `runner` is to compute on the pages of `pool`.
    pub fn new(runner: ModelRunner, pool: BlockPool) -> ModelWorker {
        ModelWorker { runner, pool, keys: KeyObserver::default(), spare: Vec::new() }
    }

    /// The model.
    pub fn runner(&self) -> &ModelRunner {
        &self.runner
    }

    /// What the model is.
    pub fn facts(&self) -> ExecutorFacts {
        let spec = self.runner.spec();
        ExecutorFacts { vocabulary: spec.vocabulary, trained_context: spec.trained_context }
    }

    /// Computes a step: pages are written, the views let go of, the logits wanted handed out.
    ///
    /// # Errors
    /// A token outside the vocabulary, which the engine checks before.
    pub fn compute(&mut self, work: StepWork) -> Result<Vec<Completion>, ExecutorDead> {
        let batch: Vec<BatchSequence<'_>> = work
            .slots
            .iter()
            .map(|slot| BatchSequence {
                tokens: &slot.tokens,
                first_position: slot.first_position,
                view: &slot.view,
                observe: slot.observe,
            })
            .collect();
        let dead =
            |error: reef_model::runner::BatchError| ExecutorDead { reason: error.to_string() };
        self.runner.forward(self.pool.arena(), &batch).map_err(dead)?;
        let mut rows = Vec::new();
        let mut first = 0;
        for slot in &work.slots {
            rows.extend(first + slot.logits_from..first + slot.tokens.len());
            first += slot.tokens.len();
        }
        let mut buffer = std::mem::take(&mut self.spare);
        if !rows.is_empty() {
            self.runner.logits(&rows);
            self.runner.swap_logits(&mut buffer);
        }
        Ok(self.completions(work, Arc::new(buffer)))
    }

    fn completions(&self, work: StepWork, buffer: Arc<Vec<f32>>) -> Vec<Completion> {
        let vocabulary = self.runner.spec().vocabulary;
        let mut first_row = 0;
        let completion = |slot: super::SlotWork| {
            let rows = slot.tokens.len() - slot.logits_from;
            let logits = Logits::new(buffer.clone(), first_row, rows, vocabulary);
            first_row += rows;
            Completion { step: work.step, key: slot.key, logits }
        };
        work.slots.into_iter().map(completion).collect()
    }

    /// See [`Executor::encode`].
    pub fn encode(&mut self, jobs: &mut [EncodeJob<'_>]) {
        encode_pages(self.runner.compute(), jobs);
    }

    /// See [`Executor::observe_masses`].
    pub fn observe_masses(&mut self, place: usize, sequence: &mut Sequence, decay: f32) {
        observe_masses(&self.runner, place, sequence, decay);
    }

    /// See [`Executor::observe_keys`].
    pub fn observe_keys(&mut self, sequence: &mut Sequence, before: usize) {
        self.keys.observe(self.runner.compute(), sequence, before);
    }

    /// See [`Executor::recycle`].
    pub fn recycle(&mut self, logits: Logits) {
        if let Some(buffer) = logits.into_buffer() {
            self.spare = buffer;
        }
    }
}

/// Re-encodes pages on the threads of `compute`.
pub(crate) fn encode_pages(compute: &Compute, jobs: &mut [EncodeJob<'_>]) {
    for_each_row(&compute.pool, jobs.len(), (jobs, 1), &|_, job| {
        for EncodeJob { shape, source_format, source, target_format, target, refused } in job {
            let done =
                reencode(compute.tier, shape, *source_format, *target_format, source, target);
            *refused = done.is_err();
        }
    });
}

/// [`ModelWorker`] on the caller's thread.
pub struct InlineExecutor {
    worker: ModelWorker,
    done: Vec<Completion>,
}

impl InlineExecutor {
    /// Nothing is in flight.
    pub fn new(worker: ModelWorker) -> InlineExecutor {
        InlineExecutor { worker, done: Vec::new() }
    }
}

impl Executor for InlineExecutor {
    fn facts(&self) -> ExecutorFacts {
        self.worker.facts()
    }

    fn costs(&self) -> StepCosts {
        ASSUMED_COSTS
    }

    fn submit(&mut self, work: StepWork) -> Result<(), ExecutorDead> {
        self.done = self.worker.compute(work)?;
        Ok(())
    }

    fn poll(&mut self) -> Result<Polled, ExecutorDead> {
        let completions = std::mem::take(&mut self.done);
        Ok(Polled { completions, idle: true, elapsed_us: None })
    }

    fn encode(&mut self, jobs: &mut [EncodeJob<'_>]) {
        self.worker.encode(jobs);
    }

    fn observe_masses(&mut self, place: usize, sequence: &mut Sequence, decay: f32) {
        self.worker.observe_masses(place, sequence, decay);
    }

    fn observe_keys(&mut self, sequence: &mut Sequence, before: usize) {
        self.worker.observe_keys(sequence, before);
    }

    fn recycle(&mut self, logits: Logits) {
        self.worker.recycle(logits);
    }
}
