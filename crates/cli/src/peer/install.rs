//! llama-cpp-python in a venv of its own: never a dependency of Reef, always the same version.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};

use crate::output;
use crate::pull::{self, cache_dir};

const PACKAGE: &str = "llama-cpp-python==0.3.36";
const FOLDER: &str = "peer/llama-cpp-python-0.3.36";
/// Names a Python that has the package, in place of the venv.
const OVERRIDE: &str = "REEF_PEER_PYTHON";

/// A Python that has the package; builds the venv the first time.
pub fn python() -> anyhow::Result<PathBuf> {
    if let Some(python) = std::env::var_os(OVERRIDE) {
        return Ok(python.into());
    }
    let venv = cache_dir()?.join(FOLDER);
    let python = venv.join(if cfg!(windows) { "Scripts/python.exe" } else { "bin/python" });
    // Written last: a venv without it is half of one.
    let ready = venv.join("ready");
    if ready.exists() {
        return Ok(python);
    }
    let parent = venv.parent().context("the venv has no parent folder")?;
    fs::create_dir_all(parent).with_context(|| format!("cannot create {}", parent.display()))?;
    let _lock = pull::acquire_lock(&venv.with_extension("lock"), PACKAGE)?;
    if !ready.exists() {
        build(&venv, &python)?;
        fs::write(&ready, PACKAGE).with_context(|| format!("cannot write {}", ready.display()))?;
    }
    Ok(python)
}

fn build(venv: &Path, python: &Path) -> anyhow::Result<()> {
    output::note(&format!(
        "installing {PACKAGE} into {}: it compiles llama.cpp, which takes about 8 minutes on 2 cores",
        venv.display()
    ));
    run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(venv))?;
    let pip = ["-m", "pip", "install", "--disable-pip-version-check", PACKAGE];
    run(Command::new(python).args(pip))
        .context("a C++ compiler is needed (Debian, Ubuntu: g++); or give the path of a llama-bench to --peer")
}

/// Runs a step with its words on stderr: stdout is for the results of the bench.
fn run(command: &mut Command) -> anyhow::Result<()> {
    let status = command.stdout(std::io::stderr()).status();
    let status = status.with_context(|| format!("cannot start {command:?}"))?;
    ensure!(status.success(), "{command:?} ended with {status}");
    Ok(())
}
