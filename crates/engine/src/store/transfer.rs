//! A record on its way between pages and slots, one slot at a time.

use std::io;
use std::sync::Arc;

use reef_kv::transfer::{EmptyPages, PinnedPages};

use super::format::{HEADER_BYTES, SlotFormat};
use super::slots::Slots;
use super::{SpillDone, SpillError};

/// Where slots lie. Like the system's calls, both may do less than was asked.
pub(super) trait SlotIo: Send {
    /// Reads bytes from byte `offset` on; 0: the end.
    fn read_at(&mut self, offset: u64, bytes: &mut [u8]) -> io::Result<usize>;

    /// Writes bytes from byte `offset` on; 0: nothing more can be written.
    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<usize>;
}

/// Which way, and the pages at the other end.
pub(super) enum Pages {
    /// To be written.
    Out(PinnedPages),
    /// To be filled.
    In(EmptyPages),
}

/// How a transfer has ended.
pub(super) struct Ended {
    record: u64,
    pages: Pages,
    outcome: Result<(), SpillError>,
    bytes: usize,
    elapsed_us: u64,
}

impl Ended {
    pub(super) fn record(&self) -> u64 {
        self.record
    }

    /// Settles the record, and lets go of its pages where they are not handed on. What the caller of the
    /// store is to hear of it; nothing where the record was discarded.
    pub(super) fn settle(self, slots: &mut Slots) -> Option<SpillDone> {
        let Ended { record, pages, outcome, bytes, elapsed_us } = self;
        if !slots.end(record, outcome.is_ok()) {
            return None;
        }
        Some(match (outcome, pages) {
            (Ok(()), Pages::Out(_)) => SpillDone::Stored { record, bytes, elapsed_us },
            (Ok(()), Pages::In(pages)) => SpillDone::Loaded { record, pages, bytes, elapsed_us },
            (Err(error), _) => SpillDone::Failed { record, error },
        })
    }
}

/// A record on its way.
pub(super) struct Transfer {
    record: u64,
    slots: Arc<[u32]>,
    bytes: usize,
    next_part: usize,
    pages: Pages,
}

impl Transfer {
    pub(super) fn store(record: u64, slots: Arc<[u32]>, pages: PinnedPages) -> Transfer {
        let bytes = pages.bytes();
        Transfer { record, slots, bytes, next_part: 0, pages: Pages::Out(pages) }
    }

    pub(super) fn load(record: u64, slots: Arc<[u32]>, pages: EmptyPages) -> Transfer {
        let bytes = pages.bytes();
        Transfer { record, slots, bytes, next_part: 0, pages: Pages::In(pages) }
    }

    pub(super) fn record(&self) -> u64 {
        self.record
    }

    /// Whether every slot has been moved.
    pub(super) fn is_complete(&self) -> bool {
        self.next_part == self.slots.len()
    }

    /// Bytes of pages that the next slot moves.
    pub(super) fn next_bytes(&self, format: &SlotFormat) -> usize {
        (self.bytes - self.next_part * format.part_bytes()).min(format.part_bytes())
    }

    /// Moves the next slot, through `buffer` of the length of a slot.
    pub(super) fn step(
        &mut self,
        io: &mut dyn SlotIo,
        format: &SlotFormat,
        buffer: &mut [u8],
    ) -> Result<(), SpillError> {
        let (record, part) = (self.record, self.next_part);
        let start = part * format.part_bytes();
        let slot = &mut buffer[..HEADER_BYTES + self.next_bytes(format)];
        let offset = format.offset(self.slots[part]);
        match &mut self.pages {
            Pages::Out(pages) => {
                let copied = pages.copy_to(start, &mut slot[HEADER_BYTES..]);
                debug_assert_eq!(HEADER_BYTES + copied, slot.len());
                format.seal(slot, record, part);
                write_all(io, offset, slot)?;
            }
            Pages::In(pages) => {
                read_exact(io, offset, slot)?;
                let bytes = format.open(slot, record, part);
                pages.copy_from(start, bytes.ok_or(SpillError::Damaged { record, part })?);
            }
        }
        self.next_part += 1;
        Ok(())
    }

    /// It is over, `elapsed_us` after its first slot. The pages go along, so that they are let go of where
    /// the store is polled and at no other moment.
    pub(super) fn end(self, outcome: Result<(), SpillError>, elapsed_us: u64) -> Ended {
        let Transfer { record, pages, bytes, .. } = self;
        Ended { record, pages, outcome, bytes, elapsed_us }
    }
}

fn write_all(io: &mut dyn SlotIo, offset: u64, bytes: &[u8]) -> Result<(), SpillError> {
    let mut done = 0;
    while done < bytes.len() {
        match io.write_at(offset + done as u64, &bytes[done..]) {
            Ok(0) => return Err(failed("writing", offset, "nothing was written")),
            Ok(written) => done += written,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(failed("writing", offset, error)),
        }
    }
    Ok(())
}

fn read_exact(io: &mut dyn SlotIo, offset: u64, bytes: &mut [u8]) -> Result<(), SpillError> {
    let mut done = 0;
    while done < bytes.len() {
        match io.read_at(offset + done as u64, &mut bytes[done..]) {
            Ok(0) => return Err(failed("reading", offset, "the file ends there")),
            Ok(read) => done += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(failed("reading", offset, error)),
        }
    }
    Ok(())
}

fn failed(doing: &str, offset: u64, reason: impl std::fmt::Display) -> SpillError {
    SpillError::System(format!("{doing} at byte {offset}: {reason}"))
}
