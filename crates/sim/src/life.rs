//! What is known of each request of a world, followed through the engine's events.

use std::collections::{HashMap, HashSet};

use reef_engine::event::{Event, Outcome, PauseKind, PauseReason, Told};
use reef_engine::request::Branches;
use reef_kv::Rung;

use crate::coverage::{Coverage, Row};
use crate::world::Arrival;

/// Where a request is.
#[derive(Clone, Debug)]
pub enum Stage {
    /// Not come yet.
    Ahead,
    /// The engine did not take it.
    Refused,
    /// Taken, not admitted.
    Waiting,
    /// Admitted.
    Running,
    /// Over.
    Finished(Box<Outcome>),
    /// Over, for a reason of its own.
    Failed(String),
}

/// A request from its arrival to its end.
#[derive(Clone, Debug)]
pub struct Life {
    /// Where it is.
    pub stage: Stage,
    /// Tokens told, per branch.
    pub tokens: HashMap<u32, Vec<u32>>,
    /// The branch whose last token was told and whose end is to follow.
    pub ending: Option<u32>,
    /// Branches that have ended while others went on.
    pub over: HashSet<u32>,
    /// Branches that stand still.
    pub paused: usize,
    /// Its caller has ended it.
    pub ended: bool,
    /// When it was over.
    pub finished_us: u64,
    /// Prompt tokens found in the cache.
    pub cached_tokens: usize,
}

impl Life {
    /// Whether `event` keeps the order of ends: a last token's end at once, and nothing of a branch after it.
    fn ends_in_order(&mut self, event: &Event) -> bool {
        let ending = self.ending.take();
        match event {
            Event::Token(token) => {
                self.ending = token.is_last.then_some(token.branch);
                ending.is_none() && !self.over.contains(&token.branch)
            }
            Event::Ended { branch, .. } => {
                ending.is_none_or(|ending| ending == *branch) && self.over.insert(*branch)
            }
            Event::Finished(_) => true,
            _ => ending.is_none(),
        }
    }
}

/// All requests of a world.
pub struct Lives {
    /// By number of arrival.
    pub of: Vec<Life>,
    by_key: HashMap<u64, usize>,
    /// What was told that cannot be.
    pub broken: Vec<String>,
}

impl Lives {
    /// `count` requests still to come.
    pub fn new(count: usize) -> Lives {
        let life = Life {
            stage: Stage::Ahead,
            tokens: HashMap::new(),
            ending: None,
            over: HashSet::new(),
            paused: 0,
            ended: false,
            finished_us: 0,
            cached_tokens: 0,
        };
        Lives { of: vec![life; count], by_key: HashMap::new(), broken: Vec::new() }
    }

    /// The engine has taken arrival `number` under `key`.
    pub fn taken(&mut self, number: usize, key: u64) {
        self.of[number].stage = Stage::Waiting;
        self.by_key.insert(key, number);
    }

    /// Whether the engine has something of arrival `number`.
    pub fn is_alive(&self, number: usize) -> bool {
        matches!(self.of[number].stage, Stage::Waiting | Stage::Running)
    }

    /// The live request that has `key`.
    pub fn with_key(&self, key: u64) -> Option<usize> {
        self.by_key.get(&key).copied().filter(|&number| self.is_alive(number))
    }

    /// Whether any request is with the engine.
    pub fn any_alive(&self) -> bool {
        (0..self.of.len()).any(|number| self.is_alive(number))
    }

    /// Takes what was told.
    pub fn hear(
        &mut self,
        told: &Told,
        now_us: u64,
        arrivals: &[Arrival],
        coverage: &mut Coverage,
    ) {
        let Some(number) = self.with_key(told.request) else {
            self.broken.push(format!("told of {} after its end: {:?}", told.request, told.event));
            return;
        };
        let life = &mut self.of[number];
        if !life.ends_in_order(&told.event) {
            self.broken.push(format!("request {}: {:?} out of order", told.request, told.event));
        }
        match &told.event {
            Event::Admitted { cached_tokens, .. } => {
                if !matches!(life.stage, Stage::Waiting) {
                    self.broken.push(format!("request {} admitted twice", told.request));
                }
                life.stage = Stage::Running;
                life.cached_tokens = *cached_tokens;
            }
            Event::Token(token) => {
                life.tokens.entry(token.branch).or_default().push(token.id);
            }
            Event::Relief(entry) => coverage.hit(rung_row(entry.rung)),
            Event::Paused(pause) => {
                life.paused += 1;
                coverage.hit(kind_row(pause.kind));
                coverage.hit(reason_row(pause.reason));
            }
            Event::Resumed { .. } => {
                life.paused = life.paused.saturating_sub(1);
                coverage.hit(Row::Resumed);
            }
            Event::Finished(outcome) => {
                life.finished_us = now_us;
                let request = &arrivals[number].request;
                self.broken.extend(disagreements(life, outcome, request.branches));
                life.stage = Stage::Finished(outcome.clone());
            }
            Event::Failed(error) => life.stage = Stage::Failed(error.to_string()),
            _ => {}
        }
    }
}

/// Where the outcome is not what was told before.
fn disagreements(life: &Life, outcome: &Outcome, branches: Branches) -> Vec<String> {
    let mut found = Vec::new();
    let usage = &outcome.usage;
    let mut check = |good: bool, what: &str| {
        if !good {
            found.push(format!("{what}: {usage:?}"));
        }
    };
    check(usage.cached_tokens < usage.prompt_tokens.max(1), "the last prompt token is computed");
    check(usage.kv.peak_bytes <= usage.budget_bytes, "peak above the budget");
    check(usage.drafts.1 <= usage.drafts.0, "more drafts accepted than proposed");
    if branches == Branches::One {
        let told = life.tokens.get(&0).cloned().unwrap_or_default();
        let given = outcome.continuations.first().map(|c| c.token_ids.clone()).unwrap_or_default();
        if told != given {
            found.push(format!("told {told:?}, given {given:?}"));
        }
        if usage.completion_tokens != given.len() {
            found.push(format!(
                "{} completion tokens, {} given",
                usage.completion_tokens,
                given.len()
            ));
        }
    }
    if outcome.continuations.len() > branches.given() {
        found.push(format!("{} continuations of {branches:?}", outcome.continuations.len()));
    }
    found
}

fn rung_row(rung: Rung) -> Row {
    match rung {
        Rung::Int8 => Row::RungInt8,
        Rung::K8V4 => Row::RungK8V4,
        Rung::Int4 => Row::RungInt4,
        Rung::Evict => Row::RungEvict,
    }
}

fn kind_row(kind: PauseKind) -> Row {
    match kind {
        PauseKind::Wait => Row::PauseWait,
        PauseKind::Swap => Row::PauseSwap,
        PauseKind::Recompute => Row::PauseRecompute,
    }
}

fn reason_row(reason: PauseReason) -> Row {
    match reason {
        PauseReason::Demand => Row::ReasonDemand,
        PauseReason::Priority => Row::ReasonPriority,
        PauseReason::Quota => Row::ReasonQuota,
        PauseReason::SpillFailure => Row::ReasonSpillFailure,
    }
}
