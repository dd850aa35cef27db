//! The bytes of a model file: the only place that maps it and that talks to the operating system.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::Path;

use memmap2::Mmap;

/// Bytes of a model, mapped from a file or (tests, fuzzing) owned.
#[derive(Debug)]
pub(super) enum Bytes {
    /// A read-only mapping of the whole file.
    Mapped(Mmap),
    /// Bytes in memory.
    Owned(Vec<u8>),
}

impl Bytes {
    /// Maps the file at `path` read-only. An empty file gives no bytes. Directories and anything else
    /// that is not a regular file are refused with `InvalidInput`: a pipe or device has no length.
    pub(super) fn map(path: &Path) -> io::Result<Bytes> {
        // Asked before opening: opening a pipe waits for a writer that may never come.
        let metadata = std::fs::metadata(path)?;
        if !metadata.is_file() {
            let what = if metadata.is_dir() { "a directory" } else { "not a regular file" };
            let mend = "give the path of one GGUF file";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("{what}; {mend}")));
        }
        let file = File::open(path)?;
        if file.metadata()?.len() == 0 {
            return Ok(Bytes::Owned(Vec::new()));
        }
        // SAFETY: the mapping is read-only and lives as long as the slice borrowed from it. Another
        // process that writes the file can change the bytes: everything that reads them checks them
        // again (UTF-8 is never assumed, spans are ours), so that gives wrong weights, not undefined
        // reads of ours. A file cut short under us raises SIGBUS, as in every engine that maps models.
        let map = unsafe { Mmap::map(&file)? };
        Ok(Bytes::Mapped(map))
    }

    /// All bytes of the file.
    pub(super) fn as_slice(&self) -> &[u8] {
        match self {
            Bytes::Mapped(map) => map,
            Bytes::Owned(bytes) => bytes,
        }
    }

    /// Takes the pages that hold bytes `range` out of this process's resident set. They read the same
    /// afterwards (the system fetches them from the file again), so this is advice: no effect on owned
    /// bytes, off Unix, or when the system declines.
    pub(super) fn advise_dont_need(&self, range: Range<usize>) {
        #[cfg(unix)]
        if let Bytes::Mapped(map) = self
            && range.end <= map.len()
            && !range.is_empty()
        {
            // SAFETY: MADV_DONTNEED destroys private changes of a mapping; this one is read-only and
            // backed by the file, so a later read finds the same bytes. The range lies inside it.
            let advised = unsafe {
                map.unchecked_advise_range(
                    memmap2::UncheckedAdvice::DontNeed,
                    range.start,
                    range.len(),
                )
            };
            drop(advised); // advice: a refusal costs memory, not correctness
        }
        #[cfg(not(unix))]
        let _ = range;
    }
}
