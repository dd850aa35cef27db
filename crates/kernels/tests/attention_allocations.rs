//! Attention allocates nothing once its scratch is made, observed or not.

#[path = "support/attention.rs"]
mod support;

use reef_kernels::attention::{AttentionScratch, SequenceRows, paged_attention};
use reef_kernels::dispatch::Tier;
use reef_kernels::pool::BarrierPool;
use reef_kv::page::PageFormat;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};
use support::{SMOLLM2, World};

/// The system's allocator, counting what threads that run kernels ask for (the test harness and a
/// worker that is still starting allocate when they like).
struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static COUNTED: Cell<bool> = const { Cell::new(false) };
}

// SAFETY: every call is passed on to the system's allocator as it is.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if COUNTED.try_with(Cell::get).unwrap_or(false) {
            ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        }
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Allocations while `work` runs.
fn allocations(work: impl FnOnce()) -> usize {
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    work();
    ALLOCATIONS.load(Ordering::Relaxed) - before
}

#[test]
fn nothing_is_allocated_after_the_scratch_is_made() {
    const LENGTH: usize = 1500;
    const ROWS: usize = 64;
    let formats = |block: usize| Some(PageFormat::ALL[block % PageFormat::ALL.len()]);
    let world = World::new(SMOLLM2, LENGTH, 2, 3, formats);
    let pool = BarrierPool::new(2);
    for _ in 0..100 {
        pool.run(&|_| COUNTED.set(true));
    }
    let queries = world.queries(LENGTH - ROWS, ROWS);
    let short = world.queries(LENGTH - 1, 1);
    let mut out = vec![0f32; (ROWS + 2) * SMOLLM2.heads * SMOLLM2.head_dim];
    assert!(allocations(|| drop(vec![0u8; 1])) > 0, "the counter counts");
    for tier in Tier::available().into_iter().filter(|tier| *tier != Tier::Scalar) {
        let mut scratch = AttentionScratch::new(&[SMOLLM2], ROWS + 2, LENGTH, 2);
        scratch.reserve_masses(&[SMOLLM2], ROWS + 2, LENGTH);
        let sequence = |rows: usize, observe| SequenceRows {
            pages: &world.pages,
            first_position: (LENGTH - rows) as u32,
            rows,
            queries: if rows == 1 { &short[..] } else { &queries },
            observe,
        };
        let mut run = |sequences: &[SequenceRows<'_>]| {
            let rows: usize = sequences.iter().map(|sequence| sequence.rows).sum();
            let out = &mut out[..rows * SMOLLM2.heads * SMOLLM2.head_dim];
            paged_attention(tier, &pool, &SMOLLM2, sequences, &world.arena, &mut scratch, out);
        };
        for observe in [false, true] {
            let (decode, prefill) = (sequence(1, observe), sequence(ROWS, observe));
            let alone = allocations(|| run(&[decode])) + allocations(|| run(&[prefill]));
            assert_eq!(alone, 0, "{} alone, observed: {observe}", tier.name());
            // A batch larger than any before may grow the scratch, once.
            run(&[decode, prefill, decode]);
            let again = allocations(|| run(&[decode, prefill, decode]));
            assert_eq!(again, 0, "{} together, observed: {observe}", tier.name());
        }
    }
}
