//! E26: which pair of formats for weights and KV on this GPU?

use super::prelude::*;
use crate::ask::report::cell;
use crate::device::Arithmetic;
use crate::search::step_time::{Efficiency, StepModel};

pub struct Formats;

const PAIRS: [(&str, &str); 8] = [
    ("bf16", "bf16"),
    ("bf16", "fp8"),
    ("fp8", "bf16"),
    ("fp8", "fp8"),
    ("awq", "bf16"),
    ("awq", "fp8"),
    ("nvfp4", "fp8"),
    ("nvfp4", "nvfp4"),
];

impl Formats {
    /// Output tokens a second at the largest batch (up to the one asked for) that memory holds.
    fn rate(sheet: &Worksheet, pair: (&str, &str)) -> Result<Option<(f64, f64)>, AskError> {
        let (model, device) = (sheet.model()?, sheet.device()?);
        let (tp, context) = (sheet.number("tp")?, sheet.number("context")?);
        let weights = standard::weight_format(pair.0)?;
        let dtype = standard::dtype(pair.1)?;
        let budget =
            sheet.number("memory")? * sheet.number("utilization")? - sheet.number("overhead")?;
        let pool = budget - weights.bytes(&model.parameters()?) / tp;
        let held = pool / model.kv_bytes(context as u64, dtype, tp as u64).max(1) as f64;
        let batch = held.min(sheet.number("batch")?);
        if batch < 1.0 {
            return Ok(None);
        }
        let (bandwidth, arithmetic) = (sheet.number("bandwidth_share")?, sheet.number("mfu")?);
        let efficiency = Efficiency { bandwidth, arithmetic, ..Efficiency::default() };
        let step = StepModel::new(model, device, tp as u64, weights, dtype, efficiency)?;
        Ok(Some((batch, batch / step.decode(batch, context).total_s())))
    }
}

impl Question for Formats {
    fn about(&self) -> About {
        About {
            name: "formats",
            aliases: &["quantization"],
            covers: &["E26"],
            asks: "Which pair of weight and KV formats decodes fastest on this GPU at this batch?",
            explanation: "Small weights pay at small batches, where a step reads mostly weights, and free memory \
                for KV; small KV pays above the crossover. Arithmetic follows the weights' format only where \
                the device has units for it (fp8 from Ada on, fp4 from Blackwell on); else kernels decode to \
                bf16, which costs nothing while memory-bound and everything while compute-bound. Quality is \
                not in the number: bf16 > fp8 > 4-bit weights; fp8 KV is nearly free, 4-bit KV is not.",
            source: "roofline step time of `reef plan search`, within 7 % of llama.cpp on RTX 3090, 4080 and 4090",
        }
    }

    fn inputs(&self) -> Vec<Input> {
        let share = "share of bandwidth that decode reaches";
        vec![
            standard::model("Llama-3.1-8B"),
            standard::gpu("L4"),
            standard::tp(1.0),
            standard::memory(),
            standard::utilization(0.9),
            standard::overhead(),
            standard::mfu(),
            Input::number("bandwidth_share", Unit::Ratio, 0.8, share).within(0.01, 1.0),
            standard::context(4000.0),
            Input::number("batch", Unit::Sequences, 32.0, "sequences wanted at once").whole(),
        ]
    }

    fn work(&self, sheet: &mut Worksheet) -> Result<Verdict, AskError> {
        let mut best: Option<(usize, f64, f64)> = None;
        let mut rows = Vec::new();
        let mut reference = None;
        for (index, pair) in PAIRS.into_iter().enumerate() {
            let device = sheet.device()?;
            let arithmetic = standard::arithmetic(standard::weight_format(pair.0)?);
            let units = if device.native_peak(arithmetic).is_some() { "native" } else { "decoded" };
            // Engines keep KV in fp4 only where the device has units for it.
            if pair.1 == "nvfp4" && device.native_peak(Arithmetic::Fp4).is_none() {
                continue;
            }
            let name = format!("{} weights, {} KV", pair.0, pair.1);
            let Some((batch, rate)) = Formats::rate(sheet, pair)? else {
                rows.push(vec![name, units.into(), "does not fit".into()]);
                continue;
            };
            rows.push(vec![name, units.into(), cell(batch.floor()), cell(rate)]);
            reference = reference.or(Some(rate));
            if best.is_none_or(|(_, _, known)| rate > known * 1.001) {
                best = Some((index, batch, rate));
            }
        }
        let Some((index, batch, rate)) = best else {
            return Err(AskError::NoAnswer(
                "no pair fits: use more --tp, another --gpu or a smaller --model".into(),
            ));
        };
        let first = reference.unwrap_or(rate);
        let origin = "batch / step time";
        fact!(sheet, best_batch: Sequences = batch, "batch or memory", "sequences the best pair runs at once");
        fact!(sheet, widest_rate: TokensPerSecond = first, origin, "the widest pair that fits");
        fact!(sheet, best_rate: TokensPerSecond = rate, origin, "the best pair");
        step!(sheet, gain: Ratio = best_rate / widest_rate, "over the widest that fits");
        sheet.compare("Pairs", &["pair", "units", "batch", "tok/s"], rows);
        let (weights, kv) = PAIRS[index];
        let advice = format!(
            "fastest: --quantization {weights} with --kv-cache-dtype {kv}; take the widest pair whose speed \
             suffices"
        );
        let decision = Some(format!("{weights} weights, {kv} KV"));
        Ok(Verdict { answer: "best_rate", decision, advice })
    }

    fn example(&self) -> Example {
        Example {
            given: &[
                ("model", "Llama-3.1-8B"),
                ("gpu", "RTX 4090"),
                ("batch", "1"),
                ("context", "2048"),
            ],
            answer: 152.254_7,
            cited: Cited {
                step: "widest_rate",
                value: 52.63,
                tolerance: 0.03,
                from: "llama.cpp, Llama-3-8B F16 on an RTX 4090, 4,096 tokens generated: 52.63 tok/s \
                       (XiongjieDai/GPU-Benchmarks-on-LLM-Inference)",
            },
            moves: [
                Move { input: "batch", to: "32", answer: 2728.606 },
                Move { input: "gpu", to: "RTX 5090", answer: 255.544_2 },
            ],
        }
    }
}
