//! HTTP/1.1 as bytes on a socket: what a client library would smooth over is seen here.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::fault::Fault;

/// Bytes of a head, or of a chunk's size line, at most.
const LINE_BYTES: usize = 16 << 10;
/// Bytes of one chunk of a body, or of a body of known length, at most.
const PIECE_BYTES: usize = 64 << 20;
/// Bytes asked of the socket at once.
const READ_BYTES: usize = 16 << 10;
/// Header lines of a response at most.
const HEADERS: usize = 64;

/// The head of a response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Head {
    /// The status.
    pub status: u16,
    /// Of the body, without parameters, in lower case; empty where none is said.
    pub content_type: String,
    /// `Retry-After`, in seconds.
    pub retry_after_s: Option<u32>,
    /// Whether the connection serves further requests.
    pub keep_alive: bool,
    body: Body,
}

/// How much of the body is still to come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Body {
    Chunks,
    Bytes(usize),
    UntilClosed,
    Ended,
}

/// One connection, one request at a time.
pub struct Connection {
    stream: TcpStream,
    buffer: Vec<u8>,
    body: Body,
    /// Requests that were answered on it.
    pub answered: usize,
}

impl Connection {
    /// Connects. Loads are for servers on this machine: other addresses are refused.
    ///
    /// # Errors
    /// Not a loopback address, or nobody listens.
    pub async fn open(address: SocketAddr) -> Result<Connection, Fault> {
        if !address.ip().is_loopback() {
            return Err(Fault::Broken(format!(
                "{address} is not on this machine: give a loopback"
            )));
        }
        let connected = TcpStream::connect(address).await;
        let stream = connected.map_err(|error| Fault::Broken(format!("connect: {error}")))?;
        stream.set_nodelay(true).map_err(broken)?;
        Ok(Connection { stream, buffer: Vec::new(), body: Body::Ended, answered: 0 })
    }

    /// Sends a request with a JSON body (none where it is empty).
    ///
    /// # Errors
    /// The connection broke.
    pub async fn send(&mut self, method: &str, path: &str, body: &str) -> Result<(), Fault> {
        let length = body.len();
        let text = format!(
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
             Content-Length: {length}\r\n\r\n{body}"
        );
        self.stream.write_all(text.as_bytes()).await.map_err(broken)
    }

    /// Reads the head of the response.
    ///
    /// # Errors
    /// The connection broke, or this is not HTTP.
    pub async fn head(&mut self) -> Result<Head, Fault> {
        loop {
            let mut headers = [httparse::EMPTY_HEADER; HEADERS];
            let mut response = httparse::Response::new(&mut headers);
            let parsed = response.parse(&self.buffer);
            match parsed.map_err(|error| Fault::Malformed(format!("head: {error}")))? {
                httparse::Status::Complete(length) => {
                    let head = read_head(&response)?;
                    self.buffer.drain(..length);
                    self.body = head.body;
                    return Ok(head);
                }
                httparse::Status::Partial => self.fill(LINE_BYTES, "the head").await?,
            }
        }
    }

    /// The next piece of the body as the server cut it (one chunk is one write of it); `None` at its end.
    ///
    /// # Errors
    /// The connection broke before the end, or the chunking is wrong.
    pub async fn piece(&mut self) -> Result<Option<Vec<u8>>, Fault> {
        match self.body {
            Body::Ended => Ok(None),
            Body::Bytes(length) => {
                let piece = self.take(length).await?;
                self.end();
                Ok(Some(piece).filter(|piece| !piece.is_empty()))
            }
            Body::UntilClosed => {
                if self.buffer.is_empty() && self.read().await? == 0 {
                    self.end();
                    return Ok(None);
                }
                Ok(Some(std::mem::take(&mut self.buffer)))
            }
            Body::Chunks => self.chunk().await,
        }
    }

    /// The rest of the body.
    ///
    /// # Errors
    /// As for [`Connection::piece`].
    pub async fn rest(&mut self) -> Result<Vec<u8>, Fault> {
        let mut body = Vec::new();
        while let Some(piece) = self.piece().await? {
            body.extend_from_slice(&piece);
            if body.len() > PIECE_BYTES {
                return Err(Fault::Malformed(format!("a body of more than {PIECE_BYTES} bytes")));
            }
        }
        Ok(body)
    }

    /// Goes before the end: by a reset, or in order.
    pub fn leave(self, by_reset: bool) {
        if by_reset {
            // Where the system does not do it, the connection is closed in order.
            let _ = self.stream.set_zero_linger();
        }
    }

    async fn chunk(&mut self) -> Result<Option<Vec<u8>>, Fault> {
        let line = self.line().await?;
        let size = line.split(';').next().unwrap_or_default().trim();
        let size = usize::from_str_radix(size, 16);
        let size = size.map_err(|_| Fault::Malformed(format!("chunk size `{line}`")))?;
        if size == 0 {
            // Trailers, up to an empty line.
            while !self.line().await?.is_empty() {}
            self.end();
            return Ok(None);
        }
        let chunk = self.take(size).await?;
        match self.take(2).await?.as_slice() {
            b"\r\n" => Ok(Some(chunk)),
            other => Err(Fault::Malformed(format!("{other:?} behind a chunk"))),
        }
    }

    fn end(&mut self) {
        self.body = Body::Ended;
        self.answered += 1;
    }

    /// A line without its end.
    async fn line(&mut self) -> Result<String, Fault> {
        let mut seen = 0;
        loop {
            if let Some(at) = self.buffer[seen..].windows(2).position(|pair| pair == b"\r\n") {
                let line = self.buffer.drain(..seen + at + 2).collect::<Vec<u8>>();
                return Ok(String::from_utf8_lossy(&line[..line.len() - 2]).into_owned());
            }
            seen = self.buffer.len().saturating_sub(1);
            self.fill(LINE_BYTES, "a chunk's size").await?;
        }
    }

    async fn take(&mut self, length: usize) -> Result<Vec<u8>, Fault> {
        while self.buffer.len() < length {
            self.fill(PIECE_BYTES, "a piece of the body").await?;
        }
        Ok(self.buffer.drain(..length).collect())
    }

    /// Reads more; what is `awaited` may take `most` bytes.
    async fn fill(&mut self, most: usize, awaited: &str) -> Result<(), Fault> {
        if self.buffer.len() > most {
            return Err(Fault::Malformed(format!("{awaited} takes more than {most} bytes")));
        }
        match self.read().await? {
            0 => Err(Fault::Broken(format!("closed where {awaited} was to come"))),
            _ => Ok(()),
        }
    }

    async fn read(&mut self) -> Result<usize, Fault> {
        self.buffer.reserve(READ_BYTES);
        self.stream.read_buf(&mut self.buffer).await.map_err(broken)
    }
}

fn broken(error: std::io::Error) -> Fault {
    Fault::Broken(error.to_string())
}

fn read_head(response: &httparse::Response<'_, '_>) -> Result<Head, Fault> {
    let header = |name: &str| {
        let found = response.headers.iter().find(|header| header.name.eq_ignore_ascii_case(name));
        found.map(|header| String::from_utf8_lossy(header.value).trim().to_ascii_lowercase())
    };
    let length = match header("content-length").map(|length| length.parse()) {
        Some(Ok(length)) if length <= PIECE_BYTES => Some(length),
        Some(_) => return Err(Fault::Malformed("content-length".into())),
        None => None,
    };
    let is_chunked = header("transfer-encoding").is_some_and(|coding| coding == "chunked");
    let body = match (is_chunked, length) {
        (true, _) => Body::Chunks,
        (false, Some(length)) => Body::Bytes(length),
        (false, None) => Body::UntilClosed,
    };
    let closes = header("connection").is_some_and(|value| value == "close");
    let content_type = header("content-type").unwrap_or_default();
    Ok(Head {
        status: response.code.unwrap_or(0),
        content_type: content_type.split(';').next().unwrap_or_default().trim().to_string(),
        retry_after_s: header("retry-after").and_then(|seconds| seconds.parse().ok()),
        keep_alive: !closes && body != Body::UntilClosed && response.version == Some(1),
        body,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::TcpListener;

    /// What a client makes of `bytes`, which arrive in pieces of `cut`.
    async fn fetch(bytes: &'static [u8], cut: usize) -> Result<(Head, Vec<Vec<u8>>), Fault> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let serve = async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let _ = stream.read(&mut [0; 1024]).await.unwrap();
            for piece in bytes.chunks(cut) {
                stream.write_all(piece).await.unwrap();
                tokio::task::yield_now().await;
            }
        };
        let ask = async move {
            let mut connection = Connection::open(address).await?;
            connection.send("GET", "/", "").await?;
            let head = connection.head().await?;
            let mut pieces = Vec::new();
            while let Some(piece) = connection.piece().await? {
                pieces.push(piece);
            }
            Ok((head, pieces))
        };
        tokio::join!(serve, ask).1
    }

    fn run(bytes: &'static [u8], cut: usize) -> Result<(Head, Vec<Vec<u8>>), Fault> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(fetch(bytes, cut))
    }

    #[test]
    fn chunks_are_pieces_however_they_arrive() {
        let bytes = b"HTTP/1.1 200 OK\r\nContent-Type: Text/Event-Stream; a=b\r\nTransfer-Encoding: chunked\r\n\r\n\
            3\r\nabc\r\n2;x=y\r\n\r\n\r\n0\r\nX-Trailer: 1\r\n\r\n";
        for cut in [1, 2, 7, 1000] {
            let (head, pieces) = run(bytes, cut).unwrap();
            assert_eq!((head.status, head.content_type.as_str()), (200, "text/event-stream"));
            assert!(head.keep_alive);
            assert_eq!(pieces, [b"abc".to_vec(), b"\r\n".to_vec()]);
        }
    }

    #[test]
    fn a_body_cut_short_is_no_end() {
        let cut_short = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n";
        assert!(matches!(run(cut_short, 9), Err(Fault::Broken(_))));
        let cut_short = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nabc";
        assert!(matches!(run(cut_short, 9), Err(Fault::Broken(_))));
        let wrong = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabcd\r\n0\r\n\r\n";
        assert!(matches!(run(wrong, 9), Err(Fault::Malformed(_))));
    }

    #[test]
    fn other_machines_are_refused() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let address = "192.0.2.1:80".parse().unwrap();
        assert!(runtime.block_on(Connection::open(address)).is_err());
    }
}
