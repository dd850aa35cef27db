//! Not built yet: `reef tokenize` comes with its own change.

use crate::Common;

/// Turn text into token ids
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    common: Common,
}

/// Runs `reef tokenize`.
pub fn run(args: Args) -> anyhow::Result<()> {
    let _ = args.common.json;
    anyhow::bail!("`reef tokenize` is not built yet")
}
