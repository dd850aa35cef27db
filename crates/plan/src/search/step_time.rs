//! How long a step takes: a roofline with stated efficiencies.
//!
//! `step = max(memory, arithmetic) + link + fixed` where
//! - memory = (weights streamed + KV of the batch) / (bandwidth × efficiency),
//! - arithmetic = rows × (2 × active parameters + attention) / (peak × efficiency),
//! - link = two all-reduces a layer, each moving 2 (tp - 1) / tp of the rows' activations,
//! - fixed = what a step costs whatever is in it (launches, sampling, scheduling).
//!
//! In a mixture of experts a batch of `b` rows streams `1 - (1 - k/E)^b` of the routed experts.

use serde::Serialize;

use crate::ask::standard;
use crate::device::Device;
use crate::dtype::KvDtype;
use crate::engines::weights::WeightFormat;
use crate::model::{MissingFields, Model, Parameters};

/// Reached shares of a device's peaks and fixed costs. The defaults are assumptions: 0.8 of bandwidth is
/// what ai-dynamo/aiconfigurator scales by, 0.5 of peak what prefill of dense models reaches.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Efficiency {
    /// Share of memory bandwidth.
    pub bandwidth: f64,
    /// Share of peak arithmetic.
    pub arithmetic: f64,
    /// Share of the link between ranks.
    pub link: f64,
    /// Seconds of an all-reduce beside its bytes.
    pub all_reduce_s: f64,
    /// Seconds of a step beside everything.
    pub step_s: f64,
}

impl Default for Efficiency {
    fn default() -> Efficiency {
        Efficiency {
            bandwidth: 0.8,
            arithmetic: 0.5,
            link: 0.7,
            all_reduce_s: 10e-6,
            step_s: 0.5e-3,
        }
    }
}

/// What a step takes longest for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Limit {
    /// Reading weights and KV.
    Bandwidth,
    /// Multiplying.
    Compute,
    /// Exchanging between ranks, and fixed costs.
    Link,
}

/// Seconds of a step, and what they are for.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct StepTime {
    /// Reading weights and KV.
    pub memory_s: f64,
    /// Multiplying.
    pub arithmetic_s: f64,
    /// All-reduces.
    pub link_s: f64,
    /// Fixed.
    pub fixed_s: f64,
}

impl StepTime {
    /// Seconds of the step.
    pub fn total_s(&self) -> f64 {
        self.memory_s.max(self.arithmetic_s) + self.link_s + self.fixed_s
    }

    /// What it takes longest for.
    pub fn limit(&self) -> Limit {
        if self.link_s + self.fixed_s > self.memory_s.max(self.arithmetic_s) {
            Limit::Link
        } else if self.memory_s >= self.arithmetic_s {
            Limit::Bandwidth
        } else {
            Limit::Compute
        }
    }
}

/// A model in given formats on `tp` ranks of a device.
#[derive(Clone, Debug)]
pub struct StepModel<'a> {
    model: &'a Model,
    device: &'a Device,
    tp: f64,
    kv: KvDtype,
    /// Operations/s of units that work in the weights' format.
    peak: f64,
    efficiency: Efficiency,
    /// Parameters a row multiplies with.
    active: f64,
    /// Bytes of all weights that every row uses.
    common_bytes: f64,
    /// Bytes of all routed experts.
    expert_bytes: f64,
    /// Share of the routed experts that a row uses.
    experts_used: f64,
    /// Operations that a row spends on each token it attends, all layers.
    attention: f64,
    attention_layers: f64,
    hidden: f64,
}

impl<'a> StepModel<'a> {
    /// A model with weights in `weights` and KV in `kv` on `tp` ranks. Errors name config fields that the
    /// parameter count lacks.
    pub fn new(
        model: &'a Model,
        device: &'a Device,
        tp: u64,
        weights: WeightFormat,
        kv: KvDtype,
        efficiency: Efficiency,
    ) -> Result<StepModel<'a>, MissingFields> {
        let parameters = model.parameters()?;
        let layers =
            model.layers.iter().filter(|layer| layer.token_bytes(kv, 1) > 0).count() as f64;
        let heads = model.heads.unwrap_or(0) as f64;
        let head_dim = model.head_dim().unwrap_or(128) as f64;
        // Embedding rows are looked up; a tied embedding is the output matrix. Towers run once an image.
        let output = if parameters.output > 0 { parameters.output } else { parameters.embedding };
        let every = Parameters { embedding: 0, output, experts: 0, tower: 0, ..parameters };
        let routed = Parameters { experts: parameters.experts, ..Parameters::default() };
        Ok(StepModel {
            model,
            device,
            tp: tp as f64,
            kv,
            peak: device.peak(standard::arithmetic(weights)),
            efficiency,
            active: parameters.active() as f64,
            common_bytes: weights.bytes(&every),
            expert_bytes: weights.bytes(&routed),
            experts_used: match parameters.experts {
                0 => 0.0,
                experts => parameters.experts_active as f64 / experts as f64,
            },
            attention: 4.0 * heads * head_dim * layers,
            attention_layers: layers,
            hidden: model.hidden.unwrap_or(0) as f64,
        })
    }

    /// A decode step of `batch` sequences that hold `context` tokens each.
    pub fn decode(&self, batch: f64, context: f64) -> StepTime {
        let kv = self.model.kv_bytes(context as u64, self.kv, self.tp as u64) as f64;
        self.step(batch, batch * context, batch * kv)
    }

    /// The prefill of `tokens` tokens of one sequence after `cached` that hit the cache.
    pub fn prefill(&self, tokens: f64, cached: f64) -> StepTime {
        let attended = tokens * (cached + tokens / 2.0);
        self.step(
            tokens,
            attended,
            self.model.kv_bytes(cached as u64, self.kv, self.tp as u64) as f64,
        )
    }

    /// A step of `rows` rows that attend `attended` tokens together and read `kv_bytes` of KV a rank.
    fn step(&self, rows: f64, attended: f64, kv_bytes: f64) -> StepTime {
        let Efficiency { bandwidth, arithmetic, link, all_reduce_s, step_s } = self.efficiency;
        let flops = 2.0 * self.active * rows + self.attention * attended;
        let link_s = match self.tp > 1.0 {
            true => {
                let bytes = 2.0 * (self.tp - 1.0) / self.tp * rows * self.hidden * 2.0;
                let rate = self.device.link_bytes_s() * link;
                2.0 * self.attention_layers * (bytes / rate + all_reduce_s)
            }
            false => 0.0,
        };
        StepTime {
            memory_s: (self.streamed(rows) + kv_bytes)
                / (self.device.bandwidth_bytes_s * bandwidth),
            arithmetic_s: flops / self.tp / (self.peak * arithmetic),
            link_s,
            fixed_s: step_s,
        }
    }

    /// Bytes of weights that a rank streams for `rows` rows.
    fn streamed(&self, rows: f64) -> f64 {
        let touched = 1.0 - (1.0 - self.experts_used).powf(rows);
        (self.common_bytes + self.expert_bytes * touched) / self.tp
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device;
    use crate::source;

    fn perfect() -> Efficiency {
        Efficiency { bandwidth: 1.0, arithmetic: 1.0, link: 1.0, all_reduce_s: 0.0, step_s: 0.0 }
    }

    fn on<'a>(model: &'a Model, device: &'a Device, tp: u64) -> StepModel<'a> {
        StepModel::new(model, device, tp, WeightFormat::Bf16, KvDtype::Bf16, perfect()).unwrap()
    }

    #[test]
    fn a_decode_step_is_weights_plus_kv_over_bandwidth() {
        let model = source::read("Llama-3.1-8B", &[]).unwrap();
        let device = device::find("A100").unwrap();
        let step = on(&model, device, 1).decode(60.0, 2000.0);
        // 7.505e9 parameters that are multiplied with, 2 bytes each; 60 x 2,000 x 131,072 bytes of KV.
        let memory = (7_504_924_672.0 * 2.0 + 60.0 * 2000.0 * 131_072.0) / 2.039e12;
        assert!((step.memory_s - memory).abs() < 1e-9, "{step:?}");
        assert_eq!(step.limit(), Limit::Bandwidth);
    }

    #[test]
    fn prefill_is_bound_by_arithmetic_and_grows_with_the_square() {
        let model = source::read("Llama-3.1-8B", &[]).unwrap();
        let device = device::find("H100").unwrap();
        let step = on(&model, device, 1).prefill(8192.0, 0.0);
        let flops = 2.0 * 7_504_924_672.0 * 8192.0 + 4.0 * 4096.0 * 32.0 * 8192.0 * 4096.0;
        assert!((step.arithmetic_s - flops / 989e12).abs() < 1e-6, "{step:?}");
        assert_eq!(step.limit(), Limit::Compute);
        let after_hit = on(&model, device, 1).prefill(4096.0, 4096.0);
        assert!(after_hit.arithmetic_s > step.arithmetic_s / 2.0, "the second half attends more");
    }

    #[test]
    fn ranks_divide_memory_and_pay_the_link() {
        let model = source::read("Llama-3.1-70B", &[]).unwrap();
        let device = device::find("H100").unwrap();
        let one = on(&model, device, 1).decode(16.0, 4000.0);
        let eight = on(&model, device, 8).decode(16.0, 4000.0);
        assert!((one.memory_s / eight.memory_s - 8.0).abs() < 0.01);
        assert_eq!(one.link_s, 0.0);
        // 160 all-reduces of 16 rows x 8,192 channels x 2 bytes, 7/8 of it twice, at 450 GB/s.
        let link = 160.0 * (2.0 * 7.0 / 8.0 * 16.0 * 8192.0 * 2.0) / 450e9;
        assert!((eight.link_s - link).abs() < 1e-9, "{eight:?}");
    }

    #[test]
    fn a_larger_batch_touches_more_experts() {
        let model = source::read("Mixtral-8x7B", &[]).unwrap();
        let device = device::find("H100").unwrap();
        let of = |batch: f64| on(&model, device, 1).decode(batch, 1.0).memory_s;
        // 2 of 8 experts for one row, 7/16 for two, all but (3/4)^64 for 64.
        assert!(of(64.0) / of(1.0) > 3.0 && of(64.0) / of(1.0) < 3.8, "{}", of(64.0) / of(1.0));
        assert!(of(2.0) > 1.5 * of(1.0));
    }

    #[test]
    fn measured_decode_speeds_are_met_within_a_tenth() {
        // llama.cpp, Llama-3-8B F16, one sequence, mean context 2,048 (tg 4096), tokens a second:
        // XiongjieDai/GPU-Benchmarks-on-LLM-Inference, May 2024. Default efficiencies, nothing fitted.
        let model = source::read("Llama-3.1-8B", &[]).unwrap();
        for (name, measured) in [("RTX 4090", 52.63), ("RTX 4080", 39.44), ("RTX 3090", 44.79)] {
            let device = device::find(name).unwrap();
            let formats = (WeightFormat::Bf16, KvDtype::Bf16);
            let efficiency = Efficiency::default();
            let step = StepModel::new(&model, device, 1, formats.0, formats.1, efficiency).unwrap();
            let predicted = 1.0 / step.decode(1.0, 2048.0).total_s();
            assert!((predicted / measured - 1.0).abs() < 0.1, "{name}: {predicted}");
        }
    }
}
