//! `reef bench`: prefill and decode speed, also beside a peer engine, repetition by repetition.

use std::path::Path;
use std::time::Instant;

use anyhow::bail;
use reef_engine::config::{PREFILL_CHUNK_TOKENS, roomy_pool};
use reef_engine::session::{Rules, Session};
use reef_kv::page::PageFormat;
use reef_kv::{Fidelity, SequenceConfig};
use reef_model::runner::ModelRunner;
use serde_json::{Value, json};

use crate::Common;
use crate::load::{ModelArgs, cpu_tier, open, parse_kv_format};
use crate::memory;
use crate::output::{WrongArguments, note, print_json, print_line};
use crate::peer::{Kind, Peer, Test};
use crate::workload::{self, Workload};

/// Measure prefill and decode speed, also beside a peer engine
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    model: ModelArgs,
    /// Prompt tokens of the prefill test; 0 skips it
    #[arg(long, value_name = "N", default_value_t = 512)]
    prefill: usize,
    /// Tokens of the decode test; 0 skips it
    #[arg(long, value_name = "N", default_value_t = 64)]
    decode: usize,
    /// Tokens in the cache before each test
    #[arg(long, value_name = "N,N", value_delimiter = ',', default_value = "0,4096")]
    depth: Vec<usize>,
    /// KV formats of sealed blocks
    #[arg(long, value_name = "F,F", value_delimiter = ',', default_value = "f16,int8,int4",
          value_parser = parse_kv_format)]
    kv_format: Vec<PageFormat>,
    /// Sequences decoded at once
    #[arg(long, value_name = "N,N", value_delimiter = ',', default_value = "1")]
    batch: Vec<usize>,
    /// Times each test is run; medians are shown
    #[arg(long, value_name = "N", default_value_t = 3)]
    repetitions: usize,
    /// Run a peer too: the path of a llama-bench, or `llama-cpp-python`
    #[arg(long, value_name = "PEER")]
    peer: Option<String>,
    /// Measure what many requests at once experience, in place of the tests above
    #[arg(long, value_name = "WORKLOAD", conflicts_with = "peer")]
    workload: Option<Workload>,
}

/// One line of the table.
struct Row {
    engine: String,
    test: Test,
    format: PageFormat,
    tok_s: Vec<f64>,
}

/// Runs `reef bench`.
pub fn run(args: Args) -> anyhow::Result<()> {
    check(&args)?;
    if let Some(workload) = args.workload {
        let (threads, as_json) = (args.common.threads(), args.common.json);
        return workload::run(workload, &args.model, threads, args.repetitions, as_json);
    }
    let path = args.model.path()?;
    let threads = args.common.threads();
    let mut runner = args.model.runner(&open(&path)?, threads)?;
    let mut peer = args.peer.as_deref().map(|p| Peer::start(p, &path, threads)).transpose()?;
    let mut rows = plan(&args, peer.as_ref());
    for repetition in 0..args.repetitions {
        for row in &mut rows {
            let tok_s = match (&mut peer, row.engine == "reef") {
                (Some(peer), false) => peer.measure(&row.test)?,
                _ => measure(&mut runner, &row.test, row.format, args.model.block_size)?,
            };
            row.tok_s.push(tok_s);
            let (done, all) = (repetition + 1, args.repetitions);
            note(&format!("{done}/{all} {:<52} {tok_s:>9.1} tok/s", title(row)));
        }
    }
    let document = document(&rows, &path, threads)?;
    if args.common.json {
        return print_json(&document);
    }
    print_table(&rows, &document)
}

fn check(args: &Args) -> anyhow::Result<()> {
    const MOST: usize = 1 << 20;
    let numbers = [("--prefill", args.prefill), ("--decode", args.decode)];
    let depths = args.depth.iter().map(|depth| ("--depth", *depth));
    for (name, value) in numbers.into_iter().chain(depths) {
        if value > MOST {
            bail!(WrongArguments(format!("{name} is {value}: want at most {MOST}")));
        }
    }
    let counts = args.batch.iter().map(|batch| ("--batch", *batch));
    for (name, value) in counts.chain([("--repetitions", args.repetitions)]) {
        if !(1..=256).contains(&value) {
            bail!(WrongArguments(format!("{name} is {value}: want 1 to 256")));
        }
    }
    Ok(())
}

/// Every test for us, and beside it for the peer: with flash attention and, for f16, without.
fn plan(args: &Args, peer: Option<&Peer>) -> Vec<Row> {
    let mut rows = Vec::new();
    let mut add = |kind, tokens, depth, batch, format: PageFormat| {
        let kv_format = match format {
            PageFormat::F16 => "f16",
            PageFormat::Int4 => "q4_0",
            // The nearest that the peer has.
            _ => "q8_0",
        };
        let test = Test { kind, tokens, depth, batch, kv_format, flash: true };
        rows.push(Row { engine: "reef".into(), test, format, tok_s: Vec::new() });
        let Some(peer) = peer else { return };
        for flash in [true, false] {
            if flash || format == PageFormat::F16 {
                let test = Test { flash, ..test };
                rows.push(Row { engine: peer.name().into(), test, format, tok_s: Vec::new() });
            }
        }
    };
    for &depth in &args.depth {
        for &format in &args.kv_format {
            if args.prefill > 0 && (depth == 0 && format == PageFormat::F16) {
                add(Kind::Prefill, args.prefill, depth, 1, format);
            }
            for &batch in &args.batch {
                if args.decode > 0 {
                    add(Kind::Decode, args.decode, depth, batch, format);
                }
            }
        }
    }
    rows
}

/// Tokens per second over all sequences of one run of `test`; filling the cache is not in it.
fn measure(
    runner: &mut ModelRunner,
    test: &Test,
    format: PageFormat,
    block_size: usize,
) -> anyhow::Result<f64> {
    let total = test.depth + test.tokens;
    let vocabulary = runner.spec().vocabulary as u32;
    let pool =
        roomy_pool(runner.spec(), block_size, total.next_multiple_of(block_size) * test.batch)?;
    let rules = Rules { format_at_seal: format, ..Rules::default() };
    let mut sessions: Vec<Session<'_>> = (0..test.batch as u64)
        .map(|request| {
            let config = SequenceConfig {
                request,
                contract: Fidelity::Evict,
                priority: 0,
                trained_context: usize::MAX,
                max_tokens: Some(total),
            };
            Session::new(&pool, &rules, config)
        })
        .collect();
    let ids: Vec<u32> =
        (0..total as u32).map(|i| i.wrapping_mul(2_654_435_761) % vocabulary).collect();
    for session in &mut sessions {
        for chunk in ids[..test.depth].chunks(PREFILL_CHUNK_TOKENS) {
            session.advance(runner, chunk)?;
        }
    }
    let new = &ids[test.depth..];
    let start = Instant::now();
    match test.kind {
        Kind::Prefill => prefill(runner, &mut sessions[0], new)?,
        Kind::Decode => {
            for token in new {
                Session::advance_all(runner, &mut sessions, &vec![*token; test.batch])?;
                let rows: Vec<usize> = (0..test.batch).collect();
                std::hint::black_box(runner.logits(&rows));
            }
        }
    }
    Ok((test.tokens * test.batch) as f64 / start.elapsed().as_secs_f64())
}

fn prefill(runner: &mut ModelRunner, session: &mut Session<'_>, ids: &[u32]) -> anyhow::Result<()> {
    let mut last = 0;
    for chunk in ids.chunks(PREFILL_CHUNK_TOKENS) {
        session.advance(runner, chunk)?;
        last = chunk.len() - 1;
    }
    std::hint::black_box(runner.logits(&[last]));
    Ok(())
}

fn title(row: &Row) -> String {
    let Test { kind, tokens, depth, batch, kv_format, flash } = row.test;
    let ours = row.engine == "reef";
    let format = if ours { row.format.name() } else { kv_format };
    let flash = match (ours, flash) {
        (true, _) => "",
        (false, true) => " fa",
        (false, false) => " no-fa",
    };
    let kind = kind_name(kind);
    format!("{} {kind} {tokens} at {depth} x{batch} {format}{flash}", row.engine)
}

fn kind_name(kind: Kind) -> &'static str {
    match kind {
        Kind::Prefill => "prefill",
        Kind::Decode => "decode",
    }
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => 0.0,
        n if n % 2 == 1 => sorted[middle],
        _ => (sorted[middle - 1] + sorted[middle]) / 2.0,
    }
}

fn document(rows: &[Row], model: &Path, threads: usize) -> anyhow::Result<Value> {
    let table: Vec<Value> = rows
        .iter()
        .map(|row| {
            let ours = row.engine == "reef";
            json!({
                "engine": row.engine,
                "test": kind_name(row.test.kind),
                "tokens": row.test.tokens,
                "depth": row.test.depth,
                "batch": row.test.batch,
                "kv_format": if ours { row.format.name() } else { row.test.kv_format },
                "flash_attention": if ours { Value::Null } else { json!(row.test.flash) },
                "tok_s": row.tok_s,
                "tok_s_median": median(&row.tok_s),
            })
        })
        .collect();
    let file = model.file_name().map(|name| name.to_string_lossy().into_owned());
    Ok(json!({
        "host": {
            "cpu": memory::cpu_name(),
            "threads": threads,
            "tier": cpu_tier()?.name(),
            "model": file,
            "reef": env!("CARGO_PKG_VERSION"),
            "peak_resident_bytes": memory::peak_resident_bytes(),
        },
        "rows": table,
        "ratios": ratios(rows),
    }))
}

/// Ours over the peer's best setting of the same test, and lossy formats over our own f16.
fn ratios(rows: &[Row]) -> Vec<Value> {
    let same = |a: &Test, b: &Test| {
        (a.kind, a.tokens, a.depth, a.batch) == (b.kind, b.tokens, b.depth, b.batch)
    };
    let mut ratios = Vec::new();
    for ours in rows.iter().filter(|row| row.engine == "reef") {
        let mut add = |against: String, other: f64| {
            if other > 0.0 {
                let ratio = median(&ours.tok_s) / other;
                ratios.push(json!({
                    "test": kind_name(ours.test.kind), "depth": ours.test.depth,
                    "batch": ours.test.batch, "kv_format": ours.format.name(),
                    "against": against, "ratio": ratio,
                }));
            }
        };
        let of_peer = rows.iter().filter(|row| {
            row.engine != "reef" && same(&row.test, &ours.test) && row.format == ours.format
        });
        let best = of_peer.max_by(|a, b| median(&a.tok_s).total_cmp(&median(&b.tok_s)));
        if let Some(best) = best {
            add(title(best), median(&best.tok_s));
        }
        let plain = rows.iter().find(|row| {
            row.engine == "reef"
                && same(&row.test, &ours.test)
                && row.format == PageFormat::F16
                && ours.format != PageFormat::F16
        });
        if let Some(plain) = plain {
            add(title(plain), median(&plain.tok_s));
        }
    }
    ratios
}

fn print_table(rows: &[Row], document: &Value) -> anyhow::Result<()> {
    print_line(&format!(
        "{:<56} {:>10}  (median of {})",
        "test",
        "tok/s",
        rows.first().map_or(0, |r| r.tok_s.len())
    ))?;
    for row in rows {
        print_line(&format!("{:<56} {:>10.1}", title(row), median(&row.tok_s)))?;
    }
    for ratio in document["ratios"].as_array().into_iter().flatten() {
        let text = |key: &str| ratio[key].as_str().unwrap_or_default().to_string();
        print_line(&format!(
            "{} at {} x{} {}: {:.2} times {}",
            text("test"),
            ratio["depth"],
            ratio["batch"],
            text("kv_format"),
            ratio["ratio"].as_f64().unwrap_or(0.0),
            text("against"),
        ))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::median;

    #[test]
    fn medians() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(median(&[]), 0.0);
    }
}
