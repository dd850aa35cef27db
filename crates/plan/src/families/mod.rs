//! From config fields to what each layer keeps. A family is recognized by its fields; `model_type`
//! only fills gaps that the fields leave.

pub mod attention;
pub mod defaults;
pub mod drafter;
pub mod mla;
pub mod recurrent;
pub mod sharing;
pub mod window;

use serde_json::Value;

use crate::config::{ConfigError, Fields};
use crate::model::Cache;
use window::Slot;

/// Most layers of a model.
pub const LIMIT_LAYERS: u64 = 1 << 10;
/// Widest dimension of a matrix (products of all limits stay below 2^63).
pub const LIMIT_DIM: u64 = 1 << 18;
/// Most heads of a layer.
pub const LIMIT_HEADS: u64 = 1 << 12;
/// Most channels of a head or a latent.
pub const LIMIT_HEAD_DIM: u64 = 1 << 14;
/// Most tokens of a context or window.
pub const LIMIT_TOKENS: u64 = 1 << 32;

/// Names of the field that counts layers.
pub const LAYER_FIELDS: [&str; 4] = ["num_hidden_layers", "n_layer", "num_layers", "n_layers"];

/// What each of the model's layers keeps.
///
/// # Errors
/// Names the fields that are missing or have values that they cannot have.
pub fn layers(fields: &Fields) -> Result<Vec<Cache>, ConfigError> {
    let count = fields.required(&LAYER_FIELDS, LIMIT_LAYERS)? as usize;
    fields.complete()?;
    if fields.list("compress_ratios").is_some() {
        return mla::compressed_layers(fields, count);
    }
    let slots = window::slots(fields, count)?;
    let mut layers = Vec::with_capacity(count);
    for (index, slot) in slots.iter().enumerate() {
        layers.push(match slot {
            Slot::Recurrent => Cache::Recurrent(recurrent::state(fields)?),
            Slot::FeedForward | Slot::Experts => Cache::Nothing,
            Slot::Full if fields.has("kv_lora_rank") => Cache::Latent(mla::latent(fields)?),
            slot => attention::cache(fields, *slot, index)?,
        });
    }
    fields.complete()?;
    sharing::apply(fields, &slots, &mut layers)?;
    if is_parallel(fields) {
        layers.extend(vec![Cache::Recurrent(recurrent::state(fields)?); count]);
        fields.complete()?;
    }
    Ok(layers)
}

/// `model_type`, read off the name where the config is a bare list of facts.
pub fn family(fields: &Fields) -> String {
    if let Some(family) = fields.text("model_type") {
        return family.to_string();
    }
    let name = fields.model().to_ascii_lowercase();
    let found = FAMILY_BY_NAME.iter().find(|(part, _)| name.contains(part));
    found.map_or(String::new(), |(_, family)| (*family).to_string())
}

/// Parts of model names that tell the family of a config without `model_type`; the longer first.
const FAMILY_BY_NAME: [(&str, &str); 27] = [
    ("embeddinggemma", "gemma3_text"),
    ("gemma-2", "gemma2"),
    ("gemma-3n", "gemma3n"),
    ("gemma-3", "gemma3_text"),
    ("gemma-4", "gemma4_text"),
    ("gpt-oss", "gpt_oss"),
    ("granite-4.0-h", "granitemoehybrid"),
    ("granite", "granite"),
    ("kimi-linear", "kimi_linear"),
    ("kimi", "kimi_k2"),
    ("deepseek-v2", "deepseek_v2"),
    ("deepseek-v3", "deepseek_v3"),
    ("deepseek-r1-distill-llama", "llama"),
    ("deepseek-r1-distill-qwen", "qwen2"),
    ("deepseek-r1", "deepseek_v3"),
    ("qwen3-next", "qwen3_next"),
    ("qwen3.", "qwen3_5_text"),
    ("qwen3", "qwen3"),
    ("qwen2", "qwen2"),
    ("llama-4", "llama4_text"),
    ("llama", "llama"),
    ("pixtral", "mistral"),
    ("mixtral", "mixtral"),
    ("mistral", "mistral"),
    ("phi-4", "phi3"),
    ("glm-4", "glm4_moe"),
    ("lightonocr", "qwen3"),
];

/// Whether every layer has attention and a recurrence side by side (Falcon-H1). The states of such a model
/// stand behind all its attention layers.
pub fn is_parallel(fields: &Fields) -> bool {
    is_family(fields, &["falcon_h1"])
}

/// Whether the family's name starts with one of `prefixes`.
pub fn is_family(fields: &Fields, prefixes: &[&str]) -> bool {
    let family = family(fields);
    prefixes.iter().any(|prefix| family.starts_with(prefix))
}

/// The format of the published checkpoint: `quantization_config`, else the habit of families that are
/// published in 8 or 4 bits.
pub fn quantization(fields: &Fields) -> Option<String> {
    if let Some(config) = fields.get("quantization_config") {
        let text = |key: &str| config.get(key).and_then(Value::as_str);
        let weights = config
            .get("config_groups")
            .and_then(|groups| groups.as_object()?.values().next()?.get("weights"));
        let bits = weights.and_then(|weights| weights.get("num_bits")).and_then(Value::as_u64);
        let kind = weights.and_then(|weights| weights.get("type")).and_then(Value::as_str);
        return match (bits, kind) {
            (Some(4), Some("float")) => Some("nvfp4".into()),
            (Some(4), _) => Some("int4".into()),
            (Some(8), Some("float")) => Some("fp8".into()),
            (Some(8), _) => Some("int8".into()),
            _ => text("quant_algo").or(text("quant_method")).map(str::to_lowercase),
        };
    }
    let known = [
        ("deepseek_v4", "fp4-experts"),
        ("deepseek_v3", "fp8"),
        ("kimi_k2", "fp8"),
        ("gpt_oss", "mxfp4"),
        ("minimax_m2", "fp8"),
        ("mimo_v2", "fp8"),
    ];
    let family = family(fields);
    let found = known.iter().find(|(prefix, _)| family.starts_with(prefix));
    found.map(|(_, format)| (*format).to_string())
}

/// Whether the config or its architecture names an encoder.
pub fn has_encoder(fields: &Fields) -> bool {
    let encoders = ["vision_config", "audio_config", "vision_tower"];
    let architectures = fields.list("architectures");
    let named = architectures.into_iter().flatten().filter_map(Value::as_str).any(|architecture| {
        ["ForConditionalGeneration", "VL", "Vision", "Omni"]
            .iter()
            .any(|p| architecture.contains(p))
    });
    named || encoders.iter().any(|field| fields.has(field)) || is_family(fields, &["pixtral"])
}

/// A list entry as a whole number, or an error about the field.
pub(crate) fn entry(fields: &Fields, field: &str, value: &Value) -> Result<u64, ConfigError> {
    crate::config::whole(value).ok_or_else(|| fields.wrong(field, "whole numbers in the list"))
}
