//! What the engine tells of its work, declared once: callers, metrics, logs and tests read this stream.

use reef_kv::{ByFormat, Fidelity, KvUsage, LedgerEntry};

use crate::session::EngineError;

/// Something that happened to a request.
#[derive(Clone, Debug)]
pub struct Told {
    /// The request, as its caller named it.
    pub request: u64,
    /// What happened.
    pub event: Event,
}

/// What happens to a request, told as it happens.
#[derive(Clone, Debug)]
pub enum Event {
    /// It was not refused, and waits to be admitted. Told by [`EngineHandle`](crate::EngineHandle), whose
    /// caller cannot see it otherwise.
    Accepted,
    /// It was admitted for the first time.
    Admitted {
        /// Limit of generated tokens in force.
        max_tokens: usize,
        /// Prompt tokens whose KV was found in the prefix cache.
        cached_tokens: usize,
    },
    /// Part of the prompt is computed.
    Prefilled {
        /// Prompt tokens computed so far.
        tokens: usize,
        /// Prompt tokens.
        total: usize,
    },
    /// Log-probabilities of prompt tokens, in order, as they are computed.
    PromptLogprobs(Vec<TokenLogprobs>),
    /// A token was generated. Beams are told when the search ends.
    Token(Token),
    /// A continuation has ended, and others of its request go on. The end of the last is told by `Finished`;
    /// of beams all are.
    Ended {
        /// Index of the continuation.
        branch: u32,
        /// Why.
        reason: FinishReason,
    },
    /// A ledger grew.
    Relief(LedgerEntry),
    /// A branch gave way and stands still.
    Paused(Pause),
    /// A branch that stood still goes on.
    Resumed {
        /// The branch.
        branch: u32,
        /// Tokens that have to be computed again.
        recomputed_tokens: usize,
        /// Microseconds it stood still.
        paused_us: u64,
    },
    /// A step of the request's branch ended.
    Step {
        /// Its number.
        step: u64,
        /// Tokens of the branch computed so far, dropped ones included.
        tokens: usize,
        /// Bytes of pages in use in the whole pool.
        used: ByFormat<usize>,
        /// Microseconds that the step took, where the executor said so: an input to the engine's estimates.
        elapsed_us: Option<u64>,
    },
    /// The end; nothing follows.
    Finished(Box<Outcome>),
    /// It could not go on for a reason of its own (not for want of memory); nothing follows.
    Failed(std::sync::Arc<EngineError>),
}

/// One generated token.
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    /// Index of the continuation.
    pub branch: u32,
    /// Its id.
    pub id: u32,
    /// Where they were asked for.
    pub logprobs: Option<TokenLogprobs>,
    /// It ends the continuation: of its request nothing is told before that end. Never set of beams.
    pub is_last: bool,
}

/// Log-probability of a token, and the likeliest ones in its place.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// The token.
    pub id: u32,
    /// Natural logarithm of its probability, before temperature and penalties.
    pub logprob: f32,
    /// (token, log-probability), likeliest first.
    pub top: Vec<(u32, f32)>,
}

/// How a branch gave way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PauseKind {
    /// It keeps its memory and sits out steps.
    Wait,
    /// Its pages go to the spill store.
    Swap,
    /// Its pages are given back; what is not found in the prefix cache is computed again.
    Recompute,
}

impl PauseKind {
    /// Every kind.
    pub const ALL: [PauseKind; 3] = [PauseKind::Wait, PauseKind::Swap, PauseKind::Recompute];

    /// The name of the rung in JSON.
    pub fn name(self) -> &'static str {
        match self {
            PauseKind::Wait => "wait",
            PauseKind::Swap => "swap",
            PauseKind::Recompute => "recompute",
        }
    }
}

/// Why a branch gave way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PauseReason {
    /// The next step of running work did not fit.
    Demand,
    /// Somebody of higher priority came.
    Priority,
    /// Its tenant, or the batch class, was over its share.
    Quota,
    /// What it was swapped to could not be read: computed again.
    SpillFailure,
}

impl PauseReason {
    /// Every reason.
    pub const ALL: [PauseReason; 4] =
        [PauseReason::Demand, PauseReason::Priority, PauseReason::Quota, PauseReason::SpillFailure];

    /// The name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            PauseReason::Demand => "demand",
            PauseReason::Priority => "priority",
            PauseReason::Quota => "quota",
            PauseReason::SpillFailure => "spill_failure",
        }
    }
}

/// One time that a branch gave way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pause {
    /// The branch.
    pub branch: u32,
    /// Step before which it happened.
    pub step: u64,
    /// How.
    pub kind: PauseKind,
    /// Why.
    pub reason: PauseReason,
    /// Blocks that it held.
    pub blocks: usize,
    /// Bytes of pages that it gave back, or that are being stored.
    pub bytes: usize,
    /// Computed tokens that are thrown away (found again where the prefix cache still has them).
    pub lost_tokens: usize,
}

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// An end token or a stop string.
    Stop,
    /// The limit of tokens.
    Length,
    /// The caller asked.
    Cancelled,
    /// Its deadline passed.
    Deadline,
}

impl FinishReason {
    /// The name used in JSON.
    pub fn name(self) -> &'static str {
        match self {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
            FinishReason::Cancelled => "cancelled",
            FinishReason::Deadline => "deadline",
        }
    }
}

/// One continuation.
#[derive(Clone, Debug)]
pub struct Continuation {
    /// Generated token ids, without the end token.
    pub token_ids: Vec<u32>,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// Sum of the log-probabilities of its tokens (end token included for beams), where they were asked
    /// for or needed to choose.
    pub cumulative_logprob: Option<f64>,
    /// Of each token, where asked for.
    pub logprobs: Vec<TokenLogprobs>,
}

/// How a request ended.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// As many as were asked for, best first where they were ranked; fewer if it was cancelled early.
    pub continuations: Vec<Continuation>,
    /// What it took.
    pub usage: Usage,
}

/// What a request took.
#[derive(Clone, Debug)]
pub struct Usage {
    /// Prompt tokens.
    pub prompt_tokens: usize,
    /// Generated tokens of all branches.
    pub completion_tokens: usize,
    /// Prompt tokens found in the prefix cache at first admission; at most the prompt's.
    pub cached_tokens: usize,
    /// The contract.
    pub fidelity: Fidelity,
    /// Bytes of the pool.
    pub budget_bytes: usize,
    /// The limit of generated tokens that was in force.
    pub max_tokens_limit: usize,
    /// What the request's KV memory went through; of several branches, the sums.
    pub kv: KvUsage,
    /// Each time it stood still, oldest first.
    pub pauses: Vec<Pause>,
    /// Tokens computed more than once because they had been thrown away.
    pub recomputed_tokens: usize,
    /// Drafts proposed, and of these accepted.
    pub drafts: (usize, usize),
}
