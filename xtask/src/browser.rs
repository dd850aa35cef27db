//! A browser for the tests of the live page.

use std::path::Path;

use crate::{command, read, run_shown};

/// Installs Chromium where there is none and the system's packages may be added to: as root on Debian and its
/// like. Elsewhere it says what to do; the page's tests are skipped without a browser, and say so.
pub fn provide() -> anyhow::Result<()> {
    let named = std::env::var_os("REEF_CHROMIUM");
    let names = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"];
    if named.is_some_and(|path| Path::new(&path).is_file()) || names.into_iter().any(is_program) {
        return Ok(());
    }
    let reason = match is_root() && is_program("apt-get") {
        true => match install() {
            Ok(()) => return Ok(()),
            Err(error) => format!("{error:#}"),
        },
        false => "it can be installed only by root with apt-get".into(),
    };
    println!(
        "== skip: the page in a browser (no Chromium: {reason}; install it, or name one in REEF_CHROMIUM)"
    );
    Ok(())
}

fn install() -> anyhow::Result<()> {
    apt_get(&["update"])?;
    apt_get(&["-y", "--no-install-recommends", "install", "chromium"])
}

fn apt_get(words: &[&str]) -> anyhow::Result<()> {
    // Nobody is there to answer, and nobody waits for a mirror or another apt-get for long.
    let patience = ["-qq", "-o", "Acquire::http::Timeout=20", "-o", "DPkg::Lock::Timeout=60"];
    let mut run = command("apt-get", &patience);
    run.args(words).env("DEBIAN_FRONTEND", "noninteractive").stdout(std::process::Stdio::null());
    run_shown(run)
}

fn is_root() -> bool {
    read(command("id", &["-u"])).is_ok_and(|id| id.trim() == "0")
}

fn is_program(name: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|place| place.join(name).is_file())
}
