//! A replica under load: how fast it answers at a rate, and which rate it sustains within targets.
//!
//! With `b` sequences running, a request takes the engine `p` seconds of prefill and `output × step(b) / b`
//! of decode, so the replica sustains `rate(b) = b / (b p + output × step(b))` requests a second, and
//! (Little) `TPOT = step(b) + b p / output`. Prefill goes first: prompts wait as in an M/G/1 queue whose
//! service is prefill, `wait = rate p² (1 + cv²) / (2 (1 - rate p))`, with an exponential tail. The number that
//! run at once scatters like a Poisson number, so the mean stays two standard deviations below what
//! memory or `--max-num-seqs` admits: then about one request in forty waits for a place.

use serde::Serialize;

use crate::search::step_time::{Limit, StepModel};
use crate::search::traffic::Summary;

/// Latency targets, in seconds; infinite where there is none.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Targets {
    /// 90th percentile of the time to the first token.
    pub ttft_s: f64,
    /// Mean time per output token.
    pub tpot_s: f64,
}

/// How a replica runs at some rate.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Operating {
    /// Requests a second.
    pub rate: f64,
    /// Sequences that run at once.
    pub running: f64,
    /// Mean time per output token, in seconds.
    pub tpot_s: f64,
    /// 90th percentile of the time to the first token, in seconds.
    pub ttft_s: f64,
    /// What a decode step takes longest for.
    pub step_limit: Limit,
}

/// What keeps a replica from a higher rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Bound {
    /// KV memory holds no more sequences.
    Memory,
    /// `--max-num-seqs` admits no more.
    MaxNumSeqs,
    /// The time to the first token.
    TtftTarget,
    /// The time per output token.
    TpotTarget,
}

impl Bound {
    /// Its name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Bound::Memory => "memory",
            Bound::MaxNumSeqs => "max-num-seqs",
            Bound::TtftTarget => "TTFT target",
            Bound::TpotTarget => "TPOT target",
        }
    }
}

/// The largest mean of a Poisson number that two standard deviations keep below `most`: the root of
/// `mean + 2 sqrt(mean) = most`.
pub fn mean_below(most: f64) -> f64 {
    ((1.0 + most).sqrt() - 1.0).powi(2)
}

/// One replica.
#[derive(Clone, Copy)]
pub struct Replica<'a> {
    /// Times of its steps.
    pub step: &'a StepModel<'a>,
    /// What its requests look like.
    pub traffic: &'a Summary,
    /// Share of prompt tokens that hit the prefix cache.
    pub hit_ratio: f64,
    /// Sequences that memory holds.
    pub by_memory: f64,
    /// `--max-num-seqs`.
    pub max_num_seqs: f64,
}

impl Replica<'_> {
    /// How it runs with `running` sequences on average (below 1: idle some of the time).
    pub fn at(&self, running: f64) -> Operating {
        let output = self.traffic.output_mean;
        let step = self.step.decode(running.max(1.0), self.traffic.held_mean);
        let prefill_s = self.prefill_s(self.traffic.input_mean);
        let rate = running / (running * prefill_s + output * step.total_s());
        let busy = rate * prefill_s;
        let second = prefill_s * prefill_s * (1.0 + self.traffic.input_cv2);
        let wait_s = rate * second / (2.0 * (1.0 - busy));
        // P(wait > t) = busy × exp(-t busy / wait): the 90th percentile is 0 while the queue is mostly empty.
        let wait_p90_s = if busy > 0.1 { wait_s / busy * (10.0 * busy).ln() } else { 0.0 };
        Operating {
            rate,
            running,
            tpot_s: step.total_s() + running * prefill_s / output,
            ttft_s: wait_p90_s + self.prefill_s(self.traffic.input_p90) + step.total_s() / 2.0,
            step_limit: step.limit(),
        }
    }

    fn prefill_s(&self, tokens: f64) -> f64 {
        let cached = tokens * self.hit_ratio;
        self.step.prefill(tokens - cached, cached).total_s()
    }

    /// The highest rate within the targets and what bounds it; an error names the target that even one
    /// request misses.
    pub fn best(&self, targets: Targets) -> Result<(Operating, Bound), Bound> {
        let alone = self.at(1e-6);
        if alone.tpot_s > targets.tpot_s {
            return Err(Bound::TpotTarget);
        }
        if alone.ttft_s > targets.ttft_s {
            return Err(Bound::TtftTarget);
        }
        let (most, bound) = match self.by_memory < self.max_num_seqs {
            true => (self.by_memory, Bound::Memory),
            false => (self.max_num_seqs, Bound::MaxNumSeqs),
        };
        let cap = mean_below(most);
        let missed = |operating: &Operating| {
            if operating.tpot_s > targets.tpot_s {
                return Some(Bound::TpotTarget);
            }
            (operating.ttft_s > targets.ttft_s).then_some(Bound::TtftTarget)
        };
        let full = self.at(cap);
        let Some(mut target) = missed(&full) else { return Ok((full, bound)) };
        let (mut low, mut high) = (1e-6, cap);
        for _ in 0..50 {
            let middle = (low + high) / 2.0;
            match missed(&self.at(middle)) {
                Some(by) => (high, target) = (middle, by),
                None => low = middle,
            }
        }
        Ok((self.at(low), target))
    }

    /// How it runs at `rate` requests a second, at most that of `best`.
    pub fn at_rate(&self, rate: f64, best: &Operating) -> Operating {
        let (mut low, mut high) = (1e-6, best.running);
        for _ in 0..50 {
            let middle = (low + high) / 2.0;
            match self.at(middle).rate < rate {
                true => low = middle,
                false => high = middle,
            }
        }
        self.at(high)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device;
    use crate::dtype::KvDtype;
    use crate::engines::weights::WeightFormat;
    use crate::search::step_time::Efficiency;
    use crate::search::traffic::Traffic;
    use crate::source;

    fn with_replica(test: impl Fn(&Replica)) {
        let model = source::read("Llama-3.1-8B", &[]).unwrap();
        let device = device::find("A100").unwrap();
        let (weights, kv) = (WeightFormat::Bf16, KvDtype::Bf16);
        let step = StepModel::new(&model, device, 1, weights, kv, Efficiency::default()).unwrap();
        let traffic = Traffic::parse("1872:256").unwrap().summary();
        test(&Replica {
            step: &step,
            traffic: &traffic,
            hit_ratio: 0.0,
            by_memory: 200.0,
            max_num_seqs: 256.0,
        });
    }

    #[test]
    fn littles_law_holds_at_every_load() {
        with_replica(|replica| {
            for running in [0.1, 1.0, 10.0, 100.0] {
                let at = replica.at(running);
                let in_decode = at.rate * 256.0 * at.tpot_s;
                // Idle replicas decode one sequence at a time, some of the time.
                assert!((in_decode - running).abs() < 1e-9 * running.max(1.0), "{at:?}");
            }
        });
    }

    #[test]
    fn the_bound_is_the_one_that_binds() {
        with_replica(|replica| {
            let loose = Targets { ttft_s: f64::INFINITY, tpot_s: f64::INFINITY };
            let (free, bound) = replica.best(loose).unwrap();
            assert_eq!(bound, Bound::Memory);
            // 173.6 + 2 x 13.2 = 200.
            assert!((free.running - 173.65).abs() < 0.01, "{free:?}");
            let (tight, bound) = replica.best(Targets { tpot_s: 0.03, ..loose }).unwrap();
            assert_eq!(bound, Bound::TpotTarget);
            assert!((tight.tpot_s - 0.03).abs() < 1e-6 && tight.rate < free.rate, "{tight:?}");
            let (first, bound) = replica.best(Targets { ttft_s: 0.5, ..loose }).unwrap();
            assert_eq!(bound, Bound::TtftTarget);
            assert!((first.ttft_s - 0.5).abs() < 1e-3, "{first:?}");
            assert_eq!(replica.best(Targets { tpot_s: 0.001, ..loose }), Err(Bound::TpotTarget));
            let few = Replica { max_num_seqs: 8.0, ..*replica };
            assert_eq!(few.best(loose).unwrap().1, Bound::MaxNumSeqs);
        });
    }

    #[test]
    fn a_lower_rate_is_answered_faster() {
        with_replica(|replica| {
            let loose = Targets { ttft_s: f64::INFINITY, tpot_s: f64::INFINITY };
            let (best, _) = replica.best(loose).unwrap();
            let half = replica.at_rate(best.rate / 2.0, &best);
            assert!((half.rate - best.rate / 2.0).abs() < 1e-9);
            assert!(half.tpot_s < best.tpot_s && half.ttft_s < best.ttft_s);
        });
    }
}
