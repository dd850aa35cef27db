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
    /// Original position of its first token, where one sequence holds it.
    pub first: u32,
    /// One page per layer of the group; `None`: dropped in that layer.
    pub pages: Vec<Option<Page>>,
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

    /// Gives back the page of one layer; the block goes on without it. `false`, and nothing is done,
    /// where the block is shared or the layer has no page.
    pub(crate) fn give_back_layer(&self, layer: usize) -> bool {
        let mut state = self.shared.state();
        let record = &mut state.blocks[self.index as usize];
        if record.owners > 1 {
            return false;
        }
        let Some(page) = record.pages.get_mut(layer).and_then(Option::take) else { return false };
        self.shared.give_back_page(&mut state, page);
        true
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

#[cfg(test)]
mod tests {
    use crate::page::PageShape;
    use crate::{
        BlockPool, Demand, Fidelity, GroupConfig, Ladder, PoolConfig, Sequence, SequenceConfig,
        check_invariants, plan_format_at_seal, plan_relief, policy,
    };

    #[test]
    fn a_shared_block_outlives_its_sequence_and_does_not_give_way() {
        let shape = PageShape { kv_heads: 1, head_dim: 16, block_size: 16 };
        let groups = vec![GroupConfig { layers: 2, shape, window: None, pinned: vec![] }];
        let ladder = Ladder::default();
        let config = PoolConfig { groups, budget_bytes: 1 << 20, prefault: false, ladder };
        let pool = BlockPool::new(config).unwrap();
        let config = SequenceConfig {
            request: 0,
            contract: Fidelity::Evict,
            priority: 0,
            trained_context: 64,
            max_tokens: None,
        };
        let mut sequence = Sequence::new(&pool, config);
        sequence.grow(64).unwrap();
        sequence.commit(64);
        let shared = sequence.tables[0][1].guard.share();
        let firsts = |plan: crate::ReliefPlan| -> Vec<usize> {
            plan.moves.iter().map(|planned| planned.first).collect()
        };
        let sealed = plan_format_at_seal(&sequence, crate::page::PageFormat::Int8, 0, 0);
        assert_eq!(firsts(sealed), [0, 32, 48]);
        // Past the trained context blocks are dropped: all of the middle but the shared one.
        let demand =
            Demand { sequence: &sequence, tokens: 16, step_tokens: 16, stretch_tokens: 16 };
        let dropped = plan_relief(&pool, &[demand], &policy::Window);
        assert_eq!(firsts(dropped), [0, 32, 48]);
        drop(sequence);
        assert_eq!(pool.accounts().used_bytes(), 2 * 1024);
        assert_eq!(check_invariants(&pool, &[]), []);
        drop(shared);
        assert_eq!(pool.accounts().used_bytes(), 0);
    }
}
