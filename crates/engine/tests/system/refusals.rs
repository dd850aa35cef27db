//! What can never be served is refused before it starts: one line with numbers and the mend.

use std::ops::ControlFlow;

use reef_engine::config::pool_config;
use reef_engine::session::EngineError;
use reef_engine::{Engine, EngineConfig, Request, Sampling};
use reef_kv::page::PageFormat;
use reef_kv::{Fidelity, Ladder, minimum_budget_bytes};

use super::contracts::budget_for;
use super::support::drive::{engine, engine_config, generate, greedy};
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
    assert_names(&line, &["300", "700", "exact", "f16", &budget, "max_tokens", "--kv-memory"]);
    // The contract that is named would do.
    let next = |tokens: usize| {
        let fits = |f: &Fidelity| engine.pool().token_limit(*f).is_none_or(|most| tokens <= most);
        let found = Fidelity::ALL.into_iter().find(fits).unwrap();
        format!("`{}`", found.name())
    };
    assert_names(&line, &[&next(300 + 700 - 1)]);
    let next = next(300 + 725 - 1);
    let line = refused(&mut engine, &greedy(&prompt, 725, Fidelity::Int8));
    let capacity = engine.pool().token_limit(Fidelity::Int8).unwrap().to_string();
    assert_names(&line, &["300", "725", "int8", &budget, &capacity, &next]);
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

/// An engine with room for 400 tokens and other rules, ladder or pins.
fn configured(change: impl FnOnce(&mut EngineConfig)) -> Result<Engine, EngineError> {
    let mut config = engine_config(budget_for(tiny(), 400));
    change(&mut config);
    Engine::new(tiny().build().plain_runner(), config)
}

/// Every format at seal under every contract: served where the contract permits the format, refused
/// with both names and the mend where not (never ignored).
#[test]
fn a_format_at_seal_that_the_contract_does_not_permit() {
    for format in PageFormat::ALL {
        let mut engine = configured(|config| config.rules.format_at_seal = format).unwrap();
        for fidelity in Fidelity::ALL {
            let request = greedy(&[1, 2, 3], 40, fidelity);
            if fidelity.permits_format(format) {
                let generation = generate(&mut engine, &request);
                assert!(generation.usage.kv.tokens_by_format[format] > 0.0, "{format:?}");
                continue;
            }
            let line = refused(&mut engine, &request);
            let fits = Fidelity::ALL.into_iter().find(|f| f.permits_format(format)).unwrap();
            assert_names(&line, &[format.name(), fidelity.name(), fits.name(), "--kv-format f16"]);
        }
    }
}

#[test]
fn a_token_budget_where_nothing_may_be_dropped() {
    let mut engine = configured(|config| config.rules.token_budget = Some(200)).unwrap();
    for fidelity in [Fidelity::Exact, Fidelity::Int8, Fidelity::Int4] {
        let line = refused(&mut engine, &greedy(&[1, 2, 3], 5, fidelity));
        assert_names(&line, &["200", fidelity.name(), "`evict`"]);
    }
    let prompt = Random(1).tokens(300, tiny().vocabulary);
    let kv = generate(&mut engine, &greedy(&prompt, 40, Fidelity::Evict)).usage.kv;
    assert!(kv.dropped_tokens >= 339.0 - 200.0, "{kv:?}");
    // Sinks, a recent tail of 128 and the block being computed.
    let mut engine = configured(|config| config.rules.token_budget = Some(191)).unwrap();
    let line = refused(&mut engine, &greedy(&[1, 2, 3], 5, Fidelity::Evict));
    assert_names(&line, &["191", "`sinks`", "192"]);
    let mut engine = configured(|config| {
        config.rules.token_budget = Some(200);
        config.ladder = Ladder::parse("int8").unwrap();
    })
    .unwrap();
    let line = refused(&mut engine, &greedy(&[1, 2, 3], 5, Fidelity::Evict));
    assert_names(&line, &["200", "ladder", "`evict`"]);
}

#[test]
fn a_pinned_layer_that_is_none() {
    let error = configured(|config| config.pinned_layers = vec![0, 3]).err().unwrap();
    assert_names(&error.to_string(), &["layer 3", "3 layers"]);
    assert!(configured(|config| config.pinned_layers = vec![2, 0, 2]).is_ok());
}

/// Without rungs there is only f16, whatever the contract permits; the refusal says what would help.
#[test]
fn a_ladder_without_the_rungs_that_a_request_needs() {
    let mut engine = configured(|config| config.ladder = Ladder::parse("none").unwrap()).unwrap();
    let prompt = Random(1).tokens(300, tiny().vocabulary);
    let capacity = engine.pool().capacity_tokens(PageFormat::F16).unwrap();
    for fidelity in Fidelity::ALL {
        let line = refused(&mut engine, &greedy(&prompt, 500, fidelity));
        assert_names(&line, &["300", "500", "f16", &capacity.to_string(), "--ladder"]);
    }
    let fits = greedy(&prompt, capacity - 300, Fidelity::Evict);
    assert_eq!(generate(&mut engine, &fits).usage.kv.relief, []);
}
