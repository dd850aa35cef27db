//! Whether a request can be served, before it starts: bytes needed under its lowest permitted rung.

use reef_kv::page::PageFormat;
use reef_kv::{BlockPool, Fidelity, PoolConfig, Rung, minimum_budget_bytes};

use crate::request::Request;
use crate::session::Rules;

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
         model's trained context of {context}: shorten them, or permit `evict` (contract and ladder), \
         which goes on with a part of the context"
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
        /// The strictest contract under which it would fit, or what else would help.
        next: String,
    },
    /// A format at seal that the contract does not permit.
    #[error(
        "every sealed block is to be {format}, which `{contract}` does not permit: use --kv-format f16, \
         or permit `{needs}`"
    )]
    Format {
        /// The format at seal.
        format: &'static str,
        /// The contract's name.
        contract: &'static str,
        /// The strictest contract that permits the format.
        needs: &'static str,
    },
    /// A limit of kept tokens under a contract or a ladder that drops none.
    #[error(
        "at most {tokens} tokens are to be kept, but {what} drops none: lift the limit, or permit `evict`"
    )]
    TokenBudget {
        /// The limit in tokens.
        tokens: usize,
        /// What stands in the way: the contract or the ladder.
        what: String,
    },
    /// A limit of kept tokens below what the policy never drops.
    #[error(
        "at most {tokens} tokens are to be kept, but policy `{policy}` needs {least}: what it never drops \
         and the block being computed; raise the limit"
    )]
    TokenBudgetTooSmall {
        /// The limit in tokens.
        tokens: usize,
        /// The policy's name.
        policy: &'static str,
        /// Tokens needed.
        least: usize,
    },
    /// A pinned layer that the model does not have.
    #[error("pinned layer {layer} is not one of the model's {layers} layers: name layers from 0")]
    PinnedLayer {
        /// The layer asked for.
        layer: usize,
        /// Layers of the model.
        layers: usize,
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

/// Checks that the treatment asked for by `rules` is one that `contract` permits and the pool's ladder
/// has a rung for: nothing that was asked for is quietly left undone.
///
/// # Errors
/// A [`Refusal`] that names the two and the mend.
pub fn check_rules(rules: &Rules, config: &PoolConfig, contract: Fidelity) -> Result<(), Refusal> {
    let format = rules.format_at_seal;
    if !contract.permits_format(format) {
        let permits = |looser: &Fidelity| looser.permits_format(format);
        let needs = Fidelity::ALL.into_iter().find(permits).unwrap_or(Fidelity::Evict).name();
        return Err(Refusal::Format { format: format.name(), contract: contract.name(), needs });
    }
    let Some(tokens) = rules.token_budget else { return Ok(()) };
    if !contract.permits(Rung::Evict) {
        return Err(Refusal::TokenBudget { tokens, what: format!("`{}`", contract.name()) });
    }
    if !config.ladder.permits(contract, Rung::Evict) {
        return Err(Refusal::TokenBudget { tokens, what: "a ladder without `evict`".into() });
    }
    let least = rules.protected_tokens(config.block_size()) + config.block_size();
    if tokens < least {
        let policy = rules.policy.name();
        return Err(Refusal::TokenBudgetTooSmall { tokens, policy, least });
    }
    Ok(())
}

/// The limit of generated tokens for `request`, alone in `pool`, under `rules`.
///
/// # Errors
/// A [`Refusal`] if it can never be served; nothing was changed.
pub fn admit(
    pool: &BlockPool,
    rules: &Rules,
    context: usize,
    request: &Request,
) -> Result<usize, Refusal> {
    if request.prompt.is_empty() {
        return Err(Refusal::EmptyPrompt);
    }
    request.sampling.check().map_err(Refusal::Sampling)?;
    let contract = request.fidelity;
    check_rules(rules, pool.config(), contract)?;
    let budget_bytes = pool.config().budget_bytes;
    let minimum_bytes = minimum_budget_bytes(pool.config(), contract);
    if budget_bytes < minimum_bytes {
        let contract = contract.name();
        return Err(Refusal::BelowMinimum { budget_bytes, minimum_bytes, contract });
    }
    let prompt = request.prompt.len();
    if pool.config().ladder.permits(contract, Rung::Evict) {
        let rest = context.saturating_sub(prompt).max(1);
        return Ok(request.max_tokens.unwrap_or(rest));
    }
    let asked = request.max_tokens.unwrap_or(1).max(1);
    if prompt.saturating_add(asked) > context.saturating_add(1) {
        return Err(Refusal::Context { prompt, max_tokens: asked, context });
    }
    // The last generated token is never computed, so it takes no room.
    let capacity = capacity(pool, rules, contract).unwrap_or(context).min(context);
    if prompt + asked - 1 > capacity {
        return Err(too_large(pool, rules, contract, (prompt, asked), capacity));
    }
    Ok(request.max_tokens.unwrap_or(capacity - prompt + 1))
}

/// The format that every sealed block of `contract` can be in.
fn floor(pool: &BlockPool, rules: &Rules, contract: Fidelity) -> PageFormat {
    let floor = pool.config().floor(contract);
    // Sealed blocks that the rules keep in f16 only the ladder brings down.
    let all_at_seal = rules.sink_tokens == 0 && rules.tail_tokens == 0;
    if all_at_seal { floor.max(rules.format_at_seal) } else { floor }
}

/// Most tokens of `contract` that the pool holds; `None` where there is no limit.
fn capacity(pool: &BlockPool, rules: &Rules, contract: Fidelity) -> Option<usize> {
    match pool.config().ladder.permits(contract, Rung::Evict) {
        true => None,
        false => pool.capacity_tokens(floor(pool, rules, contract)),
    }
}

fn too_large(
    pool: &BlockPool,
    rules: &Rules,
    contract: Fidelity,
    (prompt, max_tokens): (usize, usize),
    capacity_tokens: usize,
) -> Refusal {
    let floor = floor(pool, rules, contract);
    let holds = |looser: &Fidelity| {
        let most = capacity(pool, rules, *looser);
        *looser > contract && most.is_none_or(|most| prompt + max_tokens - 1 <= most)
    };
    let next = Fidelity::ALL.into_iter().find(holds);
    Refusal::TooLarge {
        prompt,
        max_tokens,
        needed_bytes: pool.bytes_for_tokens(prompt + max_tokens - 1, floor, 1),
        contract: contract.name(),
        floor: floor.name(),
        budget_bytes: pool.config().budget_bytes,
        capacity: capacity_tokens,
        next: next.map_or("more rungs (--ladder)".into(), |next| format!("`{}`", next.name())),
    }
}
