//! What a prefix cache costs per request of 8,192 tokens, pages of SmolLM2-135M:
//! `cargo run --release -p reef-kv --example prefix_bench [-- LAYERS [--json]]`. `bench/prefix_vllm.py` plays
//! the same trace on vLLM's block pool, which names a block by one number for all layers (LAYERS = 1).
//!
//! Of three requests one begins with one of three documents of 6,144 tokens, one is new altogether, one
//! repeats the first. Four run at a time; the pool holds eight, so that allocating means evicting. Lookup is
//! timed with the attaching of what was found, allocation with the eviction that makes room.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use reef_kv::page::PageShape;
use reef_kv::prefix::{IndexKind, PrefixCache, PrefixIdentity};
use reef_kv::*;

const TOKENS: usize = 8192;
const DOCUMENT: usize = 6144;
const DOCUMENTS: usize = 3;
const REQUESTS: usize = 600;
/// The pool fills up first.
const UNTIMED: usize = 60;
const RUNNING: usize = 4;
const BLOCK: usize = 32;
const BLOCKS: usize = 2048;
const CASES: [&str; 3] = ["document", "new", "again"];

/// Tokens of text number `text`; texts differ in every block.
fn tokens_of(text: usize, count: usize) -> impl Iterator<Item = u32> {
    (0..count).map(move |index| ((text * 7919 + index * 31 + index / BLOCK) % 49_152) as u32)
}

/// Tokens of request number `index`.
fn request_tokens(index: usize) -> Vec<u32> {
    let (round, case) = (index / 3, index % 3);
    match case {
        1 => tokens_of(1_000 + index, TOKENS).collect(),
        _ => {
            let own = tokens_of(1_000 + round * 3, TOKENS - DOCUMENT);
            tokens_of(round % DOCUMENTS, DOCUMENT).chain(own).collect()
        }
    }
}

#[derive(Default)]
struct Times {
    lookup: Vec<Duration>,
    allocate: Vec<Duration>,
    publish: Vec<Duration>,
    release: Vec<Duration>,
    hit_tokens: usize,
}

fn median_us(times: &mut [Duration]) -> f64 {
    times.sort_unstable();
    times[times.len() / 2].as_secs_f64() * 1e6
}

fn play(kind: IndexKind, layers: usize) -> (Vec<Times>, prefix::PrefixStats) {
    let shape = PageShape { kv_heads: 3, head_dim: 64, block_size: BLOCK };
    let groups = vec![GroupConfig { layers, shape, window: None, pinned: vec![] }];
    let block_bytes = groups[0].block_bytes(page::PageFormat::F16);
    let budget_bytes = (BLOCKS as f64 * block_bytes as f64 * 1.02) as usize;
    let config = PoolConfig { groups, budget_bytes, prefault: false, ladder: Ladder::default() };
    let pool = BlockPool::new(config).expect("a pool of 1.5 GB, mapped and not touched");
    let identity = PrefixIdentity::new(b"SmolLM2-135M", "", BLOCK);
    let root = identity.salted(b"");
    let mut cache = PrefixCache::new(&pool, identity, kind);
    let mut running = VecDeque::new();
    let mut cases: Vec<Times> = CASES.iter().map(|_| Times::default()).collect();
    for index in 0..REQUESTS {
        let tokens = request_tokens(index);
        let config = SequenceConfig {
            request: index as u64,
            contract: Fidelity::Exact,
            priority: 0,
            trained_context: TOKENS,
            max_tokens: Some(TOKENS),
        };
        let mut sequence = Sequence::new(&pool, config);
        let start = Instant::now();
        let found = cache.lookup(&root, &tokens, Fidelity::Exact);
        let hit = found.full_tokens();
        sequence.attach_prefix(found.attached);
        drop(found.partial);
        let looked_up = Instant::now();
        if let Err(shortage) = sequence.grow(TOKENS - hit) {
            let missing_bytes = shortage.needed_bytes - shortage.free_bytes;
            let enough_bytes = pool.accounts().free_bytes + missing_bytes;
            cache.evict(&mut || pool.accounts().free_bytes >= enough_bytes);
            sequence.grow(TOKENS - hit).expect("room was made");
        }
        let allocated = Instant::now();
        sequence.commit(TOKENS - hit);
        let mut published = hit;
        let computed = Instant::now();
        cache.publish(&root, &mut sequence, &tokens, &mut published);
        let named = Instant::now();
        running.push_back(sequence);
        let oldest = (running.len() > RUNNING).then(|| running.pop_front());
        let before = Instant::now();
        drop(oldest);
        if index >= UNTIMED {
            let times = &mut cases[index % 3];
            times.lookup.push(looked_up - start);
            times.allocate.push(allocated - looked_up);
            times.publish.push(named - computed);
            times.release.push(before.elapsed());
            times.hit_tokens += hit;
        }
    }
    let stats = cache.stats();
    drop((running, cache));
    assert_eq!(pool.accounts().used_bytes(), 0);
    (cases, stats)
}

fn main() {
    let json = std::env::args().any(|argument| argument == "--json");
    let layers = std::env::args().nth(1).and_then(|layers| layers.parse().ok()).unwrap_or(30);
    for (name, kind) in [("chain", IndexKind::Chain), ("radix", IndexKind::Radix)] {
        let (cases, stats) = play(kind, layers);
        if !json {
            println!("{name}: {} entries, tables of {} bytes", stats.entries, stats.table_bytes);
        }
        for (case, mut times) in CASES.into_iter().zip(cases) {
            let requests = times.lookup.len();
            let [lookup, allocate, publish, release] =
                [&mut times.lookup, &mut times.allocate, &mut times.publish, &mut times.release]
                    .map(|times| median_us(times));
            let hit = times.hit_tokens / requests;
            if json {
                println!(
                    "{{\"index\":\"{name}\",\"case\":\"{case}\",\"hit_tokens\":{hit},\
                     \"lookup_us\":{lookup:.2},\"allocate_us\":{allocate:.2},\
                     \"publish_us\":{publish:.2},\"release_us\":{release:.2}}}"
                );
            } else {
                println!(
                    "  {case:8}  hit {hit:4}  lookup {lookup:6.1} us  allocate {allocate:6.1} us  \
                     together {:6.1} us  publish {publish:6.1} us  release {release:6.1} us",
                    lookup + allocate
                );
            }
        }
    }
}
