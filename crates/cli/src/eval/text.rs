//! The tokens that a measure scores: from texts or from a file of ids.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use reef_model::gguf::Gguf;
use reef_model::tokenizer::{Encode, Tokenizer};

use crate::eval::ids::read_ids;
use crate::output::note;

/// What to score.
#[derive(clap::Args, Clone, Debug)]
pub struct TextArgs {
    /// Text to score; several are joined in order
    #[arg(long, value_name = "FILE", required_unless_present = "ids", conflicts_with = "ids")]
    text: Vec<PathBuf>,
    /// Token ids to score instead of a text: JSON array, or object with `ids`; no BOS is added
    #[arg(long, value_name = "FILE")]
    ids: Option<PathBuf>,
    /// Score only the first N tokens
    #[arg(long, value_name = "N")]
    pub tokens: Option<usize>,
}

impl TextArgs {
    /// The tokens, at most `--tokens` of them and at least two.
    pub fn ids(&self, gguf: &Gguf) -> anyhow::Result<Vec<u32>> {
        let mut ids = self.all(gguf)?;
        let found = ids.len();
        ids.truncate(self.tokens.unwrap_or(usize::MAX));
        ensure!(ids.len() >= 2, "{} tokens to score: give at least 2", ids.len());
        if let Some(asked) = self.tokens.filter(|asked| *asked > found) {
            note(&format!("the text has {found} tokens, fewer than the {asked} asked for"));
        }
        Ok(ids)
    }

    /// Exactly `tokens` tokens: a shorter text is continued from its start. Also how many tokens the
    /// text itself has.
    pub fn repeated_ids(&self, gguf: &Gguf, tokens: usize) -> anyhow::Result<(Vec<u32>, usize)> {
        let ids = self.all(gguf)?;
        ensure!(ids.len() >= 2, "{} tokens to score: give at least 2", ids.len());
        let found = ids.len();
        Ok((ids.into_iter().cycle().take(tokens).collect(), found))
    }

    fn all(&self, gguf: &Gguf) -> anyhow::Result<Vec<u32>> {
        match &self.ids {
            Some(path) => read_ids(path),
            None => encode_files(&Tokenizer::from_gguf(gguf)?, &self.text),
        }
    }

    /// The texts' paths; none where ids were given.
    pub fn paths(&self) -> &[PathBuf] {
        &self.text
    }

    /// Names of the files, for reports.
    pub fn sources(&self) -> Vec<String> {
        let paths = self.ids.iter().chain(&self.text);
        let name =
            |path: &PathBuf| path.file_name().map(|name| name.to_string_lossy().into_owned());
        paths.filter_map(name).collect()
    }
}

/// Tokens of `paths` in order, with BOS before the first where the model wants one. Special tokens
/// spelled out in a text are text.
pub fn encode_files(tokenizer: &Tokenizer, paths: &[PathBuf]) -> anyhow::Result<Vec<u32>> {
    let mut ids = Vec::new();
    for (index, path) in paths.iter().enumerate() {
        let encode = Encode { add_special: index == 0, parse_special: false };
        ids.extend(tokenizer.encode(&read_text(path)?, encode)?);
    }
    Ok(ids)
}

fn read_text(path: &Path) -> anyhow::Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("cannot read --text {}", path.display()))
}
