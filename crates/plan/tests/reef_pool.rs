//! What the plan says about Reef is what Reef's pool does, to the byte and the token.

use reef_kv::page::PageFormat;
use reef_kv::{BlockPool, Fidelity, Sequence, SequenceConfig};
use reef_plan::dtype::KvDtype;
use reef_plan::engines::setup::Setup;
use reef_plan::engines::{Engine, Verdict, reef};
use reef_plan::figure::{Figure, Unit};
use reef_plan::model::Model;
use reef_plan::source;

const SMALL: &str = r#"{"model_type": "llama", "num_hidden_layers": 30, "hidden_size": 576,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
    "intermediate_size": 1536, "max_position_embeddings": 8192}"#;
const WINDOWED: &str = r#"{"model_type": "gemma3_text", "num_hidden_layers": 18, "hidden_size": 640,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512,
    "sliding_window_pattern": 6, "vocab_size": 262144, "intermediate_size": 2048,
    "max_position_embeddings": 32768}"#;

fn model(json: &str) -> Model {
    source::from_json("test", json, &[]).unwrap()
}

fn setup(budget_bytes: usize, format: KvDtype, length: u64) -> Setup {
    let budget = Figure::measured(budget_bytes as f64, Unit::Bytes, "--kv-memory");
    Setup {
        kv_budget: Some(budget),
        kv_keys: format,
        kv_values: format,
        max_model_len: Some(length),
        ..Setup::default()
    }
}

/// Grows a sequence one token at a time, nothing giving way, until the pool is short.
fn tokens_really_held(pool: &BlockPool, limit: usize) -> usize {
    let config = SequenceConfig {
        request: 0,
        contract: Fidelity::Exact,
        priority: 0,
        trained_context: limit,
        max_tokens: Some(limit),
    };
    let mut sequence = Sequence::new(pool, config);
    while sequence.next_position() < limit && sequence.grow(1).is_ok() {
        sequence.commit(1);
    }
    sequence.next_position()
}

#[test]
fn planned_tokens_are_the_tokens_held() {
    for (json, budget_mib) in [(SMALL, 24), (SMALL, 57), (WINDOWED, 20), (WINDOWED, 41)] {
        let budget_bytes = budget_mib << 20;
        let model = model(json);
        let plan = reef::Reef.plan(&model, &setup(budget_bytes, KvDtype::Bf16, 2048)).unwrap();
        let planned = plan.printed_tokens.unwrap().value as usize;
        let pool = BlockPool::new(reef::pool_config(&model, 32, budget_bytes).unwrap()).unwrap();
        let held = tokens_really_held(&pool, planned + 4096);
        assert_eq!(planned, pool.capacity_tokens(PageFormat::F16).unwrap());
        // A window group's worst placing of steps may keep one block that this run of steps does not.
        let slack = if json == WINDOWED { 32 * 18 } else { 0 };
        assert!((planned..=planned + slack).contains(&held), "{budget_mib} MiB: {planned} {held}");
    }
}

#[test]
fn planned_bytes_are_the_bytes_allocated() {
    for json in [SMALL, WINDOWED] {
        let budget_bytes = 64 << 20;
        let model = model(json);
        let setup = setup(budget_bytes, KvDtype::Bf16, 1024);
        let plan = reef::Reef.plan(&model, &setup).unwrap();
        let pool = BlockPool::new(reef::pool_config(&model, 32, budget_bytes).unwrap()).unwrap();
        let needed = plan.kv_needed.unwrap().value as usize;
        assert_eq!(needed, pool.bytes_for_tokens(1024, PageFormat::F16, 1));
        assert_eq!(plan.verdict, Verdict::Starts);
        // Without windows every token of every layer is in a page.
        let held = tokens_really_held(&pool, 1024);
        assert_eq!(held, 1024);
        let per_token = plan.kv_bytes_per_token.unwrap().value as usize;
        let peak = pool.accounts().peak_bytes;
        if json == SMALL {
            assert_eq!((per_token, peak), (23_040, 1024 * 23_040));
        } else {
            assert!(peak < 1024 * per_token && peak <= needed);
        }
        // A budget of exactly what was said to be needed does hold the length.
        let config = reef::pool_config(&model, 32, needed).unwrap();
        assert!(BlockPool::new(config).unwrap().fits(1024, PageFormat::F16, 1));
    }
}

#[test]
fn lossy_formats_and_refusals_come_from_the_pool_too() {
    let model = model(SMALL);
    let int8 = reef::Reef.plan(&model, &setup(24 << 20, KvDtype::Int8, 1800)).unwrap();
    assert_eq!(int8.kv_bytes_per_token.as_ref().unwrap().value, 12_960.0);
    assert_eq!(int8.verdict, Verdict::Starts);
    let exact = reef::Reef.plan(&model, &setup(24 << 20, KvDtype::Bf16, 1800)).unwrap();
    assert_eq!(exact.verdict, Verdict::Refuses);
    assert!(exact.refusal.unwrap().contains("the budget is 25165824"));
    let tiny = reef::Reef.plan(&model, &setup(1 << 20, KvDtype::Bf16, 1800)).unwrap();
    assert_eq!(tiny.verdict, Verdict::Refuses);
    assert!(tiny.refusal.unwrap().contains("raise --kv-memory"));
    let int4 = reef::Reef.plan(&model, &setup(24 << 20, KvDtype::Int4, 3200)).unwrap();
    assert_eq!(int4.kv_bytes_per_token.as_ref().unwrap().value, 7_200.0);
    assert_eq!(int4.verdict, Verdict::Starts);
    let other = reef::Reef.plan(&model, &setup(24 << 20, KvDtype::Q4_0, 1800)).unwrap_err();
    assert!(other.to_string().contains("--kv-cache-dtype"), "{other}");
}

#[test]
fn what_reef_does_not_run_is_refused_by_name() {
    for name in ["DeepSeek-V3", "Qwen3.6-27B", "gemma-4-E2B", "Llama-4-Scout-17B-16E"] {
        let model = source::read(name, &[]).unwrap();
        let error = reef::Reef.plan(&model, &Setup::default()).unwrap_err().to_string();
        assert!(error.contains("Reef runs llama"), "{error}");
    }
}

/// The pool of a GGUF is the one that the engine makes from its spec.
#[test]
fn a_gguf_gives_the_engines_own_pool() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/golden/archs");
    let folder = std::env::var("REEF_SHARED").map_or(folder.into(), |s| s + "/golden/archs");
    let Ok(entries) = std::fs::read_dir(&folder) else {
        println!("skipped: no {folder}");
        return;
    };
    let mut compared = 0;
    for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
        let is_gguf = path.extension().is_some_and(|extension| extension == "gguf");
        let Some(gguf) = is_gguf.then(|| reef_model::gguf::Gguf::open(&path).ok()).flatten() else {
            continue;
        };
        let Ok(spec) = reef_model::spec::ModelSpec::from_gguf(&gguf) else { continue };
        let model = source::read(&path.to_string_lossy(), &[]).unwrap();
        let config = reef::pool_config(&model, 32, 64 << 20).unwrap();
        let shape = spec.page_shape(32);
        let groups: Vec<_> =
            spec.groups.iter().map(|group| (group.layers.len(), shape, group.window)).collect();
        let planned: Vec<_> = config.groups.iter().map(|g| (g.layers, g.shape, g.window)).collect();
        assert_eq!(planned, groups, "{}", path.display());
        assert_eq!(model.vocabulary, Some(spec.vocabulary as u64));
        compared += 1;
    }
    println!("{compared} files compared");
    assert!(compared >= 4, "{compared}");
}
