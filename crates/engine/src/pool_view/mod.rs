//! A look at the memory: every page and whose it is, the requests and what became of theirs, and why one more
//! request would not be let in. For people and their tools; nothing here changes anything.

mod obstacle;
mod rows;

pub use obstacle::{Obstacle, Probe};
pub use rows::{RequestRow, RequestState, TenantRow};

use reef_kv::{PageMap, Sequence};

use crate::engine::Engine;
use crate::recent::Relieved;
use crate::stats::EngineStats;

/// Most cells of the heat map: with more pages than that a cell stands for several.
pub const MOST_CELLS: usize = 4096;
/// Most requests that are told of one by one; those inside go before those who wait.
pub const MOST_ROWS: usize = 256;

/// The memory at one moment.
#[derive(Clone, Debug, PartialEq)]
pub struct PoolView {
    /// The engine's time in microseconds.
    pub now_us: u64,
    /// Number of the next step.
    pub step: u64,
    /// Every page; owners are labeled with their requests' keys. Its accounts are those of `stats`.
    pub map: PageMap,
    /// How the engine is doing.
    pub stats: EngineStats,
    /// Requests, [`MOST_ROWS`] of them: those inside first, then those who wait, each by arrival.
    pub requests: Vec<RequestRow>,
    /// Requests that `requests` has no room for.
    pub requests_left_out: usize,
    /// Tenants, in the order of their configuration.
    pub tenants: Vec<TenantRow>,
    /// The last times that memory gave way, oldest first.
    pub recent: Vec<Relieved>,
    /// Whom `why_not` speaks of.
    pub probe: Probe,
    /// What would stand in its way.
    pub obstacle: Obstacle,
    /// One sentence: why the probe would not be let in now, or that it would.
    pub why_not: String,
}

impl Engine {
    /// The memory as it is now. Takes a lock of the pool for some nanoseconds a page.
    pub fn pool_view(&self, probe: &Probe) -> PoolView {
        let map = self.pool.page_map(self.labeled_sequences(), MOST_CELLS);
        let stats = EngineStats { accounts: map.accounts, ..self.stats() };
        let (obstacle, why_not) = self.obstacle(&map, probe);
        let (requests, requests_left_out) = self.request_rows(&map);
        PoolView {
            now_us: self.now_us,
            step: self.step,
            tenants: self.tenant_rows(&map),
            recent: self.recent.entries().cloned().collect(),
            probe: probe.clone(),
            map,
            stats,
            requests,
            requests_left_out,
            obstacle,
            why_not,
        }
    }

    /// Every sequence with the key of its request, those of a request behind each other.
    fn labeled_sequences(&self) -> impl Iterator<Item = (u64, &Sequence)> {
        self.requests.iter().flat_map(move |(key, live)| {
            live.runs.iter().filter_map(move |id| Some((*key, &self.runs.get(id)?.sequence)))
        })
    }
}
