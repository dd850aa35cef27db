//! A slower tier for whole sequences that had to give way: stored and loaded all or nothing.
//!
//! [`SpillFile`] is a file on disk with an I/O thread of its own, [`SimulatedSpill`] the same over memory
//! with a virtual clock and faults by script. Both keep their books in `slots`, move records by
//! `transfer`, and check by `format` that what is read is what was written. A record is never read by
//! another process than the one that wrote it.
//!
//! What can go wrong, and what follows: no space, an I/O error, a short read or write, a flipped byte, a
//! lost or misplaced write, a file that was truncated or replaced: the record's transfer ends as
//! [`SpillDone::Failed`], its slots and pages are free again, and the other records are as they were.

mod disk;
mod file;
mod format;
mod simulated;
mod slot_file;
mod slots;
#[cfg(test)]
mod tests;
mod transfer;

pub use disk::{Fault, FaultScript, Operation};
pub use file::SpillFile;
pub use format::SpillSize;
pub use simulated::{SimulatedSpill, SpillClock, SpillTiming};
pub use slot_file::SpillOpenError;
pub use slots::FAILURES_TO_CLOSE;

use reef_kv::transfer::{EmptyPages, PinnedPages};

/// Why a record could not be stored or loaded. Nothing else is harmed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SpillError {
    /// The record is larger than what is free. Nothing was started.
    #[error("the spill store has {free_bytes} bytes free, the record needs {needed_bytes}")]
    Full {
        /// Bytes of the slots needed.
        needed_bytes: usize,
        /// Bytes of the slots free.
        free_bytes: usize,
    },
    /// The disk failed too often: the store takes no more records. Nothing was started.
    #[error("the spill store takes no more records after {failures} failures in a row")]
    Closed {
        /// Failures in a row.
        failures: usize,
    },
    /// A record of that number is in the store, or is still being written or read. It stays as it is.
    #[error("record {0} of the spill store is in use")]
    Busy(u64),
    /// The pages to be filled are not those of the record. It stays as it is.
    #[error("record {record} of the spill store has {stored_bytes} bytes, its pages {pages_bytes}")]
    Size {
        /// The record.
        record: u64,
        /// Bytes of the record.
        stored_bytes: usize,
        /// Bytes of the pages.
        pages_bytes: usize,
    },
    /// What was read is not what was written.
    #[error("record {record} of the spill store is damaged in part {part}")]
    Damaged {
        /// The record.
        record: u64,
        /// Index of the slot in it.
        part: usize,
    },
    /// The system refused (no space, I/O error, short read or write).
    #[error("the spill store failed: {0}")]
    System(String),
    /// No such record.
    #[error("the spill store has no record {0}")]
    Unknown(u64),
}

/// A piece of I/O is over.
#[derive(Debug)]
pub enum SpillDone {
    /// The record is complete; the pages may be given back.
    Stored {
        /// The record.
        record: u64,
        /// Bytes written.
        bytes: usize,
        /// Microseconds it took.
        elapsed_us: u64,
    },
    /// The pages hold what was stored, byte for byte; the record is gone.
    Loaded {
        /// The record.
        record: u64,
        /// The filled pages.
        pages: EmptyPages,
        /// Bytes read.
        bytes: usize,
        /// Microseconds it took.
        elapsed_us: u64,
    },
    /// It failed; the record is gone, and so are the pages it would have filled.
    Failed {
        /// The record.
        record: u64,
        /// Why.
        error: SpillError,
    },
}

/// What a spill store holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpillUsage {
    /// Bytes of pages it can hold.
    pub capacity_bytes: usize,
    /// Bytes of the slots taken by records, written or being written or read: the next record finds
    /// room in `capacity_bytes - used_bytes`.
    pub used_bytes: usize,
    /// Records.
    pub records: usize,
    /// Transfers that failed so far.
    pub failures: usize,
    /// Whether it takes no more records ([`FAILURES_TO_CLOSE`]).
    pub closed: bool,
}

/// A slower tier. Records are numbered by the caller, each number used once.
pub trait Spill: Send {
    /// Whether a record of so many bytes would find room now.
    fn can_store(&self, bytes: usize) -> bool;

    /// Starts writing a record; the pages stay pinned until the end is polled.
    ///
    /// # Errors
    /// No room, closed, or a number in use; nothing was started, and the pages are let go of.
    fn store(&mut self, record: u64, pages: PinnedPages) -> Result<(), SpillError>;

    /// Starts reading a record that is stored.
    ///
    /// # Errors
    /// No such record, or it is not yet stored, or of another size; the pages are given back.
    fn load(&mut self, record: u64, pages: EmptyPages) -> Result<(), SpillError>;

    /// Forgets a record in whatever state; nothing more is heard of it. Where a slot of it is being moved
    /// right now, its pages and slots are free once that is over and polled; otherwise at once.
    fn discard(&mut self, record: u64);

    /// What is over since the last look; does not wait.
    fn poll(&mut self) -> Vec<SpillDone>;

    /// What it holds.
    fn usage(&self) -> SpillUsage;

    /// Called when there is something to poll.
    fn set_waker(&mut self, _waker: crate::executor::Waker) {}
}
