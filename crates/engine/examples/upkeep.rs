//! What observing for each eviction policy adds to a decode step. Sequences of all policies take turns,
//! step by step, so that whatever else the machine does hits all alike. Medians are compared, and the
//! fastest tenth: on a machine with other work that is what an undisturbed step takes.
//!
//! `cargo run --release -p reef-engine --example upkeep -- MODEL.gguf [DEPTH [STEPS]]`

use std::error::Error;
use std::time::Instant;

use reef_engine::config::roomy_pool;
use reef_engine::session::{Rules, Session};
use reef_kernels::dispatch::Tier;
use reef_kv::policy::{NAMES, PolicyOptions, by_name};
use reef_kv::{Fidelity, SequenceConfig};
use reef_model::gguf::Gguf;
use reef_model::runner::{Activations, KeyRotation, ModelRunner, RunnerOptions};

const BLOCK_SIZE: usize = 32;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().ok_or("usage: upkeep MODEL.gguf [DEPTH [STEPS]]")?;
    let mut number = |default| arguments.next().map_or(Ok(default), |text| text.parse::<usize>());
    let (depth, steps) = (number(2048)?, number(96)?);
    let options = RunnerOptions {
        threads: std::thread::available_parallelism()?.get(),
        tier: Tier::detect(),
        activations: Activations::Int8,
        block_size: BLOCK_SIZE,
        key_rotation: KeyRotation::None,
    };
    let mut runner = ModelRunner::load(&Gguf::open(std::path::Path::new(&path))?, options)?;
    let pool = roomy_pool(runner.spec(), BLOCK_SIZE, (depth + steps) * NAMES.len())?;
    let mut rules = Vec::new();
    for name in NAMES {
        let policy = by_name(name, &PolicyOptions::default())?;
        rules.push(Rules { policy, ..Rules::default() });
    }
    let config = |request: usize| SequenceConfig {
        request: request as u64,
        contract: Fidelity::Evict,
        priority: 0,
        trained_context: runner.spec().trained_context,
        max_tokens: Some(depth + steps),
    };
    let of_rules = |(request, rules)| Session::new(&pool, rules, config(request));
    let mut sessions: Vec<Session<'_>> = rules.iter().enumerate().map(of_rules).collect();
    let token = |position: usize| (position * 7919 % 997) as u32;
    for session in &mut sessions {
        for start in (0..depth).step_by(256) {
            let tokens: Vec<u32> = (start..depth.min(start + 256)).map(token).collect();
            session.advance(&mut runner, &tokens)?;
        }
    }
    let mut times_us = vec![Vec::new(); NAMES.len()];
    for step in 0..steps {
        for turn in 0..NAMES.len() {
            // Each begins a round as often as any other.
            let which = (step + turn) % NAMES.len();
            let started = Instant::now();
            sessions[which].advance(&mut runner, &[token(depth + step)])?;
            std::hint::black_box(runner.logits(&[0]));
            times_us[which].push(started.elapsed().as_secs_f64() * 1e6);
        }
    }
    println!("decode at depth {depth}, {steps} steps each");
    for which in 0..NAMES.len() {
        let [tenth, half] = [10, 2].map(|part| {
            let time_us = quantile(&mut times_us[which], part);
            let share = 100.0 * (time_us / quantile(&mut times_us[0], part) - 1.0);
            format!("{time_us:8.0} us ({share:+5.1} %)")
        });
        println!("{:8} fastest tenth {tenth}, median {half}", NAMES[which]);
    }
    Ok(())
}

/// The value that one in `part` of `values` lies below.
fn quantile(values: &mut [f64], part: usize) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / part]
}
