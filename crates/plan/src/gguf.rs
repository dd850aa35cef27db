//! A GGUF file's metadata as config fields, its tensors as parameter counts.

use std::path::Path;

use reef_model::gguf::{Gguf, Value as GgufValue};
use serde_json::{Map, Value};

use crate::config::ConfigError;
use crate::model::{Model, Parameters};
use crate::source;

/// Keys under the architecture's prefix and the config fields that they are.
const KEYS: [(&str, &str); 29] = [
    ("block_count", "num_hidden_layers"),
    ("embedding_length", "hidden_size"),
    ("attention.head_count", "num_attention_heads"),
    ("attention.head_count_kv", "num_key_value_heads"),
    ("attention.key_length", "head_dim"),
    ("attention.value_length", "v_head_dim"),
    ("attention.key_length_swa", "swa_head_dim"),
    ("attention.value_length_swa", "swa_v_head_dim"),
    ("attention.sliding_window", "sliding_window"),
    ("attention.shared_kv_layers", "num_kv_shared_layers"),
    ("attention.chunk_size", "attention_chunk_size"),
    ("attention.kv_lora_rank", "kv_lora_rank"),
    ("attention.q_lora_rank", "q_lora_rank"),
    ("attention.indexer.key_length", "index_head_dim"),
    ("attention.indexer.head_count", "index_n_heads"),
    ("feed_forward_length", "intermediate_size"),
    ("expert_feed_forward_length", "moe_intermediate_size"),
    ("expert_count", "num_experts"),
    ("expert_used_count", "num_experts_per_tok"),
    ("expert_shared_count", "n_shared_experts"),
    ("leading_dense_block_count", "first_k_dense_replace"),
    ("context_length", "max_position_embeddings"),
    ("vocab_size", "vocab_size"),
    ("full_attention_interval", "full_attention_interval"),
    ("nextn_predict_layers", "num_nextn_predict_layers"),
    ("ssm.conv_kernel", "linear_conv_kernel_dim"),
    ("ssm.group_count", "linear_num_key_heads"),
    ("ssm.time_step_rank", "linear_num_value_heads"),
    ("ssm.state_size", "linear_key_head_dim"),
];

/// Longest list taken from the metadata: one entry a layer.
const LIMIT_LIST: usize = 1 << 10;

/// Reads a model's shapes, parameter counts and file size.
pub fn read(path: &Path, settings: &[String]) -> Result<Model, ConfigError> {
    let shown = path.display().to_string();
    let wrong = |reason: String| ConfigError::File { path: shown.clone(), reason };
    let gguf = Gguf::open(path).map_err(|error| wrong(error.to_string()))?;
    let architecture = gguf.architecture().map_err(|error| wrong(error.to_string()))?;
    let stem = path.file_stem().map_or_else(String::new, |s| s.to_string_lossy().into_owned());
    let name = gguf.str("general.name").unwrap_or(&stem).to_string();
    let mut model = source::from_values(&name, fields(&gguf, architecture), settings)?;
    model.parameters = Ok(parameters(&gguf, model.experts, model.experts_per_token));
    model.file_bytes = Some(gguf.tensors().map(|tensor| tensor.data.len() as u64).sum());
    Ok(model)
}

/// The metadata under HF names.
fn fields(gguf: &Gguf, architecture: &str) -> Map<String, Value> {
    let mut values = Map::new();
    values.insert("model_type".into(), architecture.into());
    for (key, field) in KEYS {
        let value = gguf.get(&format!("{architecture}.{key}")).and_then(json);
        // llama.cpp writes 0 for "not used".
        if let Some(value) = value.filter(|value| value.as_u64() != Some(0)) {
            values.insert(field.into(), value);
        }
    }
    let pattern = gguf.get(&format!("{architecture}.attention.sliding_window_pattern"));
    match pattern.and_then(json) {
        // A flag a layer, true for windows, or a period.
        Some(Value::Array(flags)) => {
            let is_set = |value: &Value| value.as_bool().unwrap_or(value.as_u64() != Some(0));
            let flag = |value: Value| u64::from(is_set(&value));
            let flags = flags.into_iter().map(flag).collect::<Vec<_>>();
            values.insert("hybrid_layer_pattern".into(), flags.into());
        }
        Some(period) => {
            values.insert("sliding_window_pattern".into(), period);
        }
        None => {}
    }
    // Query heads per layer: 0 in recurrent ones, alike in the others.
    if let Some(Value::Array(heads)) = values.get("num_attention_heads") {
        let most = heads.iter().filter_map(Value::as_u64).max().unwrap_or(0);
        values.insert("num_attention_heads".into(), most.into());
    }
    adapt_latent(gguf, architecture, &mut values);
    adapt_recurrent(gguf, architecture, &mut values);
    if let Ok(tensor) = gguf.tensor("token_embd.weight") {
        let rows = tensor.dims.get(1).copied().unwrap_or(0);
        values.insert("vocab_size".into(), rows.into());
    }
    let tied = gguf.tensor("output.weight").is_err();
    values.insert("tie_word_embeddings".into(), tied.into());
    values
}

/// MLA files give whole key lengths per head: the rotated part apart is `rope.dimension_count`.
fn adapt_latent(gguf: &Gguf, architecture: &str, values: &mut Map<String, Value>) {
    if !values.contains_key("kv_lora_rank") {
        return;
    }
    let number = |key: &str| gguf.u64(&format!("{architecture}.{key}")).ok();
    let Some(rope) = number("rope.dimension_count") else {
        return;
    };
    values.insert("qk_rope_head_dim".into(), rope.into());
    // `key_length_mla` where `key_length` means the latent's own width (files since 2025).
    let key = number("attention.key_length_mla").or_else(|| number("attention.key_length"));
    let value = number("attention.value_length_mla").or_else(|| number("attention.value_length"));
    values.remove("head_dim");
    if let (Some(key), Some(value)) = (key, value) {
        values.insert("qk_nope_head_dim".into(), key.saturating_sub(rope).into());
        values.insert("v_head_dim".into(), value.into());
    }
}

/// `ssm.inner_size` over the heads is a value head's width; Mamba-2 families name their heads so too.
fn adapt_recurrent(gguf: &Gguf, architecture: &str, values: &mut Map<String, Value>) {
    let number = |key: &str| gguf.u64(&format!("{architecture}.ssm.{key}")).ok().filter(|n| *n > 0);
    let (Some(inner), Some(heads)) = (number("inner_size"), number("time_step_rank")) else {
        return;
    };
    let head_dim = inner / heads;
    if values.contains_key("full_attention_interval") {
        values.insert("linear_value_head_dim".into(), head_dim.into());
        return;
    }
    let renamed = [
        ("linear_conv_kernel_dim", "conv_kernel"),
        ("linear_num_key_heads", "n_groups"),
        ("linear_num_value_heads", "mamba_num_heads"),
        ("linear_key_head_dim", "ssm_state_size"),
    ];
    for (from, to) in renamed {
        if let Some(value) = values.remove(from) {
            values.insert(to.into(), value);
        }
    }
    values.insert("mamba_head_dim".into(), head_dim.into());
    let layers = values.get("num_hidden_layers").and_then(Value::as_u64).unwrap_or(0);
    let flags = gguf.get(&format!("{architecture}.attention.recurrent_layers")).and_then(json);
    let recurrent: Vec<bool> = match (values.get("num_key_value_heads"), flags) {
        // Layers without KV heads are the recurrent ones.
        (Some(Value::Array(heads)), _) => heads.iter().map(|h| h.as_u64() == Some(0)).collect(),
        (_, Some(Value::Array(flags))) => flags.iter().map(|f| f.as_u64() == Some(1)).collect(),
        _ => vec![architecture.starts_with("mamba"); layers.min(LIMIT_LIST as u64) as usize],
    };
    let kind = |recurrent: &bool| if *recurrent { "mamba" } else { "attention" };
    let kinds: Vec<&str> = recurrent.iter().map(kind).collect();
    values.insert("layer_types".into(), kinds.into());
}

fn json(value: GgufValue<'_>) -> Option<Value> {
    if let GgufValue::Array(array) = &value {
        let entries = array.iter().take(LIMIT_LIST).map(json).collect::<Option<Vec<_>>>()?;
        return Some(entries.into());
    }
    if let GgufValue::Bool(flag) = value {
        return Some(flag.into());
    }
    value.integer().and_then(|integer| u64::try_from(integer).ok()).map(Value::from)
}

/// Elements of the tensors by class; expert tensors are told by `_exps`.
fn parameters(gguf: &Gguf, experts: u64, experts_per_token: u64) -> Parameters {
    let mut sum = Parameters::default();
    for tensor in gguf.tensors() {
        let elements = tensor.elements() as u64;
        let name = tensor.name;
        let class = match name {
            "token_embd.weight" | "per_layer_token_embd.weight" => &mut sum.embedding,
            "output.weight" => &mut sum.output,
            _ if name.contains("_exps") => &mut sum.experts,
            _ if name.contains("ffn_gate_inp") => &mut sum.router,
            _ if tensor.dims.len() < 2 => &mut sum.small,
            _ if name.contains("ffn_") => &mut sum.dense,
            _ => &mut sum.attention,
        };
        *class += elements;
    }
    let share =
        |active: u64| u128::from(sum.experts) * u128::from(active) / u128::from(experts.max(1));
    sum.experts_active =
        u64::try_from(share(experts_per_token.min(experts))).unwrap_or(sum.experts);
    sum
}
