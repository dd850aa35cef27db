//! Many worlds on several threads.

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::coverage::Coverage;
use crate::random::mix;
use crate::run::{Failure, run};
use crate::world::{Recipe, World};

/// What came of many worlds.
#[derive(Clone, Debug, Default)]
pub struct Campaign {
    /// Worlds run.
    pub worlds: u64,
    /// Engine steps.
    pub steps: u64,
    /// Turns of the engine's loop.
    pub turns: u64,
    /// Of all logs, in order of seeds.
    pub hash: u64,
    /// What was covered.
    pub coverage: Coverage,
    /// The first failure of each world that failed, in order of seeds.
    pub failures: Vec<(Recipe, Failure)>,
}

/// Runs the worlds of `seeds` on `threads` threads (at least one).
pub fn campaign(seeds: Range<u64>, threads: usize) -> Campaign {
    let next = AtomicU64::new(seeds.start);
    let sum = Mutex::new(Campaign::default());
    std::thread::scope(|scope| {
        for _ in 0..threads.max(1) {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds.end {
                        return;
                    }
                    let recipe = Recipe::of_seed(seed);
                    let report = run(&World::new(&recipe), false);
                    let mut sum = sum.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                    sum.worlds += 1;
                    sum.steps += report.steps;
                    sum.turns += report.turns;
                    // Whatever the order in which threads end.
                    sum.hash = sum.hash.wrapping_add(mix(mix(seed) ^ report.hash));
                    sum.coverage.merge(&report.coverage);
                    sum.failures.extend(report.failures.into_iter().next().map(|f| (recipe, f)));
                }
            });
        }
    });
    let mut sum = sum.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    sum.failures.sort_by_key(|(recipe, _)| recipe.seed);
    sum
}
