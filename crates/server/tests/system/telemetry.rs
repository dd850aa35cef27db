//! What is counted and logged of requests, and that it is never what they say.

use std::process::{Command, Output};
use std::sync::Arc;

use axum::body::Body;
use axum::http::{Request, StatusCode};
use reef_engine::Refusal;
use reef_server::metrics::ModelMetrics;
use reef_server::telemetry::{LogFormat, LogSettings, start};
use serde_json::{Value, json};

use crate::support::{Script, Server, served};

/// What must not be found in any line or span.
const SECRET: &str = "xylophone";
const PATH: &str = "/v1/completions";

fn ask(server: &Server, id: &str, body: &Value) -> crate::support::Answer {
    let request = Request::post(PATH)
        .header("x-request-id", id)
        .header("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
        .body(Body::from(body.to_string()));
    server.ask(request.unwrap())
}

/// The value of the series whose line begins so.
fn value(text: &str, series: &str) -> f64 {
    let found: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix(series)).collect();
    assert_eq!(found.len(), 1, "{series}: {found:?}");
    found[0].trim().parse().unwrap()
}

#[test]
fn a_request_is_counted_and_its_id_goes_back() {
    let server = Server::new(Script::says("abcd"));
    let body = json!({"prompt": "ab", "max_tokens": 9});
    let answer = ask(&server, "mine-7", &body);
    assert_eq!(
        (answer.status, &answer.headers["x-request-id"]),
        (StatusCode::OK, &"mine-7".parse().unwrap())
    );
    let streamed = server.post(PATH, &json!({"prompt": "abc", "max_tokens": 2, "stream": true}));
    assert!(streamed.headers["x-request-id"].to_str().unwrap().starts_with("req-"));
    assert_eq!(server.get("/nowhere/7").status, StatusCode::NOT_FOUND);
    let scrape = server.get("/metrics");
    assert_eq!(scrape.headers["content-type"], "text/plain; version=0.0.4; charset=utf-8");
    let of = |series: &str| value(&scrape.body, series);
    let labels = r#"model_name="tiny",engine="0""#;
    assert_eq!(of(&format!("vllm:prompt_tokens_total{{{labels}}}")), 5.0);
    assert_eq!(of(&format!("vllm:generation_tokens_total{{{labels}}}")), 6.0);
    let success = |reason: &str| {
        of(&format!("vllm:request_success_total{{{labels},finished_reason=\"{reason}\"}}"))
    };
    assert_eq!((success("stop"), success("length"), success("abort")), (1.0, 1.0, 0.0));
    let answers = r#"reef:http_requests_total{method="POST",route="/v1/completions",status="200"}"#;
    assert_eq!(of(answers), 2.0);
    let unknown = r#"reef:http_requests_total{method="GET",route="none",status="404"}"#;
    assert_eq!(of(unknown), 1.0);
    assert_eq!(of("reef:streams_open"), 0.0, "the stream was read to its end");
    assert!(!scrape.body.contains("/nowhere"), "a client makes no series");
}

#[test]
fn open_metrics_comes_to_who_asks_for_it() {
    let server = Server::new(Script::says("a"));
    let request = Request::get("/metrics").header("accept", "application/openmetrics-text");
    let scrape = server.ask(request.body(Body::empty()).unwrap());
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    assert_eq!(scrape.headers["content-type"], kind);
    assert!(scrape.body.ends_with("# EOF\n"));
}

#[test]
fn a_stream_that_is_given_up_counts_as_aborted() {
    let server = Server::new(Script { hangs: true, ..Script::says("ab") });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let body = json!({"prompt": "ab", "max_tokens": 9, "stream": true});
    let response = runtime.block_on(server.start(PATH, &body));
    let open = || value(&server.get("/metrics").body, "reef:streams_open");
    assert_eq!(open(), 1.0);
    drop(response);
    assert_eq!(open(), 0.0);
    server.door.let_go();
    let text = server.get("/metrics").body;
    let aborted =
        r#"vllm:request_success_total{model_name="tiny",engine="0",finished_reason="abort"}"#;
    assert_eq!(value(&text, aborted), 1.0);
}

#[test]
fn loads_want_an_engine_and_a_model_they_know() {
    let server = Server::new(Script::says("a"));
    // The scripted engine cannot be looked at.
    assert_eq!(server.get("/v1/loads").status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(server.get("/loads?model=other").status, StatusCode::NOT_FOUND);
    let twice = server.get("/loads?model=tiny&model=tiny");
    assert_eq!(twice.status, StatusCode::BAD_REQUEST);
    assert!(twice.json()["error"]["message"].as_str().unwrap().contains("model"));
}

/// Runs the test `name` of this file in a process of its own, where it can set up logging.
fn in_a_process_of_its_own(name: &str, environment: &[(&str, &str)]) -> Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    let name = format!("telemetry::{name}");
    command.args(["--exact", &name, "--ignored", "--nocapture"]);
    command.env_remove("OTEL_EXPORTER_OTLP_ENDPOINT").envs(environment.iter().copied());
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    output
}

#[test]
#[ignore = "run by the tests below"]
fn serve_a_few() {
    let settings = LogSettings { format: LogFormat::Json, level: None };
    let guard = start(&settings).unwrap();
    let server = Server::new(Script::says(SECRET));
    ask(&server, "good-1", &json!({"prompt": SECRET, "max_tokens": 3}));
    ask(&server, "bad-2", &json!({"prompt": "a", "max_tokens": SECRET}));
    let refusal = Refusal::QueueFull { waiting: 4, most: 4 };
    let full = Server::new(Script { refusal: Some(refusal), ..Script::default() });
    ask(&full, "full-3", &json!({"prompt": SECRET, "max_tokens": 3}));
    drop(guard);
}

#[test]
fn requests_and_refusals_have_a_line_without_what_they_say() {
    let output = in_a_process_of_its_own("serve_a_few", &[]);
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(!text.contains(SECRET), "{text}");
    let lines: Vec<Value> =
        text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let of = |id: &str, target: &str| -> Vec<&Value> {
        lines.iter().filter(|line| line["id"] == id && line["target"] == target).collect()
    };
    let [good] = of("good-1", "reef::request")[..] else { panic!("one line: {text}") };
    assert_eq!((&good["tenant"], &good["model"]), (&json!("default"), &json!("tiny")));
    assert_eq!((&good["route"], &good["finish_reason"]), (&json!(PATH), &json!("length")));
    assert_eq!((&good["prompt_tokens"], &good["completion_tokens"]), (&json!(9), &json!(3)));
    assert!(good["ttft_ms"].is_f64() && good["e2e_ms"].is_f64(), "{good}");
    assert_eq!(good["kv_fidelity"], "evict");
    assert!(of("good-1", "reef::refusal").is_empty());
    let [bad] = of("bad-2", "reef::refusal")[..] else { panic!("one line: {text}") };
    assert_eq!((&bad["status"], &bad["kind"]), (&json!(400), &json!("invalid_request_error")));
    let [full] = of("full-3", "reef::refusal")[..] else { panic!("one line: {text}") };
    assert_eq!((&full["status"], &full["code"]), (&json!(429), &json!("queue_full")));
    let [ended] = of("full-3", "reef::request")[..] else { panic!("one line: {text}") };
    assert_eq!(ended["finish_reason"], "refused");
}

#[test]
fn metrics_of_a_model_are_its_own() {
    let other = Arc::new(ModelMetrics::new(served()));
    assert_eq!((other.tokens_per_second(), other.prefix_hit_rate()), (0.0, 0.0));
    assert_eq!(other.served().f16_tokens(), 1024);
}

/// A collector that takes one export; gives its body.
#[cfg(feature = "otlp")]
fn collector() -> (String, std::thread::JoinHandle<Vec<u8>>) {
    use std::io::{BufRead as _, BufReader, Read as _, Write as _};
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let take = move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        let mut head = Vec::new();
        loop {
            let mut line = String::new();
            reader.read_line(&mut line).unwrap();
            if line == "\r\n" {
                break;
            }
            head.push(line.to_ascii_lowercase());
        }
        assert!(head[0].starts_with("post /v1/traces "), "{head:?}");
        let length = head.iter().find_map(|line| line.strip_prefix("content-length: ")).unwrap();
        let mut body = vec![0; length.trim().parse().unwrap()];
        reader.read_exact(&mut body).unwrap();
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").unwrap();
        body
    };
    (url, std::thread::spawn(take))
}

#[cfg(feature = "otlp")]
#[test]
fn a_span_arrives_below_the_clients() {
    let (url, body) = collector();
    in_a_process_of_its_own("serve_a_few", &[("OTEL_EXPORTER_OTLP_ENDPOINT", &url)]);
    let body = body.join().unwrap();
    let holds = |bytes: &[u8]| body.windows(bytes.len()).any(|window| window == bytes);
    let trace = 0x0af7651916cd43dd8448eb211c80319c_u128.to_be_bytes();
    assert!(holds(&trace), "the client's trace");
    assert!(holds(&0xb7ad6b7169203331_u64.to_be_bytes()), "below the client's span");
    let names = [
        "POST /v1/completions",
        "reef",
        "gen_ai.operation.name",
        "text_completion",
        "gen_ai.usage.input_tokens",
        "gen_ai.usage.output_tokens",
        "gen_ai.response.finish_reasons",
        "gen_ai.latency.time_to_first_token",
        "http.response.status_code",
        "reef.kv.fidelity",
        "good-1",
        "full-3",
    ];
    for name in names {
        assert!(holds(name.as_bytes()), "{name}");
    }
    assert!(!holds(SECRET.as_bytes()));
}
