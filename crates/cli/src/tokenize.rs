//! `reef tokenize`: text to token ids, with the tokenizer of a model.

use std::io::{IsTerminal as _, Read as _};
use std::path::PathBuf;

use anyhow::{Context as _, anyhow};
use reef_model::gguf::{Gguf, escape};
use reef_model::tokenizer::{Encode, Tokenizer};
use serde_json::json;

use crate::{Common, output, pull};

/// Turn text into token ids
///
/// The text comes from -p, from --file, or else from stdin.
#[derive(clap::Args)]
pub struct Args {
    /// A GGUF file (its tensors are not needed) or an alias known to `reef pull`
    #[arg(value_name = "MODEL", default_value = "smollm2")]
    model: String,
    /// The text
    #[arg(short, long, value_name = "TEXT", conflicts_with = "file", allow_hyphen_values = true)]
    prompt: Option<String>,
    /// A file with the text, used to the byte: nothing is trimmed
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Add no BOS or EOS token
    #[arg(long)]
    no_special: bool,
    /// Take special tokens in the text (`<|im_start|>`) as the characters they are
    #[arg(long)]
    literal: bool,
    #[command(flatten)]
    common: Common,
}

/// Runs `reef tokenize`: `{"ids": […]}` with `--json`, else a line for each token with its text.
pub fn run(args: Args) -> anyhow::Result<()> {
    let path = pull::resolve_model(&args.model, false)?;
    let tokenizer = Tokenizer::from_gguf(&Gguf::open(&path)?)
        .with_context(|| format!("cannot tokenize with {}", path.display()))?;
    let text = args.text()?;
    let options = Encode { add_special: !args.no_special, parse_special: !args.literal };
    let ids = tokenizer.encode(&text, options)?;
    if args.common.json {
        return output::print_json(&json!({ "ids": ids }));
    }
    if ids.is_empty() {
        return Ok(());
    }
    let lines: Vec<String> = ids.iter().map(|id| line(&tokenizer, *id)).collect();
    output::print_line(&lines.join("\n"))
}

/// A token's id and text on one line; the bytes of a token that is part of a character in hex.
fn line(tokenizer: &Tokenizer, id: u32) -> String {
    let bytes = tokenizer.token_bytes(id).unwrap_or_default();
    let shown = match std::str::from_utf8(&bytes) {
        Ok(text) => format!("\"{}\"", escape(text)),
        Err(_) => bytes.iter().map(|byte| format!("<{byte:02X}>")).collect(),
    };
    format!("{id:>7}  {shown}")
}

impl Args {
    /// The text to tokenize, byte for byte.
    fn text(&self) -> anyhow::Result<String> {
        if let Some(text) = &self.prompt {
            return Ok(text.clone());
        }
        let (bytes, source) = match &self.file {
            Some(path) => {
                let name = path.display().to_string();
                (std::fs::read(path).with_context(|| format!("cannot read {name}"))?, name)
            }
            None => {
                if std::io::stdin().is_terminal() {
                    output::note("reading text from the terminal; end it with Ctrl-D");
                }
                let mut bytes = Vec::new();
                std::io::stdin().lock().read_to_end(&mut bytes).context("cannot read stdin")?;
                (bytes, "stdin".to_owned())
            }
        };
        utf8(bytes, &source)
    }
}

/// `bytes` as text, or where they stop being text.
fn utf8(bytes: Vec<u8>, source: &str) -> anyhow::Result<String> {
    String::from_utf8(bytes).map_err(|error| {
        let offset = error.utf8_error().valid_up_to();
        anyhow!("{source} is not UTF-8: byte {offset} begins no character; convert it to UTF-8")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_that_is_not_utf_8_is_refused_with_its_byte() {
        assert_eq!(utf8("a\r\n\u{e9} ".into(), "stdin").unwrap(), "a\r\n\u{e9} ");
        let error = utf8(b"abc\xffdef".to_vec(), "stdin").unwrap_err().to_string();
        assert_eq!(error, "stdin is not UTF-8: byte 3 begins no character; convert it to UTF-8");
    }
}
