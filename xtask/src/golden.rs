//! `cargo xtask golden`: writes test vectors anew with other people's implementations.

use anyhow::{Context as _, ensure};

use crate::{command, root, run_shown};

/// What the scripts import, pinned: a new version may change vectors, and that should be a commit.
const PACKAGES: [&str; 3] = ["gguf==0.19.0", "numpy==2.4.6", "jinja2==3.1.6"];

/// Runs the scripts in xtask/golden (all, or those named without `.py`) at the root, in a venv under
/// target/.
pub fn run(names: &[String]) -> anyhow::Result<()> {
    let venv = root().join("target/golden-venv");
    let python = venv.join(if cfg!(windows) { "Scripts/python.exe" } else { "bin/python" });
    let python = python.to_str().context("the path of target/ is no UTF-8")?;
    if !venv.exists() {
        run_shown(command("python3", &["-m", "venv", venv.to_str().context("no UTF-8")?]))?;
    }
    let mut install =
        command(python, &["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]);
    install.args(PACKAGES);
    run_shown(install)?;
    let mut scripts = Vec::new();
    for entry in std::fs::read_dir(root().join("xtask/golden"))? {
        let path = entry?.path();
        let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let is_wanted = names.is_empty() || names.contains(&stem);
        if is_wanted && path.extension().is_some_and(|end| end == "py") {
            scripts.push(format!("xtask/golden/{stem}.py"));
        }
    }
    scripts.sort();
    ensure!(!scripts.is_empty(), "xtask/golden has no script named {}", names.join(", "));
    for script in scripts {
        println!("== {script}");
        run_shown(command(python, &[&script]))?;
    }
    Ok(())
}
