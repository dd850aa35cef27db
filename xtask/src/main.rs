//! The developer's words. `cargo xtask test` is the one command that CI and people run.

mod bench;
mod browser;
mod clients;
mod golden;
mod licenses;
mod load;
mod peers;
mod routers;
mod sim;
mod test;
mod tidy;

use std::path::PathBuf;
use std::process::{Command, ExitCode};

use anyhow::{Context as _, bail, ensure};

const USAGE: &str = "usage: cargo xtask WORD
  test               everything CI checks: models, style, licenses, lints, all tests
  tidy               the house rules that no compiler checks
  licenses           the licenses of all dependencies
  golden [NAME]      writes test vectors anew (xtask/golden/*.py), in a venv under target/
  bench [ARGUMENTS]  reef bench beside llama.cpp; appends to bench/results/
  load ARGUMENTS     streaming clients in a part of the KV memory they need, also beside llama-server
  sim ARGUMENTS      one simulated world (--seed N), or many (--seeds A..B)
  peers              installs the peers that benches measure against
  clients [--only NAME,...]  real OpenAI and vLLM clients, installed under target/, against a live server
  routers [--only NAMES]  two servers behind each router: smg, vllm, sglang, dynamo; events: vLLM's KV events";

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    match run(&words) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(words: &[String]) -> anyhow::Result<()> {
    let (word, rest) = words.split_first().context(USAGE)?;
    match (word.as_str(), rest) {
        ("test", []) => test::run(),
        ("tidy", []) => tidy::run(),
        ("licenses", []) => licenses::run(),
        ("golden", names) => golden::run(names),
        ("bench", arguments) => bench::run(arguments),
        ("load", arguments) => load::run(arguments),
        ("sim", arguments) => sim::run(arguments),
        ("peers", []) => peers::run(),
        ("clients", arguments) => clients::run(arguments),
        ("routers", arguments) => routers::run(arguments),
        _ => bail!("`{}` is no word of xtask\n{USAGE}", words.join(" ")),
    }
}

/// The repository's root.
fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Cargo's target directory, wherever it was put.
fn target_directory() -> anyhow::Result<PathBuf> {
    let metadata = read(cargo(&["metadata", "--format-version", "1", "--no-deps"]))?;
    let metadata: serde_json::Value = serde_json::from_str(&metadata)?;
    let path = metadata["target_directory"].as_str().context("cargo named no target directory")?;
    Ok(path.into())
}

/// A command that will run at the root.
fn command(program: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.current_dir(root()).args(arguments);
    command
}

/// This cargo, at the root, as if started from a shell: what `cargo run` told this program about its own
/// package would make build scripts that look at it run again (ring's, and all that is built upon it).
fn cargo(arguments: &[&str]) -> Command {
    let mut command = command(&std::env::var("CARGO").unwrap_or("cargo".into()), arguments);
    for (name, _) in std::env::vars_os() {
        let told = name.to_string_lossy();
        if told.starts_with("CARGO_PKG_") || told.starts_with("CARGO_MANIFEST_") {
            command.env_remove(&name);
        }
    }
    command
}

/// Runs a command with its output shown; fails where it does.
fn run_shown(mut command: Command) -> anyhow::Result<()> {
    let status = command.status().with_context(|| format!("cannot start {}", line(&command)))?;
    ensure!(status.success(), "{} ended with {status}", line(&command));
    Ok(())
}

/// A command as it would be typed. (Its `Debug` has the directory and every variable, too.)
fn line(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

/// What a command prints on stdout; its stderr is shown; fails where it does.
fn read(mut command: Command) -> anyhow::Result<String> {
    command.stderr(std::process::Stdio::inherit());
    let output = command.output().with_context(|| format!("cannot start {}", line(&command)))?;
    ensure!(output.status.success(), "{} ended with {}", line(&command), output.status);
    let text = String::from_utf8(output.stdout);
    text.with_context(|| format!("{} printed no UTF-8", line(&command)))
}
