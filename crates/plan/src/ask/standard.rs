//! Inputs that many questions share: the model, the device, and what follows from them.

use crate::ask::AskError;
use crate::ask::input::{Facts, Fallback, Input, Table};
use crate::device::{Arithmetic, Device};
use crate::dtype::KvDtype;
use crate::figure::Unit;

const KV_DTYPES: [&str; 9] =
    ["bf16", "f16", "fp8", "int8", "nvfp4", "q8_0", "q4_0", "fp8_ds_mla", "f32"];
/// Weight formats: name, bits a weight with scales, units that multiply them.
const WEIGHTS: [(&str, f64, Arithmetic); 9] = [
    ("bf16", 16.0, Arithmetic::Bf16),
    ("fp8", 8.0, Arithmetic::Fp8),
    ("int8", 8.0, Arithmetic::Int8),
    // Group 128: 4 bits + 16-bit scale + 4-bit zero; decoded to bf16 by the kernels people run.
    ("awq", 4.15625, Arithmetic::Bf16),
    ("gptq", 4.15625, Arithmetic::Bf16),
    // An e4m3 scale per 16, an e2m1 code each.
    ("nvfp4", 4.5, Arithmetic::Fp4),
    ("mxfp4", 4.25, Arithmetic::Fp4),
    ("q8_0", 8.5, Arithmetic::Int8),
    ("q4_k", 4.5, Arithmetic::Int8),
];
const WEIGHT_NAMES: [&str; 9] =
    ["bf16", "fp8", "int8", "awq", "gptq", "nvfp4", "mxfp4", "q8_0", "q4_k"];

/// `--model`.
pub fn model(default: &'static str) -> Input {
    let meaning = "a bundled config, a config.json, a directory or a GGUF";
    let input = Input::choice("model", default, &[], meaning);
    Input { table: Table::Models, fallback: Fallback::Word(default, &[]), ..input }
}

/// `--gpu`.
pub fn gpu(default: &'static str) -> Input {
    let input = Input::choice("gpu", default, &[], "a device of the table");
    Input { table: Table::Devices, fallback: Fallback::Word(default, &[]), ..input }
}

/// `--count`: devices that work as one.
pub fn count(default: f64) -> Input {
    Input::number("count", Unit::Count, default, "devices that share the model").whole().fixed()
}

/// `--tp`.
pub fn tp(default: f64) -> Input {
    Input::number("tp", Unit::Count, default, "tensor-parallel ranks").whole().fixed()
}

/// `--kv-cache-dtype`.
pub fn kv_cache_dtype() -> Input {
    Input::choice("kv_cache_dtype", "bf16", &KV_DTYPES, "format of the KV cache")
}

/// `--kv-bytes`: bytes of KV memory per token on one rank. Needs the model and its dtype before it; uses
/// `tp` where the question has one.
pub fn kv_bytes() -> Input {
    let work = |facts: &Facts| {
        let tp = facts.number("tp").unwrap_or(1.0);
        Ok(facts.model()?.kv_bytes_per_token(dtype(facts.word("kv_cache_dtype")?)?, tp as u64) as f64)
    };
    let origin = "the model's, all layers, on one rank";
    Input::worked("kv_bytes", Unit::BytesPerToken, origin, work, "KV memory a token takes")
}

/// `--weights`: the format of the weights.
pub fn weights() -> Input {
    Input::choice("weights", "bf16", &WEIGHT_NAMES, "format of the weights")
}

/// `--weight-bytes`: all weights, in the format before.
pub fn weight_bytes() -> Input {
    let work = |facts: &Facts| {
        let parameters = facts.model()?.parameters()?.total() as f64;
        Ok(parameters * weight_bits(facts.word("weights")?)? / 8.0)
    };
    let origin = "the model's parameters in that format";
    Input::worked("weight_bytes", Unit::Bytes, origin, work, "weights, over all ranks")
}

/// `--active-parameters`: parameters a token multiplies with.
pub fn active_parameters() -> Input {
    let work = |facts: &Facts| Ok(facts.model()?.parameters()?.active() as f64);
    let origin = "the model's, without the embedding rows it only looks up";
    Input::worked("active_parameters", Unit::Count, origin, work, "parameters a token multiplies with")
}

/// `--peak`: dense bf16 arithmetic of one device.
pub fn peak() -> Input {
    let work = |facts: &Facts| Ok(facts.device()?.peak(Arithmetic::Bf16));
    let origin = "the device's, dense bf16";
    Input::worked("peak", Unit::FlopPerSecond, origin, work, "peak arithmetic of a device")
}

/// `--bandwidth`: memory bandwidth of one device.
pub fn bandwidth() -> Input {
    let work = |facts: &Facts| Ok(facts.device()?.bandwidth_bytes_s);
    let origin = "the device's data sheet";
    Input::worked("bandwidth", Unit::BytesPerSecond, origin, work, "memory bandwidth of a device")
}

/// `--memory`: memory of one device.
pub fn memory() -> Input {
    let work = |facts: &Facts| Ok(facts.device()?.memory_bytes);
    let origin = "the device's, as engines print it";
    Input::worked("memory", Unit::Bytes, origin, work, "memory of a device")
}

/// `--link`: the device's link to host memory, one direction.
pub fn host_link() -> Input {
    let work = |facts: &Facts| Ok(facts.device()?.host_link_bytes_s);
    let origin = "the device's, one direction";
    Input::worked("link", Unit::BytesPerSecond, origin, work, "link to host memory")
}

/// `--link-efficiency`: the share of a link's rate that bulk copies reach.
pub fn link_efficiency() -> Input {
    let meaning = "share of the link that bulk copies reach";
    Input::number("link_efficiency", Unit::Ratio, 0.8, meaning).within(0.01, 1.0)
}

/// `--mfu`: the share of peak arithmetic that prefill reaches.
pub fn mfu() -> Input {
    let meaning = "share of peak arithmetic that prefill reaches";
    Input::number("mfu", Unit::Ratio, 0.5, meaning).within(0.01, 1.0)
}

/// `--utilization`: vLLM's `--gpu-memory-utilization`.
pub fn utilization(default: f64) -> Input {
    let meaning = "--gpu-memory-utilization";
    Input::number("utilization", Unit::Ratio, default, meaning).within(0.05, 1.0)
}

/// `--context`: tokens of a sequence.
pub fn context(default: f64) -> Input {
    Input::number("context", Unit::Tokens, default, "tokens of a sequence").whole()
}

/// `--block-size`: tokens of a KV block.
pub fn block_size(default: f64) -> Input {
    Input::number("block_size", Unit::Tokens, default, "tokens of a KV block").whole().fixed()
}

/// `--pool`: KV memory of one rank, what remains of the device after weights, at the memory engines leave.
/// Needs memory, utilization, weight_bytes and overhead before it; uses `tp` where there is one.
pub fn pool() -> Input {
    let work = |facts: &Facts| {
        let tp = facts.number("tp").unwrap_or(1.0);
        let budget = facts.number("memory")? * facts.number("utilization")?;
        Ok(budget - facts.number("weight_bytes")? / tp - facts.number("overhead")?)
    };
    let origin = "memory × utilization - weight_bytes / tp - overhead";
    Input::worked("pool", Unit::Bytes, origin, work, "KV memory of one rank")
}

/// `--overhead`: what an engine takes beside weights and KV on one device.
pub fn overhead() -> Input {
    let meaning = "activation peak, non-torch memory and graphs of a device";
    Input::number("overhead", Unit::Bytes, 3.0 * 1024.0 * 1024.0 * 1024.0, meaning)
}

/// The KV format of a name.
pub fn dtype(name: &str) -> Result<KvDtype, AskError> {
    KvDtype::parse(name).ok_or_else(|| AskError::Wrong {
        field: "--kv-cache-dtype".into(),
        value: name.into(),
        mend: format!("write one of {}", KV_DTYPES.join(", ")),
    })
}

/// Bits a weight takes in a format, scales included.
pub fn weight_bits(name: &str) -> Result<f64, AskError> {
    Ok(weight_format(name)?.1)
}

/// The arithmetic that a device does with weights of a format, in operations/s.
pub fn weight_peak(name: &str, device: &Device) -> Result<f64, AskError> {
    Ok(device.peak(weight_format(name)?.2))
}

/// Whether the device has units for weights of a format.
pub fn is_native(name: &str, device: &Device) -> Result<bool, AskError> {
    Ok(device.native_peak(weight_format(name)?.2).is_some())
}

fn weight_format(name: &str) -> Result<(&'static str, f64, Arithmetic), AskError> {
    let found = WEIGHTS.iter().find(|(known, ..)| *known == name);
    found.copied().ok_or_else(|| AskError::Wrong {
        field: "--weights".into(),
        value: name.into(),
        mend: format!("write one of {}", WEIGHT_NAMES.join(", ")),
    })
}

/// "fits" or "does not fit", as decisions say it.
pub fn fits(does: bool) -> Option<String> {
    Some(if does { "fits" } else { "does not fit" }.to_string())
}
