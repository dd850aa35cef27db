//! `cargo xtask test`: all that must hold before a change lands.

use std::process::Command;
use std::time::Instant;

use anyhow::{Context as _, bail};

use crate::{browser, cargo, command, licenses, read, run_shown, sim, target_directory, tidy};

/// Platforms that must at least type-check. (Their programs cannot run here.)
const FOREIGN_TARGETS: [&str; 3] =
    ["aarch64-unknown-linux-gnu", "aarch64-apple-darwin", "x86_64-pc-windows-msvc"];

/// Runs every stage in order of cost, all of them even when one fails, so that one run tells all.
pub fn run() -> anyhow::Result<()> {
    let mut stages = Stages::default();
    stages.run("format", || run_shown(cargo(&["fmt", "--all", "--check"])));
    stages.run("tidy", tidy::run);
    stages.run("licenses", licenses::run);
    stages.run("lints", || {
        run_shown(cargo(&["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]))
    });
    stages.run("documentation", || {
        let mut doc =
            cargo(&["doc", "--workspace", "--no-deps", "--document-private-items", "--quiet"]);
        // Links must lead somewhere; that a private item is hidden from others does not matter here.
        doc.env("RUSTDOCFLAGS", "-D warnings -A rustdoc::private_intra_doc_links");
        run_shown(doc)
    });
    foreign_targets(&mut stages);
    // With the tests comes the program `reef`: alone it would be built from other features of the same crates.
    stages.run("build", || run_shown(cargo(&["test", "--workspace", "--no-run", "--quiet"])));
    for alias in ["smollm2", "gemma3"] {
        stages.run(&format!("model {alias}"), || pull(alias));
    }
    stages.run("browser", browser::provide);
    stages.run("tests", || run_shown(cargo(&["test", "--workspace", "--no-fail-fast"])));
    // Off by default, so that nothing above has compiled it.
    stages.run("traces", || {
        let otlp = ["test", "--workspace", "--features", "reef-server/otlp"];
        run_shown(cargo(&[&otlp[..], &["--test", "system", "telemetry"]].concat()))
    });
    stages.run("simulation", sim::run_all);
    stages.finish()
}

/// Fetches a model with the program that the tests have built.
fn pull(alias: &str) -> anyhow::Result<()> {
    let program = format!("debug/reef{}", std::env::consts::EXE_SUFFIX);
    let mut pull = Command::new(target_directory()?.join(program));
    pull.args(["pull", alias]);
    run_shown(pull)
}

/// Checks the targets whose standard library rustup has; the others are named, not failed: CI
/// machines may not be able to fetch them.
fn foreign_targets(stages: &mut Stages) {
    let installed = read(command("rustup", &["target", "list", "--installed"])).unwrap_or_default();
    for target in FOREIGN_TARGETS {
        if installed.lines().any(|line| line == target) {
            // Without default features: TLS would need a C compiler for the target.
            let check = ["check", "--workspace", "--no-default-features", "--target", target];
            stages.run(&format!("check {target}"), || run_shown(cargo(&check)));
        } else {
            println!("== skip: check {target} (rustup target add {target} enables it)");
        }
    }
}

/// What ran, for how long, and how it ended.
#[derive(Default)]
struct Stages {
    lines: Vec<String>,
    failed: Vec<String>,
}

impl Stages {
    fn run(&mut self, name: &str, stage: impl FnOnce() -> anyhow::Result<()>) {
        println!("== {name}");
        let start = Instant::now();
        let result = stage().with_context(|| format!("stage `{name}` failed"));
        let seconds = start.elapsed().as_secs_f64();
        if let Err(error) = &result {
            eprintln!("error: {error:#}");
            self.failed.push(name.to_string());
        }
        let verdict = if result.is_ok() { "ok    " } else { "FAILED" };
        self.lines.push(format!("{verdict} {seconds:7.1} s  {name}"));
    }

    fn finish(self) -> anyhow::Result<()> {
        println!("== stages\n{}", self.lines.join("\n"));
        if !self.failed.is_empty() {
            bail!("failed: {}", self.failed.join(", "));
        }
        Ok(())
    }
}
