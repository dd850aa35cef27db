//! Where models come from: a config.json, a directory, a GGUF, or a name among the bundled configs.

use std::path::Path;

use serde_json::{Map, Value};

use crate::config::{self, ConfigError, Fields};
use crate::families::{self, LIMIT_DIM, LIMIT_TOKENS, attention, drafter};
use crate::model::Model;
use crate::parameters;

include!(concat!(env!("OUT_DIR"), "/bundled.rs"));

/// Most bytes of a config file.
const LIMIT_CONFIG_BYTES: u64 = 16 << 20;

/// Names of the bundled configs.
pub fn bundled() -> impl Iterator<Item = &'static str> {
    BUNDLED.iter().map(|(name, _)| *name)
}

/// Reads the model that `text` names: an existing file (`.gguf`, else JSON), a directory with a
/// `config.json`, or a bundled config. `settings` are `FIELD=VALUE` and overrule the config.
///
/// # Errors
/// What is missing or wrong in the config and how to supply it, a file that cannot be read, or an
/// unknown name with the known ones.
pub fn read(text: &str, settings: &[String]) -> Result<Model, ConfigError> {
    let path = Path::new(text);
    if path.is_dir() {
        let mut model = read(&path.join("config.json").to_string_lossy(), settings)?;
        model.file_bytes = model.file_bytes.or_else(|| indexed_bytes(path));
        return Ok(model);
    }
    if path.is_file() {
        if path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf")) {
            return crate::gguf::read(path, settings);
        }
        let name = path.file_stem().map_or_else(String::new, |s| s.to_string_lossy().into_owned());
        return from_json(&name, &read_text(path)?, settings);
    }
    let wanted = text.rsplit('/').next().unwrap_or(text);
    let found = BUNDLED.iter().find(|(name, _)| name.eq_ignore_ascii_case(wanted));
    match found {
        Some((name, json)) => from_json(name, json, settings),
        None => {
            let known = bundled().collect::<Vec<_>>().join(", ");
            Err(ConfigError::Unknown { name: text.to_string(), known })
        }
    }
}

/// Reads the config at `path`; fields that it lacks, or all of it where it cannot be read as a model, come
/// from the bundled config of the same name.
///
/// # Errors
/// The file's own error where no bundled config helps.
pub fn read_with_bundled(path: &Path) -> Result<Model, ConfigError> {
    let stem = path.file_stem().map_or_else(String::new, |s| s.to_string_lossy().into_owned());
    let own = read(&path.to_string_lossy(), &[]);
    let Some((_, bundled)) = BUNDLED.iter().find(|(name, _)| *name == stem) else {
        return own;
    };
    let object = |text: &str| match serde_json::from_str(text) {
        Ok(Value::Object(values)) => Some(values),
        _ => None,
    };
    let (Some(bundled), Some(values)) = (object(bundled), object(&read_text(path)?)) else {
        return own;
    };
    let mut merged = values;
    for (key, value) in &bundled {
        merged.entry(key.clone()).or_insert_with(|| value.clone());
    }
    from_values(&stem, merged, &[]).or_else(|_| from_values(&stem, bundled, &[])).or(own)
}

/// Reads a config from JSON text.
pub fn from_json(name: &str, json: &str, settings: &[String]) -> Result<Model, ConfigError> {
    let wrong = |reason: String| ConfigError::File { path: name.to_string(), reason };
    let value: Value = serde_json::from_str(json).map_err(|error| wrong(error.to_string()))?;
    match value {
        Value::Object(values) => from_values(name, values, settings),
        _ => Err(wrong("a config is a JSON object".into())),
    }
}

/// Reads a model from config fields.
pub fn from_values(
    name: &str,
    values: Map<String, Value>,
    settings: &[String],
) -> Result<Model, ConfigError> {
    let mut fields = Fields::new(name, values, settings)?;
    families::defaults::fill(&mut fields);
    let layers = families::layers(&fields)?;
    let number = |names: &[&str]| fields.number(names, LIMIT_DIM);
    let experts = number(&parameters::EXPERTS)?.unwrap_or(0);
    Ok(Model {
        name: fields.model().to_string(),
        family: families::family(&fields),
        draft_layers: drafter::layers(&fields, &layers)?,
        hidden: number(&attention::HIDDEN)?,
        vocabulary: fields.number(&["vocab_size", "padded_vocab_size"], 1 << 24)?,
        heads: number(&attention::QUERY_HEADS)?,
        intermediate: fields.largest(&parameters::INTERMEDIATE, LIMIT_DIM)?,
        experts,
        experts_per_token: number(&parameters::EXPERTS_PER_TOKEN)?.unwrap_or(0),
        expert_intermediate: fields.largest(&["moe_intermediate_size"], LIMIT_DIM)?,
        trained_context: fields.number(
            &["max_position_embeddings", "n_positions", "max_sequence_length", "seq_length"],
            LIMIT_TOKENS,
        )?,
        parameters: parameters::count(&fields, &layers),
        quantization: families::quantization(&fields),
        has_encoder: families::has_encoder(&fields),
        file_bytes: None,
        notes: fields.notes(),
        layers,
    })
}

/// Bytes of all tensors from the index beside a sharded checkpoint: `metadata.total_size`.
fn indexed_bytes(folder: &Path) -> Option<u64> {
    let text = read_text(&folder.join("model.safetensors.index.json")).ok()?;
    let index: Value = serde_json::from_str(&text).ok()?;
    index.get("metadata")?.get("total_size").and_then(config::whole)
}

fn read_text(path: &Path) -> Result<String, ConfigError> {
    let wrong = |reason: String| ConfigError::File { path: path.display().to_string(), reason };
    let bytes = std::fs::metadata(path).map_err(|error| wrong(error.to_string()))?.len();
    if bytes > LIMIT_CONFIG_BYTES {
        return Err(wrong(format!(
            "{bytes} bytes are too many for a config; a GGUF ends in .gguf"
        )));
    }
    std::fs::read_to_string(path).map_err(|error| wrong(error.to_string()))
}
