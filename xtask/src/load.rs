//! `cargo xtask load`: many clients in little memory, see `crates/load`.

use crate::{cargo, run_shown};

/// Builds `reef` and the load generator, optimized, and runs the latter with `arguments`: it starts the `reef` beside
/// it.
pub fn run(arguments: &[String]) -> anyhow::Result<()> {
    let packages = ["--package", "reef-cli", "--package", "reef-load"];
    let mut build = cargo(&["build", "--release", "--quiet"]);
    build.args(packages);
    run_shown(build)?;
    let mut load = cargo(&["run", "--release", "--quiet", "--package", "reef-load", "--"]);
    // Whether it holds, unless another of its words is given.
    if arguments.first().is_none_or(|word| word.starts_with("--")) {
        load.arg("hold");
    }
    load.args(arguments);
    run_shown(load)
}
