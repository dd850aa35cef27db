//! A slower tier for whole sequences that had to give way: stored and loaded all or nothing.

use reef_kv::transfer::{EmptyPages, PinnedPages};

/// Why a record could not be stored or loaded. The record is gone; nothing else is harmed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SpillError {
    /// The record is larger than what is free.
    #[error("the spill store has {free_bytes} bytes free, the record needs {needed_bytes}")]
    Full {
        /// Bytes needed.
        needed_bytes: usize,
        /// Bytes free.
        free_bytes: usize,
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
    /// Bytes taken by records, written or being written.
    pub used_bytes: usize,
    /// Records.
    pub records: usize,
}

/// A slower tier. Records are numbered by the caller, each number used once.
pub trait Spill: Send {
    /// Whether a record of so many bytes would find room now.
    fn can_store(&self, bytes: usize) -> bool;

    /// Starts writing a record; the pages stay pinned until the end is polled.
    ///
    /// # Errors
    /// No room, and nothing was started.
    fn store(&mut self, record: u64, pages: PinnedPages) -> Result<(), SpillError>;

    /// Starts reading a record that is stored.
    ///
    /// # Errors
    /// No such record; the pages are given back.
    fn load(&mut self, record: u64, pages: EmptyPages) -> Result<(), SpillError>;

    /// Forgets a record in whatever state; what is under way may still be polled, as a failure or not at
    /// all.
    fn discard(&mut self, record: u64);

    /// What is over since the last look; does not wait.
    fn poll(&mut self) -> Vec<SpillDone>;

    /// What it holds.
    fn usage(&self) -> SpillUsage;

    /// Called when there is something to poll.
    fn set_waker(&mut self, _waker: crate::executor::Waker) {}
}
