//! How many drafts to try: as many as raise the tokens of a step by more than they lengthen it.

use std::collections::HashMap;

use super::{Drafter, RunKey, Verdict};

/// What a run is believed to accept before anything was seen, as a rate and as tests it counts for.
const PRIOR: (f64, f64) = (0.7, 4.0);
/// What an old test counts for after each new one: the last 30 or so decide.
const MEMORY: f64 = 0.97;
/// Steps of a run without drafts after which one is tried again, to see whether the text has changed.
const RETRY_STEPS: u32 = 24;

/// What drafts cost, in steps of one decode row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DraftCosts {
    /// What one more row adds to a step.
    pub row_share: f64,
    /// What the drafter takes for one token; 0 for look-ups.
    pub draft_share: f64,
}

/// What there is room for in a run's next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// Rows of the step without this run's drafts, its own included; prefill rows count too.
    pub rows: usize,
    /// Decode rows of the step without drafts of anybody: tokens it brings for certain, at least 1.
    pub decoding: usize,
    /// Tokens that the run may still generate.
    pub tokens_left: usize,
}

/// What became of drafts, counted apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpeculationCounters {
    /// Drafts that were computed.
    pub proposed: usize,
    /// Of these, what was sampled too.
    pub accepted: usize,
    /// Tokens that steps with drafts added to outputs; an end token is not one.
    pub emitted: usize,
    /// Rows that steps with drafts computed.
    pub computed: usize,
}

impl SpeculationCounters {
    fn add(&mut self, drafts: usize, verdict: &Verdict, emitted: usize) {
        self.proposed += drafts;
        self.accepted += verdict.accepted;
        self.emitted += emitted;
        self.computed += drafts + 1;
    }
}

/// What is known of a run's drafts.
#[derive(Clone, Copy, Debug, Default)]
struct Pace {
    accepted: f64,
    tested: f64,
    silent_steps: u32,
}

impl Pace {
    /// Probability that a draft is accepted when all before it were.
    fn rate(&self) -> f64 {
        let (rate, weight) = PRIOR;
        (self.accepted + rate * weight) / (self.tested + weight)
    }

    fn learn(&mut self, drafts: usize, verdict: &Verdict) {
        // Those behind the first rejected one were not tested.
        let rejected = verdict.accepted < drafts && verdict.sampled > verdict.accepted;
        for test in 0..verdict.accepted + usize::from(rejected) {
            let kept = f64::from(u8::from(test < verdict.accepted));
            self.accepted = self.accepted * MEMORY + kept;
            self.tested = self.tested * MEMORY + 1.0;
        }
    }
}

/// A drafter, and how far each run trusts it.
pub struct Speculator {
    drafter: Box<dyn Drafter>,
    most: usize,
    costs: DraftCosts,
    paces: HashMap<RunKey, Pace>,
    counters: SpeculationCounters,
}

impl Speculator {
    /// At most `most` drafts a run and step.
    pub fn new(drafter: Box<dyn Drafter>, most: usize, costs: DraftCosts) -> Speculator {
        let counters = SpeculationCounters::default();
        Speculator { drafter, most, costs, paces: HashMap::new(), counters }
    }

    /// What became of all drafts so far.
    pub fn counters(&self) -> SpeculationCounters {
        self.counters
    }

    /// Replaces `out` by the drafts to try for `run`, whose tokens are `tokens`, prompt included; often
    /// none.
    pub fn draft(&mut self, run: RunKey, tokens: &[u32], room: Room, out: &mut Vec<u32>) {
        out.clear();
        let pace = self.paces.entry(run).or_default();
        let most = self.most.min(room.tokens_left.saturating_sub(1));
        let mut wanted = best_length(pace.rate(), &self.costs, room, most);
        if wanted == 0 && most > 0 {
            pace.silent_steps += 1;
            // Not where even a sure draft would not pay.
            let ever = best_length(1.0, &self.costs, room, most) > 0;
            wanted = usize::from(ever && pace.silent_steps >= RETRY_STEPS);
        }
        if wanted > 0 {
            pace.silent_steps = 0;
            self.drafter.draft(run, tokens, wanted, out);
            out.truncate(wanted);
        }
    }

    /// Says what became of `drafts` drafts of `run`, at least 1, and how many tokens were added to the
    /// output.
    pub fn settle(&mut self, run: RunKey, drafts: usize, verdict: &Verdict, emitted: usize) {
        self.counters.add(drafts, verdict, emitted);
        if let Some(pace) = self.paces.get_mut(&run) {
            pace.learn(drafts, verdict);
        }
    }

    /// `run` has ended.
    pub fn forget(&mut self, run: RunKey) {
        self.paces.remove(&run);
        self.drafter.forget(run);
    }
}

/// The length at which the step brings most tokens for its time. A run with `g` drafts brings
/// `(1 - rate^(g + 1)) / (1 - rate)` tokens (Leviathan et al., arXiv 2211.17192, equation 1).
fn best_length(rate: f64, costs: &DraftCosts, room: Room, most: usize) -> usize {
    let rows = room.rows.max(1);
    let time = |drafts: usize| {
        let added = (rows - 1 + drafts) as f64;
        1.0 + costs.row_share * added + costs.draft_share * drafts as f64
    };
    let mut tokens = room.decoding.max(1) as f64;
    let mut best = (0, tokens / time(0));
    let mut reached = 1.0;
    for drafts in 1..=most {
        reached *= rate;
        tokens += reached;
        let pace = tokens / time(drafts);
        if pace > best.1 {
            best = (drafts, pace);
        }
    }
    best.0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Always drafts `7`.
    struct Sevens;

    impl Drafter for Sevens {
        fn draft(&mut self, _: RunKey, _: &[u32], most: usize, out: &mut Vec<u32>) {
            *out = vec![7; most];
        }

        fn forget(&mut self, _: RunKey) {}
    }

    const COSTS: DraftCosts = DraftCosts { row_share: 0.15, draft_share: 0.0 };
    const ALONE: Room = Room { rows: 1, decoding: 1, tokens_left: 100 };

    fn speculator(costs: DraftCosts) -> Speculator {
        Speculator::new(Box::new(Sevens), 8, costs)
    }

    /// Steps in which `accepted` of the drafts are; returns how many were tried in each.
    fn steps(speculator: &mut Speculator, room: Room, accepted: usize, count: usize) -> Vec<usize> {
        let mut out = Vec::new();
        let mut lengths = Vec::new();
        for _ in 0..count {
            speculator.draft(RunKey(1), &[1, 2], room, &mut out);
            lengths.push(out.len());
            if !out.is_empty() {
                let accepted = accepted.min(out.len());
                let verdict = Verdict { accepted, sampled: accepted + 1, no_token: None };
                speculator.settle(RunKey(1), out.len(), &verdict, accepted + 1);
            }
        }
        lengths
    }

    #[test]
    fn accepted_drafts_get_longer_and_rejected_ones_stop_but_for_retries() {
        let mut speculator = speculator(COSTS);
        let lengths = steps(&mut speculator, ALONE, 8, 60);
        assert!(lengths[0] >= 2 && lengths[0] < 8, "{lengths:?}");
        assert_eq!(lengths[59], 8);
        let lengths = steps(&mut speculator, ALONE, 0, 200);
        let late = &lengths[100..];
        assert!(late.iter().all(|length| *length <= 1), "{lengths:?}");
        let tries = late.iter().filter(|length| **length == 1).count();
        assert!((3..=5).contains(&tries), "{tries}");
        // And it comes back when the text does.
        let lengths = steps(&mut speculator, ALONE, 8, 800);
        assert_eq!(lengths[799], 8);
    }

    #[test]
    fn past_the_ridge_there_are_none() {
        let room = |rows| Room { rows, decoding: rows, tokens_left: 100 };
        let mut last = usize::MAX;
        for rows in [1, 2, 4, 8, 16, 64] {
            let length = best_length(0.8, &COSTS, room(rows), 8);
            assert!(length <= last);
            last = length;
        }
        assert_eq!(last, 0);
        // Prefill rows fill the step just as well.
        let filled = Room { rows: 257, decoding: 1, tokens_left: 100 };
        assert!(best_length(0.99, &COSTS, filled, 8) > 0, "a longer step is worth more tokens");
        let mut speculator = speculator(DraftCosts { row_share: 1.1, draft_share: 0.0 });
        assert_eq!(steps(&mut speculator, ALONE, 8, 100), [0; 100]);
    }

    #[test]
    fn lengths_are_those_that_bring_most() {
        // Equation 1 by hand: rate 0.8, a row at 0.15: 1, 1.565, 1.877, 2.036, 2.101, 2.108, 2.080 ...
        assert_eq!(best_length(0.8, &COSTS, ALONE, 8), 5);
        let costly = DraftCosts { row_share: 0.15, draft_share: 0.3 };
        assert_eq!(best_length(0.8, &costly, ALONE, 8), 2);
    }

    #[test]
    fn never_more_than_may_be_generated() {
        let mut speculator = speculator(COSTS);
        let mut out = Vec::new();
        for (tokens_left, most) in [(0, 0), (1, 0), (2, 1), (3, 2)] {
            let room = Room { tokens_left, ..ALONE };
            speculator.draft(RunKey(1), &[1, 2], room, &mut out);
            assert_eq!(out.len(), most);
        }
    }

    #[test]
    fn counts_are_kept_apart() {
        let mut speculator = speculator(COSTS);
        let mut out = Vec::new();
        speculator.draft(RunKey(1), &[1], ALONE, &mut out);
        let drafts = out.len();
        // All accepted, the last an end token that is not part of the output.
        let verdict = Verdict { accepted: drafts, sampled: drafts, no_token: None };
        speculator.settle(RunKey(1), drafts, &verdict, drafts - 1);
        let expected = SpeculationCounters {
            proposed: drafts,
            accepted: drafts,
            emitted: drafts - 1,
            computed: drafts + 1,
        };
        assert_eq!(speculator.counters(), expected);
    }
}
