//! Installing clients below the target directory. A second run installs nothing.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::Context as _;

use super::client::{Client, Kind};
use super::remove;
use crate::root;

/// A program to run scripts with, or why there is none on this machine.
pub type Installed = Result<PathBuf, String>;

/// Installs a client into `home`.
///
/// # Errors
/// Of the file system; a client that cannot be had is no error.
pub fn client(home: &Path, client: &Client) -> anyhow::Result<Installed> {
    match client.kind {
        Kind::Python => python(home, client.name, client.without_libraries),
        Kind::Node => node(home),
    }
}

/// A venv with what requirements/NAME.txt lists, and nothing else: the list is complete, so that packages
/// which a client asks for and never uses (PyTorch) can be left out.
pub fn python(home: &Path, name: &str, without: Option<&str>) -> anyhow::Result<Installed> {
    let path = root().join("tests/clients/requirements").join(format!("{name}.txt"));
    let program =
        home.join(if cfg!(windows) { "venv/Scripts/python.exe" } else { "venv/bin/python" });
    let venv = home.join("venv");
    once(home, &[&path], program, |program| {
        let mut make = Command::new("python3");
        make.args(["-m", "venv"]).arg(&venv);
        let mut pip = Command::new(program);
        let quietly = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"];
        pip.args(quietly).args(["--no-cache-dir", "--no-deps", "--requirement"]).arg(&path);
        let outcome = said(make).and_then(|()| said(pip));
        if let (Ok(()), Some(package)) = (&outcome, without) {
            delete_libraries(&venv, package).map_err(|error| error.to_string())?;
        }
        outcome
    })
}

/// node_modules in `home`, by the lock file.
fn node(home: &Path) -> anyhow::Result<Installed> {
    let files =
        ["package.json", "package-lock.json"].map(|name| root().join("tests/clients").join(name));
    once(home, &[&files[0], &files[1]], "node".into(), |_| {
        for file in &files {
            let copied = fs::copy(file, home.join(file.file_name().unwrap_or_default()));
            copied.map_err(|error| format!("{}: {error}", file.display()))?;
        }
        let mut npm = Command::new("npm");
        npm.current_dir(home).args(["ci", "--ignore-scripts", "--no-audit", "--no-fund"]);
        said(npm)
    })
}

/// Installs anew when the files that say what differ from those of the last time.
fn once(
    home: &Path,
    files: &[&Path],
    program: PathBuf,
    install: impl FnOnce(&Path) -> Result<(), String>,
) -> anyhow::Result<Installed> {
    let mut wanted = String::new();
    for file in files {
        let text = fs::read_to_string(file);
        wanted += &text.with_context(|| format!("cannot read {}", file.display()))?;
    }
    let stamp = home.join("installed.txt");
    if fs::read_to_string(&stamp).is_ok_and(|last| last == wanted) {
        return Ok(Ok(program));
    }
    remove(home)?;
    fs::create_dir_all(home)?;
    println!("installing into {}", home.display());
    if let Err(reason) = install(&program) {
        remove(home)?;
        return Ok(Err(reason));
    }
    fs::write(&stamp, wanted)?;
    Ok(Ok(program))
}

/// Runs a command; the last line that it said where it fails.
fn said(mut command: Command) -> Result<(), String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output();
    let output = output.map_err(|error| format!("cannot start {program}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    let error = text.lines().find(|line| line.to_lowercase().contains("error"));
    Err(error.or(text.lines().last()).unwrap_or("it failed silently").trim().into())
}

/// Deletes `*.so` right in an installed package.
fn delete_libraries(venv: &Path, package: &str) -> std::io::Result<()> {
    for python in fs::read_dir(venv.join("lib"))? {
        let Ok(files) = fs::read_dir(python?.path().join("site-packages").join(package)) else {
            continue;
        };
        for file in files {
            let path = file?.path();
            if path.extension().is_some_and(|end| end == "so") {
                fs::remove_file(path)?;
            }
        }
    }
    Ok(())
}
