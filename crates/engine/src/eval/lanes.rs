//! Several treatments side by side: sequences of one pool that are given the same tokens.

use reef_kv::{BlockPool, Fidelity, SequenceConfig};
use reef_model::runner::ModelRunner;

use crate::config::{roomy_config, with_pinned};
use crate::session::{EngineError, Rules, Session};

/// Several treatments of KV memory, computed in one batch: weights are read once for all, and a row's
/// bits do not depend on the batch, so a treatment's results do not depend on its neighbors.
#[derive(Clone, Copy)]
pub struct Lanes<'a> {
    /// Tokens of a block; as the runner was loaded with.
    pub block_size: usize,
    /// The treatments.
    pub treatments: &'a [Rules],
    /// Layers (index in the model) whose pages stay f16 under every treatment.
    pub pinned_layers: &'a [usize],
}

impl Lanes<'_> {
    /// A pool in which sequences of `tokens` tokens under every treatment, and `plain` untouched ones,
    /// never meet relief from demand.
    ///
    /// # Errors
    /// A layer that the model does not have; memory that the system does not give.
    pub fn pool(
        &self,
        runner: &ModelRunner,
        tokens: usize,
        plain: usize,
    ) -> Result<BlockPool, EngineError> {
        let open = 2 * self.block_size;
        let kept =
            |rules: &Rules| rules.token_budget.map_or(tokens, |most| most.min(tokens)) + open;
        let held = self.treatments.iter().map(kept).sum::<usize>() + plain * (tokens + open);
        let config = roomy_config(runner.spec(), self.block_size, held);
        Ok(BlockPool::new(with_pinned(config, runner.spec(), self.pinned_layers)?)?)
    }

    /// An empty sequence per treatment, of at most `tokens` tokens.
    pub fn sessions<'b>(
        &'b self,
        runner: &ModelRunner,
        pool: &'b BlockPool,
        tokens: usize,
    ) -> Vec<Session<'b>> {
        let of = |(index, rules)| Session::new(pool, rules, endless(runner, index, tokens));
        self.treatments.iter().enumerate().map(of).collect()
    }
}

/// Sequence number `index` of a pool, to which anything may be done.
pub(crate) fn endless(runner: &ModelRunner, index: usize, tokens: usize) -> SequenceConfig {
    SequenceConfig {
        request: index as u64,
        contract: Fidelity::Evict,
        priority: 0,
        trained_context: runner.spec().trained_context,
        max_tokens: Some(tokens),
    }
}
