//! What is asked of the engine and what it answers.

use crate::sampler::Sampling;
use reef_kv::{ByFormat, Fidelity, KvUsage, LedgerEntry};

/// One generation to run.
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
}

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// An end token or a stop string.
    Stop,
    /// The limit of tokens.
    Length,
    /// The caller asked.
    Cancelled,
}

impl FinishReason {
    /// The name used in JSON.
    pub fn name(self) -> &'static str {
        match self {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
            FinishReason::Cancelled => "cancelled",
        }
    }
}

/// A finished generation.
#[derive(Clone, Debug)]
pub struct Generation {
    /// Generated token ids, without the end token.
    pub token_ids: Vec<u32>,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// What it took.
    pub usage: Usage,
}

/// What a generation took.
#[derive(Clone, Debug)]
pub struct Usage {
    /// Prompt tokens.
    pub prompt_tokens: usize,
    /// The contract.
    pub fidelity: Fidelity,
    /// Bytes of the pool.
    pub budget_bytes: usize,
    /// The limit of generated tokens that was in force.
    pub max_tokens_limit: usize,
    /// What the request's KV memory went through.
    pub kv: KvUsage,
}

/// What happens during a generation, told as it happens.
#[derive(Clone, Copy, Debug)]
pub enum Event {
    /// The request was admitted with this limit of generated tokens.
    Admitted {
        /// Limit in tokens.
        max_tokens: usize,
    },
    /// Part of the prompt is computed.
    Prefilled {
        /// Prompt tokens computed so far.
        tokens: usize,
        /// Prompt tokens.
        total: usize,
    },
    /// A token was generated.
    Token(u32),
    /// The ledger grew.
    Relief(LedgerEntry),
    /// A step ended.
    Step {
        /// Its number.
        step: u64,
        /// Tokens computed so far, dropped ones included.
        tokens: usize,
        /// Bytes of pages in use.
        used: ByFormat<usize>,
    },
}
