//! What steps cost on this machine, measured before the first request.

use std::time::{Duration, Instant};

use reef_kv::{BlockPool, Fidelity, Sequence, SequenceConfig};
use reef_model::runner::{BatchSequence, ModelRunner};

use super::StepCosts;
use crate::config::roomy_pool;
use crate::session::EngineError;

/// Decode steps are measured at these numbers of sequences, as far as time allows.
const BATCHES: [usize; 4] = [1, 4, 8, 16];
/// Prompt tokens of a prefill step are measured at these, as far as time allows.
const CHUNKS: [usize; 3] = [16, 64, 256];
/// Steps measured of a kind, after one to warm up; the median counts.
const REPEATS: usize = 3;

/// Measured step times and what the engine makes of them.
#[derive(Clone, Debug, PartialEq)]
pub struct Calibration {
    /// (sequences, microseconds) of decode steps at a context of one block.
    pub decode_us: Vec<(usize, f64)>,
    /// (tokens, microseconds) of prefill steps of one sequence.
    pub prefill_us: Vec<(usize, f64)>,
    /// Microseconds that a row takes to attend one token.
    pub context_us: f64,
    /// The line through them.
    pub costs: StepCosts,
}

/// Measures decode and prefill steps of `runner` on a small pool of its own, for about `limit` (at least
/// one decode and one prefill step, however long they take). Pages are blank, and contexts a block long but
/// for the one that tells what attending costs.
///
/// # Errors
/// Memory that the system does not give.
pub fn calibrate(
    runner: &mut ModelRunner,
    block_size: usize,
    limit: Duration,
) -> Result<Calibration, EngineError> {
    let end = Instant::now() + limit;
    let largest = BATCHES[BATCHES.len() - 1];
    let pool = roomy_pool(runner.spec(), block_size, 2 * block_size * largest)?;
    let mut decode_us: Vec<(usize, f64)> = Vec::new();
    let mut prefill_us: Vec<(usize, f64)> = Vec::new();
    for batch in BATCHES {
        // A row of a larger batch takes at most what it took in the last.
        if let Some((rows, us)) = decode_us.last()
            && us / *rows as f64 * (batch * (REPEATS + 1)) as f64 > left_us(end) / 2.0
        {
            break;
        }
        decode_us.push((batch, step_us(runner, &pool, batch, (block_size, 1))?));
    }
    for chunk in CHUNKS {
        if let Some((tokens, us)) = prefill_us.last()
            && us / *tokens as f64 * (chunk * (REPEATS + 1)) as f64 > left_us(end)
        {
            break;
        }
        prefill_us.push((chunk, step_us(runner, &pool, 1, (0, chunk))?));
    }
    let near_us = decode_us.first().map_or(0.0, |(_, us)| *us);
    let far = (2 * largest - 2) * block_size;
    let far_us = step_us(runner, &pool, 1, (far, 1))?;
    let context_us = ((far_us - near_us) / (far - block_size) as f64).max(0.0);
    let costs = StepCosts { context_us, ..fit(&decode_us, &prefill_us) };
    Ok(Calibration { decode_us, prefill_us, context_us, costs })
}

fn left_us(end: Instant) -> f64 {
    end.saturating_duration_since(Instant::now()).as_micros() as f64
}

/// Median microseconds of a step of `batch` sequences that have `context` tokens and get `tokens` more;
/// the logits of each one's last token included.
fn step_us(
    runner: &mut ModelRunner,
    pool: &BlockPool,
    batch: usize,
    (context, tokens): (usize, usize),
) -> Result<f64, EngineError> {
    let ids: Vec<u32> = (0..tokens).map(|i| (i % runner.spec().vocabulary) as u32).collect();
    let sequences: Vec<Sequence> = (0..batch)
        .map(|request| {
            let config = SequenceConfig {
                request: request as u64,
                contract: Fidelity::Exact,
                priority: 0,
                trained_context: usize::MAX,
                max_tokens: Some(context + tokens),
            };
            let mut sequence = Sequence::new(pool, config);
            sequence.grow(context + tokens)?;
            Ok(sequence)
        })
        .collect::<Result<_, EngineError>>()?;
    let rows: Vec<usize> = (0..batch).map(|place| (place + 1) * tokens - 1).collect();
    let mut times = Vec::with_capacity(REPEATS);
    for _ in 0..=REPEATS {
        let start = Instant::now();
        let of_batch: Vec<BatchSequence<'_>> = sequences
            .iter()
            .map(|sequence| BatchSequence {
                tokens: &ids,
                first_position: context as u32,
                view: sequence.view(),
                observe: false,
            })
            .collect();
        let fence = pool.begin_step();
        runner.forward(pool.arena(), &of_batch)?;
        fence.pass();
        std::hint::black_box(runner.logits(&rows));
        times.push(start.elapsed().as_secs_f64() * 1e6);
    }
    // The first warmed up.
    times.remove(0);
    times.sort_by(f64::total_cmp);
    Ok(times[REPEATS / 2])
}

/// Base: a step of one row. What a row and a prompt token add: least squares through that point, never
/// negative.
fn fit(decode_us: &[(usize, f64)], prefill_us: &[(usize, f64)]) -> StepCosts {
    let base_us = decode_us.first().map_or(0.0, |(_, us)| *us);
    let slope = |points: &[(usize, f64)], first: usize| {
        let (mut products, mut squares) = (0.0, 0.0);
        for (count, us) in points.iter().filter(|(count, _)| *count > first) {
            let more = (count - first) as f64;
            products += more * (us - base_us);
            squares += more * more;
        }
        if squares > 0.0 { (products / squares).max(0.0) } else { 0.0 }
    };
    // A prompt's tokens come on top of a step that reads the weights anyway.
    let prefill_token_us = slope(prefill_us, 0);
    let row_us = if decode_us.len() > 1 { slope(decode_us, 1) } else { prefill_token_us };
    StepCosts { base_us, row_us, prefill_token_us, context_us: 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_found_again() {
        let decode: Vec<_> =
            BATCHES.iter().map(|b| (*b, 2000.0 + 250.0 * (b - 1) as f64)).collect();
        let prefill: Vec<_> = CHUNKS.iter().map(|c| (*c, 2000.0 + 400.0 * *c as f64)).collect();
        let costs = fit(&decode, &prefill);
        assert!(
            (costs.row_us - 250.0).abs() < 1e-9 && (costs.prefill_token_us - 400.0).abs() < 1e-9
        );
        assert_eq!(costs.base_us, 2000.0);
    }

    #[test]
    fn little_is_enough() {
        let costs = fit(&[(1, 300_000.0)], &[(16, 2_000_000.0)]);
        assert_eq!((costs.base_us, costs.row_us), (300_000.0, costs.prefill_token_us));
        assert_eq!(fit(&[(1, 50.0), (4, 40.0)], &[(16, 40.0)]).row_us, 0.0, "never negative");
    }
}
