//! Inputs that many questions share: the model, the device, and what follows from them.

use crate::ask::input::{Facts, Fallback, Input, Table};
use crate::ask::quantity::display;
use crate::ask::{AskError, start};
use crate::device::Arithmetic;
use crate::dtype::KvDtype;
use crate::engines::weights::WeightFormat;
use crate::figure::Unit;
use crate::model::Parameters;

const KV_DTYPES: [&str; 9] =
    ["bf16", "f16", "fp8", "int8", "nvfp4", "q8_0", "q4_0", "fp8_ds_mla", "f32"];
/// What engines take beside weights and KV where their plan does not say: 1 to 5 GiB in start-up logs.
const OVERHEAD_BYTES: f64 = 3.0 * 1024.0 * 1024.0 * 1024.0;
/// Weight formats that questions offer; `reef plan fit` knows the same by the same names.
const WEIGHT_NAMES: [&str; 10] =
    ["bf16", "fp8", "int8", "int4", "awq", "gptq", "nvfp4", "mxfp4", "q8_0", "q4_k"];

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
/// `tp` where the question has one, and averages windows and states over the length of a sequence where it
/// has that.
pub fn kv_bytes() -> Input {
    let work = |facts: &Facts| {
        let tp = facts.number("tp").unwrap_or(1.0) as u64;
        let (model, dtype) = (facts.model()?, dtype(facts.word("kv_cache_dtype")?)?);
        let lengths = ["context", "max_model_len", "prefix", "victim"];
        let length = lengths.into_iter().find_map(|name| facts.number(name).ok());
        Ok(match length.map(|tokens| tokens.max(1.0) as u64) {
            Some(tokens) => model.kv_bytes(tokens, dtype, tp) as f64 / tokens as f64,
            None => model.kv_bytes_per_token(dtype, tp) as f64,
        })
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
        let format = weight_format(facts.word("weights")?)?;
        Ok(format.bytes(&facts.model()?.parameters()?))
    };
    let origin = "the model's parameters in that format";
    Input::worked("weight_bytes", Unit::Bytes, origin, work, "weights, over all ranks")
}

/// `--active-parameters`: parameters a token multiplies with.
pub fn active_parameters() -> Input {
    let work = |facts: &Facts| Ok(facts.model()?.parameters()?.active() as f64);
    let origin = "the model's, without the embedding rows it only looks up";
    Input::worked(
        "active_parameters",
        Unit::Count,
        origin,
        work,
        "parameters a token multiplies with",
    )
}

/// `--peak`: dense arithmetic of one device, in the weights' format where the question has one.
pub fn peak() -> Input {
    let work = |facts: &Facts| match facts.word("weights") {
        Ok(weights) => Ok(facts.device()?.peak(arithmetic(weight_format(weights)?))),
        Err(_) => Ok(facts.device()?.peak(Arithmetic::Bf16)),
    };
    let origin = "the device's, dense, for the weights' format (bf16 without one)";
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
        let weights = facts.number("weight_bytes")? / tp;
        let overhead = facts.number("overhead")?;
        match budget - weights - overhead {
            pool if pool > 0.0 => Ok(pool),
            _ => Err(AskError::NoAnswer(format!(
                "no KV memory is left: weights of {} a rank and overhead of {} exceed {}; use more --tp, \
                 narrower --weights, another --gpu, or give --pool",
                display(weights, Unit::Bytes),
                display(overhead, Unit::Bytes),
                display(budget, Unit::Bytes)
            ))),
        }
    };
    let origin = "memory × utilization - weight_bytes / tp - overhead";
    Input::worked("pool", Unit::Bytes, origin, work, "KV memory of one rank")
}

/// `--overhead`: what an engine takes beside weights and KV on one device. Needs memory and utilization
/// before it.
pub fn overhead() -> Input {
    let work = |facts: &Facts| Ok(start::overhead_bytes(facts).unwrap_or(OVERHEAD_BYTES));
    let origin = "as `reef plan fit` estimates it for vLLM";
    let meaning = "activation peak, non-torch memory and graphs of a device";
    Input::worked("overhead", Unit::Bytes, origin, work, meaning)
}

/// The KV format of a name.
pub fn dtype(name: &str) -> Result<KvDtype, AskError> {
    KvDtype::parse(name).ok_or_else(|| AskError::Wrong {
        field: "--kv-cache-dtype".into(),
        value: name.into(),
        mend: format!("write one of {}", KV_DTYPES.join(", ")),
    })
}

/// The weight format of a name.
pub fn weight_format(name: &str) -> Result<WeightFormat, AskError> {
    WeightFormat::parse(name).ok_or_else(|| AskError::Wrong {
        field: "--weights".into(),
        value: name.into(),
        mend: format!("write one of {}", WEIGHT_NAMES.join(", ")),
    })
}

/// Bytes that a weight of a linear layer takes in a format, scales included.
pub fn weight_width(name: &str) -> Result<f64, AskError> {
    Ok(linear_width(weight_format(name)?))
}

/// Bytes that a weight of a linear layer takes in a format, scales included.
pub fn linear_width(format: WeightFormat) -> f64 {
    const WEIGHTS: u64 = 1 << 40;
    format.bytes(&Parameters { experts: WEIGHTS, ..Parameters::default() }) / WEIGHTS as f64
}

/// The units that multiply weights of a format in the kernels people run: 4-bit integers are decoded to
/// bf16, ggml's blocks to int8.
pub fn arithmetic(format: WeightFormat) -> Arithmetic {
    match format {
        WeightFormat::F32 | WeightFormat::Bf16 | WeightFormat::Int4 | WeightFormat::Bnb4 => {
            Arithmetic::Bf16
        }
        WeightFormat::Fp8 => Arithmetic::Fp8,
        WeightFormat::Nvfp4 | WeightFormat::Mxfp4 => Arithmetic::Fp4,
        _ => Arithmetic::Int8,
    }
}

/// "fits" or "does not fit", as decisions say it.
pub fn fits(does: bool) -> Option<String> {
    Some(if does { "fits" } else { "does not fit" }.to_string())
}
