//! A client that says exactly what it is told to.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};

/// Anything that takes longer hangs.
const PATIENCE: Duration = Duration::from_secs(20);

/// One connection.
pub struct Raw {
    pub stream: TcpStream,
    read: Vec<u8>,
}

/// A response.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub head: String,
    pub body: String,
}

impl Raw {
    pub async fn connect(address: SocketAddr) -> Raw {
        let stream = timeout(PATIENCE, TcpStream::connect(address)).await.unwrap().unwrap();
        Raw { stream, read: Vec::new() }
    }

    pub async fn say(&mut self, text: &str) {
        self.stream.write_all(text.as_bytes()).await.unwrap();
    }

    /// Whether `text` could be sent.
    pub async fn try_say(&mut self, text: &str) -> bool {
        self.try_send(text.as_bytes()).await
    }

    /// Whether `bytes` could be sent.
    pub async fn try_send(&mut self, bytes: &[u8]) -> bool {
        timeout(PATIENCE, self.stream.write_all(bytes)).await.expect("it hangs").is_ok()
    }

    /// Reads on; `false`: the server has closed or reset.
    pub async fn more(&mut self) -> bool {
        let mut buffer = [0; 4096];
        let read = timeout(PATIENCE, self.stream.read(&mut buffer)).await.expect("it hangs");
        let bytes = read.unwrap_or(0);
        self.read.extend_from_slice(&buffer[..bytes]);
        bytes > 0
    }

    /// Reads until the text so far has `text`.
    pub async fn wait_for(&mut self, text: &str) {
        while !String::from_utf8_lossy(&self.read).contains(text) {
            let so_far =
                String::from_utf8_lossy(&self.read[..self.read.len().min(500)]).into_owned();
            assert!(self.more().await, "closed before {text:?}: {so_far:?}");
        }
    }

    /// Reads until the server closes; what it said, and how long that took.
    pub async fn rest(&mut self) -> (String, Duration) {
        let start = Instant::now();
        while self.more().await {}
        (String::from_utf8_lossy(&std::mem::take(&mut self.read)).into_owned(), start.elapsed())
    }

    /// The next response. A chunked one's body is given with its chunks' lengths.
    pub async fn answer(&mut self) -> Answer {
        self.wait_for("\r\n\r\n").await;
        let text = String::from_utf8_lossy(&self.read).into_owned();
        let (head, _) = text.split_once("\r\n\r\n").unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        let head = head.to_ascii_lowercase();
        let length = match head.split("content-length: ").nth(1) {
            Some(length) => length.split("\r\n").next().unwrap().parse::<usize>().unwrap(),
            None => {
                assert!(head.contains("transfer-encoding: chunked"), "no length: {head}");
                self.wait_for("\r\n0\r\n\r\n").await;
                let text = String::from_utf8_lossy(&self.read[head.len() + 4..]).into_owned();
                text.find("\r\n0\r\n\r\n").unwrap() + 7
            }
        };
        let end = head.len() + 4 + length;
        while self.read.len() < end {
            assert!(self.more().await, "closed within a body");
        }
        let rest = self.read.split_off(end);
        let all = std::mem::replace(&mut self.read, rest);
        let body = String::from_utf8_lossy(&all[head.len() + 4..]).into_owned();
        Answer { status, head, body }
    }
}

/// `GET path` on a connection of its own.
pub async fn get(address: SocketAddr, path: &str) -> Answer {
    let mut raw = Raw::connect(address).await;
    raw.say(&format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n")).await;
    raw.answer().await
}

/// The head of a `POST path` with more headers.
pub fn post(path: &str, headers: &str) -> String {
    format!("POST {path} HTTP/1.1\r\nhost: x\r\n{headers}\r\n")
}
