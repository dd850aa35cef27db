//! The start that a log is of, as the plan takes it.

use super::Reading;
use super::facts::{Facts, Quantity, Word};
use crate::device;
use crate::dtype::KvDtype;
use crate::engines::setup::{Draft, DraftKind, Measured, Setup};
use crate::engines::version::{LATEST, Version};
use crate::engines::vllm::behavior;
use crate::engines::weights::WeightFormat;
use crate::figure::{Figure, Unit};
use crate::model::Model;

/// What the user says where the log does not, or knows better.
#[derive(Clone, Debug, Default)]
pub struct Known {
    /// Device, as the device table has it.
    pub device: Option<&'static device::Device>,
    /// Weight format.
    pub weights: Option<WeightFormat>,
    /// KV format of keys and values.
    pub kv: Option<(KvDtype, KvDtype)>,
    /// Ranks that split each layer.
    pub tp: Option<u64>,
    /// Longest request.
    pub max_model_len: Option<u64>,
    /// Share of the device.
    pub utilization: Option<f64>,
    /// Version of the engine.
    pub version: Option<String>,
}

/// The flags of the start without what it measured: what [`crate::engines::Engine::plan`] would have been asked
/// before it. The device's memory counts as known.
pub fn setup(reading: &Reading, model: &Model, known: &Known) -> Setup {
    let facts = &reading.facts;
    let text = |word| facts.word(word).map(|(text, _)| text);
    let (version, first_engine) = version(reading, known);
    let device = known.device.or_else(|| device::find(text(Word::Device)?).ok());
    let listed =
        |device: &device::Device| Figure::measured(device.memory_bytes, Unit::Bytes, device.source);
    let log_kv = (kv_format(text(Word::KvDtype)), kv_format(text(Word::ValueDtype)));
    let keys = log_kv.0.unwrap_or(KvDtype::Bf16);
    let (kv_keys, kv_values) = known.kv.unwrap_or((keys, log_kv.1.unwrap_or(keys)));
    let published = model.quantization.as_deref().and_then(WeightFormat::parse);
    let llama = reading.engine == "llamacpp";
    let whole = |quantity| facts.whole(quantity).filter(|value| *value > 0);
    Setup {
        version,
        first_engine,
        device: device.map_or(String::new(), |device| device.name.to_string()),
        architecture: device.map_or(String::new(), |device| device.architecture.to_string()),
        total: facts.figure(Quantity::Total).or_else(|| device.map(listed)),
        tp: known.tp.or_else(|| whole(Quantity::TensorParallel)).unwrap_or(1),
        pp: whole(Quantity::PipelineParallel).unwrap_or(1),
        dp: whole(Quantity::DataParallel).unwrap_or(1),
        cp: whole(Quantity::ContextParallel).unwrap_or(1),
        weights: known
            .weights
            .or_else(|| weight_format(text(Word::Quantization)?))
            .or(published)
            .or_else(|| named_format(text(Word::Model)?))
            .unwrap_or(WeightFormat::Bf16),
        kv_keys,
        kv_values,
        max_model_len: known.max_model_len.or_else(|| whole(Quantity::MaxModelLen)),
        utilization: known.utilization.or_else(|| {
            let share = facts.figure(Quantity::Utilization)?.value;
            (share > 0.0 && share <= 1.0).then_some(share)
        }),
        max_num_batched_tokens: whole(Quantity::BatchedTokens),
        max_num_seqs: whole(Quantity::Sequences).filter(|_| !llama),
        // With recurrent layers vLLM prints the size that it grew the block to: an outcome, not a flag.
        block_size: whole(Quantity::BlockSize).filter(|_| reading.engine != "vllm"),
        prefix_caching: text(Word::PrefixCaching).map(|switch| switch == "True"),
        draft: draft(facts),
        graphs: text(Word::Eager) != Some("True"),
        hybrid_manager: text(Word::FullWindows).is_none(),
        micro_batch: whole(Quantity::MicroBatch).unwrap_or(512),
        sequences: whole(Quantity::Sequences).filter(|_| llama).unwrap_or(1),
        ..Setup::default()
    }
}

/// What the start measured, each number with its line.
pub fn measured(facts: &Facts) -> Measured {
    let weights = facts.figure(Quantity::Weights);
    let peak = || {
        // V0 before December 2024 prints the peak with the weights in it (vllm#10517).
        let (peak, weights) = (facts.figure(Quantity::PeakTorch)?, weights.as_ref()?);
        let source =
            format!("{}, less the weights of {}", peak.explanation(), weights.explanation());
        let figure = Figure::measured((peak.value - weights.value).max(0.0), Unit::Bytes, source);
        Some(figure.within(peak.low - weights.high, peak.high - weights.low))
    };
    Measured {
        activation: facts.figure(Quantity::Activation).or_else(peak),
        non_torch: facts.figure(Quantity::NonTorch),
        graphs: facts.figure(Quantity::Graphs),
        reserved: facts.figure(Quantity::Reserved),
        kv: facts.figure(Quantity::Kv),
        weights,
    }
}

fn version(reading: &Reading, known: &Known) -> (Version, bool) {
    let named = || reading.facts.word(Word::Version).map(|(text, _)| text.to_string());
    let text = known.version.clone().or_else(named).unwrap_or_default();
    let generation = reading.generation.as_deref().unwrap_or("");
    match reading.engine {
        "vllm" => behavior::parse_version(&format!("{text} {generation}")),
        _ => (Version::parse(&text, 10).unwrap_or(LATEST), false),
    }
}

fn kv_format(text: Option<&str>) -> Option<KvDtype> {
    // torch's names: float8_e4m3fn, float8_e5m2.
    let text = text?;
    KvDtype::parse(text).or_else(|| text.contains("float8").then_some(KvDtype::Fp8))
}

/// A weight format by what engines call their kernels: `awq_marlin`, `gptq_marlin`, `modelopt_fp4`.
fn weight_format(text: &str) -> Option<WeightFormat> {
    WeightFormat::parse(text).or_else(|| {
        let (first, _) = text.split_once(['_', '-'])?;
        WeightFormat::parse(first)
    })
}

/// A weight format out of a model's name: `…-FP8`, `…-AWQ`, `…-Q4_K_M.gguf`.
fn named_format(name: &str) -> Option<WeightFormat> {
    let last = name.rsplit(['/', '\\']).next().unwrap_or(name);
    let name = last.strip_suffix(".gguf").unwrap_or(last);
    name.split('-').rev().filter(|word| word.len() > 2).find_map(WeightFormat::parse)
}

fn draft(facts: &Facts) -> Option<Draft> {
    let (name, _) = facts.word(Word::Draft)?;
    let kind = match name {
        _ if name.contains("mtp") => DraftKind::NextToken,
        _ if name.contains("ngram") => DraftKind::Lookup,
        _ => DraftKind::Head,
    };
    Some(Draft { kind, layers: None, tokens: facts.whole(Quantity::DraftTokens).unwrap_or(1) })
}
