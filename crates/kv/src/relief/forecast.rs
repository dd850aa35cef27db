//! Counts of pages per size class after the moves planned so far: what would then fit.
//!
//! Compaction makes free pages of one class fungible, so a class of `n` pages takes `ceil(n / slots)`
//! spans wherever its pages lie now.

use crate::account::ByFormat;
use crate::page::PageFormat;
use crate::pool::{Shared, Shortage, State};

/// What must fit beside what is used and the reserve.
#[derive(Clone, Copy)]
pub(super) struct Goal<'a> {
    /// Pages per size class still to come.
    pub demand: &'a [usize],
    /// Spans that all may take together, the reserve included.
    pub spans: usize,
}

#[derive(Clone)]
pub(super) struct Forecast<'a> {
    shared: &'a Shared,
    used: Vec<usize>,
    /// Spans that `used` takes once compacted.
    spans: usize,
    /// Spans in use before the first move.
    spans_before: usize,
}

impl<'a> Forecast<'a> {
    pub(super) fn new(shared: &'a Shared, state: &State) -> Forecast<'a> {
        let used = state.spans.used_pages();
        let spans_of =
            |(class, pages): (usize, &usize)| pages.div_ceil(shared.geometry.slots(class));
        let spans = used.iter().enumerate().map(spans_of).sum();
        Forecast { shared, used, spans, spans_before: spans }
    }

    fn set_used(&mut self, class: usize, pages: usize) {
        let slots = self.shared.geometry.slots(class);
        self.spans += pages.div_ceil(slots);
        self.spans -= self.used[class].div_ceil(slots);
        self.used[class] = pages;
    }

    /// Spans in use once everything is compacted.
    pub(super) fn spans(&self) -> usize {
        self.spans
    }

    /// Whether `goal` is reached.
    pub(super) fn reaches(&self, goal: Goal<'_>) -> bool {
        let geometry = &self.shared.geometry;
        let more = |(class, &pages): (usize, &usize)| {
            let slots = geometry.slots(class);
            (self.used[class] + pages).div_ceil(slots) - self.used[class].div_ceil(slots)
        };
        let demanded = goal.demand.iter().enumerate().filter(|(_, pages)| **pages > 0);
        let more: usize = demanded.map(more).sum();
        self.spans + more + geometry.reserve_spans <= goal.spans
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
        self.set_used(classes[from], self.used[classes[from]] - pages);
        self.set_used(classes[to], self.used[classes[to]] + pages);
    }

    /// Re-encodes `pages[format]` pages of `group` to `target`, a page at a time as it will be carried
    /// out. `false`, and nothing changed, where a target page would find no room.
    pub(super) fn encode(
        &mut self,
        group: usize,
        pages: &ByFormat<usize>,
        target: PageFormat,
    ) -> bool {
        let classes = &self.shared.geometry.class_of[group];
        let mut done = ByFormat::<usize>::default();
        let to = classes[target];
        for (format, &count) in pages.iter() {
            let from = classes[format];
            for _ in 0..count {
                self.set_used(to, self.used[to] + 1);
                if self.spans > self.shared.geometry.spans {
                    self.set_used(to, self.used[to] - 1);
                    for (format, &count) in done.iter().filter(|(_, count)| **count > 0) {
                        self.shift(group, target, format, count);
                    }
                    return false;
                }
                self.set_used(from, self.used[from] - 1);
                done[format] += 1;
            }
        }
        true
    }

    /// Gives back one page.
    pub(super) fn free(&mut self, group: usize, format: PageFormat) {
        let class = self.shared.geometry.class_of[group][format];
        self.set_used(class, self.used[class] - 1);
    }

    /// The demand in bytes against the whole spans and partial spans left for it; `None` where it fits.
    pub(super) fn shortage(&self, demand: &[usize]) -> Option<Shortage> {
        let geometry = &self.shared.geometry;
        if self.reaches(Goal { demand, spans: geometry.spans }) {
            return None;
        }
        let room_bytes = geometry.spans.saturating_sub(self.spans) * geometry.span_bytes;
        let partial = |class: usize| {
            let slots = geometry.slots(class);
            let free = self.used[class].next_multiple_of(slots) - self.used[class];
            free * geometry.class_bytes[class]
        };
        let asked = (0..self.used.len()).filter(|&class| demand[class] > 0);
        Some(Shortage {
            needed_bytes: self.shared.page_bytes_sum(demand),
            free_bytes: (room_bytes + asked.map(partial).sum::<usize>())
                .saturating_sub(geometry.reserve_spans * geometry.span_bytes),
        })
    }
}
