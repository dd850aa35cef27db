//! Sharing of blocks, one case each: fork and copy-on-write, views that an executor holds, trim, clear, the
//! prefix index's names, partial blocks, and sequences that leave and come back. The twin mixes them all.

mod world;

use std::sync::Arc;

use reef_kv::page::{PageFormat, PageRef, PageShape};
use reef_kv::policy::{PolicyOptions, Sinks, by_name};
use reef_kv::*;
use world::*;

const BLOCK: usize = 16;
const WINDOW: usize = 40;

/// One full-attention group of 3 layers and a window group of 2.
fn pool(budget_bytes: usize) -> BlockPool {
    let shape = |head_dim| PageShape { kv_heads: 2, head_dim, block_size: BLOCK };
    let group = |layers, head_dim, window| {
        let shape = shape(head_dim);
        GroupConfig { layers, shape, window, pinned: vec![] }
    };
    let groups = vec![group(3, 16, None), group(2, 32, Some(WINDOW))];
    let ladder = Ladder::default();
    BlockPool::new(PoolConfig { groups, budget_bytes, prefault: false, ladder }).unwrap()
}

/// A sequence of `tokens` stamped tokens.
fn sequence(pool: &BlockPool, id: u64, contract: Fidelity, tokens: usize) -> Sequence {
    let mut sequence = Sequence::new(pool, request(id, contract));
    extend(&mut sequence, tokens);
    sequence
}

fn page(sequence: &Sequence, group: usize, layer: usize, first: usize) -> PageRef {
    let pages = &sequence.view().groups[group].layers[layer];
    *pages.iter().find(|page| page.first as usize == first).unwrap()
}

fn bytes(sequence: &Sequence, group: usize, layer: usize, first: usize) -> Vec<u8> {
    page_bytes(sequence.pool(), group, &page(sequence, group, layer, first)).to_vec()
}

fn sound(pool: &BlockPool, sequences: &[&Sequence]) {
    assert_eq!(check_invariants(pool, sequences), []);
}

#[test]
fn a_fork_copies_the_open_block_once_and_the_last_sharer_writes_in_place() {
    let pool = pool(1 << 20);
    let mut parent = sequence(&pool, 0, Fidelity::Exact, 40);
    let used = pool.accounts().used_bytes();
    let mut child = parent.fork(1);
    assert!(Arc::ptr_eq(&parent.shared_view(), &child.shared_view()));
    assert_eq!(pool.accounts().used_bytes(), used);
    let before = page(&parent, 0, 1, 32);

    child.grow(1).unwrap();
    let copied = page(&child, 0, 1, 32);
    assert_ne!(copied.offset, before.offset);
    assert_eq!(bytes(&child, 0, 1, 32), bytes(&parent, 0, 1, 32));
    let block_bytes: usize =
        pool.config().groups.iter().map(|group| group.block_bytes(PageFormat::F16)).sum();
    assert_eq!(pool.accounts().used_bytes(), used + block_bytes);
    // Sealed blocks stay shared.
    assert_eq!(page(&child, 0, 1, 16), page(&parent, 0, 1, 16));

    write_page(&pool, &copied, &[7; 64]);
    assert_ne!(bytes(&child, 0, 1, 32), bytes(&parent, 0, 1, 32));
    check_stamps(&parent);
    parent.grow(8).unwrap();
    assert_eq!(page(&parent, 0, 1, 32), before);
    sound(&pool, &[&parent, &child]);
    drop(parent);
    sound(&pool, &[&child]);
    drop(child);
    assert_eq!(pool.accounts().used_bytes(), 0);
}

#[test]
fn a_copy_counts_as_demand_and_waits_for_the_end_of_a_step() {
    let pool = pool(96 << 10);
    let mut parent = sequence(&pool, 0, Fidelity::Exact, 40);
    let mut forks: Vec<Sequence> = Vec::new();
    // Until no open block is to be had any more.
    let shortage = loop {
        let mut fork = parent.fork(1 + forks.len() as u64);
        let plan = plan_relief(&pool, &[demand(&fork, 1, 1)], &Sinks { tail_tokens: 0 });
        let grown = fork.grow(1);
        assert_eq!(plan.shortage.is_some(), grown.is_err());
        assert_eq!(relief_needed_bytes(&pool, &[demand(&fork, 1, 1)]) > 0, grown.is_err());
        match grown {
            Ok(()) => forks.push(fork),
            Err(shortage) => break shortage,
        }
    };
    assert!(forks.len() > 2 && shortage.needed_bytes > shortage.free_bytes);
    // The parent has its open block alone, and needs nothing.
    parent.grow(1).unwrap();
    forks.truncate(1);
    let mut fork = forks[0].fork(9);
    forks[0].grow(1).unwrap();
    forks.push(parent.fork(10));
    let fence = pool.begin_step();
    let refused = parent.grow(1).unwrap_err();
    assert_eq!((refused.free_bytes, refused.needed_bytes), (0, shortage.needed_bytes));
    // Nobody else holds this one: it needs no copy.
    fork.grow(1).unwrap();
    fence.pass();
    parent.grow(1).unwrap();
    sound(&pool, &[&parent, &forks[0], &forks[1], &fork]);
}

/// Tokens that were written before a fork and accepted after it fill a block that is open in the fork: once
/// the index names it, the fork must not write it, even alone.
#[test]
fn a_block_that_the_index_names_is_never_written() {
    let pool = pool(1 << 20);
    let mut parent = sequence(&pool, 0, Fidelity::Exact, 20);
    parent.grow(12).unwrap();
    let mut fork = parent.fork(1);
    parent.commit(12);
    let named = names(&mut parent, 16);
    let block = page(&parent, 0, 0, 16);
    sound(&pool, &[&parent, &fork]);
    drop(parent);
    assert_eq!(page(&fork, 0, 0, 16), block);
    fork.grow(1).unwrap();
    assert_ne!(page(&fork, 0, 0, 16).offset, block.offset);
    sound(&pool, &[&fork]);
    let state = CachedState { held: false, fidelity: Fidelity::Exact, f16: true };
    assert_eq!(pool.cached(named[0]), Some(state));
}

#[test]
fn a_name_is_of_one_block_whatever_its_record_is_used_for_later() {
    let pool = pool(1 << 20);
    let (mut old, mut changes) = (Vec::new(), Vec::new());
    for id in 0..4 {
        let mut sequence = sequence(&pool, id, Fidelity::Exact, 32);
        let named = [names(&mut sequence, 0), names(&mut sequence, 16)].concat();
        assert!(named.iter().all(|name| pool.cached(*name).is_some() && !old.contains(name)));
        for stale in &old {
            assert!(pool.attach(*stale).is_none() && pool.cached(*stale).is_none());
            assert_eq!(pool.uncache(*stale), 0);
        }
        sound(&pool, &[&sequence]);
        drop(sequence);
        named.iter().for_each(|name| assert!(pool.uncache(*name) > 0));
        pool.drain_cache_changes(&mut changes);
        old.extend(named);
    }
    assert_eq!(changes.len(), old.len());
    assert_eq!(pool.accounts().used_bytes(), 0);
}

/// An f16 block that was computed from int8 pages is no better than those.
#[test]
fn copied_rows_bring_the_fidelity_that_they_were_computed_with() {
    let pool = pool(1 << 20);
    let mut source = sequence(&pool, 0, Fidelity::Int8, 16);
    let plan = plan_format_at_seal(&source, PageFormat::Int8, 0, 0);
    apply(&mut source, &plan, 1);
    extend(&mut source, 16);
    let named = names(&mut source, 16);
    let state = CachedState { held: true, fidelity: Fidelity::Int8, f16: true };
    assert_eq!(pool.cached(named[0]), Some(state));
    let mut copy = Sequence::new(&pool, request(1, Fidelity::Int8));
    let guards: Vec<_> = named.iter().map(|name| pool.attach(*name)).collect();
    copy.copy_rows(&guards, 9).unwrap();
    assert_eq!((copy.next_position(), copy.fidelity()), (9, Fidelity::Int8));
    // And what is computed from them is no better either.
    copy.grow(7).unwrap();
    copy.commit(7);
    let named = names(&mut copy, 0);
    assert_eq!(pool.cached(named[0]), Some(state));
    sound(&pool, &[&source, &copy]);
}

/// The pool is full but for three open blocks: four sharers can go on, a fifth cannot.
#[test]
fn all_sharers_together_need_one_copy_less_than_they_are() {
    let pool = pool(96 << 10);
    let parent = sequence(&pool, 0, Fidelity::Exact, 40);
    let mut sharers = vec![parent];
    let needed = |sharers: &[Sequence]| {
        let demands: Vec<Demand<'_>> = sharers.iter().map(|one| demand(one, 1, 1)).collect();
        relief_needed_bytes(&pool, &demands)
    };
    while needed(&sharers) == 0 {
        sharers.push(sharers[0].fork(sharers.len() as u64));
    }
    assert!(sharers.len() > 3);
    let last = sharers.pop();
    // It holds the block, but does not go on.
    assert!(needed(&sharers) > 0);
    drop(last);
    assert_eq!(needed(&sharers), 0);
    sharers.iter_mut().for_each(|sharer| sharer.grow(1).unwrap());
    // Nothing is left.
    let more = sharers[0].fork(99);
    assert!(needed(std::slice::from_ref(&more)) > 0);
    sound(&pool, &sharers.iter().chain([&more]).collect::<Vec<_>>());
}

#[test]
fn a_view_that_somebody_holds_does_not_change_and_is_not_copied_for_decode() {
    let pool = pool(1 << 20);
    let mut sequence = sequence(&pool, 0, Fidelity::Exact, 10);
    let place = |sequence: &Sequence| Arc::as_ptr(&sequence.shared_view());
    let first = place(&sequence);
    for _ in 0..100 {
        sequence.grow(1).unwrap();
        let held = sequence.shared_view();
        drop(held);
        sequence.commit(1);
    }
    assert_eq!(place(&sequence), first);
    let held = sequence.shared_view();
    let before = (*held).clone();
    sequence.grow(40).unwrap();
    assert_eq!(*held, before);
    assert_ne!(place(&sequence), first);
    assert_eq!(sequence.view().groups[0].layers[0].len(), before.groups[0].layers[0].len() + 3);
}

#[test]
fn a_token_within_a_block_allocates_nothing() {
    let pool = pool(1 << 20);
    let mut sequence = sequence(&pool, 0, Fidelity::Exact, 33);
    let allocated = allocation_counter::measure(|| {
        for _ in 0..14 {
            sequence.grow(1).unwrap();
            sequence.commit(1);
        }
    });
    assert_eq!(allocated.count_total, 0, "{allocated:?}");
    sequence.grow(2).unwrap();
    assert_eq!(sequence.view().groups[0].layers[0].len(), 4);
}

#[test]
fn rejected_drafts_are_given_back_and_a_cleared_sequence_starts_over() {
    let pool = pool(1 << 20);
    let mut sequence = sequence(&pool, 0, Fidelity::Evict, 30);
    let used = pool.accounts().used_bytes();
    sequence.grow(20).unwrap();
    sequence.commit(1);
    sequence.trim();
    assert_eq!((sequence.next_position(), pool.accounts().used_bytes()), (31, used));
    sequence.trim();
    extend(&mut sequence, 300);
    let plan = plan_token_budget(&sequence, &Sinks { tail_tokens: 16 }, 64, 1);
    apply(&mut sequence, &plan, 3);
    let (drops, peak) = (sequence.ledger().blocks(Rung::Evict), sequence.usage().peak_bytes);
    assert!(drops > 0 && sequence.usage().dropped_tokens > 0.0);
    // Only what is computed afterwards has attended to less.
    assert_eq!(sequence.fidelity(), Fidelity::Exact);
    extend(&mut sequence, 1);
    assert_eq!(sequence.fidelity(), Fidelity::Evict);
    sequence.clear();
    assert_eq!((sequence.next_position(), pool.accounts().used_bytes()), (0, 0));
    assert_eq!(sequence.fidelity(), Fidelity::Exact);
    let usage = sequence.usage();
    assert_eq!((usage.peak_bytes, usage.dropped_tokens), (peak, 0.0));
    assert_eq!(sequence.ledger().blocks(Rung::Evict), drops);
    extend(&mut sequence, 50);
    check(&pool, &[&sequence]);
}

/// Names of the block at `first` in both groups.
fn names(sequence: &mut Sequence, first: usize) -> Vec<CachedBlock> {
    sequence.seal_identity(first).unwrap().into_iter().flatten().collect()
}

#[test]
fn a_cached_block_outlives_its_sequence_and_is_given_back_on_demand() {
    let pool = pool(1 << 20);
    let mut first = sequence(&pool, 0, Fidelity::Exact, 40);
    assert_eq!(first.seal_identity(32), None);
    let named = [names(&mut first, 0), names(&mut first, 16)].concat();
    assert_eq!(named.len(), 4);
    let mut changes = Vec::new();
    pool.drain_cache_changes(&mut changes);
    assert_eq!(changes, []);
    drop(first);
    pool.drain_cache_changes(&mut changes);
    assert_eq!(changes.len(), 4);
    assert!(named.iter().all(|name| changes.contains(&CacheChange::Idle(*name))));
    let idle = pool.accounts();
    assert_eq!((idle.cached_bytes, idle.held_bytes()), (idle.used_bytes(), 0));
    let state = CachedState { held: false, fidelity: Fidelity::Exact, f16: true };
    assert_eq!(pool.cached(named[0]), Some(state));

    // Attached, let go, attached: heard of once, as it is in the end.
    drop(pool.attach(named[0]));
    let guard = pool.attach(named[0]).unwrap();
    assert_eq!(pool.uncache(named[0]), 0);
    changes.clear();
    pool.drain_cache_changes(&mut changes);
    assert_eq!(changes, [CacheChange::Gone(named[0])]);
    drop(guard);
    let freed: usize = named[1..].iter().map(|name| pool.uncache(*name)).sum();
    assert!(freed > 0 && pool.attach(named[1]).is_none() && pool.cached(named[1]).is_none());
    assert_eq!((pool.accounts().used_bytes(), pool.accounts().cached_bytes), (0, 0));

    // A name that is not heard of yet is not given to another block.
    let mut second = sequence(&pool, 1, Fidelity::Exact, 16);
    let other = names(&mut second, 0);
    assert!(other.iter().all(|name| !named[1..].contains(name)));
    sound(&pool, &[&second]);
}

#[test]
fn an_attached_prefix_is_shared_and_brings_its_fidelity() {
    let pool = pool(1 << 20);
    let mut first = sequence(&pool, 0, Fidelity::Int8, 96);
    let plan = plan_format_at_seal(&first, PageFormat::Int8, 0, 0);
    apply(&mut first, &plan, 1);
    extend(&mut first, 20);
    let attached = |first: usize, name: CachedBlock, group: usize| AttachedBlock {
        first,
        group,
        guard: pool.attach(name).unwrap(),
    };
    let mut blocks = Vec::new();
    for start in (0..112).step_by(BLOCK) {
        let named = first.seal_identity(start).unwrap();
        // The window group has let go of the oldest.
        assert_eq!(named[1].is_some(), start + BLOCK + WINDOW > 117);
        blocks.extend(named[0].map(|name| attached(start, name, 0)));
        blocks.extend(named[1].map(|name| attached(start, name, 1)));
    }
    let state = blocks.len();
    let used = pool.accounts().used_bytes();
    let mut second = Sequence::new(&pool, request(1, Fidelity::Int8));
    second.attach_prefix(blocks);
    assert_eq!((second.next_position(), pool.accounts().used_bytes()), (112, used));
    assert_eq!(state, 7 + second.view().groups[1].layers[0].len());
    // The seventh block was computed from int8 pages.
    assert_eq!(second.fidelity(), Fidelity::Int8);
    assert_eq!(second.usage().relief, []);
    sound(&pool, &[&first, &second]);
    drop(first);
    second.grow(3).unwrap();
    second.commit(3);
    sound(&pool, &[&second]);
    // Seven blocks in full attention; the window has kept its last ones.
    assert_eq!(second.usage().tokens_by_format.iter().map(|(_, t)| t).sum::<f64>(), 115.0);
}

#[test]
fn rows_are_copied_from_whole_f16_blocks_only() {
    let pool = pool(1 << 20);
    let mut source = sequence(&pool, 0, Fidelity::Int8, 32);
    let named = names(&mut source, 0);
    let guards = || named.iter().map(|name| pool.attach(*name)).collect::<Vec<_>>();
    let mut copy = Sequence::new(&pool, request(0, Fidelity::Int8));
    let partial = vec![guards().swap_remove(0), None];
    for (source, rows) in [(guards(), 0), (guards(), BLOCK), (partial, 5), (vec![], 5)] {
        copy.copy_rows(&source, rows).unwrap();
        assert_eq!(copy.next_position(), 0);
    }
    let fence = pool.begin_step();
    assert_eq!(copy.copy_rows(&guards(), 5).unwrap_err().free_bytes, 0);
    fence.pass();
    copy.copy_rows(&guards(), 5).unwrap();
    assert_eq!(copy.next_position(), 5);
    // Both are of one request, whose stamps their pages bear.
    check(&pool, &[&source]);
    check(&pool, &[&copy]);
    // Not at a block boundary any more.
    copy.copy_rows(&guards(), 5).unwrap();
    assert_eq!(copy.next_position(), 5);

    let plan = plan_format_at_seal(&source, PageFormat::Int8, 0, 0);
    apply(&mut source, &plan, 1);
    assert_eq!(
        pool.cached(named[0]).map(|state| (state.fidelity, state.f16)),
        Some((Fidelity::Int8, false))
    );
    let mut lossy = Sequence::new(&pool, request(2, Fidelity::Int8));
    lossy.copy_rows(&guards(), 5).unwrap();
    assert_eq!(lossy.next_position(), 0);
}

/// A sequence with gaps, four formats, scores and relative positions.
fn battered(pool: &BlockPool) -> Sequence {
    let config = SequenceConfig { trained_context: 200, ..request(3, Fidelity::Evict) };
    let mut sequence = Sequence::new(pool, config);
    for (tokens, format) in [
        (100, PageFormat::Int4),
        (60, PageFormat::Int8),
        (50, PageFormat::Fp8E4M3),
        (30, PageFormat::F16),
    ] {
        extend(&mut sequence, tokens);
        let plan = plan_format_at_seal(&sequence, format, 16, 0);
        apply(&mut sequence, &plan, 1);
    }
    for layer in 0..3 {
        let pages = sequence.view().groups[0].layers[layer].len();
        let masses: Vec<f32> = (0..pages).map(|page| ((page * 7 + layer) % 11) as f32).collect();
        sequence.observe_masses(0, layer, &masses, 0.0);
    }
    let policy = by_name("tova", &PolicyOptions { tail_tokens: 32, ..PolicyOptions::default() });
    let plan = plan_token_budget(&sequence, &*policy.unwrap(), 160, 1);
    apply(&mut sequence, &plan, 2);
    assert!(sequence.positions_are_relative() && sequence.dropped_pages() > 0);
    sequence
}

/// What a policy that has observed would drop next.
fn next_drops(sequence: &Sequence) -> Vec<relief::MoveKind> {
    let policy = by_name("tova", &PolicyOptions { tail_tokens: 0, ..PolicyOptions::default() });
    let plan = plan_token_budget(sequence, &*policy.unwrap(), 64, 1);
    assert!(!plan.moves.is_empty());
    plan.moves.iter().map(|planned| planned.kind).collect()
}

#[test]
fn a_sequence_comes_back_as_it_was_on_another_thread() {
    let pool = pool(1 << 20);
    let mut sequence = battered(&pool);
    check(&pool, &[&sequence]);
    let (drops, usage) = (next_drops(&sequence), sequence.usage());
    let view = sequence.view().clone();
    let (image, pinned) = sequence.pin();
    assert_eq!(pinned.bytes(), usage.held_bytes);
    // Pinned pages do not give way.
    let plan = plan_token_budget(&sequence, &Sinks { tail_tokens: 0 }, 64, 1);
    assert_eq!(plan.moves, []);
    let bytes = std::thread::spawn(move || {
        let mut bytes = vec![0; pinned.bytes()];
        assert_eq!(pinned.copy_to(0, &mut bytes), bytes.len());
        assert_eq!(pinned.copy_to(bytes.len(), &mut [0; 4]), 0);
        bytes
    });
    let bytes = bytes.join().unwrap();
    sequence.clear();
    assert_eq!(pool.accounts().used_bytes(), 0);

    let mut pages = sequence.restore(&image).unwrap();
    assert_eq!(sequence.next_position(), 0);
    let pages = std::thread::spawn(move || {
        assert_eq!(pages.copy_from(0, &bytes), bytes.len());
        pages
    });
    sequence.adopt(image, pages.join().unwrap());
    check(&pool, &[&sequence]);
    assert_eq!(sequence.usage(), usage);
    assert_eq!(next_drops(&sequence), drops);
    for (old, new) in view.groups.iter().zip(&sequence.view().groups) {
        assert_eq!((&old.runs, &old.shifts), (&new.runs, &new.shifts));
    }
    assert_eq!(sequence.fork(4).fidelity(), sequence.fidelity());
    extend(&mut sequence, 40);
    check(&pool, &[&sequence]);
}

#[test]
fn a_fork_of_a_battered_sequence_is_like_it() {
    let pool = pool(1 << 20);
    let sequence = battered(&pool);
    let fork = sequence.fork(8);
    assert_eq!(fork.view(), sequence.view());
    let of = |entry: &LedgerEntry, request| LedgerEntry { request, ..*entry };
    let relief: Vec<LedgerEntry> = sequence.usage().relief.iter().map(|e| of(e, 8)).collect();
    assert_eq!(fork.usage(), KvUsage { relief, ..sequence.usage() });
    // Its blocks are held twice and do not give way; once the other is gone they do, in the same order.
    assert_eq!(plan_token_budget(&fork, &Sinks { tail_tokens: 0 }, 64, 1).moves, []);
    let alone = next_drops(&battered(&pool));
    drop(sequence);
    assert_eq!(next_drops(&fork), alone);
    sound(&pool, &[&fork]);
}

#[test]
fn pages_come_back_all_or_none() {
    let pool = pool(96 << 10);
    let mut away = sequence(&pool, 0, Fidelity::Exact, 64);
    let (image, pinned) = away.pin();
    let mut bytes = vec![0; pinned.bytes()];
    pinned.copy_to(0, &mut bytes);
    drop(pinned);
    away.clear();
    let mut other = sequence(&pool, 1, Fidelity::Exact, 64);
    let before = pool.accounts();
    let shortage = away.restore(&image).unwrap_err();
    assert_eq!(shortage.needed_bytes, image.bytes());
    assert_eq!(pool.accounts(), before);
    other.clear();
    // Pages that nobody adopts go back.
    drop(away.restore(&image).unwrap());
    assert_eq!(pool.accounts().used_bytes(), 0);
    let mut pages = away.restore(&image).unwrap();
    bytes.chunks(999).fold(0, |offset, piece| offset + pages.copy_from(offset, piece));
    away.adopt(image, pages);
    check(&pool, &[&away, &other]);
}
