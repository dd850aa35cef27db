//! What lossy KV memory does to each model: measured once, kept in the cache folder, known from the
//! start for the models that have names.
//!
//! A model is told from others by the SHA-256 of its file's part before the weights, and its size.

use std::path::PathBuf;

use anyhow::Context as _;
use reef_engine::profile::{self, ModelProfile};
use reef_engine::session::EngineError;
use reef_kv::ByFormat;
use reef_kv::page::PageFormat;
use reef_model::gguf::Gguf;
use reef_model::runner::{KeyRotation, ModelRunner};
use reef_model::tokenizer::{Encode, Tokenizer};
use serde_json::{Map, Value, json};
use sha2::{Digest as _, Sha256};

use crate::output::note;
use crate::progress::Progress;
use crate::pull::cache_dir;

/// Profiles that come with the binary, by key: those of `reef pull`'s names.
const SHIPPED: &str = include_str!("profiles.json");

/// Models of more parameters are measured only where somebody asks for it.
const QUICK_PARAMETERS: usize = 500_000_000;

/// Changes whenever a profile is measured differently: older ones are then measured again.
const VERSION: u64 = 1;

/// What tells the model in `gguf` from others.
pub fn fingerprint(gguf: &Gguf) -> Vec<u8> {
    key(gguf).into_bytes()
}

/// The profile of the model in `gguf`, if it is known.
pub fn known(gguf: &Gguf) -> Option<ModelProfile> {
    let key = key(gguf);
    let kept = path(&key).ok().and_then(|path| std::fs::read(path).ok());
    let kept = kept.and_then(|bytes| parse(&serde_json::from_slice(&bytes).ok()?));
    kept.or_else(|| {
        let shipped: Value = serde_json::from_str(SHIPPED).ok()?;
        parse(shipped.get(key)?)
    })
}

/// The profile of the model in `gguf`: the known one; else, if that is a matter of seconds, measured with
/// `runner` and kept; else `None`, and the user is told how to have it measured.
pub fn known_or_measured(
    gguf: &Gguf,
    runner: &mut ModelRunner,
    block_size: usize,
) -> anyhow::Result<Option<ModelProfile>> {
    if let Some(known) = known(gguf) {
        return Ok(Some(known));
    }
    let parameters: usize = gguf.tensors().map(|tensor| tensor.elements()).sum();
    if parameters > QUICK_PARAMETERS {
        note(
            "keys stay at 8 bits until `reef eval profile` has measured this model: it takes minutes",
        );
        return Ok(None);
    }
    note("measuring once what lossy KV memory costs this model");
    match measure(gguf, runner, block_size) {
        // A short trained context, or large blocks: what is not known is not risked.
        Err(error) if matches!(error.downcast_ref(), Some(EngineError::ShortText { .. })) => {
            note(&format!("keys stay at 8 bits: {error:#}"));
            Ok(None)
        }
        measured => measured.map(Some),
    }
}

/// Measures the model in `gguf` with `runner` and keeps the profile.
pub fn measure(
    gguf: &Gguf,
    runner: &mut ModelRunner,
    block_size: usize,
) -> anyhow::Result<ModelProfile> {
    let encode = Encode { add_special: true, parse_special: false };
    let ids = Tokenizer::from_gguf(gguf)?.encode(profile::TEXT, encode)?;
    let mut progress = None;
    let measured = profile::measure(runner, block_size, &ids, &mut |done, all| {
        progress.get_or_insert_with(|| Progress::new(all, "tokens")).set(done);
    });
    if let Some(mut progress) = progress {
        progress.end();
    }
    let measured = measured.context("cannot measure what lossy KV memory costs this model")?;
    if let Err(error) = keep(&key(gguf), &measured) {
        note(&format!("warning: the profile is not kept and will be measured again: {error:#}"));
    }
    Ok(measured)
}

fn key(gguf: &Gguf) -> String {
    let mut hash = Sha256::new();
    hash.update(gguf.preamble());
    hash.update((gguf.file_size() as u64).to_le_bytes());
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn path(key: &str) -> anyhow::Result<PathBuf> {
    Ok(cache_dir()?.join("profiles").join(format!("{key}.json")))
}

/// Written whole under another name, then renamed: a reader never sees half a file.
fn keep(key: &str, profile: &ModelProfile) -> anyhow::Result<()> {
    let path = path(key)?;
    let partial = path.with_extension(format!("{}.partial", std::process::id()));
    let folder = path.parent().context("a profile lies in a folder")?;
    std::fs::create_dir_all(folder)
        .with_context(|| format!("cannot create the folder {}", folder.display()))?;
    let written = std::fs::write(&partial, document(profile).to_string())
        .and_then(|()| std::fs::rename(&partial, &path));
    if written.is_err() {
        let _ = std::fs::remove_file(&partial);
    }
    written.with_context(|| format!("cannot write {}", path.display()))
}

/// The profile as JSON.
pub fn document(profile: &ModelProfile) -> Value {
    let nats = |(format, nats): (PageFormat, &f64)| (format.name().to_string(), json!(nats));
    json!({
        "version": VERSION,
        "format_nats": profile.format_nats.iter().map(nats).collect::<Map<String, Value>>(),
        "evict_nats": profile.evict_nats,
        "four_bit_keys": profile.four_bit_keys,
        "key_rotation": profile.key_rotation.name(),
    })
}

/// `None` for anything but a whole profile of this version.
fn parse(document: &Value) -> Option<ModelProfile> {
    if document["version"].as_u64()? != VERSION {
        return None;
    }
    let formats = &document["format_nats"];
    let nats = |value: &Value| value.as_f64().filter(|nats| nats.is_finite() && *nats >= 0.0);
    let mut format_nats = ByFormat::default();
    for format in PageFormat::ALL {
        format_nats[format] = nats(&formats[format.name()])?;
    }
    let rotation = document["key_rotation"].as_str()?;
    Some(ModelProfile {
        format_nats,
        evict_nats: nats(&document["evict_nats"])?,
        four_bit_keys: document["four_bit_keys"].as_bool()?,
        key_rotation: KeyRotation::ALL.into_iter().find(|known| known.name() == rotation)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn profile() -> ModelProfile {
        ModelProfile {
            format_nats: ByFormat::from_fn(|format| 0.001 * f64::from(format as u8)),
            evict_nats: 0.25,
            four_bit_keys: true,
            key_rotation: KeyRotation::Hadamard,
        }
    }

    #[test]
    fn a_profile_survives_its_file() {
        assert_eq!(parse(&document(&profile())), Some(profile()));
    }

    #[test]
    fn what_is_not_a_whole_profile_is_none() {
        for (field, value) in [
            ("version", json!(VERSION + 1)),
            ("evict_nats", json!(-1)),
            ("evict_nats", json!(null)),
            ("four_bit_keys", json!("yes")),
            ("key_rotation", json!("givens")),
            ("format_nats", json!({"f16": 0.0})),
        ] {
            let mut damaged = document(&profile());
            damaged[field] = value;
            assert_eq!(parse(&damaged), None, "{field}");
        }
        assert_eq!(parse(&json!([1, 2])), None);
    }

    #[test]
    fn the_shipped_profiles_are_whole() {
        let shipped: Value = serde_json::from_str(SHIPPED).unwrap();
        let shipped = shipped.as_object().unwrap();
        assert_eq!(shipped.len(), 2);
        assert!(shipped.values().all(|document| parse(document).is_some()));
    }
}
