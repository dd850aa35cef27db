//! `cargo xtask bench`: one interleaved run of Reef and llama.cpp, kept with all that it depends on.

use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Context as _;
use serde_json::{Value, json};

use crate::{cargo, command, read, root};

/// Runs `reef bench --json --peer llama-cpp-python ARGUMENTS` and appends its document, with commit,
/// CPU, arguments and load, as a line of bench/results/CPU-DATE.jsonl.
pub fn run(arguments: &[String]) -> anyhow::Result<()> {
    let load_before = load();
    let mut bench = cargo(&["run", "--release", "--package", "reef-cli", "--", "bench", "--json"]);
    if !arguments.iter().any(|argument| argument == "--peer") {
        bench.args(["--peer", "llama-cpp-python"]);
    }
    bench.args(arguments);
    let document: Value =
        serde_json::from_str(&read(bench)?).context("reef bench printed no JSON")?;
    let (cpu, flags) = cpu();
    let date = date(SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs());
    let line = json!({
        "date": date,
        "commit": read(command("git", &["rev-parse", "--short=12", "HEAD"]))?.trim(),
        "changed_files": read(command("git", &["status", "--porcelain"]))?.lines().count(),
        "cpu": cpu,
        "cpu_flags": flags,
        "load_before": load_before,
        "load_after": load(),
        "arguments": arguments,
        "bench": document,
    });
    let path = root().join(format!("bench/results/{}-{date}.jsonl", file_name(&cpu)));
    fs::create_dir_all(root().join("bench/results"))?;
    let mut file = OpenOptions::new().create(true).append(true).open(&path)?;
    writeln!(file, "{line}").with_context(|| format!("cannot write {}", path.display()))?;
    println!("{document}");
    eprintln!("appended to bench/results/{}-{date}.jsonl", file_name(&cpu));
    Ok(())
}

/// The CPU's name with its family and model, and those of its flags that decide which kernels run.
fn cpu() -> (String, Vec<String>) {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| {
        let line =
            text.lines().find(|line| line.split(':').next().is_some_and(|key| key.trim() == name));
        line.and_then(|line| line.split_once(':')).map_or("unknown", |(_, value)| value.trim())
    };
    let name =
        format!("{} family {} model {}", field("model name"), field("cpu family"), field("model"));
    let decides =
        |flag: &&str| ["avx", "fma", "f16c", "amx"].iter().any(|start| flag.starts_with(start));
    (name, field("flags").split(' ').filter(decides).map(String::from).collect())
}

/// Load averages: a line measured beside other work must show it.
fn load() -> String {
    fs::read_to_string("/proc/loadavg").unwrap_or_default().trim().to_string()
}

fn file_name(cpu: &str) -> String {
    let mut name: String = cpu
        .to_lowercase()
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() { c } else { '-' })
        .collect();
    while name.contains("--") {
        name = name.replace("--", "-");
    }
    name
}

/// The day (UTC) as YYYY-MM-DD. Days to civil date by Howard Hinnant's `civil_from_days`.
fn date(seconds: u64) -> String {
    let days = seconds / 86_400 + 719_468; // since 0000-03-01
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}")
}

#[cfg(test)]
mod tests {
    use super::{date, file_name};

    #[test]
    fn dates_are_right() {
        assert_eq!(date(0), "1970-01-01");
        assert_eq!(date(951_782_400), "2000-02-29");
        assert_eq!(date(1_795_996_800), "2026-11-30");
    }

    #[test]
    fn file_names_are_plain() {
        assert_eq!(file_name("AMD EPYC (x)  family 25"), "amd-epyc-x-family-25");
    }
}
