//! Standing still and going on: nothing of what comes out changes, and nobody stands still for ever.

use reef_engine::constraint::{Constraint, TokenMask};
use reef_engine::event::{PauseKind, PauseReason};
use reef_engine::{Event, FinishReason, Refusal, Request, Sampling, Tenant};
use reef_kv::prefix::IndexKind;

use super::*;

/// Tokens of one class modulo 3, another after each token.
#[derive(Clone, Debug)]
struct Turning(u32);

impl Constraint for Turning {
    fn allow(&mut self, mask: &mut TokenMask) {
        (0..VOCABULARY as u32).filter(|id| id % 3 == self.0 % 3).for_each(|id| mask.insert(id));
    }

    fn accept(&mut self, token: u32) {
        assert_eq!(token % 3, self.0 % 3, "a token that was not allowed");
        self.0 += 1 + token / 7;
    }

    fn clone_box(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}

/// Requests whose next token depends on all there is to a request's state: random numbers, penalties over
/// prompt and output, a grammar, a least length.
fn stateful(random: &mut Random, prompt: usize, generated: usize) -> Vec<Request> {
    let greedy = Sampling::default();
    let warm =
        Sampling { temperature: 0.9, seed: 5, top_p: 0.95, min_p: 0.01, ..Sampling::default() };
    let penalties = Sampling {
        repetition_penalty: 1.3,
        presence_penalty: 0.4,
        frequency_penalty: 0.3,
        min_tokens: generated - 1,
        ..warm.clone()
    };
    let constraint: Option<Box<dyn Constraint>> = Some(Box::new(Turning(1)));
    let mut request = |sampling: Sampling, constraint| Request {
        logprobs: Some(5),
        end_ids: random.tokens(4, VOCABULARY),
        sampling: Sampling { min_tokens: generated - 1, ..sampling },
        constraint,
        ..exact(random.tokens(prompt, VOCABULARY), generated)
    };
    vec![
        request(greedy, None),
        request(warm.clone(), None),
        request(penalties, None),
        request(warm, constraint),
    ]
}

/// Rows 25, 26 and 34: thrown away at every token of its output, once and twice, a request gives the tokens
/// and log-probabilities (one a token) that it gives alone, with and without the prefix cache.
#[test]
fn thrown_away_at_every_token_nothing_changes() {
    let model = plain();
    let requests = stateful(&mut Random(1), 40, 32);
    let expected = alone(&model, &requests);
    for (index, request) in requests.iter().enumerate() {
        for at in 1..32 {
            let mut config = engine_config(budget_of(&model, 10));
            if at % 3 == 0 {
                let kind = [IndexKind::Chain, IndexKind::Radix][at % 2];
                config = with_prefix(kind, config);
            }
            config.scheduling.max_running = 1;
            let mut server = Server::of(&model, config);
            server.submit(0, request);
            for (key, tokens) in [(1, at), (2, at + 3)] {
                server.until(|server| server.tokens(0) >= tokens || server.open == 0);
                let higher = Request { priority: 1, ..exact(vec![key as u32, 9], 2) };
                server.submit(key, &higher);
            }
            server.finish();
            let what = format!("request {index}, thrown away at token {at}");
            assert_same(&server.outcomes[&0], &expected[index], &what);
            let pauses = server.pauses(0);
            assert_eq!(pauses.len(), if at + 3 < 32 { 2 } else { 1 }, "{what}: {pauses:?}");
            let reason = |pause: &Pause| (pause.kind, pause.reason);
            let wanted = (PauseKind::Recompute, PauseReason::Priority);
            assert!(pauses.iter().all(|pause| reason(pause) == wanted), "{what}: {pauses:?}");
            let logprobs = server.outcomes[&0].continuations[0].logprobs.len();
            assert_eq!(logprobs, server.outcomes[&0].continuations[0].token_ids.len());
            server.assert_empty();
        }
    }
}

/// Rows 34, 35 and 76: swapped out at every place in a block, a request computes nothing twice and goes on
/// as if nothing had been: its pages are back byte for byte, those with data and no others.
#[test]
fn swapped_at_every_place_in_a_block_nothing_is_computed_twice() {
    let model = plain();
    let mut random = Random(2);
    let winner = exact(random.tokens(BLOCK, VOCABULARY), 8 * BLOCK);
    for length in 1..=2 * BLOCK {
        let index = length % 4;
        let loser = stateful(&mut random, length, 7 * BLOCK).swap_remove(index);
        let expected = alone(&model, &[winner.clone(), loser.clone()]);
        let mut server = Server::of(&model, crowded(budget_of(&model, 10))).with_good_spill();
        server.submit(0, &Request { priority: 1, ..winner.clone() });
        server.submit(1, &loser);
        server.finish();
        server.assert_exact(&expected, &format!("prompt of {length}"));
        let pauses = server.pauses(1);
        assert!(pauses.iter().any(|pause| pause.kind == PauseKind::Swap), "{length}: {pauses:?}");
        let outcome = &server.outcomes[&1];
        assert_eq!(outcome.usage.recomputed_tokens, 0, "{length}");
        let counters = server.engine.stats().counters;
        let lengths = [&winner, &loser].map(|request| request.prompt.len());
        assert_eq!(counters.prefill_rows + counters.decode_rows, {
            // The last token of a full length is not computed; before an end token all are.
            let computed = expected.iter().map(|of| {
                let one = &of.continuations[0];
                one.token_ids.len() - usize::from(one.finish_reason == FinishReason::Length)
            });
            (lengths.iter().sum::<usize>() + computed.sum::<usize>()) as u64
        });
        // What is moved is what it held for the tokens computed: whole blocks of them.
        let block = block_bytes(&server.engine);
        let computed: usize = swaps(&server).map(|tokens| tokens.div_ceil(BLOCK) * block).sum();
        assert_eq!(counters.spilled_bytes, computed as u64, "{length}");
        assert_eq!(counters.loaded_bytes, counters.spilled_bytes);
        server.assert_empty();
    }
}

/// Tokens that request 1 had computed at each of its swaps.
fn swaps(server: &Server) -> impl Iterator<Item = usize> {
    let mut computed = 0;
    let mut at_swaps = Vec::new();
    for event in server.events(1) {
        match event {
            Event::Step { tokens, .. } => computed = *tokens,
            Event::Paused(pause) if pause.kind == PauseKind::Swap => at_swaps.push(computed),
            _ => {}
        }
    }
    at_swaps.into_iter()
}

/// Row 29: what the prefix cache gave is counted once, at first admission, and is never more than the
/// prompt, however often the request comes back.
#[test]
fn cached_tokens_are_counted_once() {
    let model = plain();
    for kind in [IndexKind::Chain, IndexKind::Radix] {
        let mut random = Random(3);
        let prompt = random.tokens(3 * BLOCK + 5, VOCABULARY);
        let mut config = with_prefix(kind, engine_config(budget_of(&model, 16)));
        config.scheduling.max_running = 1;
        let mut server = Server::of(&model, config);
        serve(&mut server, &[exact(prompt.clone(), 2)]);
        server.submit(1, &exact(prompt.clone(), 3 * BLOCK));
        for key in 2..5 {
            let tokens = 30 * (key as usize - 1);
            server.until(|server| server.tokens(1) == tokens);
            server.submit(key, &Request { priority: 1, ..exact(vec![key as u32], 2) });
        }
        server.finish();
        assert_eq!(server.preemptions(1), 3);
        let usage = &server.outcomes[&1].usage;
        assert_eq!((usage.prompt_tokens, usage.cached_tokens), (prompt.len(), 3 * BLOCK));
        assert_eq!(server.cached_tokens(1), Some(3 * BLOCK));
        // What it had made itself was found again too: at most an open block is computed twice each time.
        assert!(usage.recomputed_tokens <= 3 * BLOCK, "{usage:?}");
    }
}

/// Row 31: a queue that is full turns away who is new, never who was preempted.
#[test]
fn a_full_queue_refuses_newcomers_only() {
    let model = plain();
    let mut random = Random(4);
    let requests = unique(&mut random, 3, BLOCK, 60);
    let mut config = engine_config(budget_of(&model, 10));
    config.scheduling.max_running = 1;
    config.scheduling.max_waiting = 1;
    let mut server = Server::of(&model, config);
    server.submit(0, &requests[0]);
    server.until(|server| server.tokens(0) == 10);
    server.submit(1, &Request { priority: 1, ..requests[1].clone() });
    server.until(|server| server.preemptions(0) == 1);
    server.submit(2, &requests[2]);
    let refused = server.engine.submit(3, requests[2].clone());
    assert_eq!(refused, Err(Refusal::QueueFull { waiting: 1, most: 1 }));
    server.finish();
    server.assert_exact(&alone(&model, &requests), "with a queue of one");
}

/// Row 32: who was preempted goes on before newcomers of its priority begin, though they came before it
/// was, and finds what it had computed.
#[test]
fn preempted_work_goes_on_before_newcomers() {
    let model = plain();
    let requests = unique(&mut Random(5), 6, 2 * BLOCK, 50);
    let mut config = with_prefix(IndexKind::Chain, engine_config(budget_of(&model, 10)));
    config.scheduling.max_running = 1;
    config.tenants = vec![Tenant::default(), Tenant::default()];
    let mut server = Server::of(&model, config);
    server.submit(0, &requests[0]);
    server.until(|server| server.tokens(0) == 20);
    // Of somebody whose turn it would be.
    (2..6).for_each(|key| {
        server.submit(key, &Request { tenant: 1, ..requests[key as usize].clone() });
    });
    server.submit(1, &Request { priority: 1, ..requests[1].clone() });
    server.until(|server| server.outcomes.contains_key(&0));
    assert_eq!(server.preemptions(0), 1);
    assert!((2..6).all(|key| !server.was_admitted(key)), "nobody passed it");
    let usage = &server.outcomes[&0].usage;
    assert!(usage.recomputed_tokens < BLOCK, "its blocks were still there: {usage:?}");
    server.finish();
    server.assert_exact(&alone(&model, &requests), "in turn");
}

/// Rows 32 and 34: however many of higher priority come, a request is thrown out three times at most; then
/// it comes to its end.
#[test]
fn who_was_thrown_out_three_times_stays() {
    let model = plain();
    let victim = exact(Random(6).tokens(BLOCK, VOCABULARY), 100);
    let mut config = engine_config(budget_of(&model, 10));
    config.scheduling.max_running = 1;
    let mut server = Server::of(&model, config);
    server.submit(0, &victim);
    let (mut key, mut tokens) = (0, 0);
    while !server.outcomes.contains_key(&0) {
        // Another one each time that it has got on.
        if server.tokens(0) > tokens {
            tokens = server.tokens(0);
            key += 1;
            server.submit(key, &Request { priority: 9, ..exact(vec![1, 2], 4) });
        }
        server.turn();
        assert!(server.turns < 5000, "starved: {:?}", server.pauses(0));
    }
    assert_eq!(server.preemptions(0), 3);
    assert_same(&server.outcomes[&0], &alone(&model, &[victim])[0], "after three times");
}

/// Row 34 again, without priorities: memory alone throws nobody out without bound, and who came first ends
/// first.
#[test]
fn demand_throws_nobody_out_without_bound() {
    let model = plain();
    for seed in 60..68 {
        let requests = unique(&mut Random(seed), 8, BLOCK, 6 * BLOCK);
        let mut server = Server::of(&model, crowded(budget_of(&model, 14)));
        if seed % 2 == 0 {
            server = server.with_good_spill();
        }
        serve(&mut server, &requests);
        server.assert_exact(&alone(&model, &requests), &format!("seed {seed}"));
        for key in 0..8 {
            assert!(server.preemptions(key) <= 3, "seed {seed}: {:?}", server.pauses(key));
        }
        let total: usize = (0..8).map(|key| server.preemptions(key)).sum();
        assert!(total > 0, "seed {seed}");
        server.assert_empty();
    }
}
