//! `cargo xtask sim`: simulated worlds, see `crates/sim`.

use crate::{cargo, run_shown};

/// Worlds that CI runs, and how often each row of the coverage table must be hit in them.
const CI_WORLDS: [&str; 4] = ["--seeds", "0..1500", "--least", "100"];

/// Runs the simulation with `arguments`. Optimised as tests are, with their assertions and poison.
pub fn run(arguments: &[String]) -> anyhow::Result<()> {
    let mut command = cargo(&["run", "--quiet", "--package", "reef-sim", "--"]);
    command.args(arguments);
    run_shown(command)
}

/// What CI runs: many worlds, and deliberate mistakes that must be caught.
pub fn run_all() -> anyhow::Result<()> {
    run(&CI_WORLDS.map(String::from))?;
    run_shown(cargo(&[
        "test",
        "--package",
        "reef-sim",
        "--features",
        "mutants",
        "--test",
        "mutants",
    ]))
}
