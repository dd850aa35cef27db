//! Searches against what must hold of any answer, and against traces.

use std::path::{Path, PathBuf};
use std::time::Instant;

use super::load::Bound;
use super::traffic::{Traffic, TrafficError};
use super::*;
use crate::device;
use crate::source;

fn search_of<'a>(model: &'a Model, gpus: &[(&str, u64)], lengths: &str) -> Search<'a> {
    let fleet = |(name, count): &(&str, u64)| Fleet {
        device: device::find(name).unwrap(),
        count: *count,
        price: 1.0,
    };
    Search {
        model,
        traffic: Traffic::parse(lengths).unwrap().summary(),
        rate: None,
        targets: Targets { ttft_s: f64::INFINITY, tpot_s: f64::INFINITY },
        fleets: gpus.iter().map(fleet).collect(),
        weights: ["bf16", "fp8", "int4"].map(String::from).to_vec(),
        kv_cache_dtypes: ["bf16", "fp8"].map(String::from).to_vec(),
        max_num_seqs: (0..10).map(|power| 1 << power).collect(),
        utilization: 0.9,
        hit_ratio: 0.0,
        efficiency: Efficiency::default(),
    }
}

#[test]
fn nothing_in_the_pareto_set_is_beaten_and_every_bound_is_true() {
    let model = source::read("Llama-3.1-70B", &[]).unwrap();
    let mut request = search_of(&model, &[("H100", 8), ("L40S", 8)], "2000:300");
    request.targets = Targets { ttft_s: 1.0, tpot_s: 0.04 };
    let found = search(&request).unwrap();
    assert!(found.pareto.len() >= 5, "{found:#?}");
    for a in &found.pareto {
        let others = found.pareto.iter().filter(|b| !std::ptr::eq(*b, a));
        assert!(others.filter(|b| b.beats(a)).count() == 0, "{a:#?}");
        assert!(a.tpot_s <= 0.04 && a.ttft_s <= 1.0 && a.gpus == a.tp * a.dp, "{a:#?}");
        let with_room = a.running + 2.0 * a.running.sqrt();
        assert!(with_room <= a.by_memory.min(a.max_num_seqs as f64) + 1e-6, "{a:#?}");
        let binds = match a.bound {
            Bound::Memory => with_room / a.by_memory,
            Bound::MaxNumSeqs => with_room / a.max_num_seqs as f64,
            Bound::TpotTarget => a.tpot_s / 0.04,
            Bound::TtftTarget => a.ttft_s / 1.0,
        };
        assert!(binds > 0.999, "{a:#?}");
    }
    // 141 GB of bf16 weights fit no single device.
    let alone = found.pareto.iter().filter(|a| a.tp == 1 && a.weights == "bf16");
    assert_eq!(alone.count(), 0);
    let rejected: usize = found.rejected.iter().map(|(_, count)| count).sum();
    assert!(rejected > 0 && rejected + found.pareto.len() <= found.configurations);
}

#[test]
fn a_rate_is_served_by_as_few_replicas_as_can() {
    let model = source::read("Llama-3.1-8B", &[]).unwrap();
    let mut request = search_of(&model, &[("L40S", 64)], "1000:200");
    request.targets.tpot_s = 0.1;
    request.weights = vec!["bf16".into()];
    request.kv_cache_dtypes = vec!["bf16".into()];
    request.max_num_seqs = vec![64];
    // All 64 replicas at their best; as many of them as the rate needs must do.
    let alone =
        |found: Found| found.pareto.into_iter().find(|a| a.tp == 1).expect("tp 1 serves it");
    let best = alone(search(&request).unwrap());
    assert_eq!(best.dp, 64);
    for rate in [2.0, 20.0, 100.0] {
        let served = alone(search(&Search { rate: Some(rate), ..request.clone() }).unwrap());
        assert!((served.rate - rate).abs() < 1e-6 * rate, "{served:?}");
        assert_eq!(served.dp as f64, (rate / (best.rate / 64.0)).ceil(), "{served:?}");
        assert!(served.tpot_s <= best.tpot_s, "{served:?}");
    }
    let too_high = search(&Search { rate: Some(1e6), ..request.clone() }).unwrap();
    assert!(too_high.pareto.is_empty());
    assert!(too_high.rejected.iter().any(|(reason, _)| *reason == Rejection::RateTooHigh));
}

#[test]
fn two_hundred_configurations_take_well_under_two_seconds() {
    let model = source::read("DeepSeek-V3", &[]).unwrap();
    let request = search_of(&model, &[("H200", 8), ("B200", 8)], "3000:500,20000:800");
    let start = Instant::now();
    let found = search(&request).unwrap();
    let seconds = start.elapsed().as_secs_f64();
    assert!(found.configurations >= 200, "{}", found.configurations);
    assert!(seconds < 2.0, "{seconds} s for {} configurations", found.configurations);
}

#[test]
fn a_search_without_end_or_candidates_is_refused() {
    let model = source::read("Llama-3.1-8B", &[]).unwrap();
    let mut request = search_of(&model, &[("H100", 8)], "1000:200");
    request.max_num_seqs = (1..=10_000).collect();
    assert!(search(&request).unwrap_err().to_string().contains("configurations"));
    request.max_num_seqs.clear();
    assert!(search(&request).unwrap_err().to_string().contains("give lists"));
    request.max_num_seqs = vec![8];
    request.weights = vec!["bf17".into()];
    assert!(search(&request).unwrap_err().to_string().contains("bf17"));
}

fn shared(name: &str) -> Option<PathBuf> {
    let home = std::env::var_os("REEF_SHARED").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared"),
        PathBuf::from,
    );
    let path = home.join("traces").join(name);
    if !path.is_file() {
        eprintln!("skipped: no trace {name} beside the workspace (REEF_SHARED says where)");
        return None;
    }
    Some(path)
}

#[test]
fn public_traces_have_their_known_moments() {
    // traces/README.md: 12,031 and 19,366 requests; means counted with awk.
    for (name, requests, input, output, rate) in [
        ("conversation_trace.jsonl", 12_031.0, 12_035.0, 342.6, 3.401),
        ("AzureLLMInferenceTrace_conv.csv", 19_366.0, 1_154.7, 211.13, 5.530),
    ] {
        let Some(path) = shared(name) else { continue };
        let summary = trace::read(&path).unwrap().summary();
        assert_eq!(summary.requests, requests, "{name}");
        assert!((summary.input_mean / input - 1.0).abs() < 0.001, "{name}: {}", summary.input_mean);
        assert!(
            (summary.output_mean / output - 1.0).abs() < 0.001,
            "{name}: {}",
            summary.output_mean
        );
        assert!((summary.rate.unwrap() / rate - 1.0).abs() < 0.002, "{name}: {:?}", summary.rate);
    }
}

#[test]
fn broken_traces_name_file_line_and_mend() {
    let folder = std::env::temp_dir().join(format!("reef-plan-traces-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let written = |name: &str, text: &str| {
        let path = folder.join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let header = "TIMESTAMP,ContextTokens,GeneratedTokens\n";
    for (name, text, wanted) in [
        ("empty.csv", String::new(), "holds no request"),
        ("header.csv", header.to_string(), "holds no request"),
        ("fields.csv", format!("{header}2023-11-16 18:15:46,374\n"), "line 2: it has 2 fields"),
        ("words.csv", format!("{header}2023-11-16 18:15:46,many,4\n"), "`many` is no token count"),
        ("huge.csv", "t,99999999999999,4\n".to_string(), "a length is over"),
        ("broken.jsonl", "{\"input_length\": 3}\n".to_string(), "output_length"),
        ("long.jsonl", "9".repeat(3 << 20), "line 1: it is longer than"),
    ] {
        let error = trace::read(&written(name, &text)).unwrap_err();
        assert!(error.to_string().contains(wanted), "{name}: {error}");
        assert!(error.to_string().contains(name), "{name}: {error}");
    }
    let missing = trace::read(&folder.join("none.csv")).unwrap_err();
    assert!(matches!(missing, TrafficError::File { .. }), "{missing}");
    std::fs::remove_dir_all(folder).unwrap();
}
