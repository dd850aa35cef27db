//! `cargo xtask licenses`: every dependency's license is one we may ship under Apache-2.0.

use std::collections::BTreeSet;

use anyhow::{Context as _, ensure};

use crate::{cargo, read};

/// Permissive licenses, and MPL-2.0, whose copyleft ends at the dependency's own files.
const ALLOWED: [&str; 13] = [
    "0BSD",
    "Apache-2.0",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "CDLA-Permissive-2.0", // root certificates
    "ISC",
    "MIT",
    "MPL-2.0",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];

/// Fails with the name of every dependency whose license expression does not hold for [`ALLOWED`]. Asks for
/// what is built, on any platform and with any feature: the lock file has more than that.
pub fn run() -> anyhow::Result<()> {
    let tree = ["tree", "--workspace", "--all-features", "--target", "all", "--prefix", "none"];
    let listed = read(cargo(&[&tree[..], &["--no-dedupe", "--format", "{l}\t{p}"]].concat()))?;
    let packages: BTreeSet<&str> = listed.lines().filter(|line| !line.is_empty()).collect();
    let mut refused = Vec::new();
    for line in &packages {
        let (license, package) = line.split_once('\t').context("cargo tree printed no tab")?;
        if !is_allowed(license) {
            refused.push(format!("{package}: {license}"));
        }
    }
    ensure!(refused.is_empty(), "licenses outside the list in licenses.rs: {}", refused.join("; "));
    println!("{} packages, all licenses allowed", packages.len());
    Ok(())
}

/// Evaluates an SPDX expression: AND binds tighter than OR; `/` is the old spelling of OR. An
/// exception (`WITH …`) only ever allows more, so it is skipped.
fn is_allowed(expression: &str) -> bool {
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let mut words = spaced.split_whitespace().peekable();
    let allowed = any_of(&mut words);
    allowed && words.next().is_none()
}

type Words<'a> = std::iter::Peekable<std::str::SplitWhitespace<'a>>;

fn any_of(words: &mut Words) -> bool {
    let mut allowed = all_of(words);
    while words.next_if_eq(&"OR").is_some() {
        allowed |= all_of(words);
    }
    allowed
}

fn all_of(words: &mut Words) -> bool {
    let mut allowed = one(words);
    while words.next_if_eq(&"AND").is_some() {
        allowed &= one(words);
    }
    allowed
}

fn one(words: &mut Words) -> bool {
    let Some(word) = words.next() else { return false };
    if word == "(" {
        let allowed = any_of(words);
        return words.next_if_eq(&")").is_some() && allowed;
    }
    if words.next_if_eq(&"WITH").is_some() {
        words.next();
    }
    ALLOWED.contains(&word)
}

#[cfg(test)]
mod tests {
    use super::is_allowed;

    #[test]
    fn expressions_are_evaluated() {
        for allowed in [
            "MIT",
            "MIT/Apache-2.0",
            "GPL-3.0 OR MIT",
            "(MIT OR Apache-2.0) AND Unicode-3.0",
            "Apache-2.0 WITH LLVM-exception OR MIT",
            "GPL-2.0 AND MIT OR ISC",
        ] {
            assert!(is_allowed(allowed), "{allowed}");
        }
        for refused in
            ["GPL-3.0", "MIT AND GPL-3.0", "(MIT OR ISC", "MIT ISC", "", "none named", "MIT AND"]
        {
            assert!(!is_allowed(refused), "{refused}");
        }
    }
}
