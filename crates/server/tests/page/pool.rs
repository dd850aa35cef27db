//! `GET /v1/pool` and the page's files, without a browser.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use reef_server::access::Access;
use serde_json::Value;

use crate::{BUDGET_BYTES, Served, load, start};

/// Status, head and body of the answer to `GET path`.
fn get(served: &Served, path: &str, headers: &str) -> (u16, String, String) {
    let address = served.url.trim_start_matches("http://").trim_end_matches('/');
    let mut stream = TcpStream::connect(address).unwrap();
    let head = format!("GET {path} HTTP/1.0\r\nhost: {address}\r\n{headers}\r\n");
    stream.write_all(head.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, head.to_ascii_lowercase(), body.to_string())
}

fn pool(served: &Served, query: &str) -> Value {
    let (status, head, body) = get(served, &format!("/v1/pool{query}"), "");
    assert_eq!(status, 200, "{body}");
    assert!(head.contains("cache-control: no-store"));
    serde_json::from_str(&body).unwrap()
}

fn sum(of: &Value) -> u64 {
    match of {
        Value::Object(fields) => fields.values().map(sum).sum(),
        number => number.as_u64().unwrap(),
    }
}

#[test]
fn the_document_adds_up_while_memory_gives_way() {
    let served = start(Access::default());
    let idle = pool(&served, "");
    assert_eq!((idle["running"].as_u64(), idle["obstacle"].as_str()), (Some(0), Some("none")));
    assert_eq!((idle["would_wait"].as_bool(), idle["spill"].is_null()), (Some(false), true));
    load(&served.engine);
    let begun = Instant::now();
    let mut relieved = false;
    while !relieved {
        assert!(begun.elapsed() < Duration::from_secs(40), "no relief");
        let pool = pool(&served, "");
        assert_adds_up(&pool);
        relieved = pool["relief"].as_array().unwrap().len() > 3;
        let states = ["waiting", "prefill", "decode", "paused"];
        for row in pool["requests"].as_array().unwrap() {
            assert!(states.contains(&row["state"].as_str().unwrap()), "{row}");
        }
    }
}

fn assert_adds_up(pool: &Value) {
    let accounts = &pool["accounts"];
    let bytes = |name: &str| accounts[name].as_u64().unwrap();
    let names = ["used", "fenced", "free", "reserved", "fragmentation", "table"];
    let total: u64 = names.iter().map(|name| bytes(&format!("{name}_bytes"))).sum();
    assert_eq!((total, bytes("budget_bytes")), (BUDGET_BYTES as u64, BUDGET_BYTES as u64));
    assert_eq!(sum(&accounts["used"]), bytes("used_bytes"));
    assert_eq!(sum(&pool["held"]), bytes("used_bytes"));
    let map = &pool["map"];
    let span_bytes = map["span_bytes"].as_u64().unwrap();
    let mut cells = 0;
    for span in map["spans"].as_array().unwrap() {
        let numbers: Vec<u64> =
            span.as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect();
        let page_bytes = if numbers[0] == 0 { span_bytes } else { numbers[0] };
        for run in numbers[1..].chunks(2) {
            assert!(map["kinds"].as_array().unwrap().len() as u64 > run[0]);
            cells += run[1] * page_bytes;
        }
    }
    let outside = bytes("fragmentation_bytes") + bytes("table_bytes");
    assert_eq!((map["pages_a_cell"].as_u64(), cells + outside), (Some(1), BUDGET_BYTES as u64));
}

#[test]
fn a_question_is_answered_and_a_wrong_one_named() {
    let served = start(Access::default());
    let asked = pool(&served, "?tokens=5000&fidelity=int4");
    assert_eq!(asked["asked"]["tokens"], 5000);
    assert!(asked["why_not"].as_str().unwrap().contains("5000 tokens (`int4`)"));
    let wrong = [
        ("tokens=0", "tokens"),
        ("tokens=99999999", "tokens"),
        ("fidelity=perfect", "fidelity"),
        ("tenant=nobody", "tenant"),
    ];
    for (query, field) in wrong {
        let (status, _, body) = get(&served, &format!("/v1/pool?{query}"), "");
        let error: Value = serde_json::from_str(&body).unwrap();
        assert_eq!((status, error["error"]["param"].as_str()), (400, Some(field)), "{body}");
    }
    assert_eq!(get(&served, "/v1/pool?tokens=many", "").0, 400);
}

#[test]
fn files_come_with_a_policy_and_are_fetched_once() {
    let served = start(Access::default());
    for path in ["/", "/page/app.js", "/page/map.js", "/page/style.css"] {
        let (status, head, body) = get(&served, path, "");
        assert_eq!(status, 200, "{path}");
        assert!(head.contains("content-security-policy: default-src 'none'; script-src 'self'"));
        assert!(head.contains("x-content-type-options: nosniff") && !body.is_empty());
        let tag = head.lines().find_map(|line| line.strip_prefix("etag: ")).unwrap();
        let (status, _, body) = get(&served, path, &format!("if-none-match: \"old\", {tag}\r\n"));
        assert_eq!((status, body.as_str()), (304, ""), "{path}");
    }
    let (_, _, page) = get(&served, "/", "");
    let outside = ["http://", "https://", "onclick", "<style", "style="];
    let page = page.replace("http://www.w3.org/2000/svg", "").replace("xmlns='", "");
    assert!(outside.iter().all(|text| !page.contains(text)));
}
