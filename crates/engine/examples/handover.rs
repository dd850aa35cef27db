//! What the engine and its threads add to a decode step of one stream: a plain loop over the model, the
//! engine on the same thread, and the engine with the model on a thread of its own, in turns, so that
//! whatever else the machine does hits all alike.
//!
//! `cargo run --release -p reef-engine --example handover -- MODEL.gguf [ROUNDS [DEPTH]]`

use std::error::Error;
use std::path::Path;
use std::time::{Duration, Instant};

use reef_engine::config::{PREFILL_CHUNK_TOKENS, roomy_pool};
use reef_engine::sampler::Sampler;
use reef_engine::session::{Rules, Session};
use reef_engine::wakeup::Wakeup;
use reef_engine::{Engine, EngineConfig, Event, Progress, Request, Sampling};
use reef_kernels::dispatch::Tier;
use reef_kv::{BlockPool, Fidelity, SequenceConfig};
use reef_model::gguf::Gguf;
use reef_model::runner::{Activations, KeyRotation, ModelRunner, RunnerOptions};

const BLOCK_SIZE: usize = 32;
/// Tokens of each loop in a round.
const TOKENS: usize = 64;
/// Tokens left out at a round's start: caches and frequencies settle.
const SETTLE: usize = 8;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().ok_or("usage: handover MODEL.gguf [ROUNDS [DEPTH]]")?;
    let mut number = |default| arguments.next().map_or(Ok(default), |text| text.parse::<usize>());
    let (rounds, depth) = (number(20)?, number(128)?);
    let gguf = Gguf::open(Path::new(&path))?;
    let mut plain = runner(&gguf)?;
    let pool = roomy_pool(plain.spec(), BLOCK_SIZE, depth + TOKENS)?;
    let budget_bytes = pool.config().budget_bytes;
    let mut inline = Engine::inline(runner(&gguf)?, EngineConfig::new(budget_bytes))?;
    let mut threaded = Engine::new(runner(&gguf)?, EngineConfig::new(budget_bytes))?;
    let mut times: [Vec<f64>; 3] = Default::default();
    let mut outside = Vec::new();
    for _ in 0..rounds {
        times[0].extend(loop_over(&mut plain, &pool, depth)?);
        times[1].extend(through(&mut inline, depth, &mut Vec::new())?);
        times[2].extend(through(&mut threaded, depth, &mut outside)?);
    }
    let names = ["plain loop", "engine, same thread", "engine, model on its own thread"];
    let shares = [0.02, 0.1, 0.5];
    let base = shares.map(|share| percentile(&mut times[0], share));
    println!("microseconds a token: fastest fiftieth, fastest tenth, median");
    for (name, times) in names.iter().zip(&mut times) {
        print!("{name:<32}");
        for (share, base) in shares.iter().zip(base) {
            let time = percentile(times, *share);
            print!(" {time:>9.1} ({:+.2} %)", 100.0 * (time / base - 1.0));
        }
        println!();
    }
    print!("{:<32}", "of that outside the model's step");
    shares.iter().for_each(|share| print!(" {:>9.1}         ", percentile(&mut outside, *share)));
    println!();
    Ok(())
}

fn runner(gguf: &Gguf) -> Result<ModelRunner, Box<dyn Error>> {
    let options = RunnerOptions {
        threads: std::thread::available_parallelism()?.get(),
        tier: Tier::detect(),
        activations: Activations::Int8,
        block_size: BLOCK_SIZE,
        key_rotation: KeyRotation::None,
    };
    Ok(ModelRunner::load(gguf, options)?)
}

fn prompt(depth: usize) -> Vec<u32> {
    (0..depth).map(|i| (i * 7919 % 997) as u32).collect()
}

/// Microseconds between tokens.
fn loop_over(
    runner: &mut ModelRunner,
    pool: &BlockPool,
    depth: usize,
) -> Result<Vec<f64>, Box<dyn Error>> {
    let rules = Rules::default();
    let config = SequenceConfig {
        request: 0,
        contract: Fidelity::Exact,
        priority: 0,
        trained_context: runner.spec().trained_context,
        max_tokens: Some(depth + TOKENS),
    };
    let mut session = Session::new(pool, &rules, config);
    let mut last = 0;
    for chunk in prompt(depth).chunks(PREFILL_CHUNK_TOKENS) {
        session.advance(runner, chunk)?;
        last = chunk.len() - 1;
    }
    let mut sampler = Sampler::new(Sampling::default());
    let mut moments = Vec::with_capacity(TOKENS);
    for _ in 0..TOKENS {
        let token = sampler.sample(runner.logits(&[last]));
        moments.push(Instant::now());
        session.advance(runner, &[token])?;
        last = 0;
    }
    Ok(gaps(&moments))
}

/// The same of a request in an engine; where the executor tells how long it computed, the rest of each gap
/// goes to `outside`.
fn through(
    engine: &mut Engine,
    depth: usize,
    outside: &mut Vec<f64>,
) -> Result<Vec<f64>, Box<dyn Error>> {
    let wakeup = Wakeup::of_this_thread();
    engine.set_waker(wakeup.waker());
    let plain = Request::new(prompt(depth), Fidelity::Exact);
    let request = Request { max_tokens: Some(TOKENS), use_prefix_cache: false, ..plain };
    engine.submit(0, request)?;
    let start = Instant::now();
    let (mut moments, mut computed) = (Vec::with_capacity(TOKENS), Vec::with_capacity(TOKENS));
    loop {
        let progress = engine.turn(start.elapsed().as_micros() as u64)?;
        for told in engine.take_events() {
            match told.event {
                Event::Token(_) => moments.push(Instant::now()),
                Event::Step { elapsed_us: Some(us), .. } => computed.push(us as f64),
                Event::Finished(_) => {
                    let gaps = gaps(&moments);
                    // The last steps belong to the last gaps.
                    let pairs = gaps.iter().rev().zip(computed.iter().rev());
                    outside.extend(pairs.map(|(gap, us)| gap - us));
                    return Ok(gaps);
                }
                Event::Failed(error) => return Err(error.to_string().into()),
                _ => {}
            }
        }
        if progress != Progress::Worked {
            wakeup.wait(Duration::from_millis(20));
        }
    }
}

fn gaps(moments: &[Instant]) -> Vec<f64> {
    let gap = |pair: &[Instant]| (pair[1] - pair[0]).as_secs_f64() * 1e6;
    moments[SETTLE..].windows(2).map(gap).collect()
}

fn percentile(values: &mut [f64], share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    values[((values.len() - 1) as f64 * share) as usize]
}
