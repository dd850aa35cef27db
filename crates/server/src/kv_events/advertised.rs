//! What subscribers are told that they may count on.
//!
//! A block is advertised while a request that asks for exact results can begin with it: it and all before
//! it were computed without loss and still are f16, and a hit can end at it or behind it (a model with
//! sliding windows keeps the windows' blocks of a text's end only; those before lead on to it). Anything
//! else is withdrawn: a router that counts on it would send requests for nothing.

use std::collections::HashMap;

use reef_kv::Fidelity;
use reef_kv::prefix::{BlockHash, PrefixEvent, PrefixRoot};

use super::wire::{WireEvent, WireHash};

/// Where the advertised texts of a tenant begin.
#[derive(Clone, Debug)]
pub struct AdvertisedRoot {
    /// The parent of its first blocks.
    pub root: PrefixRoot,
    /// Its name, told with its first blocks; `None` where everybody may use them.
    pub tenant: Option<String>,
}

/// A block of the cache.
#[derive(Debug)]
struct Node {
    parent: BlockHash,
    tokens: Box<[u32]>,
    exact: bool,
    /// A hit can end at it.
    whole: bool,
    /// It and everything before are exact.
    reachable: bool,
    advertised: bool,
    /// Blocks right behind it that are advertised.
    advertised_children: usize,
    children: Vec<BlockHash>,
}

/// The advertised part of a prefix cache, kept by its events. Blocks of texts that begin at no
/// [`AdvertisedRoot`] are not kept.
#[derive(Debug)]
pub struct Advertised {
    roots: HashMap<BlockHash, (Option<String>, Vec<BlockHash>)>,
    nodes: HashMap<BlockHash, Node>,
}

/// The name of a block to subscribers.
fn wire_hash(hash: &BlockHash) -> WireHash {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&hash.0[..8]);
    WireHash::from_be_bytes(bytes)
}

impl Advertised {
    /// Nothing of the texts that begin at `roots`.
    pub fn new(roots: Vec<AdvertisedRoot>) -> Advertised {
        let mut by_hash: HashMap<BlockHash, (Option<String>, Vec<BlockHash>)> = HashMap::new();
        for AdvertisedRoot { root, tenant } in roots {
            let known = by_hash.entry(BlockHash(root.0)).or_insert((tenant.clone(), Vec::new()));
            // Who shares with everybody is told as everybody.
            known.0 = known.0.take().and(tenant);
        }
        Advertised { roots: by_hash, nodes: HashMap::new() }
    }

    /// Follows `events` of the cache; appends to `out` what subscribers are to hear.
    pub fn follow(&mut self, events: Vec<PrefixEvent>, out: &mut Vec<WireEvent>) {
        for event in events {
            match event {
                PrefixEvent::Stored { hash, parent, tokens, fidelity, whole } => {
                    self.store(hash, parent, tokens, fidelity == Fidelity::Exact, whole, out);
                }
                PrefixEvent::Removed { hash } => self.remove(hash, out),
                PrefixEvent::Cleared => {
                    self.nodes.clear();
                    self.roots.values_mut().for_each(|(_, first)| first.clear());
                    out.clear();
                    out.push(WireEvent::AllBlocksCleared {});
                }
            }
        }
    }

    /// Everything that is advertised now, for a subscriber that knows nothing.
    pub fn everything(&self) -> Vec<WireEvent> {
        let mut out = vec![WireEvent::AllBlocksCleared {}];
        let mut waiting: Vec<BlockHash> = Vec::new();
        for (_, first) in self.roots.values() {
            waiting.extend(first);
            while let Some(hash) = waiting.pop() {
                let node = &self.nodes[&hash];
                if node.advertised {
                    WireEvent::append(&mut out, self.stored(&hash));
                    waiting.extend(&node.children);
                }
            }
        }
        out
    }

    /// Blocks that are advertised.
    pub fn count(&self) -> usize {
        self.nodes.values().filter(|node| node.advertised).count()
    }

    fn store(
        &mut self,
        hash: BlockHash,
        parent: BlockHash,
        tokens: Vec<u32>,
        exact: bool,
        whole: bool,
        out: &mut Vec<WireEvent>,
    ) {
        if let Some(node) = self.nodes.get_mut(&hash) {
            (node.exact, node.whole) = (exact, whole);
        } else {
            match (self.roots.get_mut(&parent), self.nodes.get_mut(&parent)) {
                (Some((_, first)), _) => first.push(hash),
                (None, Some(node)) => node.children.push(hash),
                // A text that is not advertised.
                (None, None) => return,
            }
            let node = Node {
                parent,
                tokens: tokens.into(),
                exact,
                whole,
                reachable: false,
                advertised: false,
                advertised_children: 0,
                children: Vec::new(),
            };
            self.nodes.insert(hash, node);
        }
        self.refresh(hash, out);
    }

    fn remove(&mut self, hash: BlockHash, out: &mut Vec<WireEvent>) {
        if !self.nodes.contains_key(&hash) {
            return;
        }
        // Those behind went before; if one did not, nothing can be reached through this one.
        let below = self.subtree(hash);
        let mut parent = None;
        for hash in below.into_iter().rev() {
            let Some(node) = self.nodes.remove(&hash) else { continue };
            if node.advertised {
                WireEvent::append(out, WireEvent::removed(wire_hash(&hash)));
            }
            if let Some(above) = self.nodes.get_mut(&node.parent) {
                above.children.retain(|child| *child != hash);
                above.advertised_children -= usize::from(node.advertised);
            } else if let Some((_, first)) = self.roots.get_mut(&node.parent) {
                first.retain(|child| *child != hash);
            }
            parent = Some(node.parent);
        }
        let mut changed = Vec::new();
        if let Some(parent) = parent {
            self.settle_up(parent, &mut changed);
        }
        self.tell(changed, out);
    }

    /// `hash` and everything behind it, heads before tails.
    fn subtree(&self, hash: BlockHash) -> Vec<BlockHash> {
        let mut found = vec![hash];
        let mut next = 0;
        while let Some(hash) = found.get(next).copied() {
            next += 1;
            found.extend(self.nodes.get(&hash).into_iter().flat_map(|node| &node.children));
        }
        found
    }

    /// Recomputes what follows from a node's `exact` and `whole`.
    fn refresh(&mut self, hash: BlockHash, out: &mut Vec<WireEvent>) {
        let reachable = self.is_reachable(&hash);
        let turned = self.nodes[&hash].reachable != reachable;
        let affected = if turned { self.subtree(hash) } else { vec![hash] };
        for hash in &affected {
            let reachable = self.is_reachable(hash);
            if let Some(node) = self.nodes.get_mut(hash) {
                node.reachable = reachable;
            }
        }
        let mut changed = Vec::new();
        for hash in affected.into_iter().rev() {
            self.settle(hash, &mut changed);
        }
        let parent = self.nodes[&hash].parent;
        self.settle_up(parent, &mut changed);
        self.tell(changed, out);
    }

    fn is_reachable(&self, hash: &BlockHash) -> bool {
        let node = &self.nodes[hash];
        let above = self.nodes.get(&node.parent).map(|above| above.reachable);
        node.exact && above.unwrap_or_else(|| self.roots.contains_key(&node.parent))
    }

    /// Whether the node is advertised now, and whether that is a change.
    fn settle(&mut self, hash: BlockHash, changed: &mut Vec<BlockHash>) -> bool {
        let Some(node) = self.nodes.get_mut(&hash) else { return false };
        let advertised = node.reachable && (node.whole || node.advertised_children > 0);
        if advertised == node.advertised {
            return false;
        }
        node.advertised = advertised;
        let parent = node.parent;
        if let Some(above) = self.nodes.get_mut(&parent) {
            match advertised {
                true => above.advertised_children += 1,
                false => above.advertised_children -= 1,
            }
        }
        changed.push(hash);
        true
    }

    /// Settles a node, and those before it as far as that changes them.
    fn settle_up(&mut self, mut hash: BlockHash, changed: &mut Vec<BlockHash>) {
        while self.settle(hash, changed) {
            hash = self.nodes[&hash].parent;
        }
    }

    /// Tells of the changed ones, which are in order from tails to heads.
    fn tell(&self, changed: Vec<BlockHash>, out: &mut Vec<WireEvent>) {
        let is_advertised = |hash: &&BlockHash| self.nodes[*hash].advertised;
        for hash in changed.iter().filter(|hash| !is_advertised(hash)) {
            WireEvent::append(out, WireEvent::removed(wire_hash(hash)));
        }
        for hash in changed.iter().rev().filter(is_advertised) {
            WireEvent::append(out, self.stored(hash));
        }
    }

    fn stored(&self, hash: &BlockHash) -> WireEvent {
        let node = &self.nodes[hash];
        let root = self.roots.get(&node.parent);
        let parent = root.is_none().then(|| wire_hash(&node.parent));
        let tenant = root.and_then(|(tenant, _)| tenant.as_deref());
        WireEvent::stored(wire_hash(hash), parent, &node.tokens, tenant)
    }
}
