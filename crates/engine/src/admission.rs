//! Whether a request can be served, before it starts: bytes needed under its lowest permitted rung.

use reef_kv::admission::Need;
use reef_kv::page::PageFormat;
use reef_kv::{BlockPool, Fidelity, PoolConfig, Rung, TAIL_TOKENS, minimum_budget_bytes};

use crate::config::EngineConfig;
use crate::executor::ExecutorFacts;
use crate::request::{Branches, Request};
use crate::session::Rules;

/// Why a request can never be served, with the numbers and the mend.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Nothing to continue.
    #[error("the prompt has no tokens: give at least one")]
    EmptyPrompt,
    /// A value out of range; says which, and the mend.
    #[error("{0}")]
    Field(String),
    /// A token the model does not know.
    #[error("token id {token} is outside the vocabulary of {vocabulary}")]
    Token {
        /// The id.
        token: u32,
        /// Vocabulary size.
        vocabulary: usize,
    },
    /// A key that a request which goes on has.
    #[error("request key {key} is in use: choose another, or wait until its request has ended")]
    DuplicateKey {
        /// The key.
        key: u64,
    },
    /// Too many wait.
    #[error(
        "{waiting} requests are waiting, at most {most} may: try again later, or raise max_waiting"
    )]
    QueueFull {
        /// Requests waiting.
        waiting: usize,
        /// The limit.
        most: usize,
    },
    /// More than the tenant may hold, even at the contract's floor.
    #[error(
        "the request needs {needed_bytes} bytes of KV memory at the floor of its contract, the quota of \
         tenant `{tenant}` is {quota_bytes}: lower max_tokens, permit more, or raise the quota"
    )]
    Quota {
        /// The tenant's name.
        tenant: String,
        /// Bytes needed.
        needed_bytes: usize,
        /// Bytes of the quota.
        quota_bytes: usize,
    },
    /// The prompt leaves no position of the trained context, and dropping is not permitted. (Its first words
    /// are OpenAI's, by which clients such as litellm know the case.)
    #[error(
        "this model's maximum context length is {context} tokens, as it was trained; the prompt has \
         {prompt} tokens and max_tokens is {max_tokens}: shorten them, or permit `evict` (contract and \
         ladder), which goes on with a part of the context"
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
    /// One branch fits, all of them together do not.
    #[error(
        "{branches} branches need {needed_bytes} bytes of KV memory together at the floor of \
         `{contract}`, the budget is {budget_bytes}, which holds {most}: lower n (best_of, beams) or \
         max_tokens, or raise --kv-memory"
    )]
    Branches {
        /// Branches asked for.
        branches: usize,
        /// Bytes of their pages.
        needed_bytes: usize,
        /// The contract's name.
        contract: &'static str,
        /// Bytes of the pool.
        budget_bytes: usize,
        /// Branches that fit.
        most: usize,
    },
    /// What may not be dropped does not fit.
    #[error(
        "keep: the blocks of these spans, with the first block and the recent ones, are {tokens} tokens and \
         need {needed_bytes} bytes of KV memory at the floor of `{contract}`, the budget is \
         {budget_bytes}: keep fewer tokens, or raise --kv-memory"
    )]
    Kept {
        /// Tokens of the blocks that stay.
        tokens: usize,
        /// Bytes of their pages.
        needed_bytes: usize,
        /// The contract's name.
        contract: &'static str,
        /// Bytes of the pool.
        budget_bytes: usize,
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

/// The limit of generated tokens for `request`, alone in `pool`, under `config`.
///
/// # Errors
/// A [`Refusal`] if it can never be served; nothing was changed.
pub fn admit(
    pool: &BlockPool,
    config: &EngineConfig,
    facts: ExecutorFacts,
    request: &Request,
) -> Result<usize, Refusal> {
    check_fields(config, facts, request)?;
    let rules = &config.rules;
    let contract = request.fidelity;
    check_rules(rules, pool.config(), contract)?;
    let budget_bytes = pool.config().budget_bytes;
    let minimum_bytes = minimum_budget_bytes(pool.config(), contract);
    if budget_bytes < minimum_bytes {
        let contract = contract.name();
        return Err(Refusal::BelowMinimum { budget_bytes, minimum_bytes, contract });
    }
    let (prompt, context) = (request.prompt.len(), facts.trained_context);
    // Beams run side by side and share blocks, which are not dropped: they must fit as they are.
    let beams = matches!(request.branches, Branches::Beams { .. });
    if pool.config().ladder.permits(contract, Rung::Evict) && !beams {
        check_what_stays(pool, config, request)?;
        let rest = context.saturating_sub(prompt).max(1);
        return Ok(request.max_tokens.unwrap_or(rest));
    }
    let asked = request.max_tokens.unwrap_or(1).max(1);
    if prompt.saturating_add(asked) > context.saturating_add(1) {
        return Err(Refusal::Context { prompt, max_tokens: asked, context });
    }
    let held = |tokens: usize| {
        let needs = needs_alone(pool, rules, request, tokens);
        pool.fits_together(needs.clone()) && over_quota(config, request, pool, needs).is_none()
    };
    let needs = needs_alone(pool, rules, request, asked);
    if !pool.fits_together(needs.clone()) {
        return Err(too_large(pool, rules, request, asked));
    }
    if let Some(refusal) = over_quota(config, request, pool, needs) {
        return Err(refusal);
    }
    let most = (context + 1).saturating_sub(prompt);
    Ok(request.max_tokens.unwrap_or_else(|| most_tokens(most, held)))
}

/// Where blocks may be dropped, what may not be must fit: kept spans, the first block, the recent ones.
/// (Branches wait for each other.)
fn check_what_stays(
    pool: &BlockPool,
    config: &EngineConfig,
    request: &Request,
) -> Result<(), Refusal> {
    let block = pool.config().block_size();
    let recent = (1 + TAIL_TOKENS.div_ceil(block)) * block;
    let all = request.prompt.len().saturating_add(request.max_tokens.unwrap_or(usize::MAX));
    let tokens = (kept_blocks(request, block) * block + recent).min(all);
    let floor = floor(pool, &config.rules, request.fidelity);
    let need = Need { tokens, floor, step_tokens: 1 };
    if !pool.fits_together([need]) {
        return Err(Refusal::Kept {
            tokens,
            needed_bytes: pool.page_bytes(need),
            contract: request.fidelity.name(),
            budget_bytes: pool.config().budget_bytes,
        });
    }
    over_quota(config, request, pool, [need].into_iter()).map_or(Ok(()), Err)
}

/// Blocks of `block` tokens in which a kept token is, and the first.
fn kept_blocks(request: &Request, block: usize) -> usize {
    let mut spans: Vec<_> =
        request.keep.iter().map(|span| span.start / block..span.end.div_ceil(block)).collect();
    spans.push(0..1);
    spans.sort_by_key(|span| span.start);
    let (mut blocks, mut end) = (0, 0);
    for span in spans {
        blocks += span.end.saturating_sub(span.start.max(end));
        end = end.max(span.end);
    }
    blocks
}

/// The largest number up to `most` for which `holds`, which is true of all below it; 0 where none.
fn most_tokens(most: usize, holds: impl Fn(usize) -> bool) -> usize {
    let (mut good, mut bad) = (0, most + 1);
    while bad - good > 1 {
        let middle = good + (bad - good) / 2;
        if holds(middle) { good = middle } else { bad = middle }
    }
    good
}

/// What the branches of `request` take alone, each with `generated` tokens of its own. The last generated
/// token is never computed, so it takes no room.
fn needs_alone(
    pool: &BlockPool,
    rules: &Rules,
    request: &Request,
    generated: usize,
) -> impl Iterator<Item = Need> + Clone + use<> {
    let floor = floor(pool, rules, request.fidelity);
    let need = move |tokens: usize| Need { tokens: tokens.max(1), floor, step_tokens: 1 };
    // Besides what it generates, a branch has a copy of the block in which the prompt ends.
    let of_branch = need(generated + pool.config().block_size());
    let branches = std::iter::repeat_n(of_branch, request.branches.width() - 1);
    std::iter::once(need(request.prompt.len() + generated - 1)).chain(branches)
}

fn check_fields(
    config: &EngineConfig,
    facts: ExecutorFacts,
    request: &Request,
) -> Result<(), Refusal> {
    if request.prompt.is_empty() {
        return Err(Refusal::EmptyPrompt);
    }
    let vocabulary = facts.vocabulary;
    if let Some(&token) = request.prompt.iter().find(|token| **token as usize >= vocabulary) {
        return Err(Refusal::Token { token, vocabulary });
    }
    request.sampling.check().map_err(Refusal::Field)?;
    let (width, given) = (request.branches.width(), request.branches.given());
    let most = config.scheduling.max_running;
    let field = |text: String| Err(Refusal::Field(text));
    let bias = request.sampling.logit_bias.iter();
    if let Some((token, _)) = bias.into_iter().find(|(token, _)| *token as usize >= vocabulary) {
        return field(format!(
            "logit_bias: token id {token} is outside the vocabulary of {vocabulary}"
        ));
    }
    if width == 0 || given == 0 || given > width {
        return field(format!("n is {given} of {width} branches: give 1 <= n <= best_of or beams"));
    }
    if width > most {
        return field(format!("{width} branches are more than the {most} sequences that may run"));
    }
    if request.tenant >= config.tenants.len() {
        let (tenant, count) = (request.tenant, config.tenants.len());
        return field(format!("tenant {tenant} is unknown: there are {count}"));
    }
    let beams = matches!(request.branches, Branches::Beams { .. });
    if request.max_tokens == Some(0) && (beams || width > 1) {
        return field("max_tokens is 0: give at least 1 where branches are asked for".into());
    }
    if beams && (request.constraint.is_some() || request.logprobs.is_some()) {
        return field(
            "beams go with neither a constraint nor logprobs: use n in their place".into(),
        );
    }
    let total = request.prompt.len().saturating_add(request.max_tokens.unwrap_or(usize::MAX));
    if let Some(span) = request.keep.iter().find(|span| span.is_empty() || span.end > total) {
        return field(format!("keep: {span:?} is empty or past the request's {total} tokens"));
    }
    Ok(())
}

/// The refusal of what the tenant's quota does not bear.
fn over_quota(
    config: &EngineConfig,
    request: &Request,
    pool: &BlockPool,
    needs: impl Iterator<Item = Need>,
) -> Option<Refusal> {
    let tenant = &config.tenants[request.tenant];
    let quota_bytes = tenant.quota_bytes?;
    let needed_bytes = needs.map(|need| pool.page_bytes(need)).sum();
    let tenant = tenant.name.clone();
    (needed_bytes > quota_bytes).then_some(Refusal::Quota { tenant, needed_bytes, quota_bytes })
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

/// The refusal of `needs`, of which the first alone fits.
fn too_many(
    pool: &BlockPool,
    request: &Request,
    needs: impl Iterator<Item = Need> + Clone,
) -> Refusal {
    let branches = request.branches.width();
    Refusal::Branches {
        branches,
        needed_bytes: needs.clone().map(|need| pool.page_bytes(need)).sum(),
        contract: request.fidelity.name(),
        budget_bytes: pool.config().budget_bytes,
        most: most_tokens(branches, |most| pool.fits_together(needs.clone().take(most))),
    }
}

/// The refusal of a request that does not fit with `max_tokens` on every branch.
fn too_large(pool: &BlockPool, rules: &Rules, request: &Request, max_tokens: usize) -> Refusal {
    let needs = needs_alone(pool, rules, request, max_tokens);
    if pool.fits_together(needs.clone().take(1)) {
        return too_many(pool, request, needs);
    }
    let (prompt, contract) = (request.prompt.len(), request.fidelity);
    let floor = floor(pool, rules, contract);
    let holds = |looser: &Fidelity| {
        let most = capacity(pool, rules, *looser);
        *looser > contract && most.is_none_or(|most| prompt + max_tokens - 1 <= most)
    };
    let next = Fidelity::ALL.into_iter().find(holds);
    let fits = |tokens: usize| pool.fits(tokens, floor, 1);
    Refusal::TooLarge {
        prompt,
        max_tokens,
        needed_bytes: pool.budget_for_tokens(prompt + max_tokens - 1, floor, 1),
        contract: contract.name(),
        floor: floor.name(),
        budget_bytes: pool.config().budget_bytes,
        capacity: most_tokens(prompt + max_tokens - 1, fits),
        next: next.map_or("more rungs (--ladder)".into(), |next| format!("`{}`", next.name())),
    }
}
