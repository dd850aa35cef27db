//! `cargo xtask routers`: two servers behind each router that people put before vLLM.

use std::fs;
use std::path::Path;

use anyhow::Context as _;

use crate::{cargo, command, root, run_shown, target_directory};

/// Names of the venvs; each has its file in tests/routers/requirements, which names every package and
/// version. Two of them install commands of the same name.
const VENVS: [&str; 5] = ["smg", "vllm", "sglang", "dynamo", "events"];

/// Installs what is asked for under the target directory and runs tests/routers/run.py.
///
/// # Errors
/// An unknown router, an installation that fails, a router that does not work before our servers.
pub fn run(arguments: &[String]) -> anyhow::Result<()> {
    let folder = target_directory()?.join("routers");
    for name in chosen(arguments) {
        // An unknown name is told by the harness, which knows what there is.
        if VENVS.contains(&name.as_str()) {
            install(&name, &folder.join("venvs").join(&name))?;
        }
    }
    run_shown(cargo(&["build", "--release", "-p", "reef-cli"]))?;
    let reef = target_directory()?.join("release/reef");
    let mut harness = command("python3", &["tests/routers/run.py"]);
    harness.arg("--reef").arg(reef);
    harness.arg("--venvs").arg(folder.join("venvs")).arg("--logs").arg(folder.join("logs"));
    harness.args(arguments);
    run_shown(harness)
}

/// The names behind `--only`; all without.
fn chosen(arguments: &[String]) -> Vec<String> {
    let at = arguments.iter().position(|word| word == "--only");
    let behind = at.and_then(|at| arguments.get(at + 1));
    let joined = arguments.iter().find_map(|word| word.strip_prefix("--only="));
    let only = joined.map(str::to_owned).or(behind.cloned());
    let list = only.unwrap_or_else(|| VENVS.join(","));
    list.split(',').map(str::to_owned).collect()
}

/// A venv with exactly what its file names; made anew where the file has changed.
fn install(name: &str, venv: &Path) -> anyhow::Result<()> {
    let file = root().join("tests/routers/requirements").join(format!("{name}.txt"));
    let wanted =
        fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
    let installed = venv.join("installed.txt");
    if fs::read_to_string(&installed).is_ok_and(|text| text == wanted) {
        return Ok(());
    }
    if venv.exists() {
        fs::remove_dir_all(venv).with_context(|| format!("cannot remove {}", venv.display()))?;
    }
    let mut make = command("python3", &["-m", "venv"]);
    make.arg(venv);
    run_shown(make)?;
    // The file is complete; what packages ask for besides (a stub of another index) is not wanted.
    let mut pip = command(&venv.join("bin/pip").display().to_string(), &["install", "--quiet"]);
    pip.args(["--no-cache-dir", "--no-deps", "--requirement"]).arg(&file);
    run_shown(pip)?;
    fs::write(&installed, wanted).with_context(|| format!("cannot write {}", installed.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_behind_only_are_installed() {
        let chosen = |words: &[&str]| {
            let words: Vec<String> = words.iter().map(|word| word.to_string()).collect();
            chosen(&words)
        };
        assert_eq!(chosen(&[]), VENVS);
        assert_eq!(chosen(&["--only", "smg,events"]), ["smg", "events"]);
        assert_eq!(chosen(&["--model", "x", "--only=dynamo"]), ["dynamo"]);
    }

    #[test]
    fn every_venv_has_its_requirements() {
        for name in VENVS {
            let file = root().join("tests/routers/requirements").join(format!("{name}.txt"));
            let text = fs::read_to_string(&file).unwrap();
            assert!(text.lines().all(|line| line.contains("==")), "{name}");
        }
    }
}
