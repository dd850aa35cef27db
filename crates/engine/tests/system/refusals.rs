//! What can never be served is refused before it starts: one line with numbers and the mend.

use std::ops::ControlFlow;

use reef_engine::session::EngineError;
use reef_engine::step::pool_config;
use reef_engine::{Engine, Request, Sampling};
use reef_kv::{Fidelity, minimum_budget_bytes};

use super::contracts::budget_for;
use super::support::drive::{engine, generate, greedy};
use super::support::random::Random;
use super::support::tiny::{Tiny, Weights};

fn tiny() -> Tiny {
    Tiny { weights: Weights::Q8_0, context: 1024, ..Tiny::new("llama") }
}

fn small_engine(tokens: usize) -> Engine {
    engine(tiny().build().plain_runner(), budget_for(tiny(), tokens))
}

/// The refusal's line; the sink is told nothing and no memory is held.
fn refused(engine: &mut Engine, request: &Request) -> String {
    let outcome = engine.generate(request, &mut |event| -> ControlFlow<_> {
        panic!("{event:?} of a request that is refused")
    });
    let Err(EngineError::Refused(refusal)) = outcome else { panic!("{outcome:?}") };
    assert_eq!(engine.pool().accounts().used_bytes(), 0);
    let line = refusal.to_string();
    assert!(!line.contains('\n'));
    line
}

fn assert_names(line: &str, parts: &[&str]) {
    parts.iter().for_each(|part| assert!(line.contains(part), "`{part}` is not in: {line}"));
}

#[test]
fn an_empty_prompt() {
    let line = refused(&mut small_engine(400), &greedy(&[], 5, Fidelity::Exact));
    assert_names(&line, &["prompt", "at least one"]);
}

#[test]
fn too_many_tokens_for_exact_and_for_int8() {
    let mut engine = small_engine(400);
    let budget = engine.pool().config().budget_bytes.to_string();
    let prompt = Random(1).tokens(300, tiny().vocabulary);
    let line = refused(&mut engine, &greedy(&prompt, 700, Fidelity::Exact));
    assert_names(
        &line,
        &["300", "700", "exact", "f16", &budget, "max_tokens", "--kv-memory", "int8"],
    );
    let line = refused(&mut engine, &greedy(&prompt, 725, Fidelity::Int8));
    let capacity = engine.pool().token_limit(Fidelity::Int8).unwrap().to_string();
    assert_names(&line, &["300", "725", "int8", &budget, &capacity, "evict"]);
    assert_eq!(generate(&mut engine, &greedy(&prompt, 725, Fidelity::Evict)).token_ids.len(), 725);
}

/// The capacity and the budget that a refusal names are true.
#[test]
fn the_mend_works() {
    let mut engine = small_engine(400);
    for fidelity in [Fidelity::Exact, Fidelity::Int8] {
        let capacity = engine.pool().token_limit(fidelity).unwrap();
        let prompt = Random(1).tokens(capacity.min(1000) - 50, tiny().vocabulary);
        let fits = capacity.min(1024) - prompt.len() + 1;
        let generation = generate(&mut engine, &greedy(&prompt, fits, fidelity));
        assert_eq!(generation.token_ids.len(), fits, "{fidelity:?}");
        refused(&mut engine, &greedy(&prompt, fits + 1, fidelity));
        let unlimited = Request { max_tokens: None, ..greedy(&prompt, 0, fidelity) };
        let generation = generate(&mut engine, &unlimited);
        assert_eq!(generation.usage.max_tokens_limit, fits);
        assert_eq!(generation.token_ids.len(), fits);
    }
}

#[test]
fn more_than_the_trained_context() {
    let mut engine = small_engine(2000);
    let prompt = Random(1).tokens(1000, tiny().vocabulary);
    let line = refused(&mut engine, &greedy(&prompt, 100, Fidelity::Exact));
    assert_names(&line, &["1000", "100", "1024", "evict"]);
}

/// Between the minimum of `evict` and that of `exact` one is served and the other refused. (Pages
/// large beside the pool's spans: where few blocks fill a span, the minimums are the same.)
#[test]
fn a_budget_below_the_minimum() {
    let large = Tiny { layers: 8, heads: 8, kv_heads: 8, head_dim: 64, ..tiny() };
    let runner = large.build().plain_runner();
    let config = pool_config(runner.spec(), 32, 64 << 20);
    let least = |contract| minimum_budget_bytes(&config, contract);
    assert!(least(Fidelity::Evict) < least(Fidelity::Exact));
    let mut engine = engine(runner, least(Fidelity::Evict));
    let needed = minimum_budget_bytes(engine.pool().config(), Fidelity::Exact).to_string();
    let line = refused(&mut engine, &greedy(&[1, 2, 3], 5, Fidelity::Exact));
    let budget = engine.pool().config().budget_bytes.to_string();
    assert_names(&line, &[&budget, &needed, "exact", "raise --kv-memory"]);
    assert_eq!(generate(&mut engine, &greedy(&[1, 2, 3], 5, Fidelity::Evict)).token_ids.len(), 5);
}

#[test]
fn sampling_out_of_range() {
    let sampling = Sampling { top_p: 1.5, ..Sampling::default() };
    let request = Request { sampling, ..greedy(&[1], 5, Fidelity::Evict) };
    assert_names(&refused(&mut small_engine(400), &request), &["top_p", "1.5", "at most 1"]);
}

/// A token outside the vocabulary is an error of the batch, with its number, and costs no memory.
#[test]
fn a_token_outside_the_vocabulary() {
    let mut engine = small_engine(400);
    let request = greedy(&[1, 500], 5, Fidelity::Evict);
    let error = engine.generate(&request, &mut |_| ControlFlow::Continue(())).unwrap_err();
    assert_names(&error.to_string(), &["500", "101"]);
    assert_eq!(engine.pool().accounts().used_bytes(), 0);
    assert_eq!(generate(&mut engine, &greedy(&[1, 50], 5, Fidelity::Evict)).token_ids.len(), 5);
}
