//! The real model behind its handle: 64 requests in a quarter of the KV they need, and callers who leave.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

use reef_engine::{
    AdmissionPolicy, Engine, EngineConfig, EngineHandle, Event, FinishReason, Outcome, Request,
    Sampling,
};
use reef_kv::Fidelity;
use reef_kv::page::PageFormat;

use crate::generation::smollm2;
use crate::support::files::Likelihood;
use crate::support::random::Random;

const REQUESTS: usize = 64;
const PROMPT: usize = 24;
const GENERATED: usize = 96;

fn request(index: usize, ids: &[u32], fidelity: Fidelity) -> Request {
    let start = index * 11 % (ids.len() - PROMPT);
    let temperature = if index.is_multiple_of(2) { 0.0 } else { 0.7 };
    Request {
        max_tokens: Some(GENERATED),
        sampling: Sampling { temperature, seed: index as u64, ..Sampling::default() },
        ..Request::new(ids[start..start + PROMPT].to_vec(), fidelity)
    }
}

/// Bytes of all requests at f16, divided by four; and the reserve and partly filled spans.
fn quarter_bytes(bytes_per_token: f64) -> usize {
    let blocks = (PROMPT + GENERATED).div_ceil(32) * 32;
    ((REQUESTS * blocks) as f64 * bytes_per_token / 4.0) as usize + (1 << 20)
}

fn submit(handle: &EngineHandle, request: Request) -> (u64, Receiver<Event>) {
    let (sender, events) = channel();
    let listener = Box::new(move |event| sender.send(event).is_ok());
    (handle.submit(request, listener).unwrap(), events)
}

fn outcome(events: Receiver<Event>) -> Outcome {
    for event in events {
        match event {
            Event::Finished(outcome) => return *outcome,
            Event::Failed(error) => panic!("{error}"),
            _ => {}
        }
    }
    panic!("the stream ended without an end")
}

#[test]
fn sixty_four_requests_in_a_quarter_of_their_memory_all_end_and_exact_ones_are_exact() {
    let Some(runner) = smollm2(2) else { return };
    let ids = Likelihood::golden("smollm2").ids;
    let bytes = runner.spec().bytes_per_token(PageFormat::F16, 32);
    let mut config = EngineConfig::new(quarter_bytes(bytes));
    config.scheduling.admission = AdmissionPolicy::Utilize;
    let mut alone = Engine::new(smollm2(2).unwrap(), EngineConfig::new(64 << 20)).unwrap();
    let handle = EngineHandle::spawn(Engine::new(runner, config).unwrap()).unwrap();
    let contract = |index: usize| [Fidelity::Exact, Fidelity::Int8, Fidelity::Int4][index % 3];
    let streams: Vec<_> =
        (0..REQUESTS).map(|index| submit(&handle, request(index, &ids, contract(index)))).collect();
    let outcomes: Vec<Outcome> = streams.into_iter().map(|(_, events)| outcome(events)).collect();
    for (index, outcome) in outcomes.iter().enumerate() {
        let got = &outcome.continuations[0];
        assert_eq!(got.token_ids.len(), GENERATED, "request {index}");
        assert_eq!(got.finish_reason, FinishReason::Length);
        if contract(index) == Fidelity::Exact && index % 4 == 0 {
            let request = request(index, &ids, Fidelity::Exact);
            let mut go_on = |_| std::ops::ControlFlow::Continue(());
            let expected = alone.generate(&request, &mut go_on).unwrap().token_ids;
            assert_eq!(got.token_ids, expected, "request {index}");
        }
    }
    let stats = handle.stats().unwrap();
    assert_eq!((stats.running, stats.waiting, stats.counters.failed), (0, 0, 0));
    assert_eq!(stats.accounts.used_bytes(), stats.accounts.cached_bytes, "all given back");
    let counters = stats.counters;
    assert_eq!((counters.unplanned_shortages, counters.stalls), (0, 0), "{counters:?}");
    assert!(counters.encoded_blocks > 0, "{counters:?}");
}

/// Callers cancel, or just stop listening, at any time: what they held is given back.
#[test]
fn a_storm_of_aborts_leaves_nothing_behind() {
    let Some(runner) = smollm2(2) else { return };
    let ids = Likelihood::golden("smollm2").ids;
    let bytes = runner.spec().bytes_per_token(PageFormat::F16, 32);
    let config = EngineConfig::new(quarter_bytes(bytes));
    let handle = Arc::new(EngineHandle::spawn(Engine::new(runner, config).unwrap()).unwrap());
    let mut random = Random(3);
    let mut kept = Vec::new();
    for index in 0..2 * REQUESTS {
        let (key, events) = submit(&handle, request(index, &ids, Fidelity::Int4));
        match random.below(4) {
            0 => drop(events),
            1 => handle.end(key, FinishReason::Cancelled),
            2 => {
                let after = random.below(60);
                let handle = handle.clone();
                kept.push(std::thread::spawn(move || {
                    events.iter().take(after).for_each(drop);
                    handle.end(key, FinishReason::Cancelled);
                }));
            }
            _ => kept.push(std::thread::spawn(move || {
                assert_eq!(outcome(events).continuations[0].token_ids.len(), GENERATED);
            })),
        }
    }
    kept.into_iter().for_each(|thread| thread.join().unwrap());
    // Those whose listeners have gone end with their next event.
    let mut stats = handle.stats().unwrap();
    while stats.running + stats.waiting > 0 {
        std::thread::sleep(std::time::Duration::from_millis(20));
        stats = handle.stats().unwrap();
    }
    assert_eq!(stats.accounts.used_bytes(), stats.accounts.cached_bytes);
    assert!(handle.is_alive());
}
