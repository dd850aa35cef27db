//! `reef plan search`: which configurations serve this traffic within these targets.

use std::path::PathBuf;

use anyhow::Context as _;
use reef_plan::ask::quantity;
use reef_plan::device;
use reef_plan::figure::Unit;
use reef_plan::search::load::Targets;
use reef_plan::search::step_time::{Efficiency, Limit};
use reef_plan::search::traffic::{Summary, Traffic};
use reef_plan::search::{self, Fleet, Found, Search, Worked, trace};
use reef_plan::source;
use serde_json::json;

use crate::Common;
use crate::output::{self, WrongArguments};

/// Find the configurations that serve given traffic within latency targets
#[derive(clap::Args)]
pub struct Args {
    /// An HF config.json, a directory with one, a GGUF, or the name of a bundled config
    #[arg(long, default_value = "Llama-3.1-8B")]
    model: String,
    /// Supply or overrule a field of the model's config
    #[arg(long, value_name = "FIELD=VALUE")]
    set: Vec<String>,
    /// Devices that may be used: NAME:COUNT or NAME:COUNT@PRICE, several with commas
    #[arg(long, default_value = "H100:8")]
    gpus: String,
    /// Prompt and reply lengths: `IN:OUT[:WEIGHT]`, several with commas
    #[arg(long, default_value = "1000:256", conflicts_with = "trace")]
    lengths: String,
    /// A trace of requests in place of lengths: Mooncake JSON lines or Azure CSV
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Requests a second to sustain, or `trace` for the trace's own [default: as many as can be]
    #[arg(long)]
    rate: Option<String>,
    /// Target for the 90th percentile of the time to the first token [default: none]
    #[arg(long, value_name = "TIME")]
    ttft: Option<String>,
    /// Target for the time per output token [default: none]
    #[arg(long, value_name = "TIME")]
    tpot: Option<String>,
    /// Weight formats to try
    #[arg(long, value_delimiter = ',', default_value = "bf16,fp8,int4")]
    weights: Vec<String>,
    /// KV formats to try
    #[arg(long, value_delimiter = ',', default_value = "bf16,fp8")]
    kv_cache_dtype: Vec<String>,
    /// Values of --max-num-seqs to try
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8,16,32,64,128,256,512")]
    max_num_seqs: Vec<u64>,
    /// Share of device memory that the engine may use
    #[arg(long, default_value = "0.9", value_name = "SHARE")]
    gpu_memory_utilization: String,
    /// Share of prompt tokens that hit the prefix cache
    #[arg(long, default_value = "0", value_name = "SHARE")]
    hit_ratio: String,
    /// Share of memory bandwidth that decode reaches
    #[arg(long, default_value = "0.8", value_name = "SHARE")]
    bandwidth_share: String,
    /// Share of peak arithmetic that prefill reaches
    #[arg(long, default_value = "0.5", value_name = "SHARE")]
    mfu: String,
    /// Configurations to print
    #[arg(long, default_value_t = 20, value_name = "N")]
    top: usize,
    #[command(flatten)]
    common: Common,
}

/// Runs `reef plan search`.
pub fn run(args: Args) -> anyhow::Result<()> {
    let model = source::read(&args.model, &args.set)?;
    let traffic = match &args.trace {
        Some(path) => trace::read(path)?.summary(),
        None => wrong(Traffic::parse(&args.lengths))?.summary(),
    };
    let search = Search {
        model: &model,
        traffic,
        rate: rate(&args, &traffic)?,
        targets: Targets {
            ttft_s: target("--ttft", args.ttft.as_deref())?,
            tpot_s: target("--tpot", args.tpot.as_deref())?,
        },
        fleets: fleets(&args.gpus)?,
        weights: args.weights.clone(),
        kv_cache_dtypes: args.kv_cache_dtype.clone(),
        max_num_seqs: args.max_num_seqs.clone(),
        utilization: share("--gpu-memory-utilization", &args.gpu_memory_utilization, 0.05)?,
        hit_ratio: share("--hit-ratio", &args.hit_ratio, 0.0)?.min(0.99),
        efficiency: Efficiency {
            bandwidth: share("--bandwidth-share", &args.bandwidth_share, 0.01)?,
            arithmetic: share("--mfu", &args.mfu, 0.01)?,
            ..Efficiency::default()
        },
    };
    let found = wrong(search::search(&search))?;
    if args.common.json {
        return output::print_json(&document(&search, &found));
    }
    output::print_line(&text(&search, &found, args.top))
}

/// An error of the arguments, not of the work.
fn wrong<T, E: std::fmt::Display>(result: Result<T, E>) -> anyhow::Result<T> {
    result.map_err(|error| WrongArguments(error.to_string()).into())
}

fn quantity_of(flag: &str, text: &str, unit: Unit) -> anyhow::Result<f64> {
    wrong(quantity::parse(text, unit).map_err(|mend| format!("{flag} {text}: {mend}")))
}

fn share(flag: &str, text: &str, least: f64) -> anyhow::Result<f64> {
    let share = quantity_of(flag, text, Unit::Ratio)?;
    match (least..=1.0).contains(&share) {
        true => Ok(share),
        false => wrong(Err(format!("{flag} {text}: write a share from {least} to 1"))),
    }
}

fn target(flag: &str, text: Option<&str>) -> anyhow::Result<f64> {
    let Some(text) = text else { return Ok(f64::INFINITY) };
    let seconds = quantity_of(flag, text, Unit::Seconds)?;
    match seconds > 0.0 {
        true => Ok(seconds),
        false => wrong(Err(format!("{flag} {text}: write a time above 0, for example 50ms"))),
    }
}

fn rate(args: &Args, traffic: &Summary) -> anyhow::Result<Option<f64>> {
    match args.rate.as_deref() {
        None => Ok(None),
        Some("trace") => traffic.rate.map(Some).context("--rate trace: the trace has no times"),
        Some(text) => match quantity_of("--rate", text, Unit::RequestsPerSecond)? {
            rate if rate > 0.0 => Ok(Some(rate)),
            _ => wrong(Err(format!("--rate {text}: write a rate above 0"))),
        },
    }
}

/// `NAME:COUNT[@PRICE],…`
fn fleets(text: &str) -> anyhow::Result<Vec<Fleet>> {
    let parts = text.split(',').map(str::trim).filter(|part| !part.is_empty());
    parts.map(fleet).collect()
}

fn fleet(part: &str) -> anyhow::Result<Fleet> {
    let (name, rest) = part.rsplit_once(':').unwrap_or((part, "1"));
    let (count, price) = rest.split_once('@').unwrap_or((rest, "1"));
    let bad =
        || format!("--gpus {part}: write NAME:COUNT or NAME:COUNT@PRICE, for example H100:8@2.5");
    let count = count.parse::<u64>().ok().filter(|count| (1..=4096).contains(count));
    let price = price.parse::<f64>().ok().filter(|price| *price > 0.0 && price.is_finite());
    Ok(Fleet {
        device: wrong(device::find(name))?,
        count: wrong(count.ok_or_else(bad))?,
        price: wrong(price.ok_or_else(bad))?,
    })
}

fn document(search: &Search, found: &Found) -> serde_json::Value {
    let finite = |seconds: f64| seconds.is_finite().then_some(seconds);
    json!({
        "model": search.model.name,
        "traffic": search.traffic,
        "rate": search.rate,
        "targets": {
            "ttft_s": finite(search.targets.ttft_s),
            "tpot_s": finite(search.targets.tpot_s),
        },
        "hit_ratio": search.hit_ratio,
        "gpu_memory_utilization": search.utilization,
        "assumptions": search.efficiency,
        "configurations": found.configurations,
        "pareto": found.pareto,
        "rejected": found.rejected.iter().map(|(reason, count)| {
            json!({"reason": reason, "words": reason.name(), "configurations": count})
        }).collect::<Vec<_>>(),
    })
}

fn text(search: &Search, found: &Found, top: usize) -> String {
    let Summary { input_mean, output_mean, input_p90, held_mean, .. } = search.traffic;
    let mut lines = vec![
        format!(
            "{}: {} configurations, {} that none beats",
            search.model.name,
            found.configurations,
            found.pareto.len()
        ),
        format!(
            "Traffic: prompts of {input_mean:.0} tokens (90 % up to {input_p90:.0}), replies of \
             {output_mean:.0}; a running sequence holds {held_mean:.0}"
        ),
        String::new(),
        format!(
            "{:<14} {:>3} {:>3} {:>7} {:>6} {:>8} {:>8} {:>9} {:>9} {:>8} {:>8}  bound by",
            "gpu",
            "tp",
            "dp",
            "weights",
            "kv",
            "max-seqs",
            "running",
            "req/s",
            "tok/s",
            "TPOT ms",
            "TTFT ms"
        ),
    ];
    lines.extend(found.pareto.iter().take(top).map(line));
    if found.pareto.is_empty() {
        lines.push("none: loosen --ttft or --tpot, lower --rate, or give more --gpus".into());
    }
    if found.pareto.len() > top {
        let all = found.pareto.len();
        lines.push(format!("… {} more: --top {all}", all - top));
    }
    for (reason, count) in &found.rejected {
        lines.push(format!("left out: {count} configurations, {}", reason.name()));
    }
    let Efficiency { bandwidth, arithmetic, .. } = search.efficiency;
    lines.push(format!(
        "Assumed: {:.0} % of bandwidth, {:.0} % of peak arithmetic; fewer bits may cost quality",
        100.0 * bandwidth,
        100.0 * arithmetic
    ));
    lines.join("\n")
}

fn line(worked: &Worked) -> String {
    let limit = match worked.step_limit {
        Limit::Bandwidth => "bandwidth",
        Limit::Compute => "compute",
        Limit::Link => "link and fixed costs",
    };
    format!(
        "{:<14} {:>3} {:>3} {:>7} {:>6} {:>8} {:>8.1} {:>9.2} {:>9.0} {:>8.1} {:>8.0}  {} (steps: {limit})",
        worked.gpu,
        worked.tp,
        worked.dp,
        worked.weights,
        worked.kv_cache_dtype,
        worked.max_num_seqs,
        worked.running,
        worked.rate,
        worked.output_tok_s,
        1e3 * worked.tpot_s,
        1e3 * worked.ttft_s,
        worked.bound.name()
    )
}
