//! `cargo xtask clients`: real clients, pinned, each against a live server of its own.

mod client;
mod install;
mod script;
mod server;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail, ensure};

use crate::{cargo, read, root, run_shown, target_directory};
use client::{CLIENTS, Client};
use server::Server;

/// The model that they talk to, as `reef pull` knows it.
const MODEL: &str = "smollm2";

/// How it went with one client.
enum Outcome {
    /// All that its script checked held; what it did.
    Passed(String),
    /// It ran, and something was wrong.
    Failed(String),
    /// It could not be installed here.
    Absent(String),
}

/// What every client gets.
struct Stage {
    /// Where clients are installed: below cargo's target directory, never in the repository.
    folder: PathBuf,
    /// The program `reef`.
    binary: PathBuf,
    /// The model's file.
    model: PathBuf,
    /// A folder with the model's tokenizer as Hugging Face's libraries read it; by `tokenizer.py`.
    tokenizer: PathBuf,
}

/// Runs all clients, or those that `--only NAME,…` names, prints a table and fails where one failed.
pub fn run(arguments: &[String]) -> anyhow::Result<()> {
    let chosen = chosen(arguments)?;
    let stage = Stage::set()?;
    let mut rows = Vec::new();
    for client in chosen {
        println!("== {}", client.name);
        let outcome =
            stage.run(client).unwrap_or_else(|error| Outcome::Failed(format!("{error:#}")));
        rows.push((client, outcome));
    }
    println!("== clients");
    let count = |is: fn(&Outcome) -> bool| rows.iter().filter(|(_, outcome)| is(outcome)).count();
    for (client, outcome) in &rows {
        let (word, text) = match outcome {
            Outcome::Passed(text) => ("ok", text),
            Outcome::Failed(text) => ("FAILED", text),
            Outcome::Absent(text) => ("absent", text),
        };
        println!("{word:6}  {:16} {:10} {text}", client.name, client.version()?);
    }
    let passed = count(|outcome| matches!(outcome, Outcome::Passed(_)));
    let failed = count(|outcome| matches!(outcome, Outcome::Failed(_)));
    println!("{passed} passed, {failed} failed, {} not installed", rows.len() - passed - failed);
    ensure!(failed == 0, "{failed} of {} clients failed", rows.len());
    ensure!(passed > 0, "no client could be installed");
    Ok(())
}

/// The clients that the arguments ask for.
fn chosen(arguments: &[String]) -> anyhow::Result<Vec<&'static Client>> {
    let names: Vec<&str> = match arguments {
        [] => return Ok(CLIENTS.iter().collect()),
        [flag, names] if flag == "--only" => names.split(',').collect(),
        _ => bail!("usage: cargo xtask clients [--only NAME,...]"),
    };
    names
        .iter()
        .map(|name| {
            let found = CLIENTS.iter().find(|client| client.name == *name);
            let known: Vec<&str> = CLIENTS.iter().map(|client| client.name).collect();
            found.with_context(|| format!("no client is named `{name}`: {}", known.join(", ")))
        })
        .collect()
}

impl Stage {
    /// Builds `reef`, fetches the model and writes its tokenizer.
    fn set() -> anyhow::Result<Stage> {
        let target = target_directory()?;
        run_shown(cargo(&["build", "--quiet", "--package", "reef-cli"]))?;
        let binary = target.join("debug").join(format!("reef{}", std::env::consts::EXE_SUFFIX));
        let mut pull = std::process::Command::new(&binary);
        pull.args(["pull", MODEL]);
        let pulled = read(pull)?;
        let model = PathBuf::from(pulled.lines().last().context("reef pull printed no path")?);
        let folder = target.join("clients");
        let tokenizer = folder.join("tokenizer");
        fs::create_dir_all(&folder)?;
        let stage = Stage { folder, binary, model, tokenizer };
        stage.write_tokenizer()?;
        Ok(stage)
    }

    /// Load generators count tokens themselves, and would fetch a tokenizer from a hub.
    fn write_tokenizer(&self) -> anyhow::Result<()> {
        let python = match install::python(&self.folder.join("tools"), "tools", None)? {
            Ok(python) => python,
            Err(reason) => bail!("the writer of tokenizers cannot be installed: {reason}"),
        };
        let script = root().join("tests/clients/tokenizer.py");
        let python = || {
            let mut command = std::process::Command::new(&python);
            command.arg(&script);
            command
        };
        let mut write = python();
        write.args([&self.model, &self.tokenizer]);
        run_shown(write)?;
        let golden = root().join("../shared/golden").join(format!("tokenizer-{MODEL}.json"));
        if !golden.exists() {
            println!("skip: {} is not here to check the tokenizer against", golden.display());
            return Ok(());
        }
        let mut check = python();
        check.arg("--check").args([&self.tokenizer, &golden]);
        run_shown(check)
    }

    /// Installs a client and runs its script against a server of its own.
    fn run(&self, client: &Client) -> anyhow::Result<Outcome> {
        let home = self.folder.join(client.folder());
        let program = match install::client(&home, client)? {
            Ok(program) => program,
            Err(reason) => return Ok(Outcome::Absent(reason)),
        };
        let scratch = self.folder.join("scratch").join(client.name);
        remove(&scratch)?;
        fs::create_dir_all(&scratch)?;
        let mut server = Server::start(&self.binary, MODEL, &scratch.join("server.log"))?;
        let environment = BTreeMap::from([
            ("REEF_URL", server.url().into()),
            ("REEF_MODEL", MODEL.into()),
            ("REEF_TOKENIZER", self.tokenizer.clone().into_os_string()),
            ("REEF_SCRATCH", scratch.clone().into_os_string()),
            ("REEF_BINARY", self.binary.clone().into_os_string()),
            ("REEF_MODEL_PATH", self.model.clone().into_os_string()),
        ]);
        let outcome = script::run(client, &program, &home, &scratch, &environment)?;
        server.still_answers().context("after the client had ended")?;
        Ok(outcome)
    }
}

fn remove(folder: &Path) -> anyhow::Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", folder.display()))
        }
        _ => Ok(()),
    }
}
