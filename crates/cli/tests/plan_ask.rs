//! `reef plan ask`, `search` and `devices` as scripts see them: status, streams, JSON.

use std::process::{Command, Output};

use serde_json::Value;

fn reef(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_reef")).args(arguments).output().unwrap()
}

fn json(arguments: &[&str]) -> Value {
    let output = reef(arguments);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {errors}");
    assert!(errors.is_empty(), "{errors}");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn text(arguments: &[&str]) -> String {
    let output = reef(arguments);
    assert!(output.status.success(), "{arguments:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_question_is_answered_as_text_and_as_json() {
    let beams = ["plan", "ask", "beams", "--kv-bytes", "128KiB", "--tokens", "1200"];
    let shown = text(&beams);
    for part in ["shared = 156 MiB", "= 4 × 75 × 2 MiB = 600 MiB", "What moves it most", "Source:"]
    {
        assert!(shown.contains(part), "{part} is not in {shown}");
    }
    assert!(shown.lines().all(|line| line.chars().count() <= 160), "{shown}");
    let answer = json(&[&beams[..], &["--json"]].concat());
    assert_eq!(answer["answer"]["value"], 163_577_856.0);
    assert_eq!(answer["answer"]["unit"], "bytes");
    let apart = answer["steps"].as_array().unwrap().iter().find(|step| step["name"] == "apart");
    assert_eq!(apart.unwrap()["value"], 629_145_600.0);
    // An alias, and a model's field overruled.
    let set = ["plan", "ask", "beam-search", "--set", "num_key_value_heads=4", "--json"];
    assert_eq!(json(&set)["answer"]["value"], 163_577_856.0 / 2.0);
}

#[test]
fn help_names_questions_options_and_why() {
    let list = text(&["plan", "ask", "--help"]);
    assert!(list.contains("recompute-or-fetch") && list.contains("[E8]"), "{list}");
    assert!(!list.contains("options that every subcommand has"), "{list}");
    let help = text(&["plan", "ask", "spill", "--help"]);
    for part in [
        "--matched <TOKENS>",
        "[default: 2,000]",
        "Source: Mooncake",
        "Example: reef plan ask spill",
    ] {
        assert!(help.contains(part), "{part} is not in {help}");
    }
}

#[test]
fn wrong_arguments_end_with_two_and_lost_answers_with_one() {
    for (arguments, status, wanted) in [
        (
            &["plan", "ask", "spill", "--matched", "many"][..],
            2,
            "--matched = `many`: write a number",
        ),
        (&["plan", "ask", "spill", "--gpu", "Jetson"], 2, "it may mean several devices"),
        (&["plan", "ask", "spill", "--mfu", "-1"], 2, "write a value from 1% to 100%"),
        (&["plan", "ask", "graphs", "--policy", "odd"], 2, "possible values: eights"),
        (&["plan", "ask", "why"], 2, "unrecognized subcommand"),
        (&["plan", "ask"], 2, "Usage: reef plan ask"),
        (&["plan", "ask", "little", "--arrivals", "31"], 1, "not below the limit of 30.4"),
        (&["plan", "ask", "spill", "--model", "nothing"], 1, "neither a file"),
        (&["plan", "search", "--gpus", "H100:0"], 2, "write NAME:COUNT"),
        (&["plan", "search", "--lengths", "1000"], 2, "write IN:OUT"),
        (&["plan", "search", "--tpot", "0"], 2, "--tpot 0: write a time above 0"),
        (&["plan", "search", "--rate", "trace"], 1, "the trace has no times"),
        (&["plan", "search", "--weights", "bf17"], 2, "bf17"),
        (&["plan", "search", "--trace", "no-such-file"], 1, "--trace no-such-file"),
    ] {
        let output = reef(arguments);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{arguments:?}: {errors}");
        assert!(errors.contains(wanted), "{arguments:?}: {errors}");
        assert!(output.stdout.is_empty(), "{arguments:?}");
    }
}

#[test]
fn a_search_prints_what_bounds_each_configuration() {
    let arguments = ["plan", "search", "--model", "Llama-3.1-8B", "--gpus", "L4:8,A100:2@1.5"];
    let goal = ["--lengths", "1000:200:3,4000:300", "--tpot", "80ms", "--ttft", "3s"];
    let shown = text(&[&arguments[..], &goal].concat());
    assert!(shown.contains("bound by") && shown.contains("(steps: bandwidth)"), "{shown}");
    let found = json(&[&arguments[..], &goal, &["--json"]].concat());
    let pareto = found["pareto"].as_array().unwrap();
    assert!(!pareto.is_empty() && found["configurations"].as_u64().unwrap() >= 200, "{found}");
    for worked in pareto {
        assert!(worked["tpot_s"].as_f64().unwrap() <= 0.08, "{worked}");
        let bound = worked["bound"].as_str().unwrap();
        assert!(
            ["memory", "max_num_seqs", "ttft_target", "tpot_target"].contains(&bound),
            "{bound}"
        );
        let price = if worked["gpu"] == "L4" { 1.0 } else { 1.5 };
        assert_eq!(worked["cost"].as_f64().unwrap(), price * worked["gpus"].as_f64().unwrap());
    }
}

#[test]
fn devices_are_listed_with_sources() {
    let all = json(&["plan", "devices", "--json"]);
    assert!(all.as_array().unwrap().len() >= 60);
    let shown = text(&["plan", "devices", "hopper"]);
    assert!(shown.contains("H100-SXM") && shown.contains("data sheet"), "{shown}");
    assert!(!shown.contains("RTX-4090"), "{shown}");
}
