//! Not built yet: `reef run` comes with its own change.

use crate::Common;

/// Generate text from one prompt and tell what its KV memory went through
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    common: Common,
}

/// Runs `reef run`.
pub fn run(args: Args) -> anyhow::Result<()> {
    let _ = args.common.json;
    anyhow::bail!("`reef run` is not built yet")
}
