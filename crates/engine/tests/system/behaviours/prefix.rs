//! Prefixes that were computed before: found when they are there, never when they are others'.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use reef_engine::session::Rules;
use reef_engine::{PrefixListener, Request, Sampling, Tenant};
use reef_kv::Fidelity;
use reef_kv::page::PageFormat;
use reef_kv::prefix::{BlockHash, IndexKind, PrefixEvent, PrefixIdentity};

use super::*;

const KINDS: [IndexKind; 2] = [IndexKind::Chain, IndexKind::Radix];

fn prefilled(server: &Server) -> u64 {
    server.engine.stats().counters.prefill_rows
}

/// Rows 61 and 80: the same prompt again is found but for its last block, and of a chat that grows turn by
/// turn only what is new (and one block) is computed; with windows too; the output is that of a cold run.
#[test]
fn what_was_computed_is_found() {
    for (model, kind) in [(plain(), KINDS[0]), (hybrid(), KINDS[0]), (hybrid(), KINDS[1])] {
        let mut random = Random(1);
        let mut config = with_prefix(kind, engine_config(2 << 20));
        config.scheduling.chunk_tokens = BLOCK;
        let mut server = Server::of(&model, config);
        let mut text = random.tokens(4 * BLOCK + 7, VOCABULARY);
        for turn in 0..6 {
            let key = turn as u64;
            // The first prompt comes twice.
            let new = if turn < 2 { 0 } else { 1 + random.below(60) };
            text.extend(random.tokens(new, VOCABULARY));
            let request = exact(text.clone(), 20);
            let before = prefilled(&server);
            server.submit(key, &request);
            server.finish();
            let outcome = server.outcomes[&key].clone();
            assert_same(&outcome, &alone(&model, &[request])[0], &format!("turn {turn}"));
            if turn > 0 {
                let found = outcome.usage.cached_tokens;
                assert!(found + BLOCK + new >= text.len() && found < text.len(), "{turn}: {found}");
                let prefilled = (prefilled(&server) - before) as usize;
                assert_eq!(prefilled, text.len() - found);
            }
            text.extend(&outcome.continuations[0].token_ids);
            if turn == 0 {
                text.truncate(4 * BLOCK + 7);
            }
        }
        server.assert_empty();
    }
}

/// Row 79: a prompt that shares a few tokens, or any number of them, with a much longer one gives what a
/// cold run gives, through windows that have long passed over what is shared.
#[test]
fn any_shared_length_is_as_cold() {
    for (model, kind) in [(hybrid(), KINDS[0]), (hybrid(), KINDS[1]), (plain(), KINDS[1])] {
        let mut random = Random(2);
        let long = random.tokens(12 * BLOCK, VOCABULARY);
        let config = with_prefix(kind, engine_config(2 << 20));
        let mut server = Server::of(&model, config);
        serve(&mut server, &[exact(long.clone(), 60)]);
        for (key, shared) in
            [4, 31, 32, 33, 63, 70, 100, 127, 128, 200, 333, 383].into_iter().enumerate()
        {
            let mut prompt = long[..shared].to_vec();
            prompt.extend(random.tokens(10, VOCABULARY));
            let request = exact(prompt, 50);
            let key = 1 + key as u64;
            server.submit(key, &request);
            server.finish();
            let what = format!("{shared} tokens shared");
            assert_same(&server.outcomes[&key], &alone(&model, &[request])[0], &what);
            assert!(server.cached_tokens(key) <= Some(shared), "{what}");
        }
        server.assert_empty();
    }
}

/// Row 71: a block that two read and one goes on writing is copied before it is written, whether a hit ends
/// in it or a branch begins in it: both outputs are cold ones, side by side.
#[test]
fn a_shared_block_is_copied_before_it_is_written() {
    for (model, kind) in [(plain(), KINDS[0]), (hybrid(), KINDS[1])] {
        let mut random = Random(3);
        let long = random.tokens(3 * BLOCK, VOCABULARY);
        let requests: Vec<Request> = (0..6)
            .map(|index| {
                // All end in the middle of the same block of the first.
                let mut prompt = long[..BLOCK + 5 * (index + 1)].to_vec();
                prompt.extend(random.tokens(index, VOCABULARY));
                let sampling =
                    Sampling { temperature: 0.8, seed: index as u64, ..Sampling::default() };
                Request { sampling, ..exact(prompt, 70) }
            })
            .collect();
        let expected = alone(&model, &requests);
        let mut server = Server::of(&model, with_prefix(kind, engine_config(2 << 20)));
        server.submit(9, &exact(long.clone(), 100));
        server.until(|server| server.tokens(9) == 5);
        for (key, request) in requests.iter().enumerate() {
            server.submit(key as u64, request);
        }
        server.finish();
        server.assert_exact(&expected, "side by side");
        assert_same(&server.outcomes[&9], &alone(&model, &[exact(long, 100)])[0], "the first");
        let partly =
            (0..6).filter(|key| !server.cached_tokens(*key).unwrap().is_multiple_of(BLOCK)).count();
        let found: Vec<_> = (0..6).map(|key| server.cached_tokens(key)).collect();
        assert!(partly > 0, "{kind:?}: {found:?}, some hits end inside a block");
        server.assert_empty();
    }
}

/// Row 38: where blocks are sealed lossy, a hit reads them as the run did that made them.
#[test]
fn lossy_blocks_are_read_the_same_when_they_are_found() {
    let formats = [PageFormat::Int8, PageFormat::K8V4, PageFormat::Int4];
    for (format, kind) in formats.into_iter().flat_map(|format| KINDS.map(|kind| (format, kind))) {
        let model = plain();
        let mut config = with_prefix(kind, engine_config(1 << 20));
        config.rules = Rules { format_at_seal: format, ..Rules::default() };
        config.scheduling.chunk_tokens = BLOCK;
        let mut server = Server::of(&model, config);
        let prompt = Random(4).tokens(5 * BLOCK + 9, VOCABULARY);
        let request = Request { fidelity: Fidelity::Int4, ..exact(prompt, 40) };
        serve(&mut server, std::slice::from_ref(&request));
        server.submit(1, &request);
        server.finish();
        assert_eq!(server.cached_tokens(1), Some(5 * BLOCK), "{format:?}");
        assert_same(&server.outcomes[&1], &server.outcomes[&0], &format!("{format:?}"));
        // A contract that forbids them computes its own, exactly.
        let strict = Request { prompt: request.prompt.clone(), ..exact(Vec::new(), 10) };
        let config = with_prefix(kind, engine_config(1 << 20));
        let mut server = Server::of(&model, config);
        serve(&mut server, std::slice::from_ref(&strict));
        server.assert_exact(&alone(&model, &[strict]), "exact");
    }
}

/// Rows 67 and 68: what one tenant has computed no other finds: not while it is held, nor when it is idle,
/// swapped, thrown away or written over; and nothing of either is held in the end.
#[test]
fn tenants_find_nothing_of_each_other() {
    let model = plain();
    for kind in KINDS {
        let tenant = |salt: &[u8]| Tenant { salt: salt.to_vec(), ..Tenant::default() };
        let mut config = with_prefix(kind, crowded(budget_of(&model, 14)));
        config.tenants = vec![tenant(b"one"), tenant(b"two"), tenant(b"three")];
        let mut server = Server::of(&model, config).with_good_spill();
        let mut random = Random(5);
        let prompt = random.tokens(3 * BLOCK, VOCABULARY);
        let other = |random: &mut Random| random.tokens(2 * BLOCK, VOCABULARY);
        // Held by tenant 0, then idle, then under pressure of tenant 0's own work.
        server.submit(0, &exact(prompt.clone(), 40));
        server.until(|server| server.tokens(0) == 3);
        server.submit(1, &Request { tenant: 1, ..exact(prompt.clone(), 40) });
        server.finish();
        for key in 2..8 {
            server.submit(key, &exact(other(&mut random), 4 * BLOCK));
        }
        server.until(|server| server.count(PauseKind::Swap) > 0);
        server.submit(8, &Request { tenant: 2, priority: 1, ..exact(prompt.clone(), 40) });
        server.until(|server| server.outcomes.contains_key(&8));
        // Its own the last one finds.
        server.submit(9, &Request { tenant: 2, priority: 1, ..exact(prompt.clone(), 5) });
        server.finish();
        assert_eq!((server.cached_tokens(1), server.cached_tokens(8)), (Some(0), Some(0)));
        let want = &alone(&model, &[exact(prompt.clone(), 40)])[0];
        for key in [0, 1, 8] {
            assert_same(&server.outcomes[&key], want, &format!("request {key}"));
        }
        assert!(server.cached_tokens(9) >= Some(2 * BLOCK), "{:?}", server.cached_tokens(9));
        server.assert_empty();
    }
}

/// Row 70: requests that share no token share no block, whoever's blocks wait behind the fence of a step
/// that is in flight while others end.
#[test]
fn strangers_share_nothing_while_others_end_in_flight() {
    let model = plain();
    let requests = unique(&mut Random(6), 15, 2 * BLOCK, 70);
    let expected = alone(&model, &requests);
    let config = with_prefix(IndexKind::Chain, engine_config(budget_of(&model, 60)));
    let script = |step| Deed::Delay(step as usize % 4);
    let engine = faulty_engine(model.plain_runner(), config, Box::new(script));
    let mut server = Server::new(engine);
    for (key, request) in requests.iter().enumerate() {
        server.submit(key as u64, request);
    }
    server.until(|server| server.tokens(0) == 10);
    server.until(|server| server.engine.pool().accounts().fenced_bytes == 0);
    // A step is in flight.
    server.turn();
    let free_bytes = server.engine.pool().accounts().free_bytes;
    (0..7).for_each(|key| server.end(2 * key));
    let accounts = server.engine.pool().accounts();
    assert_eq!(accounts.free_bytes, free_bytes, "nothing is free before the step has ended");
    assert!(accounts.fenced_bytes > 0, "{accounts:?}");
    server.finish();
    for key in (0..15).filter(|key| key % 2 == 1 || *key == 14) {
        let key = key as u64;
        assert_eq!(server.cached_tokens(key), Some(0));
        assert_same(&server.outcomes[&key], &expected[key as usize], &format!("request {key}"));
    }
    server.assert_empty();
}

/// Rows 59 and 64: of idle prefixes the tail goes first, so that the head is still found, and what the
/// first of the queue will find goes last, though others were used later.
#[test]
fn what_the_head_of_the_queue_will_find_stays() {
    let model = plain();
    for kind in KINDS {
        let mut random = Random(7);
        let (wanted, other) =
            (random.tokens(4 * BLOCK + 1, VOCABULARY), random.tokens(4 * BLOCK + 1, VOCABULARY));
        let mut config = with_prefix(kind, engine_config(budget_of(&model, 16)));
        config.scheduling.max_running = 2;
        let mut server = Server::of(&model, config);
        serve(&mut server, &[exact(wanted.clone(), 2)]);
        server.submit(1, &exact(other.clone(), 2));
        server.finish();
        // 8 of 16 blocks are idle; the runner takes 10, so that 2 of them have to go, then waits for none.
        server.submit(2, &exact(random.tokens(BLOCK, VOCABULARY), 9 * BLOCK));
        server.until(|server| server.tokens(2) == 10);
        server.submit(3, &exact(wanted.clone(), 7 * BLOCK));
        server.until(|server| server.outcomes.contains_key(&2));
        assert!(server.engine.stats().counters.evicted_prefix_bytes > 0);
        server.finish();
        assert_eq!(server.cached_tokens(3), Some(4 * BLOCK), "{kind:?}");
        server.submit(4, &exact(other.clone(), 2));
        server.finish();
        let tail_lost = server.cached_tokens(4).unwrap();
        assert!(tail_lost < 4 * BLOCK, "{kind:?}: {tail_lost}");
        assert!(tail_lost.is_multiple_of(BLOCK));
    }
}

/// Row 62: a prefix that a client asked to retain outlives others under pressure, for its time and within
/// its share.
#[test]
fn a_retained_prefix_stays_for_its_time() {
    let model = plain();
    for kind in KINDS {
        let mut random = Random(8);
        let system = random.tokens(3 * BLOCK + 1, VOCABULARY);
        let config = with_prefix(kind, engine_config(budget_of(&model, 16)));
        let mut server = Server::of(&model, config);
        let mut key = 0;
        let mut ask = |server: &mut Server, prompt: Vec<u32>, generated: usize| {
            key += 1;
            server.submit(key, &exact(prompt, generated));
            server.finish();
            server.cached_tokens(key).unwrap()
        };
        ask(&mut server, system.clone(), 2);
        let until_us = server.now_us + 3_000_000;
        assert_eq!(server.engine.retain_prefix(0, &system, until_us), 3 * BLOCK);
        let more = random.tokens(3 * BLOCK, VOCABULARY);
        ask(&mut server, more.clone(), 2);
        let share = server.engine.retain_prefix(0, &more, until_us);
        assert!(share <= BLOCK, "a quarter of the pool at most: {share}");
        let flood =
            |server: &mut Server,
             random: &mut Random,
             ask: &mut dyn FnMut(&mut Server, Vec<u32>, usize) -> usize| {
                for _ in 0..3 {
                    ask(server, random.tokens(4 * BLOCK, VOCABULARY), 7 * BLOCK);
                }
            };
        flood(&mut server, &mut random, &mut ask);
        assert!(server.now_us < until_us);
        assert_eq!(ask(&mut server, system.clone(), 2), 3 * BLOCK, "{kind:?}");
        server.now_us = until_us;
        flood(&mut server, &mut random, &mut ask);
        assert_eq!(ask(&mut server, system.clone(), 2), 0, "{kind:?}: its time is over");
    }
}

/// Row 118: whoever replays the told events knows what the cache has: what it predicts for the next prompt
/// is what the engine finds, through evictions and preemptions.
#[test]
fn events_replayed_are_what_is_found() {
    let model = plain();
    let mut removed = 0;
    for (kind, seed) in KINDS.into_iter().flat_map(|kind| [(kind, 9), (kind, 10)]) {
        let config = with_prefix(kind, engine_config(budget_of(&model, 14)));
        let mut server = Server::of(&model, config);
        let identity = PrefixIdentity::new(&[], "", BLOCK);
        let root = BlockHash(identity.salted(&[]).0);
        let mut known: BTreeMap<([u8; 32], Vec<u32>), [u8; 32]> = BTreeMap::new();
        let mut random = Random(seed);
        let shared = random.tokens(6 * BLOCK, VOCABULARY);
        for key in 0..120 {
            for event in server.engine.take_prefix_events() {
                match event {
                    PrefixEvent::Stored { hash, parent, tokens, .. } => {
                        known.insert((parent.0, tokens), hash.0);
                    }
                    PrefixEvent::Removed { hash } => {
                        removed += 1;
                        known.retain(|_, known| *known != hash.0);
                    }
                    PrefixEvent::Cleared => known.clear(),
                }
            }
            let mut prompt = shared[..random.below(6 * BLOCK)].to_vec();
            prompt.extend((0..1 + random.below(70)).map(|_| random.below(3) as u32));
            let (mut at, mut predicted) = (root.0, 0);
            for block in prompt[..prompt.len() - 1].chunks_exact(BLOCK) {
                let Some(next) = known.get(&(at, block.to_vec())) else { break };
                at = *next;
                predicted += BLOCK;
            }
            server.submit(key, &exact(prompt, 1 + random.below(60)));
            server.finish();
            let found = server.cached_tokens(key).unwrap();
            assert_eq!(found / BLOCK * BLOCK, predicted, "{kind:?} request {key}");
        }
    }
    assert!(removed > 50, "{removed}");
}

/// What a router would believe, from a listener that is often busy.
#[derive(Clone, Default)]
struct Believer(Arc<Mutex<Believed>>, Arc<AtomicU64>);

/// By a block's hash its parent's, its tokens and who may use it.
type Believed = BTreeMap<BlockHash, (BlockHash, Vec<u32>, Fidelity)>;

impl PrefixListener for Believer {
    fn is_ready(&self) -> bool {
        // Every second question finds it busy.
        self.1.fetch_add(1, Ordering::Relaxed) % 2 == 1
    }

    fn hear(&mut self, events: Vec<PrefixEvent>) {
        let mut known = self.0.lock().unwrap();
        for event in events {
            match event {
                PrefixEvent::Stored { hash, parent, tokens, fidelity, .. } => {
                    known.insert(hash, (parent, tokens, fidelity));
                }
                PrefixEvent::Removed { hash } => {
                    known.remove(&hash);
                }
                PrefixEvent::Cleared => known.clear(),
            }
        }
    }
}

/// Row 118, where relief makes cached blocks lossier: who listens knows what each contract will find.
#[test]
fn a_listener_hears_what_relief_makes_lossier() {
    let model = plain();
    let (mut lossy_hits, mut lowered) = (0, 0);
    for (kind, seed) in KINDS.into_iter().flat_map(|kind| [(kind, 3), (kind, 4)]) {
        let config = with_prefix(kind, crowded(budget_of(&model, 16)));
        let mut server = Server::of(&model, config);
        let believer = Believer::default();
        server.engine.set_prefix_listener(Box::new(believer.clone()));
        let root = BlockHash(server.engine.prefix_roots()[0].0);
        let mut random = Random(seed);
        let shared = random.tokens(6 * BLOCK, VOCABULARY);
        for round in 0..40 {
            // Lossy ones that do not fit together.
            for key in 0..4 {
                let mut prompt = shared[..random.below(6 * BLOCK)].to_vec();
                prompt.extend((0..1 + random.below(70)).map(|_| random.below(3) as u32));
                let contract = [Fidelity::Int8, Fidelity::Int4][random.below(2)];
                let request = Request { fidelity: contract, ..exact(prompt, 1 + random.below(90)) };
                server.submit(8 * round + key, &request);
            }
            server.finish();
            // Two turns: one finds the listener busy.
            server.turn();
            server.turn();
            let contract = [Fidelity::Exact, Fidelity::Int8, Fidelity::Int4][random.below(3)];
            let mut prompt = shared[..random.below(6 * BLOCK)].to_vec();
            prompt.extend((0..1 + random.below(20)).map(|_| random.below(3) as u32));
            let (mut at, mut predicted) = (root, 0);
            for block in prompt[..prompt.len() - 1].chunks_exact(BLOCK) {
                let known = believer.0.lock().unwrap();
                let next = known.iter().find(|(_, of)| of.0 == at && of.1 == block);
                let Some((&hash, &(_, _, fidelity))) = next else { break };
                lowered += usize::from(fidelity > Fidelity::Exact);
                if fidelity > contract {
                    break;
                }
                lossy_hits += usize::from(fidelity > Fidelity::Exact);
                at = hash;
                predicted += BLOCK;
            }
            let key = 8 * round + 7;
            server.submit(key, &Request { fidelity: contract, ..exact(prompt, 2) });
            server.finish();
            let found = server.cached_tokens(key).unwrap();
            assert_eq!(found / BLOCK * BLOCK, predicted, "{kind:?} round {round} {contract:?}");
        }
    }
    assert!(lossy_hits > 10 && lowered > lossy_hits, "{lossy_hits} {lowered}");
}
