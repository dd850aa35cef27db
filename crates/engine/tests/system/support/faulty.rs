//! An executor that does what executors in trouble do.

use reef_engine::executor::inline::{InlineExecutor, ModelWorker};
use reef_engine::executor::{
    Completion, Executor, ExecutorDead, ExecutorFacts, Logits, Polled, StepCosts, StepWork,
};
use reef_engine::{Engine, EngineConfig};
use reef_kv::{BlockPool, EncodeJob, PoolConfig};
use reef_model::runner::ModelRunner;

/// What becomes of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deed {
    /// Computed and told at once.
    Deliver,
    /// Computed and told only at the poll of this number: until then it is in flight.
    Delay(usize),
    /// Computed, and nobody is told.
    Lose,
    /// Computed, and told of every other sequence only.
    LoseHalf,
    /// Told last first, each twice, behind everything of the steps before.
    Repeat,
    /// The executor refuses the step and all after it.
    Die,
    /// The executor panics.
    Panic,
}

/// Says what becomes of the step of a number, from 0.
pub type Script = Box<dyn FnMut(u64) -> Deed + Send>;

/// A model whose steps go wrong by script.
pub struct FaultyExecutor {
    inner: InlineExecutor,
    script: Script,
    /// A step in flight, and the polls until it is computed.
    delayed: Option<(usize, StepWork)>,
    ready: Vec<Completion>,
    /// Everything of the step before.
    stale: Vec<Completion>,
}

impl FaultyExecutor {
    /// `runner` on the pages of `pool`.
    pub fn new(runner: ModelRunner, pool: &BlockPool, script: Script) -> FaultyExecutor {
        let inner = InlineExecutor::new(ModelWorker::new(runner, pool.clone()));
        FaultyExecutor { inner, script, delayed: None, ready: Vec::new(), stale: Vec::new() }
    }

    fn compute(&mut self, work: StepWork) -> Result<Vec<Completion>, ExecutorDead> {
        self.inner.submit(work)?;
        Ok(self.inner.poll()?.completions)
    }
}

impl Executor for FaultyExecutor {
    fn facts(&self) -> ExecutorFacts {
        self.inner.facts()
    }

    fn costs(&self) -> StepCosts {
        self.inner.costs()
    }

    fn submit(&mut self, work: StepWork) -> Result<(), ExecutorDead> {
        let deed = (self.script)(work.step);
        match deed {
            Deed::Die => return Err(ExecutorDead { reason: "it was told to".into() }),
            Deed::Panic => panic!("the executor was told to panic"),
            Deed::Delay(polls) => {
                self.delayed = Some((polls, work));
                return Ok(());
            }
            _ => {}
        }
        let done = self.compute(work)?;
        let known = std::mem::replace(&mut self.stale, done.clone());
        self.ready = match deed {
            Deed::Lose => Vec::new(),
            Deed::LoseHalf => done.into_iter().step_by(2).collect(),
            Deed::Repeat => {
                let reversed = done.iter().rev().chain(done.iter().rev());
                known.into_iter().chain(reversed.cloned()).collect()
            }
            _ => done,
        };
        Ok(())
    }

    fn poll(&mut self) -> Result<Polled, ExecutorDead> {
        match self.delayed.take() {
            Some((0, work)) => {
                self.ready = self.compute(work)?;
                self.stale.clone_from(&self.ready);
            }
            Some((polls, work)) => {
                self.delayed = Some((polls - 1, work));
                return Ok(Polled::default());
            }
            None => {}
        }
        let completions = std::mem::take(&mut self.ready);
        Ok(Polled { completions, idle: true, elapsed_us: None })
    }

    fn encode(&mut self, jobs: &mut [EncodeJob<'_>]) {
        assert!(self.delayed.is_none(), "pages are re-encoded between steps only");
        self.inner.encode(jobs);
    }

    fn recycle(&mut self, logits: Logits) {
        self.inner.recycle(logits);
    }
}

/// An engine whose executor follows `script`.
pub fn faulty_engine(runner: ModelRunner, config: EngineConfig, script: Script) -> Engine {
    let plain =
        reef_engine::config::pool_config(runner.spec(), config.block_size, config.budget_bytes);
    let pool = BlockPool::new(PoolConfig { ladder: config.ladder.clone(), ..plain }).unwrap();
    let executor = FaultyExecutor::new(runner, &pool, script);
    Engine::with_executor(Box::new(executor), pool, config).unwrap()
}
