//! Who goes first: priorities, tenants, shares; and that all of it is told and can be replayed.

use reef_engine::event::{PauseKind, PauseReason};
use reef_engine::{Request, Tenant};
use reef_kv::Fidelity;

use super::*;

/// Row 113: who matters more than all that run is in the next step, whether memory or places are full;
/// equals never displace each other.
#[test]
fn who_matters_more_runs_in_the_next_step() {
    let model = plain();
    for (places, blocks) in [(3, 40), (64, 12)] {
        let requests = unique(&mut Random(1), 5, 2 * BLOCK, 60);
        let expected = alone(&model, &requests);
        let mut config = engine_config(budget_of(&model, blocks));
        config.scheduling.max_running = places;
        let mut server = Server::of(&model, config);
        (0..4).for_each(|key| server.submit(key, &requests[key as usize]));
        server.until(|server| server.tokens(2) == 10);
        assert!(!server.was_admitted(3), "it is full");
        let steps = server.engine.stats().counters.steps;
        server.submit(4, &Request { priority: 1, ..requests[4].clone() });
        server.until(|server| server.was_admitted(4));
        assert!(server.engine.stats().counters.steps <= steps + 1, "within a step");
        server.until(|server| server.tokens(4) > 0);
        server.finish();
        server.assert_exact(&expected, "displaced");
        let displaced: Vec<usize> = (0..5).map(|key| server.preemptions(key)).collect();
        assert_eq!(displaced, [0, 0, 1, 0, 0], "the last that came, once");
        server.assert_empty();
    }
}

/// Row 113 again: a crowd of equals, in any number: nobody is ever displaced for another's sake.
#[test]
fn equals_never_displace_each_other() {
    let model = plain();
    for priority in [-1, 0, 3] {
        let mut requests = unique(&mut Random(2), 12, 50, 60);
        requests.iter_mut().for_each(|request| request.priority = priority);
        let mut server = Server::of(&model, engine_config(budget_of(&model, 12)));
        serve(&mut server, &requests);
        server.assert_exact(&alone(&model, &requests), "equals");
        assert!((0..12).all(|key| server.pauses(key).is_empty()));
        // In order of arrival.
        let mut order: Vec<(u64, u64)> = Vec::new();
        for (turn, told) in &server.told {
            if matches!(told.event, Event::Admitted { .. }) {
                order.push((*turn, told.request));
            }
        }
        assert!(order.is_sorted(), "{order:?}");
    }
}

/// Row 115: a tenant at its quota never holds more, gives way itself first, and keeps nobody else waiting.
#[test]
fn a_tenant_over_its_quota_gives_way_alone() {
    let model = plain();
    for fidelity in [Fidelity::Exact, Fidelity::Int8, Fidelity::Int4] {
        let budget_bytes = budget_of(&model, 24);
        let mut config = crowded(budget_bytes);
        let block = plain_block();
        let quota_bytes = 10 * block;
        let tenant = |name: &str, quota_bytes| Tenant {
            name: name.into(),
            quota_bytes,
            ..Tenant::default()
        };
        config.tenants = vec![tenant("flood", Some(quota_bytes)), tenant("other", None)];
        let mut server = Server::of(&model, config);
        let mut random = Random(3);
        let flood = unique(&mut random, 10, 40, 100);
        for (key, request) in flood.iter().enumerate() {
            server.submit(key as u64, &Request { fidelity, ..request.clone() });
        }
        // Without the quota the ten would fill the pool by now.
        server.until(|server| server.tokens(0) == 40);
        let held = |server: &Server| server.engine.pool().accounts().held_bytes();
        assert!(held(&server) <= quota_bytes + block, "{fidelity:?}: {}", held(&server));
        let other = exact(random.tokens(3 * BLOCK, VOCABULARY), 80);
        let steps = server.engine.stats().counters.steps;
        server.submit(99, &Request { tenant: 1, ..other.clone() });
        server.until(|server| server.was_admitted(99));
        assert!(server.engine.stats().counters.steps <= steps + 1, "it waits for nobody");
        while server.open > 0 {
            server.turn();
            if server.outcomes.contains_key(&99) {
                assert!(held(&server) <= quota_bytes + block, "{fidelity:?}: {}", held(&server));
            }
        }
        let got = &server.outcomes[&99];
        assert_same(got, &alone(&model, &[other])[0], "the other");
        assert!(server.pauses(99).is_empty() && got.usage.kv.relief.is_empty());
        let relieved = (0..10).any(|key| !server.outcomes[&key].usage.kv.relief.is_empty());
        assert_eq!(relieved, fidelity != Fidelity::Exact, "the flood degrades where it may");
        if fidelity == Fidelity::Exact {
            server.assert_exact(&alone(&model, &flood), "the flood");
        }
        server.assert_empty();
    }
}

/// A request without a limit of its own goes on until its tenant's quota is full, not the pool.
#[test]
fn a_quota_limits_who_names_no_limit() {
    let model = plain();
    let mut config = engine_config(budget_of(&model, 24));
    let quota_bytes = 10 * plain_block();
    config.tenants = vec![Tenant { quota_bytes: Some(quota_bytes), ..Tenant::default() }];
    let mut server = Server::of(&model, config);
    let prompt = Random(5).tokens(BLOCK, VOCABULARY);
    let request = Request { max_tokens: None, ..exact(prompt, 1) };
    serve(&mut server, std::slice::from_ref(&request));
    let outcome = &server.outcomes[&0];
    assert_eq!(outcome.continuations[0].token_ids.len(), 9 * BLOCK + 1, "the last takes no room");
    assert!(outcome.usage.kv.peak_bytes <= quota_bytes);
}

/// Bytes of a block of [`plain`] at f16.
fn plain_block() -> usize {
    block_bytes(&inline_engine(&plain(), engine_config(1 << 20)))
}

/// Row 115 for classes: batch work stays within its share, so that whoever comes finds room without
/// displacing anybody.
#[test]
fn batch_work_stays_within_its_share() {
    let model = plain();
    let mut config = crowded(budget_of(&model, 24));
    config.scheduling.batch_share = 0.5;
    let share_bytes = config.budget_bytes / 2;
    let mut server = Server::of(&model, config);
    let mut random = Random(4);
    let batch = unique(&mut random, 10, 40, 100);
    for (key, request) in batch.iter().enumerate() {
        server.submit(key as u64, &Request { priority: -1, ..request.clone() });
    }
    let block = block_bytes(&server.engine);
    let mut most = 0;
    while server.tokens(0) < 60 {
        server.turn();
        most = most.max(server.engine.pool().accounts().held_bytes());
        assert!(most <= share_bytes + block, "{most} of {share_bytes}");
    }
    assert!(most > share_bytes / 2, "it is used: {most} of {share_bytes}");
    let interactive = exact(random.tokens(3 * BLOCK, VOCABULARY), 40);
    server.submit(99, &interactive);
    server.until(|server| server.outcomes.contains_key(&99));
    let displaced = (0..10).flat_map(|key| server.pauses(key));
    assert!(displaced.into_iter().all(|pause| pause.reason != PauseReason::Priority));
    server.finish();
    server.assert_exact(&alone(&model, &batch), "batch");
    server.assert_empty();
}

/// Row 23: shares of compute follow weights while everybody has work, and never stop the engine, not with a
/// full pool either.
#[test]
fn compute_follows_weights_and_every_step_has_work() {
    let model = plain();
    let mut config = engine_config(budget_of(&model, 20));
    let tenant = |weight| Tenant { weight, ..Tenant::default() };
    config.tenants = vec![tenant(1.0), tenant(3.0)];
    let mut server = Server::of(&model, config);
    let requests = unique(&mut Random(5), 60, 64, 32);
    for (key, request) in requests.iter().enumerate() {
        server.submit(key as u64, &Request { tenant: key % 2, ..request.clone() });
    }
    // Until the one that gets more has nothing left that waits.
    while (0..30).any(|key| !server.was_admitted(2 * key + 1)) {
        assert_eq!(server.turn(), Progress::Worked);
    }
    let admitted = |of: u64| (0..30).filter(|key| server.was_admitted(2 * key + of)).count();
    let (light, heavy) = (admitted(0), admitted(1));
    assert!((8..=13).contains(&light) && heavy == 30, "{light} against {heavy}");
    server.finish();
    server.assert_exact(&alone(&model, &requests), "by weight");
}

/// Rows 116 and 119: each time somebody stands still, its request hears in that very turn how, why, how much
/// it gave and how much work is lost, and later that it goes on and after how long; totals agree.
#[test]
fn every_pause_is_told_with_its_price() {
    let model = plain();
    for spill in [false, true] {
        let requests = unique(&mut Random(6), 8, 40, 200);
        let mut server = Server::of(&model, crowded(budget_of(&model, 14)));
        if spill {
            server = server.with_spill(1000, 400_000, Box::new(|_| None));
        }
        serve(&mut server, &requests);
        let mut totals = [0; 3];
        let mut longest_us = 0;
        for key in 0..8 {
            let outcome = &server.outcomes[&key];
            assert_eq!(server.pauses(key), outcome.usage.pauses, "told and summed up alike");
            let (mut since, mut computed, mut recomputed) = (None, 0, 0);
            for (turn, told) in server.told.iter().filter(|(_, told)| told.request == key) {
                match &told.event {
                    Event::Step { tokens, .. } => {
                        assert_eq!(since, None, "it computes while it stands still");
                        computed = *tokens;
                    }
                    Event::Paused(pause) => {
                        since.get_or_insert(*turn);
                        totals[pause.kind as usize] += 1;
                        assert!(pause.blocks > 0);
                        let lost = if pause.kind == PauseKind::Recompute { computed } else { 0 };
                        assert_eq!(pause.lost_tokens, lost, "{pause:?}");
                        assert_eq!(pause.bytes > 0, pause.kind != PauseKind::Wait);
                        assert_eq!(pause.reason, PauseReason::Demand);
                    }
                    Event::Resumed { paused_us, recomputed_tokens, .. } => {
                        let turns = turn - since.take().expect("it stood still");
                        assert_eq!(*paused_us, turns * 1000);
                        longest_us = longest_us.max(*paused_us);
                        recomputed += recomputed_tokens;
                    }
                    _ => {}
                }
            }
            assert_eq!(since, None, "who ended went on before");
            assert_eq!(recomputed, outcome.usage.recomputed_tokens);
        }
        let counters = server.engine.stats().counters;
        assert_eq!(totals, PauseKind::ALL.map(|kind| counters.pauses(kind)));
        assert!(totals[if spill { 1 } else { 2 }] > 0, "{totals:?}");
        assert!(longest_us > if spill { 5_000_000 } else { 10_000 }, "{longest_us}");
    }
}

/// Row 124: the same requests at the same times give the same events, whatever happens in between: what is
/// simulated is what is served.
#[test]
fn the_same_inputs_give_the_same_events() {
    let run = |seed: u64| {
        let model = hybrid();
        let config = with_prefix(IndexKind::Radix, crowded(budget_of(&model, 16)));
        let mut random = Random(seed);
        let script = move |_| Deed::Delay(random.below(3));
        let engine = faulty_engine(model.plain_runner(), config, Box::new(script));
        let mut server = Server::new(engine).with_spill(60, 700, Box::new(|_| None));
        let mut random = Random(seed);
        for (key, request) in unique(&mut random, 10, 50, 200).iter().enumerate() {
            let fidelity = Fidelity::ALL[random.below(4)];
            let priority = random.below(2) as i32;
            server.submit(key as u64, &Request { fidelity, priority, ..request.clone() });
            (0..random.below(9)).for_each(|_| {
                server.turn();
            });
        }
        server.finish();
        let log: Vec<String> = server.told.iter().map(|told| format!("{told:?}")).collect();
        (log, server.engine.stats())
    };
    for seed in 7..10 {
        let (log, stats) = run(seed);
        let (again, stats_again) = run(seed);
        assert_eq!(log.len(), again.len());
        for (event, same) in log.iter().zip(&again) {
            assert_eq!(event, same, "seed {seed}");
        }
        assert_eq!(stats, stats_again);
        assert!(PauseKind::ALL.iter().any(|kind| stats.counters.pauses(*kind) > 0), "{stats:?}");
    }
}
