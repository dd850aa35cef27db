//! Out of file descriptors the server waits instead of spinning, and goes on once there are some. A process
//! of its own: the limit is the process's.
#![cfg(target_os = "linux")]

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::routing::get;
use reef_server::lifecycle::{Lifecycle, Limits, Stop, bind, serve};
use rustix::process::{Resource, Rlimit, setrlimit};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

const DESCRIPTORS: u64 = 256;

/// Seconds of CPU that this process has used.
fn cpu_s(stat: &File) -> f64 {
    let mut buffer = [0; 4096];
    let bytes = stat.read_at(&mut buffer, 0).unwrap();
    let stat = std::str::from_utf8(&buffer[..bytes]).unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    // User and system time in hundredths of a second.
    (fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap()) / 100.0
}

#[tokio::test]
async fn it_waits_for_descriptors_without_spinning() {
    let limit = Rlimit { current: Some(DESCRIPTORS), maximum: Some(DESCRIPTORS) };
    setrlimit(Resource::Nofile, limit).unwrap();
    let listener = bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = listener.local_addr().unwrap();
    let lifecycle = Arc::new(Lifecycle::new(Limits::default()));
    let router = Router::new().route("/", get(|| async { "ok" }));
    let (_stopper, stop) = Stop::told();
    tokio::spawn(serve(listener, router, lifecycle.clone(), stop));
    let ask = async || {
        let mut client = TcpStream::connect(address).await.unwrap();
        client.write_all(b"GET / HTTP/1.0\r\n\r\n").await.unwrap();
        client
    };
    let hear = async |mut client: TcpStream| {
        let mut said = String::new();
        timeout(Duration::from_secs(20), client.read_to_string(&mut said)).await.unwrap().unwrap();
        assert!(said.ends_with("ok"), "{said}");
    };
    hear(ask().await).await;
    // Opened while that is possible.
    let stat = File::open("/proc/self/stat").unwrap();
    // The client gets the last descriptor, the server none.
    let mut taken: Vec<File> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
    assert!(taken.len() > 100 && taken.len() < DESCRIPTORS as usize);
    taken.pop();
    let client = ask().await;
    sleep(Duration::from_millis(100)).await;
    let (start, cpu) = (Instant::now(), cpu_s(&stat));
    sleep(Duration::from_millis(1500)).await;
    let share = (cpu_s(&stat) - cpu) / start.elapsed().as_secs_f64();
    assert!(share < 0.2, "{share} of a core to wait for descriptors");
    assert_eq!(lifecycle.traffic.counts().accepted, 1);
    drop(taken);
    hear(client).await;
}
