//! What an index of prefixes does: from tokens to entries, with the tokens compared.

use std::fmt::Debug;

use super::tree::{EntryId, EntryTree};

/// Most entries that a search for a partly agreeing block looks at.
pub const PARTIAL_CANDIDATES: usize = 64;

/// Finds entries by their tokens. Entries are added below entries and removed as leaves, in step with
/// the [`EntryTree`] that is passed to each call; a root is its own empty beginning.
pub trait PrefixIndex: Debug + Send {
    /// Appends to `path` the entries of the whole blocks of `tokens` behind `root`, from the first one as
    /// far as they are known. Tokens are compared: an entry of equal hash and other tokens ends the path.
    fn walk(&self, tree: &EntryTree, root: EntryId, tokens: &[u32], path: &mut Vec<EntryId>);

    /// Of the entries right behind `parent` the one that `accept` takes and whose first tokens agree with
    /// most of `rest`, with the number of tokens that agree (>= 1). Looks at no more than
    /// [`PARTIAL_CANDIDATES`]; at equal agreement any may be taken.
    fn partial(
        &self,
        tree: &EntryTree,
        parent: EntryId,
        rest: &[u32],
        accept: &mut dyn FnMut(EntryId) -> bool,
    ) -> Option<(EntryId, usize)>;

    /// Learns that `entry`, just added to the tree, holds `tokens` (one block). `false`: another entry
    /// has its hash; the tree must then forget it.
    fn insert(&mut self, tree: &EntryTree, entry: EntryId, tokens: &[u32]) -> bool;

    /// Forgets a leaf that is still in the tree.
    fn remove(&mut self, tree: &EntryTree, entry: EntryId);

    /// Forgets a root whose last entry has gone.
    fn remove_root(&mut self, root: EntryId);

    /// Appends the tokens of an entry (one block).
    fn tokens(&self, tree: &EntryTree, entry: EntryId, out: &mut Vec<u32>);

    /// Bytes of the index's tables, about.
    fn table_bytes(&self) -> usize;
}

/// Which index a prefix cache uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum IndexKind {
    /// Hashes of blocks, each over the one before: one table, no structure to keep.
    Chain,
    /// A trie of tokens: nothing is hashed to look up, and it finds the longest partly agreeing block.
    #[default]
    Radix,
}

/// Tokens that two lists have in common from their beginning.
pub(crate) fn agreement(one: &[u32], other: &[u32]) -> usize {
    const CHUNK: usize = 32; // compared as memory, many times faster than token by token
    let chunks = one.chunks_exact(CHUNK).zip(other.chunks_exact(CHUNK));
    let start = chunks.take_while(|(one, other)| one == other).count() * CHUNK;
    let rest = one[start..].iter().zip(&other[start..]);
    start + rest.take_while(|(one, other)| one == other).count()
}
