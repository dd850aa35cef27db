//! Blocks that several sequences use one after the other: named when sealed, attached by who comes later.

use super::Sequence;
use crate::block::BlockGuard;
use crate::cache::CachedBlock;
use crate::ladder::{Fidelity, Rung};
use crate::page::PageFormat;
use crate::pool::{CopyOf, Shortage};

/// A full block found in the prefix index.
#[derive(Debug)]
pub struct AttachedBlock {
    /// Original position of its first token.
    pub first: usize,
    /// Its KV group.
    pub group: usize,
    /// Holds it.
    pub guard: BlockGuard,
}

impl Sequence {
    /// Marks the sealed block at original position `first` as cached in every group that holds it whole, and
    /// names it, one name per group; a window group may have let it go (`None`). `None` where it is not
    /// sealed, where its computation lacked dropped tokens, or where a layer has dropped it: nothing is
    /// marked then.
    pub fn seal_identity(&mut self, first: usize) -> Option<Vec<Option<CachedBlock>>> {
        if !self.is_sealed(first) {
            return None;
        }
        let mut state = self.pool.shared.state();
        let mut names = Vec::with_capacity(self.tables.len());
        for (group, config) in self.pool.config().groups.iter().enumerate() {
            let Some(index) = self.entry_index(group, first) else {
                config.window?;
                names.push(None);
                continue;
            };
            let entry = &self.tables[group][index];
            let (index, generation) = (entry.guard.index(), entry.guard.generation());
            let record = &state.blocks[index as usize];
            let whole = record.pages.iter().all(Option::is_some);
            if !whole || record.context == Fidelity::Evict {
                return None;
            }
            names.push(Some(CachedBlock { index, generation }));
        }
        for name in names.iter().flatten() {
            state.blocks[name.index as usize].cached = true;
        }
        Some(names)
    }

    /// Begins with blocks that were computed before: full ones that cover positions from 0 on, in window
    /// groups at least those that the next token attends. The next position is their end.
    ///
    /// Nothing is attached to a sequence that holds tokens already.
    pub fn attach_prefix(&mut self, mut blocks: Vec<AttachedBlock>) {
        if !self.is_empty() {
            debug_assert!(false, "a prefix is attached to a sequence that has begun");
            return;
        }
        blocks.sort_by_key(|block| (block.group, block.first));
        let end = blocks.iter().map(|block| block.first + self.block_size()).max();
        let mut guards: Vec<Vec<BlockGuard>> = self.tables.iter().map(|_| Vec::new()).collect();
        for AttachedBlock { group, guard, .. } in blocks {
            guards[group].push(guard);
        }
        for (group, guards) in guards.into_iter().enumerate() {
            self.push_blocks(group, guards);
            self.inherit(group);
        }
        self.next_position = end.unwrap_or(0);
        self.grown_end = self.next_position;
        self.note_held();
        self.update_positions();
    }

    /// Takes over what the blocks of a group, just attached, have been through.
    fn inherit(&mut self, group: usize) {
        let state = self.pool.shared.state();
        for entry in &mut self.tables[group] {
            let record = &state.blocks[entry.guard.index() as usize];
            debug_assert_eq!((record.group as usize, record.first as usize), (group, entry.first));
            self.lossy = self.lossy.max(record.fidelity());
            self.attended = self.attended.max(record.context);
            let formats = record.formats();
            for format in PageFormat::ALL.into_iter().filter(|format| formats[*format]) {
                Rung::to_format(format).map(|rung| entry.inherited.insert(rung));
            }
        }
    }

    /// Continues with the first `rows` tokens of a sealed block that agrees with the next ones
    /// (`source[group]`, f16 in every layer): a new open block gets a copy of its pages. To be called between
    /// steps, at a block boundary. Nothing happens, and the next position stays, where that is not so or
    /// `rows` is not less than a block.
    ///
    /// # Errors
    /// [`Shortage`] where the free pages do not suffice, or a step is in flight; nothing is changed.
    pub fn copy_rows(
        &mut self,
        source: &[Option<BlockGuard>],
        rows: usize,
    ) -> Result<(), Shortage> {
        let first = self.next_position;
        let aligned = first.is_multiple_of(self.block_size()) && first == self.grown_end;
        let mut context = self.attended;
        let mut copies = Vec::with_capacity(source.len());
        for (group, guard) in source.iter().enumerate() {
            let Some(guard) = guard else { return Ok(()) };
            let state = self.pool.shared.state();
            let record = &state.blocks[guard.index() as usize];
            let f16 = |page: &Option<_>| {
                page.is_some_and(|page: crate::block::Page| page.format == PageFormat::F16)
            };
            if record.group as usize != group || !record.pages.iter().all(f16) {
                return Ok(());
            }
            context = context.max(record.context);
            copies.push(CopyOf { block: guard.index(), group, first });
        }
        if !aligned || !(1..self.block_size()).contains(&rows) || copies.len() != self.tables.len()
        {
            return Ok(());
        }
        let none = vec![0; self.tables.len()];
        let (copied, _) = self.pool.shared.take_blocks(&copies, &none, first)?;
        for (group, block) in copied.into_iter().enumerate() {
            self.push_blocks(group, vec![block]);
        }
        self.attended = context;
        self.lossy = self.lossy.max(context);
        self.next_position = first + rows;
        self.grown_end = self.next_position;
        self.note_held();
        self.update_positions();
        Ok(())
    }
}
