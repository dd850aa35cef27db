//! Bytes of weights, from the parameter inventory and the format.

use serde::Serialize;

use super::setup::{Draft, DraftKind, Setup};
use crate::figure::{Figure, Unit};
use crate::model::{MissingFields, Model, Parameters};

/// How weights are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum WeightFormat {
    /// 4 bytes.
    F32,
    /// bfloat16 or float16.
    Bf16,
    /// 8-bit float, block or channel scales.
    Fp8,
    /// 8-bit integers, channel scales.
    Int8,
    /// 4-bit integers in groups of 128 with a scale and a zero point: AWQ, GPTQ, wna16.
    Int4,
    /// bitsandbytes NF4 in groups of 64.
    Bnb4,
    /// NVFP4: 4-bit floats, an fp8 scale per 16.
    Nvfp4,
    /// MXFP4 on the experts alone (gpt-oss): 4-bit floats, a byte of scale per 32.
    Mxfp4,
    /// 4-bit experts, 8-bit floats for the rest (DeepSeek-V4).
    Fp4Experts,
    /// ggml `q8_0`.
    Q8_0,
    /// ggml `q6_k`.
    Q6K,
    /// ggml `q5_k` mixes.
    Q5K,
    /// ggml `q4_k` mixes.
    Q4K,
    /// ggml `q4_0`.
    Q4_0,
    /// ggml `q3_k` mixes.
    Q3K,
    /// ggml `q2_k` mixes.
    Q2K,
}

/// What a format does to the classes of weights, in bits.
struct Row {
    format: WeightFormat,
    names: &'static [&'static str],
    /// Bits of a weight of a linear layer, scales included.
    linear: f64,
    /// Bits of attention projections where checkpoints usually leave them wider.
    attention: f64,
    /// Bits of embedding and output.
    vocabulary: f64,
    /// Bits of dense feed-forward layers where only routed experts have `linear`.
    dense: f64,
    /// How far checkpoints of this format stray from it: layers left out, other group sizes.
    spread: (f64, f64),
}

const TABLE: [Row; 16] = [
    row(WeightFormat::F32, &["f32", "fp32", "float32"], 32.0, 32.0, 32.0, (0.98, 1.03)),
    row(
        WeightFormat::Bf16,
        &["bf16", "fp16", "f16", "auto", "bfloat16", "half"],
        16.0,
        16.0,
        16.0,
        (0.98, 1.04),
    ),
    row(WeightFormat::Fp8, &["fp8", "fp8_e4m3", "w8a8-fp8"], 8.0, 8.0, 16.0, (0.97, 1.12)),
    row(WeightFormat::Int8, &["int8", "w8a8", "w8a16"], 8.1, 8.1, 16.0, (0.97, 1.12)),
    row(WeightFormat::Bnb4, &["bnb", "bitsandbytes", "nf4"], 4.2, 4.2, 16.0, (0.95, 1.15)),
    row(WeightFormat::Nvfp4, &["nvfp4", "fp4", "modelopt"], 4.5, 4.5, 16.0, (0.95, 1.35)),
    row(
        WeightFormat::Int4,
        &["awq", "gptq", "int4", "w4a16", "wna16", "autoround", "4-bit"],
        4.25,
        4.25,
        16.0,
        (0.95, 1.2),
    ),
    Row {
        format: WeightFormat::Mxfp4,
        names: &["mxfp4"],
        linear: 4.25,
        attention: 16.0,
        vocabulary: 16.0,
        dense: 16.0,
        spread: (0.97, 1.05),
    },
    Row {
        format: WeightFormat::Fp4Experts,
        names: &["fp4-experts"],
        linear: 4.25,
        attention: 8.0,
        vocabulary: 16.0,
        dense: 8.0,
        spread: (0.95, 1.1),
    },
    row(WeightFormat::Q8_0, &["q8_0"], 8.5, 8.5, 8.5, (0.98, 1.03)),
    row(WeightFormat::Q6K, &["q6_k"], 6.56, 6.56, 6.56, (0.98, 1.05)),
    row(WeightFormat::Q5K, &["q5_k", "q5_k_m", "q5_k_s"], 5.6, 5.6, 6.0, (0.95, 1.08)),
    row(WeightFormat::Q4K, &["q4_k", "q4_k_m", "q4_k_s"], 4.75, 4.75, 5.5, (0.92, 1.1)),
    row(WeightFormat::Q4_0, &["q4_0", "q4_1"], 4.5, 4.5, 5.5, (0.97, 1.15)),
    row(WeightFormat::Q3K, &["q3_k", "q3_k_m", "q3_k_s", "q3_k_l"], 3.8, 3.8, 5.0, (0.9, 1.12)),
    row(WeightFormat::Q2K, &["q2_k", "q2_k_s"], 2.95, 2.95, 5.0, (0.9, 1.2)),
];

const fn row(
    format: WeightFormat,
    names: &'static [&'static str],
    linear: f64,
    attention: f64,
    vocabulary: f64,
    spread: (f64, f64),
) -> Row {
    Row { format, names, linear, attention, vocabulary, dense: linear, spread }
}

impl WeightFormat {
    fn row(self) -> &'static Row {
        TABLE.iter().find(|row| row.format == self).unwrap_or(&TABLE[1])
    }

    /// The name we print.
    pub fn name(self) -> &'static str {
        self.row().names[0]
    }

    /// Every name that is understood.
    pub fn known() -> impl Iterator<Item = &'static str> {
        TABLE.iter().flat_map(|row| row.names.iter().copied())
    }

    /// The format of that name.
    pub fn parse(name: &str) -> Option<WeightFormat> {
        let name = name.trim().to_lowercase();
        TABLE.iter().find(|row| row.names.contains(&name.as_str())).map(|row| row.format)
    }

    /// The first format named in a text such as `awq int4` or `fp8 (marlin weight-only)`.
    pub fn find_in(text: &str) -> Option<WeightFormat> {
        let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == '-'));
        words.filter_map(WeightFormat::parse).next()
    }

    /// Bytes of all weights without sharding.
    pub fn bytes(self, parameters: &Parameters) -> f64 {
        let row = self.row();
        let bits = (parameters.embedding + parameters.output) as f64 * row.vocabulary
            + parameters.attention as f64 * row.attention
            + parameters.dense as f64 * row.dense
            + parameters.experts as f64 * row.linear
            + (parameters.router + parameters.small + parameters.tower) as f64
                * row.vocabulary.max(16.0);
        bits / 8.0
    }
}

/// Parameters of an encoder that the config does not describe: most are of 0.4 to 0.7 billion.
const UNKNOWN_TOWER: u64 = 500_000_000;

/// Weights of one GPU: everything but norms and routers is split over `tp`, the stack over `pp`, experts
/// over the same ranks whether by tensor or by expert.
///
/// # Errors
/// The config fields that the count lacks.
pub fn per_gpu(model: &Model, setup: &Setup) -> Result<Figure, MissingFields> {
    if let Some(measured) = &setup.measured.weights {
        return Ok(measured.clone());
    }
    let mut parameters = model.parameters()?;
    if setup.text_only {
        parameters.tower = 0;
    }
    if parameters.tower == 0 && model.has_encoder && !setup.text_only {
        // An encoder that the config does not describe.
        parameters.tower = UNKNOWN_TOWER;
    }
    parameters.dense += draft_parameters(model, setup, &parameters);
    let ranks = (setup.tp * setup.pp) as f64;
    let published = model.quantization.as_deref().and_then(WeightFormat::parse);
    let as_published = setup.weights == published.unwrap_or(WeightFormat::Bf16);
    if let Some(bytes) = model.file_bytes.filter(|_| as_published) {
        let formula = format!("{bytes} bytes of tensors in the file / {ranks} ranks");
        return Ok(Figure::derived(bytes as f64 / ranks, Unit::Bytes, formula));
    }
    let copied = WeightFormat::Bf16.bytes(&Parameters {
        router: parameters.router,
        small: parameters.small,
        ..Parameters::default()
    });
    let padding = expert_padding(model, setup.weights);
    parameters.experts = (parameters.experts as f64 * padding) as u64;
    let all = setup.weights.bytes(&parameters);
    let experts =
        setup.weights.bytes(&Parameters { experts: parameters.experts, ..Parameters::default() });
    // Experts may be split over the replicas of the attention too.
    let expert_ranks = (setup.ep.max(setup.tp) * setup.pp) as f64;
    let bytes =
        (all - copied - experts) / ranks + experts / expert_ranks + copied / setup.pp as f64;
    let formula = format!(
        "{:.2} B parameters in {}: {:.2} GiB over tp {} x pp {} (experts over {expert_ranks}), \
         {:.2} GiB of norms and routers on each",
        parameters.total() as f64 / 1e9,
        setup.weights.name(),
        all / super::GIB,
        setup.tp,
        setup.pp,
        copied / super::GIB
    );
    let (low, high) = setup.weights.row().spread;
    Ok(Figure::assumed(bytes, bytes * low, bytes * high, Unit::Bytes, formula))
}

/// Parameters of the draft: the model's own next-token layers, or heads of one layer of average size and
/// the projection that mixes two hidden states (EAGLE, arXiv 2401.15077).
fn draft_parameters(model: &Model, setup: &Setup, parameters: &Parameters) -> u64 {
    match setup.draft {
        Some(Draft { kind: DraftKind::NextToken, .. }) => parameters.draft,
        Some(Draft { kind: DraftKind::Head, layers, .. }) => {
            let layer =
                (parameters.attention + parameters.dense) / model.layers.len().max(1) as u64;
            let hidden = model.hidden.unwrap_or(0);
            layers.unwrap_or(1).min(64) * (layer + 2 * hidden * hidden)
        }
        _ => 0,
    }
}

/// How much the MXFP4 kernels' padding adds to experts: hidden size to a multiple of 256, expert width to
/// one of 128 (gpt-oss: 2,880 to 3,072 and 2,944).
fn expert_padding(model: &Model, format: WeightFormat) -> f64 {
    let (Some(hidden), Some(width)) =
        (model.hidden, model.expert_intermediate.or(model.intermediate))
    else {
        return 1.0;
    };
    if format != WeightFormat::Mxfp4 || hidden * width == 0 {
        return 1.0;
    }
    let padded = hidden.next_multiple_of(256) * width.next_multiple_of(128);
    padded as f64 / (hidden * width) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_found_in_tables() {
        assert_eq!(WeightFormat::find_in("awq int4"), Some(WeightFormat::Int4));
        assert_eq!(WeightFormat::find_in("fp8 (marlin weight-only)"), Some(WeightFormat::Fp8));
        assert_eq!(WeightFormat::find_in("bnb 4-bit"), Some(WeightFormat::Bnb4));
        assert_eq!(WeightFormat::find_in("nvfp4 (modelopt)"), Some(WeightFormat::Nvfp4));
        assert_eq!(WeightFormat::find_in("(unknown)"), None);
        for row in &TABLE {
            assert_eq!(WeightFormat::parse(row.names[0]), Some(row.format));
        }
    }
}
