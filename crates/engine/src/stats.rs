//! What the engine has done and how full it is.

use reef_kv::relief::{ReliefOutcome, StepsDown, held_bytes_together};
use reef_kv::{Accounts, ByFormat, KvUsage, page::PageFormat};

use crate::cost::StepRows;
use crate::engine::Engine;
use crate::event::{PauseKind, PauseReason};
use crate::executor::StepCosts;
use crate::run::State;
use crate::speculate::{SpeculationCounters, Speculator};
use crate::store::SpillUsage;
use crate::tally::StepTallies;

/// Running totals since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Steps begun.
    pub steps: u64,
    /// Rows of prefill computed.
    pub prefill_rows: u64,
    /// Rows of decode computed, drafts included.
    pub decode_rows: u64,
    /// Tokens generated.
    pub generated_tokens: u64,
    /// Tokens found in the prefix cache.
    pub cached_tokens: u64,
    /// Requests that have ended.
    pub finished: u64,
    /// Requests that could not go on for a reason of their own.
    pub failed: u64,
    /// Times a run stood still, `[kind][reason]`.
    pub pauses: [[u64; PauseReason::ALL.len()]; PauseKind::ALL.len()],
    /// Blocks that came down a rung, by rung and reason.
    pub steps_down: StepsDown,
    /// Blocks re-encoded.
    pub encoded_blocks: u64,
    /// Blocks dropped.
    pub dropped_blocks: u64,
    /// Bytes of idle prefixes given back.
    pub evicted_prefix_bytes: u64,
    /// Bytes written to the spill store.
    pub spilled_bytes: u64,
    /// Bytes read from it.
    pub loaded_bytes: u64,
    /// Records that the spill store lost.
    pub spill_failures: u64,
    /// Drafts tried, and of these accepted.
    pub drafts: (u64, u64),
    /// Completions of other steps, of nobody, or that came twice.
    pub stale_completions: u64,
    /// Pieces of work whose completion never came; computed again.
    pub lost_completions: u64,
    /// Pages that a plan had counted on and that were not to be had.
    pub unplanned_shortages: u64,
    /// Requests that did not fit alone although they were let in.
    pub shortages_alone: u64,
    /// Times that nothing ran although somebody waited and memory was free.
    pub stalls: u64,
    /// Invariants found broken.
    pub violations: u64,
}

impl Counters {
    pub(crate) fn begun(&mut self, rows: StepRows) {
        self.steps += 1;
        self.prefill_rows += rows.prefill as u64;
        self.decode_rows += rows.decode as u64;
    }

    pub(crate) fn relieved(&mut self, outcome: &ReliefOutcome) {
        self.encoded_blocks += outcome.encoded_blocks as u64;
        self.dropped_blocks += outcome.dropped_blocks as u64;
        self.steps_down.merge(&outcome.steps_down);
    }

    pub(crate) fn paused(&mut self, kind: PauseKind, reason: PauseReason) {
        self.pauses[kind as usize][reason as usize] += 1;
    }

    /// Times a run stood still in one way.
    pub fn pauses(&self, kind: PauseKind) -> u64 {
        self.pauses[kind as usize].iter().sum()
    }

    /// Times a run stood still in one way for one reason.
    pub fn pauses_for(&self, kind: PauseKind, reason: PauseReason) -> u64 {
        self.pauses[kind as usize][reason as usize]
    }
}

/// What had become of the tokens of branches when they ended; of beams that fell out nothing counts.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EndedTokens {
    /// Tokens held, by format; token-layers / layers.
    pub by_format: ByFormat<f64>,
    /// Tokens dropped; token-layers / layers.
    pub dropped: f64,
}

impl EndedTokens {
    pub(crate) fn add(&mut self, usage: &KvUsage) {
        for (format, tokens) in usage.tokens_by_format.iter() {
            self.by_format[format] += tokens;
        }
        self.dropped += usage.dropped_tokens;
    }
}

/// What limits the number of running sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ceiling {
    /// KV memory.
    Kv,
    /// Arithmetic: more rows bring next to nothing.
    Ridge,
    /// The latency aimed at.
    Latency,
    /// `max_running` of the configuration.
    Configured,
}

/// The limits on running sequences, and the lowest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ceilings {
    /// Sequences like those known now that the pool holds at their floors.
    pub kv: usize,
    /// Rows at which a step spends [`RIDGE_MULTIPLE`] times as long on them as on reading the weights.
    pub ridge: usize,
    /// Rows at which a step takes the latency aimed at, if one is.
    pub latency: Option<usize>,
    /// `max_running`.
    pub configured: usize,
    /// Which is the lowest.
    pub binding: Ceiling,
}

/// Rows that take so many times as long as reading the weights get 8 of 9 parts of the most that any number
/// of rows could.
pub const RIDGE_MULTIPLE: usize = 8;

/// A look at the engine.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineStats {
    /// Runs that take part in steps.
    pub running: usize,
    /// Runs that are to be let in, preempted ones included.
    pub waiting: usize,
    /// Runs that were let in and stand still.
    pub paused: usize,
    /// The pool.
    pub accounts: Accounts,
    /// Limits on running sequences.
    pub ceilings: Ceilings,
    /// What steps cost, as estimated now.
    pub costs: StepCosts,
    /// The spill store, if there is one.
    pub spill: Option<SpillUsage>,
    /// What became of drafts, if any are made.
    pub speculation: Option<SpeculationCounters>,
    /// Totals.
    pub counters: Counters,
    /// Tokens of branches that have ended.
    pub ended: EndedTokens,
    /// Times and rows of steps.
    pub steps: StepTallies,
}

impl Engine {
    /// A look at the engine.
    pub fn stats(&self) -> EngineStats {
        EngineStats {
            running: self.running.len(),
            waiting: self.waiting.len(),
            paused: self.runs.values().filter(|run| run.paused_since_us.is_some()).count(),
            accounts: self.pool.accounts(),
            ceilings: self.ceilings(),
            costs: self.cost.costs(),
            spill: self.spill.as_ref().map(|spill| spill.usage()),
            speculation: self.speculator.as_ref().map(Speculator::counters),
            counters: self.counters,
            ended: self.ended,
            steps: self.steps,
        }
    }

    /// Bytes of pages that each tenant's requests hold, by tenant; what is being written to the spill store or
    /// read from it included. Blocks that several share count once for each tenant. Looks at every block.
    pub fn tenant_bytes(&self) -> Vec<usize> {
        let bytes_of = |tenant: usize| {
            let runs = self.runs.values();
            let runs = runs.filter(|run| self.tenant_and_priority(run.id).0 == tenant);
            let (mut sequences, mut loading_bytes) = (Vec::new(), 0);
            for run in runs {
                sequences.push(&run.sequence);
                if let State::Loading(record) = &run.state {
                    loading_bytes += record.image.bytes();
                }
            }
            if sequences.is_empty() {
                return 0;
            }
            held_bytes_together(&self.pool, &sequences) + loading_bytes
        };
        (0..self.config.tenants.len()).map(bytes_of).collect()
    }

    /// Known tokens that those who wait to be let in have still to compute, whatever the prefix cache has.
    pub fn waiting_tokens(&self) -> usize {
        self.waiting.iter().filter_map(|id| self.runs.get(id)).map(|run| run.remaining()).sum()
    }

    /// Runs that take part in steps.
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// The limits on running sequences as they are now.
    pub fn ceilings(&self) -> Ceilings {
        let (ridge, latency) = self.compute_ceilings();
        let (kv, configured) = (self.kv_ceiling(), self.config.scheduling.max_running);
        let all = [
            (kv, Ceiling::Kv),
            (ridge, Ceiling::Ridge),
            (latency.unwrap_or(usize::MAX), Ceiling::Latency),
            (configured, Ceiling::Configured),
        ];
        let least = all.into_iter().min_by_key(|(limit, _)| *limit);
        let binding = least.map_or(Ceiling::Configured, |(_, binding)| binding);
        Ceilings { kv, ridge, latency, configured, binding }
    }

    /// Rows at the ridge, and within the latency aimed at, behind as many tokens as the requests known will
    /// have on average.
    fn compute_ceilings(&self) -> (usize, Option<usize>) {
        let lengths = self.requests.values().map(|live| {
            let generated =
                live.request.max_tokens.map_or(self.expected_tokens, |most| most as f64);
            live.request.prompt.len() as f64 + generated / 2.0
        });
        let (sum, count) = lengths.fold((0.0, 0.0), |(sum, n), length| (sum + length, n + 1.0));
        let context = if count > 0.0 { sum / count } else { self.expected_tokens };
        let ridge = self.cost.ridge_rows(context, RIDGE_MULTIPLE as f64);
        let target = self.config.scheduling.latency_target_us;
        (ridge, target.map(|us| self.cost.rows_within(context, us as f64)))
    }

    /// Runs like the mean of those known that the pool holds at their floors.
    fn kv_ceiling(&self) -> usize {
        let config = self.pool.config();
        let needs = self.runs.keys().flat_map(|id| self.needs(*id, self.runs[id].preemptions > 0));
        let bytes = needs.map(|need| need.tokens * config.bytes_per_token(need.floor));
        let (sum, count) = bytes.fold((0, 0), |(sum, count), bytes| (sum + bytes, count + 1));
        let floor = config.bytes_per_token(PageFormat::Int4);
        let mean = sum.checked_div(count).unwrap_or(floor * config.block_size());
        (config.budget_bytes / mean.max(1)).max(1)
    }

    /// Sequences that may run at once; memory is counted apart.
    pub(crate) fn most_running(&self) -> usize {
        let (ridge, latency) = self.compute_ceilings();
        let most = self.config.scheduling.max_running;
        ridge.min(latency.unwrap_or(usize::MAX)).min(most).max(1)
    }
}
