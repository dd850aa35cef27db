//! Clients that send or read slowly, or go away.

use std::sync::atomic::Ordering;
use std::time::Duration;

use reef_server::lifecycle::Limits;
use tokio::io::AsyncReadExt;
use tokio::time::{Instant, sleep};

use crate::raw::{Raw, get, post};
use crate::toy::{Toy, short};

const TICK: Duration = Duration::from_millis(50);

#[tokio::test]
async fn headers_that_trickle_in_are_not_waited_for() {
    let toy = Toy::start(Limits { idle_timeout: Duration::from_secs(60), ..short() }).await;
    let mut raw = Raw::connect(toy.address).await;
    let start = Instant::now();
    raw.say("GET /ok HTTP/1.1\r\nhost: x\r\nx-slow: ").await;
    // A byte every 50 ms is progress, and yet no request.
    while raw.try_say("a").await && start.elapsed() < Duration::from_secs(5) {
        sleep(TICK).await;
    }
    let (said, _) = raw.rest().await;
    assert!(said.is_empty(), "{said}");
    let took = start.elapsed();
    assert!(took >= Duration::from_millis(350) && took < Duration::from_secs(4), "{took:?}");
    assert_eq!(toy.lifecycle.traffic.counts().timed_out, 1);
    assert_eq!(get(toy.address, "/ok").await.body, "ok");
}

#[tokio::test]
async fn a_quiet_connection_is_kept_for_its_time_and_no_longer() {
    let toy = Toy::start(short()).await;
    let mut raw = Raw::connect(toy.address).await;
    for _ in 0..2 {
        // Longer than the headers' time: that one has not begun.
        sleep(Duration::from_millis(550)).await;
        raw.say("GET /ok HTTP/1.1\r\nhost: x\r\n\r\n").await;
        assert_eq!(raw.answer().await.body, "ok");
    }
    let (said, took) = raw.rest().await;
    assert!(said.is_empty());
    assert!(took >= Duration::from_millis(700) && took < Duration::from_secs(5), "{took:?}");
    // One that never said anything.
    let (_, took) = Raw::connect(toy.address).await.rest().await;
    assert!(took >= Duration::from_millis(700), "{took:?}");
    assert_eq!(toy.lifecycle.traffic.counts().timed_out, 2);
}

#[tokio::test]
async fn a_silent_body_is_408() {
    let toy = Toy::start(short()).await;
    let mut raw = Raw::connect(toy.address).await;
    raw.say(&post("/length", "content-length: 10\r\n")).await;
    raw.say("12345").await;
    let start = Instant::now();
    let answer = raw.answer().await;
    assert!(start.elapsed() >= Duration::from_millis(350));
    assert_eq!(answer.status, 408);
    assert!(answer.head.contains("connection: close"), "{}", answer.head);
    let body: serde_json::Value = serde_json::from_str(&answer.body).unwrap();
    assert_eq!(body["error"]["code"], "body_too_slow");
    let counts = toy.lifecycle.traffic.counts();
    assert_eq!(counts.body_bytes, 0, "the room for bodies is given back");
}

#[tokio::test]
async fn a_body_below_the_least_rate_is_408_and_one_above_is_not() {
    let toy = Toy::start(Limits { body_bytes_s: 200, ..short() }).await;
    let send = async |bytes: &str, address| {
        let mut raw = Raw::connect(address).await;
        raw.say(&post("/length", "transfer-encoding: chunked\r\n")).await;
        for _ in 0..30 {
            if !raw.try_say(&format!("{:x}\r\n{bytes}\r\n", bytes.len())).await {
                break;
            }
            sleep(TICK).await;
        }
        raw.try_say("0\r\n\r\n").await;
        raw.answer().await
    };
    // 20 bytes/s; then some 1,000 bytes/s for much longer than the longest silence.
    assert_eq!(send("a", toy.address).await.status, 408);
    let fast = send(&"a".repeat(50), toy.address).await;
    assert_eq!((fast.status, fast.body.as_str()), (200, "1500"));
}

#[tokio::test]
async fn who_does_not_read_is_dropped_and_holds_little_until_then() {
    let toy = Toy::start(short()).await;
    let mut raw = Raw::connect(toy.address).await;
    raw.say("GET /flood HTTP/1.1\r\nhost: x\r\n\r\n").await;
    toy.wait_alive(1).await;
    let start = Instant::now();
    toy.wait_alive(0).await;
    let took = start.elapsed();
    assert!(took >= Duration::from_millis(400) && took < Duration::from_secs(5), "{took:?}");
    // hyper's buffer, ours of the socket, and what the client's system took (loopback: megabytes).
    let bytes = toy.seen.flooded.load(Ordering::SeqCst);
    assert!(bytes < 16 << 20, "{bytes} bytes are held for a client that does not read");
    assert_eq!(toy.lifecycle.traffic.counts().timed_out, 1);
    assert_eq!(get(toy.address, "/ok").await.body, "ok");
}

#[tokio::test]
async fn who_reads_slowly_is_served() {
    let toy = Toy::start(short()).await;
    let mut raw = Raw::connect(toy.address).await;
    raw.say("GET /flood HTTP/1.1\r\nhost: x\r\n\r\n").await;
    let start = Instant::now();
    let mut buffer = vec![0; 1 << 20];
    while start.elapsed() < Duration::from_millis(1500) {
        assert!(raw.stream.read(&mut buffer).await.unwrap() > 0, "cut after {:?}", start.elapsed());
        sleep(TICK).await;
    }
    assert_eq!(toy.lifecycle.traffic.counts().timed_out, 0);
}

#[tokio::test]
async fn who_goes_away_ends_what_it_asked_for() {
    let toy = Toy::start(Limits { write_timeout: Duration::from_secs(60), ..short() }).await;
    for path in ["/hold", "/tokens", "/flood"] {
        let mut raw = Raw::connect(toy.address).await;
        raw.say(&format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n")).await;
        toy.wait_alive(1).await;
        drop(raw);
        let start = Instant::now();
        toy.wait_alive(0).await;
        assert!(start.elapsed() < Duration::from_secs(5), "{path}");
    }
}
