//! Real runs of SmolLM2 under small budgets, and the ledger's story of them.

use std::ops::ControlFlow;

use reef_engine::{Event, FinishReason, Generation};
use reef_kv::page::PageFormat;
use reef_kv::{BlockPool, Fidelity, Rung, check_invariants};
use reef_model::runner::{Activations, ModelRunner, RunnerOptions};

use super::contracts::check_story;
use super::support::drive::{engine, generate, greedy};
use super::support::files::{Likelihood, fetched};
use super::support::tiny::options;

pub fn smollm2(threads: usize) -> Option<ModelRunner> {
    let options = RunnerOptions { threads, ..options(Activations::Int8) };
    Some(ModelRunner::load(&fetched("smollm2")?, options).unwrap())
}

#[test]
fn exact_output_is_the_same_run_after_run_and_on_one_or_two_threads() {
    let ids = Likelihood::golden("smollm2").ids;
    let request = greedy(&ids[..300], 48, Fidelity::Exact);
    let mut outputs = Vec::new();
    for threads in [1, 2] {
        let Some(runner) = smollm2(threads) else { return };
        let mut engine = engine(runner, 16 << 20);
        for _ in 0..2 {
            let generation = generate(&mut engine, &request);
            assert_eq!(generation.token_ids.len(), 48);
            assert_eq!(generation.usage.kv.relief, []);
            outputs.push(generation.token_ids);
        }
    }
    assert!(outputs.windows(2).all(|pair| pair[0] == pair[1]), "{outputs:?}");
}

/// Runs a request; in each step the pool's invariants hold. Returns also the sizes of the prompt's
/// chunks.
fn watched(
    budget_bytes: usize,
    prompt: &[u32],
    max_tokens: usize,
    fidelity: Fidelity,
) -> Option<(Generation, Vec<usize>, BlockPool)> {
    let mut engine = engine(smollm2(1)?, budget_bytes);
    let pool = engine.pool().clone();
    let (mut chunks, mut done, mut told) = (Vec::new(), 0, Vec::new());
    let request = greedy(prompt, max_tokens, fidelity);
    let generation = engine.generate(&request, &mut |event| {
        match event {
            Event::Prefilled { tokens, total } => {
                assert_eq!(total, prompt.len());
                chunks.push(tokens - done);
                done = tokens;
            }
            Event::Relief(entry) => told.push(entry),
            Event::Step { used, .. } => {
                assert_eq!(check_invariants(&pool, &[]), []);
                // At the end its blocks are given back before the last step is told.
                let now = pool.accounts().used;
                assert!(now.total() == 0 || used == now);
                assert!(used.total() <= budget_bytes);
            }
            _ => {}
        }
        ControlFlow::Continue(())
    });
    let generation = generation.unwrap();
    assert_eq!(told, generation.usage.kv.relief, "events and ledger tell the same");
    Some((generation, chunks, pool))
}

#[test]
fn a_small_budget_is_met_by_shrinking_then_dropping() {
    let ids = Likelihood::golden("smollm2").ids;
    let budget_bytes = 8 << 20;
    let Some((generation, _, pool)) = watched(budget_bytes, &ids[..600], 200, Fidelity::Evict)
    else {
        return;
    };
    assert_eq!(generation.token_ids.len(), 200);
    assert_eq!(generation.finish_reason, FinishReason::Length);
    check_story(&generation, pool.config());
    let relief = &generation.usage.kv.relief;
    let first = |rung| relief.iter().find(|entry| entry.rung == rung).expect("both rungs").step;
    // Both may be needed in one step; then the drops are carried out first, to make room to shrink.
    let (first_shrunk, first_dropped) = (first(Rung::Int8), first(Rung::Evict));
    assert!(first_shrunk <= first_dropped, "shrinking comes before dropping");
    assert_eq!(generation.usage.kv.bytes_at_f16, 799 * 23_040);
    assert_eq!(pool.accounts().used_bytes(), 0);
    assert_eq!(check_invariants(&pool, &[]), []);
}

#[test]
fn a_prompt_larger_than_the_pool_is_prefilled_in_chunks() {
    let ids = Likelihood::golden("smollm2").ids;
    let prompt: Vec<u32> = ids.iter().cycle().take(4000).copied().collect();
    let Some((generation, chunks, pool)) = watched(24 << 20, &prompt, 8, Fidelity::Evict) else {
        return;
    };
    assert_eq!(generation.token_ids.len(), 8);
    assert!(chunks.len() >= 4000 / 256 && chunks.iter().all(|chunk| *chunk <= 256), "{chunks:?}");
    assert_eq!(chunks.iter().sum::<usize>(), 4000);
    check_story(&generation, pool.config());
    let kv = &generation.usage.kv;
    assert!(kv.dropped_tokens > 1000.0 && kv.peak_bytes <= 24 << 20, "{kv:?}");
    assert_eq!(pool.accounts().used_bytes(), 0);
}

/// The README's story: 2,000 tokens in 24 MiB, where f16 holds about a thousand. Under `int4` nothing is
/// dropped, and no block goes lower than it must.
#[test]
fn two_thousand_tokens_in_24_mib_lose_bits_and_no_token() {
    let ids = Likelihood::golden("smollm2").ids;
    let prompt: Vec<u32> = ids.iter().cycle().take(1900).copied().collect();
    let Some((generation, _, pool)) = watched(24 << 20, &prompt, 100, Fidelity::Int4) else {
        return;
    };
    assert_eq!(generation.token_ids.len(), 100);
    check_story(&generation, pool.config());
    let kv = &generation.usage.kv;
    assert_eq!((kv.dropped_tokens, kv.bytes_at_f16), (0.0, 1999 * 23_040));
    assert!(kv.tokens_by_format[PageFormat::F16] >= 128.0, "the tail stays f16: {kv:?}");
    // 1,999 tokens at 9 bits a value are 24.7 MiB: a part must go lower, but not all of it.
    let int8 = kv.tokens_by_format[PageFormat::Int8];
    let lower = kv.tokens_by_format[PageFormat::K8V4] + kv.tokens_by_format[PageFormat::Int4];
    assert!(lower > 0.0, "{kv:?}");
    assert!(int8 > 0.0 || kv.tokens_by_format[PageFormat::Int4] == 0.0, "{kv:?}");
    assert_eq!(pool.accounts().used_bytes(), 0);
}
