//! What planning and carrying out relief costs: 64 sequences of 1,000 tokens in SmolLM2's pages.
//!
//! `cargo run --release -p reef-kv --example relief_bench`: medians of repeats, on one core. The kernel
//! writes nothing: what is timed is bookkeeping.

use std::time::Instant;

use reef_kv::page::PageShape;
use reef_kv::policy::Sinks;
use reef_kv::*;

const SEQUENCES: usize = 64;
const TOKENS: usize = 1000;
const REPEATS: usize = 21;

/// A pool in which `blocks` blocks of 32 tokens fit at f16, beside the reserve.
fn pool_of(blocks: usize) -> Result<BlockPool, ConfigError> {
    let shape = PageShape { kv_heads: 3, head_dim: 64, block_size: 32 };
    let groups = vec![GroupConfig { layers: 30, shape, window: None, pinned: vec![] }];
    let budget_bytes = blocks * 30 * shape.page_bytes(page::PageFormat::F16) * 101 / 100;
    BlockPool::new(PoolConfig { groups, budget_bytes, prefault: false, ladder: Ladder::default() })
}

fn sequences(pool: &BlockPool, count: u64, tokens: usize) -> Result<Vec<Sequence>, Shortage> {
    let make = |request| {
        let config = SequenceConfig {
            request,
            contract: Fidelity::Evict,
            priority: 0,
            trained_context: 8192,
            max_tokens: Some(4000),
        };
        let mut sequence = Sequence::new(pool, config);
        sequence.grow(tokens)?;
        sequence.commit(tokens);
        Ok(sequence)
    };
    (0..count).map(make).collect()
}

/// Median in microseconds.
fn median_us(mut timed: impl FnMut()) -> f64 {
    let mut times: Vec<f64> = Vec::new();
    for _ in 0..REPEATS {
        let begun = Instant::now();
        timed();
        times.push(begun.elapsed().as_secs_f64() * 1e6);
    }
    times.sort_by(f64::total_cmp);
    times[REPEATS / 2]
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let policy = Sinks { tail_tokens: TAIL_TOKENS };
    // Blocks of the pool; tokens of the demand of each sequence.
    let cases = [
        ("nothing is needed", 4 * 2048, 1),
        ("64 blocks are missing", 2048, 32),
        ("all of the middle to int8", 2048, 450),
        ("the middle to int4", 2048, 620),
        ("drops", 2048, 850),
        ("more than there is", 2048, 2400),
    ];
    for (name, blocks, tokens) in cases {
        let pool = pool_of(blocks)?;
        let mut running = sequences(&pool, SEQUENCES as u64, TOKENS)?;
        let plan = |running: &[Sequence]| {
            let demand =
                |sequence| Demand { sequence, tokens, step_tokens: 1, stretch_tokens: tokens };
            let demands: Vec<Demand<'_>> = running.iter().map(demand).collect();
            plan_relief(&pool, &demands, &policy)
        };
        let planned_us = median_us(|| drop(std::hint::black_box(plan(&running))));
        let made = plan(&running);
        let mut list: Vec<&mut Sequence> = running.iter_mut().collect();
        let begun = Instant::now();
        let outcome = apply_relief(&pool, &mut list, &made, 0, &mut |_| {})?;
        let applied_us = begun.elapsed().as_secs_f64() * 1e6;
        println!(
            "{name}: planned in {planned_us:.1} us, {} moves, short {}; applied in {applied_us:.0} us: {outcome:?}",
            made.moves.len(),
            made.shortage.is_some(),
        );
    }
    Ok(())
}
