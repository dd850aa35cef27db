//! What a contract promises, on tiny models: nothing is touched that fits, and what gives way is told.

use reef_engine::Generation;
use reef_kv::page::PageFormat;
use reef_kv::{Fidelity, PoolConfig, Reason, Rung, check_invariants};

use super::support::drive::{engine, generate, greedy};
use super::support::random::Random;
use super::support::tiny::{Tiny, Weights};

/// Checks that ledger and usage tell one story. Models without window groups only.
pub fn check_story(generation: &Generation, config: &PoolConfig) {
    let (usage, kv) = (&generation.usage, &generation.usage.kv);
    let block_size = config.block_size();
    let block = |format| config.groups.iter().map(|g| g.block_bytes(format)).sum::<usize>();
    let (f16, int8) = (block(PageFormat::F16), block(PageFormat::Int8));
    // The last generated token is never computed.
    let computed = usage.prompt_tokens + generation.token_ids.len().saturating_sub(1);
    let held = kv.tokens_by_format[PageFormat::F16] + kv.tokens_by_format[PageFormat::Int8];
    assert_eq!(held + kv.dropped_tokens, computed as f64, "{kv:?}");
    assert_eq!(kv.bytes_at_f16, computed * f16 / block_size);
    let blocks = |rung| -> usize {
        kv.relief.iter().filter(|entry| entry.rung == rung).map(|entry| entry.blocks).sum()
    };
    assert_eq!((blocks(Rung::Evict) * block_size) as f64, kv.dropped_tokens);
    for entry in &kv.relief {
        assert!(usage.fidelity.permits(entry.rung), "{entry:?} under {:?}", usage.fidelity);
        assert_eq!(entry.reason, Reason::Demand);
        assert!(entry.blocks > 0);
        match entry.rung {
            Rung::Int8 => assert_eq!(entry.bytes, entry.blocks * (f16 - int8)),
            _ => {
                assert!((entry.blocks * int8..=entry.blocks * f16).contains(&entry.bytes));
            }
        }
    }
    assert!(kv.relief.windows(2).all(|pair| pair[0].step <= pair[1].step));
    // Every block began as f16; what it no longer takes is in the ledger, byte for byte.
    let gained: usize = kv.relief.iter().map(|entry| entry.bytes).sum();
    assert_eq!(kv.held_bytes, computed.div_ceil(block_size) * f16 - gained);
    assert!(kv.peak_bytes <= usage.budget_bytes && kv.held_bytes <= kv.peak_bytes);
}

fn tiny() -> Tiny {
    Tiny { weights: Weights::Q8_0, ..Tiny::new("llama") }
}

/// Budget that holds `tokens` tokens of the tiny model at f16, and little more.
pub fn budget_for(tiny: Tiny, tokens: usize) -> usize {
    let engine = engine(tiny.build().plain_runner(), 64 << 20);
    engine.pool().bytes_for_tokens(tokens, PageFormat::F16, 256)
}

#[test]
fn what_fits_at_f16_is_never_touched() {
    let prompt = Random(2).tokens(400, tiny().vocabulary);
    let budget_bytes = budget_for(tiny(), 600);
    let mut engine = engine(tiny().build().plain_runner(), budget_bytes);
    assert!(engine.pool().fits_at_f16(599, 256));
    let mut outputs = Vec::new();
    for fidelity in Fidelity::ALL {
        let generation = generate(&mut engine, &greedy(&prompt, 200, fidelity));
        assert_eq!(generation.usage.kv.relief, [], "{fidelity:?}");
        assert_eq!(generation.usage.kv.tokens_by_format[PageFormat::Int8], 0.0);
        check_story(&generation, engine.pool().config());
        outputs.push(generation.token_ids);
    }
    assert!(outputs.windows(2).all(|pair| pair[0] == pair[1]));
}

#[test]
fn int8_shrinks_and_never_drops() {
    let prompt = Random(2).tokens(300, tiny().vocabulary);
    let budget_bytes = budget_for(tiny(), 600) * 3 / 4;
    let mut engine = engine(tiny().build().plain_runner(), budget_bytes);
    let generation = generate(&mut engine, &greedy(&prompt, 300, Fidelity::Int8));
    assert_eq!(generation.token_ids.len(), 300);
    check_story(&generation, engine.pool().config());
    let kv = &generation.usage.kv;
    assert!(kv.tokens_by_format[PageFormat::Int8] > 0.0 && kv.dropped_tokens == 0.0, "{kv:?}");
    assert_eq!(engine.pool().accounts().used_bytes(), 0);
    assert_eq!(check_invariants(engine.pool(), &[]), []);
}

#[test]
fn evict_goes_on_for_ever_in_a_small_pool() {
    let tiny = Tiny { context: 512, ..tiny() };
    let prompt = Random(2).tokens(700, tiny.vocabulary);
    let budget_bytes = budget_for(tiny, 320);
    let mut engine = engine(tiny.build().plain_runner(), budget_bytes);
    let generation = generate(&mut engine, &greedy(&prompt, 900, Fidelity::Evict));
    assert_eq!(generation.token_ids.len(), 900);
    let kv = &generation.usage.kv;
    assert!(kv.dropped_tokens > 900.0, "{kv:?}");
    assert!(kv.relief.iter().any(|entry| entry.rung == Rung::Int8));
    assert_eq!(engine.pool().accounts().used_bytes(), 0);
    assert_eq!(check_invariants(engine.pool(), &[]), []);
    // A second request finds the pool as the first did.
    let again = generate(&mut engine, &greedy(&prompt, 900, Fidelity::Evict));
    assert_eq!(again.token_ids, generation.token_ids);
    assert_eq!(again.usage.kv.relief.len(), kv.relief.len());
}

/// `evict` permits drops but does not ask for them: what fits with its middle in int8 loses no token,
/// though a whole chunk of its prompt in f16 would not fit beside. (The tail goes to int8 only after
/// the middle was dropped, so `evict` starts dropping before the capacity of int8 is reached.)
#[test]
fn evict_drops_nothing_that_fits_in_int8() {
    let mut engine = engine(tiny().build().plain_runner(), budget_for(tiny(), 400));
    let capacity = engine.pool().token_limit(Fidelity::Int8).unwrap();
    for (fidelity, spared) in [(Fidelity::Int8, 0), (Fidelity::Evict, 240)] {
        let prompt = Random(2).tokens(capacity - 40 - spared, tiny().vocabulary);
        let generation = generate(&mut engine, &greedy(&prompt, 41, fidelity));
        check_story(&generation, engine.pool().config());
        let kv = &generation.usage.kv;
        assert_eq!(kv.dropped_tokens, 0.0, "{fidelity:?}: {} tokens", prompt.len());
        assert!(kv.tokens_by_format[PageFormat::Int8] > 0.0);
    }
}
