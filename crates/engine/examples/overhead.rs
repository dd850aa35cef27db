//! What the engine costs outside the model: `overhead RUNNING WAITING STEPS`. A stand-in answers every step
//! at once with the same logits (49,152 a row, as SmolLM2's); what remains is scheduling, memory, sampling
//! and events.

use std::sync::Arc;
use std::time::Instant;

use reef_engine::executor::{
    Completion, Executor, ExecutorDead, ExecutorFacts, Logits, Polled, StepCosts, StepWork,
};
use reef_engine::{Engine, EngineConfig, Request, Sampling};
use reef_kv::page::PageShape;
use reef_kv::{BlockPool, EncodeJob, Fidelity, GroupConfig, Ladder, PoolConfig};

const VOCABULARY: usize = 49_152;

struct Instantly {
    logits: Arc<Vec<f32>>,
    done: Vec<Completion>,
}

impl Executor for Instantly {
    fn facts(&self) -> ExecutorFacts {
        ExecutorFacts { vocabulary: VOCABULARY, trained_context: 8192 }
    }

    fn costs(&self) -> StepCosts {
        reef_engine::executor::inline::ASSUMED_COSTS
    }

    fn submit(&mut self, work: StepWork) -> Result<(), ExecutorDead> {
        let rows = self.logits.len() / VOCABULARY;
        let completion = |(index, slot): (usize, reef_engine::executor::SlotWork)| {
            let wanted = slot.tokens.len() - slot.logits_from;
            let logits = Logits::new(self.logits.clone(), index % rows, wanted, VOCABULARY);
            Completion { step: work.step, key: slot.key, logits }
        };
        self.done = work.slots.into_iter().enumerate().map(completion).collect();
        Ok(())
    }

    fn poll(&mut self) -> Result<Polled, ExecutorDead> {
        let completions = std::mem::take(&mut self.done);
        Ok(Polled { completions, idle: true, elapsed_us: None })
    }

    fn encode(&mut self, _jobs: &mut [EncodeJob<'_>]) {}
}

fn main() {
    let numbers: Vec<usize> =
        std::env::args().skip(1).map(|n| n.parse().expect("a number")).collect();
    let [running, waiting, steps] = numbers[..] else { panic!("give RUNNING WAITING STEPS") };
    for temperature in [0.0, 0.8] {
        let times = measure(running, waiting, steps, temperature);
        let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
        println!(
            "temperature {temperature}: {running} running, {waiting} waiting: median {:.1} us a step, \
             p90 {:.1}",
            at(0.5),
            at(0.9)
        );
    }
}

/// Microseconds of each step, ascending.
fn measure(running: usize, waiting: usize, steps: usize, temperature: f32) -> Vec<f64> {
    let shape = PageShape { kv_heads: 3, head_dim: 64, block_size: 32 };
    let groups = vec![GroupConfig { layers: 30, shape, window: None, pinned: vec![] }];
    let tokens = running * (512 + steps + 64);
    let budget_bytes = tokens * 23_040 + (64 << 20);
    let config = PoolConfig { groups, budget_bytes, prefault: false, ladder: Ladder::default() };
    let pool = BlockPool::new(config).expect("a pool");
    let logits = (0..running * VOCABULARY).map(|i| (i as u32).wrapping_mul(2_654_435_761) as f32);
    let logits: Arc<Vec<f32>> = Arc::new(logits.map(|x| x / 4e8).collect());
    let mut config = EngineConfig::new(budget_bytes);
    config.scheduling.max_running = running;
    config.scheduling.gap_factor = 1e3;
    let executor = Box::new(Instantly { logits, done: Vec::new() });
    let mut engine = Engine::with_executor(executor, pool, config).expect("an engine");
    for key in 0..(running + waiting) as u64 {
        let prompt = (0..512).map(|i| (i * 7 + key as u32) % VOCABULARY as u32).collect();
        let sampling = Sampling { temperature, top_p: 0.95, seed: key, ..Sampling::default() };
        let max_tokens = Some(steps + 64);
        let request = Request { max_tokens, sampling, ..Request::new(prompt, Fidelity::Int4) };
        engine.submit(key, request).expect("it fits");
    }
    let mut times = Vec::new();
    while engine.stats().counters.decode_rows < (running * (steps + 32)) as u64 {
        let before = engine.stats().counters;
        let start = Instant::now();
        engine.turn(0).expect("a step");
        engine.turn(0).expect("a step");
        drop(engine.take_events());
        let elapsed = start.elapsed().as_secs_f64() * 1e6;
        let after = engine.stats().counters;
        if after.decode_rows - before.decode_rows == running as u64 {
            times.push(elapsed);
        }
    }
    times.sort_by(f64::total_cmp);
    times
}
