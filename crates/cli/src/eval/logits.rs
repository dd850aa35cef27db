//! `reef eval logits`: logits of a list of token ids.

use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::PathBuf;

use anyhow::{Context as _, ensure};
use reef_engine::config::roomy_pool;
use reef_engine::session::{Rules, Session};
use reef_kv::{Fidelity, SequenceConfig};
use serde_json::json;

use crate::Common;
use crate::eval::ids::read_ids;
use crate::load::{ModelArgs, open};
use crate::output::{print_json, print_line};

/// Logits of a list of token ids, in the format of llama.cpp's goldens
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    model: ModelArgs,
    /// JSON array of token ids, or object with `ids`
    #[arg(long, value_name = "FILE")]
    ids: PathBuf,
    /// Where to write: little-endian int32 n_tokens, n_vocab, tokens, then float32 logits by row
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
}

/// Rows of logits computed at once: bounds memory at a large vocabulary.
const ROWS_AT_ONCE: usize = 32;

/// Runs `reef eval logits`.
pub fn run(args: Args) -> anyhow::Result<()> {
    let ids = read_ids(&args.ids)?;
    ensure!(!ids.is_empty(), "--ids {} has no token", args.ids.display());
    let gguf = open(&args.model.path()?)?;
    let mut runner = args.model.runner(&gguf, args.common.threads())?;
    runner.check_tokens(&ids).with_context(|| format!("--ids {}", args.ids.display()))?;
    let block_size = args.model.block_size;
    let pool = roomy_pool(runner.spec(), block_size, ids.len())?;
    let rules = Rules::default();
    let config = SequenceConfig {
        request: 0,
        contract: Fidelity::Exact,
        priority: 0,
        trained_context: usize::MAX,
        max_tokens: Some(ids.len()),
    };
    let mut session = Session::new(&pool, &rules, config);
    let vocabulary = runner.spec().vocabulary;
    let context = || format!("cannot write --out {}", args.out.display());
    let mut out = BufWriter::new(File::create(&args.out).with_context(context)?);
    let header = [ids.len() as u32, vocabulary as u32];
    for word in header.iter().chain(&ids) {
        out.write_all(&word.to_le_bytes()).with_context(context)?;
    }
    for chunk in ids.chunks(ROWS_AT_ONCE) {
        session.advance(&mut runner, chunk)?;
        let rows: Vec<usize> = (0..chunk.len()).collect();
        for logit in runner.logits(&rows) {
            out.write_all(&logit.to_le_bytes()).with_context(context)?;
        }
    }
    out.flush().with_context(context)?;
    if args.common.json {
        let (tokens, out) = (ids.len(), &args.out);
        return print_json(&json!({"tokens": tokens, "vocabulary": vocabulary, "out": out}));
    }
    print_line(&format!("{} rows of {vocabulary} logits in {}", ids.len(), args.out.display()))
}
