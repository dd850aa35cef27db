//! `reef plan fit` and `score` as scripts see them: status, streams, JSON.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

fn reef(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_reef")).args(arguments).output().unwrap()
}

fn json(arguments: &[&str]) -> Value {
    let output = reef(arguments);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && errors.is_empty(), "{arguments:?}: {errors}");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn refused(arguments: &[&str], status: i32) -> String {
    let output = reef(arguments);
    assert_eq!(output.status.code(), Some(status), "{arguments:?}");
    assert!(output.stdout.is_empty(), "{arguments:?}");
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn a_refusal_comes_with_the_engines_words_and_mends() {
    let fit = json(&["plan", "fit", "--model", "Llama-3.1-8B", "--gpu", "L4", "--json"]);
    let plan = &fit["plan"];
    assert_eq!(plan["verdict"], "refuses");
    let refusal = plan["refusal"].as_str().unwrap();
    assert!(refusal.contains("the estimated maximum model length is"), "{refusal}");
    assert_eq!(plan["kv_bytes_per_token"]["value"], 131_072.0);
    assert_eq!(plan["kv_bytes_per_token"]["provenance"], "derived");
    assert_eq!(plan["ledger"]["weights"]["provenance"], "assumed");
    let mends = fit["mends"].as_array().unwrap();
    assert!((2..=3).contains(&mends.len()) && mends[0]["starts"] == true, "{mends:?}");
    // What a log measured takes the place of the estimate.
    let fit = json(&[
        "plan",
        "fit",
        "--model",
        "Llama-3.1-8B",
        "--measured",
        "kv=3.81GiB",
        "--engine-version",
        "0.6.4",
        "--max-model-len",
        "20000",
        "--json",
    ]);
    assert_eq!(fit["plan"]["ledger"]["kv"]["provenance"], "measured");
    assert_eq!(fit["plan"]["pool"]["blocks"]["value"], 1950.0);
    assert_eq!(fit["plan"]["verdict"], "starts");
}

#[test]
fn the_text_names_where_each_line_comes_from() {
    let output = reef(&["plan", "fit", "--model", "gemma-4-31B", "--gpu", "H100", "--count", "2"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success());
    for part in ["measured", "derived", "assumed", "window 1024", "left for KV", "what helps most"]
    {
        assert!(text.contains(part), "{part} is not in {text}");
    }
}

#[test]
fn wrong_arguments_and_thin_configs_are_answered_in_one_line() {
    let line = refused(&["plan", "fit", "--model", "no-such-model"], 1);
    assert!(line.contains("bundled") && line.lines().count() == 1, "{line}");
    let line = refused(&["plan", "fit", "--model", "Llama-3.1-8B", "--engine", "exllama"], 2);
    assert!(line.contains("vllm, sglang, trtllm, llamacpp, reef"), "{line}");
    let line = refused(&["plan", "fit", "--model", "Llama-3.1-8B", "--gpu", "Voodoo"], 1);
    assert!(line.contains("no such device"), "{line}");
    let thin = ["plan", "fit", "--model", "Mistral-Small-4-119B-2603", "--gpu", "H100"];
    let line = refused(&thin, 1);
    assert!(line.contains("--set hidden_size=VALUE"), "{line}");
    let line =
        refused(&["plan", "fit", "--model", "Qwen3-8B", "--gpu-memory-utilization", "90"], 1);
    assert!(line.contains("--gpu-memory-utilization: 90"), "{line}");
    let line = refused(&["plan", "fit", "--model", "Qwen3-8B", "--count", "2", "--tp", "4"], 2);
    assert!(line.contains("--count is 2"), "{line}");
}

#[test]
fn scores_have_the_documented_shape() {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../plan");
    let table = data.join("tests/data/cases.csv");
    let configs = data.join("configs");
    let score = json(&[
        "plan",
        "score",
        table.to_str().unwrap(),
        "--configs",
        configs.to_str().unwrap(),
        "--json",
    ]);
    let summary = &score["summary"];
    for sum in ["independent", "all"] {
        for key in ["n", "within_1pct", "exact"] {
            assert!(summary[sum][key].as_u64().unwrap() > 0, "{sum} {key}");
        }
    }
    assert!(summary["starts"]["n"].as_u64() >= summary["starts"]["right"].as_u64());
    assert_eq!(score["rows"].as_array().unwrap().len(), 72);
    let line = refused(&["plan", "score", "no-such.csv"], 1);
    assert!(line.contains("no-such.csv"), "{line}");
}
