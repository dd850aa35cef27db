//! What the engine's totals say is what requests and their reports say.

use reef_engine::event::PauseReason;
use reef_kv::{ByFormat, Fidelity};

use super::*;

/// Requests of every contract that share no prefix, in a pool that holds a quarter of them; later one comes
/// that displaces others.
#[test]
fn totals_are_the_sums_of_what_requests_report() {
    let model = plain();
    let mut config = crowded(budget_of(&model, 12));
    let tenant = |name: &str| reef_engine::Tenant { name: name.into(), ..Default::default() };
    config.tenants = vec![tenant("first"), tenant("second"), tenant("idle")];
    let mut server = Server::of(&model, config).with_spill(24, 300, Box::new(|_| None));
    let contracts = [Fidelity::Exact, Fidelity::Evict, Fidelity::Exact, Fidelity::Int4];
    let mut random = Random(90);
    for (key, request) in unique(&mut random, 12, 3 * BLOCK, 4 * BLOCK).into_iter().enumerate() {
        let fidelity = contracts[key % contracts.len()];
        server.submit(key as u64, &Request { fidelity, tenant: key % 2, ..request });
    }
    let urgent = Request { priority: 1, ..unique(&mut random, 1, 6 * BLOCK, 3 * BLOCK).remove(0) };
    let mut shared_out = false;
    while server.open > 0 {
        server.turn();
        if server.turns == 60 {
            server.submit(12, &urgent);
        }
        let bytes = server.engine.tenant_bytes();
        assert_eq!(bytes.len(), 3);
        assert_eq!(bytes.iter().sum::<usize>(), server.engine.stats().accounts.held_bytes());
        assert_eq!(bytes[2], 0, "who has no request holds nothing");
        shared_out |= bytes[0] > 0 && bytes[1] > 0;
    }
    assert!(shared_out);
    let stats = server.engine.stats();
    let counters = stats.counters;
    let entries = || server.outcomes.values().flat_map(|outcome| &outcome.usage.kv.relief);
    for (rung, reason, sum) in counters.steps_down.iter() {
        let same = || entries().filter(|entry| entry.rung == rung && entry.reason == reason);
        let told: usize = same().map(|entry| entry.blocks).sum();
        let told_bytes: usize = same().map(|entry| entry.bytes).sum();
        assert_eq!(
            (sum.blocks, sum.bytes),
            (told as u64, told_bytes as u64),
            "{rung:?} {reason:?}"
        );
    }
    assert!(entries().count() > 0);
    let pauses: Vec<Pause> = (0..13).flat_map(|key| server.pauses(key)).collect();
    for (kind, reason) in
        PauseKind::ALL.iter().flat_map(|kind| PauseReason::ALL.map(|reason| (*kind, reason)))
    {
        let told = pauses.iter().filter(|of| of.kind == kind && of.reason == reason).count();
        assert_eq!(counters.pauses_for(kind, reason), told as u64, "{kind:?} {reason:?}");
    }
    assert!(!pauses.is_empty());
    let usages = || server.outcomes.values().map(|outcome| &outcome.usage.kv);
    let held = ByFormat::from_fn(|format| usages().map(|kv| kv.tokens_by_format[format]).sum());
    for (format, tokens) in held.iter() {
        let ended: f64 = stats.ended.by_format[format];
        assert!((ended - tokens).abs() < 1e-6, "{format:?}: {ended} {tokens}");
    }
    let dropped: f64 = usages().map(|kv| kv.dropped_tokens).sum();
    assert!((stats.ended.dropped - dropped).abs() < 1e-6 && dropped > 0.0);
    assert_eq!(stats.steps.rows.count(), counters.steps);
    assert_eq!(stats.steps.rows.sum, (counters.prefill_rows + counters.decode_rows) as f64);
}

/// Tokens of those who wait are those that are still to be computed.
#[test]
fn waiting_tokens_are_the_prompts_of_those_who_are_not_let_in() {
    let model = plain();
    let mut config = engine_config(budget_of(&model, 8));
    config.scheduling.max_running = 1;
    let mut server = Server::of(&model, config);
    for (key, request) in unique(&mut Random(91), 3, BLOCK, 8).iter().enumerate() {
        server.submit(key as u64, request);
    }
    assert_eq!(server.engine.waiting_tokens(), 3 * BLOCK);
    server.until(|server| server.was_admitted(0));
    assert_eq!(server.engine.waiting_tokens(), 2 * BLOCK);
    server.finish();
    assert_eq!(server.engine.waiting_tokens(), 0);
}
