//! Block records, and the guards that give blocks back.

use std::sync::Arc;

use crate::account::ByFormat;
use crate::ladder::Fidelity;
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
#[derive(Clone, Debug)]
pub(crate) struct BlockRecord {
    /// Index of its KV group.
    pub group: u16,
    /// The prefix index names it: its pages stay when the last guard goes.
    pub cached: bool,
    /// A change of `cached`, or of whether anybody holds it, waits to be heard of.
    pub queued: bool,
    /// Its pages have become lossier since the index last heard of it.
    pub lowered: bool,
    /// The worst of all that its tokens' computation attended; set when it is sealed.
    pub context: Fidelity,
    /// Guards that hold it; 0 = idle where it is cached, else the record is free.
    pub owners: u32,
    /// Rises each time the record is used for another block, so that a stale guard shows.
    pub generation: u32,
    /// Original position of its first token, the same for every sequence that holds it.
    pub first: u32,
    /// While relief is carried out: index of the first of its sequences that holds the block.
    pub first_holder: u32,
    /// And how many of them do (`u16::MAX`: too many to know).
    pub holders: u16,
    /// One page per layer of the group; `None`: dropped in that layer.
    pub pages: Vec<Option<Page>>,
}

impl Default for BlockRecord {
    fn default() -> BlockRecord {
        BlockRecord {
            group: 0,
            cached: false,
            queued: false,
            lowered: false,
            context: Fidelity::Exact,
            owners: 0,
            generation: 0,
            first: 0,
            first_holder: 0,
            holders: 0,
            pages: Vec::new(),
        }
    }
}

impl BlockRecord {
    /// Whether it has pages although nobody holds it: only the prefix index names it.
    pub(crate) fn is_idle(&self) -> bool {
        self.cached && self.owners == 0
    }

    /// Whether only one holder has it and nobody else reads its bytes by name: that holder may write it.
    pub(crate) fn is_writable(&self) -> bool {
        self.owners == 1 && !self.cached
    }

    /// Its pages, by format.
    pub(crate) fn pages_by_format(&self) -> ByFormat<u16> {
        let mut pages = ByFormat::<u16>::default();
        self.pages.iter().flatten().for_each(|page| pages[page.format] += 1);
        pages
    }

    /// The strictest contract that may use it: the worst of its pages and of what they were made from.
    pub(crate) fn fidelity(&self) -> Fidelity {
        let formats = self.formats();
        let held = PageFormat::ALL.into_iter().filter(|format| formats[*format]);
        held.map(Fidelity::of_format).fold(self.context, Fidelity::max)
    }

    /// Which formats its pages have.
    pub(crate) fn formats(&self) -> ByFormat<bool> {
        let mut formats = ByFormat::default();
        self.pages.iter().flatten().for_each(|page| formats[page.format] = true);
        formats
    }

    /// Whether every layer has a page of it, in f16.
    pub(crate) fn is_f16(&self) -> bool {
        self.pages.iter().all(|page| page.is_some_and(|page| page.format == PageFormat::F16))
    }
}

/// Holds one block; the last guard gives its pages back on drop (behind the fence of a step that is in
/// flight), unless the prefix index names it: then they stay until they are needed.
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

    /// Gives back the page of one layer; the block goes on without it, and without a name in the prefix
    /// index. `false`, and nothing is done, where the block is shared or the layer has no page.
    pub(crate) fn give_back_layer(&self, layer: usize) -> bool {
        let mut state = self.shared.state();
        let record = &mut state.blocks[self.index as usize];
        if record.owners > 1 {
            return false;
        }
        let Some(page) = record.pages.get_mut(layer).and_then(Option::take) else { return false };
        state.forget_name(self.index);
        self.shared.give_back_page(&mut state, page);
        true
    }

    /// Takes the block's name out of the prefix index, so that its pages are given back with this guard.
    /// `false`, and nothing is done, where somebody else holds the block.
    pub(crate) fn forget_name(&self) -> bool {
        let mut state = self.shared.state();
        let alone = state.blocks[self.index as usize].owners == 1;
        if alone {
            state.forget_name(self.index);
        }
        alone
    }

    /// Another guard of the same block: its pages stay until both are gone.
    pub fn share(&self) -> BlockGuard {
        self.shared.state().blocks[self.index as usize].owners += 1;
        self.counted()
    }

    /// Another guard of the same block, whose count of `owners` the caller has made.
    pub(crate) fn counted(&self) -> BlockGuard {
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
