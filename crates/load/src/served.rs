//! A server as a process of this machine, from its start to its end.

use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};

use crate::exchange::Client;
use crate::sse::Strictness;

/// How long a server may take until it is ready.
const START_LIMIT: Duration = Duration::from_secs(60);
/// How long it may take to end.
const END_LIMIT: Duration = Duration::from_secs(20);

/// A running server. Dropped, it is killed.
pub struct Served {
    child: Child,
    log: PathBuf,
    /// Where it listens.
    pub address: SocketAddr,
    /// From its start until `/health` said 200.
    pub ready_ms: f64,
    /// The command, for reports.
    pub command: String,
}

impl Served {
    /// Starts `program` with `arguments` and a free port (`--host`, `--port`), and waits until it is ready. What
    /// it prints goes to `log`.
    ///
    /// # Errors
    /// It does not start, ends, or is not ready in a minute; with the end of its log.
    pub async fn start(program: &Path, arguments: &[String], log: &Path) -> anyhow::Result<Served> {
        // Free now; whoever takes it meanwhile makes the server fail, which is told.
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let file = File::create(log).with_context(|| format!("cannot write {}", log.display()))?;
        let mut command = Command::new(program);
        command.args(arguments).args(["--host", "127.0.0.1", "--port", &port.to_string()]);
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        let start = Instant::now();
        let child = command.spawn();
        let child = child.with_context(|| format!("cannot start {}", program.display()))?;
        let name = program.file_name().unwrap_or_default().to_string_lossy();
        let command = format!("{name} {}", arguments.join(" "));
        let mut served = Served { child, log: log.into(), address, ready_ms: 0.0, command };
        let mut client = Client::new(address, Strictness::Standard, Duration::from_secs(5));
        while start.elapsed() < START_LIMIT {
            if let Ok((200, _)) = client.fetch("GET", "/health", "").await {
                served.ready_ms = start.elapsed().as_secs_f64() * 1e3;
                return Ok(served);
            }
            if let Some(status) = served.child.try_wait()? {
                bail!("{} ended with {status}: {}", served.command, served.last_lines());
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        bail!("{} is not ready: {}", served.command, served.last_lines())
    }

    /// The id of its first model.
    ///
    /// # Errors
    /// It tells none.
    pub async fn model(&self) -> anyhow::Result<String> {
        let mut client = Client::new(self.address, Strictness::Standard, Duration::from_secs(5));
        let (_, body) = client.fetch("GET", "/v1/models", "").await?;
        let models: serde_json::Value = serde_json::from_slice(&body)?;
        let id = models["data"][0]["id"].as_str().map(String::from);
        id.with_context(|| format!("no model in {models}"))
    }

    /// Its process id.
    pub fn process(&self) -> u32 {
        self.child.id()
    }

    /// Whether it still runs.
    pub fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Lines of its log that tell of a panic.
    pub fn panics(&self) -> Vec<String> {
        let log = std::fs::read_to_string(&self.log).unwrap_or_default();
        log.lines().filter(|line| line.contains("panicked at")).map(String::from).collect()
    }

    /// Asks it to end (SIGTERM) and waits; whether it ended by itself, with status 0.
    ///
    /// # Errors
    /// The process cannot be waited for.
    pub async fn end(mut self) -> anyhow::Result<bool> {
        let id = self.child.id().to_string();
        // Without `kill` it is killed below, and counts as not ended by itself.
        let _ = Command::new("kill").args(["-TERM", &id]).status();
        let start = Instant::now();
        while start.elapsed() < END_LIMIT {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status.success());
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(false)
    }

    fn last_lines(&self) -> String {
        let log = std::fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(8)..].join("\n")
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // Where it has ended there is nothing to kill.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
