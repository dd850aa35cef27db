//! Why one more request would not be let in now, or not find its pages: the engine's own questions, asked for
//! somebody who has not come.

use std::collections::BTreeSet;

use reef_kv::admission::Need;
use reef_kv::page::PageFormat;
use reef_kv::page_map::{HolderBytes, Room};
use reef_kv::{ByFormat, Fidelity, PageMap, PageState};

use crate::admission;
use crate::engine::Engine;
use crate::request::Request;

/// A request that might come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Probe {
    /// Tokens in all, at least 1: the prompt, and one to generate.
    pub tokens: usize,
    /// Its contract.
    pub fidelity: Fidelity,
    /// Index of its tenant.
    pub tenant: usize,
}

impl Default for Probe {
    fn default() -> Probe {
        Probe { tokens: 512, fidelity: Fidelity::Exact, tenant: 0 }
    }
}

/// What would stand in a request's way. The first three do not: it would be let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Obstacle {
    /// Nothing: its pages are free.
    None,
    /// Idle prefixes, which are given up for it.
    Prefixes,
    /// Pages of others, which shrink for it.
    Relief,
    /// It could never be served, or the queue is full.
    Refused,
    /// Its tenant's quota.
    Quota,
    /// What those inside are kept room for takes the budget.
    Budget,
    /// As many run as may.
    Slots,
    /// Those who came before wait.
    Queue,
    /// Free bytes that lie scattered.
    Fragmentation,
    /// Bytes given back during the step in flight.
    Fence,
    /// Bytes on their way to or from the spill store.
    Pins,
    /// The reserve for re-encoding.
    Reserve,
}

impl Obstacle {
    /// The name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Obstacle::None => "none",
            Obstacle::Prefixes => "prefixes",
            Obstacle::Relief => "relief",
            Obstacle::Refused => "refused",
            Obstacle::Quota => "quota",
            Obstacle::Budget => "budget",
            Obstacle::Slots => "slots",
            Obstacle::Queue => "queue",
            Obstacle::Fragmentation => "fragmentation",
            Obstacle::Fence => "fence",
            Obstacle::Pins => "pins",
            Obstacle::Reserve => "reserve",
        }
    }

    /// Whether the request would be let in and find its pages all the same.
    pub fn gives_way(self) -> bool {
        matches!(self, Obstacle::None | Obstacle::Prefixes | Obstacle::Relief)
    }
}

impl Engine {
    /// What stands in the way of `probe`, in the order in which the engine would find it, and one sentence.
    pub(super) fn obstacle(&self, map: &PageMap, probe: &Probe) -> (Obstacle, String) {
        let Probe { tokens, fidelity, .. } = *probe;
        let who = format!("one more request of {tokens} tokens (`{}`)", fidelity.name());
        let found = self
            .refused(probe)
            .or_else(|| self.kept_out(map, probe))
            .or_else(|| self.behind_others());
        let (obstacle, rest) = found.unwrap_or_else(|| self.room_now(map, probe));
        (obstacle, capitalized(&format!("{who} {rest}")))
    }

    /// What it is kept room for once it is inside.
    fn need_of(&self, probe: &Probe) -> Need {
        let floor = self.pool.config().floor(probe.fidelity);
        Need { tokens: probe.tokens, floor, step_tokens: 1 }
    }

    fn refused(&self, probe: &Probe) -> Option<(Obstacle, String)> {
        let (waiting, most) = (self.waiting.len(), self.config.scheduling.max_waiting);
        if waiting >= most {
            let rest = format!("would be refused: {waiting} wait already, and no more may");
            return Some((Obstacle::Refused, rest));
        }
        let prompt = vec![0; probe.tokens.saturating_sub(1).max(1)];
        let request = Request {
            max_tokens: Some(1),
            tenant: probe.tenant,
            ..Request::new(prompt, probe.fidelity)
        };
        let refusal = admission::admit(&self.pool, &self.config, self.facts, &request).err()?;
        Some((Obstacle::Refused, format!("would be refused: {refusal}")))
    }

    /// Its tenant's quota, or what those inside are kept room for, keeps it out.
    fn kept_out(&self, map: &PageMap, probe: &Probe) -> Option<(Obstacle, String)> {
        let need = self.need_of(probe);
        let asked = self.pool.page_bytes(need);
        if let Some((held, quota)) = self.over_quota(probe.tenant, asked) {
            let rest = format!(
                "would wait: it needs {}, and of tenant `{}`'s quota of {} its requests inside are \
                 kept {}",
                bytes(asked),
                self.config.tenants[probe.tenant].name,
                bytes(quota),
                bytes(held)
            );
            return Some((Obstacle::Quota, rest));
        }
        if self.displaced_for(vec![need], 1, 0, false).is_some() {
            return None;
        }
        let inside: Vec<_> = self.runs.values().filter(|run| !run.is_out()).collect();
        if self.displaced_for(vec![need], 0, 0, false).is_some() {
            let rest = format!(
                "would wait: {} sequences run, and no more may at once (limit {})",
                inside.len(),
                self.most_running()
            );
            return Some((Obstacle::Slots, rest));
        }
        let kept: usize = inside.iter().map(|run| self.needed_bytes(run.id)).sum();
        let rest = format!(
            "would wait: it needs {} at the least, and the {} sequences inside are kept {} of the \
             budget of {}{}",
            bytes(asked),
            inside.len(),
            bytes(kept),
            bytes(map.accounts.budget_bytes),
            self.largest(map)
        );
        Some((Obstacle::Budget, rest))
    }

    /// Who holds most, for the end of a sentence.
    fn largest(&self, map: &PageMap) -> String {
        let most = map.holders.iter().max_by_key(|holder| holder.bytes.total());
        let Some(HolderBytes { label, bytes: held, .. }) = most else { return String::new() };
        let several = self.config.tenants.len() > 1;
        let live = self.requests.get(label).filter(|_| several);
        let tenant = live.map(|live| self.config.tenants[live.request.tenant].name.as_str());
        let of_tenant = tenant.map_or_else(String::new, |name| format!(" of tenant `{name}`"));
        format!(" (request {label}{of_tenant} holds most: {})", bytes(held.total()))
    }

    fn behind_others(&self) -> Option<(Obstacle, String)> {
        let first = self.next_waiting(&BTreeSet::new())?;
        let rest = format!(
            "would wait behind the {} who came before, the first of whom needs {}",
            self.waiting.len(),
            bytes(self.needed_bytes(first))
        );
        Some((Obstacle::Queue, rest))
    }

    /// It would be let in: whether its pages are to be had at once.
    fn room_now(&self, map: &PageMap, probe: &Probe) -> (Obstacle, String) {
        let at_f16 = Need {
            tokens: probe.tokens,
            floor: PageFormat::F16,
            step_tokens: self.chunk_tokens.max(1),
        };
        let (room, asked) = self.pool.room(map, at_f16);
        let asked = bytes(asked);
        let free = bytes(map.accounts.free_bytes);
        let idle = bytes(map.accounts.cached_bytes);
        match room {
            Room::Free => {
                (Obstacle::None, format!("would get its {asked} at once: {free} are free"))
            }
            Room::Cached => {
                (Obstacle::Prefixes, format!("would get its {asked}: of {idle} of idle prefixes"))
            }
            Room::Held => {
                let rest = format!(
                    "would be let in: {free} of the {asked} that it takes at f16 are free, the rest comes \
                     of blocks that may shrink or be dropped"
                );
                (Obstacle::Relief, rest)
            }
            Room::Scattered => {
                let rest = format!(
                    "would not find its {asked} before the next step: {free} are free, but in spans of \
                     other page sizes, whose pages are moved together between steps"
                );
                (Obstacle::Fragmentation, rest)
            }
            Room::Fenced => {
                let fenced = bytes(map.accounts.fenced_bytes);
                let rest = format!(
                    "would not find its {asked} before the step in flight ends: {free} are free, {fenced} \
                     were given back during it"
                );
                (Obstacle::Fence, rest)
            }
            Room::Pinned => {
                let of_state: &ByFormat<usize> = &map.held[PageState::Pinned as usize];
                let pinned = bytes(of_state.total());
                let rest = format!(
                    "would not find its {asked} yet: {free} are free, {pinned} are on their way to or from \
                     the spill store"
                );
                (Obstacle::Pins, rest)
            }
            Room::Reserved => {
                let reserved = bytes(map.accounts.reserved_bytes);
                let rest = format!(
                    "would not find its {asked} without relief: {free} are free beside the {reserved} kept \
                     for re-encoding"
                );
                (Obstacle::Reserve, rest)
            }
        }
    }
}

/// Bytes as people read them.
fn bytes(bytes: usize) -> String {
    const KIB: f64 = 1024.0;
    let amount = bytes as f64;
    match bytes {
        0..=1023 => format!("{bytes} bytes"),
        1024..=1_048_575 => format!("{:.0} KiB", amount / KIB),
        1_048_576..=1_073_741_823 => format!("{:.1} MiB", amount / KIB / KIB),
        _ => format!("{:.2} GiB", amount / KIB / KIB / KIB),
    }
}

fn capitalized(sentence: &str) -> String {
    let mut letters = sentence.chars();
    let first = letters.next().map(|first| first.to_uppercase().to_string()).unwrap_or_default();
    format!("{first}{}.", letters.as_str().trim_end_matches('.'))
}
