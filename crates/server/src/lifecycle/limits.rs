//! What a client may take of the server: connections, bytes, time.

use std::time::Duration;

/// Bounds on what clients can make the server hold or wait for. Memory of connections is at most
/// `connections * (2 * BUFFER_BYTES + OS buffers) + bodies_bytes`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Connections at once. Where there are more, the one that has been quiet longest is closed; where
    /// all are at work the newcomer is told 503.
    pub connections: usize,
    /// Bytes of a request's line and headers; more is 431.
    pub head_bytes: usize,
    /// From the first byte of a request to the end of its headers; then the connection is closed.
    pub head_timeout: Duration,
    /// How long a connection may be kept without a request. Longer than clients and balancers keep theirs
    /// (most: 5 to 90 s), so that they do not send into a connection that is being closed.
    pub idle_timeout: Duration,
    /// Bytes of one request's body; more is 413.
    pub body_bytes: usize,
    /// Bytes of all bodies that are being read at once; beyond it, 503.
    pub bodies_bytes: usize,
    /// Longest silence within a body; then 408.
    pub body_timeout: Duration,
    /// Slowest body, on average, after `body_timeout`; slower is 408.
    pub body_bytes_s: usize,
    /// How long a client may leave an answer unread while the buffers are full; then the connection is
    /// closed, which ends its request.
    pub write_timeout: Duration,
    /// How long requests in flight may go on once the server was told to stop.
    pub drain_timeout: Duration,
}

/// hyper's buffer of each direction of a connection, in bytes.
pub(super) const BUFFER_BYTES: usize = 64 << 10;

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            connections: 1024,
            head_bytes: 32 << 10,
            head_timeout: Duration::from_secs(10),
            idle_timeout: Duration::from_secs(120),
            body_bytes: 16 << 20,
            bodies_bytes: 128 << 20,
            body_timeout: Duration::from_secs(15),
            body_bytes_s: 4 << 10,
            write_timeout: Duration::from_secs(30),
            drain_timeout: Duration::from_secs(30),
        }
    }
}
