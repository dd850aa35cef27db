//! Whole sequences to a slower tier and back, all or nothing.
//!
//! Out: [`Sequence::pin`] → [`PinnedPages::copy_to`] on any thread → [`Sequence::clear`]. Back:
//! [`Sequence::restore`] → [`EmptyPages::copy_from`] on any thread → [`Sequence::adopt`]. The bytes are those
//! of the pages, in the order group, block, layer; what is needed beside them is the [`SequenceImage`].

use std::sync::Arc;

use crate::account::ByFormat;
use crate::block::{BlockGuard, Page};
use crate::ladder::Fidelity;
use crate::page::{PAGE_ALIGN, PageFormat};
use crate::pool::{Shared, Shortage};
use crate::scores::Scores;
use crate::table::{Falls, Sequence};

/// What is needed beside the bytes of its pages to have a sequence back: positions, formats and gaps,
/// scores, fidelity.
#[derive(Debug)]
pub struct SequenceImage {
    next_position: usize,
    relative: bool,
    lacking_pages: usize,
    lossy: Fidelity,
    attended: Fidelity,
    scores: Scores,
    /// `[group]`, oldest block first.
    blocks: Vec<Vec<BlockImage>>,
    bytes: usize,
}

/// A block of an image.
#[derive(Debug)]
struct BlockImage {
    first: usize,
    /// Format per layer; `None`: dropped in that layer.
    formats: Vec<Option<PageFormat>>,
    context: Fidelity,
    refused: ByFormat<bool>,
    falls: Falls,
}

impl SequenceImage {
    /// Accepted tokens, dropped ones included.
    pub fn next_position(&self) -> usize {
        self.next_position
    }

    /// Bytes of the pages that go with it.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The worst of all that the computation of its tokens has attended.
    pub fn fidelity(&self) -> Fidelity {
        self.attended
    }
}

/// Where pages lie in the arena, one behind the other in a stream of bytes.
#[derive(Debug)]
struct Stream {
    shared: Arc<Shared>,
    /// (Where it ends in the stream, where it begins in the arena), in bytes.
    pages: Vec<(usize, usize)>,
}

impl Stream {
    fn new(shared: &Arc<Shared>) -> Stream {
        Stream { shared: shared.clone(), pages: Vec::new() }
    }

    fn push_block(&mut self, group: usize, pages: &[Option<Page>]) {
        let shape = self.shared.config.groups[group].shape;
        for page in pages.iter().flatten() {
            let end = self.bytes() + shape.page_bytes(page.format);
            self.pages.push((end, page.offset as usize * PAGE_ALIGN));
        }
    }

    fn bytes(&self) -> usize {
        self.pages.last().map_or(0, |(end, _)| *end)
    }

    /// Calls `visit(arena offset, place in the range)` for each part of `len` bytes from stream offset
    /// `offset` on. Returns the bytes visited: fewer than `len` where the stream ends before.
    fn parts(
        &self,
        offset: usize,
        len: usize,
        mut visit: impl FnMut(usize, std::ops::Range<usize>),
    ) -> usize {
        let mut page = self.pages.partition_point(|(end, _)| *end <= offset);
        let mut done = 0;
        while let (true, Some(&(end, arena))) = (done < len, self.pages.get(page)) {
            let start = if page == 0 { 0 } else { self.pages[page - 1].0 };
            let skipped = offset + done - start;
            let part = (end - start - skipped).min(len - done);
            visit(arena + skipped, done..done + part);
            done += part;
            page += 1;
        }
        done
    }
}

/// The pages of a sequence, held so that they can be read while it goes on: its blocks count as shared, so
/// they are neither written, nor re-encoded, nor moved. Can be sent to another thread.
#[derive(Debug)]
pub struct PinnedPages {
    stream: Stream,
    _guards: Vec<BlockGuard>,
}

impl PinnedPages {
    /// Bytes of all pages.
    pub fn bytes(&self) -> usize {
        self.stream.bytes()
    }

    /// Copies the bytes from `offset` on into `out`. Returns how many: fewer than `out` holds where the pages
    /// end before.
    pub fn copy_to(&self, offset: usize, out: &mut [u8]) -> usize {
        self.stream.parts(offset, out.len(), |arena, range| {
            // SAFETY: the guards hold the page, and nobody writes one that is held twice (`grow` copies it
            // before); it is not moved either.
            let bytes = unsafe { self.stream.shared.arena.slice(arena, range.len()) };
            out[range].copy_from_slice(bytes);
        })
    }
}

/// Pages taken for a sequence that is to come back: they are in no table until it adopts them. Dropping
/// them gives them back. Can be sent to another thread.
#[derive(Debug)]
pub struct EmptyPages {
    stream: Stream,
    /// `[group]`, oldest block first.
    blocks: Vec<Vec<BlockGuard>>,
}

impl EmptyPages {
    /// Bytes of all pages.
    pub fn bytes(&self) -> usize {
        self.stream.bytes()
    }

    /// Writes `bytes` from `offset` on. Returns how many: fewer than `bytes` where the pages end before.
    pub fn copy_from(&mut self, offset: usize, bytes: &[u8]) -> usize {
        self.stream.parts(offset, bytes.len(), |arena, range| {
            // SAFETY: the page was taken for this value alone and is in no table, so nobody else reads,
            // writes or moves it.
            let target = unsafe { self.stream.shared.arena.slice_mut(arena, range.len()) };
            target.copy_from_slice(&bytes[range]);
        })
    }
}

impl Sequence {
    /// What is needed to have this sequence back as it is now, its accepted tokens alone, and its pages to
    /// copy the bytes from. Nothing changes. To be called between steps; a sequence that goes on while its
    /// pages are read must [`grow`](Self::grow) before it is written to again, even if it has grown before.
    pub fn pin(&self) -> (SequenceImage, PinnedPages) {
        let shared = &self.pool().shared;
        let (mut stream, mut guards) = (Stream::new(shared), Vec::new());
        let mut state = shared.state();
        let mut blocks: Vec<Vec<BlockImage>> = Vec::with_capacity(self.tables.len());
        for (group, table) in self.tables.iter().enumerate() {
            let accepted = table.iter().take_while(|entry| entry.first < self.next_position());
            let mut images = Vec::with_capacity(table.len());
            for entry in accepted {
                let record = &mut state.blocks[entry.guard.index() as usize];
                record.owners += 1;
                guards.push(entry.guard.counted());
                stream.push_block(group, &record.pages);
                images.push(BlockImage {
                    first: entry.first,
                    formats: record.pages.iter().map(|page| page.map(|p| p.format)).collect(),
                    context: record.context,
                    refused: entry.refused,
                    falls: entry.falls.and(entry.inherited),
                });
            }
            blocks.push(images);
        }
        drop(state);
        let image = SequenceImage {
            next_position: self.next_position(),
            relative: self.relative,
            lacking_pages: self.lacking_pages,
            lossy: self.lossy,
            attended: self.attended,
            scores: self.accepted_scores(),
            blocks,
            bytes: stream.bytes(),
        };
        (image, PinnedPages { stream, _guards: guards })
    }

    /// The scores of blocks with accepted tokens.
    fn accepted_scores(&self) -> Scores {
        let mut scores = self.scores.clone();
        for (group, view) in self.view().groups.iter().enumerate() {
            for (layer, pages) in view.layers.iter().enumerate() {
                let accepted =
                    |page: &crate::page::PageRef| (page.first as usize) < self.next_position();
                scores.remove(group, layer, pages.partition_point(accepted)..pages.len());
            }
        }
        scores
    }

    /// Takes pages of the formats of `image`, all or none, for a sequence that holds nothing. It still holds
    /// nothing afterwards: once the bytes are in, [`adopt`](Self::adopt) the pages.
    ///
    /// # Errors
    /// [`Shortage`] where the free pages do not suffice; nothing was taken.
    pub fn restore(&mut self, image: &SequenceImage) -> Result<EmptyPages, Shortage> {
        let shared = &self.pool().shared;
        let geometry = &shared.geometry;
        let mut pages = vec![0; geometry.class_bytes.len()];
        for (group, blocks) in image.blocks.iter().enumerate() {
            let formats = blocks.iter().flat_map(|block| block.formats.iter().flatten());
            formats.for_each(|&format| pages[geometry.class_of[group][format]] += 1);
        }
        let mut stream = Stream::new(shared);
        let mut state = shared.state();
        shared.check_room(&state, &pages)?;
        let mut blocks = Vec::with_capacity(image.blocks.len());
        for (group, images) in image.blocks.iter().enumerate() {
            let mut taken = Vec::with_capacity(images.len());
            for BlockImage { first, formats, context, .. } in images {
                let block = shared.take_block(&mut state, group, *first, |layer| formats[layer]);
                let record = &mut state.blocks[block.index() as usize];
                record.context = *context;
                stream.push_block(group, &record.pages);
                taken.push(block);
            }
            blocks.push(taken);
        }
        state.note_peak();
        Ok(EmptyPages { stream, blocks })
    }

    /// Becomes what it was when `image` was made; `pages` are those that [`restore`](Self::restore) took for
    /// it, filled. Tables, formats, gaps, scores and the pages' bytes are as they were; ledger and peak went
    /// on. Nothing happens where the sequence holds something already or the pages are not the image's.
    pub fn adopt(&mut self, image: SequenceImage, pages: EmptyPages) {
        let lens =
            |(images, blocks): (&Vec<BlockImage>, &Vec<BlockGuard>)| images.len() == blocks.len();
        let same = image.blocks.len() == pages.blocks.len()
            && image.blocks.iter().zip(&pages.blocks).all(lens)
            && image.bytes == pages.bytes();
        if !same || !self.is_empty() {
            debug_assert!(false, "pages of another image, or a sequence that holds something");
            return;
        }
        for (group, (images, blocks)) in image.blocks.into_iter().zip(pages.blocks).enumerate() {
            self.push_blocks(group, blocks);
            for (image, entry) in images.into_iter().zip(&mut self.tables[group]) {
                entry.refused = image.refused;
                entry.inherited = image.falls;
            }
        }
        self.next_position = image.next_position;
        self.grown_end = image.next_position;
        self.lacking_pages = image.lacking_pages;
        self.lossy = image.lossy;
        self.attended = image.attended;
        self.scores = image.scores;
        self.relative = image.relative;
        self.note_held();
        (0..self.tables.len()).for_each(|group| self.number_runs(group));
    }
}
