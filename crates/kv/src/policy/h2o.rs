//! H2O, heavy hitters: blocks that queries have looked at most stay.
//!
//! **Algorithm** (arXiv 2306.14048): sum each key's attention probability over all queries so far; keep
//! the keys with the largest sums and the most recent ones.
//!
//! **Deviations**, and why:
//! - Whole blocks, per layer: the mass of a block is summed over its tokens and the layer's query heads.
//!   The paper chooses tokens per head, which frees no page of a paged cache. Sharing the choice over the
//!   heads is also what grouped-query attention needs (FMInference/H2O issue 32).
//! - Mass per query that saw the block, in place of the raw sum: a sum favors what has been there
//!   longest (the reference code has the division, commented out; OpenVINO and kvpress divide).
//! - Older queries count less, halved every [`HALF_LIFE_QUERIES`]: what a text is about moves on, and a
//!   sum over everything ends up as an average that nothing new can change.
//! - The tail is the contract's number of tokens, not half of the budget.
//!
//! **Flaws.** It keeps what was attended to, which is not what will be: an item asked for once, at the
//! end, has no mass until then. Right after it is sealed a block is judged by queries near it, which look
//! at it more: in doubt the newer stays. Prefill in chunks decides after each chunk with what it saw. On
//! kvpress's RULER-4k it does worse than age order at every ratio; reasoning traces are where it wins
//! (arXiv 2512.12008).

use super::{EvictionPolicy, Observation, Protection, SequenceSummary, by_score};

/// Queries after which a query's attention counts half.
pub const HALF_LIFE_QUERIES: f32 = 512.0;

/// Drops the block with the least attention mass per query that saw it, per layer.
#[derive(Clone, Copy, Debug)]
pub struct H2o {
    /// Accepted tokens at the end that are never dropped.
    pub tail_tokens: usize,
}

impl EvictionPolicy for H2o {
    fn name(&self) -> &'static str {
        "h2o"
    }

    fn observes(&self) -> Observation {
        Observation::AttentionMass { decay: (-1.0 / HALF_LIFE_QUERIES).exp2() }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_counts_half_after_its_half_life() {
        let policy = H2o { tail_tokens: 0 };
        let Observation::AttentionMass { decay } = policy.observes() else { panic!() };
        assert!((decay.powf(HALF_LIFE_QUERIES) - 0.5).abs() < 1e-4);
    }
}
