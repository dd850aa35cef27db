//! Sizes, counts, panics.

use std::time::Duration;

use reef_server::lifecycle::Limits;
use tokio::time::{Instant, sleep};

use crate::raw::{Raw, get, post};
use crate::toy::{Toy, short};

#[tokio::test]
async fn requests_follow_each_other_on_a_connection() {
    let toy = Toy::start(short()).await;
    let mut raw = Raw::connect(toy.address).await;
    // Both in one write.
    let one = post("/length", "content-length: 3\r\n") + "abc";
    raw.say(&format!("{one}GET /ok HTTP/1.1\r\nhost: x\r\n\r\n")).await;
    assert_eq!(raw.answer().await.body, "3");
    assert_eq!(raw.answer().await.body, "ok");
    raw.say("GET /ok HTTP/1.0\r\n\r\n").await;
    assert!(raw.rest().await.0.ends_with("ok"), "HTTP/1.0 closes");
}

#[tokio::test]
async fn a_body_over_the_limit_is_413_and_the_client_gets_to_read_that() {
    let toy = Toy::start(short()).await;
    let check = |answer: crate::raw::Answer| {
        assert_eq!(answer.status, 413);
        assert!(answer.head.contains("connection: close"));
        let body: serde_json::Value = serde_json::from_str(&answer.body).unwrap();
        assert_eq!(body["error"]["code"], "body_too_large");
        assert_eq!(body["error"]["type"], "invalid_request_error");
    };
    // Said before: refused before.
    let mut raw = Raw::connect(toy.address).await;
    raw.say(&post("/length", "content-length: 100001\r\nexpect: 100-continue\r\n")).await;
    check(raw.answer().await);
    // Not said before, and sent whole before the answer is read: it is not lost to a reset.
    let mut raw = Raw::connect(toy.address).await;
    raw.say(&post("/length", "transfer-encoding: chunked\r\n")).await;
    let chunk = format!("{:x}\r\n{}\r\n", 50_000, "a".repeat(50_000));
    for _ in 0..40 {
        raw.try_say(&chunk).await;
    }
    check(raw.answer().await);
    let full = post("/length", "content-length: 100000\r\n") + &"a".repeat(100_000);
    let mut raw = Raw::connect(toy.address).await;
    raw.say(&full).await;
    assert_eq!(raw.answer().await.body, "100000");
    assert_eq!(toy.lifecycle.traffic.counts().body_bytes, 0);
}

#[tokio::test]
async fn a_handler_that_answers_before_the_body_is_heard() {
    let toy = Toy::start(short()).await;
    let mut raw = Raw::connect(toy.address).await;
    raw.say(&(post("/unread", "content-length: 90000\r\n") + &"a".repeat(90_000))).await;
    assert_eq!(raw.answer().await.body, "unread");
}

#[tokio::test]
async fn bodies_together_have_a_limit() {
    let toy = Toy::start(Limits { body_timeout: Duration::from_secs(20), ..short() }).await;
    let mut first = Raw::connect(toy.address).await;
    first.say(&(post("/length", "content-length: 90001\r\n") + &"a".repeat(90_000))).await;
    while toy.lifecycle.traffic.counts().body_bytes < 90_000 {
        sleep(Duration::from_millis(5)).await;
    }
    let whole = post("/length", "content-length: 70000\r\n") + &"a".repeat(70_000);
    let mut second = Raw::connect(toy.address).await;
    second.say(&whole).await;
    let answer = second.answer().await;
    assert_eq!(answer.status, 503);
    assert!(answer.head.contains("retry-after: "), "{}", answer.head);
    first.say("a").await;
    assert_eq!(first.answer().await.body, "90001");
    let mut third = Raw::connect(toy.address).await;
    third.say(&whole).await;
    assert_eq!(third.answer().await.body, "70000");
}

#[tokio::test]
async fn bombs_of_headers_are_431() {
    let toy = Toy::start(short()).await;
    let many: String = (0..300).map(|n| format!("x-{n}: a\r\n")).collect();
    let long = format!("x-long: {}\r\n", "a".repeat(40_000));
    for headers in [many, long] {
        let mut raw = Raw::connect(toy.address).await;
        raw.try_say(&post("/length", &headers)).await;
        let (said, _) = raw.rest().await;
        assert!(said.starts_with("HTTP/1.1 431 "), "{said}");
    }
    // Without an end.
    let mut raw = Raw::connect(toy.address).await;
    raw.say("GET /ok HTTP/1.1\r\n").await;
    let mut sent = 0;
    while raw.try_say(&format!("x-{sent}: {}\r\n", "a".repeat(1000))).await && sent < 100_000 {
        sent += 1;
    }
    assert!(sent < 100_000, "read on and on");
    let fits = format!("x-long: {}\r\ncontent-length: 0\r\n", "a".repeat(30_000));
    let mut raw = Raw::connect(toy.address).await;
    raw.say(&post("/length", &fits)).await;
    assert_eq!(raw.answer().await.status, 200);
}

#[tokio::test]
async fn a_full_house_turns_away_with_a_word() {
    let limits = Limits { connections: 2, drain_timeout: Duration::from_secs(20), ..short() };
    let toy = Toy::start(limits).await;
    let mut busy = Vec::new();
    for _ in 0..2 {
        let mut raw = Raw::connect(toy.address).await;
        raw.say("GET /hold HTTP/1.1\r\nhost: x\r\n\r\n").await;
        busy.push(raw);
    }
    toy.wait_alive(2).await;
    let answer = get(toy.address, "/ok").await;
    assert_eq!(answer.status, 503);
    assert!(answer.head.contains("retry-after: 1"));
    let body: serde_json::Value = serde_json::from_str(&answer.body).unwrap();
    assert_eq!(body["error"]["code"], "too_many_connections");
    toy.seen.release.notify_waiters();
    for raw in &mut busy {
        assert_eq!(raw.answer().await.body, "held");
    }
    let counts = toy.lifecycle.traffic.counts();
    assert_eq!((counts.turned_away, counts.evicted, counts.open), (1, 0, 2));
}

#[tokio::test]
async fn the_longest_quiet_one_makes_room() {
    let idle_timeout = Duration::from_secs(60);
    let toy = Toy::start(Limits { connections: 2, idle_timeout, ..short() }).await;
    let mut oldest = Raw::connect(toy.address).await;
    oldest.say("GET /ok HTTP/1.1\r\nhost: x\r\n\r\n").await;
    assert_eq!(oldest.answer().await.body, "ok");
    let mut younger = Raw::connect(toy.address).await;
    younger.say("GET /ok HTTP/1.1\r\nhost: x\r\n\r\n").await;
    assert_eq!(younger.answer().await.body, "ok");
    sleep(Duration::from_millis(1100)).await;
    assert_eq!(get(toy.address, "/ok").await.body, "ok");
    assert!(!oldest.more().await, "it was closed");
    younger.say("GET /ok HTTP/1.1\r\nhost: x\r\n\r\n").await;
    assert_eq!(younger.answer().await.body, "ok");
    assert_eq!(toy.lifecycle.traffic.counts().evicted, 1);
}

#[tokio::test]
async fn a_crowd_of_quiet_connections_keeps_nobody_out() {
    let idle_timeout = Duration::from_secs(60);
    let toy = Toy::start(Limits { connections: 100, idle_timeout, ..short() }).await;
    let mut crowd = Vec::new();
    for _ in 0..300 {
        crowd.push(Raw::connect(toy.address).await);
    }
    sleep(Duration::from_millis(1100)).await;
    let start = Instant::now();
    for _ in 0..20 {
        assert_eq!(get(toy.address, "/ok").await.body, "ok");
    }
    assert!(start.elapsed() < Duration::from_secs(5));
    assert!(toy.lifecycle.traffic.counts().open <= 100);
}

#[tokio::test]
async fn a_panic_is_a_500_and_ends_nothing_else() {
    let toy = Toy::start(short()).await;
    let mut raw = Raw::connect(toy.address).await;
    raw.say("GET /panic HTTP/1.1\r\nhost: x\r\n\r\n").await;
    let answer = raw.answer().await;
    assert_eq!(answer.status, 500);
    let body: serde_json::Value = serde_json::from_str(&answer.body).unwrap();
    assert_eq!(body["error"]["type"], "server_error");
    assert!(!answer.body.contains("a handler's bug"), "what is inside is not told outside");
    // The same connection goes on.
    raw.say("GET /ok HTTP/1.1\r\nhost: x\r\n\r\n").await;
    assert_eq!(raw.answer().await.body, "ok");
    // Within a stream it is too late for a status: the body has no end.
    raw.say("GET /panic_later HTTP/1.1\r\nhost: x\r\n\r\n").await;
    let (said, _) = raw.rest().await;
    assert!(!said.contains("\r\n0\r\n\r\n"), "a broken stream must not look whole: {said}");
    while toy.lifecycle.traffic.counts().panics < 2 {
        sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(get(toy.address, "/ok").await.body, "ok");
}
