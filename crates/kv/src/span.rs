//! The arena cut in spans: each serves one page size at a time, an empty span serves any.

use std::collections::BTreeSet;

/// Most of a span that a page size may waste before a larger span is tried, in millionths.
const WASTE_LIMIT_MILLIONTHS: usize = 25_000;
/// Spans grow in steps of this many bytes.
const SPAN_STEP_BYTES: usize = 64 << 10;
/// Small budgets are cut finer, so that they still have spans to share out.
const SMALL_SPAN_STEP_BYTES: usize = 4 << 10;
/// Spans are no longer than this fraction of the budget, unless a page is.
const SMALLEST_SPAN_COUNT: usize = 16;

/// Bytes of a span: the smallest multiple of the step in which no page size wastes more than 2.5 %
/// (SmolLM2 with 32-token blocks: 192 KiB); where none is small enough for the budget, the one with
/// the least waste.
pub(crate) fn choose_span_bytes(page_bytes: &[usize], budget_bytes: usize) -> usize {
    let largest_page = page_bytes.iter().copied().max().unwrap_or(1);
    let small = budget_bytes < 4 * SMALLEST_SPAN_COUNT * SPAN_STEP_BYTES.max(largest_page);
    let step = if small { SMALL_SPAN_STEP_BYTES } else { SPAN_STEP_BYTES };
    let waste = |span: usize| page_bytes.iter().map(|&page| span % page * 1_000_000 / span).max();
    let first = largest_page.next_multiple_of(step);
    let last = (budget_bytes / SMALLEST_SPAN_COUNT).max(first);
    let candidates = || (first..=last).step_by(step).take(4096);
    candidates()
        .find(|&span| waste(span) <= Some(WASTE_LIMIT_MILLIONTHS))
        .or_else(|| candidates().min_by_key(|&span| waste(span)))
        .unwrap_or(first)
}

/// Which page of which block lies in a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PageOwner {
    /// Index of the block record.
    pub block: u32,
    /// Layer within the block's group.
    pub layer: u16,
}

/// What a slot of a span holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Slot {
    Free,
    /// A page of a block.
    Held(PageOwner),
    /// The target of a re-encode that is under way.
    Target,
    /// Given back during a step; nobody's until its fence passes.
    Fenced,
}

/// Where a page lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place {
    pub span: u32,
    pub slot: u32,
}

#[derive(Debug, Default)]
struct Span {
    /// Page size served, as index into `classes`; meaningless while empty.
    class: usize,
    /// Slots that are not free.
    used: usize,
    slots: Vec<Slot>,
}

#[derive(Debug)]
struct SizeClass {
    page_bytes: usize,
    /// Pages of a span.
    slots: usize,
    /// Slots that are not free, in all spans of the class.
    used: usize,
    /// Spans that serve the class.
    spans: usize,
    /// Those with a free slot.
    partial: BTreeSet<u32>,
}

/// A page that compaction moved.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Relocation {
    pub owner: PageOwner,
    pub from: usize,
    pub to: usize,
    pub page_bytes: usize,
}

/// The spans of an arena.
#[derive(Debug)]
pub(crate) struct Spans {
    span_bytes: usize,
    classes: Vec<SizeClass>,
    spans: Vec<Span>,
    empty: BTreeSet<u32>,
}

impl Spans {
    pub(crate) fn new(span_bytes: usize, count: usize, class_bytes: &[usize]) -> Spans {
        let classes = class_bytes
            .iter()
            .map(|&page_bytes| SizeClass {
                page_bytes,
                slots: span_bytes / page_bytes,
                used: 0,
                spans: 0,
                partial: BTreeSet::new(),
            })
            .collect();
        Spans {
            span_bytes,
            classes,
            spans: (0..count).map(|_| Span::default()).collect(),
            empty: (0..count as u32).collect(),
        }
    }

    /// Takes a page of `class`, lowest address first, leaving `keep_empty` spans empty.
    pub(crate) fn take(&mut self, class: usize, content: Slot, keep_empty: usize) -> Option<Place> {
        let index = match self.classes[class].partial.first() {
            Some(&index) => index,
            None if self.empty.len() > keep_empty => self.open_span(class)?,
            None => return None,
        };
        self.take_in(index, content)
    }

    fn open_span(&mut self, class: usize) -> Option<u32> {
        let index = self.empty.pop_first()?;
        let size = &mut self.classes[class];
        let span = &mut self.spans[index as usize];
        span.class = class;
        span.slots.clear();
        span.slots.resize(size.slots, Slot::Free);
        size.spans += 1;
        size.partial.insert(index);
        Some(index)
    }

    fn take_in(&mut self, index: u32, content: Slot) -> Option<Place> {
        let span = &mut self.spans[index as usize];
        let slot = span.slots.iter().position(|slot| *slot == Slot::Free)?;
        span.slots[slot] = content;
        span.used += 1;
        let size = &mut self.classes[span.class];
        size.used += 1;
        if span.used == size.slots {
            size.partial.remove(&index);
        }
        Some(Place { span: index, slot: slot as u32 })
    }

    /// Gives a page back; a span left without pages becomes empty and serves any size again.
    pub(crate) fn give_back(&mut self, place: Place) {
        let span = &mut self.spans[place.span as usize];
        debug_assert_ne!(span.slots[place.slot as usize], Slot::Free, "page freed twice");
        span.slots[place.slot as usize] = Slot::Free;
        span.used -= 1;
        let size = &mut self.classes[span.class];
        size.used -= 1;
        if span.used == 0 {
            size.spans -= 1;
            size.partial.remove(&place.span);
            self.empty.insert(place.span);
        } else {
            size.partial.insert(place.span);
        }
    }

    pub(crate) fn set(&mut self, place: Place, content: Slot) {
        self.spans[place.span as usize].slots[place.slot as usize] = content;
    }

    pub(crate) fn content(&self, place: Place) -> Slot {
        let span = &self.spans[place.span as usize];
        if span.used == 0 { Slot::Free } else { span.slots[place.slot as usize] }
    }

    /// Byte offset of a page that is taken.
    pub(crate) fn offset(&self, place: Place) -> usize {
        let page_bytes = self.page_bytes(place);
        place.span as usize * self.span_bytes + place.slot as usize * page_bytes
    }

    /// The page at a byte offset that [`Spans::offset`] gave.
    pub(crate) fn place(&self, offset: usize) -> Place {
        let index = offset / self.span_bytes;
        let page_bytes = self.classes[self.spans[index].class].page_bytes;
        Place { span: index as u32, slot: (offset % self.span_bytes / page_bytes) as u32 }
    }

    /// Bytes of the page at `place`.
    pub(crate) fn page_bytes(&self, place: Place) -> usize {
        self.classes[self.spans[place.span as usize].class].page_bytes
    }

    /// Whether `pages[class]` more pages fit as things lie, leaving `keep_empty` spans empty. Where
    /// fewer are empty now nothing fits: growth into partly filled spans could otherwise use up the last
    /// room that compaction would make a reserve of.
    pub(crate) fn can_take(&self, pages: &[usize], keep_empty: usize) -> bool {
        let spans: usize = self
            .classes
            .iter()
            .zip(pages)
            .map(|(size, &pages)| {
                pages.saturating_sub(size.spans * size.slots - size.used).div_ceil(size.slots)
            })
            .sum();
        pages.iter().all(|&pages| pages == 0) || spans + keep_empty <= self.empty.len()
    }

    /// Pages of each class that are not free.
    pub(crate) fn used_pages(&self) -> Vec<usize> {
        self.classes.iter().map(|size| size.used).collect()
    }

    /// Free pages of each class in its partly filled spans.
    pub(crate) fn free_slots(&self) -> Vec<usize> {
        self.classes.iter().map(|size| size.spans * size.slots - size.used).collect()
    }

    pub(crate) fn empty_spans(&self) -> usize {
        self.empty.len()
    }

    /// Free bytes in partly filled spans.
    pub(crate) fn partial_free_bytes(&self) -> usize {
        let free = |size: &SizeClass| (size.spans * size.slots - size.used) * size.page_bytes;
        self.classes.iter().map(free).sum()
    }

    /// Bytes that the page sizes of the spans in use do not divide.
    pub(crate) fn waste_bytes(&self) -> usize {
        let waste =
            |size: &SizeClass| size.spans * (self.span_bytes - size.slots * size.page_bytes);
        self.classes.iter().map(waste).sum()
    }

    /// Every slot that is not free, with its byte offset.
    pub(crate) fn taken(&self) -> impl Iterator<Item = (usize, Slot)> + '_ {
        self.spans.iter().enumerate().filter(|(_, span)| span.used > 0).flat_map(
            move |(i, span)| {
                let page_bytes = self.classes[span.class].page_bytes;
                let taken = span.slots.iter().enumerate().filter(|(_, slot)| **slot != Slot::Free);
                taken
                    .map(move |(slot, content)| (i * self.span_bytes + slot * page_bytes, *content))
            },
        )
    }

    /// Empties one partly filled span by moving its pages into free slots of its class; `movable` says
    /// which pages may move. Returns the moves in order (none: nothing can be emptied). The caller
    /// copies the bytes; the slots vacated are free already.
    pub(crate) fn compact_one(&mut self, movable: impl Fn(PageOwner) -> bool) -> Vec<Relocation> {
        let Some(source) = self.emptiest_span(movable) else { return Vec::new() };
        let class = self.spans[source as usize].class;
        // Out of the set, so that no page moves within its own span.
        self.classes[class].partial.remove(&source);
        let mut moves = Vec::new();
        for slot in 0..self.classes[class].slots as u32 {
            let from = Place { span: source, slot };
            let Slot::Held(owner) = self.content(from) else { continue };
            let Some(to) = self.take(class, Slot::Held(owner), usize::MAX) else { break };
            let page_bytes = self.classes[class].page_bytes;
            moves.push(Relocation {
                owner,
                from: self.offset(from),
                to: self.offset(to),
                page_bytes,
            });
            self.give_back(from);
            self.classes[class].partial.remove(&source);
        }
        moves
    }

    fn emptiest_span(&self, movable: impl Fn(PageOwner) -> bool) -> Option<u32> {
        let fits = |index: &u32| {
            let span = &self.spans[*index as usize];
            let size = &self.classes[span.class];
            let free_elsewhere = size.spans * size.slots - size.used - (size.slots - span.used);
            let all_movable = span.slots.iter().all(|slot| match slot {
                Slot::Free => true,
                Slot::Held(owner) => movable(*owner),
                Slot::Target | Slot::Fenced => false,
            });
            span.used <= free_elsewhere && all_movable
        };
        let partial = self.classes.iter().flat_map(|size| size.partial.iter().copied());
        // Fewest bytes to copy first; the highest address among equals, so that low spans fill up.
        let cost = |index: &u32| {
            let span = &self.spans[*index as usize];
            (span.used * self.classes[span.class].page_bytes, std::cmp::Reverse(*index))
        };
        partial.filter(fits).min_by_key(cost)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owner(block: u32) -> Slot {
        Slot::Held(PageOwner { block, layer: 0 })
    }

    #[test]
    fn smollm2_spans_are_192_kib() {
        assert_eq!(choose_span_bytes(&[24576, 13824], 24 << 20), 192 << 10);
    }

    #[test]
    fn no_page_size_wastes_more_than_the_limit() {
        for pages in [vec![32768, 18432], vec![131072, 73728], vec![24576, 13824, 32768, 18432]] {
            let span = choose_span_bytes(&pages, 1 << 30);
            for page in pages {
                assert!(span % page * 1000 <= 25 * span, "page {page} in span {span}");
            }
        }
    }

    #[test]
    fn an_emptied_span_serves_another_size() {
        let mut spans = Spans::new(100, 2, &[50, 30]);
        let first = spans.take(0, owner(0), 0).unwrap();
        let second = spans.take(0, owner(1), 0).unwrap();
        let small = spans.take(1, owner(2), 0).unwrap();
        assert_eq!((first.span, second.span, small.span), (0, 0, 1));
        assert!(spans.take(0, owner(3), 0).is_none());
        spans.give_back(first);
        spans.give_back(second);
        for expected in [1, 1, 0, 0, 0] {
            assert_eq!(spans.take(1, owner(4), 0).unwrap().span, expected);
        }
        assert_eq!(spans.waste_bytes(), 20);
        assert!(spans.can_take(&[0, 0], 1) && !spans.can_take(&[1, 0], 0));
        assert!(!spans.can_take(&[0, 1], 1));
    }

    #[test]
    fn compaction_empties_the_emptiest_span() {
        let mut spans = Spans::new(100, 3, &[25]);
        let places: Vec<_> = (0..9).map(|i| spans.take(0, owner(i), 0).unwrap()).collect();
        spans.give_back(places[1]);
        spans.give_back(places[2]);
        assert!(spans.compact_one(|_| false).is_empty());
        let moves = spans.compact_one(|_| true);
        assert_eq!(moves.len(), 1);
        assert_eq!((moves[0].from, moves[0].to), (200, 25));
        assert_eq!(spans.empty_spans(), 1);
        assert!(spans.compact_one(|_| true).is_empty());
    }
}
