//! What the twin does with shared blocks: forks, names, attached prefixes, pins, sequences that leave.

use std::rc::Rc;

use reef_kv::page::SequenceView;
use reef_kv::*;

use crate::model::{Block, Shared, Twin};
use crate::{BLOCK, Simulation, WINDOW, see};

/// A cached block.
pub struct Name {
    pub block: CachedBlock,
    pub group: usize,
    pub first: usize,
    /// All tokens up to its end.
    pub prefix: Vec<u64>,
    pub twin: Shared,
    /// Whether anybody holds it, as far as the pool has told.
    pub heard_held: bool,
    /// The strictest contract that may use it, as far as the pool has told.
    pub heard_fidelity: Fidelity,
}

/// Pages that are read while their sequence goes on.
pub struct Pin {
    pages: PinnedPages,
    bytes: Vec<u8>,
    /// With the group of each.
    pub blocks: Vec<(usize, Shared)>,
}

/// A sequence that has left.
pub struct Away {
    request: u64,
    image: SequenceImage,
    bytes: Vec<u8>,
    twin: Twin,
    view: SequenceView,
}

/// All bytes of pinned pages, read in pieces of `piece` bytes.
fn read_all(pages: &PinnedPages, piece: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut buffer = vec![0; piece];
    loop {
        let count = pages.copy_to(bytes.len(), &mut buffer);
        bytes.extend_from_slice(&buffer[..count]);
        if count < piece {
            assert_eq!(bytes.len(), pages.bytes());
            return bytes;
        }
    }
}

/// A view without the places of its pages.
fn placeless(view: &SequenceView) -> SequenceView {
    let mut view = view.clone();
    let pages = view.groups.iter_mut().flat_map(|group| group.layers.iter_mut().flatten());
    pages.for_each(|page| page.offset = 0);
    view
}

impl Simulation {
    /// Sequences and pins that hold a block.
    pub fn holders(&self, block: &Shared) -> usize {
        let is_it = |other: &Shared| Rc::ptr_eq(block, other);
        let twins = self.sequences.iter().flat_map(|(_, twin)| twin.blocks.values());
        let pinned = self.pins.iter().flat_map(|pin| &pin.blocks).map(|(_, block)| block);
        twins.chain(pinned).filter(|other| is_it(other)).count()
    }

    pub fn fork(&mut self, index: usize) {
        let request = self.new_request();
        let (sequence, twin) = &self.sequences[index];
        let view = sequence.shared_view();
        let forked = sequence.fork(request);
        let shares_view = twin.values.len().div_ceil(BLOCK) == twin.next.div_ceil(BLOCK);
        assert_eq!(std::sync::Arc::ptr_eq(&view, &forked.shared_view()), shares_view);
        let mut twin = twin.clone();
        twin.trim();
        twin.blocks.values().for_each(|block| block.borrow_mut().was_shared = true);
        self.sequences.push((forked, twin));
    }

    /// Names every sealed block that can be named.
    pub fn publish(&mut self, index: usize) {
        let (sequence, twin) = &mut self.sequences[index];
        let groups = &self.pool.config().groups;
        for first in (0..twin.next).step_by(BLOCK) {
            let named = sequence.seal_identity(first);
            let at = |group| twin.blocks.get(&(group, first));
            let good = (0..groups.len()).all(|group| match at(group) {
                Some(block) => {
                    let block = block.borrow();
                    block.is_whole() && block.context < Fidelity::Evict
                }
                None => groups[group].window.is_some(),
            });
            assert_eq!(named.is_some(), good && first + BLOCK <= twin.next);
            for (group, name) in named.into_iter().flatten().enumerate() {
                assert_eq!(name.is_some(), at(group).is_some());
                let (Some(block), Some(held)) = (name, at(group)) else { continue };
                held.borrow_mut().cached = true;
                if self.names.iter().all(|known| known.block != block) {
                    let prefix = twin.values[..first + BLOCK].to_vec();
                    let (twin, heard_held) = (held.clone(), true);
                    let heard_fidelity = twin.borrow().fidelity();
                    self.names.push(Name {
                        block,
                        group,
                        first,
                        prefix,
                        twin,
                        heard_held,
                        heard_fidelity,
                    });
                }
            }
        }
    }

    /// A name of the block at `first` of `group` after these tokens that `contract` permits.
    fn named(&self, group: usize, prefix: &[u64], contract: Fidelity) -> Option<&Name> {
        self.names.iter().find(|name| {
            let fits = name.twin.borrow().fidelity() <= contract;
            name.group == group && name.prefix == prefix && fits
        })
    }

    /// A new sequence that begins with the longest part of a named prefix that is all there; or, for some
    /// `rows`, with a block less and then those rows of it.
    pub fn attach(&mut self, name: usize, contract: Fidelity, trained_context: usize, rows: usize) {
        let Some(name) = self.names.get(name % self.names.len().max(1)) else { return };
        let groups = &self.pool.config().groups;
        let needed = |group: usize, end: usize| {
            let first_attended = groups[group].window.map_or(0, |w| (end + 1).saturating_sub(w));
            let firsts = (0..end).step_by(BLOCK);
            firsts.filter(move |first| first + BLOCK > first_attended).map(move |f| (group, f))
        };
        let all = |end: usize| {
            let wanted = (0..groups.len()).flat_map(|group| needed(group, end));
            let found = wanted.map(|(group, first)| {
                let prefix = &name.prefix[..first + BLOCK];
                Some((group, first, self.named(group, prefix, contract)?))
            });
            found.collect::<Option<Vec<_>>>()
        };
        let ends = (1..name.prefix.len() / BLOCK + 1).rev().map(|blocks| blocks * BLOCK);
        let Some(end) = ends.into_iter().find(|end| all(*end).is_some()) else { return };
        let partial = (1..BLOCK).contains(&rows) && end > BLOCK;
        let Some(found) = all(if partial { end - BLOCK } else { end }) else { return };
        let mut twin = Twin::default();
        let mut blocks = Vec::new();
        for (group, first, name) in found {
            let guard = self.pool.attach(name.block).unwrap();
            blocks.push(AttachedBlock { first, group, guard });
            twin.blocks.insert((group, first), name.twin.clone());
            see("attached block", 1);
            see("attached lossy block", usize::from(!name.twin.borrow().is_f16()));
            twin.attended = twin.attended.max(name.twin.borrow().context);
            twin.next = twin.next.max(first + BLOCK);
        }
        twin.values = name.prefix[..twin.next].to_vec();
        blocks.reverse();
        let request = self.new_request();
        let max_tokens = None;
        let config = SequenceConfig { request, contract, priority: 0, trained_context, max_tokens };
        let mut sequence = Sequence::new(&self.pool, config);
        sequence.attach_prefix(blocks);
        self.sequences.push((sequence, twin));
        if partial {
            self.copy_rows(self.sequences.len() - 1, rows);
        }
    }

    /// Takes the first rows of a named block that follows the tokens of a sequence.
    pub fn copy_rows(&mut self, index: usize, rows: usize) {
        let (sequence, twin) = &self.sequences[index];
        let contract = sequence.config().contract;
        let follows = |name: &&Name| {
            let fits = name.twin.borrow().context <= contract;
            name.first == twin.next && name.prefix[..name.first] == twin.values[..twin.next] && fits
        };
        let Some(source) = self.names.iter().find(follows) else { return };
        let (prefix, groups) = (source.prefix.clone(), self.pool.config().groups.len());
        let names = (0..groups).map(|group| self.named(group, &prefix, contract));
        let names: Vec<Option<&Name>> = names.collect();
        let guards: Vec<Option<BlockGuard>> =
            names.iter().map(|name| self.pool.attach((*name)?.block)).collect();
        let usable = names.iter().all(|name| name.is_some_and(|n| n.twin.borrow().is_f16()))
            && twin.values.len() == twin.next
            && twin.next.is_multiple_of(BLOCK)
            && (1..BLOCK).contains(&rows);
        let contexts = names.iter().flatten().map(|name| name.twin.borrow().context);
        let context = contexts.max().unwrap_or(Fidelity::Exact);
        let in_flight = !self.fences.is_empty();
        let (sequence, twin) = &mut self.sequences[index];
        match sequence.copy_rows(&guards, rows) {
            Ok(()) if usable => {
                assert!(!in_flight);
                see("copied rows", 1);
                for (group, config) in self.pool.config().groups.iter().enumerate() {
                    twin.blocks.insert((group, twin.next), Block::open(config.layers));
                }
                twin.next += rows;
                twin.values = prefix[..twin.next].to_vec();
                twin.attended = twin.attended.max(context);
            }
            Ok(()) => {}
            Err(shortage) => assert!(usable && (!in_flight || shortage.free_bytes == 0)),
        }
    }

    /// The index lets go of a block.
    pub fn uncache(&mut self, name: usize) {
        if self.names.is_empty() {
            return;
        }
        let name = self.names.swap_remove(name % self.names.len());
        let idle = self.holders(&name.twin) == 0;
        name.twin.borrow_mut().cached = false;
        let bytes = self.pool.uncache(name.block);
        assert_eq!(bytes > 0, idle);
        see("given back from the index", usize::from(idle));
        assert_eq!(self.pool.uncache(name.block), 0);
        assert!(self.pool.attach(name.block).is_none());
    }

    /// The index lets go of all that nobody holds.
    pub fn evict_idle(&mut self) {
        let mut index = 0;
        while index < self.names.len() {
            if self.holders(&self.names[index].twin) == 0 {
                self.uncache(index);
            } else {
                index += 1;
            }
        }
    }

    pub fn pin(&mut self, index: usize) {
        let (sequence, twin) = &self.sequences[index];
        let (_, pages) = sequence.pin();
        let accepted = twin.blocks.iter().filter(|((_, first), _)| *first < twin.next);
        let blocks = accepted.map(|((group, _), block)| (*group, block.clone())).collect();
        let bytes = read_all(&pages, 1000);
        self.pins.push(Pin { pages, bytes, blocks });
    }

    pub fn unpin(&mut self, index: usize) {
        if !self.pins.is_empty() {
            let pin = self.pins.swap_remove(index % self.pins.len());
            assert_eq!(read_all(&pin.pages, 777), pin.bytes);
        }
    }

    pub fn swap_out(&mut self, index: usize) {
        let (sequence, twin) = &mut self.sequences[index];
        sequence.trim();
        twin.trim();
        let request = sequence.config().request;
        let (image, pages) = sequence.pin();
        let (bytes, view) = (read_all(&pages, 4096), placeless(sequence.view()));
        drop(pages);
        sequence.clear();
        let away = Away { request, image, bytes, twin: twin.apart(), view };
        *twin = Twin::default();
        self.away.push(away);
    }

    pub fn swap_in(&mut self, index: usize, piece: usize) {
        if self.away.is_empty() {
            return;
        }
        let index = index % self.away.len();
        let request = self.away[index].request;
        let found = self.sequences.iter().position(|(s, _)| s.config().request == request);
        let Some(place) = found else {
            self.away.swap_remove(index);
            return;
        };
        let (sequence, twin) = &mut self.sequences[place];
        // What was computed anew in the meantime goes.
        sequence.clear();
        *twin = Twin::default();
        let mut pages = match sequence.restore(&self.away[index].image) {
            Ok(pages) => pages,
            Err(shortage) => return assert!(shortage.needed_bytes > 0),
        };
        let away = self.away.swap_remove(index);
        assert_eq!((pages.bytes(), away.image.bytes()), (away.bytes.len(), away.bytes.len()));
        if piece.is_multiple_of(7) {
            // The bytes could not be read: everything is as before, and the sequence starts over.
            drop(pages);
            return;
        }
        let mut offset = 0;
        for bytes in away.bytes.chunks(piece) {
            assert_eq!(pages.copy_from(offset, bytes), bytes.len());
            offset += bytes.len();
        }
        assert_eq!(pages.copy_from(offset, &[1]), 0);
        sequence.adopt(away.image, pages);
        assert_eq!(placeless(sequence.view()), away.view);
        let lossy = away.twin.blocks.values().any(|block| !block.borrow().is_f16());
        see("came back", 1);
        see("came back with gaps", usize::from(!away.twin.dropped_in.is_empty()));
        see("came back lossy", usize::from(lossy));
        see("relative and back", usize::from(sequence.positions_are_relative()));
        *twin = away.twin;
    }

    /// What the pool tells of cached blocks, by events and when asked, is what the twin knows.
    pub fn compare_names(&mut self) {
        self.names.retain(|name| {
            let cached = name.twin.borrow().cached;
            assert_eq!(self.pool.cached(name.block).is_some(), cached);
            see("name lost by a drop", usize::from(!cached));
            cached
        });
        let mut changes = Vec::new();
        self.pool.drain_cache_changes(&mut changes);
        for change in changes {
            let (CacheChange::Idle(block)
            | CacheChange::Held(block)
            | CacheChange::Gone(block)
            | CacheChange::Lowered(block)) = change;
            let name = self.names.iter_mut().find(|name| name.block == block);
            assert_eq!(name.is_none(), matches!(change, CacheChange::Gone(_)));
            let Some(name) = name else { continue };
            if matches!(change, CacheChange::Lowered(_)) {
                let fidelity = name.twin.borrow().fidelity();
                assert!(name.heard_fidelity < fidelity);
                name.heard_fidelity = fidelity;
                see("cached block made lossier", 1);
            } else {
                name.heard_held = matches!(change, CacheChange::Held(_));
            }
        }
        for name in &self.names {
            let held = self.holders(&name.twin) > 0;
            assert_eq!(held, name.heard_held);
            assert_eq!(name.twin.borrow().fidelity(), name.heard_fidelity);
            let twin = name.twin.borrow();
            let state = CachedState { held, fidelity: twin.fidelity(), f16: twin.is_f16() };
            assert_eq!(self.pool.cached(name.block), Some(state));
        }
    }
}

/// Whether a later query may attend a token of the block at `first`.
pub fn attended(first: usize, next: usize) -> bool {
    (first..first + BLOCK).any(|position| position + WINDOW > next)
}
