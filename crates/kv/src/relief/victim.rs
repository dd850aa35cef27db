//! The blocks that may give way, as a plan sees them: where they lie, what they hold, what they would hold.

use std::ops::Range;

use super::Demand;
use super::convert::Conversions;
use super::holders::Holders;
use crate::account::ByFormat;
use crate::block::BlockRecord;
use crate::config::TAIL_TOKENS;
use crate::harm::{HarmTable, zone_weight};
use crate::ladder::Fidelity;
use crate::page::PageFormat;
use crate::pool::{BlockPool, State};
use crate::table::{Entry, Sequence};

/// Where a block lies in its sequence; a later zone gives way later.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Zone {
    Middle,
    Tail,
    Sinks,
}

impl Zone {
    pub(super) const COUNT: usize = 3;
}

/// A sealed block of one KV group all of whose holders are at hand, and what is planned for it.
#[derive(Clone, Debug)]
pub(super) struct Victim {
    /// Index of its record.
    pub block: u32,
    /// Index of its sequence in the demands; of several, the first of the highest priority.
    pub sequence: usize,
    pub group: usize,
    /// Original position of its first token.
    pub first: usize,
    /// Of several holders', the one that gives way last.
    pub zone: Zone,
    /// The strictest contract of its holders.
    pub contract: Fidelity,
    /// Whether nobody said how long any of its holders will get.
    pub unknown: bool,
    /// Weight of one page in the expected harm, summed over the holders.
    pub weight: f64,
    /// Pages that may be re-encoded, by the format they have now: neither pinned nor refused.
    pub pages: ByFormat<u16>,
    /// What is planned: pages whose format can become it will.
    pub target: Option<PageFormat>,
    /// It is planned to be dropped.
    pub dropped: bool,
}

/// The zone of the block at `first` in group `group` of `sequence`.
pub(super) fn zone_of(sequence: &Sequence, group: usize, first: usize) -> Zone {
    let config = sequence.pool().config();
    let tail_start = sequence.next_position().saturating_sub(TAIL_TOKENS);
    if first == 0 && config.groups[group].window.is_none() {
        Zone::Sinks
    } else if first + config.block_size() > tail_start {
        Zone::Tail
    } else {
        Zone::Middle
    }
}

/// Pages of a block by format, pinned layers and refused formats left out.
fn pages_of(record: &BlockRecord, pinned: &[usize], entry: &Entry) -> ByFormat<u16> {
    let mut pages = record.pages_by_format();
    for page in pinned.iter().filter_map(|&layer| record.pages[layer]) {
        pages[page.format] -= 1;
    }
    ByFormat::from_fn(|format| if entry.refused[format] { 0 } else { pages[format] })
}

/// What the pages of a sequence weigh in the harm of its moves.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shares {
    /// Pages kept x weight of their zone.
    weight: f64,
    /// Pages of full-attention layers between the first block and the tail.
    middle_pages: f64,
}

impl Shares {
    pub(super) fn new(sequence: &Sequence) -> Shares {
        let mut shares = Shares { weight: 0.0, middle_pages: 0.0 };
        for (group, table) in sequence.tables.iter().enumerate() {
            let full = sequence.pool().config().groups[group].window.is_none();
            for entry in table {
                let zone = zone_of(sequence, group, entry.first);
                let pages = f64::from(entry.held_layers);
                shares.weight += pages * zone_weight(zone);
                shares.middle_pages += if full && zone == Zone::Middle { pages } else { 0.0 };
            }
        }
        shares
    }

    /// Weight of a page in `zone` in the harm of its re-encode.
    pub(super) fn page_weight(&self, zone: Zone) -> f64 {
        zone_weight(zone) / self.weight.max(1.0)
    }

    /// Expected harm of dropping a page in `zone` that is in `format`, in nats per later token.
    fn drop_harm(&self, table: &HarmTable, zone: Zone, format: PageFormat) -> f64 {
        let rise = table.evict_nats - table.format_nats[format];
        let weight = zone_weight(zone) / zone_weight(Zone::Middle);
        rise.max(0.0) * weight / self.middle_pages.max(1.0)
    }

    /// Expected harm of dropping a page of the block at `first` in `group`.
    pub(super) fn page_drop_harm(
        &self,
        sequence: &Sequence,
        (group, first): (usize, usize),
        format: PageFormat,
    ) -> f64 {
        let table = &sequence.pool().config().ladder.harm;
        self.drop_harm(table, zone_of(sequence, group, first), format)
    }
}

/// The victims of all demands, found by sequence, group and position.
pub(super) struct Victims {
    /// Sequence by sequence, group by group, oldest first; behind them those that several hold.
    pub all: Vec<Victim>,
    /// Where in `all` the victims are that a sequence alone holds.
    of_sequence: Vec<Range<usize>>,
    pub shares: Vec<Shares>,
    pub conversions: Conversions,
}

impl Victims {
    pub(super) fn new(demands: &[Demand<'_>], state: &State, holders: &Holders) -> Victims {
        let pool = demands.first().map(|demand| demand.sequence.pool());
        let blocks: usize =
            demands.iter().flat_map(|demand| &demand.sequence.tables).map(Vec::len).sum();
        let mut victims = Victims {
            all: Vec::with_capacity(blocks),
            of_sequence: Vec::with_capacity(demands.len()),
            shares: demands.iter().map(|demand| Shares::new(demand.sequence)).collect(),
            conversions: pool.map(Conversions::new).unwrap_or_default(),
        };
        let mut shared = SharedVictims::new(holders);
        for (index, demand) in demands.iter().enumerate() {
            let start = victims.all.len();
            for (group, table) in demand.sequence.tables.iter().enumerate() {
                for entry in table {
                    let block = entry.guard.index();
                    let record = &state.blocks[block as usize];
                    if !holders.are_all(block, record) || !demand.sequence.is_sealed(entry.first) {
                        continue;
                    }
                    let seen = Seen { demands, index, group, entry, record };
                    let victim = seen.victim(&victims.shares[index]);
                    match holders.tables(block) {
                        1 => victims.all.push(victim),
                        _ => shared.add(block, victim, demands),
                    }
                }
            }
            victims.of_sequence.push(start..victims.all.len());
        }
        victims.all.extend(shared.finish(holders));
        victims
    }

    /// Index of the victim that only `sequence` holds.
    pub(super) fn find(&self, sequence: usize, group: usize, first: usize) -> Option<usize> {
        let range = self.of_sequence[sequence].clone();
        let of_sequence = &self.all[range.clone()];
        let found = of_sequence
            .binary_search_by_key(&(group, first), |victim| (victim.group, victim.first));
        found.ok().map(|index| range.start + index)
    }

    /// Indices of the victims by priority class (of which `classes` lists the sequences) and zone.
    pub(super) fn by_class_and_zone(&self, classes: &[Vec<usize>]) -> Vec<[Vec<u32>; Zone::COUNT]> {
        let mut class_of = vec![0; self.shares.len()];
        for (class, sequences) in classes.iter().enumerate() {
            sequences.iter().for_each(|&sequence| class_of[sequence] = class);
        }
        let mut sorted = vec![<[Vec<u32>; Zone::COUNT]>::default(); classes.len()];
        for (index, victim) in self.all.iter().enumerate() {
            sorted[class_of[victim.sequence]][victim.zone as usize].push(index as u32);
        }
        sorted
    }

    /// What the pages of each request weigh, by request; nothing where no victim has several holders.
    pub(super) fn weights(&self, demands: &[Demand<'_>]) -> Vec<(u64, f64)> {
        let alone: usize = self.of_sequence.iter().map(Range::len).sum();
        if alone == self.all.len() {
            return Vec::new();
        }
        let request = |demand: &Demand<'_>| demand.sequence.config().request;
        let weights = demands.iter().map(request).zip(self.shares.iter().map(|share| share.weight));
        let mut weights: Vec<(u64, f64)> = weights.collect();
        weights.sort_unstable_by_key(|(request, _)| *request);
        weights
    }

    /// Expected harm and bytes given back where victim `index` goes from its present target to `target`.
    pub(super) fn step(
        &self,
        pool: &BlockPool,
        index: usize,
        target: Option<PageFormat>,
    ) -> (f64, usize) {
        self.difference(pool, index, self.all[index].target, target)
    }

    /// Expected harm and bytes given back of all that is planned for victim `index`.
    pub(super) fn planned(&self, pool: &BlockPool, index: usize) -> (f64, usize) {
        self.difference(pool, index, None, self.all[index].target)
    }

    fn difference(
        &self,
        pool: &BlockPool,
        index: usize,
        before: Option<PageFormat>,
        after: Option<PageFormat>,
    ) -> (f64, usize) {
        let victim = &self.all[index];
        let conversions = self.conversions.of_group(victim.group);
        let (mut rise, mut bytes) = (0.0, 0);
        for (format, &count) in victim.pages.iter().filter(|(_, count)| **count > 0) {
            let (from, to) =
                (conversions.becomes(format, before), conversions.becomes(format, after));
            let saved = conversions.bytes[from].saturating_sub(conversions.bytes[to]);
            if saved > 0 {
                let nats = &pool.config().ladder.harm.format_nats;
                rise += (nats[to] - nats[from]).max(0.0) * f64::from(count);
                bytes += saved * usize::from(count);
            }
        }
        (rise * victim.weight, bytes)
    }
}

/// A block in one table, as it is met.
struct Seen<'a> {
    demands: &'a [Demand<'a>],
    index: usize,
    group: usize,
    entry: &'a Entry,
    record: &'a BlockRecord,
}

impl Seen<'_> {
    fn victim(&self, shares: &Shares) -> Victim {
        let Seen { demands, index, group, entry, record } = *self;
        let sequence = demands[index].sequence;
        let zone = zone_of(sequence, group, entry.first);
        let pinned = &sequence.pool().config().groups[group].pinned;
        Victim {
            block: entry.guard.index(),
            sequence: index,
            group,
            first: entry.first,
            zone,
            contract: sequence.config().contract,
            unknown: demands[index].is_unknown(),
            weight: shares.page_weight(zone),
            pages: pages_of(record, pinned, entry),
            target: None,
            dropped: false,
        }
    }
}

/// Blocks that several tables hold, put together from what each says.
struct SharedVictims {
    /// By block record: index in `victims`; empty where no block is shared.
    index_of: Vec<u32>,
    victims: Vec<Victim>,
    /// By victim: tables in which it was met sealed.
    sealed_in: Vec<u32>,
}

impl SharedVictims {
    fn new(holders: &Holders) -> SharedVictims {
        let blocks = if holders.any_shared { holders.len() } else { 0 };
        let index_of = vec![u32::MAX; blocks];
        SharedVictims { index_of, victims: Vec::new(), sealed_in: Vec::new() }
    }

    fn add(&mut self, block: u32, seen: Victim, demands: &[Demand<'_>]) {
        let index = &mut self.index_of[block as usize];
        if *index == u32::MAX {
            *index = self.victims.len() as u32;
            self.victims.push(seen);
            self.sealed_in.push(1);
            return;
        }
        self.sealed_in[*index as usize] += 1;
        let victim = &mut self.victims[*index as usize];
        let priority = |index: usize| demands[index].sequence.config().priority;
        if priority(seen.sequence) > priority(victim.sequence) {
            victim.sequence = seen.sequence;
        }
        victim.zone = victim.zone.max(seen.zone);
        victim.contract = victim.contract.min(seen.contract);
        victim.unknown &= seen.unknown;
        victim.weight += seen.weight;
        // What one holder knows to be refused is refused for all.
        victim.pages = ByFormat::from_fn(|format| victim.pages[format].min(seen.pages[format]));
    }

    /// Those that are sealed for every holder.
    fn finish(self, holders: &Holders) -> impl Iterator<Item = Victim> + '_ {
        let sealed = self.victims.into_iter().zip(self.sealed_in);
        sealed
            .filter(|(victim, sealed_in)| holders.tables(victim.block) == *sealed_in)
            .map(|(victim, _)| victim)
    }
}
