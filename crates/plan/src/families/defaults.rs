//! Fields that a config leaves to the defaults of its family: published configs of multimodal models list
//! only what differs from them in their `text_config`, and Gemma's leave out the width of a head.

use serde_json::Value;

use super::attention::{HEAD_DIM, HIDDEN, KV_HEADS, QUERY_HEADS};
use super::{LAYER_FIELDS, family};
use crate::config::Fields;

/// A field's names and its default.
type Default = (&'static [&'static str], u64);

/// Defaults of `transformers` 4.57 by the start of `model_type`; the longer first.
const DEFAULTS: [(&str, &[Default]); 5] = [
    ("gemma3_text", &[(&QUERY_HEADS, 8), (&KV_HEADS, 4), (&HEAD_DIM, 256), (VOCABULARY, 262_208)]),
    ("gemma2", &[(&QUERY_HEADS, 8), (&KV_HEADS, 4), (&HEAD_DIM, 256), (VOCABULARY, 256_000)]),
    ("gemma", &[(&QUERY_HEADS, 16), (&KV_HEADS, 16), (&HEAD_DIM, 256), (VOCABULARY, 256_000)]),
    (
        "mistral",
        &[
            (&LAYER_FIELDS, 32),
            (&HIDDEN, 4096),
            (&QUERY_HEADS, 32),
            (&KV_HEADS, 8),
            (&["intermediate_size"], 14_336),
            (VOCABULARY, 32_000),
        ],
    ),
    (
        "llama",
        &[
            (&LAYER_FIELDS, 32),
            (&HIDDEN, 4096),
            (&QUERY_HEADS, 32),
            (&["intermediate_size"], 11_008),
            (VOCABULARY, 32_000),
        ],
    ),
];

const VOCABULARY: &[&str] = &["vocab_size"];

/// Fills what a nested config leaves out, and a Gemma's heads. A config that is no family's own (without
/// `model_type`) keeps its gaps: they are errors that name the field.
pub fn fill(fields: &mut Fields) {
    let stated = fields.text("model_type").is_some();
    let family = family(fields);
    let found = DEFAULTS.iter().find(|(prefix, _)| stated && family.starts_with(prefix));
    let Some((prefix, defaults)) = found else {
        return;
    };
    if !(fields.is_nested() || prefix.starts_with("gemma")) || family.starts_with("llama4") {
        return;
    }
    for (names, value) in *defaults {
        if !names.iter().any(|name| fields.has(name)) {
            fields.assume(names[0], Value::from(*value));
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::model::Cache;
    use crate::source::from_json;

    #[test]
    fn a_partial_text_config_is_completed() {
        // gemma-3-4b-it as published: no heads, no width of a head.
        let json = r#"{"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
            "text_config": {"hidden_size": 2560, "intermediate_size": 10240,
            "model_type": "gemma3_text", "num_hidden_layers": 34, "sliding_window": 1024}}"#;
        let model = from_json("gemma-3-4b-it", json, &[]).unwrap();
        let heads = model.layers[0].heads().unwrap();
        assert_eq!((heads.kv, heads.key_dim), (4, 256));
        let full = model.layers.iter().filter(|layer| matches!(layer, Cache::Full { .. })).count();
        assert_eq!(full, 5);
        let note = model.notes.join("; ");
        assert!(note.contains("head_dim") && note.contains("num_key_value_heads"), "{note}");
        // llava-1.5-7b: nothing but the vocabulary.
        let json = r#"{"model_type": "llava", "text_config": {"model_type": "llama",
            "max_position_embeddings": 4096, "vocab_size": 32064}}"#;
        let model = from_json("llava", json, &[]).unwrap();
        assert_eq!(model.layers.len(), 32);
        assert_eq!(model.layers[0].heads().unwrap().kv, 32);
    }

    #[test]
    fn widths_listed_per_layer_are_read() {
        let json = r#"{"model_type": "gemma3n_text", "hidden_size": 2048, "num_hidden_layers": 2,
            "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 8,
            "intermediate_size": [8192, 16384]}"#;
        assert_eq!(from_json("m", json, &[]).unwrap().intermediate, Some(16_384));
    }

    #[test]
    fn gaps_of_a_plain_config_stay_errors() {
        let json = r#"{"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32}"#;
        let error = from_json("m", json, &[]).unwrap_err().to_string();
        assert!(error.contains("num_hidden_layers"), "{error}");
    }
}
