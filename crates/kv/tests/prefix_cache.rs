//! What a prefix cache does for those who use it, case by case, with both indexes.

mod world;

use reef_kv::page::{PageFormat, PageShape};
use reef_kv::policy::Sinks;
use reef_kv::prefix::*;
use reef_kv::*;
use world::*;

const BLOCK: usize = 16;
const KINDS: [IndexKind; 2] = [IndexKind::Chain, IndexKind::Radix];

/// Full attention, and a sliding window where asked for.
fn pool_of(window: Option<usize>, budget_bytes: usize) -> BlockPool {
    let shape = PageShape { kv_heads: 1, head_dim: 16, block_size: BLOCK };
    let group = |window| GroupConfig { layers: 2, shape, window, pinned: vec![] };
    let groups = match window {
        Some(window) => vec![group(None), group(Some(window))],
        None => vec![group(None)],
    };
    let ladder = Ladder::default();
    BlockPool::new(PoolConfig { groups, budget_bytes, prefault: false, ladder }).unwrap()
}

fn cache_of(pool: &BlockPool, kind: IndexKind) -> (PrefixCache, PrefixRoot) {
    let identity = PrefixIdentity::new(b"model", "", BLOCK);
    let root = identity.salted(b"");
    (PrefixCache::new(pool, identity, kind), root)
}

/// Tokens that differ from those of other seeds everywhere.
fn text(seed: u32, count: usize) -> Vec<u32> {
    (0..count as u32).map(|index| seed * 100_000 + index).collect()
}

struct Run {
    sequence: Sequence,
    tokens: Vec<u32>,
    published: usize,
    root: PrefixRoot,
}

impl Run {
    /// Looks up, attaches and computes `tokens`; publishes as it goes. Returns the tokens found.
    fn new(
        cache: &mut PrefixCache,
        pool: &BlockPool,
        root: &PrefixRoot,
        tokens: Vec<u32>,
    ) -> (Run, usize) {
        Run::with_contract(cache, pool, root, tokens, Fidelity::Exact)
    }

    fn with_contract(
        cache: &mut PrefixCache,
        pool: &BlockPool,
        root: &PrefixRoot,
        tokens: Vec<u32>,
        contract: Fidelity,
    ) -> (Run, usize) {
        let found = cache.lookup(root, &tokens, contract);
        let hit = found.tokens();
        let mut sequence = Sequence::new(pool, request(1, contract));
        sequence.attach_prefix(found.attached);
        if let Some(partial) = found.partial {
            sequence.copy_rows(&partial.blocks, partial.rows).unwrap();
        }
        assert_eq!(sequence.next_position(), hit);
        let mut run = Run { sequence, tokens: Vec::new(), published: 0, root: *root };
        run.tokens = tokens;
        run.compute(cache, run.tokens.len());
        (run, hit)
    }

    /// Computes up to `end` tokens, a block at a time.
    fn compute(&mut self, cache: &mut PrefixCache, end: usize) {
        while self.sequence.next_position() < end {
            let tokens = (end - self.sequence.next_position()).min(BLOCK);
            if self.sequence.grow(tokens).is_err() {
                let sequence = &mut self.sequence;
                cache.evict(&mut || sequence.grow(tokens).is_ok());
            }
            self.sequence.commit(tokens);
            cache.publish(&self.root, &mut self.sequence, &self.tokens, &mut self.published);
            assert_eq!(cache.inconsistency(), None);
        }
    }
}

fn hit(cache: &mut PrefixCache, root: &PrefixRoot, tokens: &[u32]) -> usize {
    cache.lookup(root, tokens, Fidelity::Exact).tokens()
}

/// The same with one token more: the last one is always computed.
fn cached(cache: &mut PrefixCache, root: &PrefixRoot, tokens: &[u32]) -> usize {
    let asked = [tokens, &[u32::MAX]].concat();
    hit(cache, root, &asked)
}

/// Gives back `count` blocks (and what cannot stay without them). Returns the bytes.
fn evict_blocks(cache: &mut PrefixCache, count: usize) -> usize {
    let mut asked = 0;
    cache.evict(&mut || {
        asked += 1;
        asked > count
    })
}

#[test]
fn the_last_token_is_always_computed_and_nothing_else_need_be() {
    for kind in KINDS {
        let pool = pool_of(None, 1 << 20);
        let (mut cache, root) = cache_of(&pool, kind);
        for count in [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 5] {
            let tokens = text(count as u32, count);
            let (run, first) = Run::new(&mut cache, &pool, &root, tokens.clone());
            assert_eq!(first, 0);
            drop(run);
            // Full blocks, and of the last full one all but the last token.
            let sealed = count / BLOCK * BLOCK;
            assert_eq!(hit(&mut cache, &root, &tokens), sealed.min(count - 1), "{count}");
        }
        assert_eq!(hit(&mut cache, &root, &[]), 0);
        let used = pool.accounts();
        assert_eq!(used.used_bytes(), used.cached_bytes);
        drop(cache);
        assert_eq!(pool.accounts().used_bytes(), 0);
    }
}

/// E59
#[test]
fn tails_go_before_heads() {
    for kind in KINDS {
        let pool = pool_of(None, 1 << 20);
        let (mut cache, root) = cache_of(&pool, kind);
        let tokens = text(1, 3 * BLOCK);
        drop(Run::new(&mut cache, &pool, &root, tokens.clone()));
        for left in [2, 1, 0] {
            assert!(evict_blocks(&mut cache, 1) > 0);
            assert_eq!(cached(&mut cache, &root, &tokens), left * BLOCK, "{kind:?}");
        }
        assert_eq!(cache.evict(&mut || false), 0);
    }
}

/// The least recently used of two prompts goes first, a hit is a use, and a shared head goes last.
#[test]
fn the_least_recently_used_goes_first() {
    for kind in KINDS {
        let pool = pool_of(None, 1 << 20);
        let (mut cache, root) = cache_of(&pool, kind);
        let head = text(1, 2 * BLOCK);
        let [one, two] = [2, 3].map(|seed| [head.clone(), text(seed, 2 * BLOCK)].concat());
        drop(Run::new(&mut cache, &pool, &root, one.clone()));
        let (second, found) = Run::new(&mut cache, &pool, &root, two.clone());
        assert_eq!(found, 2 * BLOCK);
        drop(second);
        assert_eq!(cached(&mut cache, &root, &one), 4 * BLOCK);
        let mut lengths = Vec::new();
        while evict_blocks(&mut cache, 1) > 0 {
            let stats = cache.stats();
            lengths.push((stats.entries, cache.events().count()));
        }
        assert_eq!(
            lengths.iter().map(|(entries, _)| *entries).collect::<Vec<_>>(),
            [5, 4, 3, 2, 1, 0]
        );
        // `two` went first, then `one`'s own part, then the head.
        drop(Run::new(&mut cache, &pool, &root, one.clone()));
        drop(Run::new(&mut cache, &pool, &root, two.clone()));
        assert_eq!(cached(&mut cache, &root, &one), 4 * BLOCK);
        evict_blocks(&mut cache, 2);
        assert_eq!(cached(&mut cache, &root, &two), 2 * BLOCK, "{kind:?}");
        assert_eq!(cached(&mut cache, &root, &one), 4 * BLOCK);
    }
}

/// E61, G80: a hybrid model's prompt is found again as far as its blocks are there.
#[test]
fn a_hit_ends_where_the_window_is_there() {
    let window = 2 * BLOCK + 3;
    for kind in KINDS {
        let pool = pool_of(Some(window), 1 << 20);
        let (mut cache, root) = cache_of(&pool, kind);
        let tokens = text(1, 10 * BLOCK);
        let (run, _) = Run::new(&mut cache, &pool, &root, tokens.clone());
        drop(run);
        // Blocks that left the window are idle, and still found.
        assert_eq!(cached(&mut cache, &root, &tokens[..5 * BLOCK]), 5 * BLOCK);
        let found = cache.lookup(&root, &[&tokens[..], &[1]].concat(), Fidelity::Exact);
        assert_eq!(found.tokens(), 10 * BLOCK);
        let firsts = |group: usize| -> Vec<usize> {
            let of_group = found.attached.iter().filter(|block| block.group == group);
            of_group.map(|block| block.first / BLOCK).collect()
        };
        assert_eq!(firsts(0), (0..10).collect::<Vec<_>>());
        // The next token, at position 160, attends positions > 160 - 35, so from block 7 on.
        assert_eq!(firsts(1), [7, 8, 9]);
        drop(found);
        drop(cache);
        // A chat: each turn computes only what is new (and the rest of a block).
        let (mut cache, root) = cache_of(&pool, kind);
        let mut talk = text(2, 70);
        for turn in 0..5 {
            let before = talk.len();
            let (run, found) = Run::new(&mut cache, &pool, &root, talk.clone());
            drop(run);
            if turn > 0 {
                assert!(found + 29 + BLOCK > before, "turn {turn}: {found} of {before}");
            }
            talk.extend(text(3 + turn, 29));
        }
    }
}

/// Of a sequence that goes on, blocks that left its window give way before anybody's prompt, unless a hit
/// has ended there.
#[test]
fn what_left_its_window_gives_way_first() {
    for kind in KINDS {
        let pool = pool_of(Some(BLOCK + 1), 1 << 20);
        let (mut cache, root) = cache_of(&pool, kind);
        let old = text(1, 4 * BLOCK);
        drop(Run::new(&mut cache, &pool, &root, old.clone()));
        let tokens = text(2, 8 * BLOCK);
        let (run, _) = Run::new(&mut cache, &pool, &root, tokens.clone());
        assert_eq!(cached(&mut cache, &root, &tokens[..4 * BLOCK]), 4 * BLOCK);
        // Of `old` three blocks have left the window, of `tokens` seven: a hit has ended with one of these.
        evict_blocks(&mut cache, 9);
        assert_eq!(cache.stats().entries, 12, "{kind:?}");
        // Of all others the least recently used goes next, and that is the end of `old`.
        evict_blocks(&mut cache, 1);
        assert_eq!(cache.stats().entries, 11);
        assert_eq!(cached(&mut cache, &root, &tokens[..4 * BLOCK]), 4 * BLOCK);
        assert_eq!(cached(&mut cache, &root, &tokens[..6 * BLOCK]), 4 * BLOCK);
        assert_eq!(cached(&mut cache, &root, &tokens), 8 * BLOCK);
        assert_eq!(cache.inconsistency(), None);
        drop(run);
    }
}

/// A model whose every group has a window.
#[test]
fn without_full_attention_only_windows_count() {
    for kind in KINDS {
        let shape = PageShape { kv_heads: 1, head_dim: 16, block_size: BLOCK };
        let group = GroupConfig { layers: 2, shape, window: Some(BLOCK), pinned: vec![] };
        let ladder = Ladder::default();
        let config =
            PoolConfig { groups: vec![group], budget_bytes: 1 << 20, prefault: false, ladder };
        let pool = BlockPool::new(config).unwrap();
        let (mut cache, root) = cache_of(&pool, kind);
        let tokens = text(1, 6 * BLOCK);
        let (run, _) = Run::new(&mut cache, &pool, &root, tokens.clone());
        // All that left the window goes; the end is still there.
        cache.evict(&mut || false);
        assert_eq!(cache.inconsistency(), None);
        assert_eq!(cached(&mut cache, &root, &tokens), 6 * BLOCK);
        assert_eq!(cached(&mut cache, &root, &tokens[..3 * BLOCK]), 0);
        drop(run);
        cache.evict(&mut || false);
        assert_eq!((cache.stats().entries, cache.inconsistency()), (0, None), "{kind:?}");
        assert_eq!(pool.accounts().used_bytes(), 0);
    }
}

/// E67, E68: chains of two salts share nothing, and what is held through them is let go alike.
#[test]
fn tenants_share_nothing() {
    for kind in KINDS {
        let pool = pool_of(None, 1 << 20);
        let identity = PrefixIdentity::new(b"model", "", BLOCK);
        let roots = [b"one", b"two"].map(|salt| identity.salted(salt));
        let mut cache = PrefixCache::new(&pool, identity, kind);
        let tokens = text(1, 3 * BLOCK + 2);
        drop(Run::new(&mut cache, &pool, &roots[0], tokens.clone()));
        assert_eq!(hit(&mut cache, &roots[1], &tokens), 0);
        let (second, found) = Run::new(&mut cache, &pool, &roots[1], tokens.clone());
        assert_eq!(found, 0);
        drop(second);
        assert_eq!(cache.stats().entries, 6);
        let held: Vec<PrefixMatch> =
            roots.iter().map(|root| cache.lookup(root, &tokens, Fidelity::Exact)).collect();
        assert_eq!(cache.stats().idle_bytes, 0);
        assert_eq!(cache.evict(&mut || false), 0);
        drop(held);
        assert_eq!(cache.stats().idle_bytes, pool.accounts().used_bytes());
        // After eviction too: only the tenant's own.
        cache.evict(&mut || false);
        drop(Run::new(&mut cache, &pool, &roots[1], tokens.clone()));
        assert_eq!(hit(&mut cache, &roots[0], &tokens), 0);
        assert_eq!(hit(&mut cache, &roots[1], &tokens), 3 * BLOCK);
    }
}

/// E65
#[test]
fn a_forced_collision_is_a_miss() {
    for kind in KINDS {
        let pool = pool_of(None, 1 << 20);
        let identity =
            PrefixIdentity::new(b"model", "", BLOCK).with_hasher(|_, _| BlockHash([7; 32]));
        let roots = [b"one", b"two"].map(|salt| identity.salted(salt));
        let mut cache = PrefixCache::new(&pool, identity, kind);
        let (first, second) = (text(1, BLOCK), text(2, BLOCK));
        drop(Run::new(&mut cache, &pool, &roots[0], first.clone()));
        assert_eq!(cached(&mut cache, &roots[0], &second), 0);
        assert_eq!(cached(&mut cache, &roots[1], &first), 0);
        drop(Run::new(&mut cache, &pool, &roots[0], second.clone()));
        drop(Run::new(&mut cache, &pool, &roots[1], first.clone()));
        // The same tokens behind themselves: a chain of equal hashes.
        drop(Run::new(&mut cache, &pool, &roots[0], [first.clone(), first.clone()].concat()));
        assert_eq!(cached(&mut cache, &roots[0], &first), BLOCK);
        let other = cached(&mut cache, &roots[0], &second);
        assert_eq!(other, if kind == IndexKind::Radix { BLOCK } else { 0 });
        assert_eq!(cache.inconsistency(), None);
        cache.clear();
        assert_eq!(pool.accounts().used_bytes(), 0);
    }
}

/// E64
#[test]
fn the_head_of_the_queue_keeps_its_match() {
    for kind in KINDS {
        let pool = pool_of(None, 1 << 20);
        let (mut cache, root) = cache_of(&pool, kind);
        let texts = [1, 2, 3].map(|seed| text(seed, 2 * BLOCK));
        for tokens in &texts {
            drop(Run::new(&mut cache, &pool, &root, tokens.clone()));
        }
        cache.protect(&root, &texts[0]);
        assert_eq!(cache.inconsistency(), None);
        evict_blocks(&mut cache, 4);
        assert_eq!(
            texts.each_ref().map(|tokens| cached(&mut cache, &root, tokens)),
            [2 * BLOCK, 0, 0]
        );
        // Another head: the first text gives way again, tails first.
        drop(Run::new(&mut cache, &pool, &root, texts[1].clone()));
        cache.protect(&root, &texts[1]);
        assert_eq!(cache.inconsistency(), None);
        evict_blocks(&mut cache, 1);
        assert_eq!(cached(&mut cache, &root, &texts[0]), BLOCK, "{kind:?}");
        // It is last, not sacred.
        assert!(evict_blocks(&mut cache, 3) > 0);
        assert_eq!(cache.stats().entries, 0);
        cache.protect(&root, &[]);
    }
}

/// E62
#[test]
fn what_is_pinned_stays_for_its_time_within_its_share() {
    for kind in KINDS {
        let pool = pool_of(None, 1 << 20);
        let (mut cache, root) = cache_of(&pool, kind);
        let (system, other) = (text(1, 4 * BLOCK), text(2, 4 * BLOCK));
        drop(Run::new(&mut cache, &pool, &root, system.clone()));
        assert_eq!(cache.pin(&root, &system, 1000), 4 * BLOCK);
        assert_eq!(cache.pin(&root, &system[..2 * BLOCK], 500), 2 * BLOCK);
        drop(Run::new(&mut cache, &pool, &root, other.clone()));
        cache.expire(999);
        evict_blocks(&mut cache, 1);
        assert_eq!(cached(&mut cache, &root, &system), 4 * BLOCK);
        assert_eq!(cached(&mut cache, &root, &other), 3 * BLOCK);
        // Expired, it is the least recently used again, but for the lookup above.
        cache.expire(1000);
        assert_eq!(cache.inconsistency(), None);
        let bytes = [(); 3].map(|()| evict_blocks(&mut cache, 1));
        assert!(bytes.iter().all(|bytes| *bytes > 0));
        assert_eq!(
            cached(&mut cache, &root, &system) + cached(&mut cache, &root, &other),
            4 * BLOCK
        );

        // A prompt larger than the share of pins is pinned from its beginning.
        let block_bytes = pool.config().bytes_per_token(PageFormat::F16) * BLOCK;
        let most = pool.config().budget_bytes / 4 / block_bytes;
        let long = text(3, (most + 10) * BLOCK);
        drop(Run::new(&mut cache, &pool, &root, long.clone()));
        assert_eq!(cache.pin(&root, &long, 2000), most * BLOCK);
        assert_eq!(cache.pin(&root, &long, 3000), most * BLOCK);
        assert_eq!(cache.pin(&root, &system, 3000), 0);
        assert_eq!(cache.inconsistency(), None);
        // Pinned is last, not never; what goes is pinned no more.
        cache.evict(&mut || false);
        assert_eq!(pool.accounts().used_bytes(), 0);
        drop(Run::new(&mut cache, &pool, &root, system.clone()));
        assert_eq!(cache.pin(&root, &system, 1), 4 * BLOCK);
        cache.expire(u64::MAX);
        assert_eq!(cache.inconsistency(), None);
    }
}

/// Re-encodes the sealed blocks of a sequence.
fn encode(sequence: &mut Sequence, format: PageFormat) {
    let plan = plan_format_at_seal(sequence, format, 0, 0);
    assert!(!plan.is_empty());
    apply(sequence, &plan, 0);
}

#[test]
fn exact_never_gets_what_is_lossy() {
    for kind in KINDS {
        let pool = pool_of(None, 1 << 20);
        let (mut cache, root) = cache_of(&pool, kind);
        let tokens = text(1, 4 * BLOCK);
        let (mut run, _) = Run::with_contract(
            &mut cache,
            &pool,
            &root,
            tokens[..2 * BLOCK].to_vec(),
            Fidelity::Evict,
        );
        encode(&mut run.sequence, PageFormat::Int4);
        // Computed from lossy pages: f16, and tainted all the same.
        run.tokens = tokens.clone();
        run.compute(&mut cache, 4 * BLOCK);
        let asked = [&tokens[..], &[1]].concat();
        let mut found = |contract| cache.lookup(&root, &asked, contract).tokens();
        assert_eq!(Fidelity::ALL.map(&mut found), [0, 0, 4 * BLOCK, 4 * BLOCK], "{kind:?}");
        // A partly agreeing block is copied from exact f16 only.
        let (mut other, _) = Run::new(&mut cache, &pool, &root, tokens[..BLOCK].to_vec());
        assert_eq!(cached(&mut cache, &root, &tokens), BLOCK);
        assert_eq!(cached(&mut cache, &root, &tokens[..BLOCK + 5]), BLOCK);
        let lossy = cache.lookup(&root, &tokens[..2 * BLOCK + 5], Fidelity::Int4);
        assert_eq!(lossy.tokens(), 2 * BLOCK + 4);
        drop(lossy);
        // The better copy of the same tokens has taken the name of each.
        other.tokens = tokens.clone();
        other.compute(&mut cache, 4 * BLOCK);
        drop(run);
        assert_eq!(cached(&mut cache, &root, &tokens), 4 * BLOCK);
        assert_eq!(cache.stats().entries, 4);
        drop(other);
        let accounts = pool.accounts();
        assert_eq!(accounts.used_bytes(), accounts.used[PageFormat::F16]);
        assert_eq!(accounts.used_bytes(), accounts.cached_bytes);
    }
}

/// A worse copy does not take a better one's name; what it leaves is not held.
#[test]
fn a_worse_copy_stays_nameless() {
    for kind in KINDS {
        let pool = pool_of(None, 1 << 20);
        let (mut cache, root) = cache_of(&pool, kind);
        let tokens = text(1, 3 * BLOCK);
        // Two compute the same at once.
        let mut runs = [1, 2].map(|id| {
            let mut sequence = Sequence::new(&pool, request(id, Fidelity::Evict));
            sequence.grow(3 * BLOCK).unwrap();
            sequence.commit(3 * BLOCK);
            sequence
        });
        encode(&mut runs[1], PageFormat::Int8);
        for sequence in &mut runs {
            cache.publish(&root, sequence, &tokens, &mut 0);
            assert_eq!(cache.inconsistency(), None);
        }
        let [better, worse] = runs;
        drop(worse);
        assert_eq!(pool.accounts().used_bytes(), pool.accounts().used[PageFormat::F16]);
        drop(better);
        assert_eq!(cached(&mut cache, &root, &tokens), 3 * BLOCK, "{kind:?}");
    }
}

/// A sequence that has dropped blocks publishes nothing computed without them; the blocks that it drops
/// leave the cache, with what is behind.
#[test]
fn what_is_dropped_leaves_the_cache() {
    for kind in KINDS {
        let pool = pool_of(None, 1 << 20);
        let (mut cache, root) = cache_of(&pool, kind);
        let tokens = text(1, 40 * BLOCK);
        let (mut run, _) = Run::with_contract(
            &mut cache,
            &pool,
            &root,
            tokens[..20 * BLOCK].to_vec(),
            Fidelity::Evict,
        );
        assert_eq!(cached(&mut cache, &root, &tokens), 20 * BLOCK);
        let plan = plan_token_budget(&run.sequence, &Sinks { tail_tokens: 64 }, 12 * BLOCK, BLOCK);
        assert!(!plan.is_empty());
        apply(&mut run.sequence, &plan, 0);
        assert_eq!(cache.inconsistency(), None);
        let kept = cached(&mut cache, &root, &tokens);
        assert!(kept < 20 * BLOCK, "{kept}");
        run.tokens = tokens.clone();
        run.compute(&mut cache, 30 * BLOCK);
        assert_eq!(cached(&mut cache, &root, &tokens), kept, "{kind:?}");
        drop(run);
        cache.evict(&mut || false);
        assert_eq!(pool.accounts().used_bytes(), 0);
    }
}

/// Rows of a block that agrees in part are copied, and the source is not touched.
#[test]
fn a_partly_agreeing_block_is_copied() {
    for kind in KINDS {
        for window in [None, Some(BLOCK + 8)] {
            let pool = pool_of(window, 1 << 20);
            let (mut cache, root) = cache_of(&pool, kind);
            let tokens = text(1, 4 * BLOCK);
            drop(Run::new(&mut cache, &pool, &root, tokens.clone()));
            let asked = [&tokens[..2 * BLOCK + 7], &text(2, 2 * BLOCK)].concat();
            let found = cache.lookup(&root, &asked, Fidelity::Exact);
            assert_eq!(
                (found.full_tokens(), found.tokens()),
                (2 * BLOCK, 2 * BLOCK + 7),
                "{kind:?}"
            );
            drop(found);
            let (run, found) = Run::new(&mut cache, &pool, &root, asked.clone());
            assert_eq!(found, 2 * BLOCK + 7);
            assert_eq!(cached(&mut cache, &root, &tokens), 4 * BLOCK);
            assert_eq!(cached(&mut cache, &root, &asked), asked.len() / BLOCK * BLOCK);
            // The longest agreement of several, whichever came first.
            for (agreeing, seed) in [(3, 5), (11, 6), (9, 7)] {
                let other = [&tokens[..2 * BLOCK + agreeing], &text(seed, BLOCK)].concat();
                drop(Run::new(&mut cache, &pool, &root, other));
            }
            let probe = [&tokens[..2 * BLOCK + 10], &[9]].concat();
            assert_eq!(hit(&mut cache, &root, &probe), 2 * BLOCK + 10);
            let probe = [&tokens[..2 * BLOCK + 11], &text(6, BLOCK)[..2], &[9]].concat();
            assert_eq!(hit(&mut cache, &root, &probe), 2 * BLOCK + 13);
            drop(run);
            check(&pool, &[]);
        }
    }
}

/// Two compute the same prompt at once; the named copy's holder ends and is evicted: what the other holds
/// is named instead, so its longer prefix can be found.
#[test]
fn a_chain_that_lost_its_head_is_named_again() {
    for kind in KINDS {
        let pool = pool_of(None, 1 << 20);
        let (mut cache, root) = cache_of(&pool, kind);
        let tokens = text(1, 8 * BLOCK);
        let mut runs = [1, 2].map(|id| {
            let mut sequence = Sequence::new(&pool, request(id, Fidelity::Exact));
            sequence.grow(4 * BLOCK).unwrap();
            sequence.commit(4 * BLOCK);
            Run { sequence, tokens: tokens.clone(), published: 0, root }
        });
        for run in &mut runs {
            cache.publish(&root, &mut run.sequence, &tokens, &mut run.published);
        }
        let [first, mut second] = runs;
        second.compute(&mut cache, 6 * BLOCK);
        drop(first);
        assert!(cache.evict(&mut || false) > 0);
        assert_eq!(cached(&mut cache, &root, &tokens), 0);
        second.compute(&mut cache, 7 * BLOCK);
        assert_eq!(cached(&mut cache, &root, &tokens), 7 * BLOCK, "{kind:?}");
        assert_eq!(cache.inconsistency(), None);
        // And the head waits behind its tail although it became idle first.
        drop(second);
        evict_blocks(&mut cache, 1);
        assert_eq!(cached(&mut cache, &root, &tokens), 6 * BLOCK);
    }
}

/// Behind a step's fence: idle pages that are given back during a step are not free before it ends, and
/// the caller learns how many bytes are on their way.
#[test]
fn what_is_evicted_during_a_step_waits_for_its_fence() {
    let pool = pool_of(None, 1 << 20);
    let (mut cache, root) = cache_of(&pool, IndexKind::Radix);
    drop(Run::new(&mut cache, &pool, &root, text(1, 4 * BLOCK)));
    let fence = pool.begin_step();
    let bytes = cache.evict(&mut || false);
    assert_eq!(pool.accounts().fenced_bytes, bytes);
    fence.pass();
    assert_eq!((pool.accounts().fenced_bytes, pool.accounts().used_bytes()), (0, 0));
}
