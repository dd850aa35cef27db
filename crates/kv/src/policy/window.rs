//! A bare sliding window: a control.
//!
//! **Algorithm**: drop the oldest block, whatever it is.
//!
//! **Flaws.** Once the first tokens are gone, attention has no sink and perplexity jumps (StreamingLLM,
//! arXiv 2309.17453, table 1: 5.4 to 5158 on Llama-2-13B; by how much depends on the model). It shows
//! what protecting the first block is worth; a model *trained* with a window has it in its own layers.

use super::{EvictionPolicy, Protection, SequenceSummary, by_age};

/// Drops the oldest sealed block, sinks and marked spans included.
#[derive(Clone, Copy, Debug)]
pub struct Window;

impl EvictionPolicy for Window {
    fn name(&self) -> &'static str {
        "window"
    }

    fn protection(&self) -> Protection {
        Protection::OpenBlocksOnly
    }

    fn order(&self, sequence: &SequenceSummary<'_>) -> Vec<usize> {
        by_age(sequence)
    }
}
