//! Readers that do as little as they can: they count events.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Instant;

const END: &[u8] = b"data: [DONE]\n\n";

fn request(path: &str, tokens: usize) -> String {
    let prompt = match path.ends_with("/chat/completions") {
        true => r#""messages":[{"role":"user","content":"hello"}]"#,
        false => r#""prompt":"hello""#,
    };
    let body = format!(
        r#"{{"model":"stub",{prompt},"max_tokens":{tokens},"stream":true,"stream_options":{{"include_usage":true}}}}"#
    );
    let length = body.len();
    format!(
        "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
         Content-Length: {length}\r\n\r\n{body}"
    )
}

/// Reads `streams` of `tokens` each at once; fails where one brings fewer.
pub fn read_streams(address: SocketAddr, path: &str, streams: usize, tokens: usize) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let mut readers = tokio::task::JoinSet::new();
        for _ in 0..streams {
            readers.spawn(read_stream(address, request(path, tokens)));
        }
        while let Some(events) = readers.join_next().await {
            let events = events.expect("a reader");
            assert!(events >= tokens, "{events} of {tokens} events came");
        }
    });
}

/// Events that came before the last.
async fn read_stream(address: SocketAddr, request: String) -> usize {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let stream = tokio::net::TcpStream::connect(address).await;
    let mut stream = stream.expect("a connection");
    stream.set_nodelay(true).expect("a socket");
    stream.write_all(request.as_bytes()).await.expect("a request");
    let (mut buffer, mut kept, mut events) = (vec![0; 16 << 10], 0, 0);
    let mut begun = false;
    loop {
        let read = stream.read(&mut buffer[kept..]).await.expect("events");
        assert!(read > 0, "closed within the stream");
        let known = &buffer[..kept + read];
        let is_good = std::mem::replace(&mut begun, true) || known.starts_with(b"HTTP/1.1 200");
        assert!(is_good, "{}", String::from_utf8_lossy(known));
        // A mark that ends within what was kept was counted.
        let new = &known[kept.saturating_sub(5)..];
        events += new.windows(6).filter(|bytes| *bytes == b"data: ").count();
        if known.windows(END.len()).any(|bytes| bytes == END) {
            return events - 1;
        }
        let (start, end) = (known.len().saturating_sub(END.len()), known.len());
        kept = end - start;
        buffer.copy_within(start..end, 0);
    }
}

/// One connection for one request after the other.
pub struct Kept {
    stream: TcpStream,
}

impl Kept {
    pub fn open(address: SocketAddr) -> Kept {
        let stream = TcpStream::connect(address).expect("a connection");
        stream.set_nodelay(true).expect("a socket");
        Kept { stream }
    }

    /// Reads a whole answer; when its first event came.
    pub fn ask(&mut self, path: &str, tokens: usize) -> Instant {
        self.stream.write_all(request(path, tokens).as_bytes()).expect("a request");
        let (mut answer, mut first) = (Vec::new(), None);
        let mut buffer = [0; 4096];
        loop {
            let read = self.stream.read(&mut buffer).expect("events");
            assert!(read > 0, "closed within the stream");
            let now = Instant::now();
            answer.extend_from_slice(&buffer[..read]);
            let has = |mark: &[u8]| answer.windows(mark.len()).any(|bytes| bytes == mark);
            if first.is_none() && has(b"data: ") {
                first = Some(now);
            }
            // The chunk that ends the body stands behind it.
            if has(b"data: [DONE]\n\n\r\n0\r\n\r\n") {
                return first.expect("an event before the last");
            }
        }
    }
}
