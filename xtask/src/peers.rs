//! `cargo xtask peers`: installs what benches measure against.

use crate::{cargo, run_shown};

/// Starts every peer once without measuring: `reef bench` installs the ones that are missing.
pub fn run() -> anyhow::Result<()> {
    run_shown(cargo(&["run", "--release", "--package", "reef-cli", "--", "pull", "smollm2"]))?;
    let bench = ["run", "--release", "--package", "reef-cli", "--", "bench", "--prefill", "0"];
    let mut bench = cargo(&bench);
    bench.args(["--decode", "0", "--peer", "llama-cpp-python"]);
    run_shown(bench)
}
