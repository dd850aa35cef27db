//! An engine without weights that recites a text: real scheduling, real memory, real relief.

use std::sync::Arc;
use std::time::Duration;

use reef_engine::executor::{
    Completion, Executor, ExecutorDead, ExecutorFacts, Logits, Polled, StepCosts, StepWork,
};
use reef_engine::{Engine, EngineConfig, Tenant};
use reef_kv::page::PageShape;
use reef_kv::{BlockPool, EncodeJob, GroupConfig, Ladder, PoolConfig};

/// What it says over and over: markup that would do something, were it ever taken for markup.
pub const TEXT: &str =
    "<img src=x onerror=\"document.title='taken'\"><script>alert(1)</script> & so on. ";
/// A tenant whose name is markup too.
pub const TENANT: &str = "<img src=y onerror=alert(2)>";

const VOCABULARY: usize = 257;
const STEP: Duration = Duration::from_millis(4);

/// Says the next byte of [`TEXT`] at every position.
struct Reciter {
    done: Vec<Completion>,
}

impl Executor for Reciter {
    fn facts(&self) -> ExecutorFacts {
        ExecutorFacts { vocabulary: VOCABULARY, trained_context: 8192 }
    }

    fn costs(&self) -> StepCosts {
        StepCosts { base_us: 4000.0, row_us: 10.0, prefill_token_us: 10.0, context_us: 0.01 }
    }

    fn submit(&mut self, work: StepWork) -> Result<(), ExecutorDead> {
        std::thread::sleep(STEP);
        for slot in work.slots {
            let rows = slot.tokens.len() - slot.logits_from;
            let mut logits = vec![0.0; rows * VOCABULARY];
            for row in 0..rows {
                let position = slot.first_position as usize + slot.logits_from + row;
                let byte = TEXT.as_bytes()[position % TEXT.len()];
                logits[row * VOCABULARY + byte as usize] = 40.0;
            }
            let logits = Logits::new(Arc::new(logits), 0, rows, VOCABULARY);
            self.done.push(Completion { step: work.step, key: slot.key, logits });
        }
        Ok(())
    }

    fn poll(&mut self) -> Result<Polled, ExecutorDead> {
        let completions = std::mem::take(&mut self.done);
        Ok(Polled { completions, idle: true, elapsed_us: None })
    }

    fn encode(&mut self, jobs: &mut [EncodeJob<'_>]) {
        jobs.iter_mut().for_each(|job| job.target.fill(0));
    }
}

/// Two groups of layers, a pool of `budget_bytes`.
pub fn engine(budget_bytes: usize) -> Engine {
    let shape = PageShape { kv_heads: 2, head_dim: 64, block_size: 32 };
    let group = |layers, window| GroupConfig { layers, shape, window, pinned: vec![] };
    let groups = vec![group(4, None), group(2, Some(128))];
    let ladder = Ladder::default();
    let pool = PoolConfig { groups, budget_bytes, prefault: false, ladder };
    let pool = BlockPool::new(pool).unwrap();
    let mut config = EngineConfig::new(budget_bytes);
    config.tenants = vec![Tenant::default(), Tenant { name: TENANT.into(), ..Tenant::default() }];
    let executor = Box::new(Reciter { done: Vec::new() });
    Engine::with_executor(executor, pool, config).unwrap()
}
