//! StreamingLLM: the first tokens and a recent tail stay, the oldest of the middle goes.
//!
//! **Algorithm** (arXiv 2309.17453): keep the first 4 tokens, the attention sinks, and the most recent
//! ones, in every layer and head alike; drop the oldest of what lies between.
//!
//! **Deviations.** Whole blocks: the first block stands for the 4 sinks (the paper's table 2: 1, 2, 4 and
//! 8 sinks do nearly the same), and a block goes when room is needed, not a token a step. Positions are
//! original within the trained context and relative to the cache only past it, by rotating the query:
//! the paper re-rotates all keys each step. Spans the client marked stay.
//!
//! **Flaws.** What has left is lost however much it mattered: recall of it falls to chance (the paper's
//! StreamEval). It is the default because it never does worse than its name says, and scorers do on some
//! models (kvpress: Phi-3.5-mini 59 against 14 to 38).

use super::{EvictionPolicy, Protection, SequenceSummary, by_age};

/// Keeps the first block and the last `tail_tokens`; drops the oldest first.
#[derive(Clone, Copy, Debug)]
pub struct Sinks {
    /// Accepted tokens at the end that are never dropped; 0 protects only what is open.
    pub tail_tokens: usize,
}

impl EvictionPolicy for Sinks {
    fn name(&self) -> &'static str {
        "sinks"
    }

    fn protection(&self) -> Protection {
        Protection::SinksTailAndKept { tail_tokens: self.tail_tokens }
    }

    fn order(&self, sequence: &SequenceSummary<'_>) -> Vec<usize> {
        by_age(sequence)
    }
}
