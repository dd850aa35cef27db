//! Bundled configs and odd ones: inventories, parameter counts against published sizes, errors.

use reef_plan::dtype::KvDtype;
use reef_plan::model::{Cache, Model};
use reef_plan::source;

fn model(name: &str) -> Model {
    source::read(name, &[]).unwrap_or_else(|error| panic!("{name}: {error}"))
}

#[test]
fn every_bundled_config_is_a_model() {
    for name in source::bundled() {
        let model = source::read(name, &[]);
        // A record of two numbers of a model whose latent is known only from a log.
        assert!(model.is_ok(), "{name}: {}", model.unwrap_err());
    }
}

/// Published totals and active parameters, in billions; the names carry most of them.
#[test]
fn parameter_counts_are_the_published_ones() {
    for (name, total, active) in [
        ("Llama-3.1-8B", 8.03, 7.5),
        ("Llama-3.1-70B", 70.6, 69.5),
        ("Llama-3.1-405B", 405.9, 403.8),
        ("Qwen3-0.6B", 0.60, 0.60),
        ("Qwen3-32B", 32.8, 32.0),
        ("Qwen3-30B-A3B", 30.5, 3.0),
        ("Qwen3-235B-A22B-FP8", 235.0, 21.5),
        ("Qwen3-Next-80B-A3B", 79.7, 3.0),
        ("Mixtral-8x7B", 46.7, 12.8),
        ("DeepSeek-V3", 671.0, 36.7),
        ("Kimi-K2-Instruct", 1026.0, 31.5),
        ("gpt-oss-120b", 116.8, 5.1),
        ("gpt-oss-20b", 20.9, 3.6),
        ("Nemotron-3-Nano-30B-A3B", 31.6, 3.2),
        ("Nemotron-H-56B", 56.0, 55.0),
        ("gemma-4-26B-A4B", 25.2, 3.8),
        ("gemma-3-27b-it", 27.0, 27.0),
        ("Llama-4-Scout-17B-16E", 107.8, 16.1),
        ("Llama-4-Maverick-17B-128E", 400.7, 16.1),
        ("Kimi-Linear-48B-A3B", 49.1, 2.7),
        ("Qwen3.6-27B", 26.9, 25.6),
    ] {
        let parameters = model(name).parameters().unwrap();
        let billions = |count: u64| count as f64 / 1e9;
        let error = (billions(parameters.total()) - total) / total;
        assert!(error.abs() < 0.02, "{name}: {:.2} B, not {total}", billions(parameters.total()));
        let error = (billions(parameters.active()) - active) / active;
        assert!(error.abs() < 0.2, "{name}: {:.2} B active", billions(parameters.active()));
    }
}

#[test]
fn bytes_per_token_of_each_family() {
    for (name, tp, bytes) in [
        ("Llama-3.1-8B", 1, 131_072),
        ("Llama-3.1-70B", 1, 327_680),
        ("DeepSeek-V3", 8, 70_272),     // a latent is not split
        ("Qwen3-30B-A3B", 8, 48 * 512), // 4 heads over 8 ranks: one each, copied
        ("gpt-oss-120b", 1, 36 * 8 * 128 * 2),
        ("Qwen3.6-27B", 1, 16 * 4 * 512 * 2), // 16 of 64 layers cache tokens
        ("gemma-4-E2B", 1, 2 * (12 * 512 + 3 * 1024)), // 15 of 35 own a cache
        ("Nemotron-H-56B", 1, 10 * 8 * 256 * 2),
    ] {
        assert_eq!(model(name).kv_bytes_per_token(KvDtype::Bf16, tp), bytes, "{name}");
    }
    // 8,192 tokens of Llama-3-70B at f16.
    assert_eq!(model("Llama-3.1-70B").kv_bytes(8192, KvDtype::Bf16, 1), 2_684_354_560);
}

#[test]
fn windows_states_and_shares_are_told_apart() {
    let count = |name: &str, is: fn(&Cache) -> bool| {
        model(name).layers.iter().filter(|layer| is(layer)).count()
    };
    let sliding = |layer: &Cache| matches!(layer, Cache::Sliding { .. });
    let state = |layer: &Cache| matches!(layer, Cache::Recurrent(_));
    assert_eq!(count("gemma-3-27b-it", sliding), 52);
    assert_eq!(count("gemma-2-2b", sliding), 13);
    assert_eq!(count("MiMo-V2-Flash", sliding), 39);
    assert_eq!(count("granite-4.0-h-1b", state), 36);
    assert_eq!(count("Kimi-Linear-48B-A3B", state), 20);
    assert_eq!(count("Kimi-Linear-48B-A3B", |layer| matches!(layer, Cache::Latent(_))), 7);
    assert_eq!(count("gemma-4-E2B", |layer| matches!(layer, Cache::Shared { .. })), 20);
    assert_eq!(count("Llama-4-Scout-17B-16E", |l| matches!(l, Cache::Chunked { .. })), 36);
    assert_eq!(count("Qwen3-8B", sliding), 0);
}

#[test]
fn an_unknown_architecture_is_answered_with_the_missing_fields() {
    let odd = r#"{"model_type": "brand_new", "num_hidden_layers": 12}"#;
    let error = source::from_json("odd", odd, &[]).unwrap_err().to_string();
    assert!(error.contains("head_dim") && error.contains("--set head_dim=VALUE"), "{error}");
    let settings = ["head_dim=64", "num_key_value_heads=4"].map(String::from);
    let model = source::from_json("odd", odd, &settings).unwrap();
    assert_eq!(model.kv_bytes_per_token(KvDtype::Bf16, 1), 12 * 4 * 128 * 2);
    // KV is known, the weights are not: the error comes with that question.
    let missing = model.parameters().unwrap_err().to_string();
    assert!(missing.contains("--set hidden_size=VALUE"), "{missing}");
    let unknown = source::read("no-such-model", &[]).unwrap_err().to_string();
    assert!(unknown.contains("Llama-3.1-8B"), "{unknown}");
}

#[test]
fn absurd_values_are_refused_by_name() {
    for (json, field) in [
        (r#"{"num_hidden_layers": 99999999}"#, "num_hidden_layers"),
        (r#"{"num_hidden_layers": -1}"#, "num_hidden_layers"),
        (r#"{"num_hidden_layers": 2, "layer_types": ["full_attention"]}"#, "layer_types"),
        (r#"{"num_hidden_layers": 1, "layer_types": ["warp"]}"#, "layer_types"),
        (
            r#"{"num_hidden_layers": 2, "head_dim": 8, "num_key_value_heads": "eight"}"#,
            "num_key_value_heads",
        ),
        (
            r#"{"num_hidden_layers": 2, "head_dim": 8, "num_key_value_heads": 1,
                "num_kv_shared_layers": 2}"#,
            "num_kv_shared_layers",
        ),
    ] {
        let error = source::from_json("m", json, &[]).unwrap_err().to_string();
        assert!(error.contains(field) && error.contains("--set"), "{error}");
    }
    assert!(source::from_json("m", "[1]", &[]).is_err());
    assert!(source::from_json("m", "{", &[]).is_err());
}

/// Tiny files of other architectures than Reef's: their inventories are read all the same.
#[test]
fn gguf_files_of_every_architecture_are_read() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/golden/archs");
    let folder = std::env::var("REEF_SHARED").map_or(folder.into(), |s| s + "/golden/archs");
    if !std::path::Path::new(&folder).is_dir() {
        println!("skipped: no {folder}");
        return;
    }
    for (file, bytes_per_token, states) in [
        ("deepseek2-moe", 2 * 576 * 2, 0),
        ("gemma2-dense", 2 * 2 * 256 * 2, 0),
        ("gpt-oss-moe", 2 * 2 * 256 * 2, 0),
        ("granitehybrid-dense", 2 * 256 * 2, 1),
        ("mamba2-dense", 0, 2),
        ("qwen3-dense", 2 * 128 * 2, 0),
    ] {
        let model = source::read(&format!("{folder}/{file}.gguf"), &[]).unwrap();
        assert_eq!(model.kv_bytes_per_token(KvDtype::Bf16, 1), bytes_per_token, "{file}");
        let recurrent = model.layers.iter().filter(|l| matches!(l, Cache::Recurrent(_))).count();
        assert_eq!(recurrent, states, "{file}");
        assert!(model.file_bytes.unwrap() > 0 && model.parameters().unwrap().total() > 0);
    }
}

#[test]
fn a_checkpoint_folder_tells_its_bytes() {
    let folder = std::env::temp_dir().join(format!("reef-plan-folder-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let nested = r#"{"architectures": ["XForConditionalGeneration"], "vision_config": {"depth": 2},
        "text_config": {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 100, "intermediate_size": 128}}"#;
    std::fs::write(folder.join("config.json"), nested).unwrap();
    let index = r#"{"metadata": {"total_size": 123456}, "weight_map": {}}"#;
    std::fs::write(folder.join("model.safetensors.index.json"), index).unwrap();
    let model = source::read(&folder.to_string_lossy(), &[]).unwrap();
    assert_eq!((model.file_bytes, model.has_encoder), (Some(123_456), true));
    assert_eq!(model.kv_bytes_per_token(KvDtype::Bf16, 1), 4 * 2 * 32 * 2);
    // 2 heads of 16 + 16 bytes and two scales of 4 each.
    assert_eq!(model.kv_bytes_per_token(KvDtype::Int8PerHead, 1), 4 * 2 * (32 + 8));
    std::fs::remove_dir_all(&folder).unwrap();
}
