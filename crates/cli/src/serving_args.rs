//! What helps an engine beside its KV memory: drafts, and a slower tier.

use std::path::{Path, PathBuf};
use std::time::Instant;

use reef_engine::Engine;
use reef_engine::speculate::{
    DraftModel, DraftModelOptions, Drafter, LEAST_PROBABILITY, Ngram, RunKey,
};
use reef_engine::store::{SpillFile, SpillSize};
use reef_kv::page::PageFormat;
use reef_model::gguf::Gguf;
use reef_model::spec::ModelSpec;
use reef_model::tokenizer::Tokenizer;

use crate::load::{ModelArgs, cpu_tier, open};
use crate::output::WrongArguments;
use crate::{pull, sizes};

/// Suffixes that `--draft ngram` looks up, in tokens.
const NGRAM_TOKENS: (usize, usize) = (2, 4);
/// Tokens of KV that a draft model holds at most.
const DRAFT_TOKENS: usize = 8192;
/// Bytes of the spill file unless `--spill-size` says otherwise.
const SPILL_BYTES: u64 = 1 << 30;

/// Drafts and the slower tier.
#[derive(clap::Args, Clone, Debug)]
pub struct ServingArgs {
    /// Guess the next tokens and check several at once; the text stays the same. `ngram` looks them up in the
    /// text so far; a GGUF (or an alias) is a smaller model with the same tokenizer
    #[arg(long, value_name = "GGUF|ngram")]
    draft: Option<String>,
    /// A file to which sequences that have to stand still are swapped
    #[arg(long, value_name = "FILE")]
    spill: Option<PathBuf>,
    /// Size of that file [default: 1GiB]
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse, requires = "spill")]
    spill_size: Option<u64>,
}

impl ServingArgs {
    /// Gives `engine`, which runs `model`, what was asked for.
    pub fn equip(
        &self,
        engine: &mut Engine,
        tokenizer: &Tokenizer,
        model: &ModelArgs,
        threads: usize,
    ) -> anyhow::Result<()> {
        if let Some(path) = &self.spill {
            engine.set_spill(Box::new(self.open_spill(path)?));
        }
        match self.draft.as_deref() {
            None => {}
            Some("ngram") => {
                let (shortest, longest) = NGRAM_TOKENS;
                engine.set_drafter(Box::new(Ngram::new(shortest, longest)), 0.0);
            }
            Some(name) => {
                let gguf = open(&pull::resolve_model(name, model.is_offline())?)?;
                let mut draft = draft_model(&gguf, tokenizer, model.block_size, threads)?;
                let token_us = time_of_a_draft(&mut draft);
                engine.set_drafter(Box::new(draft), token_us);
            }
        }
        Ok(())
    }

    fn open_spill(&self, path: &Path) -> anyhow::Result<SpillFile> {
        let size = SpillSize::new(self.spill_size.unwrap_or(SPILL_BYTES));
        SpillFile::open(path, size).map_err(|error| WrongArguments(error.to_string()).into())
    }
}

fn draft_model(
    gguf: &Gguf,
    tokenizer: &Tokenizer,
    block_size: usize,
    threads: usize,
) -> anyhow::Result<DraftModel> {
    let spec = ModelSpec::from_gguf(gguf)?;
    let tokens = DRAFT_TOKENS.min(spec.trained_context.saturating_mul(4));
    let bytes = spec.bytes_per_token(PageFormat::F16, block_size) * tokens as f64;
    let budget_bytes = bytes as usize + (4 << 20);
    let options = DraftModelOptions {
        threads,
        tier: cpu_tier()?,
        block_size,
        budget_bytes,
        least_probability: LEAST_PROBABILITY,
    };
    let loaded = DraftModel::load(gguf, tokenizer.vocabulary(), options);
    loaded.map_err(|error| WrongArguments(error.to_string()).into())
}

/// Microseconds that a draft takes, so that drafts are tried only where they pay.
fn time_of_a_draft(draft: &mut DraftModel) -> f64 {
    const DRAFTS: usize = 4;
    const NOBODY: RunKey = RunKey(u64::MAX);
    let mut out = Vec::new();
    // The first call also computes the text so far.
    draft.draft(NOBODY, &[0], 1, &mut out);
    let start = Instant::now();
    draft.draft(NOBODY, &[0, 0], DRAFTS, &mut out);
    draft.forget(NOBODY);
    start.elapsed().as_secs_f64() * 1e6 / (DRAFTS + 1) as f64
}
