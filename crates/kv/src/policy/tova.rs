//! TOVA: what the last query looked at least goes.
//!
//! **Algorithm** (arXiv 2401.06104): at each step drop the key with the lowest attention probability of
//! the *last* query, averaged over all heads of the layer; no state is carried from step to step.
//!
//! **Deviations.** Whole blocks: probabilities are summed over a block's tokens; the sum over heads ranks
//! as the mean does. Per layer, as in the paper. First block, tail and marked spans stay (the paper
//! protects nothing and finds that the first token stays by itself; kvpress adds recents).
//!
//! **Flaws.** One query is a noisy judge: a punctuation mark looks at nothing but the sink, and what it
//! drops is gone for all later ones. Which query is last when room is needed is chance. It is at its best
//! where the last query knows what will be asked (kvpress's RULER-4k at half the cache: 75, age order 60).

use super::{EvictionPolicy, Observation, Protection, SequenceSummary, by_score};

/// Drops the block that the last query attended to least, per layer.
#[derive(Clone, Copy, Debug)]
pub struct Tova {
    /// Accepted tokens at the end that are never dropped.
    pub tail_tokens: usize,
}

impl EvictionPolicy for Tova {
    fn name(&self) -> &'static str {
        "tova"
    }

    fn observes(&self) -> Observation {
        Observation::AttentionMass { decay: 0.0 }
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
