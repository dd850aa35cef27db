//! Cells of a heat map: one a page, or fewer.

use std::collections::HashMap;

use super::{Holder, PageState};
use crate::page::PageFormat;
use crate::pool::{Shared, State};
use crate::span::{Place, Slot};

/// What a cell is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CellKind {
    /// What its pages are.
    pub state: PageState,
    /// Their format, where blocks hold them.
    pub format: Option<PageFormat>,
    /// Whose they are.
    pub holder: Holder,
}

/// Cells of one kind beside each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Index into [`PageMap::kinds`](super::PageMap::kinds).
    pub kind: usize,
    /// How many.
    pub cells: usize,
}

/// The cells of a span, or of several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpanCells {
    /// Bytes of a page of the span; 0 where it is empty, or where there are several.
    pub page_bytes: usize,
    /// From low addresses to high ones; what is left of a span behind its last page is none of them.
    pub runs: Vec<Run>,
}

/// How a span is cut now.
struct Cut {
    /// 0: it is empty.
    page_bytes: usize,
    /// Index of its first slot among those of all.
    start: usize,
}

/// A kind for every page and empty span.
pub(super) struct Cells<'a> {
    shared: &'a Shared,
    cuts: Vec<Cut>,
    /// Index in `kinds`, slot by slot.
    slots: Vec<u32>,
    kinds: Vec<CellKind>,
    indices: HashMap<CellKind, u32>,
}

/// As many cells as are wanted at most.
pub(super) struct Aggregated {
    pub pages_a_cell: usize,
    pub spans_a_cell: usize,
    pub kinds: Vec<CellKind>,
    pub spans: Vec<SpanCells>,
}

impl<'a> Cells<'a> {
    /// What spans alone say: which slots are free, and which hold what no block has.
    pub fn new(shared: &'a Shared, state: &State) -> Cells<'a> {
        let mut cells = Cells {
            shared,
            cuts: Vec::with_capacity(shared.geometry.spans),
            slots: Vec::new(),
            kinds: Vec::new(),
            indices: HashMap::new(),
        };
        // Ordinary growth takes empty spans from below: the last ones are the reserve.
        let mut before_reserve =
            state.spans.empty_spans().saturating_sub(shared.geometry.reserve_spans);
        let nobodys = |state| CellKind { state, format: None, holder: Holder::Nobody };
        let [free, reserved, encoding, fenced] =
            [PageState::Free, PageState::Reserved, PageState::Encoding, PageState::Fenced]
                .map(|state| cells.kind(nobodys(state)));
        for span in 0..shared.geometry.spans as u32 {
            let start = cells.slots.len();
            let Some(class) = state.spans.class_in_use(span) else {
                cells.slots.push(if before_reserve == 0 { reserved } else { free });
                before_reserve = before_reserve.saturating_sub(1);
                cells.cuts.push(Cut { page_bytes: 0, start });
                continue;
            };
            for slot in 0..shared.geometry.slots(class) as u32 {
                cells.slots.push(match state.spans.content(Place { span, slot }) {
                    Slot::Target => encoding,
                    Slot::Fenced => fenced,
                    // Those held are set by their block.
                    Slot::Free | Slot::Held(_) => free,
                });
            }
            cells.cuts.push(Cut { page_bytes: shared.geometry.class_bytes[class], start });
        }
        cells
    }

    /// The index of a kind, to be [`set`](Self::set) for many pages.
    pub fn kind(&mut self, kind: CellKind) -> u32 {
        let next = self.kinds.len() as u32;
        let index = *self.indices.entry(kind).or_insert(next);
        if index == next {
            self.kinds.push(kind);
        }
        index
    }

    pub fn set(&mut self, place: Place, kind: u32) {
        let start = self.cuts[place.span as usize].start;
        self.slots[start + place.slot as usize] = kind;
    }

    fn slots_of(&self, span: usize) -> &[u32] {
        let end = self.cuts.get(span + 1).map_or(self.slots.len(), |next| next.start);
        &self.slots[self.cuts[span].start..end]
    }

    /// Puts neighbors together until there are at most `most` cells (at least 1): pages of a span first, then
    /// spans.
    pub fn aggregate(self, most: usize) -> Aggregated {
        let most = most.max(1);
        let lengths: Vec<usize> =
            (0..self.cuts.len()).map(|span| self.slots_of(span).len()).collect();
        let longest = lengths.iter().copied().max().unwrap_or(1);
        let count =
            |pages: usize| lengths.iter().map(|length| length.div_ceil(pages)).sum::<usize>();
        let pages_a_cell = (1..longest).find(|&pages| count(pages) <= most).unwrap_or(longest);
        let spans_a_cell = match count(pages_a_cell) <= most {
            true => 1,
            false => self.cuts.len().div_ceil(most),
        };
        let mut palette = Palette { kinds: &self.kinds, used: HashMap::new(), out: Vec::new() };
        let spans = match spans_a_cell {
            1 => (0..self.cuts.len())
                .map(|span| self.span_cells(span, pages_a_cell, &mut palette))
                .collect(),
            _ => (0..self.cuts.len())
                .step_by(spans_a_cell)
                .map(|first| self.group_cell(first, spans_a_cell, &mut palette))
                .collect(),
        };
        Aggregated { pages_a_cell, spans_a_cell, kinds: palette.out, spans }
    }

    fn span_cells(&self, span: usize, pages_a_cell: usize, palette: &mut Palette<'_>) -> SpanCells {
        let mut runs: Vec<Run> = Vec::new();
        for pages in self.slots_of(span).chunks(pages_a_cell) {
            let kind = palette.index(most_of(pages.iter().map(|kind| (*kind, 1))));
            match runs.last_mut().filter(|run| run.kind == kind) {
                Some(run) => run.cells += 1,
                None => runs.push(Run { kind, cells: 1 }),
            }
        }
        SpanCells { page_bytes: self.cuts[span].page_bytes, runs }
    }

    fn group_cell(&self, first: usize, spans: usize, palette: &mut Palette<'_>) -> SpanCells {
        let spans = first..(first + spans).min(self.cuts.len());
        let pages = spans.flat_map(|span| {
            let bytes = match self.cuts[span].page_bytes {
                0 => self.shared.geometry.span_bytes,
                page_bytes => page_bytes,
            };
            self.slots_of(span).iter().map(move |kind| (*kind, bytes))
        });
        let kind = palette.index(most_of(pages));
        SpanCells { page_bytes: 0, runs: vec![Run { kind, cells: 1 }] }
    }
}

/// The kind with the largest sum; the first of equals.
fn most_of(pages: impl Iterator<Item = (u32, usize)>) -> u32 {
    let mut sums: Vec<(u32, usize)> = Vec::new();
    for (kind, bytes) in pages {
        match sums.iter_mut().find(|(known, _)| *known == kind) {
            Some((_, sum)) => *sum += bytes,
            None => sums.push((kind, bytes)),
        }
    }
    let most = sums.iter().rev().max_by_key(|(_, bytes)| *bytes);
    most.map_or(0, |(kind, _)| *kind)
}

/// The kinds that are seen after all.
struct Palette<'a> {
    kinds: &'a [CellKind],
    used: HashMap<u32, usize>,
    out: Vec<CellKind>,
}

impl Palette<'_> {
    fn index(&mut self, kind: u32) -> usize {
        *self.used.entry(kind).or_insert_with(|| {
            self.out.push(self.kinds[kind as usize]);
            self.out.len() - 1
        })
    }
}
