//! Both indexes against a naive map from whole prefixes to entries, on random traces.

use std::collections::BTreeMap;

use proptest::prelude::*;
use reef_kv::prefix::*;

const BLOCK: usize = 4;

#[derive(Clone, Debug)]
enum Operation {
    /// Inserts the blocks of `tokens` that are missing.
    Insert {
        root: usize,
        tokens: Vec<u32>,
    },
    /// Removes a leaf, picked by number.
    Remove {
        leaf: usize,
    },
    Lookup {
        root: usize,
        tokens: Vec<u32>,
    },
}

/// Few different tokens, so that prefixes are shared, part within blocks and meet again.
fn tokens() -> impl Strategy<Value = Vec<u32>> {
    let noise =
        proptest::collection::vec(prop_oneof![6 => Just(0u32), 2 => Just(1), 1 => 0..3u32], 0..40);
    let long = (0..3u32, 0..120usize).prop_map(|(token, count)| vec![token; count]);
    (long, noise).prop_map(|(mut long, noise)| {
        long.extend(noise);
        long
    })
}

fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        3 => (0..2usize, tokens()).prop_map(|(root, tokens)| Operation::Insert { root, tokens }),
        4 => any::<usize>().prop_map(|leaf| Operation::Remove { leaf }),
        3 => (0..2usize, tokens()).prop_map(|(root, tokens)| Operation::Lookup { root, tokens }),
    ]
}

fn roots() -> [PrefixRoot; 2] {
    let identity = PrefixIdentity::new(b"model", "", BLOCK);
    [identity.salted(b"one"), identity.salted(b"two")]
}

struct Harness {
    tree: EntryTree,
    index: Box<dyn PrefixIndex>,
    hasher: BlockHasher,
    /// The twin: (root, all tokens up to a block's end).
    twin: BTreeMap<(usize, Vec<u32>), EntryId>,
}

impl Harness {
    fn new(kind: IndexKind, hasher: BlockHasher) -> Harness {
        let index: Box<dyn PrefixIndex> = match kind {
            IndexKind::Chain => Box::new(ChainIndex::new(hasher, BLOCK)),
            IndexKind::Radix => Box::new(RadixIndex::new(BLOCK)),
        };
        Harness { tree: EntryTree::default(), index, hasher, twin: BTreeMap::new() }
    }

    fn walk(&self, root: usize, tokens: &[u32]) -> Vec<EntryId> {
        let mut path = Vec::new();
        if let Some(root) = self.tree.root(&roots()[root]) {
            self.index.walk(&self.tree, root, tokens, &mut path);
        }
        path
    }

    fn twin_walk(&self, root: usize, tokens: &[u32]) -> Vec<EntryId> {
        let ends = (1..=tokens.len() / BLOCK).map(|blocks| tokens[..blocks * BLOCK].to_vec());
        ends.map_while(|prefix| self.twin.get(&(root, prefix)).copied()).collect()
    }

    fn insert(&mut self, root: usize, tokens: &[u32]) -> bool {
        let path = self.walk(root, tokens);
        let root_entry = self.tree.root_or_new(&roots()[root]);
        let mut parent = path.last().copied().unwrap_or(root_entry);
        for block in path.len()..tokens.len() / BLOCK {
            let own = &tokens[block * BLOCK..][..BLOCK];
            let entry = self.tree.add(parent, (self.hasher)(self.tree.hash(parent), own));
            if !self.index.insert(&self.tree, entry, own) {
                if let Some(root) = self.tree.remove_leaf(entry) {
                    self.index.remove_root(root);
                }
                return false;
            }
            self.twin.insert((root, tokens[..(block + 1) * BLOCK].to_vec()), entry);
            parent = entry;
        }
        self.tree.drop_empty_root(root_entry);
        true
    }

    fn remove(&mut self, leaf: usize) {
        let is_leaf = |(root, prefix): &&(usize, Vec<u32>)| {
            let behind = |(other, longer): &(usize, Vec<u32>)| {
                other == root && longer.len() > prefix.len() && longer.starts_with(prefix)
            };
            !self.twin.keys().any(behind)
        };
        let leaves: Vec<_> = self.twin.keys().filter(is_leaf).cloned().collect();
        if leaves.is_empty() {
            return;
        }
        let entry = self.twin.remove(&leaves[leaf % leaves.len()]).unwrap();
        self.index.remove(&self.tree, entry);
        if let Some(root) = self.tree.remove_leaf(entry) {
            self.index.remove_root(root);
        }
    }

    /// Every rest of every length, with every second entry refused.
    fn check_partial(&self, root: usize, tokens: &[u32]) {
        let path = self.twin_walk(root, tokens);
        let Some(root_entry) = self.tree.root(&roots()[root]) else { return };
        let parent = path.last().copied().unwrap_or(root_entry);
        let known = &tokens[..path.len() * BLOCK];
        let rest = &tokens[known.len()..];
        let rest = &rest[..rest.len().min(BLOCK - 1)];
        let behind = self.twin.iter().filter(|((other, prefix), _)| {
            *other == root && prefix.len() == known.len() + BLOCK && prefix.starts_with(known)
        });
        let accepts = |entry: EntryId| entry.index().is_multiple_of(2);
        let rows = |prefix: &Vec<u32>| {
            prefix[known.len()..].iter().zip(rest).take_while(|(one, other)| one == other).count()
        };
        let most = behind
            .filter(|(_, entry)| accepts(**entry))
            .map(|((_, prefix), _)| rows(prefix))
            .max()
            .filter(|rows| *rows > 0);
        let mut asked = 0;
        let found = self.index.partial(&self.tree, parent, rest, &mut |entry| {
            asked += 1;
            accepts(entry)
        });
        assert_eq!(found.map(|(_, rows)| rows), most, "{tokens:?}");
        assert!(asked <= reef_kv::prefix::index::PARTIAL_CANDIDATES);
        if let Some((entry, rows)) = found {
            let ((_, prefix), _) = self.twin.iter().find(|(_, known)| **known == entry).unwrap();
            assert!(accepts(entry) && prefix[known.len()..][..rows] == rest[..rows]);
        }
    }

    fn check(&self) {
        assert_eq!(self.tree.len(), self.twin.len());
        assert_eq!(self.tree.entries().len(), self.twin.len());
        for ((root, prefix), entry) in &self.twin {
            assert_eq!(self.walk(*root, prefix).last(), Some(entry));
            let mut own = Vec::new();
            self.index.tokens(&self.tree, *entry, &mut own);
            assert_eq!(own, prefix[prefix.len() - BLOCK..]);
            assert_eq!(self.tree.depth(*entry) * BLOCK, prefix.len());
        }
    }
}

fn run(kind: IndexKind, operations: &[Operation]) {
    let hasher = PrefixIdentity::new(b"model", "", BLOCK).hasher();
    let mut harness = Harness::new(kind, hasher);
    for operation in operations {
        match operation {
            Operation::Insert { root, tokens } => assert!(harness.insert(*root, tokens)),
            Operation::Remove { leaf } => harness.remove(*leaf),
            Operation::Lookup { root, tokens } => {
                assert_eq!(harness.walk(*root, tokens), harness.twin_walk(*root, tokens));
                harness.check_partial(*root, tokens);
            }
        }
        harness.check();
    }
    while !harness.twin.is_empty() {
        harness.remove(7);
        harness.check();
    }
    assert!(roots().iter().all(|root| harness.tree.root(root).is_none()));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 120, ..ProptestConfig::default() })]

    #[test]
    fn the_chain_is_its_twin(operations in proptest::collection::vec(operation(), 1..60)) {
        run(IndexKind::Chain, &operations);
    }

    #[test]
    fn the_radix_is_its_twin(operations in proptest::collection::vec(operation(), 1..60)) {
        run(IndexKind::Radix, &operations);
    }
}

/// Every block has the same hash.
fn collide(_: &BlockHash, _: &[u32]) -> BlockHash {
    BlockHash([7; 32])
}

/// The same tokens have the same hash wherever they stand.
#[test]
fn what_came_before_is_compared() {
    for kind in [IndexKind::Chain, IndexKind::Radix] {
        let mut harness = Harness::new(kind, |_, tokens| BlockHash([tokens[0] as u8; 32]));
        harness.insert(0, &[1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(harness.walk(0, &[5, 6, 7, 8]), [], "{kind:?}");
        assert_eq!(harness.walk(1, &[1, 2, 3, 4]), []);
        assert_eq!(harness.walk(0, &[1, 2, 3, 4, 5, 6, 7, 8]).len(), 2);
        harness.check();
    }
}

#[test]
fn a_forced_collision_is_a_miss_in_both() {
    for kind in [IndexKind::Chain, IndexKind::Radix] {
        let mut harness = Harness::new(kind, collide);
        let (first, second) = ([1, 2, 3, 4, 5, 6, 7, 8], [9, 2, 3, 4, 5, 6, 7, 8]);
        harness.insert(0, &first);
        assert_eq!(harness.walk(0, &first), harness.twin_walk(0, &first));
        // Other tokens, the same tokens behind other ones, and another tenant's: all of equal hash.
        assert_eq!(harness.walk(0, &second), []);
        assert_eq!(harness.walk(0, &[5, 6, 7, 8]), []);
        assert_eq!(harness.walk(1, &first), []);
        harness.insert(1, &first);
        harness.insert(0, &second);
        for root in 0..2 {
            for tokens in [&first, &second] {
                assert_eq!(harness.walk(root, tokens), harness.twin_walk(root, tokens), "{kind:?}");
            }
        }
        harness.check();
    }
}
