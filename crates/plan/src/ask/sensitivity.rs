//! Which assumption moves an answer most: every input is varied by a fifth, the rest held.

use serde::Serialize;

use crate::ask::Decided;
use crate::ask::input::{Input, Value};

/// The share by which inputs are varied.
const FIFTH: f64 = 0.2;

/// What the answer does when one input changes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Sensitivity {
    /// Name of the input.
    pub input: &'static str,
    /// The input a fifth lower (whole numbers at least one lower), and the answer then.
    pub lower: Variation,
    /// The input a fifth higher, and the answer then.
    pub higher: Variation,
}

/// One change of an input.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Variation {
    /// The input's value.
    pub input: f64,
    /// The answer with it; `None` where the input leaves its limits or the formula has no answer.
    pub answer: Option<f64>,
    /// Change of the answer as a share of it.
    pub change: Option<f64>,
    /// The decision, where it is another one.
    pub decision: Option<String>,
}

impl Sensitivity {
    /// How strongly a fifth of the input moves the answer: a changed decision counts above every number.
    /// A whole number that cannot move by so little counts by its slope, and not for its decision.
    pub fn strength(&self, input: f64) -> f64 {
        let of = |variation: &Variation| {
            let moved = ((variation.input - input) / input).abs();
            let flips = variation.decision.is_some() || variation.answer.is_none();
            let flips = flips && moved <= 0.25;
            let slope = if moved > 0.25 { FIFTH / moved } else { 1.0 };
            variation.change.unwrap_or(0.0).abs() * slope + if flips { 1e6 } else { 0.0 }
        };
        of(&self.lower).max(of(&self.higher))
    }
}

/// Varies every input that is not fixed; `work` answers with one input replaced. Strongest first.
pub fn vary(
    inputs: &[(Input, Value)],
    base: &Decided,
    work: impl Fn(&'static str, f64) -> Option<Decided>,
) -> Vec<Sensitivity> {
    let mut found: Vec<(f64, Sensitivity)> = inputs
        .iter()
        .filter(|(input, _)| !input.is_fixed)
        .filter_map(|(input, value)| {
            let Value::Number(number) = value else { return None };
            let at = |factor: f64| variation(input, *number, factor, base, &work);
            let (lower, higher) = (at(1.0 - FIFTH)?, at(1.0 + FIFTH)?);
            let varied = Sensitivity { input: input.name, lower, higher };
            Some((varied.strength(*number), varied))
        })
        .filter(|(strength, _)| *strength > 1e-9)
        .collect();
    found.sort_by(|(a, _), (b, _)| b.total_cmp(a));
    found.into_iter().map(|(_, varied)| varied).collect()
}

fn variation(
    input: &Input,
    number: f64,
    factor: f64,
    base: &Decided,
    work: &impl Fn(&'static str, f64) -> Option<Decided>,
) -> Option<Variation> {
    let mut changed = number * factor;
    if input.is_whole {
        let step = (number * (factor - 1.0)).round();
        changed = number + if step == 0.0 { (factor - 1.0).signum() } else { step };
    }
    // At an end of its limits an input moves one way only.
    let changed = changed.clamp(input.limits.0, input.limits.1);
    if changed == number {
        return Some(Variation {
            input: changed,
            answer: Some(base.value),
            change: Some(0.0),
            decision: None,
        });
    }
    let decided = work(input.name, changed);
    let answer = decided.as_ref().map(|decided| decided.value);
    let share = |answer: f64| match base.value == 0.0 {
        true => (answer != 0.0).then_some(f64::INFINITY),
        false => Some((answer - base.value) / base.value.abs()),
    };
    let other = decided.filter(|decided| decided.decision != base.decision);
    let decision = other.and_then(|decided| decided.decision);
    Some(Variation { input: changed, answer, change: answer.and_then(share), decision })
}
