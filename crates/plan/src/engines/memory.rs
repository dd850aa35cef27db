//! Models of the memory beside weights and KV: what a profile run peaks at, what lies outside the tensor
//! library, what graphs take. Estimates with ranges; a log replaces them.

use super::GIB;
use super::setup::Setup;
use crate::figure::{Figure, Unit};
use crate::model::{Cache, Model, RecurrentKind};

/// What is profiled.
#[derive(Clone, Copy, Debug)]
pub struct Profile {
    /// Tokens of the dummy batch.
    pub tokens: u64,
    /// Sequences whose logits are sampled; 0 where the profile samples none.
    pub sequences: u64,
    /// Bytes alive per logit at the sampler's peak: the logits in 16 and 32 bits, sorted values, 64-bit
    /// indices, probabilities, cumulated ones.
    pub bytes_per_logit: f64,
}

/// Peak of an encoder's profile run: logs show 1 to 8 GiB, depending on the largest image allowed.
const ENCODER_BYTES: f64 = 2.0 * GIB;

/// Activation peak of a profile run on one GPU: the larger of the widest layer for all its tokens and the
/// sampler for all its sequences (which splits nothing over ranks), with the residual stream.
pub fn activation(model: &Model, setup: &Setup, profile: Profile) -> Figure {
    if let Some(measured) = &setup.measured.activation {
        return measured.clone();
    }
    let hidden = model.hidden.unwrap_or(4096) as f64;
    let tokens = profile.tokens as f64;
    let layer = tokens * 2.0 * widest(model, setup.tp) + tokens * hidden * 2.0 * 2.0;
    let logits = (profile.sequences * model.vocabulary.unwrap_or(128_000)) as f64;
    let sampler = logits * profile.bytes_per_logit + tokens * hidden * 2.0;
    // The encoder is profiled before the language model: phases do not add up, the largest counts.
    let encodes = model.has_encoder && !setup.text_only;
    let encoder = if encodes { ENCODER_BYTES } else { 0.0 };
    let bytes = layer.max(sampler).max(encoder);
    let reason = format!(
        "the larger of {} tokens through the widest layer ({:.2} GiB) and {} rows of logits in the \
         sampler ({:.2} GiB){}",
        profile.tokens,
        layer / GIB,
        profile.sequences,
        sampler / GIB,
        if encodes { ", and an encoder's largest input" } else { "" }
    );
    let high = bytes * 1.5 + 0.3 * GIB + if encodes { 3.0 * GIB } else { 0.0 };
    Figure::assumed(bytes, bytes * 0.5, high, Unit::Bytes, reason)
}

/// Elements alive per token in the widest layer on one rank: gate, up and product of a dense feed-forward
/// layer; the same per expert and token with the experts' outputs; the projections of a recurrent layer.
fn widest(model: &Model, tp: u64) -> f64 {
    let tp = tp as f64;
    let hidden = model.hidden.unwrap_or(4096) as f64;
    let dense = model.intermediate.map_or(4.0 * hidden, |width| 3.0 * width as f64) / tp;
    let expert = model.expert_intermediate.or(model.intermediate).unwrap_or(0) as f64;
    let routed = model.experts_per_token as f64 * (3.0 * expert / tp + hidden);
    let recurrent = model.layers.iter().filter_map(|layer| match layer {
        Cache::Recurrent(state) if state.kind != RecurrentKind::Lightning => {
            // Projected, convolved and normalised channels, and a state per chunk of 64 tokens.
            Some(4.0 * state.convolution_channels as f64 + state.state_elements as f64 / 64.0)
        }
        _ => None,
    });
    let recurrent = recurrent.fold(0.0, f64::max) / tp;
    dense.max(routed).max(recurrent)
}

/// Memory outside the tensor library: CUDA context growth, cuBLAS and attention workspaces, NCCL.
/// Logs of the cases: 0.05 to 0.35 GiB on one workstation GPU, 1.8 on an H100, twice that at tp 2.
pub fn non_torch(setup: &Setup) -> Figure {
    if let Some(measured) = &setup.measured.non_torch {
        return measured.clone();
    }
    let large = matches!(setup.architecture.as_str(), "Hopper");
    let (one, one_low, one_high) = if large { (1.3, 0.2, 3.0) } else { (0.2, 0.03, 0.7) };
    let parallel = setup.tp * setup.pp > 1;
    let (more, more_low, more_high) = match (parallel, large) {
        (false, _) => (0.0, 0.0, 0.0),
        (true, true) => (1.0, 0.2, 2.2),
        (true, false) => (0.3, 0.0, 1.5),
    };
    let reason = format!(
        "context and workspaces {one} GiB{}",
        if parallel { format!(", communication {more} GiB") } else { String::new() }
    );
    let [value, low, high] =
        [one + more, one_low + more_low, one_high + more_high].map(|g| g * GIB);
    Figure::assumed(value, low, high, Unit::Bytes, reason)
}

/// CUDA graphs: one per batch size up to the largest; 24 to 28 MiB each at 67 sizes (vllm#22897), less per
/// graph in small models. 0 without graphs.
pub fn graphs(model: &Model, setup: &Setup) -> Figure {
    if let Some(measured) = &setup.measured.graphs {
        return measured.clone();
    }
    if !setup.graphs {
        return Figure::derived(0.0, Unit::Bytes, "graphs are off");
    }
    let layers = model.layers.len() as f64;
    let value = (0.15 + 0.006 * layers).min(1.0) * GIB;
    let reason = format!("graphs of {layers} layers for the usual batch sizes");
    Figure::assumed(value, 0.05 * GIB, 2.0 * GIB, Unit::Bytes, reason)
}

/// Memory of the device and the part an engine may use.
pub fn reserved(setup: &Setup, default_share: f64) -> Option<Figure> {
    if let Some(measured) = &setup.measured.reserved {
        return Some(measured.clone());
    }
    let total = setup.total.as_ref()?;
    let share = setup.utilization.unwrap_or(default_share);
    let formula = format!("{:.2} GiB * {share}", total.value / GIB);
    Some(super::through(total, Unit::Bytes, |bytes| bytes * share, formula))
}

/// What `parts` leave of `reserved`; its range pairs the smallest with the largest.
pub fn left_over(reserved: &Figure, parts: &[(&str, &Figure)]) -> Figure {
    let sum = |pick: fn(&Figure) -> f64| parts.iter().map(|(_, part)| pick(part)).sum::<f64>();
    let listed: String =
        parts.iter().map(|(name, part)| format!(" - {:.2} {name}", part.value / GIB)).collect();
    let formula = format!("{:.2}{listed} GiB", reserved.value / GIB);
    // Errors of independent parts rarely all point the same way: their spreads add as squares.
    let spread = |side: fn(&Figure) -> f64| {
        parts.iter().map(|(_, part)| side(part).powi(2)).sum::<f64>().sqrt()
    };
    let value = reserved.value - sum(|part| part.value);
    let low = value - spread(|part| part.high - part.value) - (reserved.value - reserved.low);
    let high = value + spread(|part| part.value - part.low) + (reserved.high - reserved.value);
    Figure::derived(value, Unit::Bytes, formula).within(low, high)
}
