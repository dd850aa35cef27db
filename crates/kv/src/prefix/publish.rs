//! Naming what a sequence has computed.

use super::event::PrefixEvent;
use super::{EntryId, Mark, Named, PrefixCache, PrefixRoot};
use crate::cache::CachedBlock;
use crate::ladder::Fidelity;
use crate::table::Sequence;

impl PrefixCache {
    /// Names the blocks of `sequence` that were sealed since the last call. `tokens` are all its accepted
    /// ones; `published` counts those that previous calls have seen, 0 at first (also after the sequence was
    /// cleared). Where another sequence's block has the same identity, the one of better fidelity is named.
    /// A sequence whose computation lacked dropped tokens publishes nothing more. What was evicted
    /// meanwhile and the sequence still holds is named again.
    pub fn publish(
        &mut self,
        root: &PrefixRoot,
        sequence: &mut Sequence,
        tokens: &[u32],
        published: &mut usize,
    ) {
        let sealed = sequence.next_position().min(tokens.len()) / self.block_size;
        if sealed * self.block_size <= *published {
            return;
        }
        self.take_changes();
        let root = self.tree.root_or_new(root);
        let mut path = std::mem::take(&mut self.path);
        path.clear();
        self.index.walk(&self.tree, root, &tokens[..sealed * self.block_size], &mut path);
        let start = (*published / self.block_size).min(path.len());
        let mut parent = if start == 0 { root } else { path[start - 1] };
        for block in start..sealed {
            let first = block * self.block_size;
            let Some(names) = sequence.seal_identity(first) else { break };
            let known = path.get(block).copied();
            let own = &tokens[first..first + self.block_size];
            let Some(entry) = known.or_else(|| self.add(parent, own)) else {
                names.into_iter().flatten().for_each(|name| self.unname(name));
                break;
            };
            self.name_better(entry, &names, known.is_none());
            parent = entry;
        }
        if let Some(root) = self.tree.drop_empty_root(root) {
            self.index.remove_root(root);
        }
        self.path = path;
        *published = sealed * self.block_size;
    }

    /// An entry for a block of tokens that the index does not know. `None`: another one has its hash.
    fn add(&mut self, parent: EntryId, tokens: &[u32]) -> Option<EntryId> {
        let hash = (self.identity.hasher())(self.tree.hash(parent), tokens);
        let entry = self.tree.add(parent, hash);
        if !self.index.insert(&self.tree, entry, tokens) {
            // A root made for it goes at the end of the call.
            self.tree.remove_leaf_only(entry);
            return None;
        }
        let entries = self.tree.capacity();
        self.named.resize(entries * self.windows.len(), Named::default());
        self.marks.resize(entries, Mark::default());
        Some(entry)
    }

    /// Names a sequence's blocks as those of `entry`, group by group, where they are better than what it
    /// names.
    fn name_better(&mut self, entry: EntryId, names: &[Option<CachedBlock>], new: bool) {
        let mut changed = new;
        for (group, &name) in names.iter().enumerate() {
            let node = self.node(entry, group);
            let Some(name) = name.filter(|&name| self.node_named(name).is_none()) else { continue };
            let known = self.named[node].block;
            if known.is_some_and(|known| self.worth(known) <= self.worth(name)) {
                self.pool.uncache(name);
                continue;
            }
            if let Some(known) = known {
                self.idle.remove(node);
                self.pool.uncache(known);
            }
            self.put(node, name);
            changed = true;
        }
        if changed {
            self.tell_stored(entry);
        }
    }

    /// Lower is better: the contracts that may use it first, then whether rows can be copied.
    fn worth(&self, block: CachedBlock) -> (bool, Fidelity, bool) {
        let state = self.pool.cached(block);
        state.map_or((true, Fidelity::Evict, true), |state| (false, state.fidelity, !state.f16))
    }

    fn put(&mut self, node: usize, name: CachedBlock) {
        let record = name.index as usize;
        if self.node_of.len() <= record {
            self.node_of.resize(record + 1, u32::MAX);
        }
        self.node_of[record] = node as u32;
        self.named[node] = Named { block: Some(name), used: false };
    }

    /// Takes back a name that no entry uses.
    fn unname(&self, name: CachedBlock) {
        if self.node_named(name).is_none() {
            self.pool.uncache(name);
        }
    }

    /// Tells of an entry that is new, or not as it was.
    pub(super) fn tell_stored(&mut self, entry: EntryId) {
        if self.events.is_recording() {
            let stored = self.stored(entry);
            self.events.push(stored);
        }
    }

    /// The event that tells of an entry as it is now.
    pub(super) fn stored(&self, entry: EntryId) -> PrefixEvent {
        let mut tokens = Vec::with_capacity(self.block_size);
        self.index.tokens(&self.tree, entry, &mut tokens);
        let parent = self.tree.parent(entry).unwrap_or(entry);
        let nodes = (0..self.windows.len()).map(|group| self.node(entry, group));
        let blocks = nodes.map(|node| self.named[node].block);
        let states = blocks.clone().flatten().filter_map(|block| self.pool.cached(block));
        PrefixEvent::Stored {
            hash: *self.tree.hash(entry),
            parent: *self.tree.hash(parent),
            tokens,
            fidelity: states.map(|state| state.fidelity).fold(Fidelity::Exact, Fidelity::max),
            whole: blocks.into_iter().all(|block| block.is_some()),
        }
    }
}
