//! Bytes that are no requests, or two at once.

use std::time::Duration;

use tokio::time::sleep;

use crate::raw::Raw;
use crate::served::Served;

/// Sends `bytes` to an impatient server and gives all that comes back.
async fn exchange(server: &Served, bytes: &[u8]) -> String {
    let mut raw = Raw::connect(server.address).await;
    raw.try_send(bytes).await;
    raw.rest().await.0
}

/// Statuses of the responses in `said`.
fn statuses(said: &str) -> Vec<u16> {
    let heads = said.split("HTTP/1.").skip(1);
    heads.map(|head| head.split(' ').nth(1).unwrap().parse().unwrap()).collect()
}

#[tokio::test]
async fn what_is_no_http_is_refused_or_closed() {
    let server = Served::impatient().await;
    let long = "a".repeat(70_000);
    let requests: Vec<Vec<u8>> = vec![
        b"\r\n\r\n\r\n".into(),
        b"GET /\r\n\r\n".into(),
        b"GET\r\n\r\n".into(),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0".into(),
        b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03".into(),
        b"\0\0\0\0\0\0\0\0\r\n\r\n".into(),
        b"GET /health HTTP/9.9\r\nhost: localhost\r\n\r\n".into(),
        b"GET /health HTTP/1.1\r\nhost localhost\r\n\r\n".into(),
        b"GET /health HTTP/1.1\r\nhost : localhost\r\n\r\n".into(),
        b"GET /health HTTP/1.1\r\nhost: localhost\r\n folded: a\r\n\r\n".into(),
        b"GET /health HTTP/1.1\r\nhost: local\0host\r\n\r\n".into(),
        b"GET /v1/models HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n".into(),
        b"GET /\xff\xfe HTTP/1.1\r\nhost: localhost\r\n\r\n".into(),
        b"G\0T /health HTTP/1.1\r\nhost: localhost\r\n\r\n".into(),
        format!("{long} /health HTTP/1.1\r\nhost: localhost\r\n\r\n").into(),
        format!("GET /{long} HTTP/1.1\r\nhost: localhost\r\n\r\n").into(),
        format!("GET /health?{long} HTTP/1.1\r\nhost: localhost\r\n\r\n").into(),
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: -1\r\n\r\n".into(),
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: +5\r\n\r\nabcde".into(),
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1e3\r\n\r\n".into(),
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999999999999999999\r\n\r\n".into(),
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFFF\r\n".into(),
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n-5\r\nabcde\r\n".into(),
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n".into(),
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: gzip\r\n\r\n".into(),
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked, gzip\r\n\r\n".into(),
        b"POST /v1/completions HTTP/1.0\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n".into(),
    ];
    for request in requests {
        let what = String::from_utf8_lossy(&request[..request.len().min(90)]).into_owned();
        let said = exchange(&server, &request).await;
        for status in statuses(&said) {
            assert!((400..500).contains(&status), "{what:?}: {said}");
        }
    }
    server.assert_well().await;
}

#[tokio::test]
async fn a_second_request_is_not_smuggled_in() {
    let server = Served::impatient().await;
    let hidden = "GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n";
    let chunked = "0\r\n\r\n";
    let both = chunked.len() + hidden.len();
    let head = "POST /tokenize HTTP/1.1\r\nhost: localhost\r\n";
    let cases = [
        // Who went by the length took all for one request.
        format!(
            "{head}content-length: {both}\r\ntransfer-encoding: chunked\r\n\r\n{chunked}{hidden}"
        ),
        format!(
            "{head}transfer-encoding: chunked\r\ncontent-length: {both}\r\n\r\n{chunked}{hidden}"
        ),
        // Who did not know the coding did, too.
        format!(
            "{head}content-length: {both}\r\ntransfer-encoding: xchunked\r\n\r\n{chunked}{hidden}"
        ),
        format!(
            "{head}content-length: {both}\r\ntransfer-encoding: chunked, identity\r\n\r\n{chunked}{hidden}"
        ),
        format!(
            "{head}content-length: {both}\r\ntransfer-encoding:\x0bchunked\r\n\r\n{chunked}{hidden}"
        ),
        format!(
            "{head}content-length: {both}\r\ntransfer-encoding : chunked\r\n\r\n{chunked}{hidden}"
        ),
        // Two lengths.
        format!("{head}content-length: {both}\r\ncontent-length: 0\r\n\r\n{chunked}{hidden}"),
        format!("{head}content-length: 0, {both}\r\n\r\n{chunked}{hidden}"),
    ];
    for case in cases {
        let said = exchange(&server, case.as_bytes()).await;
        assert!(!said.contains("\"engine\""), "the hidden request was answered: {case:?}: {said}");
        assert!(statuses(&said).iter().all(|status| (400..500).contains(status)), "{said}");
    }
    // Two that are meant as two are two.
    let two = format!("GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n{hidden}");
    let said = exchange(&server, two.as_bytes()).await;
    assert_eq!(statuses(&said), [200, 200]);
    server.assert_well().await;
}

#[tokio::test]
async fn tricks_with_paths_lead_nowhere() {
    let server = Served::open().await;
    for path in [
        "//v1/models",
        "/v1//models",
        "/v1/../metrics",
        "/v1/./models",
        "/./health",
        "/../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/v1/models/..%2f..%2fetc%2fpasswd",
        "/v1/models/%00",
        "/v1/models/%zz",
        "/v1/models/%ff%fe",
        "/health/",
        "/HEALTH",
        "/health;a=b",
        "/health%20",
        "/v1/models/tiny/../../../x",
        "/%2fhealth",
        "/page/../../Cargo.toml",
        "/v1/models/%",
    ] {
        let answer = server.get(path, "").await;
        assert!((400..500).contains(&answer.status), "{path}: {} {}", answer.status, answer.body);
        assert!(!answer.body.contains("root:"), "{path}");
    }
    // These are the same resource by the rules.
    for path in ["/health?", "/health?x=%zz&&&=", "http://localhost/health"] {
        assert_eq!(server.get(path, "").await.status, 200, "{path}");
    }
    server.assert_well().await;
}

#[tokio::test]
async fn other_methods_are_refused() {
    let server = Served::impatient().await;
    for method in ["PUT", "DELETE", "PATCH", "TRACE", "CONNECT", "OPTIONS", "BREW", "get", "GET/"] {
        for path in ["/v1/completions", "/health", "*", "localhost:80"] {
            let request =
                format!("{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
            let said = exchange(&server, request.as_bytes()).await;
            let statuses = statuses(&said);
            assert!(statuses.iter().all(|s| (400..500).contains(s)), "{request:?}: {said}");
            assert!(!said.contains("access-control-allow"), "{said}");
        }
    }
    let head = "HEAD /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
    let said = exchange(&server, head.as_bytes()).await;
    assert_eq!(statuses(&said), [200]);
    assert!(said.ends_with("\r\n\r\n"), "no body: {said}");
    server.assert_well().await;
}

#[tokio::test]
async fn slow_ones_are_not_waited_for() {
    let server = Served::open().await;
    let mut slow = Vec::new();
    for start in [
        "GET /health HTTP/1.1\r\nhost: localhost\r\nx-a: ",
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{",
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n5\r\nab",
    ] {
        for _ in 0..20 {
            let mut raw = Raw::connect(server.address).await;
            raw.say(start).await;
            slow.push(raw);
        }
    }
    // Meanwhile others are served.
    for _ in 0..20 {
        server.assert_is_ready().await;
        sleep(Duration::from_millis(10)).await;
    }
    for mut raw in slow {
        let (said, _) = raw.rest().await;
        assert!(said.is_empty() || statuses(&said) == [408], "{said}");
    }
    server.assert_well().await;
}

/// As many as the system lets us have, up to ten thousand.
#[tokio::test]
async fn ten_thousand_quiet_connections_keep_nobody_out() {
    #[cfg(unix)]
    let most = {
        use rustix::process::{Resource, getrlimit};
        // Both ends are ours; other tests need some.
        getrlimit(Resource::Nofile).maximum.map_or(10_000, |files| (files / 2).saturating_sub(500))
    };
    #[cfg(not(unix))]
    let most = 1000;
    let server = Served::open().await;
    let mut crowd = Vec::new();
    for _ in 0..most.min(10_000) {
        // The queue of the system may overflow: that is a refusal, too.
        let connect = tokio::net::TcpStream::connect(server.address);
        match tokio::time::timeout(Duration::from_secs(5), connect).await {
            Ok(Ok(stream)) => crowd.push(stream),
            _ => break,
        }
    }
    assert!(crowd.len() > 1000 || most <= 1000, "{} connections", crowd.len());
    sleep(Duration::from_millis(1200)).await;
    server.assert_is_ready().await;
    assert!(server.app.lifecycle.traffic.counts().open <= 1024);
    drop(crowd);
    server.assert_well().await;
}
