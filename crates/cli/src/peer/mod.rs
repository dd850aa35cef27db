//! The engine to measure beside ours: llama.cpp, as the package llama-cpp-python or as a llama-bench.

mod install;

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context as _, bail, ensure};
use serde_json::{Value, json};

/// The name that `--peer` takes for the package.
pub const LLAMA_CPP_PYTHON: &str = "llama-cpp-python";
/// Drives the package; see its own words for the protocol.
const DRIVER: &str = include_str!("llama_cpp_python.py");
/// Tokens per llama_decode at most: llama-bench's default, and the driver's.
const CHUNK_TOKENS: &str = "512";

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Computing a prompt, logits of its last token only.
    Prefill,
    /// One token after the other, logits of each.
    Decode,
}

/// One measurement, as the peer understands it.
#[derive(Clone, Copy, Debug)]
pub struct Test {
    /// Prefill or decode.
    pub kind: Kind,
    /// Tokens computed in each sequence while the clock runs.
    pub tokens: usize,
    /// Tokens in the cache of each sequence before that.
    pub depth: usize,
    /// Sequences at once.
    pub batch: usize,
    /// KV format in llama.cpp's words: `f16`, `q8_0` (its nearest to our 8 bits) or `q4_0`.
    pub kv_format: &'static str,
    /// Flash attention; llama.cpp needs it for other formats than `f16`.
    pub flash: bool,
}

/// A running peer with the model loaded.
pub struct Peer {
    name: String,
    engine: Engine,
}

enum Engine {
    Python(Driver),
    LlamaBench { program: PathBuf, model: PathBuf, threads: usize },
}

impl Peer {
    /// Starts what `--peer` names (the package, installed into the cache folder if it is missing, or
    /// the path of a llama-bench) on this GGUF file.
    pub fn start(peer: &str, model: &Path, threads: usize) -> anyhow::Result<Self> {
        if peer == LLAMA_CPP_PYTHON {
            let mut command = Command::new(install::python()?);
            command.args(["-c", DRIVER]).arg(model).arg(threads.to_string());
            let driver = Driver::start(command)?;
            return Ok(Self { name: driver.name.clone(), engine: Engine::Python(driver) });
        }
        let program = PathBuf::from(peer);
        ensure!(
            program.is_file(),
            "--peer `{peer}` is no file; give the path of a llama-bench or `{LLAMA_CPP_PYTHON}`"
        );
        let engine = Engine::LlamaBench { program, model: model.to_path_buf(), threads };
        Ok(Self { name: "llama-bench".into(), engine })
    }

    /// Name and version, for tables and JSON.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Measures once (after a warm-up of its own the first time) and returns tokens per second over
    /// all sequences. Loading and filling the cache to `depth` are not in it.
    pub fn measure(&mut self, test: &Test) -> anyhow::Result<f64> {
        match &mut self.engine {
            Engine::Python(driver) => driver.measure(test),
            Engine::LlamaBench { program, model, threads } => {
                llama_bench(program, model, *threads, test)
            }
        }
    }
}

/// The package in its own process, one request and one answer a line.
struct Driver {
    child: Child,
    requests: ChildStdin,
    answers: BufReader<ChildStdout>,
    name: String,
}

impl Driver {
    fn start(mut command: Command) -> anyhow::Result<Self> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().context("cannot start the peer's Python")?;
        let requests = child.stdin.take().context("the peer has no stdin")?;
        let answers = BufReader::new(child.stdout.take().context("the peer has no stdout")?);
        let mut driver = Self { child, requests, answers, name: String::new() };
        let hello = driver.answer().context("the peer did not start")?;
        let word = |key: &str| hello[key].as_str().unwrap_or("unknown").to_string();
        driver.name = format!("{} {}", word("engine"), word("version"));
        Ok(driver)
    }

    fn measure(&mut self, test: &Test) -> anyhow::Result<f64> {
        writeln!(self.requests, "{}", request(test)).context("the peer has ended")?;
        let answer = self.answer()?;
        if let Some(error) = answer["error"].as_str() {
            bail!("the peer failed in {test:?}: {error}");
        }
        answer["tok_s"].as_f64().context("the peer's answer lacks `tok_s`")
    }

    fn answer(&mut self) -> anyhow::Result<Value> {
        let mut line = String::new();
        self.answers.read_line(&mut line).context("cannot read from the peer")?;
        ensure!(!line.is_empty(), "the peer has ended; what it said is above");
        serde_json::from_str(&line).with_context(|| format!("the peer answered `{}`", line.trim()))
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        // It holds no state worth an orderly end.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn request(test: &Test) -> Value {
    json!({
        "test": match test.kind { Kind::Prefill => "prefill", Kind::Decode => "decode" },
        "tokens": test.tokens,
        "depth": test.depth,
        "batch": test.batch,
        "kv_format": test.kv_format,
        "flash": test.flash,
    })
}

/// One run of a llama-bench, which loads the model and warms up by itself.
fn llama_bench(program: &Path, model: &Path, threads: usize, test: &Test) -> anyhow::Result<f64> {
    ensure!(
        test.batch == 1,
        "llama-bench measures one sequence; for --batch use `{LLAMA_CPP_PYTHON}`"
    );
    let tokens = test.tokens.to_string();
    let (prompt, generate) = match test.kind {
        Kind::Prefill => (tokens.as_str(), "0"),
        Kind::Decode => ("0", tokens.as_str()),
    };
    let mut command = Command::new(program);
    command.arg("-m").arg(model).args(["-p", prompt, "-n", generate, "-r", "1", "-o", "json"]);
    command.args(["-ub", CHUNK_TOKENS, "-ngl", "0", "-t", &threads.to_string()]);
    command.args(["-d", &test.depth.to_string(), "-fa", if test.flash { "1" } else { "0" }]);
    command.args(["-ctk", test.kv_format, "-ctv", test.kv_format]);
    let output = command.stderr(Stdio::inherit()).output();
    let output = output.with_context(|| format!("cannot start {}", program.display()))?;
    ensure!(output.status.success(), "{} ended with {}", program.display(), output.status);
    tokens_per_second(&output.stdout)
}

/// Reads llama-bench's `-o json`: an array with one object for the one test.
fn tokens_per_second(json: &[u8]) -> anyhow::Result<f64> {
    let document: Value = serde_json::from_slice(json).context("llama-bench printed no JSON")?;
    document[0]["avg_ts"].as_f64().context("llama-bench's JSON lacks `avg_ts`")
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEST: Test =
        Test { kind: Kind::Decode, tokens: 64, depth: 0, batch: 8, kv_format: "f16", flash: false };

    #[test]
    #[cfg(unix)]
    fn the_driver_is_asked_line_by_line() {
        let script = r#"echo '{"engine": "x", "version": "1"}'; read request
            echo '{"tok_s": 2.5}'; read request; echo '{"error": "no room"}'; read request"#;
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        let mut driver = Driver::start(command).unwrap();
        assert_eq!(driver.name, "x 1");
        assert_eq!(driver.measure(&TEST).unwrap(), 2.5);
        assert!(driver.measure(&TEST).unwrap_err().to_string().contains("no room"));
        assert!(driver.measure(&TEST).unwrap_err().to_string().contains("has ended"));
    }

    #[test]
    fn requests_are_in_the_drivers_words() {
        let text = request(&TEST).to_string();
        for key in ["\"decode\"", "\"tokens\":64", "\"batch\":8", "\"f16\"", "\"flash\":false"] {
            assert!(text.contains(key), "{text}");
        }
        for key in request(&TEST).as_object().unwrap().keys() {
            assert!(DRIVER.contains(&format!("[\"{key}\"]")), "the driver does not read {key}");
        }
    }

    #[test]
    fn llama_bench_is_read() {
        let json = br#"[{"n_prompt": 512, "n_gen": 0, "avg_ts": 207.5, "samples_ts": [207.5]}]"#;
        assert_eq!(tokens_per_second(json).unwrap(), 207.5);
        assert!(tokens_per_second(b"[]").unwrap_err().to_string().contains("avg_ts"));
        assert!(tokens_per_second(b"usage:").is_err());
    }
}
