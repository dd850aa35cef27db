//! The programs that are loaded, and the model that they serve.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, bail, ensure};
use reef_load::peer::{self, SETTINGS};
use serde_json::Value;

/// `reef` and its model.
#[derive(clap::Args)]
pub struct Programs {
    /// A GGUF file, or an alias known to `reef pull`
    #[arg(long, default_value = "smollm2")]
    model: String,
    /// The `reef` program [default: the one beside this program]
    #[arg(long, value_name = "PATH")]
    reef: Option<PathBuf>,
    /// Threads that compute
    #[arg(long, default_value_t = 2)]
    pub threads: usize,
    /// Print one JSON document on stdout and nothing else there
    #[arg(long)]
    pub json: bool,
}

/// Whom to compare with.
#[derive(clap::Args)]
pub struct Peers {
    /// A `llama-server` program that gets the same traffic in the same bytes
    #[arg(long, value_name = "LLAMA_SERVER")]
    pub peer: Option<PathBuf>,
    /// How the peer divides its memory: slots, shared or slots-q8_0 [default: each in turn]
    #[arg(long, value_name = "NAME", requires = "peer")]
    peer_setting: Vec<String>,
}

impl Peers {
    /// The settings asked for.
    ///
    /// # Errors
    /// A name that none has.
    pub fn settings(&self) -> anyhow::Result<Vec<peer::Setting>> {
        if self.peer_setting.is_empty() {
            return Ok(SETTINGS.to_vec());
        }
        let named = |name: &String| SETTINGS.into_iter().find(|setting| setting.name == *name);
        let all = self.peer_setting.iter().map(|name| {
            named(name).with_context(|| format!("--peer-setting `{name}` is not known"))
        });
        all.collect()
    }
}

impl Programs {
    /// The `reef` program.
    ///
    /// # Errors
    /// It is not there.
    pub fn reef(&self) -> anyhow::Result<PathBuf> {
        let beside = std::env::current_exe()?.with_file_name("reef");
        let reef = self.reef.clone().unwrap_or(beside);
        if !reef.is_file() {
            bail!(
                "no {}: build it (cargo build --release -p reef-cli), or give --reef",
                reef.display()
            );
        }
        Ok(reef)
    }

    /// The model's file, and bytes of a token of its KV in f16.
    ///
    /// # Errors
    /// It cannot be fetched or read.
    pub fn model(&self) -> anyhow::Result<(PathBuf, f64)> {
        let reef = self.reef()?;
        let model = match Path::new(&self.model).is_file() {
            true => PathBuf::from(&self.model),
            false => {
                let printed = output(&reef, &["pull", &self.model])?;
                PathBuf::from(printed.lines().last().unwrap_or_default())
            }
        };
        let facts = output(&reef, &["inspect", "--json", &model.display().to_string()])?;
        let facts: Value = serde_json::from_str(&facts).context("reef inspect printed no JSON")?;
        let bytes = facts["kv"]["bytes_per_token"]["f16"].as_f64();
        Ok((model, bytes.context("reef inspect tells no KV bytes per token")?))
    }

    /// Words of `reef serve`.
    pub fn serve(&self, model: &Path, kv_bytes: u64) -> Vec<String> {
        let model = model.display().to_string();
        let (threads, bytes) = (self.threads.to_string(), kv_bytes.to_string());
        let words = [
            "serve",
            &model,
            "--kv-memory",
            &bytes,
            "--threads",
            &threads,
            "--prefault",
            "--fidelity",
            "evict",
        ];
        words.map(String::from).to_vec()
    }

    /// A folder for the logs of this run.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn logs(&self) -> anyhow::Result<PathBuf> {
        let logs = std::env::temp_dir().join(format!("reef-load-{}", std::process::id()));
        std::fs::create_dir_all(&logs)?;
        Ok(logs)
    }
}

/// What a program prints on stdout.
fn output(program: &Path, words: &[&str]) -> anyhow::Result<String> {
    let mut command = Command::new(program);
    command.args(words).stderr(Stdio::inherit());
    let output = command.output().with_context(|| format!("cannot start {}", program.display()))?;
    ensure!(output.status.success(), "{} {} failed", program.display(), words.join(" "));
    Ok(String::from_utf8(output.stdout)?)
}
