//! The map of random pools adds up to their accounts, page by page; each obstacle is told from the others.

use super::*;
use crate::admission::Need;
use crate::page::PageShape;
use crate::policy::Sinks;
use crate::transfer::PinnedPages;
use crate::{
    Demand, Fidelity, GroupConfig, Ladder, PoolConfig, SequenceConfig, StepFence, apply_relief,
    plan_format_at_seal, plan_relief,
};

const BLOCK: usize = 16;

/// xorshift64*: the tests need no better.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) as usize % limit
    }
}

/// Two groups with pages of two shapes, the second with a window.
fn pool(budget_bytes: usize) -> BlockPool {
    let shape = |kv_heads| PageShape { kv_heads, head_dim: 16, block_size: BLOCK };
    let group = |layers, kv_heads, window| GroupConfig {
        layers,
        shape: shape(kv_heads),
        window,
        pinned: vec![],
    };
    let groups = vec![group(3, 2, None), group(2, 1, Some(40))];
    let ladder = Ladder::default();
    BlockPool::new(PoolConfig { groups, budget_bytes, prefault: false, ladder }).unwrap()
}

fn sequence(pool: &BlockPool, request: u64, contract: Fidelity) -> Sequence {
    let (priority, trained_context, max_tokens) = (0, 1 << 20, None);
    Sequence::new(pool, SequenceConfig { request, contract, priority, trained_context, max_tokens })
}

/// Asserts that sums, cells and accounts say the same.
fn assert_adds_up(pool: &BlockPool, map: &PageMap) {
    let accounts = map.accounts;
    assert_eq!(accounts, pool.accounts());
    let sum = |states: &[PageState]| -> ByFormat<usize> {
        ByFormat::from_fn(|format| {
            states.iter().map(|state| map.held[*state as usize][format]).sum()
        })
    };
    assert_eq!(sum(&PageState::ALL), accounts.used);
    assert_eq!(sum(&[PageState::Cached]).total(), accounts.cached_bytes);
    let of_classes = |pages: &dyn Fn(&ClassPages) -> usize| -> usize {
        map.classes.iter().map(|class| pages(class) * class.page_bytes).sum()
    };
    assert_eq!(of_classes(&|class| class.used), accounts.used_bytes() + accounts.fenced_bytes);
    assert_eq!(of_classes(&|class| class.fenced), accounts.fenced_bytes);
    assert_eq!(of_classes(&|class| class.cached), accounts.cached_bytes);
    assert_eq!(of_classes(&|class| class.pinned), sum(&[PageState::Pinned]).total());
    let free: usize = of_classes(&|class| class.spans * class.slots - class.used);
    let reserved = map.empty_spans.min(map.reserve_spans);
    assert_eq!(free + (map.empty_spans - reserved) * map.span_bytes, accounts.free_bytes);
    let unshared = |holder: &HolderBytes| holder.bytes.total() - holder.shared_bytes;
    assert!(map.holders.iter().map(unshared).sum::<usize>() <= accounts.held_bytes());
    if map.pages_a_cell == 1 && map.spans_a_cell == 1 {
        assert_cells_add_up(map);
    }
}

/// Cells that are one page each say what the sums say.
fn assert_cells_add_up(map: &PageMap) {
    let (mut held, mut of_nobody) = (map.held.map(|_| ByFormat::<usize>::default()), [0; 9]);
    let mut of_one: std::collections::BTreeMap<u64, usize> = std::collections::BTreeMap::new();
    for span in &map.spans {
        for run in &span.runs {
            let kind = map.kinds[run.kind];
            let page_bytes = if span.page_bytes == 0 { map.span_bytes } else { span.page_bytes };
            match kind.format {
                Some(format) => held[kind.state as usize][format] += run.cells * page_bytes,
                None => of_nobody[kind.state as usize] += run.cells * page_bytes,
            }
            if let Holder::One(label) = kind.holder {
                *of_one.entry(label).or_default() += run.cells * page_bytes;
            }
        }
    }
    assert_eq!(held, map.held);
    let accounts = map.accounts;
    assert_eq!(of_nobody[PageState::Free as usize], accounts.free_bytes);
    assert_eq!(of_nobody[PageState::Reserved as usize], accounts.reserved_bytes);
    assert_eq!(of_nobody[PageState::Fenced as usize], accounts.fenced_bytes);
    for holder in &map.holders {
        let alone = holder.bytes.total() - holder.shared_bytes;
        assert_eq!(of_one.remove(&holder.label).unwrap_or(0), alone, "{holder:?}");
    }
    assert_eq!(of_one.len(), 0);
}

/// A pool to which random things happen.
struct World {
    pool: BlockPool,
    random: Random,
    /// With the label of their owner, which several have.
    sequences: Vec<(u64, Sequence)>,
    fence: Option<StepFence>,
    pins: Vec<PinnedPages>,
    next: u64,
}

impl World {
    fn happen(&mut self) {
        match self.random.below(10) {
            0..=3 => self.grow(),
            4 if self.sequences.len() < 6 => {
                let contract = Fidelity::ALL[self.random.below(4)];
                let added = sequence(&self.pool, self.next, contract);
                self.sequences.push((self.next, added));
                self.next += 1;
            }
            5 if self.fence.is_none() => self.fork(),
            6 => self.shrink(),
            7 => self.cache(),
            8 => self.fence = self.fence.take().is_none().then(|| self.pool.begin_step()),
            _ => self.leave(),
        }
    }

    fn any(&mut self) -> Option<usize> {
        (!self.sequences.is_empty()).then(|| self.random.below(self.sequences.len()))
    }

    fn grow(&mut self) {
        let Some(index) = self.any() else { return };
        let tokens = 1 + self.random.below(70);
        if self.sequences[index].1.grow(tokens).is_ok() {
            self.sequences[index].1.commit(tokens);
        }
    }

    fn fork(&mut self) {
        let Some(index) = self.any() else { return };
        let (owner, parent) = &self.sequences[index];
        let owner = if self.random.below(2) == 0 { *owner } else { self.next };
        let child = parent.fork(self.next);
        self.next += 1;
        self.sequences.push((owner, child));
        self.sequences.sort_by_key(|(owner, _)| *owner);
    }

    fn shrink(&mut self) {
        let Some(index) = self.any().filter(|_| self.fence.is_none()) else { return };
        let format = PageFormat::ALL[self.random.below(PageFormat::ALL.len())];
        let plan = plan_format_at_seal(&self.sequences[index].1, format, 0, 0);
        let mut all: Vec<&mut Sequence> = self.sequences.iter_mut().map(|(_, of)| of).collect();
        let mut encode = |jobs: &mut [crate::EncodeJob<'_>]| {
            jobs.iter_mut().for_each(|job| job.target.fill(0));
        };
        // Where there is no room for the new pages nothing is done.
        let _ = apply_relief(&self.pool, &mut all, &plan, 0, &mut encode);
    }

    /// Names a block to a prefix index that never lets go of it.
    fn cache(&mut self) {
        let Some(index) = self.any() else { return };
        let sequence = &self.sequences[index].1;
        let mut state = self.pool.shared.state();
        for table in &sequence.tables {
            let sealed = table.iter().find(|entry| sequence.is_sealed(entry.first));
            if let Some(entry) = sealed {
                state.blocks[entry.guard.index() as usize].cached = true;
            }
        }
    }

    fn leave(&mut self) {
        let Some(index) = self.any() else { return };
        match self.random.below(3) {
            0 if self.pins.len() < 2 => self.pins.push(self.sequences[index].1.pin().1),
            1 => drop(self.pins.pop()),
            _ => drop(self.sequences.remove(index)),
        }
    }

    fn map(&self, most_cells: usize) -> PageMap {
        let labeled = self.sequences.iter().map(|(owner, sequence)| (*owner, sequence));
        self.pool.page_map(labeled, most_cells)
    }
}

#[test]
fn a_map_adds_up_to_the_accounts_whatever_has_happened() {
    let mut seen = [0; PageState::ALL.len()];
    let mut rooms = std::collections::BTreeMap::new();
    for seed in 1..40 {
        let (sequences, pins, fence) = (Vec::new(), Vec::new(), None);
        let (pool, random) = (pool(160 << 10), Random(seed * 0x9E37_79B9));
        let mut world = World { pool, random, sequences, fence, pins, next: 0 };
        for _ in 0..120 {
            world.happen();
            for most_cells in [4096, 40, 3] {
                let map = world.map(most_cells);
                assert_adds_up(&world.pool, &map);
                let cells = map.spans.iter().flat_map(|span| &span.runs).map(|run| run.cells);
                assert!(cells.sum::<usize>() <= most_cells.max(1));
            }
            let map = world.map(4096);
            map.kinds.iter().for_each(|kind| seen[kind.state as usize] += 1);
            let tokens = 1 + world.random.below(200);
            let need = Need { tokens, floor: PageFormat::F16, step_tokens: tokens };
            let (room, bytes) = world.pool.room(&map, need);
            let name = format!("{room:?}");
            *rooms.entry(name).or_insert(0) += 1;
            let pages = world.pool.pages_for(need);
            let reserve = world.pool.shared.geometry.reserve_spans;
            let as_they_lie = world.pool.shared.state().spans.can_take(&pages, reserve);
            assert_eq!(room == Room::Free, as_they_lie, "{bytes} bytes");
        }
    }
    // Encoding is not seen: nothing looks while a kernel runs.
    let unseen = PageState::ALL.into_iter().filter(|state| seen[*state as usize] == 0);
    assert_eq!(unseen.collect::<Vec<_>>(), [PageState::Encoding]);
    assert!(rooms.len() >= 5, "{rooms:?}");
}

#[test]
fn cells_stand_for_what_most_of_their_bytes_are() {
    let pool = pool(160 << 10);
    let mut held = sequence(&pool, 7, Fidelity::Exact);
    held.grow(100).unwrap();
    held.commit(100);
    let map = pool.page_map([(7, &held)], 1);
    assert_eq!((map.spans.len(), map.spans_a_cell), (1, map.span_count));
    assert_eq!(map.kinds[map.spans[0].runs[0].kind].state, PageState::Free);
    while pool.accounts().free_bytes * 3 > pool.accounts().budget_bytes {
        held.grow(16).unwrap();
        held.commit(16);
    }
    let map = pool.page_map([(7, &held)], 1);
    let kind = map.kinds[map.spans[0].runs[0].kind];
    assert_eq!((kind.state, kind.holder), (PageState::Sealed, Holder::One(7)));
    assert_eq!(kind.format, Some(PageFormat::F16));
}

fn room(pool: &BlockPool, sequences: &[&Sequence], tokens: usize) -> Room {
    let map = pool.page_map(sequences.iter().map(|of| (of.config().request, *of)), 4096);
    let need = Need { tokens, floor: PageFormat::F16, step_tokens: tokens };
    pool.room(&map, need).0
}

/// Grows until at most `tokens` tokens would still find room.
fn fill(pool: &BlockPool, sequence: &mut Sequence, tokens: usize) {
    while room(pool, &[sequence], tokens + BLOCK) == Room::Free {
        sequence.grow(BLOCK).unwrap();
        sequence.commit(BLOCK);
    }
}

#[test]
fn each_obstacle_is_told_from_the_others() {
    let shape = PageShape { kv_heads: 2, head_dim: 16, block_size: BLOCK };
    let groups = vec![GroupConfig { layers: 3, shape, window: None, pinned: vec![] }];
    let ladder = Ladder::default();
    let config = PoolConfig { groups, budget_bytes: 160 << 10, prefault: false, ladder };
    let pool = BlockPool::new(config).unwrap();
    let mut first = sequence(&pool, 0, Fidelity::Int8);
    assert_eq!(room(&pool, &[], 200), Room::Free);
    fill(&pool, &mut first, 0);
    // Holders, but for what the reserve holds.
    assert_eq!(room(&pool, &[&first], 4 * BLOCK), Room::Held);
    assert_eq!(room(&pool, &[&first], BLOCK), Room::Reserved);
    let (_, pinned) = first.pin();
    drop(first);
    assert_eq!(room(&pool, &[], 4 * BLOCK), Room::Pinned);
    let fence = pool.begin_step();
    drop(pinned);
    assert_eq!(room(&pool, &[], 4 * BLOCK), Room::Fenced);
    fence.pass();
    assert_eq!(room(&pool, &[], 4 * BLOCK), Room::Free);
    // Free bytes in spans of int8 pages.
    let mut scattered = sequence(&pool, 1, Fidelity::Int8);
    fill(&pool, &mut scattered, 4 * BLOCK);
    let demand =
        |sequence| Demand { sequence, tokens: 6 * BLOCK, step_tokens: BLOCK, stretch_tokens: 0 };
    let plan = plan_relief(&pool, &[demand(&scattered)], &Sinks { tail_tokens: 16 });
    let mut encode = |jobs: &mut [crate::EncodeJob<'_>]| {
        jobs.iter_mut().for_each(|job| job.target.fill(0));
    };
    apply_relief(&pool, &mut [&mut scattered], &plan, 0, &mut encode).unwrap();
    let tokens = (1..40).map(|blocks| blocks * BLOCK);
    let rooms: Vec<Room> = tokens.map(|tokens| room(&pool, &[&scattered], tokens)).collect();
    let order = |room: &Room| match room {
        Room::Free => 0,
        Room::Scattered => 1,
        Room::Reserved => 2,
        _ => 3,
    };
    assert!(rooms.is_sorted_by_key(order), "{rooms:?}");
    // Idle prefixes.
    let mut cached = sequence(&pool, 2, Fidelity::Exact);
    drop(scattered);
    fill(&pool, &mut cached, 0);
    for entry in &cached.tables[0] {
        pool.shared.state().blocks[entry.guard.index() as usize].cached = true;
    }
    drop(cached);
    assert_eq!(room(&pool, &[], 4 * BLOCK), Room::Cached);
}
