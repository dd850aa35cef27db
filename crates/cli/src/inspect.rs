//! Not built yet: `reef inspect` comes with its own change.

use crate::Common;

/// Show what is in a GGUF file
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    common: Common,
}

/// Runs `reef inspect`.
pub fn run(args: Args) -> anyhow::Result<()> {
    let _ = args.common.json;
    anyhow::bail!("`reef inspect` is not built yet")
}
