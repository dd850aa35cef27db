//! Whether pages could be had now, and what stands in the way.

use super::{ClassPages, PageMap};
use crate::admission::Need;
use crate::pool::BlockPool;

/// What stands between a need and its pages; the first that would do if it were gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Room {
    /// Nothing: they are free as things lie.
    Free,
    /// Their bytes are free, but in spans of other page sizes: moving pages together, between steps, makes
    /// room.
    Scattered,
    /// Pages given back during the step in flight: theirs when it has ended.
    Fenced,
    /// Idle prefixes, which are given up for it.
    Cached,
    /// Pages on their way to or from the spill store.
    Pinned,
    /// The spans kept for re-encoding.
    Reserved,
    /// What sequences hold.
    Held,
}

impl PageMap {
    /// Whether `pages`, so many of each page size, could be had.
    pub(crate) fn room_for_pages(&self, pages: &[usize]) -> Room {
        let beyond = |(class, &pages): (&ClassPages, &usize)| {
            let free = class.spans * class.slots - class.used;
            pages.saturating_sub(free).div_ceil(class.slots)
        };
        let asked = self.classes.iter().zip(pages);
        let spans: usize = asked.clone().map(beyond).sum();
        if spans == 0 && pages.iter().all(|&pages| pages == 0)
            || spans + self.reserve_spans <= self.empty_spans
        {
            return Room::Free;
        }
        // Pages of one size are fungible once they are moved together.
        let fits = |reserve_spans: usize, goes: &dyn Fn(&ClassPages) -> usize| {
            let of_class = |(class, pages): (&ClassPages, &usize)| {
                (class.used.saturating_sub(goes(class)) + pages).div_ceil(class.slots)
            };
            asked.clone().map(of_class).sum::<usize>() + reserve_spans <= self.span_count
        };
        let reserve = self.reserve_spans;
        if fits(reserve, &|_| 0) {
            Room::Scattered
        } else if fits(reserve, &|class| class.fenced) {
            Room::Fenced
        } else if fits(reserve, &|class| class.fenced + class.cached) {
            Room::Cached
        } else if fits(reserve, &|class| class.fenced + class.cached + class.pinned) {
            Room::Pinned
        } else if fits(0, &|class| class.fenced + class.cached + class.pinned) {
            Room::Reserved
        } else {
            Room::Held
        }
    }
}

impl BlockPool {
    /// Whether the pages of one more sequence could be had as `map` shows the pool, and its bytes of pages.
    pub fn room(&self, map: &PageMap, need: Need) -> (Room, usize) {
        let pages = self.pages_for(need);
        (map.room_for_pages(&pages), self.shared.page_bytes_sum(&pages))
    }
}
