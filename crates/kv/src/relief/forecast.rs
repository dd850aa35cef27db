//! Counts of pages per size class after the moves planned so far: what would then fit.
//!
//! Compaction makes free pages of one class fungible, so a class of `n` pages takes `ceil(n / slots)`
//! spans wherever its pages lie now, but no fewer than those with a page that cannot move.

use super::holders::Holders;
use crate::account::ByFormat;
use crate::page::PageFormat;
use crate::pool::{Shared, Shortage, State};

/// What is to be reached.
#[derive(Clone, Copy)]
pub(super) enum Goal<'a> {
    /// Pages still to come fit beside what is used and the reserve.
    Room {
        /// Pages per size class still to come.
        demand: &'a [usize],
        /// Spans that all may take together, the reserve included.
        spans: usize,
    },
    /// The pages of all blocks of the pool take at most so many bytes.
    Bytes(usize),
}

/// Pages of one size.
#[derive(Clone, Copy)]
struct ClassUse {
    pages: usize,
    /// Pages of a span.
    slots: usize,
    page_bytes: usize,
    /// Spans that `pages` takes once compacted.
    spans: usize,
    /// Spans with a page that cannot move: no fewer are taken.
    fixed_spans: usize,
}

impl ClassUse {
    fn spans_for(&self, pages: usize) -> usize {
        pages.div_ceil(self.slots).max(self.fixed_spans)
    }
}

#[derive(Clone)]
pub(super) struct Forecast<'a> {
    shared: &'a Shared,
    classes: Vec<ClassUse>,
    /// Spans in use once everything is compacted.
    spans: usize,
    /// Spans in use before the first move.
    spans_before: usize,
    /// Bytes of all pages.
    used_bytes: usize,
}

impl<'a> Forecast<'a> {
    /// As if every page could move.
    pub(super) fn new(shared: &'a Shared, state: &State) -> Forecast<'a> {
        Forecast::with_fixed(shared, state, &vec![0; shared.geometry.class_bytes.len()])
    }

    /// Where the pages of blocks that others than `holders` hold stay where they are.
    pub(super) fn among(shared: &'a Shared, state: &State, holders: &Holders) -> Forecast<'a> {
        let blocks = state.blocks.iter().enumerate();
        let fixed = blocks.filter(|(index, record)| !holders.are_all(*index as u32, record));
        let pages = fixed.flat_map(|(_, record)| record.pages.iter().flatten());
        let places = pages.map(|page| shared.place(state, *page));
        Forecast::with_fixed(shared, state, &state.spans.spans_of(places))
    }

    fn with_fixed(shared: &'a Shared, state: &State, fixed_spans: &[usize]) -> Forecast<'a> {
        let used = state.spans.used_pages().into_iter().zip(fixed_spans).enumerate();
        let mut classes = Vec::with_capacity(fixed_spans.len());
        for (class, (pages, &fixed_spans)) in used {
            let slots = shared.geometry.slots(class);
            let page_bytes = shared.geometry.class_bytes[class];
            let mut class = ClassUse { pages, slots, page_bytes, spans: 0, fixed_spans };
            class.spans = class.spans_for(pages);
            classes.push(class);
        }
        let spans = classes.iter().map(|class| class.spans).sum();
        let used_bytes = classes.iter().map(|class| class.pages * class.page_bytes).sum();
        Forecast { shared, classes, spans, spans_before: spans, used_bytes }
    }

    fn set_pages(&mut self, class: usize, pages: usize) {
        let class = &mut self.classes[class];
        self.used_bytes =
            self.used_bytes + pages * class.page_bytes - class.pages * class.page_bytes;
        self.spans -= class.spans;
        class.pages = pages;
        class.spans = class.spans_for(pages);
        self.spans += class.spans;
    }

    /// Spans in use once everything is compacted.
    pub(super) fn spans(&self) -> usize {
        self.spans
    }

    /// Bytes of all pages.
    pub(super) fn used_bytes(&self) -> usize {
        self.used_bytes
    }

    /// Whether `goal` is reached.
    pub(super) fn reaches(&self, goal: Goal<'_>) -> bool {
        let (demand, spans) = match goal {
            Goal::Bytes(most_bytes) => return self.used_bytes <= most_bytes,
            Goal::Room { demand, spans } => (demand, spans),
        };
        let demanded = self.classes.iter().zip(demand).filter(|(_, pages)| **pages > 0);
        let more = |(class, pages): (&ClassUse, &usize)| {
            class.spans_for(class.pages + pages) - class.spans
        };
        let more: usize = demanded.map(more).sum();
        self.spans + more + self.shared.geometry.reserve_spans <= spans
    }

    /// Whether the moves so far leave the reserve whole, once everything is compacted, or at least as
    /// large as they found it.
    pub(super) fn reserve_is_kept(&self) -> bool {
        let geometry = &self.shared.geometry;
        let whole = self.spans + geometry.reserve_spans <= geometry.spans;
        whole || self.spans <= self.spans_before
    }

    /// Moves `pages` pages of `group` from `from` to `to`, whatever room there is on the way.
    pub(super) fn shift(&mut self, group: usize, from: PageFormat, to: PageFormat, pages: usize) {
        let classes = &self.shared.geometry.class_of[group];
        let (from, to) = (classes[from], classes[to]);
        self.set_pages(from, self.classes[from].pages - pages);
        self.set_pages(to, self.classes[to].pages + pages);
    }

    /// Re-encodes `pages[format]` pages of `group` to `target`, a page at a time as it will be carried
    /// out. `false`, and nothing changed, where a target page would find no room.
    pub(super) fn encode(
        &mut self,
        group: usize,
        pages: &ByFormat<u16>,
        target: PageFormat,
    ) -> bool {
        let mut done = ByFormat::<usize>::default();
        for (format, &count) in pages.iter().filter(|(_, count)| **count > 0) {
            while done[format] < usize::from(count) {
                let some = self.pages_at_once(group, target, usize::from(count) - done[format]);
                self.shift(group, format, target, some);
                done[format] += some;
                if some == 0 {
                    for (format, &count) in done.iter().filter(|(_, count)| **count > 0) {
                        self.shift(group, target, format, count);
                    }
                    return false;
                }
            }
        }
        true
    }

    /// How many of `wanted` pages find room in `target`'s spans as they are; in a span more, where that
    /// is needed and to be had, one, since the source that it frees counts for the next.
    fn pages_at_once(&self, group: usize, target: PageFormat, wanted: usize) -> usize {
        let class = &self.classes[self.shared.geometry.class_of[group][target]];
        let free = class.spans * class.slots - class.pages;
        let spare = self.spans < self.shared.geometry.spans;
        if free == 0 { usize::from(spare) } else { free.min(wanted) }
    }

    /// Gives back `pages` pages.
    pub(super) fn free(&mut self, group: usize, format: PageFormat, pages: usize) {
        let class = self.shared.geometry.class_of[group][format];
        self.set_pages(class, self.classes[class].pages - pages);
    }

    /// The demand in bytes against the whole spans and partial spans left for it; `None` where it fits.
    pub(super) fn shortage(&self, demand: &[usize]) -> Option<Shortage> {
        let geometry = &self.shared.geometry;
        if self.reaches(Goal::Room { demand, spans: geometry.spans }) {
            return None;
        }
        let room_bytes = geometry.spans.saturating_sub(self.spans) * geometry.span_bytes;
        let partial =
            |class: &ClassUse| (class.spans * class.slots - class.pages) * class.page_bytes;
        let asked = self.classes.iter().zip(demand).filter(|(_, pages)| **pages > 0);
        let partial_bytes: usize = asked.map(|(class, _)| partial(class)).sum();
        Some(Shortage {
            needed_bytes: self.shared.page_bytes_sum(demand),
            free_bytes: (room_bytes + partial_bytes)
                .saturating_sub(geometry.reserve_spans * geometry.span_bytes),
        })
    }
}
