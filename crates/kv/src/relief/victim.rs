//! The blocks that may give way, as a plan sees them: where they lie, what they hold, what they would hold.

use std::ops::Range;

use super::Demand;
use crate::account::ByFormat;
use crate::config::TAIL_TOKENS;
use crate::harm::{HarmTable, zone_weight};
use crate::page::PageFormat;
use crate::pool::{BlockPool, State};
use crate::table::Sequence;

/// Where a block lies in its sequence; a later zone gives way later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Zone {
    Middle,
    Tail,
    Sinks,
}

/// A sealed block of one KV group that nobody else shares, and what is planned for it.
#[derive(Clone, Debug)]
pub(super) struct Victim {
    /// Index of its sequence in the demands.
    pub sequence: usize,
    pub group: usize,
    /// Original position of its first token.
    pub first: usize,
    pub zone: Zone,
    /// Pages that may be re-encoded, by the format they have now: neither pinned nor refused.
    pub pages: ByFormat<usize>,
    /// What is planned: pages whose format can become it will.
    pub target: Option<PageFormat>,
    /// It is planned to be dropped.
    pub dropped: bool,
}

/// The zone of the block at `first` in group `group` of `sequence`.
fn zone_of(sequence: &Sequence, group: usize, first: usize) -> Zone {
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

/// The format that a page of `group` in `format` has after a re-encode of its block to `target`.
pub(super) fn becomes(
    pool: &BlockPool,
    group: usize,
    format: PageFormat,
    target: Option<PageFormat>,
) -> PageFormat {
    let bytes = |format| pool.config().groups[group].shape.page_bytes(format);
    match target {
        // With few channels fp8 is smaller than K8V4.
        Some(to) if format.can_become(to) && bytes(to) < bytes(format) => to,
        _ => format,
    }
}

/// The victims of one sequence, group by group, oldest first in each.
pub(super) fn victims_of(sequence: &Sequence, index: usize, state: &State) -> Vec<Victim> {
    let mut victims = Vec::new();
    for (group, table) in sequence.tables.iter().enumerate() {
        let config = &sequence.pool().config().groups[group];
        let start = victims.len();
        let mut refused = Vec::new();
        for entry in table {
            let shared = state.blocks[entry.guard.index() as usize].owners > 1;
            if shared || !sequence.is_sealed(entry.first) {
                continue;
            }
            let zone = zone_of(sequence, group, entry.first);
            let pages = ByFormat::default();
            let (target, dropped, first) = (None, false, entry.first);
            victims.push(Victim { sequence: index, group, first, zone, pages, target, dropped });
            refused.push(entry.refused);
        }
        let layers = sequence.view().groups[group].layers.iter().enumerate();
        for (_, pages) in layers.filter(|(layer, _)| !config.pinned.contains(layer)) {
            // Both are in order of position.
            let mut of_group = start..victims.len();
            for page in pages {
                let is_before = |index: &usize| victims[*index].first < page.first as usize;
                of_group.start += of_group.clone().take_while(is_before).count();
                let Some(found) = of_group.clone().next() else { break };
                let is_refused = refused[found - start][page.format];
                if victims[found].first == page.first as usize && !is_refused {
                    victims[found].pages[page.format] += 1;
                }
            }
        }
    }
    victims
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
        for (group, view) in sequence.view().groups.iter().enumerate() {
            let full = sequence.pool().config().groups[group].window.is_none();
            for page in view.layers.iter().flatten() {
                let zone = zone_of(sequence, group, page.first as usize);
                shares.weight += zone_weight(zone);
                shares.middle_pages += f64::from(u8::from(full && zone == Zone::Middle));
            }
        }
        shares
    }

    /// Expected harm of a re-encode of a page in `zone`, in nats per later token.
    pub(super) fn encode_harm(
        &self,
        table: &HarmTable,
        zone: Zone,
        from: PageFormat,
        to: PageFormat,
    ) -> f64 {
        let rise = table.format_nats[to] - table.format_nats[from];
        rise.max(0.0) * zone_weight(zone) / self.weight.max(1.0)
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
    pub all: Vec<Victim>,
    /// Where in `all` the victims of a sequence are.
    of_sequence: Vec<Range<usize>>,
    pub shares: Vec<Shares>,
}

impl Victims {
    pub(super) fn new(demands: &[Demand<'_>], state: &State) -> Victims {
        let mut victims = Victims { all: Vec::new(), of_sequence: Vec::new(), shares: Vec::new() };
        for (index, demand) in demands.iter().enumerate() {
            let start = victims.all.len();
            victims.all.extend(victims_of(demand.sequence, index, state));
            victims.of_sequence.push(start..victims.all.len());
            victims.shares.push(Shares::new(demand.sequence));
        }
        victims
    }

    /// Indices of the victims of a sequence.
    pub(super) fn of_sequence(&self, sequence: usize) -> Range<usize> {
        self.of_sequence[sequence].clone()
    }

    pub(super) fn find(&self, sequence: usize, group: usize, first: usize) -> Option<usize> {
        let range = self.of_sequence[sequence].clone();
        let of_sequence = &self.all[range.clone()];
        let found = of_sequence
            .binary_search_by_key(&(group, first), |victim| (victim.group, victim.first));
        found.ok().map(|index| range.start + index)
    }

    /// Expected harm and bytes given back where victim `index` goes from its present target to `target`.
    pub(super) fn step(
        &self,
        pool: &BlockPool,
        index: usize,
        target: Option<PageFormat>,
    ) -> (f64, usize) {
        let victim = &self.all[index];
        self.difference(pool, index, victim.target, target)
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
        let Victim { sequence, group, zone, ref pages, .. } = self.all[index];
        let shape = pool.config().groups[group].shape;
        let (mut harm, mut bytes) = (0.0, 0);
        for (format, &count) in pages.iter().filter(|(_, count)| **count > 0) {
            let from = becomes(pool, group, format, before);
            let to = becomes(pool, group, format, after);
            let saved = shape.page_bytes(from).saturating_sub(shape.page_bytes(to));
            if saved > 0 {
                let table = &pool.config().ladder.harm;
                let each = self.shares[sequence].encode_harm(table, zone, from, to);
                harm += each * count as f64;
                bytes += saved * count;
            }
        }
        (harm, bytes)
    }
}
