//! Asking for memory before it is needed.
//!
//! The pages that relief re-encodes are in no cache, and the work comes in bursts at several places of a
//! page, which hardware prefetching follows badly: without this, half the time goes into waiting
//! (measured; `encode_bench` cold against hot).

use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};

/// Bytes to read ahead of a source: 20 GB/s times 100 ns, the latency of memory.
pub(super) const SOURCE_AHEAD: usize = 2048;
/// Bytes to fetch ahead of a target, which is at most half as long as an f16 source.
pub(super) const TARGET_AHEAD: usize = 1024;

/// Fetches the cache line of `place`, which may lie anywhere: the part, head or page that follows.
#[inline(always)]
pub(super) fn prefetch(place: *const u8) {
    // SAFETY: a hint: it reads nothing that the program can see, and no address makes it fault.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(place.cast()) }
}

/// Copies codes; `source` and `target` are equally long.
#[inline(always)]
pub(super) fn copy(source: &[u8], target: &mut [u8]) {
    for (source, target) in source.chunks(64).zip(target.chunks_mut(64)) {
        prefetch(source.as_ptr().wrapping_add(SOURCE_AHEAD));
        prefetch(target.as_ptr().wrapping_add(TARGET_AHEAD));
        target.copy_from_slice(source);
    }
}
