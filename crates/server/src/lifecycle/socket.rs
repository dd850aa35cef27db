//! The sockets' options, and a socket that tells its connection what it reads and writes.

use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpSocket, TcpStream};

use super::connection::Connection;

/// Connections that the system holds for us until we take them.
const BACKLOG: u32 = 1024;
/// What the system may hold of an answer that a client does not read. It would grow to megabytes by
/// itself; a stream of tokens needs a few kilobytes.
const SEND_BUFFER_BYTES: u32 = 256 << 10;
/// A peer that has vanished without a word is noticed after `PROBE_AFTER + PROBES * PROBE_EVERY`.
const PROBE_AFTER: Duration = Duration::from_secs(30);
const PROBE_EVERY: Duration = Duration::from_secs(10);
const PROBES: u32 = 3;

/// A listening socket at `address`; a port of 0 lets the system choose.
///
/// # Errors
/// As the system says: in use, not ours, not allowed.
pub fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    // On Windows it would let others take the port over.
    #[cfg(not(windows))]
    socket.set_reuseaddr(true)?;
    // Accepted sockets inherit it.
    socket.set_send_buffer_size(SEND_BUFFER_BYTES)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Sets what every connection needs. A failure leaves a slower or stickier connection, not a wrong one.
pub(super) fn tune(stream: &TcpStream, unread_timeout: Duration) {
    let keepalive = TcpKeepalive::new().with_time(PROBE_AFTER).with_interval(PROBE_EVERY);
    #[cfg(not(windows))]
    let keepalive = keepalive.with_retries(PROBES);
    let socket = SockRef::from(stream);
    let set = stream.set_nodelay(true).and_then(|()| socket.set_tcp_keepalive(&keepalive));
    // Probes are not sent while data wait for a receipt: this bounds that wait.
    #[cfg(target_os = "linux")]
    let set = set.and_then(|()| socket.set_tcp_user_timeout(Some(unread_timeout)));
    #[cfg(not(target_os = "linux"))]
    let _ = unread_timeout;
    if let Err(error) = set {
        tracing::debug!(%error, "a socket option was not taken");
    }
}

/// A connection's socket; hyper reads and writes through it.
pub(super) struct Socket {
    pub(super) stream: TcpStream,
    pub(super) connection: Arc<Connection>,
}

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(context, buffer);
        if buffer.filled().len() > before {
            self.connection.heard();
        }
        read
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.connection.wrote(written.is_ready());
        written
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, bytes);
        self.connection.wrote(written.is_ready());
        written
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    /// hyper flushes once it has written all that it holds.
    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(context);
        if flushed.is_ready() {
            self.connection.flushed();
        }
        flushed
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
