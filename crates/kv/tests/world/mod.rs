//! What the tests of this crate share: small pools, and pages whose bytes say whose they are.

#![allow(dead_code)] // each test binary uses a part of it

use reef_kv::page::{PageFormat, PageRef, PageShape};
use reef_kv::*;

/// The shape of SmolLM2-135M's pages.
pub const SMOLLM2: PageShape = PageShape { kv_heads: 3, head_dim: 64, block_size: 32 };

/// A pool like the one of `reef run smollm2 --kv-memory`.
pub fn smollm2_pool(budget_bytes: usize) -> BlockPool {
    let groups = vec![GroupConfig { layers: 30, shape: SMOLLM2, window: None, pinned: vec![] }];
    BlockPool::new(PoolConfig { groups, budget_bytes, prefault: false, ladder: Ladder::default() })
        .unwrap()
}

/// A request that may go on for very long.
pub fn request(request: u64, contract: Fidelity) -> SequenceConfig {
    let trained_context = 1 << 20;
    SequenceConfig { request, contract, priority: 0, trained_context, max_tokens: Some(1 << 40) }
}

/// What `sequence` will need: `tokens` more, `step_tokens` at a time, and no longer stretch.
pub fn demand(sequence: &Sequence, tokens: usize, step_tokens: usize) -> Demand<'_> {
    Demand { sequence, tokens, step_tokens, stretch_tokens: tokens }
}

/// The byte that fills the page of this block in this layer.
pub fn stamp(request: u64, group: usize, layer: usize, first: usize) -> u8 {
    let mixed = request * 131 + group as u64 * 31 + layer as u64 * 17 + first as u64 * 7;
    (mixed % 251) as u8
}

/// The bytes of a page.
pub fn page_bytes<'a>(pool: &'a BlockPool, group: usize, page: &PageRef) -> &'a [u8] {
    let bytes = pool.config().groups[group].shape.page_bytes(page.format);
    &pool.arena().bytes()[page.byte_offset()..][..bytes]
}

/// Writes the bytes of a page that one sequence alone holds.
pub fn write_page(pool: &BlockPool, page: &PageRef, bytes: &[u8]) {
    assert!(page.byte_offset() + bytes.len() <= pool.arena().len());
    // SAFETY: in bounds; no one else holds the page, no slice of the arena is alive, and tests are
    // single-threaded.
    unsafe {
        let target = pool.arena().base().add(page.byte_offset());
        target.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
    }
}

/// Writes the stamps of all pages of blocks from position `from` on, as a model would write K and V.
pub fn write_stamps(sequence: &Sequence, from: usize) {
    let pool = sequence.pool();
    let request = sequence.config().request;
    for (group, view) in sequence.view().groups.iter().enumerate() {
        let bytes = pool.config().groups[group].shape.page_bytes(PageFormat::F16);
        for (layer, pages) in view.layers.iter().enumerate() {
            for page in pages.iter().filter(|page| page.first as usize >= from) {
                let byte = stamp(request, group, layer, page.first as usize);
                // SAFETY: the page belongs to this sequence alone, no slice of the arena is alive, and
                // tests are single-threaded.
                unsafe { pool.arena().base().add(page.byte_offset()).write_bytes(byte, bytes) };
            }
        }
    }
}

/// Fails where a page does not hold its stamp (in any format).
pub fn check_stamps(sequence: &Sequence) {
    for (group, view) in sequence.view().groups.iter().enumerate() {
        for (layer, pages) in view.layers.iter().enumerate() {
            for page in pages {
                let first = page.first as usize;
                let expected = stamp(sequence.config().request, group, layer, first);
                let bytes = page_bytes(sequence.pool(), group, page);
                let good = bytes.iter().all(|&byte| byte == expected);
                assert!(good, "group {group} layer {layer} block {first}: foreign bytes");
            }
        }
    }
}

/// An encode kernel that keeps stamps readable.
pub fn keep_stamp(jobs: &mut [EncodeJob<'_>]) {
    for job in jobs {
        assert_eq!(job.source.len(), job.shape.page_bytes(job.source_format));
        assert_eq!(job.target.len(), job.shape.page_bytes(job.target_format));
        job.target.fill(job.source[0]);
    }
}

/// Carries a plan out for one sequence.
pub fn apply(sequence: &mut Sequence, plan: &ReliefPlan, step: u64) {
    let pool = sequence.pool().clone();
    apply_relief(&pool, &mut [sequence], plan, step, &mut keep_stamp).unwrap();
}

/// Grows, stamps and commits `tokens` tokens.
pub fn extend(sequence: &mut Sequence, tokens: usize) {
    let from = sequence.next_position().next_multiple_of(sequence.pool().config().block_size());
    sequence.grow(tokens).unwrap();
    write_stamps(sequence, from);
    sequence.commit(tokens);
}

/// Fails where an invariant does not hold or a page is not what it should be.
pub fn check(pool: &BlockPool, sequences: &[&Sequence]) {
    let violations = check_invariants(pool, sequences);
    assert!(violations.is_empty(), "{}", violations[0]);
    sequences.iter().for_each(|sequence| check_stamps(sequence));
}

/// Original first positions of the blocks that the first layer of `group` shows.
pub fn firsts(sequence: &Sequence, group: usize) -> Vec<usize> {
    sequence.view().groups[group].layers[0].iter().map(|page| page.first as usize).collect()
}

/// Formats of the first layer of `group`.
pub fn formats(sequence: &Sequence, group: usize) -> Vec<PageFormat> {
    sequence.view().groups[group].layers[0].iter().map(|page| page.format).collect()
}
