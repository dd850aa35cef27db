//! The page ledger: what every page of the pool is, whose it is, and in which format, for people to look at.
//!
//! Taken under one lock, so that its sums are the accounts'. Costs a few nanoseconds a page; nothing in here is
//! on the path of a step.

mod cells;
mod room;

pub use cells::{CellKind, Run, SpanCells};
pub use room::Room;

use crate::account::{Accounts, ByFormat};
use crate::block::BlockRecord;
use crate::page::PageFormat;
use crate::pool::{BlockPool, Shared, State};
use crate::table::Sequence;
use cells::Cells;

/// What a page is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PageState {
    /// Of a block that takes more tokens.
    Open,
    /// Of a full block that one sequence holds.
    Sealed,
    /// Of a block that several sequences hold.
    Shared,
    /// Of a block that only the prefix index names: given back whenever it is asked for.
    Cached,
    /// Of a block that is being written to the spill store, or filled from it: it does not move or shrink.
    Pinned,
    /// Being filled by a re-encode.
    Encoding,
    /// Given back during a step that has not ended.
    Fenced,
    /// Free, in a span that serves its page size, or in an empty one.
    Free,
    /// An empty span kept for re-encoding.
    Reserved,
}

impl PageState {
    /// Every state.
    pub const ALL: [PageState; 9] = [
        PageState::Open,
        PageState::Sealed,
        PageState::Shared,
        PageState::Cached,
        PageState::Pinned,
        PageState::Encoding,
        PageState::Fenced,
        PageState::Free,
        PageState::Reserved,
    ];

    /// The name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            PageState::Open => "open",
            PageState::Sealed => "sealed",
            PageState::Shared => "shared",
            PageState::Cached => "cached",
            PageState::Pinned => "pinned",
            PageState::Encoding => "encoding",
            PageState::Fenced => "fenced",
            PageState::Free => "free",
            PageState::Reserved => "reserved",
        }
    }
}

/// Whose a page is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Holder {
    /// Nobody's: free, given back, named by the prefix index alone, or on its way from the spill store.
    Nobody,
    /// Of one owner, as its sequences were labeled.
    One(u64),
    /// Of several owners.
    Several,
}

/// Bytes of pages that one owner's sequences hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HolderBytes {
    /// The owner's label.
    pub label: u64,
    /// Bytes of its pages; what its sequences share counts once, what it shares with others whole.
    pub bytes: ByFormat<usize>,
    /// The part of them that others hold too.
    pub shared_bytes: usize,
}

/// Pages of one size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClassPages {
    /// Bytes of a page.
    pub page_bytes: usize,
    /// Pages of a span.
    pub slots: usize,
    /// Spans that serve the size.
    pub spans: usize,
    /// Pages that are not free: all those below, and those held.
    pub used: usize,
    /// The part behind a fence.
    pub fenced: usize,
    /// The part that only the prefix index names.
    pub cached: usize,
    /// The part that is on its way to or from the spill store.
    pub pinned: usize,
}

/// The pool at one moment.
#[derive(Clone, Debug, PartialEq)]
pub struct PageMap {
    /// The accounts of the same moment.
    pub accounts: Accounts,
    /// Bytes of pages that blocks hold, by state and format: open, sealed, shared, cached and pinned ones.
    /// Their sum is `accounts.used`, format by format. The accounts say what the others take.
    pub held: [ByFormat<usize>; PageState::ALL.len()],
    /// By owner, in the order in which they were given.
    pub holders: Vec<HolderBytes>,
    /// By page size.
    pub classes: Vec<ClassPages>,
    /// Bytes of a span.
    pub span_bytes: usize,
    /// Spans of the arena.
    pub span_count: usize,
    /// Spans that serve no size.
    pub empty_spans: usize,
    /// Empty spans kept for re-encoding, where there are as many.
    pub reserve_spans: usize,
    /// A step is in flight.
    pub step_in_flight: bool,
    /// Neighboring pages of a span that a cell stands for, at most.
    pub pages_a_cell: usize,
    /// Neighboring spans that an entry of `spans` stands for; above 1 each is one cell.
    pub spans_a_cell: usize,
    /// What cells are.
    pub kinds: Vec<CellKind>,
    /// The arena from its start to its end.
    pub spans: Vec<SpanCells>,
}

/// What tables say of a block.
#[derive(Clone, Copy)]
struct Tables {
    /// Tables that name it.
    count: u32,
    /// The last owner of one, as index in the list of owners.
    owner: usize,
    several_owners: bool,
    open: bool,
}

const NO_TABLE: Tables = Tables { count: 0, owner: 0, several_owners: false, open: false };

/// Who has which blocks.
struct Claims {
    labels: Vec<u64>,
    /// By record index.
    tables: Vec<Tables>,
    /// (owner, record index), each once.
    claims: Vec<(usize, u32)>,
}

impl Claims {
    fn new<'a>(state: &State, sequences: impl IntoIterator<Item = (u64, &'a Sequence)>) -> Claims {
        let tables = vec![NO_TABLE; state.blocks.len()];
        let mut claims = Claims { labels: Vec::new(), tables, claims: Vec::new() };
        for (label, sequence) in sequences {
            if claims.labels.last() != Some(&label) {
                claims.labels.push(label);
            }
            for entry in sequence.tables.iter().flatten() {
                claims.claim(entry.guard.index(), !sequence.is_sealed(entry.first));
            }
        }
        claims
    }

    /// A sequence of the last owner names a block.
    fn claim(&mut self, block: u32, open: bool) {
        let owner = self.labels.len() - 1;
        let Some(tables) = self.tables.get_mut(block as usize) else { return };
        if tables.count == 0 || tables.owner != owner {
            tables.several_owners = tables.count > 0;
            tables.owner = owner;
            self.claims.push((owner, block));
        }
        tables.count += 1;
        tables.open |= open;
    }

    fn holders(&self, shared: &Shared, state: &State) -> Vec<HolderBytes> {
        let none = |label: &u64| HolderBytes {
            label: *label,
            bytes: ByFormat::default(),
            shared_bytes: 0,
        };
        let mut holders: Vec<HolderBytes> = self.labels.iter().map(none).collect();
        for &(owner, block) in &self.claims {
            let record = &state.blocks[block as usize];
            let page_bytes = shared.page_bytes(record.group as usize);
            let holder = &mut holders[owner];
            for page in record.pages.iter().flatten() {
                holder.bytes[page.format] += page_bytes[page.format];
                if self.tables[block as usize].several_owners {
                    holder.shared_bytes += page_bytes[page.format];
                }
            }
        }
        holders
    }

    /// What the pages of a block are, and whose.
    fn kind(&self, block: usize, record: &BlockRecord) -> (PageState, Holder) {
        let tables = self.tables[block];
        let holder = match tables {
            Tables { count: 0, .. } => Holder::Nobody,
            Tables { several_owners: true, .. } => Holder::Several,
            Tables { owner, .. } => Holder::One(self.labels[owner]),
        };
        let state = match record.owners {
            0 => PageState::Cached,
            // Guards that are in no table belong to a copy to or from the spill store.
            owners if owners > tables.count => PageState::Pinned,
            _ if tables.open => PageState::Open,
            1 => PageState::Sealed,
            _ => PageState::Shared,
        };
        (state, holder)
    }
}

impl BlockPool {
    /// What every page is. `sequences` are all those of the pool with a label of their owner each, those of
    /// an owner behind each other. Where there are more than `most_cells` pages and empty spans, a cell
    /// stands for several: it then shows what most of their bytes are. The sums are exact whatever the cells.
    pub fn page_map<'a>(
        &self,
        sequences: impl IntoIterator<Item = (u64, &'a Sequence)>,
        most_cells: usize,
    ) -> PageMap {
        let shared = &self.shared;
        let state = shared.state();
        let claims = Claims::new(&state, sequences);
        let mut ledger = Ledger {
            cells: Cells::new(shared, &state),
            classes: class_pages(shared, &state),
            held: [ByFormat::default(); PageState::ALL.len()],
        };
        for (block, record) in state.blocks.iter().enumerate() {
            ledger.add_block(shared, &state, record, claims.kind(block, record));
        }
        let Ledger { cells, mut classes, held } = ledger;
        for class in state.fenced_places().filter_map(|place| state.spans.class_in_use(place.span))
        {
            classes[class].fenced += 1;
        }
        let aggregated = cells.aggregate(most_cells);
        PageMap {
            accounts: shared.accounts(&state),
            held,
            holders: claims.holders(shared, &state),
            classes,
            span_bytes: shared.geometry.span_bytes,
            span_count: shared.geometry.spans,
            empty_spans: state.spans.empty_spans(),
            reserve_spans: shared.geometry.reserve_spans,
            step_in_flight: shared.step_in_flight(&state),
            pages_a_cell: aggregated.pages_a_cell,
            spans_a_cell: aggregated.spans_a_cell,
            kinds: aggregated.kinds,
            spans: aggregated.spans,
        }
    }
}

/// What is found page by page.
struct Ledger<'a> {
    cells: Cells<'a>,
    classes: Vec<ClassPages>,
    held: [ByFormat<usize>; PageState::ALL.len()],
}

impl Ledger<'_> {
    fn add_block(
        &mut self,
        shared: &Shared,
        state: &State,
        record: &BlockRecord,
        (page_state, holder): (PageState, Holder),
    ) {
        let page_bytes = shared.page_bytes(record.group as usize);
        let class_of = &shared.geometry.class_of[record.group as usize];
        let mut last: Option<(PageFormat, u32)> = None;
        for page in record.pages.iter().flatten() {
            let format = page.format;
            self.held[page_state as usize][format] += page_bytes[format];
            let class = &mut self.classes[class_of[format]];
            class.cached += usize::from(page_state == PageState::Cached);
            class.pinned += usize::from(page_state == PageState::Pinned);
            // Layers of a block mostly have one format.
            let kind = match last {
                Some((same, kind)) if same == format => kind,
                _ => self.cells.kind(CellKind { state: page_state, format: Some(format), holder }),
            };
            last = Some((format, kind));
            self.cells.set(shared.place(state, *page), kind);
        }
    }
}

/// Of each page size what is used; what it is used for is left at 0.
fn class_pages(shared: &Shared, state: &State) -> Vec<ClassPages> {
    let used = state.spans.used_pages();
    let class = |(class, &used): (usize, &usize)| ClassPages {
        page_bytes: shared.geometry.class_bytes[class],
        slots: shared.geometry.slots(class),
        spans: state.spans.spans_in_use(class),
        used,
        ..ClassPages::default()
    };
    used.iter().enumerate().map(class).collect()
}

#[cfg(test)]
mod tests;
