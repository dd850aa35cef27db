//! Requests end at any moment, steps go wrong in any way: nothing is left behind, nobody else is harmed.

use std::collections::BTreeSet;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use reef_engine::constraint::{Constraint, TokenMask};
use reef_engine::event::PauseKind;
use reef_engine::{EngineHandle, FinishReason, Refusal, Request};
use reef_kv::prefix::IndexKind;

use super::*;

/// A scene in which requests are queued, prefill, decode, share, wait, are stored and loaded.
fn scene(model: &TinyModel, requests: &[Request]) -> Server {
    let mut config = with_prefix(IndexKind::Radix, crowded(budget_of(model, 11)));
    config.scheduling.max_running = 4;
    let script = |step: u64| Deed::Delay(step as usize % 2);
    let engine = faulty_engine(model.plain_runner(), config, Box::new(script));
    let mut server = Server::new(engine).with_spill(60, 700, Box::new(|_| None));
    for (key, request) in requests.iter().enumerate() {
        server.submit(key as u64, request);
    }
    server
}

/// Where a request is, as far as one can see from outside.
fn place(server: &Server, key: u64) -> &'static str {
    let mut place = "queued";
    for event in server.events(key) {
        place = match event {
            Event::Admitted { .. } => "prefill",
            Event::Token(_) | Event::Resumed { .. } => "decode",
            Event::Paused(pause) => pause.kind.name(),
            Event::Finished(_) => "ended",
            _ => place,
        };
    }
    place
}

/// Rows 107 and 110: ended in any turn, by its caller or by its deadline, at every state there is, a request
/// gives everything back, and the others are as if it had never been.
#[test]
fn ended_at_any_turn_nothing_is_left() {
    let model = plain();
    let mut random = Random(1);
    let mut requests = unique(&mut random, 5, 45, 150);
    requests[0].max_tokens = Some(190);
    requests[4].prompt = [&requests[1].prompt[..40], &random.tokens(30, VOCABULARY)].concat();
    let expected = alone(&model, &requests);
    let turns = {
        let mut server = scene(&model, &requests);
        server.finish();
        server.assert_exact(&expected, "undisturbed");
        server.turns
    };
    let mut places = BTreeSet::new();
    for at in (0..turns).step_by(7) {
        let key = (at / 7 % 5) as usize;
        let mut ending = requests.clone();
        let by_deadline = at % 3 == 0;
        if by_deadline {
            ending[key].deadline_us = Some(at * 1000);
        }
        let mut server = scene(&model, &ending);
        (0..at).for_each(|_| {
            server.turn();
        });
        places.insert(place(&server, key as u64));
        if !by_deadline {
            server.end(key as u64);
        }
        server.finish();
        for (other, want) in expected.iter().enumerate() {
            let got = &server.outcomes[&(other as u64)];
            if other != key {
                assert_same(got, want, &format!("{key} ended at turn {at}: {other}"));
                continue;
            }
            let reason = got.continuations[0].finish_reason;
            let allowed = [FinishReason::Length, FinishReason::Cancelled, FinishReason::Deadline];
            assert!(allowed.contains(&reason));
            let (got, want) = (&got.continuations[0].token_ids, &want.continuations[0].token_ids);
            assert_eq!(got[..], want[..got.len()], "what it had was right");
        }
        server.assert_empty();
    }
    for wanted in ["queued", "prefill", "decode", "swap", "ended"] {
        assert!(places.contains(wanted), "{places:?} lack {wanted}");
    }
}

/// Rows 22, 107 and 112: after a thousand requests (five hundred a model), half of them ended at some moment, what is free is what
/// was free, and the gauges are at zero.
#[test]
fn after_many_requests_all_is_free() {
    for model in [plain(), hybrid()] {
        let mut random = Random(2);
        let mut server = Server::of(&model, crowded(budget_of(&model, 16))).with_spill(
            100,
            400,
            Box::new(|operation| {
                (operation.number % 17 == 3).then_some(reef_engine::store::Fault::Broken)
            }),
        );
        let accounts = server.engine.pool().accounts();
        for key in 0..500 {
            let (prompt, generated) = (1 + random.below(70), 1 + random.below(30));
            let request = exact(random.tokens(prompt, VOCABULARY), generated);
            let priority = random.below(3) as i32 - 1;
            server.submit(key, &Request { priority, logprobs: None, ..request });
            (0..random.below(4)).for_each(|_| {
                server.turn();
            });
            if random.below(2) == 0 {
                server.end(key - random.below(8).min(key as usize) as u64);
            }
            server.told.clear();
        }
        server.finish();
        server.assert_empty();
        let after = server.engine.pool().accounts();
        assert_eq!((after.free_bytes, after.used_bytes()), (accounts.free_bytes, 0));
        assert_eq!(server.outcomes.len(), 500);
    }
}

/// Rows 13, 58 and 107: completions that come late, twice, in another order, for those who are gone, or never:
/// each token is computed and told once, and right; a key may be used again at once.
#[test]
fn completions_that_go_astray_change_nothing() {
    let mut lost = 0;
    for (model, seed) in [(plain(), 3), (hybrid(), 4), (plain(), 5), (hybrid(), 6)] {
        let requests = unique(&mut Random(seed), 8, 50, 60);
        let expected = alone(&model, &requests);
        let mut random = Random(seed);
        let script = move |_| match random.below(8) {
            0 => Deed::Lose,
            1 => Deed::LoseHalf,
            2 | 3 => Deed::Repeat,
            4 | 5 => Deed::Delay(random.below(4)),
            _ => Deed::Deliver,
        };
        let config = crowded(budget_of(&model, 16));
        let engine = faulty_engine(model.plain_runner(), config, Box::new(script));
        let mut server = Server::new(engine).with_good_spill();
        let mut random = Random(seed + 100);
        for (key, request) in requests.iter().enumerate() {
            let key = key as u64;
            server.submit(key, request);
            (0..random.below(9)).for_each(|_| {
                server.turn();
            });
            if random.below(3) == 0 {
                // The key is free at once, while the step of the one who had it may be in flight.
                server.end(key);
                server.told.retain(|(_, told)| told.request != key);
                server.submit(key, request);
                let again = server.engine.submit(key, request.clone());
                assert_eq!(again, Err(Refusal::DuplicateKey { key }));
            }
        }
        server.finish();
        server.assert_exact(&expected, &format!("seed {seed}"));
        for (key, request) in requests.iter().enumerate() {
            assert_eq!(Some(server.tokens(key as u64)), request.max_tokens, "each told once");
        }
        let counters = server.engine.stats().counters;
        assert!(counters.stale_completions > 0, "{counters:?}");
        lost += counters.lost_completions;
        server.assert_empty();
    }
    assert!(lost > 20, "{lost}");
}

/// Row 107 again: an executor that never answers holds nobody beyond the deadline, and what was in flight
/// comes back with its answer.
#[test]
fn a_step_that_does_not_end_holds_nobody_beyond_the_deadline() {
    let model = plain();
    let script = |step| if step == 5 { Deed::Delay(400) } else { Deed::Deliver };
    let config = engine_config(budget_of(&model, 10));
    let engine = faulty_engine(model.plain_runner(), config, Box::new(script));
    let mut server = Server::new(engine);
    let requests = unique(&mut Random(7), 2, 40, 50);
    server.submit(0, &Request { deadline_us: Some(100_000), ..requests[0].clone() });
    server.submit(1, &requests[1]);
    server.until(|server| server.outcomes.contains_key(&0));
    assert!((99..=101).contains(&server.turns), "{}", server.turns);
    assert_eq!(server.outcomes[&0].continuations[0].finish_reason, FinishReason::Deadline);
    server.finish();
    assert_same(&server.outcomes[&1], &alone(&model, &requests)[1], "the other");
    server.assert_empty();
}

/// Row 109: a client that stops listening, at its first token, in the middle or at the last, gives its blocks
/// back at once.
#[test]
fn a_client_that_leaves_gives_back_at_once() {
    let model = plain();
    let config = engine_config(budget_of(&model, 20));
    let handle = EngineHandle::spawn(Engine::new(model.plain_runner(), config).unwrap()).unwrap();
    let requests = unique(&mut Random(8), 12, 40, 100_000);
    for (index, request) in requests.into_iter().enumerate() {
        let leaves_after = [1, 2, 30, 64][index % 4];
        // The last one reaches its limit with the token at which the client leaves.
        let max_tokens = Some(if index % 4 == 3 { 64 } else { 90 });
        let (left, gone) = channel();
        let mut tokens = 0;
        let listener = Box::new(move |event| {
            tokens += usize::from(matches!(event, Event::Token(_)));
            if tokens == leaves_after && matches!(event, Event::Token(_)) {
                left.send(()).unwrap();
                return false;
            }
            true
        });
        handle.submit(Request { max_tokens, ..request }, listener).unwrap();
        gone.recv_timeout(Duration::from_secs(20)).expect("its tokens");
        // The engine ends it in the turn in which it heard; a look at it comes in the next.
        let start = Instant::now();
        let mut looks = 0;
        loop {
            let stats = handle.stats().unwrap();
            looks += 1;
            if stats.accounts.held_bytes() + stats.accounts.fenced_bytes == 0 {
                assert_eq!((stats.running, stats.waiting), (0, 0));
                break;
            }
            assert!(looks < 4 && start.elapsed() < Duration::from_secs(20), "{stats:?}");
        }
    }
}

/// Rows 82 and 109 for those who wait in the store: an end while pages are written or read frees the record.
#[test]
fn ended_in_the_store_the_record_is_free() {
    let model = plain();
    let mut random = Random(9);
    let first = Request { priority: 1, ..exact(random.tokens(BLOCK, VOCABULARY), 8 * BLOCK) };
    let second = exact(random.tokens(2 * BLOCK, VOCABULARY), 5 * BLOCK);
    let expected = alone(&model, std::slice::from_ref(&first));
    let mut seen = BTreeSet::new();
    for after in 0..60 {
        let mut server = Server::of(&model, crowded(budget_of(&model, 10)));
        server = server.with_spill(100, 3000, Box::new(|_| None));
        server.submit(0, &first);
        server.submit(1, &second);
        server.until(|server| server.count(PauseKind::Swap) > 0);
        let wait = if after < 40 { after } else { after * 12 };
        (0..wait).for_each(|_| {
            server.turn();
        });
        let counters = server.engine.stats().counters;
        seen.insert((counters.spilled_bytes > 0, counters.loaded_bytes > 0));
        server.end(1);
        assert_eq!(server.engine.stats().spill.unwrap().records, 0, "at once");
        server.finish();
        server.assert_exact(&expected, "the first");
        server.assert_empty();
    }
    assert!(seen.contains(&(false, false)) && seen.contains(&(true, false)), "{seen:?}");
}

/// Allows all for so many tokens, then can say no more.
#[derive(Clone, Debug)]
struct Breaking(usize);

impl Constraint for Breaking {
    fn allow(&mut self, mask: &mut TokenMask) {
        let left = if self.0 > 0 { VOCABULARY as u32 } else { 0 };
        (0..left).for_each(|id| mask.insert(id));
    }

    fn accept(&mut self, _: u32) {
        self.0 = self.0.saturating_sub(1);
    }

    fn is_complete(&self) -> bool {
        self.0 == 0
    }

    fn fault(&self) -> Option<String> {
        (self.0 == 0).then(|| "out of fuel".into())
    }

    fn clone_box(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}

/// A grammar that breaks in the middle is no end of the text: its request fails, the next is as ever.
#[test]
fn a_constraint_that_breaks_fails_its_request_and_no_other() {
    let model = plain();
    let requests = unique(&mut Random(4), 2, 40, 20);
    let expected = alone(&model, &requests);
    let mut engine = inline_engine(&model, engine_config(budget_of(&model, 6)));
    let mut run =
        |request: &Request| engine.run_to_end(request, &mut |_| ControlFlow::Continue(()));
    for tokens in [0, 1, 7] {
        let constraint: Option<Box<dyn Constraint>> = Some(Box::new(Breaking(tokens)));
        let error = run(&Request { constraint, ..requests[0].clone() }).unwrap_err();
        assert!(error.to_string().contains("out of fuel"), "{tokens}: {error}");
    }
    let lasting: Option<Box<dyn Constraint>> = Some(Box::new(Breaking(21)));
    let outcome = run(&Request { constraint: lasting, ..requests[0].clone() }).unwrap();
    assert_eq!(outcome.continuations[0].token_ids, expected[0].continuations[0].token_ids);
    let outcome = run(&requests[1]).unwrap();
    assert_eq!(outcome.continuations[0].token_ids, expected[1].continuations[0].token_ids);
}
