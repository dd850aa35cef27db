//! What a request must give: what it gives alone in a roomy pool, without faults, cache, drafts or
//! anybody else.

use reef_engine::event::{Continuation, FinishReason, Outcome};
use reef_engine::request::Branches;

/// How an outcome agrees with the one of running alone.
#[derive(Clone, Debug, PartialEq)]
pub enum Agreement {
    /// It is the same.
    Whole,
    /// It was cut short, and is the same up to there.
    UpToTheCut,
    /// It was cut short where nothing can be compared.
    NotComparable,
    /// It is different.
    Differs(String),
}

/// Compares `outcome` with `alone`. `cut`: its caller or its deadline may have ended it.
pub fn compare(branches: Branches, outcome: &Outcome, alone: &Outcome, cut: bool) -> Agreement {
    let same = outcome.continuations.len() == alone.continuations.len()
        && outcome
            .continuations
            .iter()
            .zip(&alone.continuations)
            .all(|(one, other)| equal(one, other));
    if same {
        return Agreement::Whole;
    }
    if !cut {
        return Agreement::Differs(difference(outcome, alone));
    }
    let [one] = &outcome.continuations[..] else { return Agreement::NotComparable };
    let ended = |reason| {
        matches!(reason, FinishReason::Cancelled | FinishReason::Deadline | FinishReason::Stop)
    };
    if branches != Branches::One || !ended(one.finish_reason) {
        return Agreement::NotComparable;
    }
    let whole = &alone.continuations[0];
    let prefix = whole.token_ids.starts_with(&one.token_ids)
        && one.logprobs.iter().zip(&whole.logprobs).all(|(one, other)| one == other);
    if prefix { Agreement::UpToTheCut } else { Agreement::Differs(difference(outcome, alone)) }
}

fn equal(one: &Continuation, other: &Continuation) -> bool {
    let bits = |sum: Option<f64>| sum.map(f64::to_bits);
    one.token_ids == other.token_ids
        && one.finish_reason == other.finish_reason
        && one.logprobs == other.logprobs
        && bits(one.cumulative_logprob) == bits(other.cumulative_logprob)
}

fn difference(outcome: &Outcome, alone: &Outcome) -> String {
    let show = |outcome: &Outcome| {
        let one = |c: &Continuation| {
            format!("{:?} {} {:?}", c.token_ids, c.finish_reason.name(), c.cumulative_logprob)
        };
        outcome.continuations.iter().map(one).collect::<Vec<_>>().join("; ")
    };
    format!("got [{}], alone [{}]", show(outcome), show(alone))
}
