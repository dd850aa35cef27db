//! Draining, cutting off, stopping at once.

use std::time::Duration;

use reef_server::lifecycle::{Drained, Limits, State, Stopping};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep};

use crate::raw::{Raw, get, post};
use crate::toy::{Toy, short};

#[tokio::test]
async fn draining_finishes_streams_and_refuses_work() {
    let toy = Toy::start(Limits { drain_timeout: Duration::from_secs(20), ..short() }).await;
    let mut quiet = Raw::connect(toy.address).await;
    quiet.say("GET /ok HTTP/1.1\r\nhost: x\r\n\r\n").await;
    assert_eq!(quiet.answer().await.body, "ok");
    let mut stream = Raw::connect(toy.address).await;
    stream.say("GET /tokens HTTP/1.1\r\nhost: x\r\n\r\n").await;
    stream.wait_for("token").await;
    toy.stopper.stop(Stopping::Drain);
    assert!(!quiet.more().await, "connections without work are closed");
    assert_eq!(toy.lifecycle.readiness.state(), State::Draining);
    // Whoever asks is told, on connections that end with that.
    let health = get(toy.address, "/health").await;
    assert_eq!((health.status, health.body.as_str()), (503, "draining"));
    assert!(health.head.contains("connection: close"));
    let mut work = Raw::connect(toy.address).await;
    work.say(&(post("/length", "content-length: 3\r\n") + "abc")).await;
    let refused = work.answer().await;
    assert_eq!(refused.status, 503);
    assert!(refused.head.contains("retry-after: ") && refused.body.contains("stopping"));
    stream.wait_for("token \r\n6\r\ntoken ").await;
    toy.seen.release.notify_waiters();
    let (said, _) = stream.rest().await;
    assert!(said.ends_with("0\r\n\r\n"), "the stream is whole: {said}");
    let address = toy.address;
    let whole = Drained { in_flight: 1, cut_off: 0, engine_died: false };
    assert_eq!(toy.ended().await, whole);
    assert!(TcpStream::connect(address).await.is_err(), "nobody listens any more");
}

#[tokio::test]
async fn with_nothing_in_flight_the_end_is_at_once() {
    let toy = Toy::start(Limits { drain_timeout: Duration::from_secs(20), ..short() }).await;
    let mut quiet = Raw::connect(toy.address).await;
    quiet.say("GET /ok HTTP/1.1\r\nhost: x\r\n\r\n").await;
    quiet.answer().await;
    let _silent = Raw::connect(toy.address).await;
    sleep(Duration::from_millis(50)).await;
    let start = Instant::now();
    toy.stopper.stop(Stopping::Drain);
    let none = Drained { in_flight: 0, cut_off: 0, engine_died: false };
    assert_eq!(toy.ended().await, none);
    assert!(start.elapsed() < Duration::from_secs(2));
}

#[tokio::test]
async fn at_the_cut_off_handlers_have_last_words_and_the_deaf_are_dropped() {
    let toy = Toy::start(short()).await;
    let mut listening = Raw::connect(toy.address).await;
    listening.say("GET /hold HTTP/1.1\r\nhost: x\r\n\r\n").await;
    let mut deaf = Raw::connect(toy.address).await;
    deaf.say("GET /tokens HTTP/1.1\r\nhost: x\r\n\r\n").await;
    toy.wait_alive(2).await;
    let start = Instant::now();
    toy.stopper.stop(Stopping::Drain);
    assert_eq!(listening.answer().await.body, "last words");
    assert!(start.elapsed() >= Duration::from_millis(550));
    let (said, _) = deaf.rest().await;
    assert!(!said.ends_with("0\r\n\r\n"), "a stream that was cut must not look whole");
    let one = Drained { in_flight: 2, cut_off: 1, engine_died: false };
    assert_eq!(toy.ended().await, one);
    assert!(start.elapsed() < Duration::from_secs(10));
}

#[tokio::test]
async fn a_second_word_ends_it_at_once() {
    let toy = Toy::start(Limits { drain_timeout: Duration::from_secs(60), ..short() }).await;
    let mut stream = Raw::connect(toy.address).await;
    stream.say("GET /tokens HTTP/1.1\r\nhost: x\r\n\r\n").await;
    toy.wait_alive(1).await;
    toy.stopper.stop(Stopping::Drain);
    stream.wait_for("token").await;
    toy.stopper.stop(Stopping::Now);
    let start = Instant::now();
    let cut = Drained { in_flight: 1, cut_off: 1, engine_died: false };
    assert_eq!(toy.ended().await, cut);
    assert!(start.elapsed() < Duration::from_secs(2));
}

#[tokio::test]
async fn the_engines_death_is_the_servers() {
    let toy = Toy::start(short()).await;
    assert_eq!(get(toy.address, "/health").await.status, 200);
    toy.lifecycle.readiness.set(State::Dead);
    let dead = Drained { in_flight: 0, cut_off: 0, engine_died: true };
    assert_eq!(toy.ended().await, dead);
}
