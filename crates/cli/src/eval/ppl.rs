//! `reef eval ppl`: teacher-forced likelihood of a text.

use anyhow::{Context as _, bail, ensure};
use reef_engine::eval::comparison::{Comparison, Difference};
use reef_engine::eval::h2o_reference::H2oReference;
use reef_engine::eval::re_encoded::{Restart, score_re_encoded};
use reef_engine::eval::{Lanes, Treatment};
use reef_engine::score::{ScoreSummary, Scoring, score_together};
use reef_kv::page::PageFormat;
use reef_model::runner::ModelRunner;
use serde_json::{Value, json};

use crate::Common;
use crate::eval::table::interval_json;
use crate::eval::text::TextArgs;
use crate::eval::treatment::{TreatmentArgs, bytes_per_token, check_budget, context};
use crate::load::{ModelArgs, open, parse_kv_format};
use crate::output::{WrongArguments, print_json, print_line};
use crate::progress::Progress;

/// Likelihood of a text, teacher-forced through the pages that generation uses
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
    /// Format of every sealed block
    #[arg(long, value_name = "FORMAT", default_value = "f16", value_parser = parse_kv_format)]
    kv_format: PageFormat,
    #[command(flatten)]
    treatment: TreatmentArgs,
    /// Score the same tokens also with a window of --budget tokens of untouched f16 KV that is computed
    /// anew every N tokens, and compare
    #[arg(long, value_name = "N", requires = "budget")]
    re_encode_stride: Option<usize>,
    /// Also give the likelihood of each token
    #[arg(long)]
    per_token: bool,
}

/// Runs `reef eval ppl`.
pub fn run(args: Args) -> anyhow::Result<()> {
    let gguf = open(&args.model.path()?)?;
    let ids = args.text.ids(&gguf)?;
    let mut runner = args.model.measuring_runner(&gguf, args.common.threads())?;
    let block_size = args.model.block_size;
    let by_reference = args.treatment.policy.as_deref() == Some(H2O_REFERENCE);
    if !by_reference {
        args.treatment.check(block_size, &runner)?;
    }
    let trained = runner.spec().trained_context;
    let context = context(args.context, trained, args.treatment.budget.is_some() && !by_reference)?;
    let restart = restart(&args, context, ids.len())?;
    let treatment = args.treatment.treatment(args.kv_format);
    let compare = !treatment.is_plain() && context <= trained;
    let scored = match by_reference {
        true => score_by_reference(&args, &mut runner, &ids, context)?,
        false => score(&args, &mut runner, &ids, &treatment, context, compare)?,
    };
    let mut document = document(&scored);
    let bytes = bytes_per_token(&runner, block_size, args.kv_format);
    document["bytes_per_token"] = json!(bytes);
    if let Some(restart) = restart {
        document["re_encoded"] = re_encoded(&mut runner, &ids, &restart, &scored)?;
    }
    if args.per_token {
        document["per_token"] = json!(scored.comparison.nll);
    }
    match args.common.json {
        true => print_json(&document),
        false => print_text(&document),
    }
}

/// Scores of the text.
struct Scored {
    comparison: Comparison,
    /// Index in the text of each score.
    indices: Vec<usize>,
    summary: ScoreSummary,
}

fn score(
    args: &Args,
    runner: &mut ModelRunner,
    ids: &[u32],
    treatment: &Treatment,
    context: usize,
    compare: bool,
) -> anyhow::Result<Scored> {
    let rules = [treatment.rules()?];
    let lanes = Lanes {
        block_size: args.model.block_size,
        treatments: &rules,
        pinned_layers: &args.treatment.pin_layers,
    };
    let mut progress = Progress::new(ids.len(), "tokens");
    let (mut comparison, mut indices) = (Comparison::default(), Vec::new());
    let scoring = Scoring { context, lanes, compare };
    let summaries = score_together(runner, ids, &scoring, &mut |_, scored| {
        comparison.add(&scored);
        indices.push(scored.index);
        progress.set(scored.index + 1);
    })?;
    progress.end();
    let summary = summaries.into_iter().next().context("one treatment has one summary")?;
    Ok(Scored { comparison, indices, summary })
}

/// A policy of this command alone: H2O per head and token, as in its paper.
const H2O_REFERENCE: &str = "h2o-reference";

/// Scores the text with untouched KV, then with H2O in its reference form, which needs no pages. The two
/// are compared in their likelihoods; a divergence would need both at once.
fn score_by_reference(
    args: &Args,
    runner: &mut ModelRunner,
    ids: &[u32],
    context: usize,
) -> anyhow::Result<Scored> {
    let budget = args.treatment.budget.context("--policy needs --budget")?;
    check_budget(budget, args.model.block_size)?;
    if args.kv_format != PageFormat::F16 {
        bail!(WrongArguments(format!(
            "--policy {H2O_REFERENCE} is computed in f32: leave --kv-format out"
        )));
    }
    let plain = Treatment::default();
    let reference = score(args, runner, ids, &plain, context, false)?;
    runner.set_reference_attention(Some(Box::new(H2oReference::new(budget))));
    let treated = score(args, runner, ids, &plain, context, false);
    runner.set_reference_attention(None);
    let mut treated = treated?;
    treated.comparison.reference_nll = reference.comparison.nll;
    let dropped = |window: &[u32]| window.len().saturating_sub(budget) as f64;
    treated.summary.dropped_tokens = ids.chunks(context).map(dropped).sum();
    // What it would hold is in no page: null.
    treated.summary.held_bytes_per_token = f64::NAN;
    Ok(treated)
}

/// The keys of earlier versions keep their meaning; intervals are of differences, token by token.
fn document(scored: &Scored) -> Value {
    let Scored { comparison, summary, .. } = scored;
    let nll = comparison.mean_nll();
    let difference = comparison.nll_difference();
    json!({
        "nll": nll,
        "ppl": nll.exp(),
        "tokens": comparison.tokens(),
        "kld_vs_f16": comparison.mean_kld().map(|kld| kld.mean),
        "top1_agreement": comparison.top1_agreement(),
        "bytes_per_token": 0.0,
        "dropped_tokens": summary.dropped_tokens,
        "kld_p99": comparison.kld_p99(),
        "nll_minus_f16": interval_json(difference),
        "ppl_change_percent": interval_json(difference.map(Difference::ppl_percent)),
        "held_bytes_per_token": summary.held_bytes_per_token,
    })
}

fn restart(args: &Args, context: usize, tokens: usize) -> anyhow::Result<Option<Restart>> {
    let Some((stride, window)) = args.re_encode_stride.zip(args.treatment.budget) else {
        return Ok(None);
    };
    if stride == 0 || stride >= window {
        bail!(WrongArguments(format!(
            "--re-encode-stride is {stride}: want 1 to {}, less than --budget",
            window - 1
        )));
    }
    // Otherwise the treated side would start anew in the middle.
    if context < tokens {
        bail!(WrongArguments(format!(
            "--re-encode-stride compares one unbroken text: raise --context to {tokens} or lower --tokens"
        )));
    }
    ensure!(tokens > window, "{tokens} tokens to score: give more than --budget");
    Ok(Some(Restart { window, stride, block_size: args.model.block_size }))
}

/// The same tokens with a window computed anew, and how far the treatment is from it on those tokens.
fn re_encoded(
    runner: &mut ModelRunner,
    ids: &[u32],
    restart: &Restart,
    scored: &Scored,
) -> anyhow::Result<Value> {
    let mut progress = Progress::new(ids.len(), "tokens anew");
    let mut reference = Vec::new();
    let mut treated = Vec::new();
    score_re_encoded(runner, ids, restart, &mut |index, nll| {
        reference.push(nll);
        if let Ok(place) = scored.indices.binary_search(&index) {
            treated.push(scored.comparison.nll[place]);
        }
        progress.set(index);
    })?;
    progress.end();
    let difference = Difference::of(&treated, &reference);
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
    let (nll, treated_nll) = (mean(&reference), mean(&treated));
    Ok(json!({
        "window": restart.window,
        "stride": restart.stride,
        "tokens": reference.len(),
        "nll": nll,
        "ppl": nll.exp(),
        "treated_nll": treated_nll,
        "treated_ppl": treated_nll.exp(),
        "nll_minus_re_encoded": interval_json(difference),
        "ppl_change_percent": interval_json(difference.map(Difference::ppl_percent)),
    }))
}

fn print_text(document: &Value) -> anyhow::Result<()> {
    let fields = document.as_object().context("a document")?;
    for (name, value) in fields.iter().filter(|(_, value)| !value.is_null()) {
        match value.as_array() {
            None => print_line(&format!("{name:<20} {value}"))?,
            Some(each) => {
                for (index, value) in each.iter().enumerate() {
                    print_line(&format!("{name:<20} {} {value}", index + 1))?;
                }
            }
        }
    }
    Ok(())
}
