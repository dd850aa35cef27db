//! `reef eval frontier`: what quality costs in bytes, over formats, policies and budgets.

mod cells;
mod report;
mod store;

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use reef_engine::eval::comparison::Difference;
use reef_engine::eval::treatment::Treatment;
use reef_kv::page::PageFormat;
use reef_kv::policy;
use reef_model::runner::ModelRunner;
use serde_json::{Value, json};

use crate::Common;
use crate::eval::kld::{Compared, Request, compare};
use crate::eval::recall::{Asked, Calibrated, Setting, calibrate, language, measure, share_right};
use crate::eval::table::interval_json;
use crate::eval::text::TextArgs;
use crate::eval::treatment::{bytes_per_token, check_budget, check_layers, context};
use crate::load::{ModelArgs, open, parse_kv_format};
use crate::output::{WrongArguments, note, print_json, print_line};
use crate::progress::Progress;
use cells::{Grid, grid};
use store::{Inputs, Store};

/// Quality against bytes per token, over KV formats, policies and budgets: JSON lines, a table, a chart
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    text: TextArgs,
    /// Where to write: PREFIX.jsonl (finished cells, which are not measured again), .md and .svg
    #[arg(long, value_name = "PREFIX", default_value = "frontier")]
    out: PathBuf,
    /// Formats
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = parse_kv_format)]
    kv_format: Vec<PageFormat>,
    /// Policies
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    policy: Vec<String>,
    /// Tokens kept by policies
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    budget: Vec<usize>,
    /// Tokens of a window
    #[arg(long, value_name = "N", default_value_t = 2048)]
    context: usize,
    /// Tokens of a context of recall
    #[arg(long, value_name = "N", default_value_t = 1024)]
    recall_tokens: usize,
    /// Contexts of recall; 0 leaves recall out
    #[arg(long, value_name = "N")]
    recall_contexts: Option<usize>,
    /// Layers that stay f16, such as 0,1,29
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pin_layers: Vec<usize>,
    /// Seed of what is drawn
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// A smaller grid on a shorter text, done in minutes: formats alone, policies with f16 KV, the
    /// default policy with every format
    #[arg(long)]
    quick: bool,
}

/// Treatments computed in one batch beside f16 KV: more read the weights less often, but hold more
/// KV memory and end later.
const LANES: usize = 8;
/// Tokens of text scored, and contexts of recall.
const TOKENS: usize = 16_384;
const RECALL_CONTEXTS: usize = 24;
/// The same with `--quick`.
const QUICK_TOKENS: usize = 6_144;
const QUICK_RECALL_CONTEXTS: usize = 4;
/// Share of values that the full cache must find.
const FULL_SHARE: f64 = 0.9;

/// Runs `reef eval frontier`.
pub fn run(mut args: Args) -> anyhow::Result<()> {
    check(&args)?;
    let (tokens, contexts) = match args.quick {
        true => (QUICK_TOKENS, QUICK_RECALL_CONTEXTS),
        false => (TOKENS, RECALL_CONTEXTS),
    };
    args.text.tokens.get_or_insert(tokens);
    let contexts = *args.recall_contexts.get_or_insert(contexts);
    let path = args.model.path()?;
    let gguf = open(&path)?;
    let ids = args.text.ids(&gguf)?;
    let language = language(&gguf, args.text.paths())?;
    let mut runner = args.model.measuring_runner(&gguf, args.common.threads())?;
    drop(gguf);
    check_layers(&args.pin_layers, runner.spec().layers)?;
    context(Some(args.context), runner.spec().trained_context, false)?;
    let inputs = Inputs::new(&path, &ids, inputs(&args, contexts, &runner))?;
    let mut store = Store::open(&beside(&args.out, "jsonl"), inputs)?;
    let treatments = grid(&Grid {
        formats: &args.kv_format,
        policies: &args.policy,
        budgets: &args.budget,
        quick: args.quick,
        seed: args.seed,
    });
    let missing: Vec<Treatment> =
        treatments.iter().filter(|treatment| store.find(treatment).is_none()).cloned().collect();
    if missing.len() < treatments.len() {
        let done = treatments.len() - missing.len();
        note(&format!("{done} of {} cells are done already", treatments.len()));
    }
    let setting = Setting {
        language: &language,
        block_size: args.model.block_size,
        pinned_layers: &args.pin_layers,
        tokens: args.recall_tokens,
        seed: args.seed,
    };
    let measuring = Measuring { args: &args, ids: &ids, setting: &setting, contexts };
    measuring.all(&mut runner, &missing, &mut store)?;
    let rows: Vec<Value> = treatments.iter().filter_map(|t| store.find(t).cloned()).collect();
    write_report(&args, &rows)
}

/// The file of that extension: dots in the prefix are the user's own.
fn beside(prefix: &Path, extension: &str) -> PathBuf {
    let mut name = prefix.as_os_str().to_owned();
    name.push(".");
    name.push(extension);
    name.into()
}

fn check(args: &Args) -> anyhow::Result<()> {
    for name in &args.policy {
        let known = policy::NAMES.contains(&name.as_str());
        if !known {
            bail!(WrongArguments(format!(
                "--policy names `{name}`: want some of {}",
                policy::NAMES.join(", ")
            )));
        }
    }
    args.budget.iter().try_for_each(|budget| check_budget(*budget, args.model.block_size))
}

/// Everything beside the model and the tokens that a cell's numbers depend on.
fn inputs(args: &Args, contexts: usize, runner: &ModelRunner) -> Value {
    json!({
        "context": args.context,
        "recall_tokens": args.recall_tokens,
        "recall_contexts": contexts,
        "pin_layers": args.pin_layers,
        "seed": args.seed,
        "activations": format!("{:?}", runner.activations()),
        "key_rotation": format!("{:?}", runner.key_rotation()),
        "block_size": args.model.block_size,
    })
}

fn write_report(args: &Args, rows: &[Value]) -> anyhow::Result<()> {
    let title = format!("KV memory of {}", args.model.model);
    let table = report::table(rows);
    let chart = report::chart(&title, &args.text.sources().join(", "), args.context, rows);
    for (extension, text) in [("md", format!("# {title}\n\n{table}\n")), ("svg", chart)] {
        let path = beside(&args.out, extension);
        std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    match args.common.json {
        true => print_json(&json!({"out": args.out, "rows": rows})),
        false => print_line(&table),
    }
}

/// What the cells of a run share.
struct Measuring<'a> {
    args: &'a Args,
    ids: &'a [u32],
    setting: &'a Setting<'a>,
    contexts: usize,
}

impl Measuring<'_> {
    /// Measures `missing` a batch at a time; each batch is stored before the next begins.
    fn all(
        &self,
        runner: &mut ModelRunner,
        missing: &[Treatment],
        store: &mut Store,
    ) -> anyhow::Result<()> {
        if missing.is_empty() {
            return Ok(());
        }
        let calibrated = match self.contexts {
            0 => None,
            contexts => Some(calibrate(runner, self.setting, FULL_SHARE, contexts)?),
        };
        let questions = calibrated.as_ref().map_or(0, |c| c.difficulty.pairs * self.contexts);
        // One step is a scored token of one cell; a context counts for its tokens.
        let recall_steps = if questions > 0 { self.contexts * self.args.recall_tokens } else { 0 };
        let steps = self.ids.len() + recall_steps;
        let mut progress = Progress::new(missing.len() * steps, "tokens of cells");
        for (number, batch) in missing.chunks(LANES).enumerate() {
            let before = number * LANES * steps;
            let request = Request {
                context: self.args.context,
                block_size: self.args.model.block_size,
                pinned_layers: &self.args.pin_layers,
            };
            let compared = compare(runner, self.ids, batch, &request, &mut |done| {
                progress.set(before + done * batch.len());
            })?;
            let before = before + self.ids.len() * batch.len();
            let asked = match &calibrated {
                None => Vec::new(),
                Some(Calibrated { difficulty, .. }) => {
                    let task = self.setting.task(*difficulty, 0..self.contexts);
                    measure(runner, self.setting, &task, batch, &mut |done| {
                        progress.set(before + recall_steps * batch.len() * done / questions.max(1));
                    })?
                }
            };
            for (index, result) in compared.iter().enumerate() {
                let row = self.row(runner, result, asked.get(index), calibrated.as_ref());
                store.add(&result.treatment, row)?;
            }
        }
        progress.end();
        Ok(())
    }

    fn row(
        &self,
        runner: &ModelRunner,
        result: &Compared,
        asked: Option<&Asked>,
        calibrated: Option<&Calibrated>,
    ) -> Value {
        let Compared { treatment, comparison, summary } = result;
        let nll = comparison.mean_nll();
        let difference = comparison.nll_difference();
        let eviction = treatment.eviction.as_ref();
        let recall = asked.map(|asked| {
            let share = share_right(asked.answers.iter());
            let questions = asked.answers.len();
            json!({"share": share.mean, "low": share.low, "high": share.high, "questions": questions})
        });
        json!({
            "kv_format": treatment.format.name(),
            "policy": eviction.map(|eviction| &eviction.policy),
            "budget": eviction.map(|eviction| eviction.budget_tokens),
            "tokens": comparison.tokens(),
            "nll": nll,
            "ppl": nll.exp(),
            "nll_minus_f16": interval_json(difference),
            "ppl_change_percent": interval_json(difference.map(Difference::ppl_percent)),
            "kld": interval_json(comparison.mean_kld()),
            "kld_p99": comparison.kld_p99(),
            "top1_agreement": comparison.top1_agreement(),
            "recall": recall,
            "recall_difficulty": calibrated.map(|calibrated| {
                let d = calibrated.difficulty;
                json!({"pairs": d.pairs, "key_words": d.key_words, "repeats": d.repeats})
            }),
            "bytes_per_token":
                bytes_per_token(runner, self.args.model.block_size, treatment.format),
            "held_bytes_per_token": summary.held_bytes_per_token,
            "dropped_tokens": summary.dropped_tokens,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dots_in_the_prefix_stay() {
        assert_eq!(beside(Path::new("out/v1.2"), "jsonl"), Path::new("out/v1.2.jsonl"));
        assert_eq!(beside(Path::new("frontier"), "svg"), Path::new("frontier.svg"));
    }
}
