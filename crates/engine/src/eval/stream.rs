//! A text without end in a fixed budget.

use reef_kv::BlockPool;
use reef_model::runner::ModelRunner;

use super::lanes::Lanes;
use crate::score::{RowScorer, TokenScore};
use crate::session::{EngineError, Session};

/// State after a block of the stream.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StreamState {
    /// Tokens computed so far.
    pub tokens: usize,
    /// Bytes of pages in use.
    pub used_bytes: usize,
    /// Tokens still held, by the layer that holds most.
    pub kept_tokens: usize,
    /// Whether kernels see relative positions: past the trained context.
    pub relative: bool,
}

/// Scores `ids` as one unbroken text under the first treatment of `lanes`, which must have a token
/// budget. `sink` hears every block: its scores (the first token of the text is not scored) and the
/// state after it.
///
/// # Errors
/// A token outside the vocabulary, a pinned layer that the model does not have, logits that are not
/// finite.
pub fn stream(
    runner: &mut ModelRunner,
    ids: &[u32],
    lanes: &Lanes<'_>,
    sink: &mut dyn FnMut(&[TokenScore], StreamState),
) -> Result<(), EngineError> {
    runner.check_tokens(ids)?;
    let pool: BlockPool = lanes.pool(runner, ids.len(), 0)?;
    let mut sessions = lanes.sessions(runner, &pool, ids.len());
    sessions.truncate(1);
    let mut scorer = RowScorer::new(1, false);
    let mut scores = Vec::with_capacity(lanes.block_size);
    for (block, chunk) in ids.chunks(lanes.block_size).enumerate() {
        Session::advance_all(runner, &mut sessions, chunk)?;
        let first = block * lanes.block_size;
        let targets = &ids[first + 1..ids.len().min(first + chunk.len() + 1)];
        scores.clear();
        scorer
            .score(runner, chunk.len(), targets, first + 1, &mut |_, scored| scores.push(scored))?;
        let sequence = sessions[0].sequence();
        let state = StreamState {
            tokens: first + chunk.len(),
            used_bytes: pool.accounts().used_bytes(),
            kept_tokens: sequence.kept_tokens(),
            relative: sequence.positions_are_relative(),
        };
        sink(&scores, state);
    }
    Ok(())
}
