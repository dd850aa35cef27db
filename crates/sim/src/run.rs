//! One world from its beginning to its end, with everything checked on the way.

use std::cell::RefCell;
use std::fmt::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};

use reef_engine::event::{FinishReason, Outcome};
use reef_engine::{Branches, Engine, EngineError, Progress, Refusal};
use reef_kv::prefix::IndexKind;
use reef_kv::{BlockPool, Fidelity};

use crate::coverage::{Coverage, Row};
use crate::executor::{Clock, FakeExecutor};
use crate::life::{Life, Lives, Stage};
use crate::oracle::{Agreement, compare};
use crate::random::{Random, mix};
use crate::setup::{self, Parts};
use crate::spill::SpillHandle;
use crate::world::{Arrival, World};

/// Turns after which a world that has not ended is taken for one that never will.
const TURNS_MAX: u64 = 60_000;

/// Something that must not be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// What sort of thing: failures of one sort are taken for the same while shrinking.
    pub kind: &'static str,
    /// What was found.
    pub text: String,
}

impl std::fmt::Display for Failure {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{}: {}", self.kind, self.text)
    }
}

/// What came of a world.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Of all that the engine told, with its time.
    pub hash: u64,
    /// Turns of the engine's loop.
    pub turns: u64,
    /// Steps it submitted.
    pub steps: u64,
    /// What was covered.
    pub coverage: Coverage,
    /// What went wrong; the world ends with the first thing found in its course.
    pub failures: Vec<Failure>,
    /// The log, where it was asked for.
    pub lines: Vec<String>,
}

/// Runs `world`; a panic in it is a failure like others. `log`: keep the lines.
pub fn run(world: &World, log: bool) -> Report {
    let mut report = Report::default();
    let end =
        catch_unwind(AssertUnwindSafe(|| Course::new(world, log, &mut report).map(Course::run)));
    match end {
        Ok(Ok(())) => {}
        Ok(Err(text)) => report.failures.push(Failure { kind: "start", text }),
        Err(panic) => {
            let text = format!("{} at {}", panic_text(&*panic), panic_place());
            report.failures.push(Failure { kind: "panic", text });
        }
    }
    report
}

/// Whether nothing lossy can have happened to a request, whatever its contract: it was not relieved, and
/// began with nobody else's blocks.
fn is_untouched(outcome: &Outcome) -> bool {
    let usage = &outcome.usage;
    let whole = usage.kv.relief.is_empty() && usage.kv.dropped_tokens == 0.0;
    whole && usage.cached_tokens == 0 && usage.recomputed_tokens == 0 && usage.pauses.is_empty()
}

/// What a panic said.
pub fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or(panic.downcast_ref::<&str>().map(|text| text.to_string())).unwrap_or_default()
}

thread_local! {
    static PANIC_PLACE: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Where this thread last panicked.
fn panic_place() -> String {
    PANIC_PLACE.with_borrow(String::clone)
}

/// From now on panics print nothing: they are reported with the world's other failures.
pub fn keep_panics() {
    std::panic::set_hook(Box::new(|info| {
        let place = info.location().map(ToString::to_string).unwrap_or_default();
        PANIC_PLACE.with_borrow_mut(|kept| *kept = place);
    }));
}

struct Course<'a> {
    world: &'a World,
    report: &'a mut Report,
    log: bool,
    clock: Clock,
    pool: BlockPool,
    executor: FakeExecutor,
    spill: Option<SpillHandle>,
    engine: Engine,
    lives: Lives,
    random: Random,
    next_arrival: usize,
    stalls: u64,
    line: String,
}

impl<'a> Course<'a> {
    fn new(world: &'a World, log: bool, report: &'a mut Report) -> Result<Course<'a>, String> {
        let Parts { clock, pool, executor, spill, engine } = setup::crowded(world)?;
        Ok(Course {
            world,
            report,
            log,
            clock,
            pool,
            executor,
            spill,
            engine,
            lives: Lives::new(world.arrivals.len()),
            random: Random::new(world.seed, "course"),
            next_arrival: 0,
            stalls: 0,
            line: String::new(),
        })
    }

    fn fail(&mut self, kind: &'static str, text: String) {
        self.report.failures.push(Failure { kind, text });
    }

    fn run(mut self) {
        while self.report.failures.is_empty() && self.turn() {}
        let stats = self.engine.stats();
        self.report.steps = stats.counters.steps;
        self.report.coverage.merge(&self.executor.coverage());
        self.cover_stats();
        if self.report.failures.is_empty() {
            self.check_end();
            self.check_outcomes();
        }
        self.end_pool();
    }

    /// One turn of the engine and what the world does around it. Whether there is another.
    fn turn(&mut self) -> bool {
        self.arrive();
        self.end_requests();
        let now_us = self.clock.now_us();
        if let Some(spill) = &self.spill {
            spill.clock.advance_to(now_us);
        }
        let progress = match self.engine.turn(now_us) {
            Ok(progress) => progress,
            Err(error) => {
                self.fail("engine", error.to_string());
                return false;
            }
        };
        self.report.turns += 1;
        self.hear();
        self.check_turn();
        let stalls = self.engine.stats().counters.stalls;
        if std::mem::replace(&mut self.stalls, stalls) < stalls {
            let stats = self.engine.stats();
            self.note(&format_args!("stalled: {stats:?}"));
            self.fail("stall", format!("nothing ran though somebody waited: {stats:?}"));
        }
        if self.report.turns > TURNS_MAX {
            self.fail("endless", format!("{TURNS_MAX} turns: {:?}", self.engine.stats()));
        }
        self.move_on(progress)
    }

    /// Moves the clock. `false`: nothing will happen any more.
    fn move_on(&mut self, progress: Progress) -> bool {
        let now_us = self.clock.now_us();
        let ahead = self.world.arrivals.get(self.next_arrival).map(|arrival| arrival.at_us);
        let ends = self.ends_us().into_iter().chain(ahead).filter(|&at_us| at_us > now_us).min();
        match progress {
            Progress::Worked => {
                self.clock.set(now_us + self.random.between(0, 30));
                true
            }
            Progress::Waiting => {
                let spill = self.spill.as_ref().and_then(|spill| spill.clock.due_us());
                let due = self.executor.next_due_us().into_iter().chain(spill).chain(ends).min();
                // Now and then the loop is late, and finds several things at once.
                let late_us =
                    if self.random.percent(30) { self.random.between(0, 4000) } else { 0 };
                self.clock.set((due.unwrap_or(now_us + 1000) + late_us).max(now_us + 1));
                true
            }
            Progress::Idle => {
                if self.lives.any_alive() && ahead.is_none() {
                    self.fail("stalled", format!("{:?}", self.engine.stats()));
                    return false;
                }
                match ends {
                    Some(at_us) => self.clock.set(at_us),
                    None => return false,
                }
                true
            }
        }
    }

    /// When callers or deadlines end a request that is alive.
    fn ends_us(&self) -> Vec<u64> {
        let alive = self.world.arrivals.iter().enumerate();
        let alive = alive.filter(|(number, _)| self.lives.is_alive(*number));
        let end = |arrival: &Arrival| arrival.end.map(|(at_us, _)| at_us);
        alive.flat_map(|(_, a)| end(a).into_iter().chain(a.request.deadline_us)).collect()
    }

    fn arrive(&mut self) {
        while let Some(arrival) = self.world.arrivals.get(self.next_arrival) {
            if arrival.at_us > self.clock.now_us() {
                return;
            }
            let number = self.next_arrival;
            self.next_arrival += 1;
            let used = self.lives.with_key(arrival.key).is_some();
            let result = self.engine.submit(arrival.key, arrival.request.clone());
            self.note(&format_args!("submit {} {result:?}", arrival.key));
            self.lives.of[number].stage = Stage::Refused;
            let duplicate = matches!(result, Err(Refusal::DuplicateKey { .. }));
            match &result {
                Ok(()) => {
                    let root = setup::root(arrival.request.tenant);
                    self.executor.name_root(arrival.key, root);
                    let earlier = &self.world.arrivals[..number];
                    if earlier.iter().any(|earlier| earlier.key == arrival.key) {
                        self.report.coverage.hit(Row::KeyReused);
                    }
                    self.lives.taken(number, arrival.key);
                }
                Err(Refusal::QueueFull { .. }) => self.report.coverage.hit(Row::QueueFull),
                Err(Refusal::DuplicateKey { .. }) => {}
                Err(_) => self.report.coverage.hit(Row::NeverFits),
            }
            if used && !duplicate {
                self.fail("key", format!("key {} is alive and was taken again", arrival.key));
            }
            if duplicate && !used {
                self.fail("key", format!("key {} is free and was refused", arrival.key));
            }
        }
    }

    fn end_requests(&mut self) {
        for (number, arrival) in self.world.arrivals.iter().enumerate() {
            let Some((at_us, reason)) = arrival.end else { continue };
            let life = &self.lives.of[number];
            if at_us > self.clock.now_us() || life.ended || !self.lives.is_alive(number) {
                continue;
            }
            let row = match life.stage {
                Stage::Waiting => Row::CancelWaiting,
                _ if life.paused > 0 => Row::CancelPaused,
                _ => Row::CancelRunning,
            };
            self.report.coverage.hit(row);
            self.lives.of[number].ended = true;
            self.engine.end(arrival.key, reason);
        }
    }

    fn hear(&mut self) {
        for told in self.engine.take_events() {
            self.note(&format_args!("{told:?}"));
            let now_us = self.clock.now_us();
            self.lives.hear(&told, now_us, &self.world.arrivals, &mut self.report.coverage);
        }
        for text in std::mem::take(&mut self.lives.broken) {
            self.fail("told", text);
        }
    }

    /// Hashes, and keeps where asked, what happened.
    fn note(&mut self, what: &dyn std::fmt::Display) {
        self.line.clear();
        let _ = write!(self.line, "{} {what}", self.clock.now_us());
        for chunk in self.line.as_bytes().chunks(8) {
            let mut bytes = [0; 8];
            bytes[..chunk.len()].copy_from_slice(chunk);
            self.report.hash = mix(self.report.hash ^ u64::from_le_bytes(bytes));
        }
        if self.log {
            self.report.lines.push(self.line.clone());
        }
    }

    fn check_turn(&mut self) {
        for violation in self.engine.check() {
            self.fail("invariant", violation.to_string());
        }
        for (key, misread) in self.executor.take_misreads() {
            self.fail("misread", format!("{key:?}: {misread}"));
        }
    }

    /// Everything is given back, nobody is forgotten.
    fn check_end(&mut self) {
        for number in 0..self.lives.of.len() {
            if self.lives.is_alive(number) {
                self.fail("lost", format!("arrival {number} has no end"));
            }
        }
        let accounts = self.pool.accounts();
        let held_bytes = accounts.used_bytes() - accounts.cached_bytes;
        if held_bytes > 0 || accounts.fenced_bytes > 0 {
            self.fail("leak", format!("{held_bytes} bytes held at the end: {accounts:?}"));
        }
    }

    /// Without the engine nobody holds anything.
    fn end_pool(self) {
        let Course { engine, pool, report, .. } = self;
        drop(engine);
        let used_bytes = pool.accounts().used_bytes();
        if used_bytes > 0 && report.failures.is_empty() {
            let text = format!("{used_bytes} bytes used after the engine");
            report.failures.push(Failure { kind: "leak", text });
        }
    }

    fn check_outcomes(&mut self) {
        for (number, arrival) in self.world.arrivals.iter().enumerate() {
            match self.lives.of[number].stage.clone() {
                Stage::Finished(outcome) => self.check_outcome(number, arrival, &outcome),
                Stage::Failed(error) => self.check_failed(arrival, error),
                _ => {}
            }
        }
    }

    fn check_failed(&mut self, arrival: &Arrival, error: String) {
        // Pages that the kernel refuses stay large, whatever the contract permits.
        let excused = error != EngineError::Stalled.to_string()
            && self.world.faults.refuse_page > 0
            && arrival.request.fidelity != Fidelity::Exact;
        if !excused {
            self.fail("failed", format!("request {}: {error}", arrival.key));
        }
    }

    fn check_outcome(&mut self, number: usize, arrival: &Arrival, outcome: &Outcome) {
        self.cover_outcome(number, arrival, outcome);
        let request = &arrival.request;
        let Life { ended, finished_us, .. } = self.lives.of[number];
        let cut = ended || request.deadline_us.is_some_and(|at_us| at_us <= finished_us);
        if request.fidelity != Fidelity::Exact {
            self.report.coverage.add(Row::LossyFinished, u64::from(!cut));
            if !is_untouched(outcome) {
                return;
            }
            self.report.coverage.hit(Row::LossyUntouched);
        }
        let alone = match setup::alone(self.world, arrival, outcome.usage.max_tokens_limit) {
            Ok(alone) => alone,
            Err(error) => return self.fail("alone", format!("request {}: {error}", arrival.key)),
        };
        match compare(request.branches, outcome, &alone, cut) {
            Agreement::Whole => self.report.coverage.hit(Row::ExactCompared),
            Agreement::UpToTheCut => self.report.coverage.hit(Row::PrefixOfSolo),
            Agreement::NotComparable => {}
            Agreement::Differs(text) => {
                let text = format!("arrival {number}, request {}: {text}", arrival.key);
                self.fail("exact", text);
            }
        }
    }

    fn cover_stats(&mut self) {
        let counters = self.engine.stats().counters;
        let coverage = &mut self.report.coverage;
        coverage.add(Row::StaleCompletion, counters.stale_completions);
        coverage.add(Row::LostCompletion, counters.lost_completions);
        coverage.add(Row::DraftAccepted, counters.drafts.1);
        coverage.add(Row::DraftRejected, counters.drafts.0 - counters.drafts.1);
        coverage.add(Row::RungDropPrefix, u64::from(counters.evicted_prefix_bytes > 0));
        coverage.add(Row::FaultSpill, self.spill.as_ref().map_or(0, SpillHandle::faults));
        coverage.add(Row::UnplannedShortage, counters.unplanned_shortages);
        coverage.add(Row::ShortageAlone, counters.shortages_alone);
    }

    fn cover_outcome(&mut self, number: usize, arrival: &Arrival, outcome: &Outcome) {
        let world = self.world;
        let windows = world.pool.groups.iter().any(|group| group.window.is_some());
        let request = &arrival.request;
        let usage = &outcome.usage;
        let mut hit = |row: Row, happened: bool| {
            self.report.coverage.add(row, u64::from(happened));
        };
        let cached = self.lives.of[number].cached_tokens;
        hit(Row::PrefixHit, cached > 0);
        hit(Row::PrefixPartial, !cached.is_multiple_of(world.pool.block_size()));
        hit(Row::PrefixChain, cached > 0 && world.prefix == Some(IndexKind::Chain));
        hit(Row::PrefixRadix, cached > 0 && world.prefix == Some(IndexKind::Radix));
        hit(Row::WindowHit, cached > 0 && windows);
        hit(Row::WindowGroups, windows);
        hit(Row::Branches, matches!(request.branches, Branches::Sample { .. }));
        hit(Row::Beams, matches!(request.branches, Branches::Beams { .. }));
        let tokens = usage.prompt_tokens + usage.completion_tokens;
        hit(Row::RelativePositions, tokens > world.trained_context);
        for continuation in &outcome.continuations {
            match continuation.finish_reason {
                FinishReason::Stop => hit(Row::StopToken, true),
                FinishReason::Length => hit(Row::LengthLimit, true),
                FinishReason::Deadline => hit(Row::Deadline, true),
                FinishReason::Cancelled => {}
            }
        }
    }
}
