//! What can be wrong with an answer.

/// Why an exchange does not count as answered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The server said no: its status and message.
    #[error("status {0}: {1}")]
    Status(u16, String),
    /// An error came in the middle of the stream.
    #[error("error event: {0}")]
    ErrorEvent(String),
    /// The connection failed, or ended early.
    #[error("connection: {0}")]
    Broken(String),
    /// The stream ended in order, but without all that it must bring: a `finish_reason` for each choice,
    /// `[DONE]`, or as many tokens as were asked for.
    #[error("cut short: {0}")]
    Truncated(String),
    /// Bytes that some client would not understand.
    #[error("malformed: {0}")]
    Malformed(String),
    /// The counts in `usage` are not those of what came.
    #[error("counted wrong: {0}")]
    Miscounted(String),
    /// Nothing came for too long.
    #[error("silent for {0} s")]
    Silent(u64),
    /// The text is not the one that the same request gets alone.
    #[error("another text: {0}")]
    OtherText(String),
}

impl Fault {
    /// Names of the kinds, as reports count them.
    pub const KINDS: [&str; 8] = [
        "refused",
        "error_event",
        "broken",
        "truncated",
        "malformed",
        "miscounted",
        "silent",
        "other_text",
    ];

    /// Its place in [`Fault::KINDS`].
    pub fn kind(&self) -> usize {
        match self {
            Fault::Status(..) => 0,
            Fault::ErrorEvent(_) => 1,
            Fault::Broken(_) => 2,
            Fault::Truncated(_) => 3,
            Fault::Malformed(_) => 4,
            Fault::Miscounted(_) => 5,
            Fault::Silent(_) => 6,
            Fault::OtherText(_) => 7,
        }
    }
}
