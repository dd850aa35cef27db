//! What a contract promises, on tiny models: nothing is touched that fits, and what gives way is told.

use reef_engine::session::EngineError;
use reef_engine::{Engine, EngineConfig, Generation};
use reef_kv::page::PageFormat;
use reef_kv::{
    Fidelity, GroupConfig, HarmTable, Ladder, PoolConfig, Reason, Rung, check_invariants,
};

use super::support::drive::{engine, engine_config, generate, greedy};
use super::support::random::Random;
use super::support::tiny::{Tiny, Weights};

/// Bytes of one block of all groups whose pages are in `format`, but for the pinned ones.
fn block_bytes(config: &PoolConfig, format: PageFormat) -> usize {
    let of_group = |group: &GroupConfig| {
        let pinned = group.pinned.len() * group.shape.page_bytes(PageFormat::F16);
        (group.layers - group.pinned.len()) * group.shape.page_bytes(format) + pinned
    };
    config.groups.iter().map(of_group).sum()
}

/// Fewest and most bytes that one block gives back on `rung`. A fall may start from any format above.
fn gain(config: &PoolConfig, rung: Rung) -> (usize, usize) {
    let block = |format| block_bytes(config, format);
    let f16 = block(PageFormat::F16);
    match rung.format() {
        Some(format) => {
            let above = match rung {
                Rung::Int8 => PageFormat::F16,
                Rung::K8V4 => PageFormat::Fp8E5M2,
                _ => PageFormat::K8V4,
            };
            (block(above) - block(format), f16 - block(format))
        }
        None => (block(PageFormat::Int4), f16),
    }
}

/// Checks that ledger and usage tell one story. Models without window groups and policies that drop
/// whole blocks only.
pub fn check_story(generation: &Generation, config: &PoolConfig) {
    let (usage, kv) = (&generation.usage, &generation.usage.kv);
    let block_size = config.block_size();
    let f16 = block_bytes(config, PageFormat::F16);
    // The last generated token is never computed.
    let computed = usage.prompt_tokens + generation.token_ids.len().saturating_sub(1);
    let held: f64 = kv.tokens_by_format.iter().map(|(_, tokens)| tokens).sum();
    // Pinned layers make fractions of tokens.
    assert!((held + kv.dropped_tokens - computed as f64).abs() < 1e-6, "{kv:?}");
    for (format, tokens) in kv.tokens_by_format.iter() {
        assert!(*tokens == 0.0 || usage.fidelity.permits_format(format), "{format:?} in {kv:?}");
        assert!(*tokens == 0.0 || format <= config.floor(usage.fidelity), "{format:?} in {kv:?}");
    }
    assert_eq!(kv.bytes_at_f16, computed * f16 / block_size);
    let blocks = |rung| -> usize {
        kv.relief.iter().filter(|entry| entry.rung == rung).map(|entry| entry.blocks).sum()
    };
    assert_eq!((blocks(Rung::Evict) * block_size) as f64, kv.dropped_tokens);
    for entry in &kv.relief {
        let permitted = config.ladder.permits(usage.fidelity, entry.rung);
        assert!(permitted, "{entry:?} under {:?} of {:?}", usage.fidelity, config.ladder);
        assert_eq!(entry.reason, Reason::Demand);
        assert!(entry.blocks > 0);
        let (least, most) = gain(config, entry.rung);
        let possible = entry.blocks * least..=entry.blocks * most;
        assert!(possible.contains(&entry.bytes), "{entry:?} gave back not {possible:?}");
        assert!(entry.harm.is_finite() && entry.harm > 0.0, "{entry:?}");
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
        assert_eq!(generation.usage.kv.tokens_by_format[PageFormat::F16], 599.0);
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

/// Under `int4` blocks go down rung by rung, only as far as they must, and none is dropped.
#[test]
fn int4_goes_down_rung_by_rung_and_never_drops() {
    let prompt = Random(2).tokens(300, tiny().vocabulary);
    let mut rungs_by_budget = Vec::new();
    for (numerator, denominator) in [(3, 4), (1, 2), (9, 20)] {
        let budget_bytes = budget_for(tiny(), 900) * numerator / denominator;
        let mut engine = engine(tiny().build().plain_runner(), budget_bytes);
        let generation = generate(&mut engine, &greedy(&prompt, 600, Fidelity::Int4));
        assert_eq!(generation.token_ids.len(), 600);
        check_story(&generation, engine.pool().config());
        let relief = &generation.usage.kv.relief;
        let first = |rung| relief.iter().find(|entry| entry.rung == rung).map(|entry| entry.step);
        let steps: Vec<u64> = Rung::ALL.into_iter().map_while(first).collect();
        assert!(steps.windows(2).all(|pair| pair[0] <= pair[1]), "{relief:?}");
        assert_eq!(first(Rung::Evict), None);
        rungs_by_budget.push(steps.len());
    }
    // A smaller budget takes a deeper rung.
    assert!(rungs_by_budget.is_sorted() && rungs_by_budget[0] < rungs_by_budget[2]);
    assert_eq!(rungs_by_budget[2], 3);
}

/// Every ladder there is (each subset of the rungs in each order) under every contract, with and
/// without 4-bit keys: what was disabled is not used, the rest serves to the end or refuses.
#[test]
fn every_ladder_under_every_contract() {
    let model = Tiny { layers: 1, ..tiny() }.build();
    let budget_bytes = budget_for(model.tiny, 400) * 3 / 5;
    let prompt = Random(2).tokens(200, model.tiny.vocabulary);
    let (mut served, mut refused) = (0, 0);
    for rungs in subsets_in_every_order(&Rung::ALL) {
        for four_bit_keys in [true, false] {
            let ladder = Ladder { rungs: rungs.clone(), four_bit_keys, harm: HarmTable::default() };
            let config = EngineConfig { ladder, ..engine_config(budget_bytes) };
            let mut engine = Engine::new(model.plain_runner(), config).unwrap();
            let pool = engine.pool().clone();
            for fidelity in Fidelity::ALL {
                let request = greedy(&prompt, 250, fidelity);
                let outcome = engine.generate(&request, &mut |_| {
                    assert_eq!(check_invariants(&pool, &[]), [], "{rungs:?} {fidelity:?}");
                    std::ops::ControlFlow::Continue(())
                });
                match outcome {
                    Ok(generation) => {
                        assert_eq!(generation.token_ids.len(), 250, "{rungs:?} {fidelity:?}");
                        check_story(&generation, pool.config());
                        served += 1;
                    }
                    Err(EngineError::Refused(_)) => refused += 1,
                    Err(error) => panic!("{rungs:?} {fidelity:?}: {error}"),
                }
            }
        }
    }
    assert_eq!(served + refused, 65 * 2 * 4);
    assert!(served > 100 && refused > 100, "{served} served, {refused} refused");
}

fn subsets_in_every_order(rungs: &[Rung]) -> Vec<Vec<Rung>> {
    let mut lists: Vec<Vec<Rung>> = vec![Vec::new()];
    let mut from = 0;
    while from < lists.len() {
        let longer = rungs.iter().filter(|rung| !lists[from].contains(rung));
        let longer: Vec<Vec<Rung>> =
            longer.map(|rung| lists[from].iter().copied().chain([*rung]).collect()).collect();
        lists.extend(longer);
        from += 1;
    }
    lists
}

/// Case 41: pinned layers stay f16 page by page, whatever is done to the others, and capacity counts
/// them so.
#[test]
fn pinned_layers_stay_f16_and_are_counted() {
    let model = tiny().build();
    let budget_bytes = budget_for(tiny(), 600);
    let capacity = |pinned_layers: &[usize]| {
        let pinned_layers = pinned_layers.to_vec();
        let config = EngineConfig { pinned_layers, ..engine_config(budget_bytes) };
        let mut engine = Engine::new(model.plain_runner(), config).unwrap();
        let capacity = engine.pool().token_limit(Fidelity::Int4).unwrap();
        let prompt = Random(2).tokens(capacity - 100, tiny().vocabulary);
        let generation = generate(&mut engine, &greedy(&prompt, 101, Fidelity::Int4));
        assert_eq!(generation.token_ids.len(), 101, "the capacity is true");
        check_story(&generation, engine.pool().config());
        let f16 = generation.usage.kv.tokens_by_format[PageFormat::F16];
        let pinned = pinned_of(&engine);
        assert!(f16 >= (capacity * pinned) as f64 / 3.0, "{f16} of {capacity}, {pinned} pinned");
        capacity
    };
    let (none, one, two) = (capacity(&[]), capacity(&[1]), capacity(&[0, 2]));
    assert!(none > one && one > two, "{none}, {one}, {two}");
    // Of three layers two take 16 bits a value and one 5, against three of 5.
    let (found, expected) = (two as f64 / none as f64, 15.0 / 37.0);
    assert!((found - expected).abs() < 0.08, "{found} not {expected}");
}

fn pinned_of(engine: &Engine) -> usize {
    engine.pool().config().groups.iter().map(|group| group.pinned.len()).sum()
}
