//! Not built yet: `reef eval` comes with its own change.

use crate::Common;

/// Measure what a KV format or policy does to the model's answers
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    common: Common,
}

/// Runs `reef eval`.
pub fn run(args: Args) -> anyhow::Result<()> {
    let _ = args.common.json;
    anyhow::bail!("`reef eval` is not built yet")
}
