//! Which blocks to drop first: one contract, one file per policy.
//!
//! Policies act on full-attention groups only and see whole blocks (kv-memory point 13).

mod sinks;
mod window;

pub use sinks::Sinks;
pub use window::Window;

/// One block of a sequence as a policy sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSummary {
    /// Original position of its first token.
    pub first: usize,
    /// Whether it is full and accepted; an open block is never dropped.
    pub sealed: bool,
}

/// The blocks of a sequence, oldest first.
#[derive(Clone, Copy, Debug)]
pub struct SequenceSummary<'a> {
    /// Blocks still held.
    pub blocks: &'a [BlockSummary],
    /// Tokens of a block.
    pub block_size: usize,
    /// Accepted tokens of the sequence, dropped ones included: the next token's original position.
    pub next_position: usize,
}

/// Says in what order blocks may be dropped.
pub trait EvictionPolicy: Send + Sync {
    /// The name on the command line.
    fn name(&self) -> &'static str;

    /// Original first positions of the droppable blocks, the first to go first. Blocks not named are
    /// protected. Only sealed blocks may be named.
    fn order(&self, sequence: &SequenceSummary<'_>) -> Vec<usize>;
}

/// The policy of that name with `tail_tokens` protected at the end where the policy protects a tail.
///
/// # Errors
/// An unknown name.
pub fn by_name(name: &str, tail_tokens: usize) -> Result<Box<dyn EvictionPolicy>, UnknownPolicy> {
    match name {
        "sinks" => Ok(Box::new(Sinks { tail_tokens })),
        "window" => Ok(Box::new(Window)),
        _ => Err(UnknownPolicy(name.to_string())),
    }
}

/// A policy's name that is none.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("policy `{0}` is unknown: use sinks or window")]
pub struct UnknownPolicy(String);
