//! Which blocks a list of sequences holds alone among themselves: only those may give way or move, since
//! only then every view that names their pages is at hand.

use crate::block::BlockRecord;
use crate::pool::{BlockPool, State};
use crate::table::Sequence;

/// How many tables of a list of sequences hold each block of a pool.
pub(super) struct Holders {
    /// By block record.
    tables: Vec<u32>,
    /// Whether any block is in two of the tables.
    pub any_shared: bool,
}

impl Holders {
    /// Looks at every table once.
    pub(super) fn new<'a>(sequences: impl Iterator<Item = &'a Sequence>, state: &State) -> Holders {
        let mut holders = Holders { tables: vec![0; state.blocks.len()], any_shared: false };
        for entry in sequences.flat_map(|sequence| sequence.tables.iter().flatten()) {
            let tables = &mut holders.tables[entry.guard.index() as usize];
            *tables += 1;
            holders.any_shared |= *tables > 1;
        }
        holders
    }

    /// Block records of the pool.
    pub(super) fn len(&self) -> usize {
        self.tables.len()
    }

    /// Tables of the list that hold block `index`.
    pub(super) fn tables(&self, index: u32) -> u32 {
        self.tables[index as usize]
    }

    /// Bytes of pages that the `sequences` of the list hold, what several share counted once.
    pub(super) fn held_bytes<'a>(
        &self,
        pool: &BlockPool,
        sequences: impl Iterator<Item = &'a Sequence>,
        state: &State,
    ) -> usize {
        let mut seen = vec![false; if self.any_shared { self.len() } else { 0 }];
        let mut held_bytes = 0;
        for sequence in sequences {
            held_bytes += sequence.held_bytes();
            let entries = sequence.tables.iter().flatten().map(|entry| entry.guard.index());
            for block in entries.filter(|&block| self.tables(block) > 1) {
                if std::mem::replace(&mut seen[block as usize], true) {
                    held_bytes -= pool.shared.record_bytes(state, block);
                }
            }
        }
        held_bytes
    }

    /// Whether nobody outside the list holds it. So it is with idle blocks, which nobody holds.
    pub(super) fn are_all(&self, index: u32, record: &BlockRecord) -> bool {
        record.owners == self.tables(index)
    }
}
