//! The pool predicted from model, device and flags alone, beside what the log printed.

use serde::Serialize;

use super::EndToEndTally;
use super::row::Row;
use crate::engines::setup::Setup;
use crate::engines::{Engine, GIB};
use crate::model::Model;

/// A pool per GPU in GiB.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EndToEnd {
    /// Best estimate.
    pub predicted_gib: f64,
    /// Lower end of the stated range.
    pub low_gib: f64,
    /// Upper end of the stated range.
    pub high_gib: f64,
    /// As reported.
    pub reported_gib: f64,
    /// `(predicted - reported) / |reported|`.
    pub relative_error: f64,
    /// Whether the report is in the range.
    pub covered: bool,
}

/// Compares, where the row reports a pool on a device that the table knows, of a model whose parameters
/// can be counted.
pub fn compare(row: &Row, engine: &dyn Engine, model: &Model, setup: &Setup) -> Option<EndToEnd> {
    // A share of nothing means nothing: rows that were refused for want of any pool are judged as starts.
    let reported_gib = row.printed("kv_available_gib")?.value;
    if reported_gib <= 0.0 {
        return None;
    }
    setup.total.as_ref()?;
    let plan = engine.plan(model, setup).ok()?;
    let kv = plan.ledger.kv?;
    // A row that does not say its weight format, on a device that the published format does not fit, ran
    // another one: nothing to compare.
    let unstated = row.weight_format_named().is_none();
    let weights = plan.ledger.weights.as_ref().map_or(0.0, |weights| weights.low);
    if unstated && plan.ledger.reserved.is_some_and(|reserved| weights > reserved.value) {
        return None;
    }
    let [predicted_gib, low_gib, high_gib] = [kv.value, kv.low, kv.high].map(|bytes| bytes / GIB);
    Some(EndToEnd {
        predicted_gib,
        low_gib,
        high_gib,
        reported_gib,
        relative_error: (predicted_gib - reported_gib) / reported_gib.abs().max(0.01),
        covered: (low_gib..=high_gib).contains(&reported_gib),
    })
}

/// Median and 90th percentile (nearest rank) of the errors, and the rows covered.
pub fn tally<'a>(compared: impl Iterator<Item = &'a EndToEnd>) -> EndToEndTally {
    let compared: Vec<&EndToEnd> = compared.collect();
    let mut errors: Vec<f64> = compared.iter().map(|row| row.relative_error.abs()).collect();
    errors.sort_by(f64::total_cmp);
    let rank = |share: f64| {
        let index = (share * errors.len() as f64).ceil() as usize;
        errors.get(index.saturating_sub(1)).copied().unwrap_or(0.0)
    };
    EndToEndTally {
        n: errors.len(),
        median_error: rank(0.5),
        p90_error: rank(0.9),
        covered: compared.iter().filter(|row| row.covered).count(),
    }
}
