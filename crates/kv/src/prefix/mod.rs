//! Prefixes computed before: which blocks hold which tokens, and which of them give way.
//!
//! - [`PrefixIdentity`] says whose tokens they are (model, rotation, block size, tenant salt).
//! - [`PrefixIndex`] finds entries by tokens: [`ChainIndex`] (chained hashes) or [`RadixIndex`] (a trie).
//! - [`PrefixCache`] joins an index and a pool: [`publish`](PrefixCache::publish) names the blocks a
//!   sequence has sealed, [`lookup`](PrefixCache::lookup) holds those that a new one may begin with,
//!   [`evict`](PrefixCache::evict) gives back what nobody holds.
//!
//! The cache holds no guard: a block that only the cache names is *idle*, its pages can be given back at
//! once. Tails give way before heads, so that what is left can be reached; an entry that loses a
//! full-attention block leaves with everything behind it.

pub mod chain;
mod check;
pub mod event;
pub mod identity;
mod idle;
pub mod index;
mod lookup;
mod publish;
pub mod radix;
mod retain;
pub mod tree;

pub use chain::ChainIndex;
pub use event::PrefixEvent;
pub use identity::{BlockHash, BlockHasher, PrefixIdentity, PrefixRoot};
pub use index::{IndexKind, PrefixIndex};
pub use lookup::{PartialBlock, PrefixMatch};
pub use radix::RadixIndex;
pub use tree::{EntryId, EntryTree};

use std::collections::BTreeSet;

use crate::cache::{CacheChange, CachedBlock};
use crate::pool::BlockPool;
use event::EventQueue;
use idle::{IdleQueues, Turn, tails_first};

/// What the cache knows of a group's block of an entry.
#[derive(Clone, Copy, Debug, Default)]
struct Named {
    block: Option<CachedBlock>,
    /// A lookup has ended a hit with it.
    used: bool,
}

/// What clients and the waiting queue want of an entry.
#[derive(Clone, Copy, Debug, Default)]
struct Mark {
    protected: bool,
    pinned_until_us: Option<u64>,
}

/// What a prefix cache has done so far, and what it holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixStats {
    /// Lookups.
    pub lookups: u64,
    /// Tokens of all lookups.
    pub lookup_tokens: u64,
    /// Tokens found, partly agreeing blocks included.
    pub hit_tokens: u64,
    /// Blocks' identities known now.
    pub entries: usize,
    /// Blocks given back by [`PrefixCache::evict`], all groups.
    pub evicted_blocks: u64,
    /// Bytes of pages that nobody holds: can be given back at once.
    pub idle_bytes: usize,
    /// Bytes of the cache's own tables, about. Not part of the pool's budget (SmolLM2: below 0.1 % of the
    /// pages they name).
    pub table_bytes: usize,
}

/// The prefixes that one pool holds. Gives all idle blocks back on drop.
#[derive(Debug)]
pub struct PrefixCache {
    pool: BlockPool,
    identity: PrefixIdentity,
    block_size: usize,
    /// By group: the window; `None` full attention.
    windows: Vec<Option<usize>>,
    tree: EntryTree,
    index: Box<dyn PrefixIndex>,
    /// `[entry][group]`: a *node* is an index into it.
    named: Vec<Named>,
    /// By entry.
    marks: Vec<Mark>,
    /// Node by record index of the block it names.
    node_of: Vec<u32>,
    idle: IdleQueues,
    protected: Vec<EntryId>,
    pins: BTreeSet<(u64, EntryId)>,
    events: EventQueue,
    stats: PrefixStats,
    /// Kept for their memory.
    changes: Vec<CacheChange>,
    path: Vec<EntryId>,
}

impl PrefixCache {
    /// An empty cache of blocks of `pool`.
    pub fn new(pool: &BlockPool, identity: PrefixIdentity, kind: IndexKind) -> PrefixCache {
        let block_size = pool.config().block_size();
        let index: Box<dyn PrefixIndex> = match kind {
            IndexKind::Chain => Box::new(ChainIndex::new(identity.hasher(), block_size)),
            IndexKind::Radix => Box::new(RadixIndex::new(block_size)),
        };
        PrefixCache {
            pool: pool.clone(),
            identity,
            block_size,
            windows: pool.config().groups.iter().map(|group| group.window).collect(),
            tree: EntryTree::default(),
            index,
            named: Vec::new(),
            marks: Vec::new(),
            node_of: Vec::new(),
            idle: IdleQueues::new(),
            protected: Vec::new(),
            pins: BTreeSet::new(),
            events: EventQueue::default(),
            stats: PrefixStats::default(),
            changes: Vec::new(),
            path: Vec::new(),
        }
    }

    /// Whose prefixes these are.
    pub fn identity(&self) -> &PrefixIdentity {
        &self.identity
    }

    fn node(&self, entry: EntryId, group: usize) -> usize {
        entry.index() * self.windows.len() + group
    }

    fn entry_of(&self, node: usize) -> EntryId {
        EntryId::new(node / self.windows.len())
    }

    fn is_full(&self, node: usize) -> bool {
        self.windows[node % self.windows.len()].is_none()
    }

    /// The node that names `block`.
    fn node_named(&self, block: CachedBlock) -> Option<usize> {
        let node = *self.node_of.get(block.index as usize)? as usize;
        (self.named.get(node)?.block == Some(block)).then_some(node)
    }

    /// Hears what has become of named blocks since the last call.
    fn take_changes(&mut self) {
        let mut changes = std::mem::take(&mut self.changes);
        self.pool.drain_cache_changes(&mut changes);
        let mut turned_idle = Vec::new();
        for change in changes.drain(..) {
            match change {
                CacheChange::Idle(block) => turned_idle.extend(self.node_named(block)),
                CacheChange::Held(block) => {
                    if let Some(node) = self.node_named(block) {
                        self.idle.remove(node);
                    }
                }
                CacheChange::Gone(block) => {
                    if let Some(node) = self.node_named(block) {
                        self.give_back(node);
                    }
                }
                CacheChange::Lowered(block) => {
                    if let Some(node) = self.node_named(block) {
                        self.tell_stored(self.entry_of(node));
                    }
                }
            }
        }
        self.changes = changes;
        self.queue_idle(turned_idle);
    }

    /// Queues blocks that nobody holds, tails first; full-attention blocks of an entry before its others,
    /// whose queue depends on them.
    fn queue_idle(&mut self, mut nodes: Vec<usize>) {
        let depth = |node: usize| tails_first(self.tree.depth(self.entry_of(node)));
        nodes.retain(|&node| self.named[node].block.is_some());
        nodes.sort_unstable_by_key(|&node| (depth(node), !self.is_full(node), node));
        for &node in &nodes {
            self.idle.push(node, self.turn(node));
        }
        nodes.retain(|&node| self.is_full(node));
        for node in nodes {
            self.queue_heads_behind(node);
        }
    }

    /// Heads that wait, and would give way before `tail`, go on waiting behind it.
    fn queue_heads_behind(&mut self, tail: usize) {
        let group = tail % self.windows.len();
        let mut below = tail;
        while let Some(parent) = self.tree.parent(self.entry_of(below)) {
            let above = self.node(parent, group);
            let waits = self.idle.turn(above).filter(|_| !self.idle.is_behind(above, below));
            let Some(turn) = waits else { return };
            self.idle.push(above, turn);
            below = above;
        }
    }

    /// The queue that an idle block belongs in.
    fn turn(&self, node: usize) -> Turn {
        let entry = self.entry_of(node);
        let mark = &self.marks[entry.index()];
        let groups = 0..self.windows.len();
        let is_in_use = |group: usize| {
            let node = self.node(entry, group);
            self.windows[group].is_none() && self.idle.turn(node).is_none()
        };
        if mark.protected {
            Turn::Protected
        } else if mark.pinned_until_us.is_some() {
            Turn::Pinned
        } else if !self.is_full(node) && !self.named[node].used && groups.into_iter().any(is_in_use)
        {
            Turn::LeftWindow
        } else {
            Turn::Ordinary
        }
    }

    /// Puts the idle blocks of entries whose marks have changed where they belong now.
    fn requeue(&mut self, entries: &[EntryId]) {
        let mut moved = Vec::new();
        for &entry in entries {
            let nodes = (0..self.windows.len()).map(|group| self.node(entry, group));
            let is_elsewhere =
                |&node: &usize| self.idle.turn(node).is_some_and(|turn| turn != self.turn(node));
            moved.extend(nodes.filter(is_elsewhere));
        }
        self.queue_idle(moved);
    }

    /// Gives back idle blocks, least recently used first and tails before heads, until `enough` says so or
    /// none is left: first what has left a window, last what is pinned and then what the waiting head
    /// matches. Returns the bytes given back (behind the fence of a step that is in flight). Constant time
    /// a block.
    pub fn evict(&mut self, enough: &mut dyn FnMut() -> bool) -> usize {
        self.take_changes();
        let mut bytes = 0;
        while !enough() {
            let Some(node) = self.idle.first() else { break };
            bytes += self.give_back(node);
        }
        bytes
    }

    /// Takes the name from a block, and from everything that cannot be used without it. Returns the bytes
    /// given back.
    fn give_back(&mut self, node: usize) -> usize {
        let entry = self.entry_of(node);
        if self.is_full(node) {
            return self.remove_with_descendants(entry);
        }
        let bytes = self.forget_block(node);
        let is_bare = |cache: &PrefixCache, entry: EntryId| {
            let bare = |group| cache.named[cache.node(entry, group)].block.is_none();
            cache.tree.children(entry).next().is_none() && (0..cache.windows.len()).all(bare)
        };
        // Where no group has full attention, entries lead on without blocks until nothing is behind.
        let mut bare = Some(entry).filter(|&entry| is_bare(self, entry));
        if bare.is_none() {
            self.tell_stored(entry);
        }
        while let Some(entry) = bare {
            let parent = self.tree.parent(entry);
            self.remove_leaf(entry);
            let held = parent.filter(|&parent| self.tree.is_entry(parent));
            bare = held.filter(|&parent| is_bare(self, parent));
        }
        bytes
    }

    fn remove_with_descendants(&mut self, entry: EntryId) -> usize {
        let mut bytes = 0;
        let mut leaf = self.tree.leaf_below(entry);
        loop {
            let parent = self.tree.parent(leaf);
            bytes += self.remove_leaf(leaf);
            match parent {
                Some(parent) if leaf != entry => leaf = self.tree.leaf_below(parent),
                _ => return bytes,
            }
        }
    }

    fn remove_leaf(&mut self, entry: EntryId) -> usize {
        let groups = 0..self.windows.len();
        let bytes = groups.map(|group| self.forget_block(self.node(entry, group))).sum();
        let mark = std::mem::take(&mut self.marks[entry.index()]);
        if let Some(until_us) = mark.pinned_until_us {
            self.pins.remove(&(until_us, entry));
        }
        self.events.push(PrefixEvent::Removed { hash: *self.tree.hash(entry) });
        self.index.remove(&self.tree, entry);
        if let Some(root) = self.tree.remove_leaf(entry) {
            self.index.remove_root(root);
        }
        bytes
    }

    fn forget_block(&mut self, node: usize) -> usize {
        let Some(block) = std::mem::take(&mut self.named[node]).block else { return 0 };
        self.idle.remove(node);
        let bytes = self.pool.uncache(block);
        self.stats.evicted_blocks += u64::from(bytes > 0);
        bytes
    }

    /// Forgets everything; idle blocks are given back.
    pub fn clear(&mut self) {
        for entry in self.tree.entries().into_iter().rev() {
            self.remove_leaf(entry);
        }
        self.events.push(PrefixEvent::Cleared);
    }

    /// What has happened since the last call. The first call, and one after so much has happened that it was
    /// not kept, begins with [`PrefixEvent::Cleared`] and tells every entry.
    pub fn events(&mut self) -> std::vec::Drain<'_, PrefixEvent> {
        self.take_changes();
        if !self.events.is_recording() {
            let everything = self.tree.entries().into_iter().map(|entry| self.stored(entry));
            let everything: Vec<PrefixEvent> = everything.collect();
            self.events.begin(everything.into_iter());
        }
        self.events.drain()
    }

    /// What the cache has done, and what it holds now.
    pub fn stats(&mut self) -> PrefixStats {
        self.take_changes();
        let tables = self.named.capacity() * size_of::<Named>()
            + self.marks.capacity() * size_of::<Mark>()
            + self.node_of.capacity() * size_of::<u32>()
            + self.tree.table_bytes()
            + self.idle.table_bytes()
            + self.index.table_bytes();
        PrefixStats {
            entries: self.tree.len(),
            idle_bytes: self.pool.accounts().cached_bytes,
            table_bytes: tables,
            ..self.stats
        }
    }
}

impl Drop for PrefixCache {
    fn drop(&mut self) {
        self.clear();
        // The pool uses a record again only when somebody has heard that its block has gone.
        self.take_changes();
    }
}
