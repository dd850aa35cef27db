//! An index by chained hashes, as vLLM's: a block's hash covers everything before it, so one table of
//! hashes finds prefixes. Unlike there, tokens and parent are compared: a collision is a miss.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use super::identity::{BlockHash, BlockHasher};
use super::index::{PARTIAL_CANDIDATES, PrefixIndex, agreement};
use super::tree::{EntryId, EntryTree};

/// A hash that is one already: its first bytes serve as they are.
#[derive(Clone, Copy, Debug, Default)]
struct FirstBytes(u64);

impl Hasher for FirstBytes {
    fn write(&mut self, bytes: &[u8]) {
        for (index, &byte) in bytes.iter().take(8).enumerate() {
            self.0 |= u64::from(byte) << (8 * index);
        }
    }

    fn write_usize(&mut self, _length: usize) {}

    fn finish(&self) -> u64 {
        self.0
    }
}

/// From hashes of blocks to entries.
#[derive(Debug)]
pub struct ChainIndex {
    hasher: BlockHasher,
    block_size: usize,
    by_hash: HashMap<BlockHash, EntryId, BuildHasherDefault<FirstBytes>>,
    /// `[entry][block_size]`
    tokens: Vec<u32>,
}

impl ChainIndex {
    /// An empty index of blocks of `block_size` tokens, hashed by `hasher`.
    pub fn new(hasher: BlockHasher, block_size: usize) -> ChainIndex {
        ChainIndex { hasher, block_size, by_hash: HashMap::default(), tokens: Vec::new() }
    }

    fn tokens_of(&self, entry: EntryId) -> &[u32] {
        &self.tokens[entry.index() * self.block_size..][..self.block_size]
    }
}

impl PrefixIndex for ChainIndex {
    fn walk(&self, tree: &EntryTree, root: EntryId, tokens: &[u32], path: &mut Vec<EntryId>) {
        let (mut parent, mut hash) = (root, *tree.hash(root));
        for block in tokens.chunks_exact(self.block_size) {
            hash = (self.hasher)(&hash, block);
            let Some(&entry) = self.by_hash.get(&hash) else { return };
            let differs = tree.parent(entry) != Some(parent) || self.tokens_of(entry) != block;
            #[cfg(feature = "mutants")]
            let differs =
                differs && !crate::mutant::is_active(crate::mutant::Mutant::SkipTokenCompare);
            if differs {
                return;
            }
            path.push(entry);
            parent = entry;
        }
    }

    fn partial(
        &self,
        tree: &EntryTree,
        parent: EntryId,
        rest: &[u32],
        accept: &mut dyn FnMut(EntryId) -> bool,
    ) -> Option<(EntryId, usize)> {
        let mut best = None;
        let mut most = 0;
        for child in tree.children(parent).take(PARTIAL_CANDIDATES) {
            let rows = agreement(self.tokens_of(child), rest);
            if rows > most && accept(child) {
                (best, most) = (Some((child, rows)), rows);
            }
        }
        best
    }

    fn insert(&mut self, tree: &EntryTree, entry: EntryId, tokens: &[u32]) -> bool {
        let hash = *tree.hash(entry);
        if self.by_hash.contains_key(&hash) {
            return false;
        }
        self.by_hash.insert(hash, entry);
        let start = entry.index() * self.block_size;
        self.tokens.resize(self.tokens.len().max(start + self.block_size), 0);
        self.tokens[start..start + self.block_size].copy_from_slice(tokens);
        true
    }

    fn remove(&mut self, tree: &EntryTree, entry: EntryId) {
        self.by_hash.remove(tree.hash(entry));
    }

    fn remove_root(&mut self, _root: EntryId) {}

    fn tokens(&self, _tree: &EntryTree, entry: EntryId, out: &mut Vec<u32>) {
        out.extend_from_slice(self.tokens_of(entry));
    }

    fn table_bytes(&self) -> usize {
        self.tokens.capacity() * size_of::<u32>()
            + self.by_hash.capacity() * (size_of::<(BlockHash, EntryId)>() + 1)
    }
}
