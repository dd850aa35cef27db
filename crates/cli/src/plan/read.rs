//! `reef plan read`: a real start-up log, and how it differs from the plan.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use reef_plan::log::compare::{self, Comparison};
use reef_plan::log::facts::Word;
use reef_plan::log::start::Known;
use reef_plan::log::{self, Reading, name, report};
use reef_plan::model::Model;
use reef_plan::{device, engines, source};
use serde_json::{Map, Value, json};

use super::fit::{parse_kv, parse_weights};
use super::page;
use crate::output::WrongArguments;
use crate::{Common, output};

/// Read a start-up log and explain how it differs from the plan
#[derive(clap::Args)]
pub struct Args {
    /// The log of vLLM, SGLang, llama.cpp or TensorRT-LLM; `-` reads stdin
    log: PathBuf,
    /// An HF config.json, a directory with one, a GGUF, or the name of a bundled config
    /// [default: the bundled config of the log's model]
    #[arg(long)]
    model: Option<String>,
    /// Supply or overrule a field of the model's config; may be repeated
    #[arg(long, value_name = "FIELD=VALUE")]
    set: Vec<String>,
    /// Device, as `reef plan devices` lists them [default: the log's]
    #[arg(long, value_name = "NAME")]
    gpu: Option<String>,
    /// Weight format, where the log does not say it
    #[arg(long, value_name = "FORMAT", value_parser = parse_weights)]
    weights: Option<engines::weights::WeightFormat>,
    /// KV format, where the log does not say it; keys and values apart as q8_0/f16
    #[arg(long, value_name = "FORMAT", value_parser = parse_kv)]
    kv_cache_dtype: Option<(reef_plan::dtype::KvDtype, reef_plan::dtype::KvDtype)>,
    /// Ranks that split each layer, where the log does not say it
    #[arg(long, value_name = "N")]
    tp: Option<u64>,
    /// Longest request in tokens, where the log does not say it
    #[arg(long, value_name = "TOKENS")]
    max_model_len: Option<u64>,
    /// Share of the device that the engine may use, where the log does not say it
    #[arg(long, value_name = "SHARE")]
    gpu_memory_utilization: Option<f64>,
    /// Version of the engine, where the log does not say it
    #[arg(long, value_name = "VERSION")]
    engine_version: Option<String>,
    /// Write one self-contained page to this file
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    #[command(flatten)]
    common: Common,
}

/// Runs `reef plan read`.
pub fn run(args: Args) -> anyhow::Result<()> {
    let reading = log::read(&mut *open(&args.log)?)?;
    let mut notes = reading.notes.clone();
    let model = model(&args, &reading, &mut notes)?;
    let comparison = model.as_ref().map(|model| compare(&args, &reading, model)).transpose()?;
    if let Some(path) = &args.html {
        let (Some(model), Some(comparison)) = (&model, &comparison) else {
            let why = notes.last().map_or("", String::as_str);
            bail!(WrongArguments(format!("--html: a page needs a plan, and there is {why}")));
        };
        page::write(path, model, &comparison.fit, Some(&comparison.lines))?;
    }
    if args.common.json {
        return output::print_json(&document(&reading, comparison.as_ref(), &notes));
    }
    let mut text = report::facts(&reading);
    for note in &notes[reading.notes.len()..] {
        text += &format!("note: {note}\n");
    }
    if let Some(comparison) = &comparison {
        text += &format!("\n{}", report::comparison(comparison));
    }
    output::print_line(text.trim_end())
}

fn open(path: &Path) -> anyhow::Result<Box<dyn BufRead>> {
    if path == Path::new("-") {
        return Ok(Box::new(io::stdin().lock()));
    }
    let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    Ok(Box::new(BufReader::with_capacity(1 << 20, file)))
}

/// The model given, else the bundled one that the log's name means.
fn model(args: &Args, reading: &Reading, notes: &mut Vec<String>) -> anyhow::Result<Option<Model>> {
    if let Some(given) = &args.model {
        return Ok(Some(source::read(given, &args.set)?));
    }
    // A llama.cpp log has the file's name, which is what people call it, and the name inside it.
    let said = [Word::Model, Word::Architecture];
    let names = said.iter().filter_map(|word| reading.facts.word(*word)).map(|(name, _)| name);
    for said in names.clone() {
        if let Some(found) = name::bundled(said, source::bundled()) {
            notes.push(format!("model: {found} (bundled), which the log calls {said}"));
            return Ok(Some(source::read(found, &args.set)?));
        }
    }
    let said: Vec<&str> = names.collect();
    notes.push(match said.first() {
        Some(name) => {
            format!(
                "nothing to compare with: no bundled config is {name}; give --model config.json"
            )
        }
        None => "nothing to compare with: the log names no model; give --model".into(),
    });
    Ok(None)
}

fn compare(args: &Args, reading: &Reading, model: &Model) -> anyhow::Result<Comparison> {
    let engine = engines::find(reading.engine).context("an engine that reads logs has a plan")?;
    let known = Known {
        device: args.gpu.as_deref().map(device::find).transpose()?,
        weights: args.weights,
        kv: args.kv_cache_dtype,
        tp: args.tp,
        max_model_len: args.max_model_len,
        utilization: args.gpu_memory_utilization,
        version: args.engine_version.clone(),
    };
    Ok(compare::compare(engine, model, reading, &known)?)
}

fn document(reading: &Reading, comparison: Option<&Comparison>, notes: &[String]) -> Value {
    let key = |value: Value| value.as_str().unwrap_or_default().to_string();
    let numbers: Map<String, Value> = reading
        .facts
        .figures()
        .map(|(quantity, figure)| (key(json!(quantity)), json!(figure)))
        .collect();
    let texts: Map<String, Value> = reading
        .facts
        .words()
        .map(|(word, text, line)| (key(json!(word)), json!({"text": text, "line": line})))
        .collect();
    json!({
        "engine": reading.engine,
        "generation": reading.generation,
        "lines": reading.lines,
        "starts": reading.starts,
        "log": {"numbers": numbers, "texts": texts},
        "before": comparison.map(|comparison| &comparison.before),
        "fit": comparison.map(|comparison| &comparison.fit),
        "comparison": comparison.map(|comparison| &comparison.lines),
        "notes": notes,
    })
}
