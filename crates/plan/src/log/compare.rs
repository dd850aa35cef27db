//! The plan of a start against its log, line by line.

use serde::Serialize;

use super::Reading;
use super::facts::Quantity;
use super::reason::{self, Case};
use super::start::{self, Known};
use crate::engines::setup::Setup;
use crate::engines::{Engine, Plan, PlanError};
use crate::figure::Figure;
use crate::fit::{self, Fit};
use crate::model::Model;

/// Differences below this share of the log's number are called equal beside the rounding.
const EQUAL: f64 = 0.001;

/// How a line of the plan stands to the log's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Agreement {
    /// The same within the rounding of the log.
    Equal,
    /// Not the same, but inside the range that the plan gives.
    InRange,
    /// Outside it.
    Differs,
    /// The plan has no such number.
    OnlyLog,
}

/// What a line is predicted from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Basis {
    /// Model, device and flags alone, as before the start.
    Flags,
    /// The pool that the log prints: arithmetic only.
    LogsPool,
}

/// One line of the comparison.
#[derive(Clone, Debug, Serialize)]
pub struct Line {
    /// What it is.
    pub name: &'static str,
    /// As the log prints it.
    pub log: Figure,
    /// As planned.
    pub plan: Option<Figure>,
    /// What the plan rests on.
    pub basis: Basis,
    /// Plan less log.
    pub difference: Option<f64>,
    /// The same as a share of the log's number.
    pub relative: Option<f64>,
    /// In one word.
    pub agreement: Agreement,
    /// Why they differ, where they do.
    pub reason: Option<String>,
}

/// A log explained.
#[derive(Debug, Serialize)]
pub struct Comparison {
    /// The plan from model, device and flags alone.
    pub before: Plan,
    /// The plan with everything that the log measured in its place.
    pub fit: Fit,
    /// Line by line.
    pub lines: Vec<Line>,
}

/// Plans the start of a log, before and after, and explains what differs.
///
/// # Errors
/// What the engine's plan fails with.
pub fn compare(
    engine: &dyn Engine,
    model: &Model,
    reading: &Reading,
    known: &Known,
) -> Result<Comparison, PlanError> {
    let setup = start::setup(reading, model, known);
    let before = engine.plan(model, &setup)?;
    let mut filled = Setup { measured: start::measured(&reading.facts), ..setup.clone() };
    if filled.measured.kv.is_none() {
        filled.measured.kv = pool_of_blocks(reading, &before, engine, model, &setup);
    }
    let fit = fit::fit(engine, model, filled.clone())?;
    let case = Case { engine, model, reading, setup: &setup, filled: &filled, before: &before };
    let lines = lines(&case, &fit.plan);
    Ok(Comparison { before, fit, lines })
}

/// Where a log prints blocks but no bytes: blocks times the bytes of a planned one.
fn pool_of_blocks(
    reading: &Reading,
    before: &Plan,
    engine: &dyn Engine,
    model: &Model,
    setup: &Setup,
) -> Option<Figure> {
    let blocks = reading.facts.figure(Quantity::Blocks)?;
    // The bytes of a block do not depend on the pool, but a plan without a pool does not give them.
    let some = Figure::measured(1e12, crate::figure::Unit::Bytes, "a pool of any size");
    let probe = || engine.plan(model, &Setup { kv_budget: Some(some), ..setup.clone() }).ok();
    let pool = before.pool.clone().or_else(|| probe()?.pool)?;
    let bytes = pool.block_bytes.value;
    let formula = format!("{} blocks of {} * {bytes} bytes", blocks.value, blocks.explanation());
    Some(Figure::derived(blocks.value * bytes, crate::figure::Unit::Bytes, formula))
}

fn lines(case: &Case, filled: &Plan) -> Vec<Line> {
    let facts = &case.reading.facts;
    let (ledger, measured) = (&case.before.ledger, &case.filled.measured);
    let mut lines = Vec::new();
    let mut add = |name, log: Option<Figure>, plan: Option<&Figure>, basis| {
        if let Some(log) = log {
            lines.push(line(name, log, plan.cloned(), basis));
        }
    };
    let figure = |quantity| facts.figure(quantity);
    add("engine may use", figure(Quantity::Reserved), ledger.reserved.as_ref(), Basis::Flags);
    add("weights", measured.weights.clone(), ledger.weights.as_ref(), Basis::Flags);
    add("activation peak", measured.activation.clone(), ledger.activation.as_ref(), Basis::Flags);
    let other = ledger.non_torch.as_ref();
    add("outside the tensor library", measured.non_torch.clone(), other, Basis::Flags);
    add("CUDA graphs", measured.graphs.clone(), ledger.graphs.as_ref(), Basis::Flags);
    add("left for KV", figure(Quantity::Kv), ledger.kv.as_ref(), Basis::Flags);
    // llama.cpp sizes its pool by flags alone: nothing more follows from it.
    if case.engine.name() != "llamacpp" {
        let pool = filled.pool.as_ref();
        let basis = Basis::LogsPool;
        let per_token = filled.kv_bytes_per_token.as_ref();
        add("KV per token", figure(Quantity::BytesPerToken), per_token, basis);
        let needed = filled.kv_needed.as_ref();
        add("KV of one full request", figure(Quantity::KvNeeded), needed, basis);
        let size = pool.map(|pool| {
            Figure::derived(pool.block_size as f64, crate::figure::Unit::Tokens, "smallest block")
        });
        add("tokens of a block", figure(Quantity::BlockSize), size.as_ref(), basis);
        // Blocks that the pool itself was taken from prove nothing.
        let from_blocks = figure(Quantity::Kv).is_none();
        let blocks = figure(Quantity::Blocks).filter(|_| !from_blocks);
        add("blocks", blocks, pool.map(|pool| &pool.blocks), basis);
        add("tokens as printed", figure(Quantity::Tokens), filled.printed_tokens.as_ref(), basis);
        add(
            "full requests at once",
            figure(Quantity::Concurrency),
            filled.concurrency.as_ref(),
            basis,
        );
        add("longest request", figure(Quantity::MaxLen), filled.max_len.as_ref(), basis);
    }
    let known = lines.clone();
    for line in &mut lines {
        if !matches!(line.agreement, Agreement::Equal) {
            line.reason = reason::reason(case, line, &known);
        }
    }
    lines
}

fn line(name: &'static str, log: Figure, plan: Option<Figure>, basis: Basis) -> Line {
    let Some(planned) = &plan else {
        return Line {
            name,
            log,
            plan: None,
            basis,
            difference: None,
            relative: None,
            agreement: Agreement::OnlyLog,
            reason: None,
        };
    };
    let difference = planned.value - log.value;
    let relative = (log.value != 0.0).then(|| difference / log.value);
    let overlaps = planned.low <= log.high && planned.high >= log.low;
    // What follows from the log's pool has only the log's rounding for a range.
    let agreement = match basis {
        Basis::LogsPool if overlaps => Agreement::Equal,
        _ if relative.is_some_and(|share| share.abs() <= EQUAL) => Agreement::Equal,
        _ if (log.low..=log.high).contains(&planned.value) => Agreement::Equal,
        Basis::Flags if overlaps => Agreement::InRange,
        _ => Agreement::Differs,
    };
    Line { name, log, plan, basis, difference: Some(difference), relative, agreement, reason: None }
}

/// Whether a planned figure equals the log's within the rounding of both.
pub fn meets(log: &Figure, plan: Option<&Figure>) -> bool {
    plan.is_some_and(|plan| {
        let near = (plan.value - log.value).abs() <= EQUAL * log.value.abs();
        near || plan.low <= log.high && plan.high >= log.low
    })
}
