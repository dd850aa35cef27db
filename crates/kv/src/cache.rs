//! Blocks that the prefix index names: they keep their pages when nobody holds them.

use crate::block::BlockGuard;
use crate::ladder::Fidelity;
use crate::pool::{BlockPool, State};
use crate::table::push_tight;

/// Names a cached block without holding it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CachedBlock {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

/// What a cached block is worth now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CachedState {
    /// Somebody holds it; otherwise it is idle and its pages can be given back at once.
    pub held: bool,
    /// The strictest contract that may use it: the worst of its formats and of what its computation
    /// attended.
    pub fidelity: Fidelity,
    /// Every page is f16: its rows can be copied.
    pub f16: bool,
}

/// What became of a cached block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheChange {
    /// Nobody holds it any more; its pages stay.
    Idle(CachedBlock),
    /// Somebody holds it.
    Held(CachedBlock),
    /// It is cached no more: given back, or its holder has dropped a part of it.
    Gone(CachedBlock),
    /// Relief has made its pages lossier: fewer contracts may use it.
    Lowered(CachedBlock),
}

impl State {
    /// The record of `block`, where it is still cached.
    fn named(&self, block: CachedBlock) -> Option<&crate::block::BlockRecord> {
        let record = self.blocks.get(block.index as usize)?;
        (record.cached && record.generation == block.generation).then_some(record)
    }

    /// What a cached block is worth now; `None` where it is cached no longer.
    pub(crate) fn cached(&self, block: CachedBlock) -> Option<CachedState> {
        let record = self.named(block)?;
        let (fidelity, f16) = (record.fidelity(), record.is_f16());
        Some(CachedState { held: record.owners > 0, fidelity, f16 })
    }

    /// The index is to hear of a change of this block.
    pub(crate) fn note_cache_change(&mut self, index: u32) {
        let record = &mut self.blocks[index as usize];
        if !record.queued {
            record.queued = true;
            push_tight(&mut self.cache_changes, index);
        }
    }

    /// The block is cached no more, whoever holds it. Nothing is given back.
    pub(crate) fn forget_name(&mut self, index: u32) {
        if std::mem::take(&mut self.blocks[index as usize].cached) {
            self.note_cache_change(index);
        }
    }
}

impl BlockPool {
    /// Holds a cached block; `None` where it is cached no longer.
    pub fn attach(&self, block: CachedBlock) -> Option<BlockGuard> {
        self.attach_all([block]).pop()
    }

    /// Holds cached blocks, up to the first that is cached no longer.
    pub(crate) fn attach_all(
        &self,
        blocks: impl IntoIterator<Item = CachedBlock>,
    ) -> Vec<BlockGuard> {
        let mut state = self.shared.state();
        let mut attach = |block: CachedBlock| {
            if state.named(block)?.owners == 0 {
                state.cached_bytes -= self.shared.record_bytes(&state, block.index);
                state.note_cache_change(block.index);
            }
            state.blocks[block.index as usize].owners += 1;
            #[cfg(feature = "mutants")]
            if crate::mutant::is_active(crate::mutant::Mutant::DropOwner) {
                state.blocks[block.index as usize].owners -= 1;
            }
            Some(BlockGuard::new(self.shared.clone(), block.index, block.generation))
        };
        blocks.into_iter().map_while(&mut attach).collect()
    }

    /// Takes the name from a cached block. Where nobody holds it its pages are given back, behind the
    /// fence of a step that is in flight. Returns their bytes; 0 where the block is held, or gone.
    pub fn uncache(&self, block: CachedBlock) -> usize {
        let mut state = self.shared.state();
        let Some(record) = state.named(block) else { return 0 };
        let idle = record.is_idle();
        state.forget_name(block.index);
        if !idle {
            return 0;
        }
        let bytes = self.shared.give_back_record(&mut state, block.index);
        state.cached_bytes -= bytes;
        bytes
    }

    /// What a cached block is worth now; `None` where it is cached no longer.
    pub fn cached(&self, block: CachedBlock) -> Option<CachedState> {
        self.shared.state().cached(block)
    }

    /// Appends what became of cached blocks since the last call, oldest first, each block once with what it
    /// is now, and once more where it is worth less. Whoever caches blocks must ask from time to time: the record of a block that is gone is used
    /// again only afterwards.
    pub fn drain_cache_changes(&self, out: &mut Vec<CacheChange>) {
        let mut guard = self.shared.state();
        let State { blocks, free_records, cache_changes, .. } = &mut *guard;
        for index in cache_changes.drain(..) {
            let record = &mut blocks[index as usize];
            record.queued = false;
            let block = CachedBlock { index, generation: record.generation };
            out.push(match (record.cached, record.owners) {
                (false, _) => CacheChange::Gone(block),
                (true, 0) => CacheChange::Idle(block),
                (true, _) => CacheChange::Held(block),
            });
            if std::mem::take(&mut record.lowered) && record.cached {
                out.push(CacheChange::Lowered(block));
            }
            if !record.cached && record.owners == 0 {
                push_tight(free_records, index);
            }
        }
    }
}
