//! `--html FILE`: a plan, or a log and its plan, as one page.

use std::path::Path;

use anyhow::Context as _;
use reef_plan::engines;
use reef_plan::fit::Fit;
use reef_plan::html;
use reef_plan::log::compare::Line;
use reef_plan::model::Model;

use crate::output;

/// Writes the page of `fit` to `path`; `log` are the lines of a comparison with a log.
pub fn write(path: &Path, model: &Model, fit: &Fit, log: Option<&[Line]>) -> anyhow::Result<()> {
    let engine = engines::find(fit.plan.engine).context("a plan names its engine")?;
    let page = html::page(engine, model, fit, log)?;
    std::fs::write(path, page).with_context(|| format!("cannot write {}", path.display()))?;
    output::note(&format!("wrote {}", path.display()));
    Ok(())
}
