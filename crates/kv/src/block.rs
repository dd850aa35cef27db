//! Block records, and the guards that give blocks back.

use std::sync::Arc;

use crate::page::PageFormat;
use crate::pool::Shared;

/// One page of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Page {
    /// Byte offset in the arena, in units of `PAGE_ALIGN`.
    pub offset: u32,
    pub format: PageFormat,
}

/// What the pool knows of a block.
#[derive(Clone, Debug, Default)]
pub(crate) struct BlockRecord {
    /// Index of its KV group.
    pub group: u16,
    /// Guards that hold it; 0 = the record is free.
    pub owners: u32,
    /// Rises each time the record is used for another block, so that a stale guard shows.
    pub generation: u32,
    /// One page per layer of the group.
    pub pages: Vec<Page>,
}

/// Holds one block; gives its pages back on drop (behind the fence of a step that is in flight).
#[derive(Debug)]
pub struct BlockGuard {
    shared: Arc<Shared>,
    index: u32,
    generation: u32,
}

impl BlockGuard {
    /// Takes over one count of `owners` that the pool has made for it.
    pub(crate) fn new(shared: Arc<Shared>, index: u32, generation: u32) -> BlockGuard {
        BlockGuard { shared, index, generation }
    }

    pub(crate) fn index(&self) -> u32 {
        self.index
    }

    /// Generation of the block this guard was made for.
    pub fn generation(&self) -> u32 {
        self.generation
    }

    /// Another guard of the same block: its pages stay until both are gone. Shared blocks are neither
    /// re-encoded nor moved.
    pub fn share(&self) -> BlockGuard {
        self.shared.state().blocks[self.index as usize].owners += 1;
        BlockGuard { shared: self.shared.clone(), index: self.index, generation: self.generation }
    }
}

impl Drop for BlockGuard {
    fn drop(&mut self) {
        self.shared.release(self.index);
    }
}
