//! What a sequence is told of its blocks: marks of the client, and what policies observe.

use std::ops::Range;

use super::Sequence;
use crate::keep::KeepError;
use crate::policy::Observation;

impl Sequence {
    /// Marks tokens that scored policies and `sinks` must not drop, such as the client's instructions:
    /// every block with a token in `span` (positions, of the prompt or still to come) stays from now on.
    /// What was dropped before does not come back.
    ///
    /// # Errors
    /// An empty span, one past the sequence's `max_tokens`, or more separate spans than
    /// [`MAXIMUM_SPANS`](crate::keep::MAXIMUM_SPANS); nothing is marked then.
    pub fn keep(&mut self, span: Range<usize>) -> Result<(), KeepError> {
        match self.config.max_tokens {
            Some(max_tokens) if span.end > max_tokens => {
                Err(KeepError::PastEnd { span, max_tokens })
            }
            _ => self.kept_spans.add(span),
        }
    }

    /// Whether a token of the block at `first` is marked to be kept.
    pub(crate) fn is_marked(&self, first: usize) -> bool {
        self.kept_spans.meets(first..first + self.block_size())
    }

    /// Tells the sequence what its last step's queries attended to in one layer, for policies that
    /// observe [`Observation::AttentionMass`]: `masses` is `[rows][pages]`, the attention probability of
    /// each page of [`view`](Self::view) summed over the layer's query heads, rows in order. To be called
    /// once a step and layer, before blocks are dropped; `decay` is the policy's.
    pub fn observe_masses(&mut self, group: usize, layer: usize, masses: &[f32], decay: f32) {
        let pages = self.view.groups[group].layers[layer].len();
        self.scores.observe_masses((group, layer), pages, masses, decay);
    }

    /// Sets the score of the page of the block at `first`, for policies that observe
    /// [`Observation::Keys`]: how unlike the layer's other keys its keys are. Ignored where the layer
    /// does not hold the block.
    pub fn observe_keys(&mut self, group: usize, layer: usize, first: usize, score: f32) {
        if let Some(index) = self.page_index(group, layer, first) {
            let pages = self.view.groups[group].layers[layer].len();
            self.scores.observe_keys((group, layer), pages, index, score);
        }
    }

    /// The running sum of a layer's unit keys, `[kv_heads * head_dim]`, zeros at first: what the kernel
    /// that scores keys compares with and adds to.
    pub fn key_anchor(&mut self, group: usize, layer: usize) -> &mut [f32] {
        let shape = self.pool.config().groups[group].shape;
        self.scores.key_anchor(group, layer, shape.kv_heads * shape.head_dim)
    }

    /// Score of page `index` of a layer's view; 0 where nothing was observed.
    pub(crate) fn score(&self, at: (usize, usize), index: usize, observation: Observation) -> f32 {
        let first = self.view.groups[at.0].layers[at.1][index].first as usize;
        self.scores.score(at, index, self.next_position.saturating_sub(first), observation)
    }
}
