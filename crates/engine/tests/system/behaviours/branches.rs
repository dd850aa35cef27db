//! Branches, beams and drafts: what is shared is held once, what is rejected leaves nothing.

use std::sync::{Arc, Mutex};

use reef_engine::request::Branches;
use reef_engine::speculate::{Drafter, Ngram, RunKey};
use reef_engine::{FinishReason, Refusal, Request, Sampling};
use reef_kv::prefix::IndexKind;

use super::*;

fn beams(width: usize) -> Branches {
    Branches::Beams { width, n: width, length_penalty: 1.0, early_stopping: false }
}

/// Row 73: branches count when a request is let in: what they cannot hold together is refused with numbers,
/// what they can is served; full blocks of the prompt are held once, the open one is copied.
#[test]
fn branches_count_and_share() {
    let model = plain();
    let prompt = Random(1).tokens(4 * BLOCK + 10, VOCABULARY);
    let sampling = Sampling { temperature: 0.9, seed: 3, ..Sampling::default() };
    for branches in [beams(4), Branches::Sample { n: 4, best_of: 4 }] {
        let sampling = sampling.clone();
        let request = Request { branches, sampling, logprobs: None, ..exact(prompt.clone(), 40) };
        let one = Request { branches: Branches::One, ..request.clone() };
        // One fits easily, four do not: 6 blocks of the first, 3 of each other at the end.
        let mut server = Server::of(&model, engine_config(budget_of(&model, 8)));
        let refused = server.engine.submit(0, request.clone());
        assert!(
            matches!(refused, Err(Refusal::Branches { branches: 4, most: 1, .. })),
            "{refused:?}"
        );
        serve(&mut server, &[one]);
        let mut server = Server::of(&model, engine_config(budget_of(&model, 19)));
        let block = block_bytes(&server.engine);
        server.submit(0, &request);
        let mut most = 0;
        while server.open > 0 {
            server.turn();
            most = most.max(server.engine.pool().accounts().held_bytes() / block);
        }
        // 4 shared, and of each branch at most the tail of the prompt and what it generated.
        let least = if branches == beams(4) { 6 } else { 11 };
        assert!((least..=4 + 2 * 4).contains(&most), "{branches:?}: {most} blocks");
        assert_same(&server.outcomes[&0], &alone(&model, &[request])[0], "in a small pool");
        server.assert_empty();
    }
}

/// Rows 13 and 25 for branches: beams and samples that are preempted among others give what they give
/// alone.
#[test]
fn branches_give_way_and_change_nothing() {
    let model = plain();
    let mut preempted = 0;
    for seed in 2..8 {
        let mut random = Random(seed);
        let sampling = Sampling { temperature: 0.9, seed, ..Sampling::default() };
        let mut requests = unique(&mut random, 5, 40, 120);
        requests[1] = Request {
            branches: Branches::Sample { n: 2, best_of: 3 },
            sampling: sampling.clone(),
            ..requests[1].clone()
        };
        requests[3] = Request { branches: beams(3), logprobs: None, ..requests[3].clone() };
        requests[4] = Request { sampling, ..requests[4].clone() };
        let expected = alone(&model, &requests);
        let mut server = Server::of(&model, crowded(budget_of(&model, 17)));
        if seed % 2 == 0 {
            server = server.with_good_spill();
        }
        serve(&mut server, &requests);
        server.assert_exact(&expected, &format!("seed {seed}"));
        preempted += server.preemptions(1) + server.preemptions(3);
        server.assert_empty();
    }
    assert!(preempted > 2, "{preempted}");
}

/// Drafts that are never (or, with the text known, sometimes) right.
#[derive(Clone)]
struct Stubborn {
    /// The text that comes, where drafts are to be right now and then.
    text: Arc<Vec<u32>>,
    random: Arc<Mutex<Random>>,
    right: usize,
}

impl Drafter for Stubborn {
    fn draft(&mut self, _: RunKey, tokens: &[u32], most: usize, out: &mut Vec<u32>) {
        out.clear();
        let mut random = self.random.lock().unwrap();
        for place in tokens.len()..tokens.len() + most {
            let next = self.text.get(place).copied().unwrap_or(0);
            let right = random.below(10) < self.right;
            out.push(if right { next } else { (next + 1) % VOCABULARY as u32 });
        }
    }

    fn forget(&mut self, _: RunKey) {}
}

/// Row 74: rejected drafts, at every place of a block and over its end, leave no page and no token behind.
#[test]
fn rejected_drafts_leave_nothing() {
    for (model, right) in [(plain(), 0), (plain(), 6), (hybrid(), 6), (plain(), 10)] {
        let request = exact(Random(9).tokens(BLOCK - 3, VOCABULARY), 4 * BLOCK);
        let expected = alone(&model, std::slice::from_ref(&request));
        let text = [&request.prompt[..], &expected[0].continuations[0].token_ids].concat();
        let drafter =
            Stubborn { text: Arc::new(text), random: Arc::new(Mutex::new(Random(1))), right };
        let mut server = Server::of(&model, engine_config(budget_of(&model, 10)));
        server.engine.set_drafter(Box::new(drafter), 0.0);
        server.submit(0, &request);
        let blocks: Vec<usize> = server
            .engine
            .pool()
            .config()
            .groups
            .iter()
            .filter(|group| group.window.is_none())
            .map(|group| group.block_bytes(PageFormat::F16))
            .collect();
        while server.open > 0 {
            server.turn();
            let Some((turn, Told { event: Event::Step { tokens, .. }, .. })) =
                server.told.iter().rev().find(|(_, told)| matches!(told.event, Event::Step { .. }))
            else {
                continue;
            };
            if *turn == server.turns && server.open > 0 && model.tiny.architecture == "llama" {
                let held = server.engine.pool().accounts().held_bytes();
                assert_eq!(held, tokens.div_ceil(BLOCK) * blocks[0], "after {tokens} tokens");
            }
        }
        server.assert_exact(&expected, &format!("{right} of 10 right"));
        let (tried, accepted) = server.outcomes[&0].usage.drafts;
        assert!(tried > 10 && accepted < tried || right == 10, "{accepted} of {tried}");
        assert_eq!(accepted > 0, right > 0, "{accepted} of {tried}");
        server.assert_empty();
    }
}

/// Row 77: with and without drafts, with and without the prefix cache, under pressure or not: the same.
#[test]
fn drafts_and_prefixes_change_nothing_together() {
    for model in [plain(), hybrid()] {
        let mut random = Random(10);
        // Texts that repeat themselves, so that n-grams find something.
        let pattern = random.tokens(9, VOCABULARY);
        let requests: Vec<Request> = (0..6)
            .map(|index| {
                let mut prompt: Vec<u32> = pattern.iter().copied().cycle().take(70).collect();
                prompt.push(index);
                let temperature = if index % 2 == 0 { 0.0 } else { 0.6 };
                let seed = u64::from(index);
                let sampling = Sampling { temperature, seed, ..Sampling::default() };
                Request { sampling, ..exact(prompt, 90) }
            })
            .collect();
        let expected = alone(&model, &requests);
        let mut tried = 0;
        for (cached, drafts, blocks) in
            (0..8).map(|bits| (bits & 1 > 0, bits & 2 > 0, if bits & 4 > 0 { 16 } else { 60 }))
        {
            let mut config = crowded(budget_of(&model, blocks));
            if cached {
                config = with_prefix(IndexKind::Radix, config);
            }
            let mut server = Server::of(&model, config);
            if drafts {
                server.engine.set_drafter(Box::new(Ngram::new(1, 4)), 0.0);
            }
            serve(&mut server, &requests);
            server.assert_exact(&expected, &format!("cache {cached} drafts {drafts} {blocks}"));
            let counters = server.engine.stats().counters;
            assert_eq!(counters.cached_tokens > 0, cached, "{} {blocks}", model.tiny.architecture);
            assert_eq!(counters.drafts.0 > 0, drafts);
            tried += counters.drafts.0;
            server.assert_empty();
        }
        assert!(tried > 20, "{tried}");
    }
}

/// Row 14: a drafter whose own memory is short drafts less and changes nothing: the engine never waits for
/// its pool.
#[test]
fn a_drafter_that_runs_dry_costs_drafts_only() {
    /// Has room for so many tokens of all runs.
    struct Dry {
        inner: Ngram,
        room: usize,
    }
    impl Drafter for Dry {
        fn draft(&mut self, run: RunKey, tokens: &[u32], most: usize, out: &mut Vec<u32>) {
            out.clear();
            if tokens.len() <= self.room {
                self.inner.draft(run, tokens, most, out);
            }
        }
        fn forget(&mut self, run: RunKey) {
            self.inner.forget(run);
        }
    }
    let model = plain();
    let requests = unique(&mut Random(11), 4, 30, 150);
    let expected = alone(&model, &requests);
    let mut tried = Vec::new();
    for room in [0, 60, 1000] {
        let mut server = Server::of(&model, crowded(budget_of(&model, 14)));
        server.engine.set_drafter(Box::new(Dry { inner: Ngram::new(1, 3), room }), 0.0);
        serve(&mut server, &requests);
        server.assert_exact(&expected, &format!("room for {room}"));
        tried.push(server.engine.stats().counters.drafts.0);
        server.assert_empty();
    }
    assert!(tried[0] == 0 && tried[0] < tried[1] && tried[1] < tried[2], "{tried:?}");
}

/// A continuation that a stop string has ended gives its memory back at once; the others go on as they would
/// have, and who is asked for twice, or does not exist, is nobody's concern.
#[test]
fn a_branch_that_is_ended_leaves_the_others_as_they_are() {
    let model = plain();
    let sampling = Sampling { temperature: 0.9, seed: 5, ..Sampling::default() };
    let branches = Branches::Sample { n: 3, best_of: 3 };
    let prompt = Random(6).tokens(BLOCK + 5, VOCABULARY);
    let request = Request { branches, sampling, ..exact(prompt, 60) };
    let expected = alone(&model, std::slice::from_ref(&request)).remove(0);
    let mut server = Server::of(&model, engine_config(budget_of(&model, 30)));
    server.submit(0, &request);
    server.engine.end_branch(0, 0, FinishReason::Stop); // not begun: ignored
    server.until(|server| server.tokens(0) >= 3 * 20);
    let held = server.engine.pool().accounts().held_bytes();
    for (key, branch) in [(0, 1), (0, 1), (0, 9), (7, 0)] {
        server.engine.end_branch(key, branch, FinishReason::Stop);
    }
    server.turn();
    server.turn();
    assert!(server.engine.pool().accounts().held_bytes() < held);
    server.finish();
    let given = &server.outcomes[&0].continuations;
    assert_eq!(given.len(), 3);
    for (index, want) in expected.continuations.iter().enumerate() {
        let got = &given[index];
        if index == 1 {
            assert_eq!(got.finish_reason, FinishReason::Stop);
            assert!((20..60).contains(&got.token_ids.len()), "{}", got.token_ids.len());
            assert_eq!(got.token_ids[..], want.token_ids[..got.token_ids.len()]);
        } else {
            assert_eq!(got.token_ids, want.token_ids, "continuation {index}");
        }
    }
    server.assert_empty();
}

/// Each continuation's end is told in the turn of its last token, with nothing between them; the last one's is
/// the request's.
#[test]
fn each_end_is_told_when_it_happens() {
    let model = plain();
    let (mut last_tokens, mut early) = (0, 0);
    for seed in 0..8 {
        let sampling = Sampling { temperature: 0.9, seed, ..Sampling::default() };
        let branches = Branches::Sample { n: 4, best_of: 4 };
        let end_ids = if seed % 2 == 0 { Vec::new() } else { (0..16).collect() };
        let prompt = Random(seed).tokens(BLOCK, VOCABULARY);
        let request = Request { branches, sampling, end_ids, ..exact(prompt, 24) };
        let mut server = Server::of(&model, engine_config(8 << 20));
        serve(&mut server, &[request]);
        let (mut over, mut ending) = (Vec::new(), None);
        for (turn, Told { event, .. }) in &server.told {
            if let Some((branch, of)) = ending.take() {
                assert_eq!(turn, of, "{event:?}");
                match event {
                    Event::Ended { branch: ended, .. } => assert_eq!(*ended, branch),
                    event => assert!(matches!(event, Event::Finished(_)), "{event:?}"),
                }
                last_tokens += 1;
            }
            match event {
                Event::Token(token) => {
                    assert!(over.iter().all(|(branch, _)| *branch != token.branch));
                    ending = token.is_last.then_some((token.branch, turn));
                }
                Event::Ended { branch, reason } => over.push((*branch, *reason)),
                Event::Finished(outcome) => {
                    let reasons = outcome.continuations.iter().map(|one| one.finish_reason);
                    let reasons: Vec<FinishReason> = reasons.collect();
                    assert!(over.iter().all(|(at, reason)| reasons[*at as usize] == *reason));
                }
                _ => {}
            }
        }
        assert_eq!(over.len(), 3, "{over:?}");
        early += over.iter().filter(|(_, reason)| *reason == FinishReason::Stop).count();
    }
    assert!(last_tokens >= 16 && early > 3, "{last_tokens} {early}");
}
