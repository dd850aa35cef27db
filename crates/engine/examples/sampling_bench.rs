//! What choosing a token costs, and what an n-gram draft does, beside a decode step of milliseconds.
//!
//! `cargo run --release -p reef-engine --example sampling_bench -- [VOCABULARY [REPEATS]]`

use std::error::Error;
use std::hint::black_box;
use std::time::Instant;

use reef_engine::Sampling;
use reef_engine::sampler::Sampler;
use reef_engine::speculate::{Drafter, Ngram, RunKey};
use reef_kernels::dispatch::Tier;
use reef_kernels::logits::argmax;

/// SplitMix64, as [0, 1).
fn unit(state: &mut u64) -> f64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
}

/// Normally distributed logits with deviation `spread`: 3 is about what small language models give, 0.1
/// nearly flat.
fn row(state: &mut u64, vocabulary: usize, spread: f64) -> Vec<f32> {
    let normal = |state: &mut u64| {
        let radius = (-2.0 * unit(state).max(1e-300).ln()).sqrt();
        (spread * radius * (std::f64::consts::TAU * unit(state)).cos()) as f32
    };
    (0..vocabulary).map(|_| normal(state)).collect()
}

/// Median microseconds of `work`, which is given the number of the repeat.
fn median_us(repeats: usize, mut work: impl FnMut(usize)) -> f64 {
    let mut times_us: Vec<f64> = (0..repeats)
        .map(|repeat| {
            let started = Instant::now();
            work(repeat);
            started.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    times_us.sort_by(f64::total_cmp);
    times_us[repeats / 2]
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let mut number = |default| arguments.next().map_or(Ok(default), |text| text.parse::<usize>());
    let (vocabulary, repeats) = (number(49_152)?.max(100), number(400)?.max(1));
    let mut state = 1;
    println!("median microseconds of {repeats}, {vocabulary} logits");
    // Rows take turns, so that none stays in the nearest cache.
    let rows: Vec<Vec<f32>> = (0..8).map(|_| row(&mut state, vocabulary, 3.0)).collect();
    for tier in Tier::available() {
        let us = median_us(repeats, |repeat| {
            black_box(argmax(tier, &rows[repeat % rows.len()]));
        });
        println!("{us:8.1}  argmax on {}", tier.name());
    }
    for spread in [3.0, 0.1] {
        let rows: Vec<Vec<f32>> = (0..8).map(|_| row(&mut state, vocabulary, spread)).collect();
        println!("logits with deviation {spread}");
        sampling_costs(&rows, repeats)?;
    }
    drafting_costs(repeats);
    Ok(())
}

fn sampling_costs(rows: &[Vec<f32>], repeats: usize) -> Result<(), Box<dyn Error>> {
    let drawn = Sampling { temperature: 0.8, ..Sampling::default() };
    let penalized = Sampling { repetition_penalty: 1.1, presence_penalty: 0.5, ..drawn.clone() };
    let kinds = [
        ("greedy", Sampling::default(), None),
        ("greedy, 5 log-probabilities", Sampling::default(), Some(5)),
        ("temperature", drawn.clone(), None),
        ("top_k 40", Sampling { top_k: 40, ..drawn.clone() }, None),
        ("top_p 0.9", Sampling { top_p: 0.9, ..drawn.clone() }, None),
        ("top_k 40, top_p 0.95", Sampling { top_k: 40, top_p: 0.95, ..drawn.clone() }, None),
        ("top_k 1000, top_p 0.95", Sampling { top_k: 1000, top_p: 0.95, ..drawn.clone() }, None),
        ("min_p 0.05", Sampling { min_p: 0.05, ..drawn }, None),
        ("penalties over 1,000 tokens", penalized, None),
    ];
    let prompt: Vec<u32> = (0..1000).map(|i| i * 37 % rows[0].len() as u32).collect();
    for (name, sampling, logprobs) in kinds {
        let mut sampler = Sampler::begin(sampling, &prompt, &[], None);
        let mut failure = None;
        let us = median_us(repeats, |repeat| {
            match black_box(sampler.next(&rows[repeat % rows.len()], logprobs)) {
                Ok(_) => {}
                Err(error) => failure = Some(error),
            }
        });
        if let Some(error) = failure {
            return Err(error.into());
        }
        println!("{us:8.1}  {name}");
    }
    Ok(())
}

/// Drafts of 5 for a text of 8,192 tokens that grows by one a step: text of Zipf's law, so that short
/// suffixes are found often and long ones seldom.
fn drafting_costs(repeats: usize) {
    const CONTEXT: usize = 8192;
    let mut state = 7;
    let mut token = || (20_000_f64.powf(unit(&mut state)) - 1.0) as u32;
    let tokens: Vec<u32> = (0..CONTEXT + repeats).map(|_| token()).collect();
    let mut ngram = Ngram::default();
    let mut out = Vec::new();
    let first_us = median_us(1, |_| ngram.draft(RunKey(0), &tokens[..CONTEXT], 5, &mut out));
    let mut found = 0;
    let us = median_us(repeats, |step| {
        ngram.draft(RunKey(0), &tokens[..CONTEXT + step], 5, &mut out);
        found += usize::from(!out.is_empty());
    });
    println!("n-gram drafts at {CONTEXT} tokens, found in {found} of {repeats} steps");
    println!("{us:8.2}  a step");
    println!("{first_us:8.1}  once, when the prompt is first seen");
}
