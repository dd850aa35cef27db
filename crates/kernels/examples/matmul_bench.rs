//! Speed of the matmul kernels: `cargo run --release -p reef-kernels --example matmul_bench -- [WHAT] [TIER]`
//! WHAT: `read`, `pack`, `decode`, `gemv`, `gemm`, `f32` or `all`; TIER: `avx2`, `avx512` (default: both).
//!
//! Medians over repeated rounds, the best round in brackets; two threads unless `REEF_BENCH_THREADS` says otherwise. Weights are
//! random bits; sizes are those of SmolLM2-135M.

use reef_kernels::dispatch::Tier;
use reef_kernels::matmul::{
    Job, PackedMatrix, QuantizedRows, Rows, WEIGHT_FORMATS, WeightFormat, matmul,
};
use reef_kernels::pool::BarrierPool;
use std::hint::black_box;
use std::time::Instant;

const LAYERS: usize = 30;
/// (outputs, inputs) of the matrices of a layer that share an input.
const LAYER: [&[(usize, usize)]; 4] = [
    &[(576, 576), (192, 576), (192, 576)],
    &[(576, 576)],
    &[(1536, 576), (1536, 576)],
    &[(576, 1536)],
];
const HEAD: (usize, usize) = (49_152, 576);

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let what = arguments.first().map_or("all", String::as_str);
    let threads =
        std::env::var("REEF_BENCH_THREADS").ok().and_then(|v| v.parse().ok()).unwrap_or(2);
    let pool = BarrierPool::new(threads);
    let wanted = |name: &str| what == name || what == "all";
    if wanted("read") {
        read(&pool);
    }
    if wanted("pack") {
        pack();
    }
    for tier in Tier::available() {
        let asked = arguments.get(1).map_or(tier != Tier::Scalar, |name| name == tier.name());
        if !asked {
            continue;
        }
        println!("## {}, {threads} threads", tier.name());
        if wanted("decode") {
            decode(tier, &pool);
        }
        if wanted("gemv") {
            gemv(tier, &pool);
        }
        if wanted("gemm") {
            gemm(tier, &pool, true);
        }
        if wanted("f32") {
            gemm(tier, &pool, false);
        }
    }
}

/// Seconds of a repeated run.
#[derive(Clone, Copy, Default)]
struct Seconds {
    median: f64,
    /// The least disturbed round: what the kernel can do, on a machine that others use too.
    best: f64,
}

/// Times `rounds` runs after one to warm up.
fn time(rounds: usize, mut run: impl FnMut()) -> Seconds {
    run();
    let mut times: Vec<f64> = (0..rounds)
        .map(|_| {
            let start = Instant::now();
            run();
            start.elapsed().as_secs_f64()
        })
        .collect();
    times.sort_by(f64::total_cmp);
    Seconds { median: times[times.len() / 2], best: times[0] }
}

impl Seconds {
    /// `amount` per second in units of 1e9, median and best.
    fn rate(self, amount: f64) -> String {
        format!("{:.1} ({:.1})", amount / self.median / 1e9, amount / self.best / 1e9)
    }
}

fn random_words(count: usize, seed: u64) -> Vec<u64> {
    let mut state = seed | 1;
    (0..count)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        })
        .collect()
}

fn matrix(format: WeightFormat, rows: usize, cols: usize) -> PackedMatrix {
    PackedMatrix::pack(format, rows, cols, &tensor(format, rows, cols)).expect("a whole tensor")
}

/// Random bits with ordinary scales.
fn tensor(format: WeightFormat, rows: usize, cols: usize) -> Vec<u8> {
    let bytes = rows * format.row_bytes(cols);
    let words = random_words(bytes.div_ceil(8), bytes as u64);
    let mut raw: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    raw.truncate(bytes);
    if format == WeightFormat::F32 {
        // Random bits would be NaNs and subnormals.
        raw.chunks_exact_mut(4).for_each(|x| (x[2], x[3]) = (x[2] & 0x7f, 0x3f));
    } else {
        for block in raw.chunks_exact_mut(format.block_bytes()) {
            let last = block.len() - 1;
            block[1] &= 0x3f;
            block[3.min(last)] &= 0x3f;
            block[last] &= 0x3f;
        }
    }
    raw
}

fn activations(rows: usize, cols: usize) -> Vec<f32> {
    random_words(rows * cols, 7).iter().map(|word| *word as i64 as f32 / 2.0_f32.powi(63)).collect()
}

/// What memory gives: every thread sums its share of 96 MiB, 256 bytes at a time.
fn read(pool: &BarrierPool) {
    let words = random_words(96 << 17, 3);
    let share = words.len() / pool.threads();
    let seconds = time(41, || {
        pool.run(&|thread| {
            let mut sums = [0_u64; 32];
            for chunk in words[thread * share..][..share].chunks_exact(32) {
                for (sum, word) in sums.iter_mut().zip(chunk) {
                    *sum = sum.wrapping_add(*word);
                }
            }
            black_box(sums);
        });
    });
    println!("read 96 MiB: {} GB/s", seconds.rate(words.len() as f64 * 8.0));
    let seconds = time(201, || {
        for _ in 0..100 {
            pool.run(&|thread| {
                black_box(thread);
            });
        }
    });
    println!("barrier: {:.2} ({:.2}) us", seconds.median * 1e4, seconds.best * 1e4);
}

/// Repacking at load, one thread.
fn pack() {
    for format in WEIGHT_FORMATS {
        let (rows, cols) = (1536, 512);
        let raw = tensor(format, rows, cols);
        let seconds = time(15, || {
            black_box(PackedMatrix::pack(format, rows, cols, &raw)).expect("a whole tensor");
        });
        println!("pack {:5}: {} G values/s", format.name(), seconds.rate((rows * cols) as f64));
    }
}

/// Matrices that share an input, their columns side by side in the output.
fn multiply(tier: Tier, pool: &BarrierPool, group: &[PackedMatrix], x: Rows, out: &mut [f32]) {
    let mut jobs = [Job { weights: &group[0], out_column: 0 }; 3];
    let mut columns = 0;
    for (job, weights) in jobs.iter_mut().zip(group) {
        *job = Job { weights, out_column: columns };
        columns += weights.rows();
    }
    matmul(tier, pool, &jobs[..group.len()], x, out, columns);
}

/// Times all groups of matrices one after another with `m` rows each, quantising included. The best of
/// the whole is the sum of the best of its parts: each part is cold in every round, as in a model.
fn time_groups(tier: Tier, pool: &BarrierPool, groups: &[Vec<PackedMatrix>], m: usize) -> Seconds {
    let cols = |group: &[PackedMatrix]| group[0].cols();
    let columns = |group: &Vec<PackedMatrix>| group.iter().map(PackedMatrix::rows).sum();
    let x = activations(m, groups.iter().map(|group| cols(group)).max().unwrap_or(0));
    let mut out = vec![0.0; m * groups.iter().map(columns).max().unwrap_or(0)];
    let mut quantized = QuantizedRows::new();
    let mut best = vec![f64::INFINITY; groups.len()];
    let seconds = time(30, || {
        for (group, best) in groups.iter().zip(&mut best) {
            let start = Instant::now();
            let values = &x[..m * cols(group)];
            let input = if group[0].format().is_quantized() {
                quantized.quantize(tier, pool, values, cols(group));
                Rows::Int8(&quantized)
            } else {
                Rows::F32 { values, rows: m }
            };
            multiply(tier, pool, group, input, &mut out);
            *best = best.min(start.elapsed().as_secs_f64());
        }
    });
    Seconds { median: seconds.median, best: best.iter().sum() }
}

fn bytes(groups: &[Vec<PackedMatrix>]) -> f64 {
    groups.iter().flatten().map(PackedMatrix::bytes).sum::<usize>() as f64
}

/// All matrices of a token in the order of the model.
fn decode(tier: Tier, pool: &BarrierPool) {
    let group = |shapes: &[(usize, usize)]| -> Vec<PackedMatrix> {
        shapes.iter().map(|(n, k)| matrix(WeightFormat::Q4_1, *n, *k)).collect()
    };
    let mut groups: Vec<_> = (0..LAYERS).flat_map(|_| LAYER.map(group)).collect();
    groups.push(vec![matrix(WeightFormat::Q8_0, HEAD.0, HEAD.1)]);
    for m in [1, 2, 4, 6, 8, 12, 16, 24, 32, 64] {
        let seconds = time_groups(tier, pool, &groups, m);
        let tokens = seconds.rate(m as f64 * 1e9);
        println!("decode m={m}: {} GB/s, {tokens} tok/s", seconds.rate(bytes(&groups)));
    }
}

/// 96 MiB of weights in each format, few rows of activations.
fn gemv(tier: Tier, pool: &BarrierPool) {
    for format in WEIGHT_FORMATS {
        let cols = 2048;
        let rows = (3 << 20) / format.row_bytes(cols) / 16 * 16;
        let groups: Vec<_> = (0..32).map(|_| vec![matrix(format, rows, cols)]).collect();
        let mut line = format!("gemv GB/s {:5}", format.name());
        for m in [1, 2, 4, 8] {
            let seconds = time_groups(tier, pool, &groups, m);
            line += &format!("  m={m} {}", seconds.rate(bytes(&groups)));
        }
        println!("{line}");
    }
}

/// The matrices of a layer, 512 rows of activations.
fn gemm(tier: Tier, pool: &BarrierPool, int8: bool) {
    let m = 512;
    for format in WEIGHT_FORMATS {
        if int8 && !format.is_quantized() {
            continue;
        }
        let mut line = format!("{} GOP/s {:5}", if int8 { "gemm" } else { "f32" }, format.name());
        let (mut all_ops, mut all) = (0.0, Seconds::default());
        for shapes in LAYER {
            // The k-quants need a multiple of 256.
            let cols = shapes[0].1.next_multiple_of(format.block_values());
            let group: Vec<_> = shapes.iter().map(|(n, _)| matrix(format, *n, cols)).collect();
            let columns: usize = group.iter().map(PackedMatrix::rows).sum();
            let x = activations(m, cols);
            let mut quantized = QuantizedRows::new();
            quantized.quantize(tier, pool, &x, cols);
            let input =
                if int8 { Rows::Int8(&quantized) } else { Rows::F32 { values: &x, rows: m } };
            let mut out = vec![0.0; m * columns];
            let seconds = time(31, || multiply(tier, pool, &group, input, &mut out));
            let ops = 2.0 * (m * cols * columns) as f64;
            all_ops += ops;
            all.median += seconds.median;
            all.best += seconds.best;
            line += &format!("  {columns}x{cols} {}", seconds.rate(ops));
        }
        println!("{line}  all {}", all.rate(all_ops));
    }
    if int8 {
        let x = activations(m, 1536);
        let mut quantized = QuantizedRows::new();
        let seconds = time(31, || quantized.quantize(tier, pool, &x, 1536));
        println!("quantize 512x1536: {} G values/s", seconds.rate(x.len() as f64));
    }
}
