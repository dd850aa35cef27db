use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::channel;
use std::time::Instant;

use reef_engine::event::{Continuation, Pause, PauseKind, PauseReason, Token, Usage};
use reef_engine::executor::StepCosts;
use reef_engine::stats::{Ceiling, Ceilings, Counters, EndedTokens, EngineStats};
use reef_engine::store::SpillUsage;
use reef_engine::tally::StepTallies;
use reef_engine::{Event, FinishReason, Outcome, Refusal};
use reef_kv::{Accounts, ByFormat, Fidelity, KvUsage};

use super::*;
use crate::lifecycle::Limits;

const MEBIBYTE: usize = 1 << 20;

fn served() -> Served {
    let tenant =
        |name: &str, quota_bytes| Tenant { name: name.into(), quota_bytes, ..Tenant::default() };
    Served {
        model_name: "a \"model\"\\of ours".into(),
        max_model_len: 2048,
        block_size: 32,
        f16_blocks: 128,
        prefix_caching: true,
        tenants: vec![tenant("default", None), tenant("batch", Some(4 * MEBIBYTE))],
    }
}

/// A server's metrics and its model's.
pub(super) struct Both(pub Metrics, ModelMetrics);

impl Both {
    fn observe(&self, arrival: Arrival, on_end: OnEnd) -> RequestObserver {
        self.1.observe(arrival, on_end)
    }

    pub(super) fn render(&self, sample: Option<EngineSample>, format: Exposition) -> String {
        self.1.sampled(sample);
        self.0.render(Some(&self.1), format)
    }
}

fn server_metrics() -> Metrics {
    Metrics::new(Arc::new(Lifecycle::new(Limits::default())))
}

pub(super) fn metrics() -> Both {
    Both(server_metrics(), ModelMetrics::new(served()))
}

/// A look at an engine in which every number differs.
pub(super) fn sample() -> EngineSample {
    let used = ByFormat::from_fn(|format| (3 + format as usize) * 1000);
    let accounts = Accounts {
        budget_bytes: 0,
        used,
        cached_bytes: 2_000,
        fenced_bytes: 700,
        free_bytes: 50_000,
        reserved_bytes: 1_100,
        fragmentation_bytes: 130,
        table_bytes: 17,
        peak_bytes: 60_000,
    };
    let rest = accounts.fenced_bytes + accounts.free_bytes + accounts.reserved_bytes;
    let budget_bytes = used.total() + rest + accounts.fragmentation_bytes + accounts.table_bytes;
    let accounts = Accounts { budget_bytes, ..accounts };
    let ended = EndedTokens {
        by_format: ByFormat::from_fn(|format| 10.5 * (1.0 + format as usize as f64)),
        dropped: 64.25,
    };
    let counters = Counters {
        spilled_bytes: 4096,
        loaded_bytes: 2048,
        drafts: (30, 21),
        violations: 1,
        stalls: 2,
        lost_completions: 3,
        prefill_rows: 900,
        decode_rows: 400,
        pauses: [[1, 2, 3, 0], [10, 20, 30, 0], [100, 200, 300, 5]],
        ..Counters::default()
    };
    let mut steps = StepTallies::default();
    [1.0, 300.0, 99_999.0].into_iter().for_each(|rows| steps.rows.record(rows));
    let ceilings =
        Ceilings { kv: 12, ridge: 40, latency: None, configured: 64, binding: Ceiling::Kv };
    let spill = SpillUsage { capacity_bytes: 9_000, used_bytes: 5_000, ..SpillUsage::default() };
    let costs = StepCosts { base_us: 1.0, row_us: 1.0, prefill_token_us: 1.0, context_us: 0.0 };
    let stats = EngineStats {
        running: 5,
        waiting: 7,
        paused: 2,
        accounts,
        ceilings,
        costs,
        spill: Some(spill),
        speculation: None,
        counters,
        ended,
        steps,
    };
    EngineSample { stats, tenant_bytes: vec![11, 22], waiting_tokens: 333 }
}

/// Samples by name and sorted labels, after checks of the text's shape.
fn parse(text: &str, format: Exposition) -> BTreeMap<(String, BTreeSet<String>), f64> {
    let mut types: BTreeMap<String, String> = BTreeMap::new();
    let mut helps = BTreeSet::new();
    let mut samples = BTreeMap::new();
    let mut lines: Vec<&str> = text.lines().collect();
    if format == Exposition::OpenMetrics {
        assert_eq!(lines.pop(), Some("# EOF"), "ends with the mark");
    }
    for line in lines {
        if let Some(help) = line.strip_prefix("# HELP ") {
            let (name, words) = help.split_once(' ').unwrap();
            assert!(words.ends_with('.') && !words.ends_with(".."), "{line}");
            assert!(helps.insert(name.to_owned()), "one help: {line}");
        } else if let Some(kind) = line.strip_prefix("# TYPE ") {
            let (name, kind) = kind.split_once(' ').unwrap();
            assert!(types.insert(name.into(), kind.into()).is_none(), "one type: {line}");
        } else {
            let (series, value) = line.rsplit_once(' ').unwrap();
            let (name, labels) = series.split_once('{').unwrap_or((series, ""));
            let labels = labels.trim_end_matches('}').split("\",");
            let labels: BTreeSet<String> = labels.map(str::to_owned).collect();
            let counter = name.ends_with("_total");
            let family = match format {
                Exposition::OpenMetrics if counter => name.trim_end_matches("_total"),
                _ => name,
            };
            let parts = ["_bucket", "_sum", "_count"];
            let stem = parts.iter().find_map(|part| name.strip_suffix(part)).unwrap_or(family);
            let family = if types.contains_key(family) { family } else { stem };
            let kind = &types[family];
            assert_eq!(kind == "counter", counter, "{line}");
            assert!(!name.contains("_total_total"), "{line}");
            let value: f64 = value.parse().unwrap();
            assert!(samples.insert((name.to_owned(), labels), value).is_none(), "once: {line}");
        }
    }
    let names = types.keys().cloned().collect::<BTreeSet<_>>();
    assert_eq!(helps, names, "each family has help and type");
    samples
}

/// The value of the one series of `name` whose labels hold all of `parts`.
fn value(samples: &BTreeMap<(String, BTreeSet<String>), f64>, name: &str, parts: &[&str]) -> f64 {
    let fits = |labels: &BTreeSet<String>| {
        parts.iter().all(|part| labels.iter().any(|label| label.contains(part)))
    };
    let found: Vec<f64> = samples
        .iter()
        .filter(|((of, labels), _)| of == name && fits(labels))
        .map(|(_, value)| *value)
        .collect();
    assert_eq!(found.len(), 1, "{name} {parts:?}: {found:?}");
    found[0]
}

fn arrival(at: Instant) -> Arrival {
    Arrival { prompt_tokens: 100, tenant: 1, n: 1, max_tokens: Some(64), looks_up_prefix: true, at }
}

fn token(branch: u32) -> Event {
    Event::Token(Token { branch, id: 1, logprobs: None, is_last: false })
}

fn step() -> Event {
    Event::Step { step: 0, tokens: 0, used: ByFormat::default(), elapsed_us: None }
}

fn finished(reason: FinishReason) -> Event {
    let kv = KvUsage {
        tokens_by_format: ByFormat::from_fn(|format| format as usize as f64),
        dropped_tokens: 2.5,
        held_bytes: 0,
        peak_bytes: 0,
        bytes_at_f16: 0,
        relief: Vec::new(),
    };
    let usage = Usage {
        prompt_tokens: 100,
        completion_tokens: 4,
        cached_tokens: 32,
        fidelity: Fidelity::Int4,
        budget_bytes: 0,
        max_tokens_limit: 64,
        kv,
        pauses: Vec::new(),
        recomputed_tokens: 0,
        drafts: (0, 0),
    };
    let continuation = Continuation {
        token_ids: vec![1; 4],
        finish_reason: reason,
        cumulative_logprob: None,
        logprobs: Vec::new(),
    };
    Event::Finished(Box::new(Outcome { continuations: vec![continuation], usage }))
}

fn pause(kind: PauseKind, reason: PauseReason) -> Event {
    let (branch, step, blocks, bytes, lost_tokens) = (0, 0, 1, 1, 0);
    Event::Paused(Pause { branch, step, kind, reason, blocks, bytes, lost_tokens })
}

#[test]
fn a_request_is_measured_by_vllms_definitions() {
    let metrics = metrics();
    let start = Instant::now();
    let at = |ms: u64| start + Duration::from_millis(ms);
    let (sender, summaries) = channel();
    let on_end = Box::new(move |summary: &RequestSummary| sender.send(summary.clone()).unwrap());
    let mut observer = metrics.observe(arrival(start), on_end);
    observer.hear_at(&Event::Accepted, at(1));
    observer.hear_at(&Event::Admitted { max_tokens: 64, cached_tokens: 32 }, at(200));
    observer.hear_at(&Event::Prefilled { tokens: 100, total: 100 }, at(900));
    observer.hear_at(&step(), at(900));
    observer.hear_at(&token(0), at(900));
    observer.hear_at(&pause(PauseKind::Swap, PauseReason::Demand), at(910));
    observer.hear_at(&pause(PauseKind::Recompute, PauseReason::SpillFailure), at(920));
    let resumed = Event::Resumed { branch: 0, recomputed_tokens: 0, paused_us: 60_000 };
    observer.hear_at(&resumed, at(970));
    observer.hear_at(&step(), at(1000));
    // Two drafts accepted: one output of three tokens.
    (0..3).for_each(|_| observer.hear_at(&token(0), at(1000)));
    observer.hear_at(&finished(FinishReason::Stop), at(1100));
    drop(observer);
    let samples = parse(&metrics.render(Some(sample()), Exposition::Text), Exposition::Text);
    let sum = |name: &str| value(&samples, &format!("vllm:{name}_sum"), &[]);
    let count = |name: &str| value(&samples, &format!("vllm:{name}_count"), &[]);
    let near = |name: &str, want: f64| {
        assert_eq!(count(name), 1.0, "{name}");
        assert!((sum(name) - want).abs() < 1e-9, "{name}: {} is not {want}", sum(name));
    };
    near("time_to_first_token_seconds", 0.9);
    near("inter_token_latency_seconds", 0.1);
    near("request_queue_time_seconds", 0.2);
    near("request_prefill_time_seconds", 0.7);
    near("request_decode_time_seconds", 0.1);
    near("request_inference_time_seconds", 0.8);
    near("e2e_request_latency_seconds", 1.1);
    near("request_time_per_output_token_seconds", 0.1 / 3.0);
    near("request_prompt_tokens", 100.0);
    near("request_generation_tokens", 4.0);
    near("request_max_num_generation_tokens", 4.0);
    near("request_prefill_kv_computed_tokens", 68.0);
    near("request_params_n", 1.0);
    near("request_params_max_tokens", 64.0);
    near("request_num_preemptions", 1.0);
    let total = |name: &str, parts: &[&str]| value(&samples, name, parts);
    assert_eq!(total("vllm:prompt_tokens_total", &[]), 100.0);
    assert_eq!(total("vllm:prompt_tokens_cached_total", &[]), 32.0);
    assert_eq!(total("vllm:prompt_tokens_by_source_total", &["local_compute"]), 68.0);
    assert_eq!(total("vllm:prompt_tokens_by_source_total", &["local_cache_hit"]), 32.0);
    assert_eq!(total("vllm:generation_tokens_total", &[]), 4.0);
    assert_eq!(total("vllm:prefix_cache_queries_total", &[]), 100.0);
    assert_eq!(total("vllm:prefix_cache_hits_total", &[]), 32.0);
    for (reason, want) in [("stop", 1.0), ("length", 0.0), ("abort", 0.0), ("error", 0.0)] {
        assert_eq!(total("vllm:request_success_total", &[&format!("=\"{reason}")]), want);
    }
    assert_eq!(total("reef:tenant_generation_tokens_total", &["=\"batch"]), 4.0);
    assert_eq!(total("reef:tenant_prompt_tokens_total", &["=\"default"]), 0.0);
    assert_eq!(total("reef:requests_degraded_total", &[]), 1.0);
    assert!((total("reef:pause_seconds_sum", &[]) - 0.06).abs() < 1e-9);
    let summary = summaries.recv().unwrap();
    assert_eq!((summary.ending, summary.pauses, summary.completion_tokens), (Ending::Stop, 2, 4));
    assert_eq!(summary.first_token, Some(Duration::from_millis(900)));
    assert_eq!((summary.fidelity, summary.dropped_tokens), (Some("int4"), 2.5));
    assert_eq!(summary.degraded_tokens, (1..6).sum::<u32>() as f64);
    assert!(summaries.try_recv().is_err(), "it ends once");
}

#[test]
fn choices_have_gaps_of_their_own() {
    let metrics = metrics();
    let start = Instant::now();
    let at = |ms: u64| start + Duration::from_millis(ms);
    let of_two = Arrival { n: 2, ..arrival(start) };
    let mut observer = metrics.observe(of_two, Box::new(|_| {}));
    observer.hear_at(&Event::Accepted, at(0));
    for (branch, ms) in [(0, 10), (1, 12), (0, 30), (1, 36)] {
        observer.hear_at(&step(), at(ms));
        observer.hear_at(&token(branch), at(ms));
    }
    observer.hear_at(&finished(FinishReason::Length), at(40));
    let samples = parse(&metrics.render(None, Exposition::Text), Exposition::Text);
    assert_eq!(value(&samples, "vllm:inter_token_latency_seconds_count", &[]), 2.0);
    let sum = value(&samples, "vllm:inter_token_latency_seconds_sum", &[]);
    assert!((sum - 0.044).abs() < 1e-9, "{sum}");
    assert_eq!(value(&samples, "vllm:time_to_first_token_seconds_count", &[]), 1.0);
    assert_eq!(value(&samples, "vllm:request_max_num_generation_tokens_sum", &[]), 2.0);
}

#[test]
fn who_goes_away_is_counted_and_who_is_refused_is_no_request() {
    let metrics = metrics();
    let (sender, endings) = channel();
    let observe = || {
        let sender = sender.clone();
        let on_end = Box::new(move |of: &RequestSummary| sender.send(of.ending).unwrap());
        metrics.observe(arrival(Instant::now()), on_end)
    };
    let mut gone = observe();
    gone.hear(&Event::Accepted);
    drop(gone);
    let refusal = || Arc::new(Refusal::EmptyPrompt.into());
    let mut refused = observe();
    refused.hear(&Event::Failed(refusal()));
    drop(refused);
    drop(observe());
    let mut failed = observe();
    failed.hear(&Event::Accepted);
    failed.hear(&Event::Failed(refusal()));
    drop(failed);
    let told: Vec<Ending> = endings.try_iter().collect();
    assert_eq!(told, [Ending::Cancelled, Ending::Refused, Ending::Refused, Ending::Failed]);
    let samples = parse(&metrics.render(None, Exposition::Text), Exposition::Text);
    let success = |reason| value(&samples, "vllm:request_success_total", &[reason]);
    assert_eq!((success("abort"), success("error"), success("=\"stop")), (1.0, 1.0, 0.0));
    assert_eq!(value(&samples, "reef:requests_ended_total", &["refused"]), 2.0);
    assert_eq!(value(&samples, "vllm:e2e_request_latency_seconds_count", &[]), 2.0);
    assert_eq!(value(&samples, "vllm:time_to_first_token_seconds_count", &[]), 0.0);
}

#[test]
fn the_engine_is_read_as_it_is() {
    let metrics = metrics();
    let sample = sample();
    // Twice: totals are not added up.
    metrics.render(Some(sample.clone()), Exposition::Text);
    for format in [Exposition::Text, Exposition::OpenMetrics] {
        let samples = parse(&metrics.render(Some(sample.clone()), format), format);
        let of = |name: &str, parts: &[&str]| value(&samples, name, parts);
        let budget = of("reef:kv_budget_bytes", &[]);
        let sum_of = |name: &str| -> f64 {
            samples.iter().filter(|((of, _), _)| of == name).map(|(_, bytes)| bytes).sum()
        };
        assert_eq!(sum_of("reef:kv_bytes"), budget, "owners add up");
        let used = of("reef:kv_bytes", &["held"]) + of("reef:kv_bytes", &["cached"]);
        assert_eq!(sum_of("reef:kv_page_bytes"), used, "formats add up");
        assert_eq!(of("vllm:kv_cache_usage_perc", &[]), of("reef:kv_bytes", &["held"]) / budget);
        assert_eq!(of("vllm:num_requests_running", &[]), 5.0);
        assert_eq!(of("vllm:num_requests_waiting", &[]), 7.0);
        assert_eq!(of("reef:paused", &[]), 2.0);
        assert_eq!(of("reef:waiting_tokens", &[]), 333.0);
        assert_eq!(of("reef:running_ceiling", &["configured"]), 64.0);
        assert_eq!(of("reef:running_ceiling_binds", &["=\"kv"]), 1.0);
        assert_eq!(of("reef:running_ceiling_binds", &["ridge"]), 0.0);
        assert_eq!(of("reef:kv_tenant_bytes", &["batch"]), 22.0);
        assert_eq!(of("reef:kv_tenant_quota_bytes", &[]), 4.0 * MEBIBYTE as f64);
        assert_eq!(of("reef:kv_tier_bytes", &["spill"]), 5_000.0);
        assert_eq!(of("reef:spill_written_bytes_total", &[]), 4096.0);
        assert_eq!(of("vllm:spec_decode_num_accepted_tokens_total", &[]), 21.0);
        assert_eq!(of("reef:invariant_violations_total", &[]), 1.0);
        assert_eq!(of("reef:pauses_total", &["=\"swap", "priority"]), 20.0);
        assert_eq!(of("vllm:num_preemptions_total", &[]), 660.0, "a lost record left before");
        assert_eq!(of("reef:anomalies_total", &["lost_completion"]), 3.0);
        let k8v4 = 10.5 * (1.0 + PageFormat::K8V4 as usize as f64);
        assert_eq!(of("reef:degraded_tokens_total", &["k8v4"]), k8v4);
        assert_eq!(of("reef:dropped_tokens_total", &[]), 64.25);
        assert_eq!(of("vllm:iteration_tokens_total_count", &[]), 3.0);
        assert_eq!(of("vllm:iteration_tokens_total_bucket", &["+Inf"]), 3.0);
        assert_eq!(of("vllm:iteration_tokens_total_bucket", &["=\"512"]), 2.0);
        assert_eq!(of("vllm:cache_config_info", &["block_size=\"32", "num_gpu_blocks=\"128"]), 1.0);
        assert_eq!(of("reef:engine_up", &[]), 1.0);
    }
    // The engine has died: what it said last stands.
    let samples = parse(&metrics.render(None, Exposition::Text), Exposition::Text);
    assert_eq!(value(&samples, "reef:engine_up", &[]), 0.0);
    assert_eq!(value(&samples, "reef:spill_written_bytes_total", &[]), 4096.0);
}

#[test]
fn two_servers_in_a_process_do_not_meet() {
    let (one, other) = (metrics(), metrics());
    let mut observer = one.observe(arrival(Instant::now()), Box::new(|_| {}));
    observer.hear(&Event::Accepted);
    observer.hear(&token(0));
    let of = |metrics: &Both| {
        let samples = parse(&metrics.render(None, Exposition::Text), Exposition::Text);
        value(&samples, "vllm:generation_tokens_total", &[])
    };
    assert_eq!((of(&one), of(&other)), (1.0, 0.0));
}

#[test]
fn http_is_counted_before_the_model_is_there() {
    let metrics = server_metrics();
    let strange = Method::from_bytes(b"XYZZY").unwrap();
    let tenth = Duration::from_millis(100);
    metrics.answered(&Method::POST, Some("/v1/completions"), StatusCode::OK, tenth);
    metrics.answered(&strange, None, StatusCode::NOT_FOUND, tenth);
    let stream = metrics.stream();
    let text = metrics.render(None, Exposition::OpenMetrics);
    let samples = parse(&text, Exposition::OpenMetrics);
    let parts = ["=\"POST", "/v1/completions", "=\"200"];
    assert_eq!(value(&samples, "reef:http_requests_total", &parts), 1.0);
    assert_eq!(value(&samples, "reef:http_requests_total", &["other", "none", "404"]), 1.0);
    assert_eq!(value(&samples, "reef:streams_open", &[]), 1.0);
    assert!(!text.contains("vllm:"), "nothing is served");
    drop(stream);
    let samples = parse(&metrics.render(None, Exposition::Text), Exposition::Text);
    assert_eq!(value(&samples, "reef:streams_open", &[]), 0.0);
    if cfg!(target_os = "linux") {
        let bytes = value(&samples, "process_resident_memory_bytes", &[]);
        assert!((1e6..1e12).contains(&bytes), "{bytes}");
    }
}

#[test]
fn label_values_are_escaped() {
    let text = metrics().render(Some(sample()), Exposition::Text);
    assert!(text.contains(r#"model_name="a \"model\"\\of ours",engine="0""#), "{text}");
}

#[test]
fn throughput_is_taken_between_looks_far_enough_apart() {
    let last = LastSample::default();
    let start = Instant::now();
    let look = |ms: u64, tokens: u64| {
        let mut sample = sample();
        sample.stats.counters.generated_tokens = tokens;
        last.set(Some(sample), start + Duration::from_millis(ms));
        last.tokens_per_second()
    };
    assert_eq!(look(0, 100), 0.0, "one look says nothing");
    assert_eq!(look(100, 1_000), 0.0);
    assert_eq!(look(1_000, 300), 200.0);
    assert_eq!(look(1_001, 900), 200.0, "too close");
    assert_eq!(look(3_000, 300), 0.0, "nothing was generated");
}
