//! `reef eval profile`: what lossy KV memory costs a model, by which its relief is then guided.

use crate::Common;
use crate::load::{ModelArgs, open};
use crate::output::{print_json, print_line};
use crate::profiles;

/// What lossy KV memory costs the model, measured anew and kept: the guard of 4-bit keys, the harm of each
/// rung, the rotation of keys
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    model: ModelArgs,
}

/// Runs `reef eval profile`.
pub fn run(args: Args) -> anyhow::Result<()> {
    let gguf = open(&args.model.path()?)?;
    let mut runner = args.model.measuring_runner(&gguf, args.common.threads())?;
    let profile = profiles::measure(&gguf, &mut runner, args.model.block_size)?;
    if args.common.json {
        return print_json(&profiles::document(&profile));
    }
    print_line(
        "expected rise of the negative log-likelihood, in nats a token, were all KV memory so:",
    )?;
    for (format, nats) in profile.format_nats.iter() {
        print_line(&format!("  {:<9} {nats:.6}", format.name()))?;
    }
    print_line(&format!(
        "  dropped   {:.6}  (all but the first block and the recent tail)",
        profile.evict_nats
    ))?;
    let bear = if profile.four_bit_keys { "may go" } else { "do not go" };
    print_line(&format!("keys {bear} to 4 bits; rotation: {}", profile.key_rotation.name()))
}
