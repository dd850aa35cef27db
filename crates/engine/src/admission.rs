//! Whether a request can be served, before it starts: bytes needed under its lowest permitted rung.

use reef_kv::page::PageFormat;
use reef_kv::{BlockPool, Fidelity, minimum_budget_bytes};

use crate::request::Request;

/// Why a request can never be served, with the numbers and the mend.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Nothing to continue.
    #[error("the prompt has no tokens: give at least one")]
    EmptyPrompt,
    /// A sampling value out of range.
    #[error("{0}")]
    Sampling(String),
    /// The prompt leaves no position of the trained context, and dropping is not permitted.
    #[error(
        "the prompt has {prompt} tokens and max_tokens is {max_tokens}, together more than the \
         model's trained context of {context}: shorten them, or permit `evict`, which goes on with \
         a part of the context"
    )]
    Context {
        /// Prompt tokens.
        prompt: usize,
        /// Tokens asked for, at least 1.
        max_tokens: usize,
        /// Trained context in tokens.
        context: usize,
    },
    /// The tokens do not fit the pool at the contract's floor.
    #[error(
        "{prompt} prompt tokens and {max_tokens} to generate need {needed_bytes} bytes of KV memory \
         at the floor of `{contract}` ({floor}), the budget is {budget_bytes}, which holds {capacity} \
         tokens: lower max_tokens, raise --kv-memory, or permit {next}"
    )]
    TooLarge {
        /// Prompt tokens.
        prompt: usize,
        /// Tokens asked for, at least 1.
        max_tokens: usize,
        /// Budget that would do.
        needed_bytes: usize,
        /// The contract's name.
        contract: &'static str,
        /// Smallest format it permits.
        floor: &'static str,
        /// Bytes of the pool.
        budget_bytes: usize,
        /// Tokens that fit.
        capacity: usize,
        /// The next looser contract's name.
        next: &'static str,
    },
    /// Even one block with what must stay does not fit.
    #[error(
        "the KV budget of {budget_bytes} bytes is below the {minimum_bytes} that `{contract}` needs \
         for its open blocks, first block, recent tail and re-encoding reserve: raise --kv-memory"
    )]
    BelowMinimum {
        /// Bytes of the pool.
        budget_bytes: usize,
        /// Bytes needed.
        minimum_bytes: usize,
        /// The contract's name.
        contract: &'static str,
    },
}

/// The limit of generated tokens for `request`, alone in `pool`.
///
/// # Errors
/// A [`Refusal`] if it can never be served; nothing was changed.
pub fn admit(pool: &BlockPool, context: usize, request: &Request) -> Result<usize, Refusal> {
    if request.prompt.is_empty() {
        return Err(Refusal::EmptyPrompt);
    }
    request.sampling.check().map_err(Refusal::Sampling)?;
    let contract = request.fidelity;
    let budget_bytes = pool.config().budget_bytes;
    let minimum_bytes = minimum_budget_bytes(pool.config(), contract);
    if budget_bytes < minimum_bytes {
        let contract = contract.name();
        return Err(Refusal::BelowMinimum { budget_bytes, minimum_bytes, contract });
    }
    let prompt = request.prompt.len();
    if contract == Fidelity::Evict {
        let rest = context.saturating_sub(prompt).max(1);
        return Ok(request.max_tokens.unwrap_or(rest));
    }
    let asked = request.max_tokens.unwrap_or(1).max(1);
    if prompt.saturating_add(asked) > context.saturating_add(1) {
        return Err(Refusal::Context { prompt, max_tokens: asked, context });
    }
    // The last generated token is never computed, so it takes no room.
    let capacity = pool.token_limit(contract).unwrap_or(context).min(context);
    if prompt + asked - 1 > capacity {
        return Err(too_large(pool, contract, prompt, asked, capacity));
    }
    Ok(request.max_tokens.unwrap_or(capacity - prompt + 1))
}

fn too_large(
    pool: &BlockPool,
    contract: Fidelity,
    prompt: usize,
    max_tokens: usize,
    capacity: usize,
) -> Refusal {
    let floor: PageFormat = pool.config().floor(contract);
    let next = match contract {
        Fidelity::Exact => "`int8`",
        _ => "`evict`",
    };
    Refusal::TooLarge {
        prompt,
        max_tokens,
        needed_bytes: pool.bytes_for_tokens(prompt + max_tokens - 1, floor, 1),
        contract: contract.name(),
        floor: floor.name(),
        budget_bytes: pool.config().budget_bytes,
        capacity,
        next,
    }
}
