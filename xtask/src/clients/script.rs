//! Running a client's script within a time limit.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context as _;

use super::Outcome;
use super::client::{Client, Kind};
use crate::root;

/// A client that hangs must not hang CI.
const TIME_LIMIT: Duration = Duration::from_secs(15 * 60);

/// Nothing may be fetched while a client runs.
const OFFLINE: [(&str, &str); 6] = [
    ("HF_HUB_OFFLINE", "1"),
    ("HF_DATASETS_OFFLINE", "1"),
    ("TRANSFORMERS_OFFLINE", "1"),
    ("LITELLM_LOCAL_MODEL_COST_MAP", "True"),
    ("PYTHONDONTWRITEBYTECODE", "1"), // nor written into the repository
    ("PYTHONUNBUFFERED", "1"),
];

/// Runs the script with `program`. Everything it says is in `scratch`/output.log, failures on stdout too.
pub fn run(
    client: &Client,
    program: &Path,
    home: &Path,
    scratch: &Path,
    environment: &BTreeMap<&str, OsString>,
) -> anyhow::Result<Outcome> {
    let scripts = root().join("tests/clients");
    let script = match client.kind {
        Kind::Python => scripts.join(client.script),
        // Node looks for packages from where the script is.
        Kind::Node => {
            for name in ["checks.mjs", client.script] {
                fs::copy(scripts.join(name), home.join(name))?;
            }
            home.join(client.script)
        }
    };
    let log = scratch.join("output.log");
    let file = File::create(&log)?;
    let mut command = Command::new(program);
    command.arg(script).current_dir(scratch).envs(OFFLINE).envs(environment);
    command.env("HF_HOME", scratch.join("huggingface"));
    command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
    let ended = within(command, TIME_LIMIT)?;
    let text = String::from_utf8_lossy(&fs::read(&log)?).into_owned();
    let last = text.lines().last().unwrap_or("it said nothing").to_string();
    match ended {
        Some(status) if status.success() => Ok(Outcome::Passed(last)),
        ended => {
            let failed: Vec<&str> = text.lines().filter(|line| line.starts_with("FAIL")).collect();
            failed.iter().for_each(|line| println!("{line}"));
            println!("all of its output: {}", log.display());
            let how = ended.map_or("it hung".into(), |status| status.to_string());
            Ok(Outcome::Failed(format!("{how}; {last}")))
        }
    }
}

/// Waits for a command; `None`: it took too long and was ended, with the processes that it started.
fn within(mut command: Command, limit: Duration) -> anyhow::Result<Option<ExitStatus>> {
    #[cfg(unix)]
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    let mut child = command.spawn().with_context(|| format!("cannot start {command:?}"))?;
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if start.elapsed() > limit {
            break;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    let group = format!("-{}", child.id());
    // Where there is no `kill`, the child alone.
    let _ = Command::new("kill").args(["-KILL", "--", &group]).status();
    let _ = child.kill();
    child.wait()?;
    Ok(None)
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn what_hangs_is_ended_with_its_children() {
        let mut hang = Command::new("sh");
        hang.args(["-c", "sleep 600 & sleep 600"]);
        assert!(within(hang, Duration::from_millis(200)).unwrap().is_none());
        assert!(within(Command::new("true"), Duration::from_secs(60)).unwrap().unwrap().success());
    }
}
