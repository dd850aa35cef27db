//! KeyDiff: blocks whose keys are like all the others go.
//!
//! **Algorithm** (arXiv 2504.15364): the anchor is the mean of the layer's unit keys, per KV head; a key
//! scores `-cos(key, anchor)`; the lowest scores, the most ordinary keys, go. No attention is looked at.
//!
//! **Deviations.** Whole blocks, per layer: a block scores the mean over its tokens and KV heads (the
//! paper chooses per head). Each block is scored once, when it is full, against the anchor of all keys up
//! to then, dropped ones included: one pass over a page while it is still f16, one number to keep, and
//! the same score whatever was done to the cache since. The paper scores everything anew each time. Keys
//! are as they are in the cache, with their positions, as in kvpress. First block, tail and marked spans
//! stay.
//!
//! **Flaws.** Blind to the question: a key may be unlike the rest and never be looked at. Early blocks
//! are compared with few others, so their scores are lower than they would be later: they go sooner.
//! Averaging over a block hides one rare token among 31 ordinary ones. Published gains over age order are
//! of one 8B model (kvpress's RULER-4k at a quarter of the cache: 74, age order 40).

use super::{EvictionPolicy, Observation, Protection, SequenceSummary, by_score};

/// Drops the block whose keys are least distinct, per layer.
#[derive(Clone, Copy, Debug)]
pub struct KeyDiff {
    /// Accepted tokens at the end that are never dropped.
    pub tail_tokens: usize,
}

impl EvictionPolicy for KeyDiff {
    fn name(&self) -> &'static str {
        "keydiff"
    }

    fn observes(&self) -> Observation {
        Observation::Keys
    }

    fn protection(&self) -> Protection {
        Protection::SinksTailAndKept { tail_tokens: self.tail_tokens }
    }

    fn per_layer(&self) -> bool {
        true
    }

    fn order(&self, sequence: &SequenceSummary<'_>) -> Vec<usize> {
        by_score(sequence)
    }
}
