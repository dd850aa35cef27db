//! `cargo xtask tidy`: the house rules that no compiler checks.

mod code;
mod exceptions;
mod rules;

use std::fs;

use anyhow::{Context as _, ensure};

use crate::{command, read, root};
use exceptions::Exceptions;

/// One breach of a rule.
pub struct Finding {
    /// The rule's name, as exceptions spell it.
    pub rule: &'static str,
    /// The file, and `:function` where the rule is about one.
    pub subject: String,
    /// Line from 1; 0 where the file as a whole is meant.
    pub line: usize,
    /// What is wrong and what to do.
    pub message: String,
}

/// A file of the repository, as Git sees it: tracked, or new and not ignored.
pub struct Source {
    /// Relative to the root, with `/`.
    pub path: String,
    /// Its text; empty for binary files.
    pub text: String,
    /// Its length on disk.
    pub bytes: u64,
}

/// Prints every breach that tidy-exceptions.txt does not excuse, and every exception that excuses
/// nothing; fails if there are any.
pub fn run() -> anyhow::Result<()> {
    let sources = sources()?;
    let exceptions = Exceptions::read(&root().join("xtask/tidy-exceptions.txt"))?;
    let mut findings = Vec::new();
    for source in &sources {
        rules::check_file(source, &mut findings);
    }
    rules::check_repository(&sources, &mut findings);
    let open = exceptions.apply(findings);
    for finding in &open {
        let Finding { rule, subject, line, message } = finding;
        println!("{subject}:{line}: {message} [{rule}]");
    }
    ensure!(
        open.is_empty(),
        "tidy found {} breaches of the house rules (CONTRIBUTING.md)",
        open.len()
    );
    println!("{} files are tidy", sources.len());
    Ok(())
}

fn sources() -> anyhow::Result<Vec<Source>> {
    let list = ["ls-files", "-z", "--cached", "--others", "--exclude-standard"];
    let list = read(command("git", &list)).context("tidy asks Git which files there are")?;
    let mut sources = Vec::new();
    for path in list.split('\0').filter(|path| !path.is_empty()) {
        // Deleted but not yet committed files are still listed.
        let Ok(bytes) = fs::read(root().join(path)) else { continue };
        let length = bytes.len() as u64;
        let text = String::from_utf8(bytes).unwrap_or_default();
        sources.push(Source { path: path.to_string(), text, bytes: length });
    }
    sources.sort_by(|a, b| a.path.cmp(&b.path));
    sources.dedup_by(|a, b| a.path == b.path);
    Ok(sources)
}
