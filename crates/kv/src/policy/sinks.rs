//! StreamingLLM (arXiv 2309.17453): the first tokens and a recent tail stay, the oldest middle goes.

use super::{EvictionPolicy, SequenceSummary};

/// Keeps the first block (its first four tokens are the attention sinks) and the last `tail_tokens`.
#[derive(Clone, Copy, Debug)]
pub struct Sinks {
    /// Accepted tokens at the end that are never dropped; 0 protects only what is not sealed.
    pub tail_tokens: usize,
}

impl EvictionPolicy for Sinks {
    fn name(&self) -> &'static str {
        "sinks"
    }

    fn order(&self, sequence: &SequenceSummary<'_>) -> Vec<usize> {
        let tail_start = sequence.next_position.saturating_sub(self.tail_tokens);
        let middle = |first: usize| first > 0 && first + sequence.block_size <= tail_start;
        let blocks = sequence.blocks.iter().filter(|block| block.sealed && middle(block.first));
        blocks.map(|block| block.first).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::BlockSummary;

    #[test]
    fn protects_first_block_tail_and_open_block() {
        let blocks: Vec<_> =
            (0..8).map(|i| BlockSummary { first: i * 32, sealed: i < 7 }).collect();
        let sequence = SequenceSummary { blocks: &blocks, block_size: 32, next_position: 230 };
        assert_eq!(Sinks { tail_tokens: 128 }.order(&sequence), [32, 64]);
        assert_eq!(Sinks { tail_tokens: 0 }.order(&sequence), [32, 64, 96, 128, 160, 192]);
        let one = SequenceSummary { blocks: &blocks[..1], block_size: 32, next_position: 32 };
        assert!(Sinks { tail_tokens: 0 }.order(&one).is_empty());
    }
}
