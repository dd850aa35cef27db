//! What drafts bring at batch 1: the same requests with and without, taking turns, on a text that copies
//! itself and on one that does not. The output must be the same.
//!
//! `cargo run --release -p reef-engine --example speculation_bench -- MODEL.gguf [TURNS [THREADS [DRAFT.gguf]]]`

use std::error::Error;
use std::ops::ControlFlow;
use std::path::Path;
use std::time::Instant;

use reef_engine::speculate::{DraftModel, DraftModelOptions, Drafter, LEAST_PROBABILITY, Ngram};
use reef_engine::{Engine, EngineConfig, Outcome, Request};
use reef_kernels::dispatch::Tier;
use reef_kv::Fidelity;
use reef_model::gguf::Gguf;
use reef_model::runner::{Activations, KeyRotation, ModelRunner, RunnerOptions};
use reef_model::tokenizer::{Encode, Tokenizer};

const BLOCK_SIZE: usize = 32;
const BUDGET_BYTES: usize = 128 << 20;
const GENERATED: usize = 256;

/// Code as it is written: the same line, slightly changed.
const CODE: &str = "\
impl Display for Temperature {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Temperature::Celsius(value) => write!(formatter, \"{value} degrees Celsius\"),
            Temperature::Kelvin(value) => write!(formatter, \"{value} kelvin\"),
        }
    }
}

impl Display for Length {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Length::Meters(value) => write!(formatter, \"{value} meters\"),
            Length::Feet(value) => write!(formatter, \"{value} feet\"),
        }
    }
}

impl Display for Mass {
";

const PROSE: &str = "The harbor lay quiet in the early morning, and the old ferryman";

fn engine(gguf: &Gguf, threads: usize) -> Result<Engine, Box<dyn Error>> {
    let options = RunnerOptions {
        threads,
        tier: Tier::detect(),
        activations: Activations::Int8,
        block_size: BLOCK_SIZE,
        key_rotation: KeyRotation::None,
    };
    let runner = ModelRunner::load(gguf, options)?;
    Ok(Engine::new(runner, EngineConfig { prefix: None, ..EngineConfig::new(BUDGET_BYTES) })?)
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let usage = "usage: speculation_bench MODEL.gguf [TURNS [THREADS [DRAFT.gguf]]]";
    let path = arguments.next().ok_or(usage)?;
    let cores = std::thread::available_parallelism()?.get();
    let mut number = |default| arguments.next().map_or(Ok(default), |text| text.parse::<usize>());
    let (turns, threads) = (number(5)?.max(1), number(cores)?.max(1));
    let draft = arguments.next();
    let gguf = Gguf::open(Path::new(&path))?;
    let tokenizer = Tokenizer::from_gguf(&gguf)?;
    let (drafter, token_us): (Box<dyn Drafter>, f64) = match &draft {
        None => (Box::new(Ngram::default()), 0.0),
        Some(path) => {
            let options = DraftModelOptions {
                threads,
                tier: Tier::detect(),
                block_size: BLOCK_SIZE,
                budget_bytes: BUDGET_BYTES,
                least_probability: LEAST_PROBABILITY,
            };
            let draft = Gguf::open(Path::new(path))?;
            (Box::new(DraftModel::load(&draft, tokenizer.vocabulary(), options)?), 700.0)
        }
    };
    let mut plain = engine(&gguf, threads)?;
    let mut drafting = engine(&gguf, threads)?;
    drafting.set_drafter(drafter, token_us);
    for (name, text) in [("code", CODE), ("copying", &COPIED.repeat(2)), ("prose", PROSE)] {
        let prompt = tokenizer.encode(text, Encode::default())?;
        let request =
            Request { max_tokens: Some(GENERATED), ..Request::new(prompt, Fidelity::Exact) };
        compare(name, &request, (&mut plain, &mut drafting), turns)?;
    }
    Ok(())
}

const COPIED: &str = "\
Section 4. The keeper of the register shall enter every vessel by name, tonnage and home port, and shall \
strike out no entry unless the owner asks for it in writing. Section 5. A copy of any entry shall be given \
to whoever pays the fee of two crowns, under the seal of the office, within three days.\n\n";

/// Runs the request in turns; prints medians.
fn compare(
    name: &str,
    request: &Request,
    (plain, drafting): (&mut Engine, &mut Engine),
    turns: usize,
) -> Result<(), Box<dyn Error>> {
    let (mut ratios, mut plain_s, mut drafting_s) = (Vec::new(), Vec::new(), Vec::new());
    let mut drafts = (0, 0);
    for _ in 0..turns {
        let (expected, without_s) = timed(plain, request)?;
        let (found, with_s) = timed(drafting, request)?;
        if found.continuations[0].token_ids != expected.continuations[0].token_ids {
            return Err(format!("{name}: drafts changed the output").into());
        }
        drafts = (drafts.0 + found.usage.drafts.0, drafts.1 + found.usage.drafts.1);
        ratios.push(without_s / with_s);
        plain_s.push(without_s);
        drafting_s.push(with_s);
    }
    let rate = |times_s: &mut Vec<f64>| GENERATED as f64 / median(times_s);
    println!(
        "{name:8} {:6.1} tokens/s without, {:6.1} with: x{:.2}; {} of {} drafts accepted",
        rate(&mut plain_s),
        rate(&mut drafting_s),
        median(&mut ratios),
        drafts.1,
        drafts.0,
    );
    Ok(())
}

/// The outcome, and the seconds from the first token to the last.
fn timed(engine: &mut Engine, request: &Request) -> Result<(Outcome, f64), Box<dyn Error>> {
    let mut first = None;
    let outcome = engine.run_to_end(request, &mut |event| {
        if matches!(event, reef_engine::Event::Token(_)) {
            first.get_or_insert_with(Instant::now);
        }
        ControlFlow::Continue(())
    })?;
    let seconds = first.ok_or("no token")?.elapsed().as_secs_f64();
    Ok((outcome, seconds))
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
