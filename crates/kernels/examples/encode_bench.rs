//! Re-encoding of pages on one thread, each rung beside `memcpy` of the same source bytes.
//!
//! `cargo run --release -p reef-kernels --example encode_bench [kv_heads] [head_dim] [block_size]`; SmolLM2's
//! shape unless given. Cold: pages that no cache holds any more, as relief finds them. Hot: one page
//! over and over, what the arithmetic alone takes.

use reef_kernels::dispatch::Tier;
use reef_kernels::page::{key_distinctness, reencode, write_kv};
use reef_kv::arena::Arena;
use reef_kv::page::{PageFormat, PageShape};
use std::hint::black_box;
use std::time::Instant;

/// Bytes of source pages of each rung: several times any cache.
const SOURCE_BYTES: usize = 128 << 20;
/// Parts of the source that are timed one by one: so short that a disturbance hits few of them.
const PARTS: usize = 1024;
const REPEATS: usize = 9;

use PageFormat::{F16, Fp8E4M3, Fp8E5M2, Int4, Int8, K8V4};

const RUNGS: [(PageFormat, PageFormat); 9] = [
    (F16, Int8),
    (F16, K8V4),
    (F16, Int4),
    (F16, Fp8E4M3),
    (F16, Fp8E5M2),
    (Int8, K8V4),
    (Int8, Int4),
    (K8V4, Int4),
    (Fp8E4M3, Int4),
];

/// An f16 page of tokens like keys and values: a few channels larger than the rest.
fn example_page(shape: &PageShape) -> Vec<u8> {
    let mut page = vec![0u8; shape.page_bytes(F16)];
    let channels = shape.kv_heads * shape.head_dim;
    for slot in 0..shape.block_size {
        let number = |i: usize| ((i * 7919 + slot * 104_729) % 1009) as f32 / 504.5 - 1.0;
        let keys: Vec<f32> =
            (0..channels).map(|c| number(c) * if c % 13 == 0 { 9.0 } else { 1.5 }).collect();
        let values: Vec<f32> = (channels..2 * channels).map(number).collect();
        write_kv(Tier::detect(), shape, &mut page, slot, &keys, &values);
    }
    page
}

fn encoded(shape: &PageShape, format: PageFormat) -> Vec<u8> {
    let mut page = vec![0u8; shape.page_bytes(format)];
    reencode(Tier::detect(), shape, F16, format, &example_page(shape), &mut page)
        .expect("the page is finite");
    page
}

/// Milliseconds of each job over all parts: jobs take turns, a whole pass each, so that all see the
/// same machine and none finds the caches warm; the sum over parts of the median of the passes.
fn medians_ms(jobs: &mut [Box<dyn FnMut(usize) + '_>]) -> Vec<f64> {
    let mut times = vec![vec![Vec::new(); PARTS]; jobs.len()];
    for _ in 0..REPEATS {
        for (job, times) in jobs.iter_mut().zip(&mut times) {
            for (part, times) in times.iter_mut().enumerate() {
                let start = Instant::now();
                job(part);
                times.push(start.elapsed().as_secs_f64() * 1e3);
            }
        }
    }
    let median = |times: &mut Vec<f64>| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    };
    times.iter_mut().map(|parts| parts.iter_mut().map(median).sum()).collect()
}

fn cold_row(shape: &PageShape, tiers: &[Tier], (from, to): (PageFormat, PageFormat)) {
    let (source_bytes, target_bytes) = (shape.page_bytes(from), shape.page_bytes(to));
    let pages = SOURCE_BYTES / source_bytes / PARTS * PARTS;
    // One arena, as in service: the source pages, then room for the targets of every job in turn.
    let arena = Arena::new(2 * pages * source_bytes, true).expect("memory for the arena");
    // SAFETY: the arena is this function's alone, and this is the only reference into it.
    let bytes = unsafe { std::slice::from_raw_parts_mut(arena.base(), arena.len()) };
    let (source, target) = bytes.split_at_mut(pages * source_bytes);
    let page = encoded(shape, from);
    source.chunks_exact_mut(source_bytes).for_each(|place| place.copy_from_slice(&page));
    let (source, target) = (&*source, &std::cell::RefCell::new(target));
    let share = pages / PARTS;
    let mut jobs: Vec<Box<dyn FnMut(usize) + '_>> = vec![Box::new(move |part| {
        let bytes = part * share * source_bytes..(part + 1) * share * source_bytes;
        let mut target = target.borrow_mut();
        target[bytes.clone()].copy_from_slice(&source[bytes]);
        black_box(&*target);
    })];
    for tier in tiers.iter().copied() {
        jobs.push(Box::new(move |part| {
            let mut target = target.borrow_mut();
            for page in part * share..(part + 1) * share {
                let source = &source[page * source_bytes..][..source_bytes];
                let target = &mut target[page * target_bytes..][..target_bytes];
                reencode(tier, shape, from, to, source, target).expect("the page is finite");
            }
            black_box(&*target);
        }));
    }
    let times = medians_ms(&mut jobs);
    let read = (pages * source_bytes) as f64 / 1e6;
    let moved = read + (pages * target_bytes) as f64 / 1e6;
    print!("{:20} {:7.2}", format!("{} > {}", from.name(), to.name()), read / times[0]);
    for ms in &times[1..] {
        print!("  {:7.2} {:7.2} {:6.2}", read / ms, moved / ms, times[0] / ms);
    }
    println!();
}

/// Nanoseconds of `job`, the median of many short runs.
fn hot_ns(mut job: impl FnMut()) -> f64 {
    let mut times: Vec<f64> = (0..200)
        .map(|_| {
            let start = Instant::now();
            (0..50).for_each(|_| job());
            start.elapsed().as_secs_f64() * 1e9 / 50.0
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn hot_row(shape: &PageShape, tiers: &[Tier], (from, to): (PageFormat, PageFormat)) {
    let source = encoded(shape, from);
    let mut target = vec![0u8; shape.page_bytes(to)];
    print!("{:20} {:7}", format!("{} > {}", from.name(), to.name()), source.len());
    for tier in tiers {
        let ns = hot_ns(|| {
            reencode(*tier, shape, from, to, black_box(&source), &mut target)
                .expect("the page is finite");
            black_box(&target);
        });
        print!("  {ns:8.0} {:7.1}", source.len() as f64 / ns);
    }
    println!();
}

fn main() {
    let mut numbers = std::env::args().skip(1).filter_map(|word| word.parse().ok());
    let mut next = |default| numbers.next().unwrap_or(default);
    let shape = PageShape { kv_heads: next(3), head_dim: next(64), block_size: next(32) };
    let tiers: Vec<Tier> =
        Tier::available().into_iter().rev().filter(|tier| *tier != Tier::Scalar).collect();
    println!("{shape:?}, one thread, GB = 1e9 bytes");
    println!("\ncold, {} MiB of source pages, GB/s; x = of memcpy", SOURCE_BYTES >> 20);
    print!("{:20} {:>7}", "rung", "memcpy");
    tiers.iter().for_each(|tier| print!("  {:>7} {:>7} {:>6}", tier.name(), "rd+wr", "x"));
    println!();
    RUNGS.iter().for_each(|rung| cold_row(&shape, &tiers, *rung));
    println!("\nhot, one page, ns and GB/s of source bytes");
    print!("{:20} {:>7}", "rung", "bytes");
    tiers.iter().for_each(|tier| print!("  {:>8} {:>7}", tier.name(), "GB/s"));
    println!();
    RUNGS.iter().for_each(|rung| hot_row(&shape, &tiers, *rung));
    let (page, mut anchor) = (encoded(&shape, F16), vec![0f32; shape.kv_heads * shape.head_dim]);
    print!("{:20} {:7}", "key_distinctness", page.len());
    for tier in &tiers {
        let ns = hot_ns(|| {
            anchor.fill(0.0);
            black_box(key_distinctness(*tier, &shape, &page, &mut anchor));
        });
        print!("  {ns:8.0} {:7.1}", page.len() as f64 / ns);
    }
    println!();
}
