//! Counts of pages per size class after the moves planned so far: what would then fit.
//!
//! Compaction makes free pages of one class fungible, so a class of `n` pages takes `ceil(n / slots)`
//! spans wherever its pages lie now.

use crate::page::PageFormat;
use crate::pool::{Shared, Shortage, State};

pub(super) struct Forecast<'a> {
    shared: &'a Shared,
    used: Vec<usize>,
    demand: Vec<usize>,
    /// Spans in use before the first move.
    spans_before: usize,
}

impl<'a> Forecast<'a> {
    pub(super) fn new(shared: &'a Shared, state: &State, demand: Vec<usize>) -> Forecast<'a> {
        let used = state.spans.used_pages();
        let mut forecast = Forecast { shared, used, demand, spans_before: 0 };
        forecast.spans_before = forecast.spans(false);
        forecast
    }

    fn spans(&self, with_demand: bool) -> usize {
        let pages =
            |class: usize| self.used[class] + if with_demand { self.demand[class] } else { 0 };
        let spans = |class: usize| pages(class).div_ceil(self.shared.geometry.slots(class));
        (0..self.used.len()).map(spans).sum()
    }

    /// Whether the demand fits beside what is used and the reserve.
    pub(super) fn satisfied(&self) -> bool {
        let geometry = &self.shared.geometry;
        self.spans(true) + geometry.reserve_spans <= geometry.spans
    }

    /// Whether the moves so far leave the reserve whole, once everything is compacted, or at least as
    /// large as they found it.
    pub(super) fn reserve_is_kept(&self) -> bool {
        let geometry = &self.shared.geometry;
        let spans = self.spans(false);
        spans + geometry.reserve_spans <= geometry.spans || spans <= self.spans_before
    }

    /// Moves `pages` pages of `group` from `from` to `to`, a page at a time as it will be carried out.
    /// `false`, and nothing changed, where a target page would find no room.
    pub(super) fn encode(
        &mut self,
        group: usize,
        from: PageFormat,
        to: PageFormat,
        pages: usize,
    ) -> bool {
        let classes = &self.shared.geometry.class_of[group];
        let (source, target) = (classes[from], classes[to]);
        for page in 0..pages {
            self.used[target] += 1;
            if self.spans(false) > self.shared.geometry.spans {
                self.used[target] -= page + 1;
                self.used[source] += page;
                return false;
            }
            self.used[source] -= 1;
        }
        true
    }

    /// Takes back a planned [`Forecast::encode`].
    pub(super) fn undo_encode(
        &mut self,
        group: usize,
        from: PageFormat,
        to: PageFormat,
        pages: usize,
    ) {
        let classes = &self.shared.geometry.class_of[group];
        self.used[classes[to]] -= pages;
        self.used[classes[from]] += pages;
    }

    /// Gives back one page.
    pub(super) fn free(&mut self, group: usize, format: PageFormat) {
        self.used[self.shared.geometry.class_of[group][format]] -= 1;
    }

    /// The demand in bytes against the whole spans and partial spans left for it.
    pub(super) fn shortage(&self) -> Option<Shortage> {
        if self.satisfied() {
            return None;
        }
        let geometry = &self.shared.geometry;
        let room_bytes = geometry.spans.saturating_sub(self.spans(false)) * geometry.span_bytes;
        let partial = |class: usize| {
            let slots = geometry.slots(class);
            (self.used[class].next_multiple_of(slots) - self.used[class])
                * geometry.class_bytes[class]
        };
        let asked = (0..self.used.len()).filter(|&class| self.demand[class] > 0);
        Some(Shortage {
            needed_bytes: self.shared.page_bytes_sum(&self.demand),
            free_bytes: (room_bytes + asked.map(partial).sum::<usize>())
                .saturating_sub(geometry.reserve_spans * geometry.span_bytes),
        })
    }

    pub(super) fn into_demand(self) -> Vec<usize> {
        self.demand
    }
}
