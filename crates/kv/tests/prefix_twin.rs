//! Random traces through a prefix cache, a real pool and sequences, against a naive twin: a map from whole
//! prefixes to copies. Every page says whose tokens it was computed from.

mod world;

use std::collections::{BTreeMap, HashMap};

use proptest::prelude::*;
use reef_kv::page::{PageFormat, PageShape};
use reef_kv::policy::Sinks;
use reef_kv::prefix::*;
use reef_kv::*;
use world::{request, write_page};

const BLOCK: usize = 16;
const WINDOW: usize = 24;

/// One computation of one block in one group.
#[derive(Clone, Debug)]
struct Copy {
    root: usize,
    /// All tokens up to the block's end.
    prefix: Vec<u32>,
    context: Fidelity,
    formats: Vec<PageFormat>,
}

impl Copy {
    fn usable(&self, contract: Fidelity) -> bool {
        contract >= self.context
            && self.formats.iter().all(|format| contract.permits_format(*format))
    }

    fn is_f16(&self) -> bool {
        self.formats.iter().all(|format| *format == PageFormat::F16)
    }

    fn fidelity(&self) -> Fidelity {
        Fidelity::ALL.into_iter().find(|contract| self.usable(*contract)).unwrap()
    }

    fn worth(&self) -> (Fidelity, bool) {
        (self.fidelity(), !self.is_f16())
    }
}

struct Run {
    sequence: Sequence,
    root: usize,
    tokens: Vec<u32>,
    published: usize,
}

type Key = (usize, Vec<u32>);

struct World {
    pool: BlockPool,
    cache: PrefixCache,
    roots: [PrefixRoot; 2],
    hasher: BlockHasher,
    copies: Vec<Copy>,
    /// The twin: copy by group.
    twin: BTreeMap<Key, Vec<Option<usize>>>,
    /// What the events say: parent, tokens, and whether every group is there.
    heard: HashMap<BlockHash, (BlockHash, Vec<u32>, bool, Fidelity)>,
    runs: Vec<Run>,
    held: Vec<PrefixMatch>,
    fences: Vec<StepFence>,
    requests: u64,
    now_us: u64,
    /// What the trace met: better copies, worse ones, rows copied, entries that lost their window's block.
    met: [usize; 4],
}

/// Pseudo-random choices from one number.
struct Choices(u64);

impl Choices {
    fn below(&mut self, limit: usize) -> usize {
        // SplitMix64
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % limit as u64) as usize
    }

    /// Tokens of few kinds: texts share beginnings, part within blocks and go on long.
    fn tokens(&mut self) -> Vec<u32> {
        let mut tokens = vec![self.below(2) as u32; self.below(100)];
        for _ in 0..self.below(4) {
            let part = vec![self.below(3) as u32; self.below(40)];
            tokens.extend(part);
        }
        tokens.push(9);
        tokens
    }
}

impl World {
    fn new(kind: IndexKind, hybrid: bool) -> World {
        let shape = PageShape { kv_heads: 1, head_dim: 16, block_size: BLOCK };
        let group = |window| GroupConfig { layers: 2, shape, window, pinned: vec![] };
        let mut groups = vec![group(None)];
        groups.extend(hybrid.then(|| group(Some(WINDOW))));
        let budget_bytes = groups.len() * (160 << 10);
        let ladder = Ladder::default();
        let config = PoolConfig { groups, budget_bytes, prefault: false, ladder };
        let pool = BlockPool::new(config).unwrap();
        let identity = PrefixIdentity::new(b"model", "", BLOCK);
        let roots = [identity.salted(b"one"), identity.salted(b"two")];
        let hasher = identity.hasher();
        let cache = PrefixCache::new(&pool, identity, kind);
        World {
            pool,
            cache,
            roots,
            hasher,
            copies: Vec::new(),
            twin: BTreeMap::new(),
            heard: HashMap::new(),
            runs: Vec::new(),
            held: Vec::new(),
            fences: Vec::new(),
            requests: 0,
            now_us: 0,
            met: [0; 4],
        }
    }

    fn groups(&self) -> usize {
        self.pool.config().groups.len()
    }

    fn hashes(&self, (root, prefix): &Key) -> (BlockHash, BlockHash) {
        let (mut parent, mut hash) = (BlockHash([0; 32]), BlockHash(self.roots[*root].0));
        for block in prefix.chunks(BLOCK) {
            (parent, hash) = (hash, (self.hasher)(&hash, block));
        }
        (parent, hash)
    }

    /// The copy that a page of a view holds.
    fn copy_at(
        &self,
        sequence: &Sequence,
        group: usize,
        layer: usize,
        first: usize,
    ) -> Option<usize> {
        let pages = &sequence.view().groups[group].layers[layer];
        let page = pages.iter().find(|page| page.first as usize == first)?;
        let bytes = world::page_bytes(&self.pool, group, page);
        let copy = u32::from_le_bytes(bytes[..4].try_into().unwrap()) as usize;
        assert!(bytes.chunks(4).all(|four| four == &bytes[..4]), "a page of two copies");
        Some(copy)
    }

    /// Hears the events: what has gone leaves the twin.
    fn listen(&mut self) {
        let events: Vec<PrefixEvent> = self.cache.events().collect();
        for event in events {
            match event {
                PrefixEvent::Cleared => {
                    self.heard.clear();
                }
                PrefixEvent::Stored { hash, parent, tokens, fidelity, whole } => {
                    self.heard.insert(hash, (parent, tokens, whole, fidelity));
                    let keys = self.twin.keys().find(|key| self.hashes(key).1 == hash).cloned();
                    let key = keys.expect("stored what the twin does not have");
                    let names = self.twin.get_mut(&key).unwrap();
                    if !whole {
                        self.met[3] += 1;
                        names[1..].fill(None);
                    }
                    let copies = names.iter().flatten().map(|copy| self.copies[*copy].fidelity());
                    assert_eq!(Some(fidelity), copies.max());
                }
                PrefixEvent::Removed { hash } => {
                    assert!(self.heard.remove(&hash).is_some(), "removed twice");
                    let key = self.twin.keys().find(|key| self.hashes(key).1 == hash).cloned();
                    self.twin.remove(&key.unwrap());
                }
            }
        }
    }

    fn path(&self, root: usize, tokens: &[u32]) -> Vec<&Vec<Option<usize>>> {
        let ends = (1..=tokens.len() / BLOCK).map(|end| (root, tokens[..end * BLOCK].to_vec()));
        ends.map_while(|key| self.twin.get(&key)).collect()
    }

    /// (tokens of full blocks, rows of a partly agreeing one) that a lookup must find.
    fn expected_hit(&self, root: usize, tokens: &[u32], contract: Fidelity) -> (usize, usize) {
        let tokens = &tokens[..tokens.len() - 1];
        let path = self.path(root, tokens);
        let usable =
            |copy: Option<usize>| copy.is_some_and(|copy| self.copies[copy].usable(contract));
        let valid = |end: &usize| {
            (0..*end).all(|block| {
                let attended = |group: usize| match self.pool.config().groups[group].window {
                    None => true,
                    Some(window) => (block + 1) * BLOCK > (end * BLOCK + 1).saturating_sub(window),
                };
                (0..self.groups()).all(|group| !attended(group) || usable(path[block][group]))
            })
        };
        let full = (0..=path.len()).rev().find(valid).unwrap() * BLOCK;
        let rest = &tokens[full..][..(tokens.len() - full).min(BLOCK - 1)];
        let behind = self.twin.iter().filter(|((other, prefix), names)| {
            *other == root
                && prefix.len() == full + BLOCK
                && prefix[..full] == tokens[..full]
                && names.iter().all(|name| usable(*name) && self.copies[name.unwrap()].is_f16())
        });
        let agreement = |prefix: &[u32]| {
            prefix[full..].iter().zip(rest).take_while(|(one, other)| one == other).count()
        };
        (full, behind.map(|((_, prefix), _)| agreement(prefix)).max().unwrap_or(0))
    }

    fn lookup(&mut self, root: usize, tokens: &[u32], contract: Fidelity) -> PrefixMatch {
        self.listen();
        let expected = self.expected_hit(root, tokens, contract);
        let found = self.cache.lookup(&self.roots[root], tokens, contract);
        let rows = found.partial.as_ref().map_or(0, |partial| partial.rows);
        assert_eq!((found.full_tokens(), rows), expected);
        self.met[2] += usize::from(rows > 0);
        found
    }

    fn start(&mut self, root: usize, tokens: Vec<u32>, contract: Fidelity) {
        let found = self.lookup(root, &tokens, contract);
        self.requests += 1;
        let mut sequence = Sequence::new(&self.pool, request(self.requests, contract));
        sequence.attach_prefix(found.attached);
        if let Some(partial) = found.partial {
            // A shortage only means that these rows are computed.
            let _ = sequence.copy_rows(&partial.blocks, partial.rows);
        }
        let position = sequence.next_position();
        for group in 0..self.groups() {
            for layer in 0..2 {
                for page in &sequence.view().groups[group].layers[layer] {
                    let first = page.first as usize;
                    let copy = self.copy_at(&sequence, group, layer, first).unwrap();
                    let copy = &self.copies[copy];
                    let end = position.min(first + BLOCK);
                    assert!(
                        copy.root == root && copy.prefix[..end] == tokens[..end],
                        "foreign tokens"
                    );
                    assert!(copy.usable(contract) && contract.permits_format(page.format));
                    assert!(copy.context <= sequence.fidelity());
                }
            }
        }
        let published = sequence.next_position() / BLOCK * BLOCK * (self.requests as usize % 2);
        self.runs.push(Run { sequence, root, tokens, published });
    }

    fn compute(&mut self, run: usize, tokens: usize) {
        let Run { sequence, root, tokens: text, .. } = &mut self.runs[run];
        let tokens = tokens.min(text.len() - sequence.next_position());
        if sequence.grow(tokens).is_err() {
            self.cache.evict(&mut || sequence.grow(tokens).is_ok());
            if sequence.grow(tokens).is_err() {
                return;
            }
        }
        let new = self.copies.len();
        let (from, end) = (sequence.next_position(), sequence.next_position() + tokens);
        for first in (from / BLOCK * BLOCK..end).step_by(BLOCK).filter(|first| first + BLOCK <= end)
        {
            for (group, view) in sequence.view().groups.iter().enumerate() {
                let copy = self.copies.len() as u32;
                let prefix = text[..first + BLOCK].to_vec();
                let formats = vec![PageFormat::F16; 2];
                let context = Fidelity::Exact;
                self.copies.push(Copy { root: *root, prefix, context, formats });
                for layer in &view.layers {
                    let page = layer.iter().find(|page| page.first as usize == first).unwrap();
                    let bytes = self.pool.config().groups[group].shape.page_bytes(page.format);
                    write_page(&self.pool, page, &copy.to_le_bytes().repeat(bytes / 4));
                }
            }
        }
        sequence.commit(tokens);
        // What its computation attended is the sequence's to say; other tests see to that.
        self.copies[new..].iter_mut().for_each(|copy| copy.context = sequence.fidelity());
    }

    fn publish(&mut self, run: usize) {
        self.listen();
        let Run { sequence, root, tokens, published } = &self.runs[run];
        let sealed = sequence.next_position() / BLOCK;
        let start = (published / BLOCK).min(self.path(*root, &tokens[..sealed * BLOCK]).len());
        let mut added = Vec::new();
        for block in (start..sealed).filter(|_| sealed * BLOCK > *published) {
            let names = (0..self.groups()).map(|group| {
                let layers =
                    (0..2).map(|layer| self.copy_at(sequence, group, layer, block * BLOCK));
                let layers: Vec<Option<usize>> = layers.collect();
                layers[0].filter(|_| layers[1].is_some())
            });
            let names: Vec<Option<usize>> = names.collect();
            let tainted = |copy: &usize| self.copies[*copy].context == Fidelity::Evict;
            if names[0].is_none() || names.iter().flatten().any(tainted) {
                break;
            }
            added.push(((*root, tokens[..(block + 1) * BLOCK].to_vec()), names));
        }
        for (key, names) in added {
            let known = self.twin.entry(key).or_insert_with(|| vec![None; names.len()]);
            for (known, name) in known.iter_mut().zip(names) {
                let worth = |copy: usize| self.copies[copy].worth();
                let Some(name) = name else { continue };
                if let Some(known) = known.filter(|known| worth(name) != worth(*known)) {
                    self.met[usize::from(worth(name) > worth(known))] += 1;
                }
                if known.is_none_or(|known| worth(name) < worth(known)) {
                    *known = Some(name);
                }
            }
        }
        let Run { sequence, root, tokens, published } = &mut self.runs[run];
        self.cache.publish(&self.roots[*root], sequence, tokens, published);
    }

    fn relieve(&mut self, run: usize, drop: bool, format: PageFormat, tokens: usize) {
        if !self.fences.is_empty() {
            return;
        }
        let sequence = &mut self.runs[run].sequence;
        let contract = sequence.config().contract;
        let plan = match drop {
            true if contract == Fidelity::Evict => {
                plan_token_budget(sequence, &Sinks { tail_tokens: BLOCK }, tokens, 1)
            }
            true => return,
            false if contract.permits_format(format) => plan_format_at_seal(sequence, format, 0, 0),
            false => return,
        };
        let pool = self.pool.clone();
        let mut encode = |jobs: &mut [EncodeJob<'_>]| {
            for job in jobs {
                let copy = job.source[..4].to_vec();
                job.target.chunks_mut(4).for_each(|four| four.copy_from_slice(&copy[..four.len()]));
            }
        };
        // A shortage of room to encode in leaves the rest as it is.
        let _ = apply_relief(&pool, &mut [sequence], &plan, 0, &mut encode);
        let sequence = &self.runs[run].sequence;
        for (group, view) in sequence.view().groups.iter().enumerate() {
            for (layer, pages) in view.layers.iter().enumerate() {
                for page in pages
                    .iter()
                    .filter(|page| page.first as usize + BLOCK <= sequence.next_position())
                {
                    let copy = self.copy_at(sequence, group, layer, page.first as usize).unwrap();
                    self.copies[copy].formats[layer] = page.format;
                }
            }
        }
    }

    fn fork(&mut self, run: usize, mut tail: Vec<u32>) {
        self.requests += 1;
        let Run { sequence, root, tokens, published } = &self.runs[run];
        let forked = sequence.fork(self.requests);
        let mut tokens = tokens[..sequence.next_position()].to_vec();
        tokens.append(&mut tail);
        let (root, published) = (*root, *published);
        self.runs.push(Run { sequence: forked, root, tokens, published });
    }

    fn step(&mut self, choices: &mut Choices) {
        let run = choices.below(self.runs.len().max(1));
        let any = !self.runs.is_empty();
        let contract = Fidelity::ALL[choices.below(4)];
        let format = [PageFormat::Int8, PageFormat::K8V4, PageFormat::Int4][choices.below(3)];
        let root = usize::from(choices.below(4) == 0);
        match choices.below(32) {
            0..4 => self.start(root, choices.tokens(), contract),
            4..11 if any => self.compute(run, 1 + choices.below(60)),
            11..15 if any => self.publish(run),
            15..19 if any => self.relieve(run, false, format, 0),
            19 if any => self.relieve(run, true, format, choices.below(80)),
            20 if any => self.fork(run, choices.tokens()),
            21..24 if any => drop(self.runs.swap_remove(run)),
            24 => {
                // Half of them for something that is known.
                let known = choices.below(2 * self.twin.len() + 1);
                let known = self.twin.keys().nth(known).cloned();
                let (root, mut tokens) = known.unwrap_or_else(|| (root, choices.tokens()));
                tokens.push(9);
                let found = self.lookup(root, &tokens, contract);
                self.held.push(found);
            }
            25 if !self.held.is_empty() => {
                drop(self.held.swap_remove(choices.below(self.held.len())))
            }
            26 => {
                let mut blocks = choices.below(12);
                self.cache.evict(&mut || {
                    blocks == 0 || {
                        blocks -= 1;
                        false
                    }
                });
            }
            27 => self.cache.protect(&self.roots[root], &choices.tokens()),
            28 => {
                let until_us = self.now_us + choices.below(20) as u64;
                self.cache.pin(&self.roots[root], &choices.tokens(), until_us);
            }
            29 => {
                self.now_us += choices.below(8) as u64;
                self.cache.expire(self.now_us);
            }
            30 => match self.fences.len() {
                0..2 => self.fences.push(self.pool.begin_step()),
                _ => self.fences.clear(),
            },
            _ if choices.below(32) == 0 => self.cache.clear(),
            31 => self.compute_again(),
            _ => {}
        }
        // Before relief makes them worth less.
        self.listen();
    }

    /// Computes exactly what is known in a lossy copy only.
    fn compute_again(&mut self) {
        let lossy = |copy: &Option<usize>| copy.is_some_and(|copy| self.copies[copy].worth().1);
        let found = self.twin.iter().find(|(_, names)| names.iter().any(lossy));
        let Some(((root, tokens), _)) = found else { return };
        let (root, tokens) = (*root, [&tokens[..], &[9]].concat());
        self.start(root, tokens, Fidelity::Exact);
        let run = self.runs.len() - 1;
        self.compute(run, usize::MAX);
        self.publish(run);
    }

    fn check(&mut self) {
        assert_eq!(self.cache.inconsistency(), None);
        let sequences: Vec<&Sequence> = self.runs.iter().map(|run| &run.sequence).collect();
        let violations = check_invariants(&self.pool, &sequences);
        assert!(violations.is_empty(), "{}", violations[0]);
        self.listen();
        let model: HashMap<_, _> = self
            .twin
            .iter()
            .map(|(key, names)| {
                let (parent, hash) = self.hashes(key);
                let own = key.1[key.1.len() - BLOCK..].to_vec();
                let copies = names.iter().flatten().map(|copy| self.copies[*copy].fidelity());
                let fidelity = copies.max().unwrap_or(Fidelity::Exact);
                (hash, (parent, own, names.iter().all(Option::is_some), fidelity))
            })
            .collect();
        assert_eq!(self.heard, model);
        assert_eq!(self.cache.stats().entries, self.twin.len());
    }

    fn end(mut self) {
        self.fences.clear();
        self.runs.clear();
        self.held.clear();
        self.check();
        let accounts = self.pool.accounts();
        assert_eq!(accounts.used_bytes(), accounts.cached_bytes);
        assert_eq!(self.cache.evict(&mut || false), accounts.used_bytes());
        self.check();
        assert_eq!((self.pool.accounts().used_bytes(), self.twin.len()), (0, 0));
    }
}

fn kinds() -> impl Iterator<Item = (IndexKind, bool)> {
    let kinds = [IndexKind::Chain, IndexKind::Radix].into_iter();
    kinds.flat_map(|kind| [(kind, false), (kind, true)])
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    #[test]
    fn the_cache_is_its_twin(steps in proptest::collection::vec(any::<u64>(), 1..250)) {
        for (kind, hybrid) in kinds() {
            let mut world = World::new(kind, hybrid);
            for step in &steps {
                world.step(&mut Choices(*step));
                world.check();
            }
            world.end();
        }
    }
}

/// J118: the events replayed give the cache, after many operations.
#[test]
fn events_replayed_are_the_cache() {
    for (kind, hybrid) in kinds() {
        let mut world = World::new(kind, hybrid);
        let mut choices = Choices(118);
        let mut most = 0;
        for step in 0..10_000 {
            world.step(&mut choices);
            if step % 20 == 0 {
                world.check();
            }
            most = most.max(world.twin.len());
            // Copies that nobody can meet any more would only slow the test down.
            if world.runs.len() > 12 {
                world.runs.drain(..6);
            }
        }
        let stats = world.cache.stats();
        let [better, worse, rows, windows] = world.met;
        assert!(better > 20 && worse > 3 && rows > 200, "{:?}", world.met);
        assert!(!hybrid || windows > 200, "{:?}", world.met);
        assert!(most > 20 && stats.hit_tokens > 10_000 && stats.evicted_blocks > 500, "{stats:?}");
        world.end();
    }
}
