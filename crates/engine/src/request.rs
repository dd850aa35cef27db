//! What is asked of the engine.

use std::ops::Range;

use reef_kv::Fidelity;

use crate::constraint::Constraint;
use crate::sampler::Sampling;

/// One request to generate text.
#[derive(Clone, Debug)]
pub struct Request {
    /// Token ids of the prompt, at least one.
    pub prompt: Vec<u32>,
    /// Most tokens to generate; `None` = what fits alone at the contract's floor, at most the trained
    /// context less the prompt.
    pub max_tokens: Option<usize>,
    /// What may be done to the request's KV.
    pub fidelity: Fidelity,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Token ids that end the generation (and are not part of it).
    pub end_ids: Vec<u32>,
    /// What is wanted beside one continuation.
    pub branches: Branches,
    /// Higher goes first and gives way last; equals never displace each other. Below 0: batch work, which
    /// stays within its share of the pool.
    pub priority: i32,
    /// Whose it is: an index into the engine's tenants.
    pub tenant: usize,
    /// The engine's time in microseconds at which it is ended wherever it is.
    pub deadline_us: Option<u64>,
    /// Spans of positions that are not dropped, such as the client's instructions.
    pub keep: Vec<Range<usize>>,
    /// Report the log-probability of each generated token and of this many likeliest ones.
    pub logprobs: Option<usize>,
    /// The same of each prompt token but the first; its prompt is then computed whole, whatever is cached.
    pub prompt_logprobs: Option<usize>,
    /// What tokens a grammar allows.
    pub constraint: Option<Box<dyn Constraint>>,
    /// Whether drafts may be tried; the output is the same with and without.
    pub speculate: bool,
    /// Whether its blocks may be found by others of its tenant, and theirs by it.
    pub use_prefix_cache: bool,
}

impl Request {
    /// A greedy request for one continuation of `prompt`, with everything else at its default.
    pub fn new(prompt: Vec<u32>, fidelity: Fidelity) -> Request {
        Request {
            prompt,
            max_tokens: None,
            fidelity,
            sampling: Sampling::default(),
            end_ids: Vec::new(),
            branches: Branches::One,
            priority: 0,
            tenant: 0,
            deadline_us: None,
            keep: Vec::new(),
            logprobs: None,
            prompt_logprobs: None,
            constraint: None,
            speculate: true,
            use_prefix_cache: true,
        }
    }
}

/// How many continuations, and how they are found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Branches {
    /// One.
    One,
    /// `best_of` sampled side by side (seeds `seed`, `seed + 1`, ...), the `n` likeliest by mean
    /// log-probability are given.
    Sample {
        /// Continuations given, at least 1.
        n: usize,
        /// Continuations sampled, at least `n`.
        best_of: usize,
    },
    /// Beam search.
    Beams {
        /// Beams side by side, at least 1.
        width: usize,
        /// Continuations given, at most `width`.
        n: usize,
        /// Scores are divided by length to this power.
        length_penalty: f32,
        /// End as soon as `width` continuations have ended, rather than when no better can come.
        early_stopping: bool,
    },
}

impl Branches {
    /// Sequences side by side.
    pub fn width(self) -> usize {
        match self {
            Branches::One => 1,
            Branches::Sample { best_of, .. } => best_of,
            Branches::Beams { width, .. } => width,
        }
    }

    /// Whether the continuations to be given are chosen only when all have ended.
    pub fn is_ranked(self) -> bool {
        match self {
            Branches::One => false,
            Branches::Sample { n, best_of } => best_of > n,
            Branches::Beams { .. } => true,
        }
    }

    /// Continuations given.
    pub fn given(self) -> usize {
        match self {
            Branches::One => 1,
            Branches::Sample { n, .. } | Branches::Beams { n, .. } => n,
        }
    }
}
