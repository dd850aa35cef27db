//! An index as a trie of tokens, as SGLang's: edges are runs of tokens, split where two prefixes part,
//! inside a block too. Nothing is hashed to look up, and the block that agrees furthest lies below the
//! point where the search leaves the trie.

use std::collections::HashMap;

use super::index::{PARTIAL_CANDIDATES, PrefixIndex, agreement};
use super::tree::{EntryId, EntryTree};

const NONE: u32 = u32::MAX;

/// A node and the edge that leads to it. No node but a root has exactly one child.
#[derive(Debug)]
struct Node {
    parent: u32,
    /// Position of the edge's first token.
    start: usize,
    tokens: Vec<u32>,
    /// Entries whose blocks end on the edge, in order. The last tokens of a leaf end a block.
    entries: Vec<EntryId>,
    first_child: u32,
    next: u32,
    previous: u32,
}

impl Node {
    fn end(&self) -> usize {
        self.start + self.tokens.len()
    }
}

/// A place in the trie: `offset` tokens into the edge of `node`.
#[derive(Clone, Copy, Debug)]
struct Place {
    node: u32,
    offset: usize,
}

/// A token trie per root.
#[derive(Debug)]
pub struct RadixIndex {
    block_size: usize,
    nodes: Vec<Node>,
    free: Vec<u32>,
    /// Child by node and the first token of its edge.
    edges: HashMap<(u32, u32), u32>,
    /// Node by entry or root.
    node_of: Vec<u32>,
}

impl RadixIndex {
    /// An empty index of blocks of `block_size` tokens.
    pub fn new(block_size: usize) -> RadixIndex {
        RadixIndex {
            block_size,
            nodes: Vec::new(),
            free: Vec::new(),
            edges: HashMap::new(),
            node_of: Vec::new(),
        }
    }

    fn node(&self, node: u32) -> &Node {
        &self.nodes[node as usize]
    }

    fn node_mut(&mut self, node: u32) -> &mut Node {
        &mut self.nodes[node as usize]
    }

    fn new_node(&mut self, start: usize, tokens: Vec<u32>, entries: Vec<EntryId>) -> u32 {
        let (parent, first_child, next, previous) = (NONE, NONE, NONE, NONE);
        let node = Node { parent, start, tokens, entries, first_child, next, previous };
        match self.free.pop() {
            Some(index) => {
                self.nodes[index as usize] = node;
                index
            }
            None => {
                self.nodes.push(node);
                self.nodes.len() as u32 - 1
            }
        }
    }

    fn children(&self, node: u32) -> impl Iterator<Item = u32> + '_ {
        let link = |index: u32| (index != NONE).then_some(index);
        std::iter::successors(link(self.node(node).first_child), move |&child| {
            link(self.node(child).next)
        })
    }

    /// Makes `child` the youngest child of `parent`.
    fn attach(&mut self, parent: u32, child: u32) {
        let older = std::mem::replace(&mut self.node_mut(parent).first_child, child);
        let node = self.node_mut(child);
        (node.parent, node.next, node.previous) = (parent, older, NONE);
        let token = node.tokens[0];
        if older != NONE {
            self.node_mut(older).previous = child;
        }
        self.edges.insert((parent, token), child);
    }

    fn detach(&mut self, child: u32) {
        let Node { parent, next, previous, .. } = *self.node(child);
        match previous {
            NONE => self.node_mut(parent).first_child = next,
            previous => self.node_mut(previous).next = next,
        }
        if next != NONE {
            self.node_mut(next).previous = previous;
        }
        self.edges.remove(&(parent, self.node(child).tokens[0]));
    }

    fn put(&mut self, entry: EntryId, node: u32) {
        if self.node_of.len() <= entry.index() {
            self.node_of.resize(entry.index() + 1, NONE);
        }
        self.node_of[entry.index()] = node;
    }

    /// Where the block of an entry ends; a root's beginning.
    fn place(&self, tree: &EntryTree, entry: EntryId) -> Option<Place> {
        let node = self.node_of.get(entry.index()).copied().filter(|&node| node != NONE)?;
        let offset = tree.depth(entry) * self.block_size - self.node(node).start;
        Some(Place { node, offset })
    }

    /// Follows `tokens` from `place` as far as they agree, hearing of each (place, tokens followed to
    /// it) where an edge is left: at its end, or, last, where the agreement ends.
    fn descend(&self, place: Place, tokens: &[u32], mut left: impl FnMut(Place, usize)) {
        let (mut here, mut done) = (place, 0);
        loop {
            let edge = &self.node(here.node).tokens[here.offset..];
            let agreed = agreement(edge, &tokens[done..]);
            here.offset += agreed;
            done += agreed;
            left(here, done);
            let next = tokens.get(done).filter(|_| agreed == edge.len());
            match next.and_then(|&token| self.edges.get(&(here.node, token))) {
                Some(&child) => here = Place { node: child, offset: 0 },
                None => return,
            }
        }
    }

    /// Cuts the edge of `node` after `offset` tokens. Returns the new node above the cut.
    fn split(&mut self, node: u32, offset: usize) -> u32 {
        let block_size = self.block_size;
        let Node { parent, start, .. } = *self.node(node);
        self.detach(node);
        let below = self.node_mut(node);
        let rest = below.tokens.split_off(offset);
        let tokens = std::mem::replace(&mut below.tokens, rest);
        let boundaries = (start + offset) / block_size - start / block_size;
        let rest = below.entries.split_off(boundaries);
        let entries = std::mem::replace(&mut below.entries, rest);
        below.start += offset;
        let above = self.new_node(start, tokens, entries);
        self.attach(parent, above);
        self.attach(above, node);
        self.claim(above);
        above
    }

    /// Tells the entries on a node's edge where they are.
    fn claim(&mut self, node: u32) {
        for index in 0..self.node(node).entries.len() {
            let entry = self.node(node).entries[index];
            self.node_of[entry.index()] = node;
        }
    }

    /// Joins `node` with its only child.
    fn join_only_child(&mut self, node: u32) {
        let child = self.node(node).first_child;
        let parent = self.node(node).parent;
        let single = child != NONE && self.node(child).next == NONE;
        if parent == NONE || !single {
            return;
        }
        self.detach(child);
        self.detach(node);
        let upper = self.node_mut(node);
        let (start, mut tokens) = (upper.start, std::mem::take(&mut upper.tokens));
        let mut entries = std::mem::take(&mut upper.entries);
        let lower = self.node_mut(child);
        tokens.append(&mut lower.tokens);
        entries.append(&mut lower.entries);
        (lower.start, lower.tokens, lower.entries) = (start, tokens, entries);
        self.attach(parent, child);
        self.claim(child);
        self.free.push(node);
    }

    /// The first entry at or below `place` whose block ends behind it, of each branch but `skipped`,
    /// until `accept` takes one or `budget` is used up.
    fn nearest(
        &self,
        place: Place,
        skipped: u32,
        budget: &mut usize,
        accept: &mut dyn FnMut(EntryId) -> bool,
    ) -> Option<EntryId> {
        let mut open = vec![place];
        while let Some(Place { node, offset }) = open.pop() {
            let held = self.node(node);
            // Of an edge begun in the middle, the boundaries up to there are behind.
            let passed = (held.start + offset) / self.block_size - held.start / self.block_size;
            if let Some(&entry) = held.entries.get(passed) {
                if *budget == 0 {
                    return None;
                }
                *budget -= 1;
                if accept(entry) {
                    return Some(entry);
                }
            } else {
                let children = self.children(node).filter(|&child| child != skipped);
                open.extend(children.take(*budget).map(|node| Place { node, offset: 0 }));
            }
        }
        None
    }
}

impl PrefixIndex for RadixIndex {
    fn walk(&self, _tree: &EntryTree, root: EntryId, tokens: &[u32], path: &mut Vec<EntryId>) {
        let Some(&node) = self.node_of.get(root.index()).filter(|&&node| node != NONE) else {
            return;
        };
        self.descend(Place { node, offset: 0 }, tokens, |place, done| {
            let node = self.node(place.node);
            let boundaries = done / self.block_size - node.start / self.block_size;
            path.extend_from_slice(&node.entries[..boundaries]);
        });
    }

    fn partial(
        &self,
        tree: &EntryTree,
        parent: EntryId,
        rest: &[u32],
        accept: &mut dyn FnMut(EntryId) -> bool,
    ) -> Option<(EntryId, usize)> {
        let start = self.place(tree, parent)?;
        let rest = &rest[..rest.len().min(self.block_size)];
        let mut left = Vec::new();
        // A place that ends the whole block is behind its entry: the entry is found from the edge's
        // beginning in the block.
        self.descend(start, rest, |place, rows| {
            let from = if rows == self.block_size { place.offset - 1 } else { place.offset };
            left.push((Place { offset: from, ..place }, rows));
        });
        let (mut skipped, mut budget) = (NONE, PARTIAL_CANDIDATES);
        for (place, rows) in left.into_iter().rev().take_while(|(_, rows)| *rows > 0) {
            if let Some(entry) = self.nearest(place, skipped, &mut budget, accept) {
                return Some((entry, rows));
            }
            skipped = place.node;
        }
        None
    }

    fn insert(&mut self, tree: &EntryTree, entry: EntryId, tokens: &[u32]) -> bool {
        let Some(parent) = tree.parent(entry) else { return false };
        if tree.depth(parent) == 0 && self.node_of.get(parent.index()).is_none_or(|&n| n == NONE) {
            let root = self.new_node(0, Vec::new(), Vec::new());
            self.put(parent, root);
        }
        let Some(place) = self.place(tree, parent) else { return false };
        let (mut end, mut done) = (place, 0);
        self.descend(place, tokens, |place, agreed| (end, done) = (place, agreed));
        let start = self.node(end.node).start + end.offset;
        let mut node = end.node;
        if end.offset < self.node(node).tokens.len() {
            node = self.split(node, end.offset);
        } else if self.node(node).first_child == NONE && self.node(node).parent != NONE {
            // The only thing behind a leaf: its edge goes on.
            let leaf = self.node_mut(node);
            leaf.tokens.extend_from_slice(&tokens[done..]);
            leaf.entries.push(entry);
            self.put(entry, node);
            return true;
        }
        let leaf = self.new_node(start, tokens[done..].to_vec(), vec![entry]);
        self.attach(node, leaf);
        self.put(entry, leaf);
        true
    }

    fn remove(&mut self, tree: &EntryTree, entry: EntryId) {
        let Some(Place { node, offset }) = self.place(tree, entry) else { return };
        debug_assert_eq!(offset, self.node(node).tokens.len(), "not a leaf");
        self.node_of[entry.index()] = NONE;
        let kept = self.node(node).end() - self.block_size;
        let held = self.node_mut(node);
        held.entries.pop();
        if kept > held.start {
            held.tokens.truncate(kept - held.start);
            return;
        }
        let parent = held.parent;
        self.detach(node);
        self.free.push(node);
        self.join_only_child(parent);
    }

    fn remove_root(&mut self, root: EntryId) {
        if let Some(node) = self.node_of.get_mut(root.index()).filter(|node| **node != NONE) {
            self.free.push(std::mem::replace(node, NONE));
        }
    }

    fn tokens(&self, tree: &EntryTree, entry: EntryId, out: &mut Vec<u32>) {
        let Some(Place { mut node, offset }) = self.place(tree, entry) else { return };
        let begin = out.len();
        let (mut missing, mut upto) = (self.block_size, offset);
        while missing > 0 {
            let held = self.node(node);
            let from = upto.saturating_sub(missing);
            out.splice(begin..begin, held.tokens[from..upto].iter().copied());
            missing -= upto - from;
            node = held.parent;
            upto = if missing > 0 { self.node(node).tokens.len() } else { 0 };
        }
    }

    fn table_bytes(&self) -> usize {
        let held = |node: &Node| {
            node.tokens.capacity() * size_of::<u32>()
                + node.entries.capacity() * size_of::<EntryId>()
        };
        self.nodes.capacity() * size_of::<Node>()
            + self.nodes.iter().map(held).sum::<usize>()
            + self.edges.capacity() * (size_of::<((u32, u32), u32)>() + 1)
            + self.node_of.capacity() * size_of::<u32>()
    }
}
