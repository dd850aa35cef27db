//! Which blocks to drop first: one contract, one file per policy.
//!
//! Policies act on full-attention groups only and on whole blocks (kv-memory point 13): a page holds all
//! KV heads of a layer, and a head's own choice of tokens would free no page. They only rank; what must
//! not go (the first block, the recent tail, spans that the client marked, shared and open blocks) is
//! taken out before they are asked.

mod h2o;
mod keydiff;
mod random;
mod sinks;
mod tova;
mod window;

pub use h2o::H2o;
pub use keydiff::KeyDiff;
pub use random::Random;
pub use sinks::Sinks;
pub use tova::Tova;
pub use window::Window;

use crate::config::TAIL_TOKENS;

/// What a policy needs to be told at each step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Observation {
    /// Nothing: it costs nothing.
    Nothing,
    /// The attention mass of each page (`Sequence::observe_masses`).
    AttentionMass {
        /// Factor, 0 to 1, by which a query's mass counts less with each later query. 1: a plain sum;
        /// 0: the last query alone.
        decay: f32,
    },
    /// A score of the keys of each block when it is full (`Sequence::observe_keys`).
    Keys,
}

/// Which blocks a policy never gets to rank; shared blocks never, whatever the policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protection {
    /// The first block (its first tokens are attention sinks), blocks with a token among the last
    /// `tail_tokens`, blocks with a token of a marked span (`Sequence::keep`), open blocks.
    SinksTailAndKept {
        /// Accepted tokens at the end that stay; 0 protects only what is open.
        tail_tokens: usize,
    },
    /// Open blocks only: for controls.
    OpenBlocksOnly,
}

/// One block that may be dropped, in one layer where the policy chooses per layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BlockSummary {
    /// Original position of its first token.
    pub first: usize,
    /// What was observed of it: attention mass per query that saw it, summed over the layer's query
    /// heads, or the score of its keys. 0 where nothing was observed. Where the policy chooses per
    /// sequence: the mean over all layers.
    pub score: f32,
}

/// The blocks of a sequence, or of one of its layers, that may be dropped, oldest first.
#[derive(Clone, Copy, Debug)]
pub struct SequenceSummary<'a> {
    /// The blocks.
    pub blocks: &'a [BlockSummary],
    /// Tokens of a block.
    pub block_size: usize,
    /// Accepted tokens of the sequence, dropped ones included: the next token's original position.
    pub next_position: usize,
}

/// Says in what order blocks may be dropped.
pub trait EvictionPolicy: Send + Sync {
    /// The name on the command line.
    fn name(&self) -> &'static str;

    /// What it wants to be told.
    fn observes(&self) -> Observation {
        Observation::Nothing
    }

    /// Which blocks are not to be ranked.
    fn protection(&self) -> Protection;

    /// Whether each layer makes its own choice. It then costs a list of runs per layer past the trained
    /// context.
    fn per_layer(&self) -> bool {
        false
    }

    /// Original first positions of the given blocks, the first to go first. Blocks not named stay.
    fn order(&self, sequence: &SequenceSummary<'_>) -> Vec<usize>;
}

/// The given blocks as they are: oldest first.
fn by_age(sequence: &SequenceSummary<'_>) -> Vec<usize> {
    sequence.blocks.iter().map(|block| block.first).collect()
}

/// Lowest score first, the older of equals first. Where any score is not finite none is trusted: then,
/// as where all are equal, it is age order, the safe one.
fn by_score(sequence: &SequenceSummary<'_>) -> Vec<usize> {
    let mut ranked: Vec<&BlockSummary> = sequence.blocks.iter().collect();
    if ranked.iter().all(|block| block.score.is_finite()) {
        // Stable. Zeros of both signs are equal; no score is NaN here.
        let order = |a: &&BlockSummary, b: &&BlockSummary| a.score.partial_cmp(&b.score);
        ranked.sort_by(|a, b| order(a, b).unwrap_or(std::cmp::Ordering::Equal));
    }
    ranked.iter().map(|block| block.first).collect()
}

/// What policies can be told from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PolicyOptions {
    /// Accepted tokens at the end that stay, where the policy protects a tail.
    pub tail_tokens: usize,
    /// Seed of the `random` policy.
    pub seed: u64,
}

impl Default for PolicyOptions {
    fn default() -> PolicyOptions {
        PolicyOptions { tail_tokens: TAIL_TOKENS, seed: 0 }
    }
}

/// The names that [`by_name`] knows, the default first.
pub const NAMES: [&str; 6] = ["sinks", "window", "h2o", "tova", "keydiff", "random"];

/// The policy of that name.
///
/// # Errors
/// An unknown name.
pub fn by_name(
    name: &str,
    options: &PolicyOptions,
) -> Result<Box<dyn EvictionPolicy>, UnknownPolicy> {
    let PolicyOptions { tail_tokens, seed } = *options;
    match name {
        "sinks" => Ok(Box::new(Sinks { tail_tokens })),
        "window" => Ok(Box::new(Window)),
        "h2o" => Ok(Box::new(H2o { tail_tokens })),
        "tova" => Ok(Box::new(Tova { tail_tokens })),
        "keydiff" => Ok(Box::new(KeyDiff { tail_tokens })),
        "random" => Ok(Box::new(Random { seed })),
        _ => Err(UnknownPolicy(name.to_string())),
    }
}

/// A policy's name that is none.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("policy `{0}` is unknown: use sinks, window, h2o, tova, keydiff or random")]
pub struct UnknownPolicy(String);

#[cfg(test)]
mod tests {
    use super::*;

    fn order(scores: &[f32], policy: &dyn EvictionPolicy) -> Vec<usize> {
        let block = |(index, &score)| BlockSummary { first: 32 * index, score };
        let blocks: Vec<BlockSummary> = scores.iter().enumerate().map(block).collect();
        policy.order(&SequenceSummary { blocks: &blocks, block_size: 32, next_position: 4096 })
    }

    #[test]
    fn every_name_is_a_policy_and_no_other_is() {
        let options = PolicyOptions::default();
        for name in NAMES {
            assert_eq!(by_name(name, &options).map(|policy| policy.name()), Ok(name));
            assert!(UnknownPolicy(String::new()).to_string().contains(name));
        }
        let error = by_name("snapkv", &options).err().map(|error| error.to_string());
        assert!(error.is_some_and(|text| text.contains("`snapkv` is unknown")));
    }

    #[test]
    fn scorers_drop_the_lowest_score_and_are_age_order_where_scores_are_bad() {
        let options = PolicyOptions { tail_tokens: 0, seed: 0 };
        for name in ["h2o", "tova", "keydiff"] {
            let policy = by_name(name, &options).unwrap();
            assert!(policy.per_layer() && policy.observes() != Observation::Nothing);
            assert_eq!(order(&[0.5, -0.25, 0.125, 0.5], &*policy), [32, 64, 0, 96]);
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                assert_eq!(order(&[0.5, 0.25, bad, 0.125], &*policy), [0, 32, 64, 96]);
            }
            for equal in [[0.25; 4], [0.0, -0.0, 0.0, -0.0]] {
                assert_eq!(order(&equal, &*policy), [0, 32, 64, 96]);
            }
        }
    }

    #[test]
    fn controls_protect_open_blocks_only_and_look_at_nothing() {
        for name in ["window", "random"] {
            let policy = by_name(name, &PolicyOptions::default()).unwrap();
            assert_eq!(policy.protection(), Protection::OpenBlocksOnly);
            assert_eq!(policy.observes(), Observation::Nothing);
            assert!(!policy.per_layer());
        }
        let protection = Protection::SinksTailAndKept { tail_tokens: 7 };
        for name in ["sinks", "h2o", "tova", "keydiff"] {
            let options = PolicyOptions { tail_tokens: 7, seed: 0 };
            assert_eq!(by_name(name, &options).unwrap().protection(), protection);
        }
    }
}
