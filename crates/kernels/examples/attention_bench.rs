//! Attention at SmolLM2's shapes over pages of every format, against plain reads.
//!
//! `cargo run --release -p reef-kernels --example attention_bench [threads] [table] [format]`; a table
//! is decode, hot, prefill or shapes; a prefix names several. What is compared runs in turns: ratios within a table hold on a shared machine.

use reef_kernels::attention::{AttentionScratch, AttentionShape, SequenceRows, paged_attention};
use reef_kernels::dispatch::Tier;
use reef_kernels::page::{reencode, write_kv};
use reef_kernels::pool::BarrierPool;
use reef_kv::arena::Arena;
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

/// Milliseconds that all layers of one job take.
#[derive(Clone, Copy)]
struct Timing {
    /// Median over the repeats.
    median: f64,
    /// Sum over the layers of the best of each: says something even when neighbours take the cores.
    best: f64,
}

/// Times `jobs` jobs of `layers` layers in turns: all run before any runs again. `prepare` comes before
/// each job, untimed.
fn timings(
    repeats: usize,
    jobs: usize,
    layers: usize,
    mut prepare: impl FnMut(),
    mut run: impl FnMut(usize, usize),
) -> Vec<Timing> {
    let mut times = vec![vec![vec![0f64; layers]; repeats]; jobs];
    // The first round warms up.
    for round in 0..=repeats {
        for (job, times) in times.iter_mut().enumerate() {
            prepare();
            for (layer, time) in times[round.saturating_sub(1)].iter_mut().enumerate() {
                let start = Instant::now();
                run(job, layer);
                *time = start.elapsed().as_secs_f64() * 1e3;
            }
        }
    }
    let summary = |times: &Vec<Vec<f64>>| {
        let mut steps: Vec<f64> = times.iter().map(|layers| layers.iter().sum()).collect();
        steps.sort_by(f64::total_cmp);
        let best = |layer: usize| times.iter().map(|t| t[layer]).fold(f64::INFINITY, f64::min);
        Timing { median: steps[repeats / 2], best: (0..layers).map(best).sum() }
    };
    times.iter().map(summary).collect()
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
    arena: Arena,
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
        let arena = Arena::new(bytes * blocks * layers, false).expect("memory for the pages");
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
        let layers: Vec<Vec<PageRef>> = places
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
        for place in 0..blocks * layers.len() {
            // SAFETY: the arena has room for that many pages, and nobody reads it yet.
            unsafe {
                let place = arena.base().add(place * bytes);
                place.copy_from_nonoverlapping(page.as_ptr(), page.len());
            }
        }
        Cache { arena, layers }
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

/// Reads one layer's share of the bytes on all threads: what memory alone would take.
fn read_layer(pool: &BarrierPool, bytes: &[u8], layer: usize) {
    let words: &[u64] = bytemuck::cast_slice(&bytes[..bytes.len() / 4096 * 4096]);
    let of_layer = words.len() / LAYERS;
    let share = of_layer / pool.threads() / 64 * 64;
    pool.run(&|thread| {
        let mut sums = [0u64; 64];
        let first = layer * of_layer + thread * share;
        for chunk in words[first..first + share].chunks_exact(64) {
            for (sum, word) in sums.iter_mut().zip(chunk) {
                *sum ^= word;
            }
        }
        black_box(sums);
    });
}

/// `rows` rows from position `first` on.
struct Attend<'a> {
    pool: &'a BarrierPool,
    shape: AttentionShape,
    first: usize,
    rows: usize,
    queries: Vec<f32>,
    out: Vec<f32>,
    scratch: AttentionScratch,
}

impl Attend<'_> {
    fn new(pool: &BarrierPool, shape: AttentionShape, first: usize, rows: usize) -> Attend<'_> {
        let floats = rows * shape.heads * shape.head_dim;
        let scratch = AttentionScratch::new(&[shape], rows, first + rows, pool.threads());
        let (queries, out) = (numbers(floats), vec![0.0; floats]);
        Attend { pool, shape, first, rows, queries, out, scratch }
    }

    fn layer(&mut self, tier: Tier, cache: &Cache, layer: usize, observe: bool) {
        let pages = (self.first + self.rows).div_ceil(self.shape.block_size);
        let sequence = SequenceRows {
            pages: &cache.layers[layer][..pages],
            first_position: self.first as u32,
            rows: self.rows,
            queries: &self.queries,
            observe,
        };
        let arena = cache.arena.bytes();
        let (scratch, out) = (&mut self.scratch, &mut self.out);
        paged_attention(tier, self.pool, &self.shape, &[sequence], arena, scratch, out);
        black_box(out);
    }
}

fn decode_table(pool: &BarrierPool, tiers: &[Tier], formats: &[PageFormat]) {
    println!("decode, 1 row at depth 4096, {LAYERS} layers, pages scattered; ms a step");
    println!(
        "{:8} {:9} {:>6} {:>7} {:>7} {:>6} {:>8} {:>11} {:>9} {:>6}",
        "tier",
        "format",
        "MB",
        "median",
        "best",
        "GB/s",
        "over f16",
        "/contiguous",
        "/observed",
        "/read"
    );
    let caches: Vec<[Cache; 2]> = formats
        .iter()
        .map(|format| {
            [Order::Scattered, Order::Contiguous]
                .map(|order| Cache::new(&SMOLLM2, LAYERS, 4096, *format, order))
        })
        .collect();
    // What a step reads beside the KV cache, and what keeps a small cache cold.
    let weights = Arena::new(96 << 20, false).expect("memory for the weights");
    // SAFETY: nobody reads it yet. Touched, or all its pages would be the one of zeros.
    unsafe { weights.base().write_bytes(1, weights.len()) };
    let mut attend = Attend::new(pool, SMOLLM2, 4095, 1);
    for tier in tiers {
        // Per format: scattered, observed, contiguous, read.
        let flush = || (0..LAYERS).for_each(|layer| read_layer(pool, weights.bytes(), layer));
        let times = timings(REPEATS, 4 * caches.len(), LAYERS, flush, |job, layer| {
            let [scattered, contiguous] = &caches[job / 4];
            match job % 4 {
                3 => read_layer(pool, contiguous.arena.bytes(), layer),
                2 => attend.layer(*tier, contiguous, layer, false),
                observe => attend.layer(*tier, scattered, layer, observe == 1),
            }
        });
        for (index, format) in formats.iter().enumerate() {
            let [scattered, observed, contiguous, read] =
                [0, 1, 2, 3].map(|kind| times[4 * index + kind]);
            let megabytes = caches[index][0].arena.len() as f64 / 1e6;
            println!(
                "{:8} {:9} {megabytes:6.1} {:7.2} {:7.2} {:6.1} {:8.2} {:11.3} {:9.3} {:6.2}",
                tier.name(),
                format.name(),
                scattered.median,
                scattered.best,
                megabytes / scattered.median,
                times[0].median / scattered.median,
                scattered.best / contiguous.best,
                observed.best / scattered.best,
                scattered.best / read.best,
            );
        }
    }
}

fn prefill_table(pool: &BarrierPool, tiers: &[Tier], formats: &[PageFormat]) {
    println!(
        "\nprefill, {LAYERS} layers, ms: 512 rows at depth 0; 4096 rows in chunks of 512; observed"
    );
    println!(
        "{:8} {:9} {:>8} {:>8} {:>9} {:>9}",
        "tier", "format", "512", "4096", "GFLOP/s", "observed"
    );
    for format in formats {
        let cache = Cache::new(&SMOLLM2, LAYERS, 4096, *format, Order::Scattered);
        let mut chunks: Vec<Attend<'_>> =
            (0..8).map(|chunk| Attend::new(pool, SMOLLM2, chunk * 512, 512)).collect();
        for tier in tiers {
            let times = timings(
                3,
                16,
                LAYERS,
                || (),
                |job, layer| {
                    chunks[job / 2].layer(*tier, &cache, layer, job % 2 == 1);
                },
            );
            let all =
                |observed| times.iter().skip(observed).step_by(2).map(|t| t.best).sum::<f64>();
            let flops = 4.0 * 64.0 * 9.0 * 30.0 * 4096.0 * 4097.0 / 2.0;
            println!(
                "{:8} {:9} {:8.1} {:8.0} {:9.0} {:9.3}",
                tier.name(),
                format.name(),
                times[0].best,
                all(0),
                flops / all(0) / 1e6,
                all(1) / all(0)
            );
        }
    }
}

/// A context that stays in the L2 cache: what the arithmetic alone takes, in ns a key group (32
/// tokens) and line (row of a query head).
fn hot_table(pool: &BarrierPool, tiers: &[Tier], formats: &[PageFormat]) {
    println!(
        "\ncached, depth 512, ns a key group and line: decode 1 row, prefill 64 rows, each with how much \
         longer it takes observed; µs a layer at depth 32"
    );
    let caches: Vec<Cache> = formats
        .iter()
        .map(|format| Cache::new(&SMOLLM2, 1, 576, *format, Order::Contiguous))
        .collect();
    let mut kinds =
        [(511, 1), (512, 64), (31, 1)].map(|(first, rows)| Attend::new(pool, SMOLLM2, first, rows));
    for tier in tiers {
        let times = kinds.each_mut().map(|attend| {
            let repeats = if attend.rows > 1 { 400 } else { 2000 };
            timings(
                repeats,
                2 * caches.len(),
                1,
                || (),
                |job, _| {
                    // Once more, so that the caches hold this format; short, or a shared machine cuts in.
                    for _ in 0..if attend.rows > 1 { 1 } else { 4 } {
                        attend.layer(*tier, &caches[job / 2], 0, job % 2 == 1);
                    }
                },
            )
        });
        for (index, format) in formats.iter().enumerate() {
            let best = |kind: usize, observed: usize| {
                let rounds = if kind == 1 { 1.0 } else { 4.0 };
                times[kind][2 * index + observed].best / rounds
            };
            println!(
                "{:8} {:9} {:8.1} {:6.3} {:8.1} {:6.3} {:8.2}",
                tier.name(),
                format.name(),
                best(0, 0) * 1e6 / (16.0 * 9.0),
                best(0, 1) / best(0, 0),
                best(1, 0) * 1e6 / (17.0 * 9.0 * 64.0),
                best(1, 1) / best(1, 0),
                best(2, 0) * 1e3
            );
        }
    }
}

fn shapes_table(pool: &BarrierPool, tiers: &[Tier], formats: &[PageFormat]) {
    println!("\nother shapes, 4 layers, depth 4096, ms: decode 1 row, prefill 256 rows");
    print!("{:15} {:7} {:5}", "heads/kv x dim", "tier", "rows");
    formats.iter().for_each(|format| print!(" {:>9}", format.name()));
    println!();
    for (heads, kv_heads, head_dim) in [(4, 1, 256), (14, 2, 64), (8, 8, 64), (32, 8, 128)] {
        let shape = AttentionShape { heads, kv_heads, head_dim, ..SMOLLM2 };
        let cache = |format: &PageFormat| Cache::new(&shape, 4, 4096, *format, Order::Scattered);
        let caches: Vec<Cache> = formats.iter().map(cache).collect();
        for tier in tiers {
            for (first, rows) in [(4095, 1), (3840, 256)] {
                let mut attend = Attend::new(pool, shape, first, rows);
                let times = timings(
                    4,
                    caches.len(),
                    4,
                    || (),
                    |job, layer| {
                        attend.layer(*tier, &caches[job], layer, false);
                    },
                );
                let name = format!("{heads}/{kv_heads} x {head_dim}");
                print!("{name:15} {:7} {rows:5}", tier.name());
                times.iter().for_each(|time| print!(" {:9.2}", time.best));
                println!();
            }
        }
    }
}

fn main() {
    let mut words = std::env::args().skip(1);
    let threads = words.next().and_then(|t| t.parse().ok()).unwrap_or(2);
    let only = words.next().unwrap_or_default();
    let pool = BarrierPool::new(threads);
    let tiers: Vec<Tier> =
        Tier::available().into_iter().rev().filter(|t| *t != Tier::Scalar).collect();
    let part = words.next().unwrap_or_default();
    let named = |format: &PageFormat| format.name().starts_with(&part);
    let formats: Vec<PageFormat> = PageFormat::ALL.into_iter().filter(named).collect();
    println!("{threads} threads");
    if "decode".starts_with(&only) {
        decode_table(&pool, &tiers, &formats);
    }
    if "hot".starts_with(&only) {
        hot_table(&pool, &tiers, &formats);
    }
    if "prefill".starts_with(&only) {
        prefill_table(&pool, &tiers, &formats);
    }
    if "shapes".starts_with(&only) {
        shapes_table(&pool, &tiers, &formats);
    }
}
