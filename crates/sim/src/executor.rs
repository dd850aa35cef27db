//! The fake executor: computes steps with the [`PageModel`] on real pages, in virtual time, and lets
//! go wrong what its script says.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use reef_engine::executor::{
    Completion, Executor, ExecutorDead, ExecutorFacts, Logits, Polled, SlotKey, SlotWork,
    StepCosts, StepWork,
};
use reef_kernels::dispatch::Tier;
use reef_kernels::page::reencode;
use reef_kv::{BlockPool, EncodeJob, Sequence};

use crate::content::{self, VOCABULARY};
use crate::coverage::{Coverage, Row};
use crate::fault::{Fate, FaultRates};
use crate::pages::{Misread, PageModel, Rows};
use crate::random::{Random, mix};

/// Virtual time in microseconds, read by all parts of a world and moved on by its loop.
#[derive(Clone, Debug, Default)]
pub struct Clock(Arc<AtomicU64>);

impl Clock {
    /// Microseconds since the world began.
    pub fn now_us(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Moves on to `now_us`.
    pub fn set(&self, now_us: u64) {
        self.0.store(now_us, Ordering::Relaxed);
    }
}

/// Costs of the fake model, in microseconds of virtual time.
pub const COSTS: StepCosts =
    StepCosts { base_us: 1000.0, row_us: 100.0, prefill_token_us: 50.0, context_us: 0.2 };

/// The executor, and the world's handle on it: clones are the same one.
#[derive(Clone)]
pub struct FakeExecutor(Arc<Mutex<Worker>>);

struct Worker {
    pool: BlockPool,
    model: PageModel,
    trained_context: usize,
    clock: Clock,
    /// Link before position 0 of each request's text.
    roots: HashMap<u64, u32>,
    rates: FaultRates,
    random: Random,
    flight: Option<Flight>,
    /// (when it comes in, what)
    mail: Vec<(u64, Completion)>,
    /// Rows of each piece of work of the last step.
    last_rows: Vec<usize>,
    misreads: Vec<(SlotKey, Misread)>,
    coverage: Coverage,
    reads: u64,
}

/// The step being computed.
struct Flight {
    step: u64,
    started_us: u64,
    ends_us: u64,
    pending: Vec<Pending>,
    ended: bool,
}

/// A piece of it that is still to be computed.
struct Pending {
    computed_at_us: u64,
    root: u32,
    fate: Fate,
    work: SlotWork,
}

impl FakeExecutor {
    /// Computes on `pool`'s pages; what goes wrong follows from `rates` and `seed`.
    pub fn new(
        pool: &BlockPool,
        trained_context: usize,
        clock: Clock,
        rates: FaultRates,
        seed: u64,
    ) -> FakeExecutor {
        FakeExecutor(Arc::new(Mutex::new(Worker {
            pool: pool.clone(),
            model: PageModel::new(&pool.config().groups),
            trained_context,
            clock,
            roots: HashMap::new(),
            rates,
            random: Random::new(seed, "executor"),
            flight: None,
            mail: Vec::new(),
            last_rows: Vec::new(),
            misreads: Vec::new(),
            coverage: Coverage::default(),
            reads: 0,
        })))
    }

    fn worker(&self) -> MutexGuard<'_, Worker> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Says whose text request `key` is: work submitted from now on begins with this link.
    pub fn name_root(&self, key: u64, root: u32) {
        self.worker().roots.insert(key, root);
    }

    /// What was read that should not have been, since the last look.
    pub fn take_misreads(&self) -> Vec<(SlotKey, Misread)> {
        std::mem::take(&mut self.worker().misreads)
    }

    /// What went wrong on purpose.
    pub fn coverage(&self) -> Coverage {
        self.worker().coverage.clone()
    }

    /// When something will come in next; `None` while nothing is under way.
    pub fn next_due_us(&self) -> Option<u64> {
        let worker = self.worker();
        let mail = worker.mail.iter().map(|(due_us, _)| *due_us);
        let flight = worker.flight.iter().filter(|flight| !flight.ended).flat_map(|flight| {
            let pieces = flight.pending.iter().map(|pending| pending.computed_at_us);
            pieces.chain([flight.ends_us])
        });
        mail.chain(flight).min()
    }
}

impl Worker {
    fn start(&mut self, work: StepWork) {
        let now_us = self.clock.now_us();
        let tokens: usize = work.slots.iter().map(|slot| slot.tokens.len()).sum();
        let mut longest_us = COSTS.base_us as u64 + 50 * tokens as u64;
        if self.random.percent(self.rates.delay) {
            longest_us *= self.random.between(2, 40);
            self.coverage.hit(Row::FaultDelayed);
        }
        self.last_rows = work.slots.iter().map(|slot| slot.tokens.len()).collect();
        let step_is_lost = self.random.percent(self.rates.lose_step);
        let mut pending: Vec<Pending> = Vec::with_capacity(work.slots.len());
        for slot in work.slots {
            let mut fate = self.rates.fate(&mut self.random);
            if step_is_lost {
                fate = Fate::Lost { layers: self.random.size(0, self.model.layers()) };
            }
            let root = self.roots.get(&slot.key.request).copied().unwrap_or_default();
            let computed_at_us = now_us + self.random.between(0, longest_us);
            pending.push(Pending { computed_at_us, root, fate, work: slot });
        }
        self.flight = Some(Flight {
            step: work.step,
            started_us: now_us,
            ends_us: now_us + longest_us,
            pending,
            ended: false,
        });
        self.compute_due();
    }

    /// Computes what is due by now, in order of time.
    fn compute_due(&mut self) {
        let now_us = self.clock.now_us();
        let Some(mut flight) = self.flight.take() else { return };
        while let Some(index) = earliest(&flight.pending, now_us) {
            let pending = flight.pending.swap_remove(index);
            self.compute(&flight, pending);
        }
        self.flight = Some(flight);
    }

    fn compute(&mut self, flight: &Flight, pending: Pending) {
        let Pending { computed_at_us, root, fate, work } = pending;
        let SlotWork { key, tokens, first_position, view, logits_from, .. } = work;
        let layers = if let Fate::Lost { layers } = fate { layers } else { usize::MAX };
        let rows = Rows { tokens: &tokens, first_position, view: &view, root };
        let mut found = Vec::new();
        let states = self.model.compute(self.pool.arena(), &rows, layers, &mut found);
        drop(view);
        self.reads += u64::from(first_position) + tokens.len() as u64;
        self.misreads.extend(found.into_iter().map(|misread| (key, misread)));
        let mut buffer = vec![0.0; (tokens.len() - logits_from) * VOCABULARY];
        let wanted = tokens.iter().zip(&states).skip(logits_from);
        for ((&token, &state), row) in wanted.zip(buffer.chunks_exact_mut(VOCABULARY)) {
            content::write_logits(token, state, row);
        }
        let rows = tokens.len() - logits_from;
        let logits = Logits::new(Arc::new(buffer), 0, rows, VOCABULARY);
        let completion = Completion { step: flight.step, key, logits };
        let in_time_us = self.random.between(computed_at_us, flight.ends_us);
        let later_us = flight.ends_us + self.random.between(0, 20_000);
        match fate {
            Fate::InTime => self.mail.push((in_time_us, completion)),
            Fate::Late => self.mail.push((later_us + 1, completion)),
            Fate::Twice => {
                self.mail.push((in_time_us, completion.clone()));
                self.mail.push((later_us, completion));
            }
            Fate::Lost { .. } => {}
        }
        self.coverage.hit_fate(fate);
    }

    fn poll(&mut self) -> Polled {
        self.compute_due();
        let now_us = self.clock.now_us();
        let mut due: Vec<(u64, Completion)> = Vec::new();
        let mut index = 0;
        while index < self.mail.len() {
            if self.mail[index].0 <= now_us {
                due.push(self.mail.remove(index));
            } else {
                index += 1;
            }
        }
        due.sort_by_key(|(due_us, _)| *due_us);
        if due.len() > 1 && self.random.percent(self.rates.reorder) {
            let middle = self.random.size(1, due.len() - 1);
            due.rotate_left(middle);
            self.coverage.hit(Row::FaultReordered);
        }
        let mut polled = Polled {
            completions: due.into_iter().map(|(_, completion)| completion).collect(),
            idle: true,
            elapsed_us: None,
        };
        if let Some(flight) = &mut self.flight {
            let over = flight.pending.is_empty() && now_us >= flight.ends_us;
            polled.idle = over;
            if over && !flight.ended {
                flight.ended = true;
                polled.elapsed_us = Some((flight.step, flight.ends_us - flight.started_us));
            }
        }
        polled
    }

    /// The real kernel; now and then it finds what it takes for NaN.
    fn encode(&mut self, jobs: &mut [EncodeJob<'_>]) {
        for job in jobs {
            let EncodeJob { shape, source_format, source, target_format, target, .. } = job;
            let done =
                reencode(Tier::detect(), shape, *source_format, *target_format, source, target);
            let refuses = self.random.percent(self.rates.refuse_page);
            job.refused = done.is_err() || refuses;
            if refuses {
                self.coverage.hit(Row::FaultRefusedPage);
            }
        }
    }
}

/// Index of the piece of work that is computed first of those due.
fn earliest(pending: &[Pending], now_us: u64) -> Option<usize> {
    let due = pending.iter().enumerate().filter(|(_, piece)| piece.computed_at_us <= now_us);
    due.min_by_key(|(_, piece)| piece.computed_at_us).map(|(index, _)| index)
}

impl Executor for FakeExecutor {
    fn facts(&self) -> ExecutorFacts {
        let trained_context = self.worker().trained_context;
        ExecutorFacts { vocabulary: VOCABULARY, trained_context }
    }

    fn costs(&self) -> StepCosts {
        COSTS
    }

    fn submit(&mut self, work: StepWork) -> Result<(), ExecutorDead> {
        self.worker().start(work);
        Ok(())
    }

    fn poll(&mut self) -> Result<Polled, ExecutorDead> {
        Ok(self.worker().poll())
    }

    fn encode(&mut self, jobs: &mut [EncodeJob<'_>]) {
        self.worker().encode(jobs);
    }

    fn observe_masses(&mut self, place: usize, sequence: &mut Sequence, decay: f32) {
        let rows = self.worker().last_rows[place];
        for (group, config) in sequence.pool().clone().config().groups.iter().enumerate() {
            for layer in 0..if config.window.is_none() { config.layers } else { 0 } {
                let pages = &sequence.view().groups[group].layers[layer];
                let seen = |index: usize| {
                    let first = u64::from(pages[index % pages.len()].first);
                    (mix(first << 8 | layer as u64) >> 40) as f32 / (1 << 24) as f32
                };
                let masses: Vec<f32> = (0..rows * pages.len()).map(seen).collect();
                sequence.observe_masses(group, layer, &masses, decay);
            }
        }
    }

    fn observe_keys(&mut self, sequence: &mut Sequence, before: usize) {
        let pool = sequence.pool().clone();
        let block_size = pool.config().block_size();
        for (group, config) in pool.config().groups.iter().enumerate() {
            let firsts = before / block_size * block_size..sequence.next_position();
            for first in firsts.step_by(block_size) {
                for layer in 0..if config.window.is_none() { config.layers } else { 0 } {
                    let score = (mix(first as u64 + layer as u64) >> 40) as f32;
                    sequence.observe_keys(group, layer, first, score);
                }
            }
        }
    }
}
