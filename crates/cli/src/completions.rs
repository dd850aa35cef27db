//! `reef completions`: what a shell needs to complete reef's words.

use std::io::Write as _;

use clap::Command;
use clap_complete::{Shell, generate};

/// Print a script that completes reef's words in your shell
#[derive(clap::Args)]
pub struct Args {
    /// The shell
    shell: Shell,
}

/// Prints the script for the words of `cli`.
pub fn run(args: Args, mut cli: Command) -> anyhow::Result<()> {
    let mut script = Vec::new();
    generate(args.shell, &mut cli, "reef", &mut script);
    std::io::stdout().write_all(&script)?;
    Ok(())
}
