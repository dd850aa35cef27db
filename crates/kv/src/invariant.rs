//! What must hold at any time: one registry, used by tests and callable on a pool in production.

use std::collections::{HashMap, HashSet};

use crate::account::ByFormat;
use crate::block::Page;
use crate::ladder::{Fidelity, Rung};
use crate::page::{PAGE_ALIGN, PageFormat};
use crate::pool::{BlockPool, State};
use crate::span::Slot;
use crate::table::{Entry, Sequence};

/// A pool and all its sequences, looked at between steps or during one.
pub struct World<'a> {
    pool: &'a BlockPool,
    state: &'a State,
    sequences: &'a [&'a Sequence],
}

/// One invariant.
pub struct Invariant {
    /// Short name, stable.
    pub id: &'static str,
    /// What it says.
    pub sentence: &'static str,
    /// `Err` describes what was found instead.
    holds: fn(&World<'_>) -> Result<(), String>,
}

/// An invariant that does not hold.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invariant `{id}` is broken ({sentence}): {found}")]
pub struct Violation {
    /// [`Invariant::id`].
    pub id: &'static str,
    /// [`Invariant::sentence`].
    pub sentence: &'static str,
    /// What was found.
    pub found: String,
}

/// Every invariant of this crate.
pub const REGISTRY: [Invariant; 15] = [
    Invariant {
        id: "bytes-balance",
        sentence: "used + fenced + free + reserved + fragmentation + tables = budget",
        holds: bytes_balance,
    },
    Invariant {
        id: "used-is-held",
        sentence: "bytes used by format = bytes of the pages in block records",
        holds: used_is_held,
    },
    Invariant {
        id: "page-once",
        sentence: "a page is in one block record, and its slot names that block",
        holds: page_once,
    },
    Invariant {
        id: "owners",
        sentence: "owners of a block >= tables that name it, and a block with pages is held or cached",
        holds: owners,
    },
    Invariant {
        id: "idle-is-cached",
        sentence: "cached_bytes = bytes of the blocks that are cached and held by nobody",
        holds: idle_is_cached,
    },
    Invariant {
        id: "cached-is-named",
        sentence: "a cached block is whole, and nothing that its computation needed was dropped",
        holds: cached_is_named,
    },
    Invariant {
        id: "one-writer",
        sentence: "no block is open for writing in two tables, and none that is cached in any",
        holds: one_writer,
    },
    Invariant {
        id: "records",
        sentence: "a record is free, or waits to be heard of, exactly where nobody holds or names it",
        holds: records,
    },
    Invariant {
        id: "generation",
        sentence: "a table's guard has its block's generation",
        holds: generation,
    },
    Invariant {
        id: "view-is-table",
        sentence: "a view names exactly the pages of the table's blocks, in order",
        holds: view_is_table,
    },
    Invariant {
        id: "open-is-f16",
        sentence: "an open block is f16 in every layer",
        holds: open_is_f16,
    },
    Invariant {
        id: "contract",
        sentence: "no page is in a format, and no token dropped, that the contract forbids",
        holds: contract,
    },
    Invariant {
        id: "context",
        sentence: "a sequence's fidelity is no better than its sealed blocks' contexts, within its contract",
        holds: context,
    },
    Invariant {
        id: "falls-recorded",
        sentence: "each fall of precision and each drop is in the ledger",
        holds: falls_recorded,
    },
    Invariant {
        id: "fence",
        sentence: "pages given back during a step wait for its fence, in no table",
        holds: fence,
    },
];

/// Checks every invariant of `pool`; `sequences` are all its sequences. Empty: all hold.
pub fn check_invariants(pool: &BlockPool, sequences: &[&Sequence]) -> Vec<Violation> {
    let state = pool.shared.state();
    let world = World { pool, state: &state, sequences };
    let violation = |invariant: &Invariant| {
        let found = (invariant.holds)(&world).err()?;
        Some(Violation { id: invariant.id, sentence: invariant.sentence, found })
    };
    REGISTRY.iter().filter_map(violation).collect()
}

/// `Ok` where `good`, else what was found.
fn expect(good: bool, found: impl FnOnce() -> String) -> Result<(), String> {
    if good { Ok(()) } else { Err(found()) }
}

impl World<'_> {
    /// (sequence, group, entry) of every table.
    fn entries(&self) -> impl Iterator<Item = (&Sequence, usize, &Entry)> {
        self.sequences.iter().flat_map(|sequence| {
            sequence.tables.iter().enumerate().flat_map(move |(group, table)| {
                table.iter().map(move |entry| (*sequence, group, entry))
            })
        })
    }

    /// (layer, page) of each layer that holds the block.
    fn pages(&self, entry: &Entry) -> impl Iterator<Item = (usize, Page)> {
        let pages = self.state.blocks[entry.guard.index() as usize].pages.iter().enumerate();
        pages.filter_map(|(layer, page)| Some((layer, (*page)?)))
    }
}

fn bytes_balance(world: &World<'_>) -> Result<(), String> {
    let accounts = world.pool.shared.accounts(world.state);
    let sum = accounts.used_bytes()
        + accounts.fenced_bytes
        + accounts.free_bytes
        + accounts.reserved_bytes
        + accounts.fragmentation_bytes
        + accounts.table_bytes;
    expect(sum == accounts.budget_bytes, || format!("{accounts:?} sums to {sum}"))
}

fn used_is_held(world: &World<'_>) -> Result<(), String> {
    let mut held: ByFormat<usize> = ByFormat::default();
    for record in &world.state.blocks {
        let shape = world.pool.config().groups[record.group as usize].shape;
        let pages = record.pages.iter().flatten();
        pages.for_each(|page| held[page.format] += shape.page_bytes(page.format));
    }
    expect(held == world.state.used, || format!("{:?} used, {held:?} held", world.state.used))
}

fn page_once(world: &World<'_>) -> Result<(), String> {
    let taken: HashMap<usize, Slot> = world.state.spans.taken().collect();
    let mut seen = 0;
    for (block, record) in world.state.blocks.iter().enumerate() {
        for (layer, page) in record.pages.iter().enumerate() {
            let Some(page) = page else { continue };
            let slot = taken.get(&(page.offset as usize * PAGE_ALIGN));
            let good = slot == Some(&Slot::Held(block as u32));
            expect(good, || format!("block {block} layer {layer} at {slot:?}"))?;
            seen += 1;
        }
    }
    let held = taken.values().filter(|slot| matches!(slot, Slot::Held(_))).count();
    expect(held == seen, || format!("{held} slots held, {seen} pages in records"))
}

fn owners(world: &World<'_>) -> Result<(), String> {
    let mut named: HashMap<u32, u32> = HashMap::new();
    world.entries().for_each(|(.., entry)| *named.entry(entry.guard.index()).or_default() += 1);
    for (block, record) in world.state.blocks.iter().enumerate() {
        let tables = named.get(&(block as u32)).copied().unwrap_or(0);
        let good = record.owners >= tables
            && (record.owners > 0 || record.cached) == record.pages.iter().any(Option::is_some);
        expect(good, || format!("block {block}: {} owners, {tables} tables", record.owners))?;
    }
    Ok(())
}

fn idle_is_cached(world: &World<'_>) -> Result<(), String> {
    let records = world.state.blocks.iter().enumerate();
    let idle = records.filter(|(_, record)| record.is_idle());
    let bytes = |(index, _)| world.pool.shared.record_bytes(world.state, index as u32);
    let (idle, counted) = (idle.map(bytes).sum::<usize>(), world.state.cached_bytes);
    expect(idle == counted, || format!("{idle} bytes idle, {counted} in the accounts"))
}

fn cached_is_named(world: &World<'_>) -> Result<(), String> {
    let records = world.state.blocks.iter().enumerate();
    for (block, record) in records.filter(|(_, record)| record.cached) {
        let layers = world.pool.config().groups[record.group as usize].layers;
        let whole = record.pages.iter().flatten().count() == layers;
        let good = whole && record.context < Fidelity::Evict;
        expect(good, || format!("block {block} is cached: {record:?}"))?;
    }
    Ok(())
}

fn one_writer(world: &World<'_>) -> Result<(), String> {
    let mut writers: HashMap<u32, usize> = HashMap::new();
    let open = |sequence: &Sequence, entry: &Entry| {
        !sequence.is_sealed(entry.first)
            && entry.first < sequence.grown_end
            && sequence.next_position() < sequence.grown_end
    };
    for (.., entry) in world.entries().filter(|(sequence, _, entry)| open(sequence, entry)) {
        *writers.entry(entry.guard.index()).or_default() += 1;
    }
    for (block, writers) in writers {
        let cached = world.state.blocks[block as usize].cached;
        let good = writers == 1 && !cached;
        expect(good, || format!("block {block}: {writers} writers, cached: {cached}"))?;
    }
    Ok(())
}

fn records(world: &World<'_>) -> Result<(), String> {
    let mut waiting = vec![0; world.state.blocks.len()];
    for &index in world.state.free_records.iter().chain(&world.state.cache_changes) {
        waiting[index as usize] += 1;
    }
    let queued: HashSet<u32> = world.state.cache_changes.iter().copied().collect();
    for (index, record) in world.state.blocks.iter().enumerate() {
        let unused = record.owners == 0 && !record.cached;
        let is_queued = queued.contains(&(index as u32));
        let good = record.queued == is_queued && waiting[index] == usize::from(unused || is_queued);
        expect(good, || format!("record {index} waits {} times: {record:?}", waiting[index]))?;
    }
    Ok(())
}

fn generation(world: &World<'_>) -> Result<(), String> {
    for (.., entry) in world.entries() {
        let block = entry.guard.index();
        let (held, now) = (entry.guard.generation(), world.state.blocks[block as usize].generation);
        expect(held == now, || format!("block {block}: guard {held}, record {now}"))?;
    }
    Ok(())
}

fn view_is_table(world: &World<'_>) -> Result<(), String> {
    let mut held: HashMap<(u64, usize, usize), usize> = HashMap::new();
    for (sequence, group, entry) in world.entries() {
        let view = &sequence.view().groups[group];
        for (layer, page) in world.pages(entry) {
            *held.entry((sequence.config().request, group, layer)).or_default() += 1;
            let index = sequence.page_index(group, layer, entry.first);
            let shown = index.map(|index| view.layers[layer][index]);
            let same = shown.is_some_and(|shown| {
                (shown.offset, shown.format, shown.first as usize)
                    == (page.offset, page.format, entry.first)
                    && (shown.run as usize) < view.runs[layer].len()
            });
            expect(same, || format!("group {group} layer {layer}: {shown:?} shown for {page:?}"))?;
        }
    }
    for sequence in world.sequences {
        for (group, (table, view)) in
            sequence.tables.iter().zip(&sequence.view().groups).enumerate()
        {
            let ascending = table.windows(2).all(|pair| pair[0].first < pair[1].first);
            expect(ascending, || format!("table of group {group} is out of order"))?;
            for (layer, pages) in view.layers.iter().enumerate() {
                let at = (sequence.config().request, group, layer);
                let held = held.get(&at).copied().unwrap_or(0);
                expect(pages.len() == held, || format!("{} shown, {held} held", pages.len()))?;
            }
        }
    }
    Ok(())
}

fn open_is_f16(world: &World<'_>) -> Result<(), String> {
    for (sequence, _, entry) in world.entries() {
        let f16 = world.pages(entry).all(|(_, page)| page.format == PageFormat::F16);
        let good = sequence.is_sealed(entry.first) || f16;
        expect(good, || format!("open block at position {}", entry.first))?;
    }
    Ok(())
}

fn contract(world: &World<'_>) -> Result<(), String> {
    for (sequence, _, entry) in world.entries() {
        let contract = sequence.config().contract;
        let good = world.pages(entry).all(|(_, page)| contract.permits_format(page.format));
        expect(good, || format!("{} block at {}", contract.name(), entry.first))?;
    }
    for sequence in world.sequences {
        let contract = sequence.config().contract;
        let dropped = sequence.dropped_pages();
        let good = dropped == 0 || contract.permits(Rung::Evict);
        expect(good, || format!("{} sequence dropped {dropped} pages", contract.name()))?;
    }
    Ok(())
}

fn context(world: &World<'_>) -> Result<(), String> {
    for sequence in world.sequences {
        let (fidelity, contract) = (sequence.fidelity(), sequence.config().contract);
        let good = fidelity <= contract;
        expect(good, || format!("{} under contract {}", fidelity.name(), contract.name()))?;
    }
    for (sequence, _, entry) in world.entries() {
        let context = world.state.blocks[entry.guard.index() as usize].context;
        let good = !sequence.is_sealed(entry.first) || context <= sequence.fidelity();
        expect(good, || {
            let fidelity = sequence.fidelity().name();
            format!("block at {} of {}, sequence {fidelity}", entry.first, context.name())
        })?;
    }
    Ok(())
}

fn falls_recorded(world: &World<'_>) -> Result<(), String> {
    let mut falls: HashMap<(u64, Rung), usize> = HashMap::new();
    for (sequence, _, entry) in world.entries() {
        for (_, page) in world.pages(entry) {
            let known = |rung| entry.falls.contains(rung) || entry.inherited.contains(rung);
            let seen = Rung::to_format(page.format).is_none_or(known);
            expect(seen, || format!("block at {} fell unseen", entry.first))?;
        }
        for rung in Rung::ALL.into_iter().filter(|rung| entry.falls.contains(*rung)) {
            *falls.entry((sequence.config().request, rung)).or_default() += 1;
        }
    }
    for sequence in world.sequences {
        let request = sequence.config().request;
        let ledger = sequence.ledger();
        for rung in Rung::ALL.into_iter().filter(|rung| rung.format().is_some()) {
            let held = falls.get(&(request, rung)).copied().unwrap_or(0);
            let fell = held + sequence.falls_gone[rung as usize];
            let recorded = ledger.blocks(rung);
            let name = rung.name();
            expect(recorded == fell, || {
                format!("request {request}: {recorded} {name} recorded, {fell} happened")
            })?;
        }
        let (recorded, dropped) = (ledger.blocks(Rung::Evict), sequence.dropped_blocks());
        expect(recorded == dropped, || {
            format!("request {request}: {recorded} drops recorded, {dropped} happened")
        })?;
    }
    Ok(())
}

fn fence(world: &World<'_>) -> Result<(), String> {
    let fenced: usize = world
        .state
        .spans
        .taken()
        .filter(|(_, slot)| *slot == Slot::Fenced)
        .map(|(offset, _)| world.state.spans.page_bytes(world.state.spans.place(offset)))
        .sum();
    let state = world.state;
    expect(
        fenced == state.fenced_bytes && (fenced == 0 || world.pool.shared.step_in_flight(state)),
        || format!("{fenced} bytes fenced in spans, {} in the accounts", state.fenced_bytes),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::PageShape;
    use crate::{Fidelity, GroupConfig, Ladder, PoolConfig, SequenceConfig};

    /// What is broken after `breaks` has been done to a sound pool with one exact sequence.
    fn broken_by(breaks: impl FnOnce(&mut State, &mut Sequence)) -> Vec<&'static str> {
        let shape = PageShape { kv_heads: 1, head_dim: 16, block_size: 16 };
        let groups = vec![GroupConfig { layers: 2, shape, window: None, pinned: vec![] }];
        let ladder = Ladder::default();
        let config = PoolConfig { groups, budget_bytes: 1 << 20, prefault: false, ladder };
        let pool = BlockPool::new(config).unwrap();
        let config = SequenceConfig {
            request: 0,
            contract: Fidelity::Exact,
            priority: 0,
            trained_context: 4096,
            max_tokens: None,
        };
        let mut sequence = Sequence::new(&pool, config);
        sequence.grow(40).unwrap();
        sequence.commit(40);
        assert_eq!(check_invariants(&pool, &[&sequence]), []);
        breaks(&mut pool.shared.state(), &mut sequence);
        let found = check_invariants(&pool, &[&sequence]).iter().map(|v| v.id).collect();
        // A broken pool need not survive its guards.
        std::mem::forget(sequence);
        found
    }

    #[test]
    fn each_kind_of_damage_is_named() {
        let lost = broken_by(|state, _| state.used[PageFormat::F16] -= 64);
        assert_eq!(lost, ["bytes-balance", "used-is-held"]);
        let twice = broken_by(|state, _| state.blocks[1].pages[0] = state.blocks[0].pages[0]);
        assert_eq!(twice, ["page-once", "view-is-table"]);
        let unheld = broken_by(|state, _| state.blocks[0].owners = 0);
        assert_eq!(unheld, ["owners", "records"]);
        let idle = broken_by(|state, _| state.cached_bytes = 64);
        assert_eq!(idle, ["idle-is-cached"]);
        let tainted = broken_by(|state, sequence| {
            state.blocks[0].cached = true;
            state.blocks[0].context = Fidelity::Evict;
            sequence.attended = Fidelity::Evict;
        });
        assert_eq!(tainted, ["cached-is-named", "context"]);
        let better = broken_by(|state, _| state.blocks[0].context = Fidelity::Int8);
        assert_eq!(better, ["context"]);
        let written = broken_by(|state, sequence| {
            state.blocks[2].cached = true;
            sequence.grown_end += 1;
        });
        assert_eq!(written, ["one-writer"]);
        assert_eq!(broken_by(|state, _| state.free_records.push(1)), ["records"]);
        assert_eq!(broken_by(|state, _| state.blocks[0].generation += 1), ["generation"]);
        assert_eq!(broken_by(|_, sequence| sequence.move_page(0, 0, 1, 77)), ["view-is-table"]);
        let fallen = broken_by(|_, sequence| {
            sequence.tables[0][0].falls.insert(Rung::Int8);
        });
        assert_eq!(fallen, ["falls-recorded"]);
        assert_eq!(broken_by(|state, _| state.fenced_bytes = 64), ["bytes-balance", "fence"]);
        let open = broken_by(|state, _| {
            state.blocks[2].pages[0].as_mut().unwrap().format = PageFormat::Int8;
        });
        assert!(open.contains(&"open-is-f16") && open.contains(&"contract"), "{open:?}");
    }

    #[test]
    fn ids_are_unique() {
        let ids: std::collections::HashSet<_> = REGISTRY.iter().map(|i| i.id).collect();
        assert_eq!(ids.len(), REGISTRY.len());
    }
}
