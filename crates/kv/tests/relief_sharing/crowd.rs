//! Sequences that share blocks, at random, and what relief must leave as it was.

use std::collections::{BTreeMap, BTreeSet};

use reef_kv::page::PageFormat;
use reef_kv::relief::{MoveKind, ReliefOutcome};
use reef_kv::*;

use crate::world::*;
use crate::{BLOCK, WINDOW, see};

#[derive(Clone, Debug)]
pub enum Operation {
    Start {
        contract: Fidelity,
        priority: i32,
    },
    Extend {
        sequence: usize,
        tokens: usize,
    },
    Fork {
        sequence: usize,
    },
    /// Names the sealed blocks, and begins another sequence with some of them.
    Attach {
        sequence: usize,
        blocks: usize,
        contract: Fidelity,
        priority: i32,
    },
    /// Ends; what is named stays, idle.
    End {
        sequence: usize,
    },
    Pin {
        sequence: usize,
    },
}

/// (group, layer, first position) of a page, and what it holds: each page is filled with one byte.
type Bytes = BTreeMap<(usize, usize, usize), u8>;

fn bytes_of(sequence: &Sequence) -> Bytes {
    pages_of(sequence, |group, page| {
        let bytes = page_bytes(sequence.pool(), group, page);
        assert!(bytes.iter().all(|byte| *byte == bytes[0]), "torn page");
        bytes[0]
    })
}

fn pages_of<T>(
    sequence: &Sequence,
    value: impl Fn(usize, &page::PageRef) -> T,
) -> BTreeMap<(usize, usize, usize), T> {
    let mut pages = BTreeMap::new();
    for (group, view) in sequence.view().groups.iter().enumerate() {
        for (layer, row) in view.layers.iter().enumerate() {
            for page in row {
                pages.insert((group, layer, page.first as usize), value(group, page));
            }
        }
    }
    pages
}

fn places_of(sequence: &Sequence) -> BTreeMap<(usize, usize, usize), usize> {
    pages_of(sequence, |_, page| page.byte_offset())
}

pub fn formats_of(sequence: &Sequence) -> BTreeMap<(usize, usize, usize), PageFormat> {
    pages_of(sequence, |_, page| page.format)
}

/// By place of a page: (index of the sequence, page) of all that name it.
type Named = BTreeMap<usize, Vec<(usize, (usize, usize, usize))>>;

pub struct Crowd {
    pool: BlockPool,
    pub sequences: Vec<Sequence>,
    pub pins: Vec<PinnedPages>,
    next_request: u64,
    next_byte: u8,
}

impl Crowd {
    pub fn new(pool: BlockPool) -> Crowd {
        Crowd { pool, sequences: Vec::new(), pins: Vec::new(), next_request: 0, next_byte: 1 }
    }

    fn start(&mut self, contract: Fidelity, priority: i32) -> usize {
        let config = SequenceConfig { priority, ..request(self.next_request, contract) };
        self.next_request += 1;
        self.sequences.push(Sequence::new(&self.pool, config));
        self.sequences.len() - 1
    }

    /// Grows and fills each new page with a byte of its own; what is copied on write keeps its bytes.
    pub fn extend(&mut self, index: usize, tokens: usize) -> bool {
        let sequence = &mut self.sequences[index];
        let old: BTreeSet<(usize, usize, usize)> = places_of(sequence).into_keys().collect();
        if sequence.grow(tokens).is_err() {
            return false;
        }
        let pages = pages_of(sequence, |_, page| *page);
        for ((group, ..), page) in pages.iter().filter(|(at, _)| !old.contains(at)) {
            let bytes = self.pool.config().groups[*group].shape.page_bytes(PageFormat::F16);
            write_page(&self.pool, page, &vec![self.next_byte; bytes]);
            self.next_byte = self.next_byte % 250 + 1;
        }
        sequence.commit(tokens);
        true
    }

    fn attach(&mut self, index: usize, blocks: usize, contract: Fidelity, priority: i32) {
        let firsts = (0..blocks).map(|block| block * BLOCK);
        let sequence = &mut self.sequences[index];
        let mut names = Vec::new();
        for first in firsts {
            let Some(found) = sequence.seal_identity(first) else { break };
            let fits = |name: &CachedBlock| {
                self.pool.cached(*name).is_some_and(|state| state.fidelity <= contract)
            };
            if !found.iter().flatten().all(fits) {
                break;
            }
            names.push((first, found));
        }
        // A window group needs what the next token attends.
        let end = names.len() * BLOCK;
        let whole = names.iter().all(|(first, names)| {
            names[0].is_some() || first + BLOCK <= (end + 1).saturating_sub(WINDOW)
        });
        if names.is_empty() || !whole {
            return;
        }
        let mut attached = Vec::new();
        for (first, names) in names {
            for (group, name) in names.into_iter().enumerate() {
                let guard = name.map(|name| self.pool.attach(name).unwrap());
                attached.extend(guard.map(|guard| AttachedBlock { first, group, guard }));
            }
        }
        let index = self.start(contract, priority);
        self.sequences[index].attach_prefix(attached);
    }

    pub fn run(&mut self, operation: Operation) {
        let count = self.sequences.len();
        match operation {
            Operation::Start { contract, priority } => {
                self.start(contract, priority);
            }
            _ if count == 0 => {}
            Operation::Extend { sequence, tokens } => {
                self.extend(sequence % count, tokens);
            }
            Operation::Fork { sequence } => {
                let forked = self.sequences[sequence % count].fork(self.next_request);
                self.next_request += 1;
                self.sequences.push(forked);
            }
            Operation::Attach { sequence, blocks, contract, priority } => {
                self.attach(sequence % count, blocks, contract, priority);
            }
            Operation::End { sequence } => drop(self.sequences.swap_remove(sequence % count)),
            Operation::Pin { sequence } => {
                self.pins.push(self.sequences[sequence % count].pin().1);
            }
        }
    }

    /// Where each page is named from: (sequence, page).
    fn named_from(&self) -> Named {
        let mut named = Named::new();
        for (index, sequence) in self.sequences.iter().enumerate() {
            for (at, place) in places_of(sequence) {
                named.entry(place).or_default().push((index, at));
            }
        }
        named
    }

    pub fn demands(&self, tokens: usize, of: impl Fn(&Sequence) -> bool) -> Vec<Demand<'_>> {
        let wanted = self.sequences.iter().filter(|sequence| of(sequence));
        wanted.map(|sequence| demand(sequence, tokens, tokens)).collect()
    }

    fn apply(&mut self, plan: &ReliefPlan) -> ReliefOutcome {
        let mut all: Vec<&mut Sequence> = self.sequences.iter_mut().collect();
        apply_relief(&self.pool, &mut all, plan, 7, &mut keep_stamp).unwrap()
    }

    fn harm(&self) -> f64 {
        let entries = self.sequences.iter().flat_map(|sequence| sequence.ledger().entries());
        entries.map(|entry| entry.harm).sum()
    }

    fn pinned_bytes(&self) -> Vec<Vec<u8>> {
        let read = |pages: &PinnedPages| {
            let mut bytes = vec![0; pages.bytes()];
            pages.copy_to(0, &mut bytes);
            bytes
        };
        self.pins.iter().map(read).collect()
    }

    /// Every holder of a block of `plan` permits what is done to it; nobody outside holds it.
    fn permitted(&self, plan: &ReliefPlan) {
        let named = self.named_from();
        let ladder = &self.pool.config().ladder;
        for planned in &plan.moves {
            let is_it = |sequence: &&Sequence| sequence.config().request == planned.request;
            let sequence = self.sequences.iter().find(is_it).unwrap();
            for ((group, _, first), place) in places_of(sequence) {
                let meant = match planned.kind {
                    MoveKind::Encode { group: wanted, .. } => wanted == group,
                    MoveKind::Drop(_) => self.pool.config().groups[group].window.is_none(),
                };
                if !meant || first != planned.first {
                    continue;
                }
                let holders = &named[&place];
                for (index, _) in holders {
                    let holder = self.sequences[*index].config();
                    assert!(ladder.permits(holder.contract, planned.rung()), "{planned:?}");
                    // It goes by the holder that gives way last.
                    assert!(holder.priority <= sequence.config().priority);
                }
                let encodes = matches!(planned.kind, MoveKind::Encode { .. });
                assert!(holders.len() == 1 || encodes);
                see("block dropped", usize::from(!encodes));
                see("shared block re-encoded", usize::from(holders.len() > 1));
            }
        }
    }

    /// Carries `plan` out and compares all that must be as before, or as planned.
    pub fn carry_out(&mut self, plan: &ReliefPlan) {
        self.permitted(plan);
        let bytes: Vec<Bytes> = self.sequences.iter().map(bytes_of).collect();
        let (named, used, harm) =
            (self.named_from(), self.pool.accounts().used_bytes(), self.harm());
        let pinned = self.pinned_bytes();
        let outcome = self.apply(plan);
        assert!(self.pinned_bytes() == pinned, "pinned pages changed or moved");
        // Pins alone may keep a plan from what it counted on.
        assert_eq!(outcome.unfinished_blocks, 0);
        // What several share is given back once.
        assert_eq!(outcome.gained_bytes, plan.gained_bytes());
        assert_eq!(used - self.pool.accounts().used_bytes(), outcome.gained_bytes);
        assert!((self.harm() - harm - plan.harm()).abs() < 1e-9);
        let all: Vec<&Sequence> = self.sequences.iter().collect();
        assert_eq!(check_invariants(&self.pool, &all), []);
        for (sequence, before) in self.sequences.iter().zip(&bytes) {
            for (at, byte) in bytes_of(sequence) {
                assert_eq!(before[&at], byte, "foreign bytes at {at:?}");
            }
        }
        // Who shared a page before shares it now.
        let places: Vec<_> = self.sequences.iter().map(places_of).collect();
        for (place, sharers) in &named {
            let now: BTreeSet<Option<&usize>> =
                sharers.iter().map(|(index, at)| places[*index].get(at)).collect();
            assert_eq!(now.len(), 1);
            let contract = |(index, _): &(usize, _)| self.sequences[*index].config().contract;
            let exact = sharers.iter().any(|sharer| contract(sharer) == Fidelity::Exact);
            let loose = sharers.iter().any(|sharer| contract(sharer) > Fidelity::Exact);
            let stays = now.contains(&Some(place));
            see("block shared with exact stayed", usize::from(exact && loose));
            see("shared page moved", usize::from(exact && sharers.len() > 1 && !stays));
        }
    }
}

/// Bytes of the pages that some sequences hold, each once.
pub fn held_bytes<'a>(sequences: impl Iterator<Item = &'a Sequence>) -> usize {
    let mut pages = BTreeMap::new();
    for sequence in sequences {
        let groups = &sequence.pool().config().groups;
        let size = |group: usize, page: &page::PageRef| {
            (page.byte_offset(), groups[group].shape.page_bytes(page.format))
        };
        pages.extend(pages_of(sequence, size).into_values());
    }
    pages.values().sum()
}
