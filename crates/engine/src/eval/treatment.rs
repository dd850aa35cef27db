//! What is done to a sequence's KV memory in a measurement.

use reef_kv::TAIL_TOKENS;
use reef_kv::page::PageFormat;
use reef_kv::policy::{self, PolicyOptions, UnknownPolicy};

use crate::session::Rules;

/// What is dropped, and how much is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Eviction {
    /// Name of the policy.
    pub policy: String,
    /// Most tokens kept, sinks and recent tail included; blocks go one at a time.
    pub budget_tokens: usize,
    /// Seed of a policy that draws lots.
    pub seed: u64,
}

/// What is done to a sequence's KV memory in a measurement. The default leaves it alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Treatment {
    /// Format of every sealed block.
    pub format: PageFormat,
    /// Tokens at the start that stay f16.
    pub sink_tokens: usize,
    /// Tokens at the end that stay f16.
    pub tail_tokens: usize,
    /// What is dropped, if anything.
    pub eviction: Option<Eviction>,
}

impl Default for Treatment {
    fn default() -> Treatment {
        Treatment { format: PageFormat::F16, sink_tokens: 0, tail_tokens: 0, eviction: None }
    }
}

impl Treatment {
    /// Every sealed block in `format`, nothing dropped.
    pub fn flat(format: PageFormat) -> Treatment {
        Treatment { format, ..Treatment::default() }
    }

    /// Whether it leaves KV memory as it is.
    pub fn is_plain(&self) -> bool {
        self.format == PageFormat::F16 && self.eviction.is_none()
    }

    /// Format, policy and budget in a few words: `int4`, `f16 sinks 512`.
    pub fn label(&self) -> String {
        let mut label = self.format.name().to_string();
        if let Some(Eviction { policy, budget_tokens, .. }) = &self.eviction {
            label = format!("{label} {policy} {budget_tokens}");
        }
        label
    }

    /// The rules that carry it out. Scored policies protect a recent tail of [`TAIL_TOKENS`], of a
    /// small budget a quarter.
    ///
    /// # Errors
    /// An unknown policy.
    pub fn rules(&self) -> Result<Rules, UnknownPolicy> {
        let mut rules = Rules {
            format_at_seal: self.format,
            sink_tokens: self.sink_tokens,
            tail_tokens: self.tail_tokens,
            token_budget: self.eviction.as_ref().map(|eviction| eviction.budget_tokens),
            ..Rules::default()
        };
        if let Some(Eviction { policy, budget_tokens, seed }) = &self.eviction {
            let tail_tokens = TAIL_TOKENS.min(budget_tokens / 4);
            let options = PolicyOptions { tail_tokens, seed: *seed };
            rules.policy = policy::by_name(policy, &options)?;
        }
        Ok(rules)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_name_what_differs() {
        assert_eq!(Treatment::flat(PageFormat::Int4).label(), "int4");
        let eviction = Eviction { policy: "sinks".into(), budget_tokens: 512, seed: 0 };
        let treatment = Treatment { eviction: Some(eviction), ..Treatment::default() };
        assert_eq!(treatment.label(), "f16 sinks 512");
        assert!(!treatment.is_plain() && Treatment::default().is_plain());
        assert_eq!(treatment.rules().unwrap().token_budget, Some(512));
    }
}
