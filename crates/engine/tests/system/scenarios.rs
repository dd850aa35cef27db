//! Random contracts, formats, policies, ladders, pins, budgets, prompts and limits (case 56): a request is
//! refused before it starts or served to the last token.

use std::ops::ControlFlow;

use reef_engine::session::{EngineError, Rules};
use reef_engine::{Engine, EngineConfig, Event, FinishReason, Request, Sampling};
use reef_kv::page::PageFormat;
use reef_kv::policy::{NAMES, PolicyOptions, by_name};
use reef_kv::{ConfigError, Fidelity, Ladder, Reason, Rung, check_invariants};
use reef_model::runner::{Activations, KeyRotation, RunnerOptions};

use super::support::drive::engine_config;
use super::support::random::Random;
use super::support::tiny::{Tiny, TinyModel, Weights, options};

const SCENARIOS: u64 = 150;
const REQUESTS: usize = 3;

#[derive(Default, Debug)]
struct Outcomes {
    no_pool: usize,
    refused: usize,
    untouched: usize,
    shrunk: usize,
    dropped: usize,
}

fn request(random: &mut Random, vocabulary: usize) -> Request {
    let length = [0, 1, 31, 32, 33, 100, 257, 600][random.below(8)];
    let length = if length > 33 { random.below(length) + 1 } else { length };
    let temperature = [0.0, 0.8][random.below(2)];
    Request {
        max_tokens: [None, Some(0), Some(1), Some(random.below(300))][random.below(4)],
        sampling: Sampling { temperature, seed: random.next(), ..Sampling::default() },
        ..Request::new(random.tokens(length, vocabulary), Fidelity::ALL[random.below(4)])
    }
}

/// Any policy; mostly f16 at seal, else any format.
fn rules(random: &mut Random, tail_tokens: usize) -> Rules {
    let policy = NAMES[random.below(NAMES.len())];
    let lossy = random.below(3) == 0;
    Rules {
        policy: by_name(policy, &PolicyOptions { tail_tokens, seed: random.next() }).unwrap(),
        format_at_seal: PageFormat::ALL[random.below(PageFormat::ALL.len()) * usize::from(lossy)],
        ..Rules::default()
    }
}

/// Mostly every rung, else some of them in any order.
fn ladder(random: &mut Random) -> Ladder {
    let mut rungs = Rung::ALL.to_vec();
    if random.below(3) == 0 {
        for _ in 0..random.below(4) {
            rungs.swap_remove(random.below(rungs.len()));
        }
    }
    Ladder { rungs, four_bit_keys: random.below(4) > 0, ..Ladder::default() }
}

fn play(model: &TinyModel, seed: u64, outcomes: &mut Outcomes) {
    let mut random = Random(seed);
    let block_size = [16, 32, 64][random.below(3)];
    let spread = 12 + random.below(9);
    let budget_bytes = (28 << 10) + random.below(1 << spread);
    let tail_tokens = [128, 64][random.below(2)];
    let rules = rules(&mut random, tail_tokens);
    let key_rotation = [KeyRotation::None, KeyRotation::Hadamard][random.below(2)];
    let options = RunnerOptions { block_size, key_rotation, ..options(Activations::Int8) };
    let config = EngineConfig {
        block_size,
        rules,
        ladder: ladder(&mut random),
        pinned_layers: vec![0; random.below(5) / 4],
        ..engine_config(budget_bytes)
    };
    let mut engine = match Engine::new(model.runner(options), config) {
        Ok(engine) => engine,
        Err(EngineError::Pool(ConfigError::BudgetTooSmall { .. })) => {
            outcomes.no_pool += 1;
            return;
        }
        Err(error) => panic!("seed {seed}: {error}"),
    };
    for _ in 0..REQUESTS {
        let request = request(&mut random, model.tiny.vocabulary);
        serve(&mut engine, &request, seed, outcomes);
        assert_eq!(engine.pool().accounts().used_bytes(), 0, "seed {seed}");
        assert_eq!(check_invariants(engine.pool(), &[]), [], "seed {seed}");
    }
}

fn serve(engine: &mut Engine, request: &Request, seed: u64, outcomes: &mut Outcomes) {
    let pool = engine.pool().clone();
    let mut limit = None;
    let outcome = engine.generate(request, &mut |event| {
        match event {
            Event::Admitted { max_tokens, .. } => limit = Some(max_tokens),
            Event::Step { .. } => assert_eq!(check_invariants(&pool, &[]), [], "seed {seed}"),
            _ => {}
        }
        ControlFlow::Continue(())
    });
    let what = || {
        let Request { prompt, max_tokens, fidelity, .. } = request;
        let budget = pool.config().budget_bytes;
        format!("seed {seed}: {} + {max_tokens:?} under {fidelity:?} in {budget}", prompt.len())
    };
    let generation = match outcome {
        Ok(generation) => generation,
        Err(EngineError::Refused(_)) => {
            assert_eq!(limit, None, "{}", what());
            outcomes.refused += 1;
            return;
        }
        Err(error) => panic!("{}: {error}", what()),
    };
    let limit = limit.unwrap();
    assert_eq!(limit, request.max_tokens.unwrap_or(limit), "{}", what());
    assert_eq!(generation.token_ids.len(), limit, "{}", what());
    assert_eq!(generation.finish_reason, FinishReason::Length);
    let kv = &generation.usage.kv;
    assert!(kv.peak_bytes <= pool.config().budget_bytes);
    let demanded = kv.relief.iter().filter(|entry| entry.reason != Reason::FormatAtSeal);
    let ladder = &pool.config().ladder;
    for entry in demanded {
        assert!(ladder.permits(request.fidelity, entry.rung), "{}: {entry:?}", what());
    }
    if kv.dropped_tokens > 0.0 {
        outcomes.dropped += 1;
    } else if kv.relief.is_empty() {
        outcomes.untouched += 1;
    } else {
        outcomes.shrunk += 1;
    }
}

fn play_all(tiny: Tiny) {
    let model = tiny.build();
    let mut outcomes = Outcomes::default();
    (0..SCENARIOS).for_each(|seed| play(&model, seed, &mut outcomes));
    // Each way a request can go is in the sample.
    let Outcomes { no_pool, refused, untouched, shrunk, dropped } = outcomes;
    let least = [no_pool, refused, untouched, shrunk, dropped].into_iter().min();
    assert!(least >= Some(5), "{outcomes:?}");
}

#[test]
fn llama_requests_are_refused_or_served_to_the_end() {
    let tiny =
        Tiny { layers: 1, heads: 2, kv_heads: 1, width: 32, hidden: 32, ..Tiny::new("llama") };
    play_all(Tiny { context: 500, weights: Weights::Q8_0, ..tiny });
}

#[test]
fn gemma_requests_are_refused_or_served_to_the_end() {
    let tiny =
        Tiny { layers: 3, heads: 2, kv_heads: 1, width: 32, hidden: 32, ..Tiny::new("gemma3") };
    play_all(Tiny { context: 500, weights: Weights::Q8_0, ..tiny });
}
