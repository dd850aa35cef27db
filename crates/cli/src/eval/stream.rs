//! `reef eval stream`: a very long text in a fixed budget.

use std::time::Instant;

use anyhow::bail;
use reef_engine::eval::statistics::mean;
use reef_engine::eval::stream::{StreamState, stream};
use reef_engine::eval::{Eviction, Lanes, Treatment};
use reef_engine::score::TokenScore;
use reef_kv::page::PageFormat;
use serde_json::{Value, json};

use crate::Common;
use crate::eval::table::{grouped, markdown};
use crate::eval::text::TextArgs;
use crate::eval::treatment::{check_budget, check_layers};
use crate::load::{ModelArgs, open, parse_kv_format};
use crate::memory::resident_bytes;
use crate::output::{WrongArguments, note, print_json, print_line};
use crate::progress::Progress;

/// A very long text in a fixed budget, past the trained context: perplexity and memory as it goes on
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    model: ModelArgs,
    /// Texts in order (--tokens: how many of their tokens; a shorter text is continued from its start)
    #[command(flatten)]
    text: TextArgs,
    /// Format of every sealed block
    #[arg(long, value_name = "FORMAT", default_value = "f16", value_parser = parse_kv_format)]
    kv_format: PageFormat,
    /// What to drop: window, sinks, h2o, tova, keydiff or random
    #[arg(long, value_name = "POLICY", default_value = "sinks")]
    policy: String,
    /// Keep at most N tokens, dropping one block at a time
    #[arg(long, value_name = "N", default_value_t = 1024)]
    budget: usize,
    /// Seed of a policy that draws lots
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Layers that stay f16, such as 0,1,29
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pin_layers: Vec<usize>,
    /// Tokens of a row of the report
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    every: usize,
}

/// Tokens by default.
const TOKENS: usize = 120_000;

/// Tokens at most: 64 MiB of ids.
const MOST_TOKENS: usize = 1 << 24;

/// Runs `reef eval stream`.
pub fn run(args: Args) -> anyhow::Result<()> {
    check_budget(args.budget, args.model.block_size)?;
    let eviction =
        Eviction { policy: args.policy.clone(), budget_tokens: args.budget, seed: args.seed };
    let treatment =
        Treatment { format: args.kv_format, eviction: Some(eviction), ..Treatment::default() };
    let rules = [treatment.rules().map_err(|e| WrongArguments(e.to_string()))?];
    let wanted = args.text.tokens.unwrap_or(TOKENS);
    if !(2..=MOST_TOKENS).contains(&wanted) {
        bail!(WrongArguments(format!("--tokens is {wanted}: want 2 to {MOST_TOKENS}")));
    }
    let gguf = open(&args.model.path()?)?;
    let (ids, found) = args.text.repeated_ids(&gguf, wanted)?;
    if found < wanted {
        note(&format!("the text has {found} tokens: continued from its start up to {wanted}"));
    }
    let mut runner = args.model.measuring_runner(&gguf, args.common.threads())?;
    drop(gguf);
    check_layers(&args.pin_layers, runner.spec().layers)?;
    let lanes = Lanes {
        block_size: args.model.block_size,
        treatments: &rules,
        pinned_layers: &args.pin_layers,
    };
    let mut report = Report::new(args.every.max(args.model.block_size));
    let mut progress = Progress::new(ids.len(), "tokens");
    stream(&mut runner, &ids, &lanes, &mut |scores, state| {
        report.add(scores, state);
        progress.set(state.tokens);
    })?;
    progress.end();
    report.end_row();
    if args.common.json {
        return print_json(&json!({
            "text": args.text.sources(),
            "tokens": ids.len(),
            "text_tokens": found,
            "kv_format": treatment.format.name(),
            "policy": args.policy,
            "budget": args.budget,
            "trained_context": runner.spec().trained_context,
            "rows": report.rows,
        }));
    }
    print_line(&report.text())
}

/// Rows of `every` tokens.
struct Report {
    every: usize,
    from: usize,
    nll: Vec<f64>,
    state: Option<StreamState>,
    began: Instant,
    rows: Vec<Value>,
}

impl Report {
    fn new(every: usize) -> Report {
        Report {
            every,
            from: 0,
            nll: Vec::new(),
            state: None,
            began: Instant::now(),
            rows: Vec::new(),
        }
    }

    fn add(&mut self, scores: &[TokenScore], state: StreamState) {
        for scored in scores {
            if scored.index >= self.from + self.every {
                self.end_row();
            }
            self.nll.push(scored.nll);
        }
        self.state = Some(state);
    }

    fn end_row(&mut self) {
        let Some(state) = self.state.filter(|_| !self.nll.is_empty()) else { return };
        let nll = mean(&self.nll);
        self.rows.push(json!({
            "from": self.from,
            "tokens": self.nll.len(),
            "nll": nll,
            "ppl": nll.exp(),
            "kept_tokens": state.kept_tokens,
            "positions": if state.relative { "relative" } else { "original" },
            "pool_bytes": state.used_bytes,
            "resident_bytes": resident_bytes(),
            "scored_tok_s": self.nll.len() as f64 / self.began.elapsed().as_secs_f64(),
        }));
        self.from += self.every;
        self.nll.clear();
        self.began = Instant::now();
    }

    fn text(&self) -> String {
        let header = [
            "tokens from",
            "PPL",
            "kept",
            "positions",
            "pool bytes",
            "resident MiB",
            "scored tok/s",
        ];
        let number = |row: &Value, key: &str| row[key].as_f64().unwrap_or(0.0);
        let row = |row: &Value| {
            vec![
                grouped(number(row, "from")),
                format!("{:.3}", number(row, "ppl")),
                grouped(number(row, "kept_tokens")),
                row["positions"].as_str().unwrap_or_default().to_string(),
                grouped(number(row, "pool_bytes")),
                format!("{:.0}", number(row, "resident_bytes") / f64::from(1 << 20)),
                format!("{:.0}", number(row, "scored_tok_s")),
            ]
        };
        markdown(&header, &self.rows.iter().map(row).collect::<Vec<_>>())
    }
}
