//! One configuration: does it fit, how fast is it, what bounds it, and is another better?

use serde::Serialize;

use crate::ask::AskError;
use crate::ask::standard;
use crate::dtype::KvDtype;
use crate::engines::Engine as _;
use crate::engines::setup::Setup;
use crate::engines::vllm::Vllm;
use crate::engines::weights::WeightFormat;
use crate::figure::{Figure, Unit};
use crate::search::load::{Bound, Operating, Replica};
use crate::search::step_time::{Limit, StepModel};
use crate::search::{Fleet, Search};

/// Two numbers closer than this share count as equal: the model is no more exact than that.
pub(super) const SAME: f64 = 0.05;

/// A configuration worked out.
#[derive(Clone, Debug, Serialize)]
pub struct Worked {
    /// The device.
    pub gpu: &'static str,
    /// Tensor-parallel ranks of a replica.
    pub tp: u64,
    /// Replicas.
    pub dp: u64,
    /// Devices used.
    pub gpus: u64,
    /// Price of the devices used.
    pub cost: f64,
    /// Weight format.
    pub weights: String,
    /// KV format.
    pub kv_cache_dtype: String,
    /// `--max-num-seqs`.
    pub max_num_seqs: u64,
    /// KV memory of a rank, in bytes.
    pub kv_pool_bytes: f64,
    /// Sequences of mean length that a replica's memory holds.
    pub by_memory: f64,
    /// Requests a second of all replicas.
    pub rate: f64,
    /// Output tokens a second of all replicas.
    pub output_tok_s: f64,
    /// Sequences that run at once in a replica.
    pub running: f64,
    /// Mean time per output token, in seconds.
    pub tpot_s: f64,
    /// 90th percentile of the time to the first token, in seconds.
    pub ttft_s: f64,
    /// What keeps it from a higher rate.
    pub bound: Bound,
    /// What its decode steps take longest for.
    pub step_limit: Limit,
    /// Bits of a weight and of a KV element: fewer is a risk to quality, so more counts as better.
    pub bits: (f64, f64),
}

/// Why a configuration is not offered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Rejection {
    /// Weights leave no KV memory.
    WeightsDoNotFit,
    /// The longest request does not fit the KV memory.
    LongestRequestDoesNotFit,
    /// Query heads do not divide by the ranks.
    HeadsDoNotDivide,
    /// Even one request misses the TTFT target.
    TtftTarget,
    /// Even one request misses the TPOT target.
    TpotTarget,
    /// All devices together do not sustain the rate.
    RateTooHigh,
}

impl Rejection {
    /// In words.
    pub fn name(self) -> &'static str {
        match self {
            Rejection::WeightsDoNotFit => "weights do not fit",
            Rejection::LongestRequestDoesNotFit => "the longest request does not fit",
            Rejection::HeadsDoNotDivide => "heads do not divide by the ranks",
            Rejection::TtftTarget => "even one request misses the TTFT target",
            Rejection::TpotTarget => "even one request misses the TPOT target",
            Rejection::RateTooHigh => "all devices together do not sustain the rate",
        }
    }
}

/// Powers of two up to the devices of a fleet and of one group of links.
pub fn ranks(fleet: &Fleet) -> Vec<u64> {
    // Without a group of links ranks talk over PCIe, up to 8 of them.
    let most = fleet.count.min((fleet.device.peers_max as u64).max(8));
    (0..).map(|power| 1_u64 << power).take_while(|ranks| *ranks <= most).collect()
}

/// Every configuration of a fleet at one degree of TP.
pub fn work(
    search: &Search,
    fleet: &Fleet,
    tp: u64,
) -> Result<Vec<Result<Worked, Rejection>>, AskError> {
    let mut outcomes = Vec::new();
    for weights in &search.weights {
        for kv_cache_dtype in &search.kv_cache_dtypes {
            let candidate = Candidate { search, fleet, tp, weights, kv_cache_dtype };
            outcomes.extend(candidate.work()?);
        }
    }
    Ok(outcomes)
}

struct Candidate<'a> {
    search: &'a Search<'a>,
    fleet: &'a Fleet,
    tp: u64,
    weights: &'a str,
    kv_cache_dtype: &'a str,
}

impl Candidate<'_> {
    fn work(&self) -> Result<Vec<Result<Worked, Rejection>>, AskError> {
        let Search { model, traffic, max_num_seqs, .. } = self.search;
        let dtype = standard::dtype(self.kv_cache_dtype)?;
        let weights = standard::weight_format(self.weights)?;
        let (device, efficiency) = (self.fleet.device, self.search.efficiency);
        let step = StepModel::new(model, device, self.tp, weights, dtype, efficiency)?;
        let all = |reason| Ok(vec![Err(reason); max_num_seqs.len()]);
        if model.heads.unwrap_or(0) % self.tp != 0 {
            return all(Rejection::HeadsDoNotDivide);
        }
        let (bytes, per) = dtype.ratio();
        let bits = (8.0 * standard::linear_width(weights), 8.0 * bytes as f64 / per as f64);
        let longest = model.kv_bytes(traffic.longest, dtype, self.tp) as f64;
        let held = model.kv_bytes(traffic.held_mean as u64, dtype, self.tp).max(1) as f64;
        let outcome = |ceiling: &u64| -> Result<Result<Worked, Rejection>, AskError> {
            let pool = self.pool(weights, dtype, *ceiling)?;
            if pool <= 0.0 {
                return Ok(Err(Rejection::WeightsDoNotFit));
            }
            if longest > pool {
                return Ok(Err(Rejection::LongestRequestDoesNotFit));
            }
            let replica = Replica {
                step: &step,
                traffic,
                hit_ratio: self.search.hit_ratio,
                by_memory: pool / held,
                max_num_seqs: *ceiling as f64,
            };
            Ok(self.serve(&replica, pool, bits))
        };
        max_num_seqs.iter().map(outcome).collect()
    }

    /// KV memory of a rank in bytes, as `reef plan fit` estimates it for vLLM.
    fn pool(&self, weights: WeightFormat, kv: KvDtype, max_num_seqs: u64) -> Result<f64, AskError> {
        let device = self.fleet.device;
        let memory = Figure::measured(device.memory_bytes, Unit::Bytes, device.source);
        let setup = Setup {
            device: device.name.to_string(),
            architecture: device.architecture.to_string(),
            total: Some(memory),
            tp: self.tp,
            weights,
            kv_keys: kv,
            kv_values: kv,
            utilization: Some(self.search.utilization),
            max_num_seqs: Some(max_num_seqs),
            max_model_len: Some(self.search.traffic.longest),
            ..Setup::default()
        };
        let plan = Vllm.plan(self.search.model, &setup).map_err(|error| {
            AskError::NoAnswer(format!("vLLM's memory for this model cannot be estimated: {error}"))
        })?;
        let unknown =
            || AskError::NoAnswer("vLLM's memory for this model cannot be estimated".into());
        plan.ledger.kv.map(|kv| kv.value).ok_or_else(unknown)
    }

    /// The replicas that sustain the rate asked for, as few as can; or all there are, at their best.
    fn serve(&self, replica: &Replica, pool: f64, bits: (f64, f64)) -> Result<Worked, Rejection> {
        let (best, bound) = replica.best(self.search.targets).map_err(|missed| match missed {
            Bound::TtftTarget => Rejection::TtftTarget,
            _ => Rejection::TpotTarget,
        })?;
        let most = self.fleet.count / self.tp;
        let (dp, operating) = match self.search.rate {
            None => (most, best),
            Some(rate) => {
                let needed = (rate / best.rate).ceil().max(1.0);
                if needed > most as f64 {
                    return Err(Rejection::RateTooHigh);
                }
                (needed as u64, replica.at_rate(rate / needed, &best))
            }
        };
        let of_all = operating.rate * dp as f64;
        let gpus = dp * self.tp;
        let Operating { running, tpot_s, ttft_s, step_limit, .. } = operating;
        Ok(Worked {
            gpu: self.fleet.device.name,
            tp: self.tp,
            dp,
            gpus,
            cost: gpus as f64 * self.fleet.price,
            weights: self.weights.to_string(),
            kv_cache_dtype: self.kv_cache_dtype.to_string(),
            max_num_seqs: replica.max_num_seqs as u64,
            kv_pool_bytes: pool,
            by_memory: replica.by_memory,
            rate: of_all,
            output_tok_s: of_all * self.search.traffic.output_mean,
            running,
            tpot_s,
            ttft_s,
            bound,
            step_limit,
            bits,
        })
    }
}

impl Worked {
    /// Whether it is at least as good in everything (equal within a twentieth): cost, rate, TPOT, TTFT,
    /// bits of weights and KV.
    pub fn beats(&self, other: &Worked) -> bool {
        let at_most = |a: f64, b: f64| a <= b * (1.0 + SAME);
        at_most(self.cost, other.cost)
            && at_most(other.rate, self.rate)
            && at_most(self.tpot_s, other.tpot_s)
            && at_most(self.ttft_s, other.ttft_s)
            && self.bits.0 >= other.bits.0
            && self.bits.1 >= other.bits.1
    }
}
