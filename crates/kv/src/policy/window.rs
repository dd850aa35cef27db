//! The control: a bare window, which perplexity shows to be unstable once the first tokens are gone.

use super::{EvictionPolicy, SequenceSummary};

/// Drops the oldest sealed block, sinks included; protects only open blocks.
#[derive(Clone, Copy, Debug)]
pub struct Window;

impl EvictionPolicy for Window {
    fn name(&self) -> &'static str {
        "window"
    }

    fn order(&self, sequence: &SequenceSummary<'_>) -> Vec<usize> {
        sequence.blocks.iter().filter(|block| block.sealed).map(|block| block.first).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::BlockSummary;

    #[test]
    fn names_every_sealed_block_oldest_first() {
        let blocks: Vec<_> =
            (0..3).map(|i| BlockSummary { first: i * 16, sealed: i < 2 }).collect();
        let sequence = SequenceSummary { blocks: &blocks, block_size: 16, next_position: 40 };
        assert_eq!(Window.order(&sequence), [0, 16]);
    }
}
