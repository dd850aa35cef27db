//! `reef plan read` and `--html` as scripts see them: status, streams, JSON, files.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

fn reef(arguments: &[&str], stdin: &str) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_reef"))
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(stdin.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

fn excerpt(name: &str) -> String {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../plan/tests/data/logs");
    PathBuf::from(folder).join(name).display().to_string()
}

#[test]
fn a_log_is_read_compared_and_drawn() {
    let page = std::env::temp_dir().join(format!("reef-plan-read-{}.html", std::process::id()));
    let page_name = page.display().to_string();
    let log = excerpt("vllm-v1-hybrid.log");
    let output = reef(&["plan", "read", &log, "--json", "--html", &page_name], "");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let document: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((document["engine"].as_str(), document["starts"].as_u64()), (Some("vllm"), Some(1)));
    let kv = &document["log"]["numbers"]["kv"];
    assert_eq!(
        (kv["provenance"].as_str(), kv["source"].as_str()),
        (Some("measured"), Some("log line 2"))
    );
    let lines = document["comparison"].as_array().unwrap();
    let tokens = lines.iter().find(|line| line["name"] == "tokens as printed").unwrap();
    assert_eq!(tokens["agreement"], "equal");
    let html = std::fs::read_to_string(&page).unwrap();
    std::fs::remove_file(&page).unwrap();
    assert!(html.starts_with("<!doctype html>") && html.contains("The log against the plan"));
}

#[test]
fn what_cannot_be_read_says_what_was_looked_for() {
    let output = reef(&["plan", "read", "-"], "hello\n");
    assert_eq!(output.status.code(), Some(1));
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("Looked for: vLLM") && error.lines().count() == 1, "{error}");
    // No model: what the log says is still told.
    let log = "Available KV cache memory: 5.00 GiB\n";
    let output = reef(&["plan", "read", "-"], log);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        output.status.success() && text.contains("5.00 GiB") && text.contains("--model"),
        "{text}"
    );
    assert_eq!(reef(&["plan", "read", "-", "--html", "x.html"], log).status.code(), Some(2));
}
