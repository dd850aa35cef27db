//! `reef eval ppl`: teacher-forced likelihood of a text.

use std::path::PathBuf;

use anyhow::{Context as _, bail, ensure};
use reef_engine::score::{ScoreOptions, TokenScore, score};
use reef_engine::session::Rules;
use reef_kv::page::PageFormat;
use reef_kv::policy::{self, PolicyOptions};
use reef_model::gguf::Gguf;
use reef_model::tokenizer::{Encode, Tokenizer};
use serde_json::json;

use crate::Common;
use crate::eval::ids::read_ids;
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
    /// Text to score
    #[arg(long, value_name = "FILE", required_unless_present = "ids", conflicts_with = "ids")]
    text: Option<PathBuf>,
    /// Token ids to score instead of a text: JSON array, or object with `ids`; no BOS is added
    #[arg(long, value_name = "FILE")]
    ids: Option<PathBuf>,
    /// Score only the first N tokens
    #[arg(long, value_name = "N")]
    tokens: Option<usize>,
    /// Tokens of a window; windows do not overlap, the first token of each is not scored [default:
    /// trained length]
    #[arg(long, value_name = "N")]
    context: Option<usize>,
    /// Format of every sealed block
    #[arg(long, value_name = "FORMAT", default_value = "f16", value_parser = parse_kv_format)]
    kv_format: PageFormat,
    /// Tokens at the start that stay f16
    #[arg(long, value_name = "N", default_value_t = 0)]
    sinks: usize,
    /// Tokens at the end that stay f16
    #[arg(long, value_name = "N", default_value_t = 0)]
    tail: usize,
    /// What to drop: sinks or window
    #[arg(long, value_name = "POLICY", requires = "budget")]
    policy: Option<String>,
    /// Keep at most N tokens, dropping one block at a time
    #[arg(long, value_name = "N", requires = "policy")]
    budget: Option<usize>,
    /// Also give the likelihood of each token
    #[arg(long)]
    per_token: bool,
}

/// Runs `reef eval ppl`.
pub fn run(args: Args) -> anyhow::Result<()> {
    let gguf = open(&args.model.path()?)?;
    let mut ids = ids(&args, &gguf)?;
    ids.truncate(args.tokens.unwrap_or(usize::MAX));
    ensure!(ids.len() >= 2, "{} tokens to score: give at least 2", ids.len());
    let mut runner = args.model.runner(&gguf, args.common.threads())?;
    let options = options(&args, runner.spec().trained_context)?;
    let bytes_per_token = reef_engine::step::pool_config(runner.spec(), args.model.block_size, 0)
        .bytes_per_token_with_tables(args.kv_format);
    let mut totals = Totals {
        progress: Progress::new(ids.len(), "tokens"),
        per_token: args.per_token,
        nll: 0.0,
        kld: 0.0,
        same_top: 0,
        count: 0,
        each: Vec::new(),
    };
    let summary = score(&mut runner, &ids, &options, &mut |scored| totals.add(scored))?;
    totals.progress.end();
    let count = totals.count.max(1) as f64;
    let nll = totals.nll / count;
    let mut document = json!({
        "nll": nll,
        "ppl": nll.exp(),
        "tokens": totals.count,
        "kld_vs_f16": options.compare.then(|| totals.kld / count),
        "top1_agreement": options.compare.then(|| totals.same_top as f64 / count),
        "bytes_per_token": bytes_per_token,
        "dropped_tokens": summary.dropped_tokens,
    });
    if args.per_token {
        document["per_token"] = json!(totals.each);
    }
    if args.common.json {
        return print_json(&document);
    }
    print_text(&document)
}

fn print_text(document: &serde_json::Value) -> anyhow::Result<()> {
    let fields = document.as_object().context("a document")?;
    for (name, value) in fields.iter().filter(|(_, value)| !value.is_null()) {
        match value.as_array() {
            None => print_line(&format!("{name:<16} {value}"))?,
            Some(each) => {
                for (index, value) in each.iter().enumerate() {
                    print_line(&format!("{name:<16} {} {value}", index + 1))?;
                }
            }
        }
    }
    Ok(())
}

fn ids(args: &Args, gguf: &Gguf) -> anyhow::Result<Vec<u32>> {
    if let Some(path) = &args.ids {
        return read_ids(path);
    }
    let path = args.text.as_ref().context("--text or --ids")?;
    let text = std::fs::read_to_string(path)
        .with_context(|| format!("cannot read --text {}", path.display()))?;
    let tokenizer = Tokenizer::from_gguf(gguf)?;
    // Special tokens spelled out in a text to score are text.
    Ok(tokenizer.encode(&text, Encode { add_special: true, parse_special: false })?)
}

fn options(args: &Args, trained_context: usize) -> anyhow::Result<ScoreOptions> {
    let block_size = args.model.block_size;
    let mut rules = Rules {
        format_at_seal: args.kv_format,
        sink_tokens: args.sinks,
        tail_tokens: args.tail,
        token_budget: args.budget,
        ..Rules::default()
    };
    if let Some(name) = &args.policy {
        let options = PolicyOptions { tail_tokens: 0, ..PolicyOptions::default() };
        rules.policy =
            policy::by_name(name, &options).map_err(|e| WrongArguments(e.to_string()))?;
    }
    let least = 3 * block_size;
    if args.budget.is_some_and(|budget| budget < least) {
        bail!(WrongArguments(format!(
            "--budget is below {least}, which a first, a sealed and an open block of {block_size} take"
        )));
    }
    let context = args.context.unwrap_or(trained_context);
    if context < 2 || (context > trained_context && args.budget.is_none()) {
        bail!(WrongArguments(format!(
            "--context is {context}: want 2 to {trained_context}, the trained length (more only with \
             --policy and --budget)"
        )));
    }
    let compare = args.kv_format != PageFormat::F16 || args.policy.is_some();
    let compare = compare && context <= trained_context;
    Ok(ScoreOptions { context, block_size, rules, compare })
}

/// Sums over scored tokens.
struct Totals {
    progress: Progress,
    per_token: bool,
    nll: f64,
    kld: f64,
    same_top: usize,
    count: usize,
    each: Vec<f64>,
}

impl Totals {
    fn add(&mut self, scored: TokenScore) {
        self.nll += scored.nll;
        self.kld += scored.kld.unwrap_or(0.0);
        self.same_top += usize::from(scored.same_top == Some(true));
        self.count += 1;
        if self.per_token {
            self.each.push(scored.nll);
        }
        self.progress.set(scored.index + 1);
    }
}
