//! The engine: requests come in, one step after another is computed, tokens and reports go out.
//!
//! [`Engine::turn`] is the loop's body. It never waits: while a step is in flight, arrivals, ends and I/O
//! completions are taken; between steps, memory is moved. Time, randomness and measured costs are inputs,
//! so the same inputs give the same outputs, to the event.

use std::collections::{BTreeMap, BTreeSet};

use reef_kv::prefix::{PrefixCache, PrefixEvent, PrefixIdentity, PrefixRoot};
use reef_kv::{BlockPool, StepFence};
use reef_model::runner::ModelRunner;

use crate::config::EngineConfig;
use crate::cost::{CostModel, StepRows};
use crate::event::{Event, Told};
use crate::executor::calibrate::calibrate;
use crate::executor::inline::{ASSUMED_COSTS, InlineExecutor, ModelWorker};
use crate::executor::model::ThreadedExecutor;
use crate::executor::{Executor, ExecutorDead, ExecutorFacts, Logits, SlotKey, SlotWork, StepWork};
use crate::recent::Recent;
use crate::run::{Live, Run, RunId};
use crate::schedule::Planned;
use crate::session::EngineError;
use crate::speculate::{DraftCosts, Drafter, Speculator};
use crate::stats::{Counters, EndedTokens};
use crate::store::Spill;
use crate::tally::StepTallies;
use crate::tenant::FairShare;

/// A model (or a stand-in), its KV memory, and the requests in it.
pub struct Engine {
    pub(crate) config: EngineConfig,
    pub(crate) facts: ExecutorFacts,
    pub(crate) executor: Box<dyn Executor>,
    pub(crate) spill: Option<Box<dyn Spill>>,
    pub(crate) speculator: Option<Speculator>,
    pub(crate) pool: BlockPool,
    pub(crate) prefix: Option<PrefixCache>,
    pub(crate) prefix_listener: Option<Box<dyn PrefixListener>>,
    /// Identity of prefixes, by tenant.
    pub(crate) roots: Vec<PrefixRoot>,
    pub(crate) requests: BTreeMap<u64, Live>,
    pub(crate) runs: BTreeMap<RunId, Run>,
    /// Runs that take part in steps, in order of admission.
    pub(crate) running: Vec<RunId>,
    /// Runs that are to be let in.
    pub(crate) waiting: Vec<RunId>,
    pub(crate) slots: BTreeSet<u32>,
    pub(crate) share: FairShare,
    pub(crate) cost: CostModel,
    pub(crate) flight: Option<Flight>,
    pub(crate) events: Vec<Told>,
    pub(crate) recent: Recent,
    pub(crate) counters: Counters,
    pub(crate) ended: EndedTokens,
    pub(crate) steps: StepTallies,
    pub(crate) now_us: u64,
    /// Number of the next step.
    pub(crate) step: u64,
    pub(crate) next_run: RunId,
    pub(crate) next_arrival: u64,
    pub(crate) next_admission: u64,
    pub(crate) next_generation: u32,
    pub(crate) next_record: u64,
    /// Prompt tokens of one sequence in a step at most, by configuration and pool.
    pub(crate) chunk_tokens: usize,
    /// Running mean of generated tokens where nobody named a limit.
    pub(crate) expected_tokens: f64,
    /// Turns in a row in which nothing could be done for those who wait.
    pub(crate) stalled_turns: u32,
    /// Somebody came or left since the queue was last looked through.
    pub(crate) queue_changed: bool,
}

/// A step in flight.
#[derive(Debug)]
pub(crate) struct Flight {
    pub step: u64,
    pub fence: StepFence,
    pub entries: Vec<FlightEntry>,
    pub rows: StepRows,
}

/// One run's part of it.
#[derive(Debug)]
pub(crate) struct FlightEntry {
    pub key: SlotKey,
    pub planned: Planned,
    /// Index in the work's tokens of the first row of logits.
    pub logits_from: usize,
    pub logits: Option<Logits>,
}

/// Hears what enters and leaves the prefix cache, on the engine's thread: it must not block.
pub trait PrefixListener: Send {
    /// Whether it can take events now. Otherwise they wait, as many as the cache keeps; where more has
    /// happened, the next ones tell everything anew.
    fn is_ready(&self) -> bool;

    /// What has happened since the last call; the first one begins with [`PrefixEvent::Cleared`] and every
    /// entry.
    fn hear(&mut self, events: Vec<PrefixEvent>);
}

/// What a turn has done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// A step was begun or ended, or somebody came or went: turn again.
    Worked,
    /// Something is in flight: turn again when the waker calls, or when somebody comes.
    Waiting,
    /// There is nothing to do until somebody comes.
    Idle,
}

impl Engine {
    /// An engine on `runner`, computing on a thread of its own.
    ///
    /// # Errors
    /// A budget that is too small for the model or more than the system gives; a pinned layer that the
    /// model does not have.
    pub fn new(mut runner: ModelRunner, config: EngineConfig) -> Result<Engine, EngineError> {
        let costs = match config.calibration.is_zero() {
            true => ASSUMED_COSTS,
            false => calibrate(&mut runner, config.block_size, config.calibration)?.costs,
        };
        let pool = config.pool(runner.spec())?;
        let worker = ModelWorker::new(runner, pool.clone());
        let executor = ThreadedExecutor::spawn(worker, costs);
        let executor = executor.map_err(|error| ExecutorDead { reason: error.to_string() })?;
        Engine::with_executor(Box::new(executor), pool, config)
    }

    /// An engine on `runner`, computing within [`turn`](Self::turn) and never measuring: the same calls
    /// give the same events.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn inline(runner: ModelRunner, config: EngineConfig) -> Result<Engine, EngineError> {
        let pool = config.pool(runner.spec())?;
        let worker = ModelWorker::new(runner, pool.clone());
        Engine::with_executor(Box::new(InlineExecutor::new(worker)), pool, config)
    }

    /// An engine on any executor that works on the pages of `pool`, made as `config` says.
    ///
    /// # Errors
    /// No tenant, or values out of range.
    pub fn with_executor(
        executor: Box<dyn Executor>,
        pool: BlockPool,
        config: EngineConfig,
    ) -> Result<Engine, EngineError> {
        config.check()?;
        let facts = executor.facts();
        let settings = config.prefix.as_ref();
        let identity = settings
            .map(|of| PrefixIdentity::new(&of.fingerprint, &of.rotation, config.block_size));
        let roots = identity
            .iter()
            .flat_map(|identity| config.tenants.iter().map(|tenant| identity.salted(&tenant.salt)));
        let roots = roots.collect();
        let kind = settings.map(|settings| settings.kind);
        let prefix =
            identity.zip(kind).map(|(identity, kind)| PrefixCache::new(&pool, identity, kind));
        let scheduling = &config.scheduling;
        let cost = CostModel::new(executor.costs(), scheduling.spill_bytes_per_second);
        Ok(Engine {
            facts,
            executor,
            spill: None,
            speculator: None,
            prefix,
            prefix_listener: None,
            roots,
            requests: BTreeMap::new(),
            runs: BTreeMap::new(),
            running: Vec::new(),
            waiting: Vec::new(),
            slots: BTreeSet::new(),
            share: FairShare::new(&config.tenants),
            cost,
            flight: None,
            events: Vec::new(),
            recent: Recent::default(),
            counters: Counters::default(),
            ended: EndedTokens::default(),
            steps: StepTallies::default(),
            now_us: 0,
            step: 0,
            next_run: 0,
            next_arrival: 0,
            next_admission: 0,
            next_generation: 0,
            next_record: 0,
            chunk_tokens: config.chunk_tokens(&pool),
            expected_tokens: scheduling.expected_tokens as f64,
            stalled_turns: 0,
            queue_changed: false,
            pool,
            config,
        })
    }

    /// Gives it a slower tier for sequences that have to stand still.
    pub fn set_spill(&mut self, spill: Box<dyn Spill>) {
        self.spill = Some(spill);
    }

    /// Has it try drafts of `drafter`, which takes `token_us` microseconds for each.
    pub fn set_drafter(&mut self, drafter: Box<dyn Drafter>, token_us: f64) {
        let costs = self.cost.costs();
        let costs = DraftCosts {
            row_share: costs.row_us / costs.base_us.max(1e-3),
            draft_share: token_us / costs.base_us.max(1e-3),
        };
        let most = self.config.scheduling.draft_tokens;
        self.speculator = Some(Speculator::new(drafter, most, costs));
    }

    /// Has `waker` called when a turn may find something that was in flight.
    pub fn set_waker(&mut self, waker: crate::executor::Waker) {
        self.executor.set_waker(waker.clone());
        if let Some(spill) = &mut self.spill {
            spill.set_waker(waker);
        }
    }

    /// Retains what the prefix cache has of `tokens` of a tenant until `until_us` of the engine's time, as
    /// far as the cache's limit on retained blocks allows. Returns how many tokens are retained.
    pub fn retain_prefix(&mut self, tenant: usize, tokens: &[u32], until_us: u64) -> usize {
        match (&mut self.prefix, self.roots.get(tenant)) {
            (Some(cache), Some(root)) => cache.pin(root, tokens, until_us),
            _ => 0,
        }
    }

    /// Has `listener` hear what enters and leaves the prefix cache, from the next turn on; nobody else may
    /// [take the events](Self::take_prefix_events) then.
    pub fn set_prefix_listener(&mut self, listener: Box<dyn PrefixListener>) {
        self.prefix_listener = Some(listener);
    }

    /// Where the chains of the tenants' prefixes begin, by tenant: the parent of a first block in
    /// [`PrefixEvent`]s. Empty without a prefix cache.
    pub fn prefix_roots(&self) -> &[PrefixRoot] {
        &self.roots
    }

    fn tell_prefix_listener(&mut self) {
        let (Some(listener), Some(cache)) = (&mut self.prefix_listener, &mut self.prefix) else {
            return;
        };
        if listener.is_ready() {
            let events: Vec<PrefixEvent> = cache.events().collect();
            if !events.is_empty() {
                listener.hear(events);
            }
        }
    }

    /// What has entered and left the prefix cache since the last call.
    pub fn take_prefix_events(&mut self) -> Vec<PrefixEvent> {
        self.prefix.as_mut().map_or_else(Vec::new, |cache| cache.events().collect())
    }

    /// The KV memory.
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// How it was configured.
    pub fn config(&self) -> &EngineConfig {
        &self.config
    }

    /// What it computes with.
    pub fn facts(&self) -> ExecutorFacts {
        self.facts
    }

    /// One bounded turn of the loop at `now_us`: takes what has come in and, between steps, lets in who
    /// fits, plans the next step, makes room for it and begins it.
    ///
    /// # Errors
    /// The executor has died, or memory was short for the only request there is; the engine is of no use
    /// any more.
    pub fn turn(&mut self, now_us: u64) -> Result<Progress, EngineError> {
        self.now_us = self.now_us.max(now_us);
        self.tell_prefix_listener();
        self.end_overdue();
        if let Some(cache) = &mut self.prefix {
            cache.expire(self.now_us);
        }
        let spilled = self.take_spilled();
        let ended = self.flight.is_some();
        if !self.take_completions()? {
            return Ok(Progress::Waiting);
        }
        if ended {
            // Callers hear of the step, and may end a request, before the next one is begun.
            return Ok(Progress::Worked);
        }
        self.admit();
        let mut plan = self.schedule();
        self.make_room(&mut plan)?;
        let begun = self.begin_step(plan)?;
        self.watch(begun || spilled);
        Ok(match begun || spilled {
            true => Progress::Worked,
            false if self.requests.is_empty() => Progress::Idle,
            false => Progress::Waiting,
        })
    }

    /// What has happened since the last call.
    pub fn take_events(&mut self) -> Vec<Told> {
        std::mem::take(&mut self.events)
    }

    pub(crate) fn tell(&mut self, request: u64, event: Event) {
        self.recent.note(self.now_us, request, &event);
        self.events.push(Told { request, event });
    }

    /// Grows the sequences of the plan, opens the fence and hands the work over.
    fn begin_step(&mut self, plan: Vec<Planned>) -> Result<bool, EngineError> {
        let mut work = StepWork { step: self.step, slots: Vec::with_capacity(plan.len()) };
        let mut entries = Vec::with_capacity(plan.len());
        let rows = self.rows_of(&plan);
        for planned in plan {
            let Some(slot) = self.slot_work(&planned) else { continue };
            let tenant = self.tenant_and_priority(planned.run).0;
            self.share.charge(tenant, planned.rows());
            let (key, logits_from) = (slot.key, slot.logits_from);
            entries.push(FlightEntry { key, planned, logits_from, logits: None });
            work.slots.push(slot);
        }
        if entries.is_empty() {
            return Ok(false);
        }
        self.counters.begun(rows);
        let fence = self.pool.begin_step();
        self.flight = Some(Flight { step: self.step, fence, entries, rows });
        self.step += 1;
        self.executor.submit(work)?;
        Ok(true)
    }

    /// A run's part of the step; `None` where its pages cannot be had after all, which the plan has ruled
    /// out: it then takes no part.
    fn slot_work(&mut self, planned: &Planned) -> Option<SlotWork> {
        let run = self.runs.get_mut(&planned.run)?;
        let key = run.slot?;
        if run.sequence.grow(planned.rows()).is_err() {
            self.counters.unplanned_shortages += 1;
            return None;
        }
        let start = run.computed();
        let known = &run.tokens[start..start + planned.tokens];
        let tokens: Vec<u32> = known.iter().chain(&planned.drafts).copied().collect();
        let live = &self.requests[&run.request];
        let reaches_end = start + planned.tokens == run.tokens.len();
        let logits_from = match live.request.prompt_logprobs {
            Some(_) if start < run.prompt_tokens && live.prompt_told <= start => 0,
            _ if reaches_end => planned.tokens - 1,
            _ => tokens.len(),
        };
        let observe = self.config.rules.observes_masses(&run.sequence);
        let (first_position, view) = (start as u32, run.sequence.shared_view());
        Some(SlotWork { key, tokens, first_position, view, observe, logits_from })
    }
}
