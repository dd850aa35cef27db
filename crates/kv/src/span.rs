//! The arena cut in spans: each serves one page size at a time, an empty span serves any.
//!
//! Everything is sized when the pool is made: no call allocates afterwards.

mod look;

use std::cmp::Reverse;

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

/// What a slot of a span holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Slot {
    Free,
    /// A page of the block with this record index.
    Held(u32),
    /// The target of a re-encode that is under way.
    Target,
    /// Given back during a step; nobody's until its fence passes.
    Fenced,
}

/// A [`Slot`] in four bytes: one is kept for every page the arena can hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PackedSlot(u32);

impl PackedSlot {
    const FREE: PackedSlot = PackedSlot(u32::MAX);
    const TARGET: PackedSlot = PackedSlot(u32::MAX - 1);
    const FENCED: PackedSlot = PackedSlot(u32::MAX - 2);

    fn new(slot: Slot) -> PackedSlot {
        match slot {
            Slot::Free => PackedSlot::FREE,
            Slot::Held(block) => PackedSlot(block),
            Slot::Target => PackedSlot::TARGET,
            Slot::Fenced => PackedSlot::FENCED,
        }
    }

    fn slot(self) -> Slot {
        match self {
            PackedSlot::FREE => Slot::Free,
            PackedSlot::TARGET => Slot::Target,
            PackedSlot::FENCED => Slot::Fenced,
            PackedSlot(block) => Slot::Held(block),
        }
    }
}

/// Where a page lies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place {
    pub span: u32,
    pub slot: u32,
}

/// A set of span indices: a bit each.
#[derive(Debug)]
struct SpanSet {
    words: Vec<u64>,
    count: usize,
    /// No member lies in an earlier word.
    first_word: usize,
}

impl SpanSet {
    fn new(spans: usize) -> SpanSet {
        SpanSet { words: vec![0; spans.div_ceil(64)], count: 0, first_word: 0 }
    }

    fn insert(&mut self, index: u32) {
        let (word, bit) = (index as usize / 64, 1 << (index % 64));
        self.count += usize::from(self.words[word] & bit == 0);
        self.words[word] |= bit;
        self.first_word = self.first_word.min(word);
    }

    fn remove(&mut self, index: u32) {
        let (word, bit) = (index as usize / 64, 1 << (index % 64));
        self.count -= usize::from(self.words[word] & bit != 0);
        self.words[word] &= !bit;
    }

    /// The lowest member.
    fn first(&mut self) -> Option<u32> {
        let from = self.first_word;
        let found = self.words[from..].iter().position(|&word| word != 0);
        self.first_word = found.map_or(self.words.len(), |skipped| from + skipped);
        let word = *self.words.get(self.first_word)?;
        Some(self.first_word as u32 * 64 + word.trailing_zeros())
    }

    fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.words.iter().enumerate().flat_map(|(index, &word)| {
            let mut rest = word;
            std::iter::from_fn(move || {
                let bit = (rest != 0).then(|| rest.trailing_zeros())?;
                rest &= rest - 1;
                Some(index as u32 * 64 + bit)
            })
        })
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Span {
    /// Page size served, as index into `classes`; meaningless while empty.
    class: u16,
    /// Slots that are not free.
    used: u32,
}

/// Bytes of tables of one span whose densest page size has `slots` pages, with `classes` page sizes.
pub(crate) fn span_table_bytes(slots: usize, classes: usize) -> usize {
    slots * size_of::<PackedSlot>() + size_of::<Span>() + (classes + 1).div_ceil(8)
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
    partial: SpanSet,
}

impl SizeClass {
    fn free_slots(&self) -> usize {
        self.spans * self.slots - self.used
    }
}

/// A page that compaction moved.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Relocation {
    /// Record index of the block it belongs to.
    pub block: u32,
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
    /// `[span][slot]`, as many slots as the smallest page size has.
    slots: Vec<PackedSlot>,
    stride: usize,
    empty: SpanSet,
}

impl Spans {
    pub(crate) fn new(span_bytes: usize, count: usize, class_bytes: &[usize]) -> Spans {
        let class = |&page_bytes: &usize| SizeClass {
            page_bytes,
            slots: span_bytes / page_bytes,
            used: 0,
            spans: 0,
            partial: SpanSet::new(count),
        };
        let classes: Vec<SizeClass> = class_bytes.iter().map(class).collect();
        let stride = classes.iter().map(|size| size.slots).max().unwrap_or(0);
        let mut empty = SpanSet::new(count);
        (0..count as u32).for_each(|index| empty.insert(index));
        Spans {
            span_bytes,
            classes,
            spans: vec![Span::default(); count],
            slots: vec![PackedSlot::FREE; count * stride],
            stride,
            empty,
        }
    }

    fn slots_of(&self, index: u32) -> &[PackedSlot] {
        let slots = self.classes[self.spans[index as usize].class as usize].slots;
        &self.slots[index as usize * self.stride..][..slots]
    }

    fn slot_mut(&mut self, place: Place) -> &mut PackedSlot {
        &mut self.slots[place.span as usize * self.stride + place.slot as usize]
    }

    fn class_of(&self, span: u32) -> usize {
        self.spans[span as usize].class as usize
    }

    /// Takes a page of `class`, lowest address first, leaving `keep_empty` spans empty.
    pub(crate) fn take(&mut self, class: usize, content: Slot, keep_empty: usize) -> Option<Place> {
        let index = match self.classes[class].partial.first() {
            Some(index) => index,
            None if self.empty.count > keep_empty => self.open_span(class)?,
            None => return None,
        };
        self.take_in(index, content)
    }

    /// Takes `count` pages of `class` as [`take`](Self::take) would one after the other; `taken` hears the
    /// byte offset of each. Returns whether there were as many.
    pub(crate) fn take_many(
        &mut self,
        class: usize,
        content: Slot,
        keep_empty: usize,
        mut count: usize,
        mut taken: impl FnMut(usize),
    ) -> bool {
        let content = PackedSlot::new(content);
        while count > 0 {
            let index = match self.classes[class].partial.first() {
                Some(index) => index,
                None if self.empty.count > keep_empty => match self.open_span(class) {
                    Some(index) => index,
                    None => return false,
                },
                None => return false,
            };
            let size = &mut self.classes[class];
            let slots = &mut self.slots[index as usize * self.stride..][..size.slots];
            let start = index as usize * self.span_bytes;
            let mut added = 0;
            for (slot, held) in slots.iter_mut().enumerate() {
                if *held == PackedSlot::FREE && added < count {
                    *held = content;
                    added += 1;
                    taken(start + slot * size.page_bytes);
                }
            }
            count -= added;
            size.used += added;
            let span = &mut self.spans[index as usize];
            span.used += added as u32;
            if span.used as usize == size.slots {
                size.partial.remove(index);
            }
        }
        true
    }

    fn open_span(&mut self, class: usize) -> Option<u32> {
        let index = self.empty.first()?;
        self.empty.remove(index);
        // All its slots are free: an emptied span leaves them so.
        self.spans[index as usize].class = class as u16;
        let size = &mut self.classes[class];
        size.spans += 1;
        size.partial.insert(index);
        Some(index)
    }

    fn take_in(&mut self, index: u32, content: Slot) -> Option<Place> {
        let slot = self.slots_of(index).iter().position(|slot| *slot == PackedSlot::FREE)?;
        let place = Place { span: index, slot: slot as u32 };
        *self.slot_mut(place) = PackedSlot::new(content);
        let span = &mut self.spans[index as usize];
        span.used += 1;
        let size = &mut self.classes[span.class as usize];
        size.used += 1;
        if span.used as usize == size.slots {
            size.partial.remove(index);
        }
        Some(place)
    }

    /// Gives pages back as [`give_back`](Self::give_back) would one after the other; neighbors cost least.
    pub(crate) fn give_back_all(&mut self, offsets: impl Iterator<Item = usize>) {
        let mut last: Option<(usize, Place)> = None;
        let mut count = 0;
        for offset in offsets {
            let place = match last {
                Some((end, place)) if end == offset && self.is_slot(place, 1) => {
                    Place { slot: place.slot + 1, ..place }
                }
                _ => self.place(offset),
            };
            if let Some((_, left)) = last.filter(|(_, left)| left.span != place.span) {
                self.give_back_slots(left.span, std::mem::take(&mut count));
            }
            debug_assert_ne!(self.content(place), Slot::Free, "page freed twice");
            *self.slot_mut(place) = PackedSlot::FREE;
            count += 1;
            last = Some((offset + self.page_bytes(place), place));
        }
        if let Some((_, place)) = last {
            self.give_back_slots(place.span, count);
        }
    }

    /// Whether the slot `further` behind `place` is one of its span.
    fn is_slot(&self, place: Place, further: u32) -> bool {
        ((place.slot + further) as usize) < self.classes[self.class_of(place.span)].slots
    }

    /// Counts `count` slots of a span, emptied already, as free.
    fn give_back_slots(&mut self, index: u32, count: u32) {
        let span = &mut self.spans[index as usize];
        span.used -= count;
        let size = &mut self.classes[span.class as usize];
        size.used -= count as usize;
        if span.used == 0 {
            size.spans -= 1;
            size.partial.remove(index);
            self.empty.insert(index);
        } else {
            size.partial.insert(index);
        }
    }

    /// Gives a page back; a span left without pages becomes empty and serves any size again.
    pub(crate) fn give_back(&mut self, place: Place) {
        debug_assert_ne!(self.content(place), Slot::Free, "page freed twice");
        *self.slot_mut(place) = PackedSlot::FREE;
        self.give_back_slots(place.span, 1);
    }

    pub(crate) fn set(&mut self, place: Place, content: Slot) {
        *self.slot_mut(place) = PackedSlot::new(content);
    }

    pub(crate) fn content(&self, place: Place) -> Slot {
        self.slots[place.span as usize * self.stride + place.slot as usize].slot()
    }

    /// Byte offset of a page that is taken.
    pub(crate) fn offset(&self, place: Place) -> usize {
        let page_bytes = self.page_bytes(place);
        place.span as usize * self.span_bytes + place.slot as usize * page_bytes
    }

    /// The page at a byte offset that [`Spans::offset`] gave.
    pub(crate) fn place(&self, offset: usize) -> Place {
        let index = offset / self.span_bytes;
        let page_bytes = self.classes[self.class_of(index as u32)].page_bytes;
        Place { span: index as u32, slot: (offset % self.span_bytes / page_bytes) as u32 }
    }

    /// Bytes of the page at `place`.
    pub(crate) fn page_bytes(&self, place: Place) -> usize {
        self.classes[self.class_of(place.span)].page_bytes
    }

    /// Whether `pages[class]` more pages fit as things lie, leaving `keep_empty` spans empty. Where
    /// fewer are empty now nothing fits: growth into partly filled spans could otherwise use up the last
    /// room that compaction would make a reserve of.
    pub(crate) fn can_take(&self, pages: &[usize], keep_empty: usize) -> bool {
        let more = |(size, &pages): (&SizeClass, &usize)| {
            pages.saturating_sub(size.free_slots()).div_ceil(size.slots)
        };
        let spans: usize = self.classes.iter().zip(pages).map(more).sum();
        pages.iter().all(|&pages| pages == 0) || spans + keep_empty <= self.empty.count
    }

    /// Whether one page of `class` fits as things lie, in any span.
    pub(crate) fn can_take_one(&self, class: usize) -> bool {
        self.classes[class].free_slots() > 0 || self.empty.count > 0
    }

    /// Pages of each class that are not free.
    pub(crate) fn used_pages(&self) -> Vec<usize> {
        self.classes.iter().map(|size| size.used).collect()
    }

    /// Spans of each class that hold one of the pages at `places`.
    pub(crate) fn spans_of(&self, places: impl Iterator<Item = Place>) -> Vec<usize> {
        let mut seen = vec![false; self.spans.len()];
        let mut spans = vec![0; self.classes.len()];
        for Place { span, .. } in places {
            if !std::mem::replace(&mut seen[span as usize], true) {
                spans[self.class_of(span)] += 1;
            }
        }
        spans
    }

    /// Free pages of `class` in its partly filled spans.
    pub(crate) fn free_slots(&self, class: usize) -> usize {
        self.classes[class].free_slots()
    }

    pub(crate) fn empty_spans(&self) -> usize {
        self.empty.count
    }

    /// Free bytes in partly filled spans.
    pub(crate) fn partial_free_bytes(&self) -> usize {
        self.classes.iter().map(|size| size.free_slots() * size.page_bytes).sum()
    }

    /// Bytes that the page sizes of the spans in use do not divide.
    pub(crate) fn waste_bytes(&self) -> usize {
        let waste =
            |size: &SizeClass| size.spans * (self.span_bytes - size.slots * size.page_bytes);
        self.classes.iter().map(waste).sum()
    }

    /// Every slot that is not free, with its byte offset.
    pub(crate) fn taken(&self) -> impl Iterator<Item = (usize, Slot)> + '_ {
        let in_use =
            (0..self.spans.len() as u32).filter(|&index| self.spans[index as usize].used > 0);
        in_use.flat_map(move |span| {
            let slots = self.slots_of(span).iter().enumerate();
            let taken = slots.filter(|(_, slot)| **slot != PackedSlot::FREE);
            let named = move |(slot, content): (usize, &PackedSlot)| {
                (self.offset(Place { span, slot: slot as u32 }), content.slot())
            };
            taken.map(named)
        })
    }

    /// Moves the pages of a span that [`Spans::emptiest_span`] gave into free slots of its class; `moved`
    /// hears of each move in order, when both slots are taken, and copies the bytes.
    pub(crate) fn empty_span(&mut self, source: u32, mut moved: impl FnMut(Relocation)) {
        let class = self.class_of(source);
        // Out of the set, so that no page moves within its own span.
        self.classes[class].partial.remove(source);
        for slot in 0..self.classes[class].slots as u32 {
            let from = Place { span: source, slot };
            let Slot::Held(block) = self.content(from) else { continue };
            let Some(to) = self.take(class, Slot::Held(block), usize::MAX) else { break };
            let page_bytes = self.classes[class].page_bytes;
            moved(Relocation { block, from: self.offset(from), to: self.offset(to), page_bytes });
            self.give_back(from);
            self.classes[class].partial.remove(source);
        }
    }

    /// The span that is emptied with the fewest bytes to copy; `movable` says whether the pages of a block
    /// may move. `None`: no span can be emptied.
    pub(crate) fn emptiest_span(&self, movable: impl Fn(u32) -> bool) -> Option<u32> {
        // Fewest bytes to copy first; the highest address among equals, so that low spans fill up.
        let mut best: Option<((usize, Reverse<u32>), u32)> = None;
        for size in &self.classes {
            for index in size.partial.iter() {
                let used = self.spans[index as usize].used as usize;
                let cost = (used * size.page_bytes, Reverse(index));
                let free_elsewhere = size.free_slots() - (size.slots - used);
                let better = best.is_none_or(|(least, _)| cost < least);
                if better && used <= free_elsewhere && self.all_movable(index, &movable) {
                    best = Some((cost, index));
                }
            }
        }
        best.map(|(_, index)| index).or_else(|| self.full_span(movable))
    }

    /// A full span whose pages fit elsewhere. Only where pages that may not move keep partly filled spans
    /// from being emptied is there any use in it.
    fn full_span(&self, movable: impl Fn(u32) -> bool) -> Option<u32> {
        let fits = |size: &SizeClass| size.free_slots() >= size.slots;
        if !self.classes.iter().any(fits) {
            return None;
        }
        (0..self.spans.len() as u32).rev().find(|&index| {
            let size = &self.classes[self.class_of(index)];
            let full = self.spans[index as usize].used as usize == size.slots;
            full && fits(size) && self.all_movable(index, &movable)
        })
    }

    fn all_movable(&self, span: u32, movable: impl Fn(u32) -> bool) -> bool {
        self.slots_of(span).iter().all(|slot| match slot.slot() {
            Slot::Free => true,
            Slot::Held(block) => movable(block),
            Slot::Target | Slot::Fenced => false,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn smollm2_spans_are_192_kib() {
        assert_eq!(choose_span_bytes(&[24576, 13824, 10752, 7680], 24 << 20), 192 << 10);
    }

    #[test]
    fn no_page_size_wastes_more_than_the_limit() {
        for pages in [vec![32768, 18432], vec![131072, 73728], vec![24576, 13824, 10752, 7680]] {
            let span = choose_span_bytes(&pages, 1 << 30);
            for page in pages {
                assert!(span % page * 1000 <= 25 * span, "page {page} in span {span}");
            }
        }
    }

    #[test]
    fn a_slot_survives_packing_in_four_bytes() {
        for slot in [Slot::Free, Slot::Held(0), Slot::Held(1 << 31), Slot::Target, Slot::Fenced] {
            assert_eq!(PackedSlot::new(slot).slot(), slot);
        }
        assert_eq!(span_table_bytes(25, 6), 25 * 4 + 8 + 1);
    }

    #[test]
    fn a_set_of_spans_gives_its_lowest_member() {
        let mut set = SpanSet::new(200);
        assert_eq!(set.first(), None);
        [199, 64, 3, 64].into_iter().for_each(|index| set.insert(index));
        assert_eq!((set.count, set.first()), (3, Some(3)));
        set.remove(3);
        assert_eq!(set.first(), Some(64));
        set.insert(5);
        assert_eq!(set.first(), Some(5));
        assert_eq!(set.iter().collect::<Vec<_>>(), [5, 64, 199]);
        [5, 64, 199, 7].into_iter().for_each(|index| set.remove(index));
        assert_eq!((set.count, set.first()), (0, None));
    }

    #[test]
    fn an_emptied_span_serves_another_size() {
        let mut spans = Spans::new(100, 2, &[50, 30]);
        let first = spans.take(0, Slot::Held(0), 0).unwrap();
        let second = spans.take(0, Slot::Held(1), 0).unwrap();
        let small = spans.take(1, Slot::Held(2), 0).unwrap();
        assert_eq!((first.span, second.span, small.span), (0, 0, 1));
        assert!(spans.take(0, Slot::Held(3), 0).is_none());
        assert!(!spans.can_take_one(0) && spans.can_take_one(1));
        spans.give_back(first);
        spans.give_back(second);
        for expected in [1, 1, 0, 0, 0] {
            assert_eq!(spans.take(1, Slot::Held(4), 0).unwrap().span, expected);
        }
        assert_eq!(spans.waste_bytes(), 20);
        assert!(spans.can_take(&[0, 0], 1) && !spans.can_take(&[1, 0], 0));
        assert!(!spans.can_take(&[0, 1], 1));
    }

    #[test]
    fn a_full_span_is_emptied_into_holes_that_cannot_be_closed() {
        let mut spans = Spans::new(100, 3, &[25]);
        let places: Vec<_> = (0..12).map(|i| spans.take(0, Slot::Held(i), 0).unwrap()).collect();
        [5, 6, 7, 9, 10, 11].into_iter().for_each(|index: usize| spans.give_back(places[index]));
        // A page of each of the last two spans stays where it is: only the first can be emptied.
        let movable = |block| block < 4;
        assert_eq!(spans.spans_of([places[4], places[8]].into_iter()), [2]);
        let source = spans.emptiest_span(movable).unwrap();
        assert_eq!(source, places[0].span);
        let mut moved = Vec::new();
        spans.empty_span(source, |relocation| moved.push((relocation.block, relocation.to)));
        assert_eq!(moved, [(0, 125), (1, 150), (2, 175), (3, 225)]);
        assert_eq!((spans.empty_spans(), spans.emptiest_span(movable)), (1, None));
    }

    #[test]
    fn compaction_empties_the_emptiest_span() {
        let mut spans = Spans::new(100, 3, &[25]);
        let places: Vec<_> = (0..9).map(|i| spans.take(0, Slot::Held(i), 0).unwrap()).collect();
        spans.give_back(places[1]);
        spans.give_back(places[2]);
        assert_eq!(spans.emptiest_span(|_| false), None);
        let mut moves = Vec::new();
        let source = spans.emptiest_span(|_| true).unwrap();
        spans.empty_span(source, |relocation| moves.push(relocation));
        assert_eq!(moves.len(), 1);
        assert_eq!((moves[0].block, moves[0].from, moves[0].to), (8, 200, 25));
        assert_eq!(spans.empty_spans(), 1);
        assert_eq!(spans.emptiest_span(|_| true), None);
    }
}
