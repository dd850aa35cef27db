//! What planning and carrying out relief costs: 64 sequences of 1,000 tokens.
//!
//! `cargo run --release -p reef-kv --example relief_bench`: medians of repeats on one core. The kernel writes
//! nothing: what is timed is bookkeeping, and the copies of pages that are moved.

use std::time::Instant;

use reef_kv::page::{PageFormat, PageShape};
use reef_kv::policy::Sinks;
use reef_kv::*;

const SEQUENCES: u64 = 64;
const TOKENS: usize = 1000;
const SHARED_TOKENS: usize = 512;
/// Blocks of 32 tokens of all sequences.
const BLOCKS: usize = 2048;
const REPEATS: usize = 51;
const POLICY: Sinks = Sinks { tail_tokens: TAIL_TOKENS };

/// SmolLM2-135M's pages.
fn dense() -> Vec<GroupConfig> {
    let shape = PageShape { kv_heads: 3, head_dim: 64, block_size: 32 };
    vec![GroupConfig { layers: 30, shape, window: None, pinned: vec![] }]
}

/// Gemma 3 1B's pages.
fn hybrid() -> Vec<GroupConfig> {
    let shape = PageShape { kv_heads: 1, head_dim: 256, block_size: 32 };
    let group = |layers, window| GroupConfig { layers, shape, window, pinned: vec![] };
    vec![group(22, Some(512)), group(4, None)]
}

/// A pool in which `blocks` blocks of 32 tokens fit at f16.
fn pool_of(groups: Vec<GroupConfig>, blocks: usize) -> Result<BlockPool, ConfigError> {
    let bytes = |group: &GroupConfig| group.layers * group.shape.page_bytes(PageFormat::F16);
    let budget_bytes = blocks * groups.iter().map(bytes).sum::<usize>() * 101 / 100;
    BlockPool::new(PoolConfig { groups, budget_bytes, prefault: true, ladder: Ladder::default() })
}

fn config(request: u64) -> SequenceConfig {
    let (trained_context, max_tokens) = (8192, Some(4000));
    SequenceConfig { request, contract: Fidelity::Evict, priority: 0, trained_context, max_tokens }
}

fn extend(sequence: &mut Sequence, tokens: usize) -> Result<(), Shortage> {
    sequence.grow(tokens)?;
    sequence.commit(tokens);
    Ok(())
}

fn separate(pool: &BlockPool) -> Result<Vec<Sequence>, Shortage> {
    let mut sequences: Vec<Sequence> =
        (0..SEQUENCES).map(|request| Sequence::new(pool, config(request))).collect();
    for sequence in &mut sequences {
        extend(sequence, TOKENS)?;
    }
    Ok(sequences)
}

/// All share the first [`SHARED_TOKENS`].
fn sharing(pool: &BlockPool) -> Result<Vec<Sequence>, Shortage> {
    let mut parent = Sequence::new(pool, config(0));
    extend(&mut parent, SHARED_TOKENS)?;
    let mut sequences: Vec<Sequence> = (1..SEQUENCES).map(|request| parent.fork(request)).collect();
    sequences.push(parent);
    for sequence in &mut sequences {
        extend(sequence, TOKENS - SHARED_TOKENS)?;
    }
    Ok(sequences)
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

/// Plans for `tokens` more tokens of each sequence, carries it out, and prints what each took.
fn measure(name: &str, mut sequences: Vec<Sequence>, tokens: usize) {
    let pool = sequences[0].pool().clone();
    let plan = |sequences: &[Sequence]| {
        let demand = |sequence| Demand { sequence, tokens, step_tokens: 1, stretch_tokens: tokens };
        let demands: Vec<Demand<'_>> = sequences.iter().map(demand).collect();
        plan_relief(&pool, &demands, &POLICY)
    };
    let planned_us = median_us(|| drop(std::hint::black_box(plan(&sequences))));
    let made = plan(&sequences);
    let moves = made.moves.len();
    let short = if made.shortage.is_some() { " (short)" } else { "" };
    let mut all: Vec<&mut Sequence> = sequences.iter_mut().collect();
    let begun = Instant::now();
    let outcome = apply_relief(&pool, &mut all, &made, 0, &mut |_| {});
    let applied_us = begun.elapsed().as_secs_f64() * 1e6;
    let moved = outcome.map_or(0, |outcome| outcome.moved_pages);
    println!(
        "{name}: planned in {planned_us:.1} us, {moves} moves{short}; carried out in \
         {applied_us:.0} us, {moved} pages moved"
    );
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    measure("dense, nothing needed", separate(&pool_of(dense(), 4 * BLOCKS)?)?, 1);
    measure("hybrid, nothing needed", separate(&pool_of(hybrid(), 4 * BLOCKS)?)?, 64);
    for (name, tokens) in [
        ("64 blocks missing", 32),
        ("the middle to int8", 450),
        ("the middle to int4", 620),
        ("drops", 850),
        ("more than there is", 2400),
    ] {
        measure(name, separate(&pool_of(dense(), BLOCKS)?)?, tokens);
    }
    for (name, tokens) in [("sharing, 64 blocks missing", 32), ("sharing, to int4", 300)] {
        measure(name, sharing(&pool_of(dense(), BLOCKS / 2 + 18)?)?, tokens);
    }
    Ok(())
}
