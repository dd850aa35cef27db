//! `reef eval kld`: how far KV formats are from f16 KV, several in one pass.

use anyhow::ensure;
use reef_engine::eval::comparison::{Comparison, Difference};
use reef_engine::eval::{Lanes, Treatment};
use reef_engine::score::{ScoreSummary, Scoring, score_together};
use reef_engine::session::Rules;
use reef_kv::page::PageFormat;
use reef_model::runner::ModelRunner;
use serde_json::{Value, json};

use crate::Common;
use crate::eval::table::{grouped, interval_json, interval_text, markdown};
use crate::eval::text::TextArgs;
use crate::eval::treatment::{TreatmentArgs, bytes_per_token, context};
use crate::load::{ModelArgs, open, parse_kv_format};
use crate::output::{print_json, print_line};
use crate::progress::Progress;

/// How far KV formats are from f16 KV: divergence, agreement, perplexity; several formats in one pass
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    text: TextArgs,
    /// Tokens of a window; windows do not overlap, the first token of each is not scored [default:
    /// trained length]
    #[arg(long, value_name = "N")]
    context: Option<usize>,
    /// Formats of every sealed block, such as int8,int4 [default: all but f16; f16 with --policy]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = parse_kv_format)]
    kv_format: Vec<PageFormat>,
    #[command(flatten)]
    treatment: TreatmentArgs,
}

/// Runs `reef eval kld`.
pub fn run(args: Args) -> anyhow::Result<()> {
    let gguf = open(&args.model.path()?)?;
    let ids = args.text.ids(&gguf)?;
    let mut runner = args.model.measuring_runner(&gguf, args.common.threads())?;
    let block_size = args.model.block_size;
    args.treatment.check(block_size, &runner)?;
    // Compared with f16 KV, which cannot be longer than the trained context.
    let context = context(args.context, runner.spec().trained_context, false)?;
    let treatments: Vec<Treatment> =
        formats(&args).into_iter().map(|format| args.treatment.treatment(format)).collect();
    ensure!(!treatments.is_empty(), "--kv-format names no format to compare with f16");
    let mut progress = Progress::new(ids.len(), "tokens");
    let request = Request { context, block_size, pinned_layers: &args.treatment.pin_layers };
    let results =
        compare(&mut runner, &ids, &treatments, &request, &mut |done| progress.set(done))?;
    progress.end();
    let first = &results[0].comparison;
    let f16_nll = first.reference_nll.iter().sum::<f64>() / first.tokens().max(1) as f64;
    let rows: Vec<Value> = results.iter().map(|result| row(result, &runner, block_size)).collect();
    let f16_bytes = bytes_per_token(&runner, block_size, PageFormat::F16);
    if args.common.json {
        return print_json(&json!({
            "text": args.text.sources(),
            "tokens": first.tokens(),
            "context": context,
            "f16": {"nll": f16_nll, "ppl": f16_nll.exp(), "bytes_per_token": f16_bytes},
            "rows": rows,
        }));
    }
    print_line(&format!(
        "{} tokens in windows of {context}; f16 KV: PPL {:.3}, {} bytes a token\n",
        first.tokens(),
        f16_nll.exp(),
        grouped(f16_bytes),
    ))?;
    print_line(&text(&results, &runner, block_size))
}

fn formats(args: &Args) -> Vec<PageFormat> {
    let dropping = args.treatment.policy.is_some();
    let asked = match args.kv_format.is_empty() {
        false => args.kv_format.clone(),
        true if dropping => vec![PageFormat::F16],
        true => PageFormat::ALL.to_vec(),
    };
    // f16 without drops is what all are compared with.
    asked.into_iter().filter(|format| dropping || *format != PageFormat::F16).collect()
}

/// One treatment beside f16 KV.
pub struct Compared {
    /// The treatment.
    pub treatment: Treatment,
    /// Its scores and those of f16 KV.
    pub comparison: Comparison,
    /// Bytes held, tokens dropped.
    pub summary: ScoreSummary,
}

/// What all treatments of a comparison share.
pub struct Request<'a> {
    /// Tokens of a window.
    pub context: usize,
    /// Tokens of a block.
    pub block_size: usize,
    /// Layers that stay f16.
    pub pinned_layers: &'a [usize],
}

/// Scores `ids` under every treatment beside one pass with f16 KV; `progress` hears the tokens done.
pub fn compare(
    runner: &mut ModelRunner,
    ids: &[u32],
    treatments: &[Treatment],
    request: &Request<'_>,
    progress: &mut dyn FnMut(usize),
) -> anyhow::Result<Vec<Compared>> {
    let rules: Vec<Rules> = treatments.iter().map(Treatment::rules).collect::<Result<_, _>>()?;
    let lanes = Lanes {
        block_size: request.block_size,
        treatments: &rules,
        pinned_layers: request.pinned_layers,
    };
    let mut comparisons = vec![Comparison::default(); treatments.len()];
    let scoring = Scoring { context: request.context, lanes, compare: true };
    let summaries = score_together(runner, ids, &scoring, &mut |treatment, scored| {
        comparisons[treatment].add(&scored);
        progress(scored.index + 1);
    })?;
    let results = treatments.iter().zip(comparisons).zip(summaries);
    Ok(results
        .map(|((treatment, comparison), summary)| Compared {
            treatment: treatment.clone(),
            comparison,
            summary,
        })
        .collect())
}

fn row(result: &Compared, runner: &ModelRunner, block_size: usize) -> Value {
    let Compared { treatment, comparison, summary } = result;
    let nll = comparison.mean_nll();
    let difference = comparison.nll_difference();
    let eviction = treatment.eviction.as_ref();
    json!({
        "kv_format": treatment.format.name(),
        "policy": eviction.map(|eviction| &eviction.policy),
        "budget": eviction.map(|eviction| eviction.budget_tokens),
        "sinks": treatment.sink_tokens,
        "tail": treatment.tail_tokens,
        "nll": nll,
        "ppl": nll.exp(),
        "nll_minus_f16": interval_json(difference),
        "ppl_change_percent": interval_json(difference.map(Difference::ppl_percent)),
        "kld": interval_json(comparison.mean_kld()),
        "kld_p99": comparison.kld_p99(),
        "top1_agreement": comparison.top1_agreement(),
        "bytes_per_token": bytes_per_token(runner, block_size, treatment.format),
        "held_bytes_per_token": summary.held_bytes_per_token,
        "dropped_tokens": summary.dropped_tokens,
    })
}

fn text(results: &[Compared], runner: &ModelRunner, block_size: usize) -> String {
    let header = ["KV", "PPL", "change of PPL in %", "KLD", "KLD p99", "same top", "bytes a token"];
    let row = |result: &Compared| {
        let Compared { treatment, comparison, .. } = result;
        let difference = comparison.nll_difference().map(Difference::ppl_percent);
        vec![
            treatment.label(),
            format!("{:.3}", comparison.mean_nll().exp()),
            interval_text(difference, 2),
            format!("{:.1e}", comparison.mean_kld().map_or(0.0, |kld| kld.mean)),
            format!("{:.1e}", comparison.kld_p99().unwrap_or(0.0)),
            format!("{:.1} %", comparison.top1_agreement().unwrap_or(1.0) * 100.0),
            grouped(bytes_per_token(runner, block_size, treatment.format)),
        ]
    };
    markdown(&header, &results.iter().map(row).collect::<Vec<_>>())
}
