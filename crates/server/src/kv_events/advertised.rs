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

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;

    const PUBLIC: BlockHash = BlockHash([200; 32]);
    const PRIVATE: BlockHash = BlockHash([201; 32]);
    const BLOCK: usize = 4;

    fn root(hash: BlockHash, tenant: Option<&str>) -> AdvertisedRoot {
        AdvertisedRoot { root: PrefixRoot(hash.0), tenant: tenant.map(str::to_owned) }
    }

    /// The cache as it tells of itself: by a block's number its parent's (or the root), exact, whole.
    type Cache = BTreeMap<u8, (Result<u8, BlockHash>, bool, bool)>;

    fn hash(number: u8) -> BlockHash {
        BlockHash([number; 32])
    }

    fn tokens(number: u8) -> Vec<u32> {
        vec![u32::from(number); BLOCK]
    }

    fn stored(cache: &Cache, number: u8) -> PrefixEvent {
        let (parent, exact, whole) = cache[&number];
        PrefixEvent::Stored {
            hash: hash(number),
            parent: parent.map_or_else(|root| root, hash),
            tokens: tokens(number),
            fidelity: if exact { Fidelity::Exact } else { Fidelity::Int8 },
            whole,
        }
    }

    /// What a subscriber knows: by name the parent's and the tokens.
    #[derive(Debug, Default, PartialEq)]
    struct Subscriber(BTreeMap<WireHash, (Option<WireHash>, Vec<u32>)>);

    impl Subscriber {
        fn hear(&mut self, events: &[WireEvent]) {
            for event in events {
                match event {
                    WireEvent::AllBlocksCleared {} => self.0.clear(),
                    WireEvent::BlockRemoved { block_hashes, .. } => {
                        for hash in block_hashes {
                            assert!(self.0.remove(hash).is_some(), "unknown block removed");
                            let is_parent = |known: &(_, _)| known.0 == Some(*hash);
                            assert!(!self.0.values().any(is_parent), "head removed before tail");
                        }
                    }
                    WireEvent::BlockStored {
                        block_hashes,
                        parent_block_hash,
                        token_ids,
                        block_size,
                        ..
                    } => {
                        assert_eq!(*block_size, BLOCK);
                        let mut parent = *parent_block_hash;
                        for (hash, tokens) in block_hashes.iter().zip(token_ids.chunks(BLOCK)) {
                            assert!(parent.is_none_or(|parent| self.0.contains_key(&parent)));
                            let known = self.0.insert(*hash, (parent, tokens.to_vec()));
                            assert_eq!(known, None, "stored twice");
                            parent = Some(*hash);
                        }
                    }
                }
            }
        }
    }

    /// By the definition, block by block.
    fn wanted(cache: &Cache, roots: &[BlockHash]) -> Subscriber {
        let mut advertised = BTreeSet::new();
        for (&number, (_, _, whole)) in cache {
            let mut path = vec![number];
            while let Ok(above) = cache[path.last().unwrap()].0 {
                path.push(above);
            }
            let root = cache[path.last().unwrap()].0.unwrap_err();
            if *whole && roots.contains(&root) && path.iter().all(|block| cache[block].1) {
                advertised.extend(path);
            }
        }
        let name = |number: u8| wire_hash(&hash(number));
        let told = |number: u8| (name(number), (cache[&number].0.ok().map(name), tokens(number)));
        Subscriber(advertised.into_iter().map(told).collect())
    }

    #[test]
    fn a_subscriber_knows_what_an_exact_request_can_begin_with() {
        let mut state = 7_u64;
        let mut random = |below: usize| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % below
        };
        let (mut most, mut withdrawn, mut led_on) = (0, 0, 0);
        for world in 0..60 {
            let private = world % 2 == 0;
            let mut roots = vec![root(PUBLIC, None)];
            roots.extend(private.then(|| root(PRIVATE, Some("anna"))));
            let told_roots: Vec<BlockHash> = roots.iter().map(|of| BlockHash(of.root.0)).collect();
            let mut advertised = Advertised::new(roots);
            let (mut cache, mut subscriber) = (Cache::new(), Subscriber::default());
            let mut events = vec![PrefixEvent::Cleared];
            for _ in 0..300 {
                let number = random(40) as u8;
                let known: Vec<u8> = cache.keys().copied().collect();
                let is_leaf = !cache.values().any(|entry| entry.0 == Ok(number));
                match (cache.contains_key(&number), random(8)) {
                    (true, 0..4) if is_leaf => {
                        cache.remove(&number);
                        events.push(PrefixEvent::Removed { hash: hash(number) });
                    }
                    (true, _) => {
                        let entry = cache.get_mut(&number).unwrap();
                        (entry.1, entry.2) = (random(4) > 0, random(3) > 0);
                        events.push(stored(&cache, number));
                    }
                    (false, 0) => {
                        let root = [PUBLIC, PRIVATE][random(2)];
                        cache.insert(number, (Err(root), random(8) > 0, random(2) > 0));
                        events.push(stored(&cache, number));
                    }
                    (false, _) if !known.is_empty() => {
                        let parent = known[random(known.len())];
                        cache.insert(number, (Ok(parent), random(8) > 0, random(2) > 0));
                        events.push(stored(&cache, number));
                    }
                    (false, _) => {}
                }
                if random(100) == 0 {
                    cache.clear();
                    events.push(PrefixEvent::Cleared);
                }
                if random(3) > 0 {
                    continue;
                }
                let mut out = Vec::new();
                advertised.follow(std::mem::take(&mut events), &mut out);
                let before = subscriber.0.len();
                subscriber.hear(&out);
                let wanted = wanted(&cache, &told_roots);
                assert_eq!(subscriber, wanted);
                let mut late = Subscriber::default();
                late.hear(&advertised.everything());
                assert_eq!(late, wanted);
                assert_eq!(advertised.count(), wanted.0.len());
                most = most.max(wanted.0.len());
                withdrawn += usize::from(wanted.0.len() < before && out.len() < 3);
                let told = |number: &u8| wanted.0.contains_key(&wire_hash(&hash(*number)));
                led_on += cache.iter().filter(|(number, of)| !of.2 && told(number)).count();
            }
        }
        assert!(most > 20 && withdrawn > 50 && led_on > 50, "{most} {withdrawn} {led_on}");
    }

    #[test]
    fn a_private_text_is_told_with_its_tenants_name_or_not_at_all() {
        let event = |root, number| PrefixEvent::Stored {
            hash: hash(number),
            parent: root,
            tokens: tokens(number),
            fidelity: Fidelity::Exact,
            whole: true,
        };
        let events = || vec![event(PRIVATE, 1), event(hash(1), 2), event(PUBLIC, 3)];
        let mut out = Vec::new();
        Advertised::new(vec![root(PUBLIC, None)]).follow(events(), &mut out);
        assert_eq!(out, [WireEvent::stored(wire_hash(&hash(3)), None, &tokens(3), None)]);
        out.clear();
        let both = vec![root(PUBLIC, None), root(PRIVATE, Some("anna"))];
        Advertised::new(both).follow(events(), &mut out);
        let WireEvent::BlockStored { extra_keys, block_hashes, .. } = &out[0] else { panic!() };
        assert_eq!(block_hashes.len(), 2);
        assert_eq!(*extra_keys, Some(vec![Some(("anna".to_owned(),)), None]));
        // Where a tenant without a salt shares a root, everybody does.
        let shared = vec![root(PUBLIC, Some("anna")), root(PUBLIC, None)];
        out.clear();
        Advertised::new(shared).follow(vec![event(PUBLIC, 3)], &mut out);
        assert!(matches!(&out[0], WireEvent::BlockStored { extra_keys: None, .. }));
    }
}
