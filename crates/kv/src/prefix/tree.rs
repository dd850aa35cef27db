//! The entries of a prefix cache as a tree: an entry is a block of tokens behind its parent's.
//!
//! An entry leaves only as a leaf, so every entry in the tree can be reached from its root: there are
//! no descendants of something evicted.

use std::collections::HashMap;

use super::identity::{BlockHash, PrefixRoot};

/// Names an entry of a prefix cache, or a root; used again after the entry has gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EntryId(u32);

impl EntryId {
    const NONE: EntryId = EntryId(u32::MAX);

    /// Dense index for tables by entry.
    pub fn index(self) -> usize {
        self.0 as usize
    }

    /// The entry with this dense index.
    pub(crate) fn new(index: usize) -> EntryId {
        EntryId(index as u32)
    }

    fn some(self) -> Option<EntryId> {
        (self != EntryId::NONE).then_some(self)
    }
}

#[derive(Clone, Debug)]
struct Link {
    hash: BlockHash,
    /// `NONE`: a root.
    parent: EntryId,
    first_child: EntryId,
    next: EntryId,
    previous: EntryId,
    /// Blocks from the root; 0 for a root.
    depth: u32,
}

/// Parents and children of entries, all operations in constant time.
#[derive(Debug, Default)]
pub struct EntryTree {
    links: Vec<Link>,
    free: Vec<EntryId>,
    roots: HashMap<PrefixRoot, EntryId>,
    entries: usize,
}

impl EntryTree {
    /// Entries, roots not counted.
    pub fn len(&self) -> usize {
        self.entries
    }

    /// Whether there is no entry.
    pub fn is_empty(&self) -> bool {
        self.entries == 0
    }

    /// One more than the largest [`EntryId::index`] ever given out.
    pub fn capacity(&self) -> usize {
        self.links.len()
    }

    /// The root, where it has entries.
    pub fn root(&self, root: &PrefixRoot) -> Option<EntryId> {
        self.roots.get(root).copied()
    }

    /// The root, made where it is not there. It goes with its last entry.
    pub fn root_or_new(&mut self, root: &PrefixRoot) -> EntryId {
        if let Some(found) = self.root(root) {
            return found;
        }
        let made = self.take(BlockHash(root.0), EntryId::NONE, 0);
        self.roots.insert(*root, made);
        made
    }

    /// Adds an entry below `parent` (an entry or a root).
    pub fn add(&mut self, parent: EntryId, hash: BlockHash) -> EntryId {
        let depth = self.links[parent.index()].depth + 1;
        let entry = self.take(hash, parent, depth);
        let older = std::mem::replace(&mut self.links[parent.index()].first_child, entry);
        self.links[entry.index()].next = older;
        if let Some(older) = older.some() {
            self.links[older.index()].previous = entry;
        }
        self.entries += 1;
        entry
    }

    fn take(&mut self, hash: BlockHash, parent: EntryId, depth: u32) -> EntryId {
        let none = EntryId::NONE;
        let link = Link { hash, parent, first_child: none, next: none, previous: none, depth };
        match self.free.pop() {
            Some(entry) => {
                self.links[entry.index()] = link;
                entry
            }
            None => {
                self.links.push(link);
                EntryId::new(self.links.len() - 1)
            }
        }
    }

    /// Takes a leaf out. Returns its root where that went too, having no entry left.
    pub fn remove_leaf(&mut self, entry: EntryId) -> Option<EntryId> {
        let parent = self.links[entry.index()].parent;
        self.remove_leaf_only(entry);
        self.drop_empty_root(parent)
    }

    /// Takes a leaf out; its root stays.
    pub(crate) fn remove_leaf_only(&mut self, entry: EntryId) {
        let Link { parent, next, previous, first_child, .. } = self.links[entry.index()];
        debug_assert!(first_child == EntryId::NONE && parent != EntryId::NONE, "not a leaf");
        match previous.some() {
            Some(previous) => self.links[previous.index()].next = next,
            None => self.links[parent.index()].first_child = next,
        }
        if let Some(next) = next.some() {
            self.links[next.index()].previous = previous;
        }
        self.free.push(entry);
        self.entries -= 1;
    }

    /// Removes `root` where it is a root without entries. Returns it then.
    pub fn drop_empty_root(&mut self, root: EntryId) -> Option<EntryId> {
        let link = &self.links[root.index()];
        if link.depth > 0 || link.first_child != EntryId::NONE {
            return None;
        }
        self.roots.remove(&PrefixRoot(link.hash.0));
        self.free.push(root);
        Some(root)
    }

    /// Identity of an entry; of a root its bytes.
    pub fn hash(&self, entry: EntryId) -> &BlockHash {
        &self.links[entry.index()].hash
    }

    /// The entry or root before; `None` for a root.
    pub fn parent(&self, entry: EntryId) -> Option<EntryId> {
        self.links[entry.index()].parent.some()
    }

    /// Blocks from the root to the end of this one; 0 for a root.
    pub fn depth(&self, entry: EntryId) -> usize {
        self.links[entry.index()].depth as usize
    }

    /// The entries right behind `entry`, youngest first.
    pub fn children(&self, entry: EntryId) -> impl Iterator<Item = EntryId> + '_ {
        let first = self.links[entry.index()].first_child.some();
        std::iter::successors(first, |child| self.links[child.index()].next.some())
    }

    /// A leaf at or below `entry`.
    pub fn leaf_below(&self, entry: EntryId) -> EntryId {
        let down = |entry: &EntryId| self.links[entry.index()].first_child.some();
        std::iter::successors(Some(entry), down).last().unwrap_or(entry)
    }

    /// Whether this is an entry, not a root.
    pub(crate) fn is_entry(&self, entry: EntryId) -> bool {
        self.depth(entry) > 0
    }

    pub(crate) fn table_bytes(&self) -> usize {
        self.links.capacity() * size_of::<Link>() + self.free.capacity() * size_of::<EntryId>()
    }

    /// Every entry, parents before children.
    pub fn entries(&self) -> Vec<EntryId> {
        let mut found: Vec<EntryId> = self.roots.values().copied().collect();
        found.sort_unstable(); // the map's order is not the same in every run
        let roots = found.len();
        let mut next = 0;
        while let Some(&entry) = found.get(next) {
            found.extend(self.children(entry));
            next += 1;
        }
        found.split_off(roots)
    }
}
