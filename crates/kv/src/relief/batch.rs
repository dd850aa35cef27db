//! A batch of pages to re-encode: targets taken, handed to the caller's kernel, given back where it fails.

use std::sync::Arc;

use crate::block::Page;
use crate::page::{PAGE_ALIGN, PageFormat, PageShape};
use crate::pool::Shared;
use crate::span::{Place, Slot};

/// Most pages of one batch of jobs: all layers of most models, few enough for the stack.
pub const BATCH_PAGES: usize = 64;

/// One page to re-encode. Jobs of one batch touch disjoint bytes and may run on several threads.
#[derive(Debug)]
pub struct EncodeJob<'a> {
    /// Shape of both pages.
    pub shape: PageShape,
    /// Format of `source`.
    pub source_format: PageFormat,
    /// The live page, full of accepted tokens.
    pub source: &'a [u8],
    /// Format wanted.
    pub target_format: PageFormat,
    /// The page to write; its bytes are arbitrary before.
    pub target: &'a mut [u8],
    /// Set it where `source` holds NaN or infinity: the page stays as it is, for good.
    pub refused: bool,
}

/// Target pages of a batch and the pages that go there; the targets are given back on drop (also when
/// the kernel panics) unless `count` was taken.
pub(super) struct Batch {
    shared: Arc<Shared>,
    pub count: usize,
    pub places: [Place; BATCH_PAGES],
    /// Layer and page of the source.
    pub pages: [(usize, Page); BATCH_PAGES],
}

impl Batch {
    pub(super) fn new(shared: &Arc<Shared>) -> Batch {
        let no_page = Page { offset: 0, format: PageFormat::F16 };
        Batch {
            shared: shared.clone(),
            count: 0,
            places: [Place::default(); BATCH_PAGES],
            pages: [(0, no_page); BATCH_PAGES],
        }
    }

    /// Takes up to `wanted` target pages of `class`, the reserve included.
    pub(super) fn take(&mut self, class: usize, wanted: usize) {
        let mut state = self.shared.state();
        while self.count < wanted {
            let Some(place) = state.spans.take(class, Slot::Target, 0) else { break };
            self.places[self.count] = place;
            self.count += 1;
        }
    }

    /// Runs the jobs outside the lock. Returns which were refused.
    pub(super) fn run(
        &self,
        shape: PageShape,
        format: PageFormat,
        encode: &mut dyn FnMut(&mut [EncodeJob<'_>]),
    ) -> [bool; BATCH_PAGES] {
        let mut offsets = [0; BATCH_PAGES];
        let state = self.shared.state();
        for (offset, place) in offsets.iter_mut().zip(&self.places[..self.count]) {
            *offset = state.spans.offset(*place);
        }
        drop(state);
        let mut jobs: [EncodeJob<'_>; BATCH_PAGES] = std::array::from_fn(|job| {
            let source_format = self.pages[job].1.format;
            let (source, target): (&[u8], &mut [u8]) = if job < self.count {
                let source_offset = self.pages[job].1.offset as usize * PAGE_ALIGN;
                let (from_bytes, to_bytes) =
                    (shape.page_bytes(source_format), shape.page_bytes(format));
                // SAFETY: no step is in flight (checked at the start; the caller's `&mut` sequences keep
                // new writers out), and the source is a live page that no one writes.
                let source = unsafe { self.shared.arena.slice(source_offset, from_bytes) };
                // SAFETY: the target is a slot taken for this job alone; no table names it yet.
                let target = unsafe { self.shared.arena.slice_mut(offsets[job], to_bytes) };
                (source, target)
            } else {
                (&[], &mut [])
            };
            EncodeJob {
                shape,
                source_format,
                source,
                target_format: format,
                target,
                refused: false,
            }
        });
        encode(&mut jobs[..self.count]);
        std::array::from_fn(|job| jobs[job].refused)
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        if self.count == 0 {
            return;
        }
        let mut state = self.shared.state();
        for place in &self.places[..self.count] {
            self.shared.reuse(&mut state, *place);
        }
    }
}
