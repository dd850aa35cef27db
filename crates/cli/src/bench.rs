//! Not built yet: `reef bench` comes with its own change.

use crate::Common;

/// Measure prefill and decode speed, also beside a peer engine
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    common: Common,
}

/// Runs `reef bench`.
pub fn run(args: Args) -> anyhow::Result<()> {
    let _ = args.common.json;
    anyhow::bail!("`reef bench` is not built yet")
}
