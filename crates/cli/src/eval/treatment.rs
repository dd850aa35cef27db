//! Options that say what is done to KV memory in a measure.

use anyhow::bail;
use reef_engine::config::pool_config;
use reef_engine::eval::{Eviction, Treatment};
use reef_kv::page::PageFormat;
use reef_model::runner::ModelRunner;

use crate::output::WrongArguments;

/// What is done beside the format.
#[derive(clap::Args, Clone, Debug)]
pub struct TreatmentArgs {
    /// Tokens at the start that stay f16
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub sinks: usize,
    /// Tokens at the end that stay f16
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub tail: usize,
    /// Layers that stay f16, such as 0,1,29
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub pin_layers: Vec<usize>,
    /// What to drop: window, sinks, h2o, tova, keydiff or random (`ppl` also knows h2o-reference)
    #[arg(long, value_name = "POLICY", requires = "budget")]
    pub policy: Option<String>,
    /// Keep at most N tokens, dropping one block at a time
    #[arg(long, value_name = "N", requires = "policy")]
    pub budget: Option<usize>,
    /// Seed of a policy that draws lots
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
}

impl TreatmentArgs {
    /// The treatment with every sealed block in `format`.
    pub fn treatment(&self, format: PageFormat) -> Treatment {
        let eviction = self
            .policy
            .clone()
            .zip(self.budget)
            .map(|(policy, budget_tokens)| Eviction { policy, budget_tokens, seed: self.seed });
        Treatment { format, sink_tokens: self.sinks, tail_tokens: self.tail, eviction }
    }

    /// Refuses what no treatment can do.
    pub fn check(&self, block_size: usize, runner: &ModelRunner) -> anyhow::Result<()> {
        if let Some(budget) = self.budget {
            check_budget(budget, block_size)?;
        }
        check_layers(&self.pin_layers, runner.spec().layers)?;
        self.treatment(PageFormat::F16).rules().map_err(|e| WrongArguments(e.to_string()))?;
        Ok(())
    }
}

/// Refuses a layer that the model does not have.
pub fn check_layers(pinned: &[usize], layers: usize) -> anyhow::Result<()> {
    if let Some(layer) = pinned.iter().find(|layer| **layer >= layers) {
        bail!(WrongArguments(format!(
            "--pin-layers names layer {layer}: this model has 0 to {}",
            layers - 1
        )));
    }
    Ok(())
}

/// Refuses a budget that does not hold what is never dropped.
pub fn check_budget(budget: usize, block_size: usize) -> anyhow::Result<()> {
    let least = 3 * block_size;
    if budget < least {
        bail!(WrongArguments(format!(
            "--budget is {budget}: a first, a sealed and an open block of {block_size} take {least}"
        )));
    }
    Ok(())
}

/// Tokens of a window: `--context`, else the trained length, which only a token budget may exceed.
pub fn context(asked: Option<usize>, trained: usize, budgeted: bool) -> anyhow::Result<usize> {
    let context = asked.unwrap_or(trained);
    if context < 2 || (context > trained && !budgeted) {
        bail!(WrongArguments(format!(
            "--context is {context}: want 2 to {trained}, the trained length (more only with --policy \
             and --budget)"
        )));
    }
    Ok(context)
}

/// Bytes of a token in sealed blocks of `format`, with scales and tables, without pinned layers.
pub fn bytes_per_token(runner: &ModelRunner, block_size: usize, format: PageFormat) -> f64 {
    pool_config(runner.spec(), block_size, 0).bytes_per_token_with_tables(format)
}
