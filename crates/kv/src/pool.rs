//! The pool: who holds which bytes of the budget.

use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::account::{Accounts, ByFormat};
use crate::admission::minimum_budget_bytes;
use crate::arena::Arena;
use crate::block::{BlockGuard, BlockRecord, Page};
use crate::config::{ConfigError, Geometry, PoolConfig};
use crate::ladder::Fidelity;
use crate::page::{PAGE_ALIGN, PageFormat};
use crate::span::{Place, Relocation, Slot, Spans};
use crate::table::push_tight;

/// Demand that does not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("KV memory is short: {needed_bytes} bytes needed, {free_bytes} bytes free")]
pub struct Shortage {
    /// Bytes of the pages asked for.
    pub needed_bytes: usize,
    /// Bytes free for them.
    pub free_bytes: usize,
}

/// A byte budget and the blocks in it. Cheap to clone: clones are the same pool.
#[derive(Clone, Debug)]
pub struct BlockPool {
    pub(crate) shared: Arc<Shared>,
}

/// A block of f16 pages to be copied page by page into a new one.
#[derive(Clone, Copy)]
pub(crate) struct CopyOf {
    /// Index of its record.
    pub block: u32,
    pub group: usize,
    /// Original position of the copy's first token.
    pub first: usize,
}

/// What guards, sequences and the pool's handles share.
pub(crate) struct Shared {
    pub config: PoolConfig,
    pub geometry: Geometry,
    pub arena: Arena,
    state: Mutex<State>,
}

impl fmt::Debug for Shared {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Shared").field("config", &self.config).finish_non_exhaustive()
    }
}

/// The part of a pool that changes.
#[derive(Debug)]
pub(crate) struct State {
    pub spans: Spans,
    pub blocks: Vec<BlockRecord>,
    pub(crate) free_records: Vec<u32>,
    pub used: ByFormat<usize>,
    /// The part of `used` in idle blocks.
    pub cached_bytes: usize,
    /// Records with a change that the prefix index has not heard of, oldest first, each once.
    pub(crate) cache_changes: Vec<u32>,
    pub peak_bytes: usize,
    next_step: u64,
    open_steps: BTreeSet<u64>,
    /// Pages given back during a step: (newest step in flight then, place).
    fenced: VecDeque<(u64, Place)>,
    pub fenced_bytes: usize,
}

impl BlockPool {
    /// Maps the arena and cuts it.
    ///
    /// # Errors
    /// A configuration out of range, a budget below [`minimum_budget_bytes`] of every contract, or a
    /// mapping that the system refuses.
    pub fn new(config: PoolConfig) -> Result<BlockPool, ConfigError> {
        config.check()?;
        let geometry = Geometry::new(&config);
        let budget_bytes = config.budget_bytes;
        // Mostly the loosest contract's; with few small pages the strictest wastes fewer spans.
        let minimums = Fidelity::ALL.map(|contract| minimum_budget_bytes(&config, contract));
        let minimum_bytes = minimums.into_iter().min().unwrap_or(0);
        if budget_bytes < minimum_bytes {
            return Err(ConfigError::BudgetTooSmall { budget_bytes, minimum_bytes });
        }
        let bytes = geometry.spans * geometry.span_bytes;
        let maximum_bytes = Geometry::MAXIMUM_BYTES;
        if bytes > maximum_bytes {
            return Err(ConfigError::BudgetTooLarge { budget_bytes, maximum_bytes });
        }
        let arena = Arena::new(bytes, config.prefault)
            .map_err(|source| ConfigError::Map { bytes, source })?;
        let state = State {
            spans: Spans::new(geometry.span_bytes, geometry.spans, &geometry.class_bytes),
            blocks: Vec::new(),
            free_records: Vec::new(),
            used: ByFormat::default(),
            cached_bytes: 0,
            cache_changes: Vec::new(),
            peak_bytes: 0,
            next_step: 0,
            open_steps: BTreeSet::new(),
            fenced: VecDeque::new(),
            fenced_bytes: 0,
        };
        let shared = Shared { config, geometry, arena, state: Mutex::new(state) };
        Ok(BlockPool { shared: Arc::new(shared) })
    }

    /// What the pool was made for.
    pub fn config(&self) -> &PoolConfig {
        &self.shared.config
    }

    /// The bytes that `PageRef::byte_offset` indexes.
    pub fn arena(&self) -> &Arena {
        &self.shared.arena
    }

    /// Bytes of a span (the granularity at which page sizes share the arena).
    pub fn span_bytes(&self) -> usize {
        self.shared.geometry.span_bytes
    }

    /// Where every byte of the budget is.
    pub fn accounts(&self) -> Accounts {
        self.shared.accounts(&self.shared.state())
    }

    /// Opens a step's fence: from now until it passes, pages given back are not reused, because the
    /// step may still read them.
    pub fn begin_step(&self) -> StepFence {
        let mut state = self.shared.state();
        let step = state.next_step;
        state.next_step += 1;
        state.open_steps.insert(step);
        StepFence { shared: self.shared.clone(), step }
    }
}

impl State {
    /// Keeps the peak of bytes used.
    pub(crate) fn note_peak(&mut self) {
        self.peak_bytes = self.peak_bytes.max(self.used.total());
    }

    /// Where pages wait for a fence.
    pub(crate) fn fenced_places(&self) -> impl Iterator<Item = Place> + '_ {
        self.fenced.iter().map(|(_, place)| *place)
    }
}

/// A step in flight; its fence passes on drop or by [`StepFence::pass`].
#[derive(Debug)]
pub struct StepFence {
    shared: Arc<Shared>,
    step: u64,
}

impl StepFence {
    /// The step has ended: nothing reads the pages given back during it any more.
    pub fn pass(self) {}
}

impl Drop for StepFence {
    fn drop(&mut self) {
        let mut state = self.shared.state();
        state.open_steps.remove(&self.step);
        // A page waits for every step that was in flight when it was given back.
        let oldest_open = state.open_steps.first().copied().unwrap_or(u64::MAX);
        while let Some(&(step, place)) = state.fenced.front() {
            if step >= oldest_open {
                break;
            }
            state.fenced.pop_front();
            state.fenced_bytes -= state.spans.page_bytes(place);
            self.shared.reuse(&mut state, place);
        }
    }
}

impl Shared {
    /// The lock holds no half-done change when a caller's kernel panics: callers run outside it.
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn accounts(&self, state: &State) -> Accounts {
        let geometry = &self.geometry;
        let empty = state.spans.empty_spans();
        let reserved = empty.min(geometry.reserve_spans);
        let arena_bytes = geometry.spans * geometry.span_bytes;
        let unused_bytes = self.config.budget_bytes - arena_bytes - geometry.table_bytes;
        Accounts {
            budget_bytes: self.config.budget_bytes,
            used: state.used,
            cached_bytes: state.cached_bytes,
            fenced_bytes: state.fenced_bytes,
            free_bytes: state.spans.partial_free_bytes() + (empty - reserved) * geometry.span_bytes,
            reserved_bytes: reserved * geometry.span_bytes,
            fragmentation_bytes: state.spans.waste_bytes() + unused_bytes,
            table_bytes: geometry.table_bytes,
            peak_bytes: state.peak_bytes,
        }
    }

    /// Whether a step is in flight.
    pub(crate) fn step_in_flight(&self, state: &State) -> bool {
        !state.open_steps.is_empty()
    }

    /// Takes a new f16 block per copy, filled with its pages, and `blocks[group]` new f16 blocks per group,
    /// all or none: each group's in order, from the one that begins at original position `first` on. Copies
    /// come first.
    ///
    /// Copies need that no step is in flight; where one is, nothing is taken and nothing counts as free.
    pub(crate) fn take_blocks(
        self: &Arc<Self>,
        copies: &[CopyOf],
        blocks: &[usize],
        first: usize,
    ) -> Result<(Vec<BlockGuard>, Vec<Vec<BlockGuard>>), Shortage> {
        let mut state = self.state();
        let mut pages = self.demand_pages(blocks);
        for copy in copies {
            pages[self.geometry.class_of[copy.group][PageFormat::F16]] +=
                self.config.groups[copy.group].layers;
        }
        if !copies.is_empty() && self.step_in_flight(&state) {
            let needed_bytes = self.page_bytes_sum(&pages);
            return Err(Shortage { needed_bytes, free_bytes: 0 });
        }
        self.check_room(&state, &pages)?;
        let f16 = |_: usize| Some(PageFormat::F16);
        let mut copied = Vec::with_capacity(copies.len());
        for copy in copies {
            let block = self.take_block(&mut state, copy.group, copy.first, f16);
            self.copy_block(&state, copy, &state.blocks[block.index() as usize].pages);
            copied.push(block);
        }
        let mut taken = Vec::with_capacity(blocks.len());
        for (group, &count) in blocks.iter().enumerate() {
            let firsts = (0..count).map(|index| first + index * self.config.block_size());
            taken
                .push(firsts.map(|first| self.take_block(&mut state, group, first, f16)).collect());
        }
        state.note_peak();
        Ok((copied, taken))
    }

    /// Whether `pages[class]` more pages fit beside the reserve.
    pub(crate) fn check_room(&self, state: &State, pages: &[usize]) -> Result<(), Shortage> {
        if state.spans.can_take(pages, self.geometry.reserve_spans) {
            return Ok(());
        }
        let needed_bytes = self.page_bytes_sum(pages);
        Err(Shortage { needed_bytes, free_bytes: self.free_bytes_for(state, pages) })
    }

    /// Takes a block whose layers have pages in `formats(layer)`, which [`check_room`](Self::check_room) has
    /// counted under the same lock.
    pub(crate) fn take_block(
        self: &Arc<Self>,
        state: &mut State,
        group: usize,
        first: usize,
        formats: impl Fn(usize) -> Option<PageFormat>,
    ) -> BlockGuard {
        let index = state.free_records.pop().unwrap_or_else(|| {
            push_tight(&mut state.blocks, BlockRecord::default());
            state.blocks.len() as u32 - 1
        });
        let layers = self.config.groups[group].layers;
        let keep_empty = self.geometry.reserve_spans;
        let State { blocks, spans, used, .. } = state;
        let record = &mut blocks[index as usize];
        record.pages.clear();
        record.pages.reserve_exact(layers);
        while record.pages.len() < layers {
            // Layers of one format, mostly all.
            let layer = record.pages.len();
            let format = formats(layer);
            let count = (layer..layers).take_while(|&layer| formats(layer) == format).count();
            let Some(format) = format else {
                record.pages.resize(layer + count, None);
                continue;
            };
            let class = self.geometry.class_of[group][format];
            let pages = &mut record.pages;
            let all = spans.take_many(class, Slot::Held(index), keep_empty, count, |offset| {
                pages.push(Some(Page { offset: (offset / PAGE_ALIGN) as u32, format }));
            });
            assert!(all, "pages that were counted as free");
            used[format] += count * self.geometry.class_bytes[class];
        }
        record.group = group as u16;
        record.first = first as u32;
        record.owners = 1;
        // Nobody's whom relief that is under way knows.
        record.holders = 0;
        record.cached = false;
        record.context = Fidelity::Exact;
        record.generation = record.generation.wrapping_add(1);
        BlockGuard::new(self.clone(), index, record.generation)
    }

    /// Copies the pages of a block into those of another of the same group that nobody else knows of yet.
    fn copy_block(&self, state: &State, copy: &CopyOf, targets: &[Option<Page>]) {
        let page_bytes = self.config.groups[copy.group].shape.page_bytes(PageFormat::F16);
        let sources = &state.blocks[copy.block as usize].pages;
        for (source, target) in sources.iter().zip(targets) {
            let (Some(source), Some(target)) = (source, target) else { continue };
            debug_assert_eq!(source.format, PageFormat::F16, "only open blocks are copied");
            // SAFETY: no step is in flight (checked under this lock) so nobody writes the source, and the
            // target was taken under the same lock: no table names it yet.
            unsafe {
                let bytes = self.arena.slice(source.offset as usize * PAGE_ALIGN, page_bytes);
                let target = target.offset as usize * PAGE_ALIGN;
                self.arena.slice_mut(target, page_bytes).copy_from_slice(bytes);
            }
        }
    }

    pub(crate) fn page_offset(&self, state: &State, place: Place) -> u32 {
        (state.spans.offset(place) / PAGE_ALIGN) as u32
    }

    pub(crate) fn place(&self, state: &State, page: Page) -> Place {
        state.spans.place(page.offset as usize * PAGE_ALIGN)
    }

    /// One owner fewer; the last one gives the pages back, unless the block is cached.
    pub(crate) fn release(&self, index: u32) {
        let mut state = self.state();
        let record = &mut state.blocks[index as usize];
        #[cfg(feature = "mutants")]
        if crate::mutant::is_active(crate::mutant::Mutant::DropOwner) && record.owners == 0 {
            return;
        }
        record.owners -= 1;
        if record.owners > 0 {
            return;
        }
        if record.cached {
            state.cached_bytes += self.record_bytes(&state, index);
            state.note_cache_change(index);
        } else {
            self.give_back_record(&mut state, index);
        }
    }

    /// Gives back the pages of a block that nobody holds or names. Returns their bytes.
    pub(crate) fn give_back_record(&self, state: &mut State, index: u32) -> usize {
        let bytes = self.record_bytes(state, index);
        let record = &mut state.blocks[index as usize];
        let (group, mut pages) = (record.group as usize, std::mem::take(&mut record.pages));
        if !record.queued {
            push_tight(&mut state.free_records, index);
        }
        if state.open_steps.is_empty() {
            let sizes = self.page_bytes(group);
            for page in pages.iter().flatten() {
                state.used[page.format] -= sizes[page.format];
                // SAFETY: no table names the page and no step that could read it is in flight.
                unsafe {
                    self.arena.poison(page.offset as usize * PAGE_ALIGN, sizes[page.format]);
                }
            }
            let offsets = pages.drain(..).flatten().map(|page| page.offset as usize * PAGE_ALIGN);
            state.spans.give_back_all(offsets);
        } else {
            pages.drain(..).flatten().for_each(|page| self.give_back_page(state, page));
        }
        // The next block of this record needs a list as long.
        state.blocks[index as usize].pages = pages;
        bytes
    }

    /// Bytes of a block's pages.
    pub(crate) fn record_bytes(&self, state: &State, index: u32) -> usize {
        let record = &state.blocks[index as usize];
        let bytes = self.page_bytes(record.group as usize);
        record.pages.iter().flatten().map(|page| bytes[page.format]).sum()
    }

    /// Bytes of a page of a group, by format.
    pub(crate) fn page_bytes(&self, group: usize) -> ByFormat<usize> {
        let classes = &self.geometry.class_of[group];
        ByFormat::from_fn(|format| self.geometry.class_bytes[classes[format]])
    }

    /// Gives a page back that no table names any more.
    pub(crate) fn give_back_page(&self, state: &mut State, page: Page) {
        let place = self.place(state, page);
        let bytes = state.spans.page_bytes(place);
        state.used[page.format] -= bytes;
        let fence = state.open_steps.last().copied();
        #[cfg(feature = "mutants")]
        let fence = fence.filter(|_| !crate::mutant::is_active(crate::mutant::Mutant::SkipFence));
        match fence {
            Some(step) => {
                state.spans.set(place, Slot::Fenced);
                state.fenced.push_back((step, place));
                state.fenced_bytes += bytes;
            }
            None => self.reuse(state, place),
        }
    }

    /// Makes a page reusable.
    pub(crate) fn reuse(&self, state: &mut State, place: Place) {
        let (offset, bytes) = (state.spans.offset(place), state.spans.page_bytes(place));
        // SAFETY: no table names the page and no step that could read it is in flight.
        unsafe { self.arena.poison(offset, bytes) };
        state.spans.give_back(place);
    }

    /// Empties partly filled spans until `enough` holds, as far as that helps; only pages of blocks in
    /// `movable` move. No step may be in flight. `moved` hears of each block record whose page in that
    /// layer has moved, so that views can follow. Allocates nothing.
    pub(crate) fn compact(
        &self,
        state: &mut State,
        enough: impl Fn(&Spans) -> bool,
        movable: impl Fn(&BlockRecord) -> bool,
        mut moved: impl FnMut(u32, &BlockRecord, usize),
    ) {
        let State { spans, blocks, .. } = state;
        while !enough(spans) {
            let free_to_move = |block: u32| movable(&blocks[block as usize]);
            let Some(span) = spans.emptiest_span(free_to_move) else { return };
            spans.empty_span(span, |relocation| {
                self.copy_page(&relocation);
                let record = &mut blocks[relocation.block as usize];
                let (from, to) = (relocation.from / PAGE_ALIGN, relocation.to / PAGE_ALIGN);
                let is_it =
                    |page: &Option<Page>| page.is_some_and(|page| page.offset == from as u32);
                let layer = record.pages.iter().position(is_it);
                // A slot names a block only while the block's record names the slot.
                let layer = layer.expect("a page that its slot says the block has");
                if let Some(page) = &mut record.pages[layer] {
                    page.offset = to as u32;
                }
                moved(relocation.block, record, layer);
            });
        }
    }

    fn copy_page(&self, relocation: &Relocation) {
        let bytes = relocation.page_bytes;
        // SAFETY: no step is in flight, the state is locked, and the two pages are different slots:
        // nothing else reads or writes them.
        unsafe {
            let source = self.arena.slice(relocation.from, bytes);
            self.arena.slice_mut(relocation.to, bytes).copy_from_slice(source);
            self.arena.poison(relocation.from, bytes);
        }
    }

    /// f16 pages per class for `blocks[group]` new blocks per group.
    pub(crate) fn demand_pages(&self, blocks: &[usize]) -> Vec<usize> {
        let mut pages = vec![0; self.geometry.class_bytes.len()];
        for (group, &count) in blocks.iter().enumerate() {
            pages[self.geometry.class_of[group][PageFormat::F16]] +=
                count * self.config.groups[group].layers;
        }
        pages
    }

    pub(crate) fn page_bytes_sum(&self, pages: &[usize]) -> usize {
        pages.iter().zip(&self.geometry.class_bytes).map(|(pages, bytes)| pages * bytes).sum()
    }

    /// Bytes free for the classes that `pages` asks for, the reserve left out.
    pub(crate) fn free_bytes_for(&self, state: &State, pages: &[usize]) -> usize {
        let Geometry { span_bytes, reserve_spans, .. } = self.geometry;
        let asked = |class: &usize| pages[*class] > 0;
        let partial: usize = (0..pages.len())
            .filter(asked)
            .map(|class| state.spans.free_slots(class) * self.geometry.class_bytes[class])
            .sum();
        // Where the reserve is short, refilling it comes first.
        (partial + state.spans.empty_spans() * span_bytes)
            .saturating_sub(reserve_spans * span_bytes)
    }
}
