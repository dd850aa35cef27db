//! Whether an engine starts, predicted and reported.

use serde::Serialize;

use super::row::Row;
use crate::engines::setup::Setup;
use crate::engines::vllm::behavior;
use crate::engines::vllm::pool::Layout;
use crate::engines::{Engine, Plan};
use crate::figure::{Figure, Unit};
use crate::model::Model;

/// A verdict beside what happened.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Start {
    /// What happened.
    pub reported: bool,
    /// What was predicted; `None` where nothing decides.
    pub predicted: Option<bool>,
    /// Whether they agree.
    pub right: Option<bool>,
    /// What decided.
    pub from: &'static str,
}

/// The verdict for a row that says whether it started; `None` where it does not, or failed for a cause
/// that no sizing foretells.
pub fn start(row: &Row, engine: &dyn Engine, model: &Model, setup: &Setup) -> Option<Start> {
    let reported = row.started().filter(|_| !row.failed_otherwise())?;
    let (predicted, from) = predict(row, engine, model, setup);
    let right = predicted.map(|predicted| predicted == reported);
    Some(Start { reported, predicted, right, from })
}

fn predict(
    row: &Row,
    engine: &dyn Engine,
    model: &Model,
    setup: &Setup,
) -> (Option<bool>, &'static str) {
    // Without its length a row refuses for certain only where nothing is left at all.
    let answer = |plan: Plan| match plan.verdict.answer() {
        Some(false) if setup.max_model_len.is_none() => {
            plan.ledger.kv.as_ref().filter(|kv| kv.value <= 0.0).map(|_| false)
        }
        answer => answer,
    };
    if let Some(kv) = row.bytes("kv_available_gib") {
        let mut with_log = setup.clone();
        let figure = Figure::measured(kv.value, Unit::Bytes, "kv_available_gib");
        with_log.measured.kv = Some(figure);
        if let Ok(plan) = engine.plan(model, &with_log) {
            return (answer(plan), "kv_available_gib");
        }
    }
    if engine.name() == "vllm"
        && let Some(decided) = from_printed_blocks(row, model, setup)
    {
        return (decided, "printed blocks or tokens");
    }
    let tokens = row.printed("kv_tokens").filter(|tokens| tokens.value > 0.0);
    if engine.name() != "vllm" && tokens.is_some() {
        return (Some(true), "kv_tokens");
    }
    match engine.plan(model, setup) {
        Ok(plan) => (answer(plan), "model, device and flags"),
        Err(_) => (None, "nothing"),
    }
}

/// vLLM's own comparison with the numbers that it printed: blocks, else tokens of a model with one group.
/// The outer `None`: it printed neither. The inner: the row leaves the length open, and the trained one
/// would not do.
fn from_printed_blocks(row: &Row, model: &Model, setup: &Setup) -> Option<Option<bool>> {
    let length = setup.max_model_len.or(model.trained_context)?;
    let batched = behavior::batched_tokens(model, setup, Some(length));
    let layout = Layout::new(model, setup, batched).ok()?;
    let enough = match (row.whole("num_blocks"), row.whole("kv_tokens")) {
        (Some(blocks), _) => layout.request_blocks(length) <= blocks,
        (None, Some(tokens)) if layout.group_count() == 1 => tokens >= length,
        _ => return None,
    };
    Some((enough || setup.max_model_len.is_some()).then_some(enough))
}
