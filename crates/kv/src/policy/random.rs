//! Random choice: a control.
//!
//! **Algorithm**: each block has a rank of its own, drawn from the seed and its position; the lowest
//! goes. A block's rank never changes, so the choice needs no state and does not depend on how often it
//! is asked for.
//!
//! **Flaws.** By design: it shows what a scorer's knowledge is worth. With a mean block age it keeps some
//! of everything, and on reasoning traces it is a strong baseline. The sinks go by chance too.

use super::{EvictionPolicy, Protection, SequenceSummary};

/// Drops blocks in an order that only the seed and their positions decide.
#[derive(Clone, Copy, Debug)]
pub struct Random {
    /// The same seed drops the same blocks.
    pub seed: u64,
}

/// SplitMix64's output function (Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
/// 2014): every bit of the result depends on every bit of `value`.
fn mixed(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

impl Random {
    fn rank(&self, first: usize) -> u64 {
        mixed(mixed(self.seed.wrapping_add(0x9e37_79b9_7f4a_7c15)) ^ first as u64)
    }
}

impl EvictionPolicy for Random {
    fn name(&self) -> &'static str {
        "random"
    }

    fn protection(&self) -> Protection {
        Protection::OpenBlocksOnly
    }

    fn order(&self, sequence: &SequenceSummary<'_>) -> Vec<usize> {
        let mut firsts: Vec<usize> = sequence.blocks.iter().map(|block| block.first).collect();
        firsts.sort_by_key(|&first| self.rank(first));
        firsts
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::BlockSummary;

    fn order(seed: u64, firsts: impl Iterator<Item = usize>) -> Vec<usize> {
        let blocks: Vec<_> = firsts.map(|first| BlockSummary { first, score: 0.0 }).collect();
        let sequence = SequenceSummary { blocks: &blocks, block_size: 32, next_position: 9999 };
        Random { seed }.order(&sequence)
    }

    #[test]
    fn the_seed_and_the_block_alone_decide() {
        let all = order(7, (0..64).map(|index| index * 32));
        assert_eq!(all, order(7, (0..64).map(|index| index * 32)));
        assert_ne!(all, order(8, (0..64).map(|index| index * 32)));
        // Whatever else is there.
        let odd: Vec<usize> = all.iter().copied().filter(|first| first / 32 % 2 == 1).collect();
        assert_eq!(odd, order(7, (0..32).map(|index| index * 64 + 32)));
    }

    /// Over many seeds each of 16 blocks goes first about equally often.
    #[test]
    fn no_block_is_preferred() {
        let mut first_to_go = [0; 16];
        (0..3200).for_each(|seed| {
            first_to_go[order(seed, (0..16).map(|index| index * 32))[0] / 32] += 1;
        });
        // 200 expected, standard deviation 14.
        assert!(first_to_go.iter().all(|count| (130..270).contains(count)), "{first_to_go:?}");
    }
}
