//! Memory runs out: who does not fit is told, who was let in comes to its end, and every step gets on.

use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use reef_engine::event::PauseKind;
use reef_engine::session::{EngineError, Rules};
use reef_engine::{
    AdmissionPolicy, Branches, EngineHandle, Event, FinishReason, Progress, Refusal, Request,
};
use reef_kv::page::PageFormat;
use reef_kv::prefix::IndexKind;
use reef_kv::{Fidelity, Ladder, Rung};

use super::*;

/// Row 1: what can never fit is refused at once with numbers that hold, or is let in under a contract
/// under which it does fit; those behind it are served as if it had not come.
#[test]
fn what_never_fits_is_refused_and_blocks_nobody() {
    let model = plain();
    let mut random = Random(1);
    let long = random.tokens(20 * BLOCK, VOCABULARY);
    let short = exact(random.tokens(BLOCK, VOCABULARY), 10);
    let turns = |with: Option<Fidelity>| {
        let mut server = Server::of(&model, engine_config(budget_of(&model, 12)));
        let refusal = with.and_then(|fidelity| {
            let request = Request { fidelity, ..exact(long.clone(), 8) };
            let refused = server.engine.submit(7, request).err();
            server.open += usize::from(refused.is_none());
            refused
        });
        server.submit(0, &short);
        server.until(|server| server.outcomes.contains_key(&0));
        server.assert_exact(&alone(&model, std::slice::from_ref(&short)), "behind it");
        let turns = server.turns;
        server.finish();
        server.assert_empty();
        (turns, refusal, server.outcomes.remove(&7))
    };
    let (undisturbed, ..) = turns(None);
    let (refused, refusal, _) = turns(Some(Fidelity::Exact));
    assert_eq!(refused, undisturbed);
    let Some(Refusal::TooLarge { prompt, needed_bytes, budget_bytes, capacity, .. }) = refusal
    else {
        panic!("{refusal:?}");
    };
    assert_eq!((prompt, budget_bytes), (20 * BLOCK, budget_of(&model, 12)));
    assert_eq!(capacity, 12 * BLOCK);
    // The mend is one: what it says it needs is enough.
    let mut server = Server::of(&model, engine_config(needed_bytes));
    serve(&mut server, &[exact(long.clone(), 8)]);
    let (degraded, refusal, outcome) = turns(Some(Fidelity::Int4));
    assert_eq!(refusal, None);
    assert!(degraded < 4 * undisturbed, "{degraded} turns, {undisturbed} without it");
    let outcome = outcome.unwrap();
    assert_eq!(outcome.continuations[0].token_ids.len(), 8);
    assert!(outcome.usage.kv.tokens_by_format[PageFormat::F16] < 20.0 * BLOCK as f64);
    assert!(!outcome.usage.kv.relief.is_empty(), "what was done is told");
}

/// Row 1 where blocks may be dropped: what may not be, kept spans or beams, is refused with numbers if it does
/// not fit, and served if it does.
#[test]
fn what_may_not_be_dropped_is_held_or_refused() {
    let model = plain();
    let mut config = engine_config(budget_of(&model, 2 + 200 / BLOCK));
    config.ladder = Ladder::parse("evict").unwrap();
    let prompt = Random(4).tokens(60 * BLOCK, VOCABULARY);
    let evict = Request { fidelity: Fidelity::Evict, ..exact(prompt, 8) };
    let half = evict.prompt.len() / 2;
    let keeps = |spans: &[(usize, usize)]| {
        let keep = spans.iter().map(|&(start, end)| start..end).collect();
        Request { keep, ..evict.clone() }
    };
    let mut server = Server::of(&model, config);
    for spans in [&[(0, half)][..], &[(0, BLOCK), (BLOCK / 2, half)], &[(half, 2 * half)]] {
        let refused = server.engine.submit(0, keeps(spans));
        assert!(matches!(refused, Err(Refusal::Kept { .. })), "{refused:?}");
    }
    serve(&mut server, &[keeps(&[(half, half + BLOCK)])]);
    server.assert_empty();
}

/// Beams run side by side and share blocks that are not dropped: as many as fit so are let in.
#[test]
fn beams_are_let_in_where_nothing_need_be_dropped() {
    let model = plain();
    let prompt = Random(4).tokens(5 * BLOCK + 3, VOCABULARY);
    let beams = |width| {
        let (length_penalty, early_stopping) = (1.0, false);
        let branches = Branches::Beams { width, n: 1, length_penalty, early_stopping };
        let request = Request { fidelity: Fidelity::Evict, ..exact(prompt.clone(), 2 * BLOCK) };
        Request { branches, logprobs: None, ..request }
    };
    let mut server = Server::of(&model, engine_config(budget_of(&model, 16)));
    let refused = server.engine.submit(0, beams(60));
    let Err(Refusal::Branches { most, .. }) = refused else { panic!("{refused:?}") };
    assert!(most > 1);
    serve(&mut server, &[beams(most)]);
    server.assert_empty();
}

/// Rows 10 and 22: a generation that grows past what the pool holds at f16 goes on to its limit under every
/// contract that permits it, whoever is beside it, and says what was done.
#[test]
fn a_generation_past_the_pool_comes_to_its_end() {
    for model in [plain(), hybrid()] {
        let budget_bytes = budget_of(&model, 24);
        for fidelity in [Fidelity::Int8, Fidelity::Int4, Fidelity::Evict] {
            let mut server = Server::of(&model, crowded(budget_bytes));
            // All that fits at the floor; without limit where blocks may be dropped.
            let max_tokens = match server.engine.pool().token_limit(fidelity) {
                Some(tokens) => tokens - BLOCK,
                None => 2000,
            };
            assert!(max_tokens > 30 * BLOCK, "{fidelity:?}: {max_tokens}");
            let mut random = Random(2);
            let prompt = random.tokens(BLOCK, VOCABULARY);
            let growing = Request { fidelity, ..exact(prompt, max_tokens) };
            let neighbor = exact(random.tokens(BLOCK, VOCABULARY), 40);
            serve(&mut server, &[growing, neighbor.clone()]);
            let got = &server.outcomes[&0];
            assert_eq!(got.continuations[0].token_ids.len(), max_tokens, "{fidelity:?}");
            assert_eq!(got.continuations[0].finish_reason, FinishReason::Length);
            let relief = &got.usage.kv.relief;
            assert!(!relief.is_empty(), "{fidelity:?}");
            assert!(relief.iter().all(|entry| fidelity.permits(entry.rung) && entry.bytes > 0));
            let dropped = relief.iter().any(|entry| entry.rung == Rung::Evict);
            assert_eq!(dropped, fidelity == Fidelity::Evict);
            assert_eq!(got.usage.kv.dropped_tokens > 0.0, dropped);
            assert_same(&server.outcomes[&1], &alone(&model, &[neighbor])[0], "its neighbor");
            server.assert_empty();
        }
    }
}

/// Rows 2 and 8: of two that were swapped out and do not fit together, one comes back whole and runs to
/// its end, then the other; none waits half loaded for the rest.
#[test]
fn who_comes_back_comes_back_whole() {
    let model = plain();
    let requests = unique(&mut Random(3), 3, 2 * BLOCK, 10 * BLOCK);
    let expected = alone(&model, &requests);
    let mut server = Server::of(&model, crowded(budget_of(&model, 13))).with_good_spill();
    for (key, request) in requests.iter().enumerate() {
        let priority = i32::from(key == 0);
        server.submit(key as u64, &Request { priority, ..request.clone() });
    }
    server.until(|server| server.open == 2);
    assert_eq!((server.count(PauseKind::Swap), server.preemptions(0)), (2, 0), "both are out");
    server.finish();
    server.assert_exact(&expected, "swapped");
    server.assert_empty();
    let counters = server.engine.stats().counters;
    assert_eq!(counters.spilled_bytes, counters.loaded_bytes);
    // Each is thrown out by the first alone: the other's growth was reckoned with.
    assert!((1..3).all(|key| server.preemptions(key) == 1), "{counters:?}");
}

/// Row 5: who was preempted stays out until it can stay in: it is not let in beside those whose growth would
/// throw it out again.
#[test]
fn who_came_back_is_not_thrown_out_again() {
    let model = plain();
    for (seed, spill) in [(4, false), (5, true)] {
        // The three outgrow the pool when each has 4 blocks; the last leaves, the second ends soon after. What
        // is then free would do for the last but not beside what the first goes on to need.
        let mut random = Random(seed);
        let lengths = [12 * BLOCK - 20, 130, 204];
        let requests = lengths.map(|length| exact(random.tokens(20, VOCABULARY), length));
        let mut server = Server::of(&model, crowded(budget_of(&model, 14)));
        if spill {
            server = server.with_good_spill();
        }
        serve(&mut server, &requests);
        server.assert_exact(&alone(&model, &requests), &format!("seed {seed}"));
        let times: Vec<usize> = (0..3).map(|key| server.preemptions(key)).collect();
        assert_eq!(times, [0, 0, 1], "{:?}", server.pauses(2));
        server.assert_empty();
    }
}

/// Rows 4, 13, 19 and 23: a step that is short of memory is settled in one turn: nobody leaves whose leaving
/// gives nothing, no more leave than are needed, the others compute in that very step, and no turn passes
/// without a step or a change of memory.
#[test]
fn a_short_step_takes_no_more_than_it_needs_and_runs() {
    let model = plain();
    let mut paused = 0;
    for seed in 10..16 {
        let requests = unique(&mut Random(seed), 26, 20, 5 * BLOCK);
        let expected = alone(&model, &requests);
        let mut server = Server::of(&model, crowded(budget_of(&model, 60)));
        for (key, request) in requests.iter().enumerate() {
            server.submit(key as u64, request);
        }
        let block = block_bytes(&server.engine);
        while server.open > 0 {
            let free_before = server.engine.pool().accounts().free_bytes;
            let running = server.engine.stats().running;
            let (turn, steps) = (server.turns + 1, server.engine.stats().counters.steps);
            let progress = server.turn();
            assert_eq!(progress, Progress::Worked, "seed {seed} turn {turn}");
            let of_turn = server.told.iter().filter(|(at, _)| *at == turn);
            let left: Vec<_> = of_turn
                .filter_map(|(_, told)| match told.event {
                    Event::Paused(pause) if pause.kind == PauseKind::Recompute => Some(pause),
                    _ => None,
                })
                .collect();
            let Some(last) = left.last() else { continue };
            paused += left.len();
            assert!(left.iter().all(|pause| pause.bytes > 0 && pause.blocks > 0), "{left:?}");
            assert_eq!(server.engine.stats().counters.steps, steps + 1, "the others compute");
            // Decodes take a block each at most, besides what is fragmented and reserved.
            let others: usize = left.iter().map(|pause| pause.bytes).sum::<usize>() - last.bytes;
            assert!(free_before + others < (running + 2) * block, "{left:?}");
        }
        server.assert_exact(&expected, "26 at once");
        server.assert_empty();
    }
    assert!(paused >= 6, "{paused}");
}

/// Row 7: when the pressure is over, everybody computes in every step again.
#[test]
fn speed_comes_back_when_pressure_goes() {
    let model = plain();
    let mut random = Random(20);
    let steady = unique(&mut random, 2, BLOCK, 5 * BLOCK);
    let burst = unique(&mut random, 4, 3 * BLOCK, 40);
    for spill in [false, true] {
        let mut server = Server::of(&model, crowded(budget_of(&model, 12)));
        if spill {
            server = server.with_good_spill();
        }
        server.submit(0, &steady[0]);
        server.submit(1, &steady[1]);
        server.until(|server| server.tokens(1) == 4);
        for (key, request) in burst.iter().enumerate() {
            server.submit(10 + key as u64, &Request { priority: 1, ..request.clone() });
        }
        server.until(|server| server.open == 2);
        assert!(server.preemptions(0) + server.preemptions(1) > 0, "there was pressure");
        let tokens = |server: &Server| server.tokens(0) + server.tokens(1);
        let (since, before) = (server.engine.stats().counters.steps, tokens(&server));
        server.until(|server| server.engine.stats().counters.steps == since + 20);
        let resumed = tokens(&server);
        assert!(resumed > before, "{before} to {resumed} in 20 steps");
        server.until(|server| server.engine.stats().counters.steps == since + 40);
        assert_eq!(tokens(&server) - resumed, 40, "each step a token of each");
        server.finish();
        server.assert_exact(&alone(&model, &steady), "after pressure");
    }
}

/// Rows 8 and 16: no store, one that is too small for anybody, one that fits some and one that fits one
/// record exactly: what it does not take is computed again, all or nothing, and the engine never idles
/// because of it.
#[test]
fn a_small_store_is_the_next_rung() {
    let model = plain();
    let requests = unique(&mut Random(30), 6, 40, 4 * BLOCK);
    let expected = alone(&model, &requests);
    let mut kinds = [0; 3];
    for slots in [0, 1, 5, 7, 12, 100] {
        let mut server = Server::of(&model, crowded(budget_of(&model, 12)));
        if slots > 0 {
            server = server.with_spill(slots, 10, Box::new(|_| None));
        }
        for (key, request) in requests.iter().enumerate() {
            server.submit(key as u64, request);
        }
        let mut empty = 0;
        while server.open > 0 {
            let moved = |server: &Server| {
                let counters = server.engine.stats().counters;
                (counters.steps, counters.spilled_bytes, counters.loaded_bytes, server.open)
            };
            let before = moved(&server);
            // A turn that ends a step begins none.
            server.turn();
            server.turn();
            empty = if moved(&server) == before { empty + 1 } else { 0 };
            assert!(empty <= 1, "{slots} slots: {:?}", server.engine.stats());
            let spill = server.engine.stats().spill;
            assert!(spill.is_none_or(|spill| spill.used_bytes <= spill.capacity_bytes));
        }
        server.assert_exact(&expected, &format!("{slots} slots"));
        server.assert_empty();
        let counters = server.engine.stats().counters;
        assert_eq!(counters.spill_failures, 0);
        assert_eq!(counters.spilled_bytes > 0, slots >= 12, "{slots} slots: {counters:?}");
        for (sum, kind) in kinds.iter_mut().zip(PauseKind::ALL) {
            *sum += counters.pauses(kind);
        }
    }
    assert!(kinds[PauseKind::Swap as usize] > 0 && kinds[PauseKind::Recompute as usize] > 0);
}

/// Row 20: what leaves a window makes room before anybody is found too many: two long sequences share a pool
/// that holds their windows side by side and not their whole text.
#[test]
fn windows_give_back_before_anybody_waits() {
    let model = hybrid();
    let requests = unique(&mut Random(40), 2, 6 * BLOCK, 6 * BLOCK);
    let expected = alone(&model, &requests);
    let mut config = engine_config(0);
    config.budget_bytes = 2 * budget_of(&model, 12);
    config.scheduling.chunk_tokens = BLOCK;
    let mut server = Server::of(&model, config);
    let whole = 2 * 12 * block_bytes(&server.engine);
    assert!(server.engine.pool().config().budget_bytes < whole, "the windows are needed");
    serve(&mut server, &requests);
    server.assert_exact(&expected, "windows");
    assert!((0..2).all(|key| server.pauses(key).is_empty()), "{:?}", server.pauses(1));
    let end = |key: u64| server.events(key).count();
    let (first_end, mut seen) = (end(0), 0);
    let both = server.told.iter().any(|(_, told)| {
        seen += usize::from(told.request == 0);
        told.request == 1 && matches!(told.event, Event::Admitted { .. }) && seen < first_end
    });
    assert!(both, "they ran side by side");
    server.assert_empty();
}

/// Row 11: every form of cache gives way in every way there is: no form lacks a way, no way panics.
#[test]
fn every_form_gives_way_in_every_way() {
    let mut seen = [0u64; 5];
    for seed in 0..48_u64 {
        let model = if seed % 2 == 0 { plain() } else { hybrid() };
        let mut random = Random(100 + seed);
        let at_seal = [PageFormat::F16, PageFormat::Int8, PageFormat::Int4][random.below(3)];
        let mut config = crowded(budget_of(&model, 11));
        config.rules = Rules { format_at_seal: at_seal, ..Rules::default() };
        if random.below(2) == 0 {
            config.scheduling.admission = AdmissionPolicy::Reserve;
        }
        if random.below(2) == 0 {
            let kind = [IndexKind::Chain, IndexKind::Radix][random.below(2)];
            config = with_prefix(kind, config);
        }
        let mut server = Server::of(&model, config);
        if random.below(3) > 0 {
            server = server.with_spill(40, 300, Box::new(|_| None));
        }
        let contracts = Fidelity::ALL.into_iter().filter(|of| of.permits_format(at_seal));
        let contracts: Vec<Fidelity> = contracts.collect();
        for key in 0..10 {
            let length = 1 + random.below(3 * BLOCK);
            let mut request = exact(random.tokens(length, VOCABULARY), 1 + random.below(250));
            request.fidelity = contracts[random.below(contracts.len())];
            request.priority = random.below(3) as i32 - 1;
            server.submit(key, &request);
            (0..random.below(20)).for_each(|_| {
                server.turn();
            });
            if random.below(6) == 0 {
                server.end(random.below(10) as u64);
            }
        }
        server.finish();
        for outcome in server.outcomes.values() {
            let one = &outcome.continuations.first();
            let whole = |of: &reef_engine::event::Continuation| {
                of.finish_reason == FinishReason::Cancelled
                    || of.token_ids.len() == outcome.usage.max_tokens_limit
            };
            assert!(one.is_none_or(whole), "seed {seed}: {outcome:?}");
        }
        server.assert_empty();
        let counters = server.engine.stats().counters;
        let of_seed = [counters.encoded_blocks, counters.dropped_blocks];
        let pauses = PauseKind::ALL.map(|kind| counters.pauses(kind));
        seen.iter_mut().zip(pauses).for_each(|(sum, of)| *sum += of);
        seen[3..].iter_mut().zip(of_seed).for_each(|(sum, of)| *sum += of);
    }
    assert!(seen.iter().all(|times| *times >= 3), "{seen:?}");
}

/// Row 17: when whoever computes dies, in a panic or not, the handle says so at once and every stream hears
/// a last event; nobody hangs, whoever comes later is told too.
#[test]
fn a_dead_executor_is_told_to_everyone() {
    let model = plain();
    for (deed, at) in [(Deed::Die, 0), (Deed::Die, 9), (Deed::Panic, 0), (Deed::Panic, 9)] {
        let script = move |step| if step == at { deed } else { Deed::Deliver };
        let config = engine_config(budget_of(&model, 12));
        let engine = faulty_engine(model.plain_runner(), config, Box::new(script));
        let handle = EngineHandle::spawn(engine).unwrap();
        let start = Instant::now();
        let (ends, ended) = channel();
        let mut accepted = 0;
        for request in unique(&mut Random(50), 8, 50, 100) {
            let ends = ends.clone();
            let listener = Box::new(move |event| {
                if let Event::Failed(error) = event {
                    ends.send(error).unwrap();
                }
                true
            });
            accepted += usize::from(handle.submit(request, listener).is_ok());
        }
        drop(ends);
        for _ in 0..accepted {
            let error = ended.recv_timeout(Duration::from_secs(20)).expect("a last event");
            assert!(matches!(*error, EngineError::Executor(_)), "{error}");
        }
        while handle.is_alive() {
            assert!(start.elapsed() < Duration::from_secs(20));
            std::thread::yield_now();
        }
        let refused = handle.submit(exact(vec![1], 1), Box::new(|_| true));
        assert!(matches!(refused, Err(EngineError::Executor(_))), "{refused:?}");
        assert!(handle.stats().is_none());
    }
}

/// Row 17 again: what was handed over just before the end hears of it too.
#[test]
fn what_was_handed_over_as_the_engine_died_hears_of_it() {
    let model = plain();
    for _ in 0..40 {
        let script = |step| if step == 1 { Deed::Die } else { Deed::Deliver };
        let config = engine_config(budget_of(&model, 12));
        let engine = faulty_engine(model.plain_runner(), config, Box::new(script));
        let handle = EngineHandle::spawn(engine).unwrap();
        let (ends, ended) = channel();
        let mut accepted = 0;
        loop {
            let ends = ends.clone();
            let listener = Box::new(move |event| {
                if matches!(event, Event::Failed(_) | Event::Finished(_)) {
                    ends.send(()).unwrap();
                }
                true
            });
            match handle.submit(exact(vec![1, 2, 3], 5), listener) {
                Ok(_) => accepted += 1,
                Err(EngineError::Executor(_)) => break,
                Err(_) => std::thread::yield_now(),
            }
        }
        drop(ends);
        for number in 0..accepted {
            let heard = ended.recv_timeout(Duration::from_secs(20));
            assert!(heard.is_ok(), "{number} of {accepted} heard");
        }
    }
}
