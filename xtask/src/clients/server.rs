//! A live server for one client.

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};

use crate::root;

/// A server takes seconds to be ready, on a busy machine many.
const READY_WITHIN: Duration = Duration::from_secs(120);

/// `reef serve` on a free port of the loopback interface; ended when dropped.
pub struct Server {
    child: Child,
    log: PathBuf,
    address: String,
}

impl Server {
    /// Starts a server for `model` and waits until it is ready.
    pub fn start(binary: &Path, model: &str, log: &Path) -> anyhow::Result<Server> {
        let file = File::create(log)?;
        let mut command = Command::new(binary);
        command.args(["serve", model, "--port", "0", "--host", "127.0.0.1"]);
        // The model's own shows no tools, and clients are to call some.
        command.arg("--chat-template").arg(root().join("tests/clients/tools.jinja"));
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        let child = command.spawn().with_context(|| format!("cannot start {command:?}"))?;
        let mut server = Server { child, log: log.into(), address: String::new() };
        let start = Instant::now();
        while start.elapsed() < READY_WITHIN {
            if let Some(status) = server.child.try_wait()? {
                bail!("reef serve ended with {status}: {}", fs::read_to_string(log)?.trim());
            }
            server.address = address(&fs::read_to_string(log)?).unwrap_or_default();
            if !server.address.is_empty() && server.still_answers().is_ok() {
                return Ok(server);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        bail!("reef serve was not ready within {READY_WITHIN:?}: {}", log.display())
    }

    /// Its address, as a URL.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// That it says it is well.
    pub fn still_answers(&mut self) -> anyhow::Result<()> {
        if let Some(status) = self.child.try_wait()? {
            bail!("the server has ended with {status}; its log: {}", self.log.display());
        }
        let mut stream = TcpStream::connect(&self.address)?;
        stream.set_read_timeout(Some(Duration::from_secs(10)))?;
        stream.write_all(b"GET /health HTTP/1.1\r\nHost: reef\r\nConnection: close\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        let status = answer.lines().next().unwrap_or_default();
        ensure!(status.contains(" 200 "), "/health said `{status}`");
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The address in what a server with `--port 0` logs when it is ready.
fn address(log: &str) -> Option<String> {
    let start = log.find("http://127.0.0.1:")? + "http://".len();
    let length = log[start..].find(|c: char| !c.is_ascii_digit() && c != '.' && c != ':')?;
    Some(log[start..start + length].into())
}

#[cfg(test)]
mod tests {
    use super::address;

    #[test]
    fn the_address_is_in_the_log() {
        let log = "calibrated\nready: smollm2 at http://127.0.0.1:41017\n";
        assert_eq!(address(log).as_deref(), Some("127.0.0.1:41017"));
        assert_eq!(address("loading"), None);
    }
}
