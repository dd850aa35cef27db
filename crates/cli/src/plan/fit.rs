//! `reef plan fit`: will it fit, where do the gigabytes go, and which flag to change.

use std::path::PathBuf;

use anyhow::bail;
use reef_plan::device;
use reef_plan::dtype::KvDtype;
use reef_plan::engines::setup::{Draft, DraftKind, Measured, Setup};
use reef_plan::engines::version::{LATEST, Version};
use reef_plan::engines::vllm::behavior;
use reef_plan::engines::weights::WeightFormat;
use reef_plan::engines::{self, Engine};
use reef_plan::figure::{Figure, Unit};
use reef_plan::model::Model;
use reef_plan::{fit, report, source};

use super::page;
use crate::output::WrongArguments;
use crate::{Common, output, sizes};

/// Say whether a model fits, where the gigabytes go, and which flag to change
#[derive(clap::Args)]
pub struct Args {
    /// An HF config.json, a directory with one, a GGUF, or the name of a bundled config
    #[arg(long)]
    pub model: String,
    /// Supply or overrule a field of the model's config; may be repeated
    #[arg(long, value_name = "FIELD=VALUE")]
    set: Vec<String>,
    /// Device, as `reef plan devices` lists them
    #[arg(long, value_name = "NAME")]
    gpu: Option<String>,
    /// Devices; without --tp all of them split each layer
    #[arg(long, value_name = "N", default_value_t = 1)]
    count: u64,
    /// Memory of one device, instead of the table's
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse)]
    gpu_memory: Option<u64>,
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    ranks: RankArgs,
    #[command(flatten)]
    memory: MemoryArgs,
    /// Write one self-contained page to this file
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    #[command(flatten)]
    common: Common,
}

/// The engine and its flags.
#[derive(clap::Args)]
struct EngineArgs {
    /// vllm, sglang, trtllm, llamacpp or reef
    #[arg(long, default_value = "vllm")]
    engine: String,
    /// Its version, where behavior differs; a month (2026-09) or `V0` will do [default: the latest]
    #[arg(long, value_name = "VERSION")]
    engine_version: Option<String>,
    /// Longest request in tokens [default: the trained context]
    #[arg(long, value_name = "TOKENS")]
    max_model_len: Option<u64>,
    /// Tokens of one step's batch
    #[arg(long, value_name = "TOKENS")]
    max_num_batched_tokens: Option<u64>,
    /// Sequences at once
    #[arg(long, value_name = "N")]
    max_num_seqs: Option<u64>,
    /// Tokens of a KV block
    #[arg(long, value_name = "TOKENS")]
    block_size: Option<u64>,
    /// Prefix caching [default: as the version has it]
    #[arg(long, value_name = "on|off", value_parser = parse_switch)]
    prefix_caching: Option<bool>,
    /// Speculation: mtp (layers shipped with the model), eagle (a head beside it) or ngram
    #[arg(long, value_name = "mtp|eagle|ngram", value_parser = parse_draft)]
    speculate: Option<DraftKind>,
    /// Tokens drafted a step
    #[arg(long, value_name = "N", default_value_t = 1)]
    draft_tokens: u64,
    /// No CUDA graphs
    #[arg(long)]
    enforce_eager: bool,
    /// Load only the language model of a multimodal one
    #[arg(long)]
    language_model_only: bool,
    /// Charge window layers as full attention
    #[arg(long)]
    disable_hybrid_kv_cache_manager: bool,
    /// llama.cpp: tokens of a micro-batch
    #[arg(long, value_name = "TOKENS", default_value_t = 512)]
    ubatch_size: u64,
    /// llama.cpp: sequences that share the context
    #[arg(long, value_name = "N", default_value_t = 1)]
    parallel: u64,
}

/// How ranks split the work.
#[derive(clap::Args)]
struct RankArgs {
    /// Ranks that split each layer
    #[arg(long, value_name = "N")]
    tp: Option<u64>,
    /// Ranks that split the stack
    #[arg(long, value_name = "N", default_value_t = 1)]
    pp: u64,
    /// Replicas of the attention
    #[arg(long, value_name = "N", default_value_t = 1)]
    dp: u64,
    /// Ranks that split the experts [default: as --tp]
    #[arg(long, value_name = "N", default_value_t = 0)]
    ep: u64,
    /// Ranks that split a sequence's cache (decode context parallelism)
    #[arg(long, value_name = "N", default_value_t = 1)]
    cp: u64,
}

/// Formats and budgets.
#[derive(clap::Args)]
struct MemoryArgs {
    /// Weight format: bf16, fp8, awq, gptq, nvfp4, mxfp4, q4_k … [default: the checkpoint's]
    #[arg(long, value_name = "FORMAT", value_parser = parse_weights)]
    weights: Option<WeightFormat>,
    /// KV format: auto, bf16, fp8, q8_0 …, or keys and values apart as q8_0/f16
    #[arg(long, value_name = "FORMAT", default_value = "auto", value_parser = parse_kv)]
    kv_cache_dtype: (KvDtype, KvDtype),
    /// Share of the device that the engine may use
    #[arg(long, value_name = "SHARE")]
    gpu_memory_utilization: Option<f64>,
    /// The KV pool outright, per device
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse)]
    kv_memory: Option<u64>,
    /// What a log measured, for example weights=14.96GiB: weights, non-torch, activation, graphs,
    /// reserved or kv; may be repeated
    #[arg(long, value_name = "WHAT=SIZE", value_parser = parse_measured)]
    measured: Vec<(String, u64)>,
}

fn parse_switch(text: &str) -> Result<bool, String> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err("want on or off".into()),
    }
}

fn parse_draft(text: &str) -> Result<DraftKind, String> {
    match text {
        "mtp" | "nextn" => Ok(DraftKind::NextToken),
        "eagle" | "eagle3" => Ok(DraftKind::Head),
        "ngram" => Ok(DraftKind::Lookup),
        _ => Err("want mtp, eagle or ngram".into()),
    }
}

pub fn parse_weights(text: &str) -> Result<WeightFormat, String> {
    let known = || WeightFormat::known().collect::<Vec<_>>().join(", ");
    WeightFormat::parse(text).ok_or_else(|| format!("want one of {}", known()))
}

pub fn parse_kv(text: &str) -> Result<(KvDtype, KvDtype), String> {
    let known = || KvDtype::known().collect::<Vec<_>>().join(", ");
    let parse = |text| KvDtype::parse(text).ok_or_else(|| format!("want one of {}", known()));
    // Reef's name for 8-bit keys and 4-bit values.
    let text = if text == "k8v4" { "int8/int4" } else { text };
    let (keys, values) = text.split_once('/').unwrap_or((text, text));
    Ok((parse(keys)?, parse(values)?))
}

fn parse_measured(text: &str) -> Result<(String, u64), String> {
    const KNOWN: [&str; 6] = ["weights", "non-torch", "activation", "graphs", "reserved", "kv"];
    let (what, size) = text.split_once('=').ok_or("want WHAT=SIZE, for example kv=3.81GiB")?;
    if !KNOWN.contains(&what) {
        return Err(format!("`{what}` is none of {}", KNOWN.join(", ")));
    }
    Ok((what.to_string(), sizes::parse(size)?))
}

/// Runs `reef plan fit`.
pub fn run(args: Args) -> anyhow::Result<()> {
    let (model, fit) = answer(&args)?;
    if let Some(path) = &args.html {
        page::write(path, &model, &fit, None)?;
    }
    if args.common.json {
        return output::print_json(&fit);
    }
    output::print_line(report::text(&fit).trim_end())
}

/// The model and the plan that the arguments ask for.
fn answer(args: &Args) -> anyhow::Result<(Model, fit::Fit)> {
    let name = &args.engine.engine;
    let Some(engine) = engines::find(name) else {
        let known = engines::engines().map(Engine::name).join(", ");
        bail!(WrongArguments(format!("--engine `{name}`: want one of {known}")));
    };
    let model = source::read(&args.model, &args.set)?;
    let setup = setup(args, &model, engine)?;
    let fit = fit::fit(engine, &model, setup)?;
    Ok((model, fit))
}

fn setup(args: &Args, model: &Model, engine: &dyn Engine) -> anyhow::Result<Setup> {
    let (flags, memory) = (&args.engine, &args.memory);
    let (version, first_engine) = version(engine.name(), flags.engine_version.as_deref())?;
    let device = args.gpu.as_deref().map(device::find).transpose()?;
    let total = match (args.gpu_memory, device) {
        (Some(bytes), _) => Some(Figure::measured(bytes as f64, Unit::Bytes, "--gpu-memory")),
        (None, Some(device)) => {
            Some(Figure::measured(device.memory_bytes, Unit::Bytes, device.source))
        }
        (None, None) => None,
    };
    let published = model.quantization.as_deref().and_then(WeightFormat::parse);
    let draft =
        flags.speculate.map(|kind| Draft { kind, layers: None, tokens: flags.draft_tokens });
    let given = |bytes: u64| Figure::measured(bytes as f64, Unit::Bytes, "--kv-memory");
    let ranks = &args.ranks;
    let tp = ranks.tp.unwrap_or_else(|| (args.count / (ranks.pp * ranks.dp).max(1)).max(1));
    let devices = tp * ranks.pp * ranks.dp;
    if args.count > 1 && devices > args.count {
        let text = format!("tp {tp} x pp {} x dp {} take {devices} devices", ranks.pp, ranks.dp);
        bail!(WrongArguments(format!("{text}, --count is {}", args.count)));
    }
    Ok(Setup {
        version,
        first_engine,
        device: device.map_or(String::new(), |device| device.name.to_string()),
        architecture: device.map_or(String::new(), |device| device.architecture.to_string()),
        total,
        tp,
        pp: ranks.pp,
        dp: ranks.dp,
        ep: ranks.ep,
        cp: ranks.cp,
        weights: memory.weights.or(published).unwrap_or(WeightFormat::Bf16),
        kv_keys: memory.kv_cache_dtype.0,
        kv_values: memory.kv_cache_dtype.1,
        max_model_len: flags.max_model_len,
        utilization: memory.gpu_memory_utilization,
        max_num_batched_tokens: flags.max_num_batched_tokens,
        max_num_seqs: flags.max_num_seqs,
        block_size: flags.block_size,
        prefix_caching: flags.prefix_caching,
        draft,
        graphs: !flags.enforce_eager,
        text_only: flags.language_model_only,
        hybrid_manager: !flags.disable_hybrid_kv_cache_manager,
        micro_batch: flags.ubatch_size,
        sequences: flags.parallel,
        kv_budget: memory.kv_memory.map(given),
        measured: measured(&memory.measured),
        ..Setup::default()
    })
}

fn version(engine: &str, text: Option<&str>) -> anyhow::Result<(Version, bool)> {
    match (engine, text) {
        (_, None) => Ok((LATEST, false)),
        ("vllm", Some(text)) => Ok(behavior::parse_version(text)),
        (_, Some(text)) => match Version::parse(text, 10) {
            Some(version) => Ok((version, false)),
            None => {
                bail!(WrongArguments(format!("--engine-version `{text}`: want for example 0.5.4")))
            }
        },
    }
}

fn measured(given: &[(String, u64)]) -> Measured {
    let mut measured = Measured::default();
    for (what, bytes) in given {
        let figure = Figure::measured(*bytes as f64, Unit::Bytes, format!("--measured {what}"));
        let slot = match what.as_str() {
            "weights" => &mut measured.weights,
            "non-torch" => &mut measured.non_torch,
            "activation" => &mut measured.activation,
            "graphs" => &mut measured.graphs,
            "reserved" => &mut measured.reserved,
            _ => &mut measured.kv,
        };
        *slot = Some(figure);
    }
    measured
}
