//! SIGTERM drains, a second signal stops at once. A process of its own: signals are the process's.
#![cfg(unix)]

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::routing::get;
use reef_server::lifecycle::{Drained, Lifecycle, Limits, State, Stop, bind, serve};
use rustix::process::{Signal, getpid, kill_process};
use tokio::io::AsyncWriteExt;
use tokio::time::{sleep, timeout};

#[tokio::test]
async fn the_first_signal_drains_and_the_second_stops() {
    let listener = bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = listener.local_addr().unwrap();
    let limits = Limits { drain_timeout: Duration::from_secs(60), ..Limits::default() };
    let lifecycle = Arc::new(Lifecycle::new(limits));
    let router = Router::new().route("/", get(std::future::pending::<()>));
    let stop = Stop::on_signals().unwrap();
    let server = tokio::spawn(serve(listener, router, lifecycle.clone(), stop));
    let mut client = tokio::net::TcpStream::connect(address).await.unwrap();
    client.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    sleep(Duration::from_millis(200)).await;
    kill_process(getpid(), Signal::TERM).unwrap();
    let draining = lifecycle.readiness.reached(State::Draining);
    timeout(Duration::from_secs(10), draining).await.expect("SIGTERM is heard");
    sleep(Duration::from_millis(100)).await;
    assert!(!server.is_finished(), "a request is in flight");
    kill_process(getpid(), Signal::INT).unwrap();
    let drained = timeout(Duration::from_secs(10), server).await.expect("SIGINT is heard").unwrap();
    assert_eq!(drained, Drained { in_flight: 1, cut_off: 1, engine_died: false });
}
