//! Attention and page encoding at SmolLM2's shapes, against plain reads and `memcpy`.
//!
//! `cargo run --release -p reef-kernels --example attention_bench [threads] [table]`; a table is decode, hot,
//! prefill, shapes or encode.

use reef_kernels::attention::{AttentionScratch, AttentionShape, SequenceRows, paged_attention};
use reef_kernels::dispatch::Tier;
use reef_kernels::page::{reencode, write_kv};
use reef_kernels::pool::BarrierPool;
use reef_kv::page::{PAGE_ALIGN, PageFormat, PageRef};
use std::hint::black_box;
use std::time::Instant;

const LAYERS: usize = 30;
const REPEATS: usize = 40;
const SMOLLM2: AttentionShape = AttentionShape {
    heads: 9,
    kv_heads: 3,
    head_dim: 64,
    block_size: 32,
    scale: 0.125,
    window: None,
};

/// The sum over `parts` of the best of `repeats` runs of each, in milliseconds. All parts run before
/// any runs again, so a working set larger than the caches stays cold; the best of short parts
/// still says something when the machine is shared.
fn best_ms(repeats: usize, parts: usize, mut job: impl FnMut(usize)) -> f64 {
    let mut best = vec![f64::INFINITY; parts];
    for _ in 0..=repeats {
        for (part, best) in best.iter_mut().enumerate() {
            let start = Instant::now();
            job(part);
            *best = best.min(start.elapsed().as_secs_f64() * 1e3);
        }
    }
    best.iter().sum()
}

/// How the pages of all layers lie in the arena.
#[derive(Clone, Copy, PartialEq)]
enum Order {
    /// The pages of a layer one after the other, in token order.
    Contiguous,
    /// Every page somewhere else, as after hours of service.
    Scattered,
}

struct Cache {
    arena: Vec<u8>,
    /// Byte at which the pages begin, so that they are aligned as in a real arena.
    start: usize,
    layers: Vec<Vec<PageRef>>,
}

impl Cache {
    fn new(
        shape: &AttentionShape,
        layers: usize,
        tokens: usize,
        format: PageFormat,
        order: Order,
    ) -> Cache {
        let page_shape = shape.page();
        let blocks = tokens.div_ceil(shape.block_size);
        let bytes = page_shape.page_bytes(format).next_multiple_of(PAGE_ALIGN);
        let mut arena = vec![0u8; bytes * blocks * layers + 4096];
        let start = arena.as_ptr().align_offset(4096);
        let mut places: Vec<usize> = (0..blocks * layers).collect();
        if order == Order::Scattered {
            let mut state = 88172645463325252u64;
            for i in (1..places.len()).rev() {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                places.swap(i, (state % (i as u64 + 1)) as usize);
            }
        }
        let half = example_page(shape);
        let mut page = half.clone();
        if format != PageFormat::F16 {
            page = vec![0; bytes];
            reencode(Tier::detect(), &page_shape, PageFormat::F16, format, &half, &mut page)
                .expect("the page is finite");
        }
        let layers = places
            .chunks(blocks)
            .map(|places| {
                let refs = places.iter().enumerate().map(|(block, place)| PageRef {
                    offset: (place * bytes / PAGE_ALIGN) as u32,
                    first: (block * shape.block_size) as u32,
                    format,
                    run: 0,
                });
                refs.collect()
            })
            .collect();
        for place in arena[start..].chunks_exact_mut(bytes) {
            place[..page.len()].copy_from_slice(&page);
        }
        Cache { arena, start, layers }
    }
}

fn numbers(count: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 7919 % 1009) as f32 / 504.5 - 1.0) * 1.5).collect()
}

fn example_page(shape: &AttentionShape) -> Vec<u8> {
    let page_shape = shape.page();
    let mut page = vec![0u8; page_shape.page_bytes(PageFormat::F16)];
    for slot in 0..shape.block_size {
        let kv = numbers(2 * shape.kv_heads * shape.head_dim + slot);
        let (k, v) = kv[slot..].split_at(shape.kv_heads * shape.head_dim);
        write_kv(Tier::detect(), &page_shape, &mut page, slot, k, v);
    }
    page
}

/// Reads every byte once on all threads, a layer at a time: what memory alone would take.
fn read_ms(pool: &BarrierPool, bytes: &[u8]) -> f64 {
    let words: &[u64] = bytemuck::cast_slice(&bytes[..bytes.len() / 4096 * 4096]);
    let layer = words.len() / LAYERS;
    let share = layer / pool.threads() / 64 * 64;
    best_ms(REPEATS, LAYERS, |index| {
        pool.run(&|thread| {
            let mut sums = [0u64; 64];
            let first = index * layer + thread * share;
            for chunk in words[first..first + share].chunks_exact(64) {
                for (sum, word) in sums.iter_mut().zip(chunk) {
                    *sum ^= word;
                }
            }
            black_box(sums);
        });
    })
}

fn attention_ms(
    tier: Tier,
    pool: &BarrierPool,
    shape: &AttentionShape,
    cache: &Cache,
    first: usize,
    rows: usize,
    repeats: usize,
) -> f64 {
    let row = shape.heads * shape.head_dim;
    let queries = numbers(rows * row);
    let mut out = vec![0f32; rows * row];
    let mut scratch = AttentionScratch::new(&[*shape], rows, first + rows, pool.threads());
    best_ms(repeats, cache.layers.len(), |layer| {
        let sequence = SequenceRows {
            pages: &cache.layers[layer][..(first + rows).div_ceil(shape.block_size)],
            first_position: first as u32,
            rows,
            queries: &queries,
            observe: false,
        };
        let arena = &cache.arena[cache.start..];
        paged_attention(tier, pool, shape, &[sequence], arena, &mut scratch, &mut out);
        black_box(&out);
    })
}

fn decode_table(pool: &BarrierPool, tiers: &[Tier]) {
    println!("decode, 1 row at depth 4096, {LAYERS} layers, ms a step");
    println!(
        "{:8} {:6} {:>8} {:>8} {:>10} {:>10} {:>7}",
        "tier", "format", "MB", "read", "contiguous", "scattered", "of read"
    );
    for format in PageFormat::ALL {
        let contiguous = Cache::new(&SMOLLM2, LAYERS, 4096, format, Order::Contiguous);
        let scattered = Cache::new(&SMOLLM2, LAYERS, 4096, format, Order::Scattered);
        let megabytes = (contiguous.arena.len() - 4096) as f64 / 1e6;
        for tier in tiers {
            let read = read_ms(pool, &contiguous.arena[contiguous.start..]);
            let near = attention_ms(*tier, pool, &SMOLLM2, &contiguous, 4095, 1, REPEATS);
            let far = attention_ms(*tier, pool, &SMOLLM2, &scattered, 4095, 1, REPEATS);
            println!(
                "{:8} {:6} {megabytes:8.1} {read:8.2} {near:10.2} {far:10.2} {:6.0}%",
                tier.name(),
                format.name(),
                100.0 * read / far
            );
        }
    }
}

fn prefill_table(pool: &BarrierPool, tiers: &[Tier]) {
    println!("\nprefill, {LAYERS} layers, ms: 512 rows at depth 0; 4096 rows in chunks of 512");
    println!("{:8} {:6} {:>8} {:>8} {:>9}", "tier", "format", "512", "4096", "GFLOP/s");
    for format in PageFormat::ALL {
        let cache = Cache::new(&SMOLLM2, LAYERS, 4096, format, Order::Scattered);
        for tier in tiers {
            let first = attention_ms(*tier, pool, &SMOLLM2, &cache, 0, 512, 5);
            let all: f64 = (0..8)
                .map(|chunk| attention_ms(*tier, pool, &SMOLLM2, &cache, chunk * 512, 512, 1))
                .sum();
            let flops = 4.0 * 64.0 * 9.0 * 30.0 * 4096.0 * 4097.0 / 2.0;
            println!(
                "{:8} {:6} {first:8.1} {all:8.0} {:9.0}",
                tier.name(),
                format.name(),
                flops / all / 1e6
            );
        }
    }
}

/// A context that stays in the L2 cache: what the arithmetic alone takes, in ns a key group (32
/// tokens) and line (row of a query head).
fn hot_table(pool: &BarrierPool, tiers: &[Tier]) {
    println!(
        "\ncached, depth 512, ns a key group and line: decode 1 row, prefill 64 rows; µs a layer at depth 32"
    );
    for tier in tiers {
        for format in PageFormat::ALL {
            let cache = Cache::new(&SMOLLM2, 1, 576, format, Order::Contiguous);
            let decode = attention_ms(*tier, pool, &SMOLLM2, &cache, 511, 1, 3000);
            let prefill = attention_ms(*tier, pool, &SMOLLM2, &cache, 512, 64, 300);
            let short = attention_ms(*tier, pool, &SMOLLM2, &cache, 31, 1, 3000);
            println!(
                "{:8} {:6} {:8.1} {:8.1} {:8.2}",
                tier.name(),
                format.name(),
                decode * 1e6 / (16.0 * 9.0),
                prefill * 1e6 / (17.0 * 9.0 * 64.0),
                short * 1e3
            );
        }
    }
}

fn shapes_table(pool: &BarrierPool, tiers: &[Tier]) {
    println!("\nother shapes, 4 layers, depth 4096, ms: decode 1 row, prefill 256 rows");
    println!(
        "{:24} {:8} {:>9} {:>9} {:>9} {:>9}",
        "heads/kv x dim", "tier", "f16 1", "int8 1", "f16 256", "int8 256"
    );
    for (heads, kv_heads, head_dim) in [(4, 1, 256), (14, 2, 64), (8, 8, 64), (32, 8, 128)] {
        let shape = AttentionShape { heads, kv_heads, head_dim, ..SMOLLM2 };
        let caches = PageFormat::ALL.map(|f| Cache::new(&shape, 4, 4096, f, Order::Scattered));
        for tier in tiers {
            print!("{:24} {:8}", format!("{heads}/{kv_heads} x {head_dim}"), tier.name());
            for (first, rows) in [(4095, 1), (3840, 256)] {
                for cache in &caches {
                    let ms = attention_ms(*tier, pool, &shape, cache, first, rows, 3);
                    print!(" {ms:9.2}");
                }
            }
            println!();
        }
    }
}

fn encode_table(tiers: &[Tier]) {
    println!("\nre-encode f16 to int8, one thread, 94 MB of pages, GB/s of f16 bytes");
    let cache = Cache::new(&SMOLLM2, LAYERS, 4096, PageFormat::F16, Order::Contiguous);
    let source = &cache.arena[cache.start..];
    let shape = SMOLLM2.page();
    let (from, to) = (shape.page_bytes(PageFormat::F16), shape.page_bytes(PageFormat::Int8));
    let pages = cache.layers.len() * cache.layers[0].len();
    let mut target = vec![0u8; pages * from];
    let gigabytes = (pages * from) as f64 / 1e9;
    let per_layer = pages / LAYERS;
    let copy = best_ms(REPEATS, LAYERS, |layer| {
        let bytes = layer * per_layer * from..(layer + 1) * per_layer * from;
        target[bytes.clone()].copy_from_slice(&source[bytes]);
        black_box(&target);
    });
    println!("{:8} {:6.2}", "memcpy", gigabytes / copy * 1e3);
    for tier in tiers {
        let ms = best_ms(REPEATS, LAYERS, |layer| {
            for page in layer * per_layer..(layer + 1) * per_layer {
                let (source, target) = (&source[page * from..], &mut target[page * to..]);
                reencode(*tier, &shape, PageFormat::F16, PageFormat::Int8, source, target)
                    .expect("the page is finite");
            }
            black_box(&target);
        });
        println!("{:8} {:6.2}  {:.2}x memcpy", tier.name(), gigabytes / ms * 1e3, copy / ms);
    }
}

fn main() {
    let mut words = std::env::args().skip(1);
    let threads = words.next().and_then(|t| t.parse().ok()).unwrap_or(2);
    let only = words.next().unwrap_or_default();
    let pool = BarrierPool::new(threads);
    let tiers: Vec<Tier> =
        Tier::available().into_iter().rev().filter(|t| *t != Tier::Scalar).collect();
    println!("{threads} threads");
    if "decode".starts_with(&only) {
        decode_table(&pool, &tiers);
    }
    if "hot".starts_with(&only) {
        hot_table(&pool, &tiers);
    }
    if "prefill".starts_with(&only) {
        prefill_table(&pool, &tiers);
    }
    if "shapes".starts_with(&only) {
        shapes_table(&pool, &tiers);
    }
    if "encode".starts_with(&only) {
        encode_table(&tiers);
    }
}
