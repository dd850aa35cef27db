//! Prompts through a chat template, once or as a conversation on a terminal.

use std::io::{BufRead as _, Write as _};
use std::path::Path;

use anyhow::Context as _;
use reef_model::chat_template::{ChatTemplate, Message, Render};
use reef_model::gguf::Gguf;
use reef_model::tokenizer::{Encode, Tokenizer};

use super::stream::Streamed;
use crate::output::note;

/// A chat template and the tokenizer of its model.
pub struct Chat<'a> {
    template: ChatTemplate,
    tokenizer: &'a Tokenizer,
}

impl<'a> Chat<'a> {
    /// The file's template, or the one in `path`.
    pub fn new(
        gguf: &Gguf,
        tokenizer: &'a Tokenizer,
        path: Option<&Path>,
    ) -> anyhow::Result<Chat<'a>> {
        let template = match path {
            None => ChatTemplate::from_gguf(gguf, tokenizer)?,
            Some(path) => {
                let source = std::fs::read_to_string(path)
                    .with_context(|| format!("cannot read --chat-template {}", path.display()))?;
                ChatTemplate::new(&source, tokenizer)?
            }
        };
        Ok(Chat { template, tokenizer })
    }

    /// Token ids of a conversation that begins with `text`.
    pub fn first_turn(&self, text: &str) -> anyhow::Result<Vec<u32>> {
        self.render(&[message("user", text)])
    }

    fn render(&self, messages: &[Message]) -> anyhow::Result<Vec<u32>> {
        let text = self.template.render(messages, &Render::default())?;
        // Many templates write the BOS token themselves; it must not stand there twice.
        let vocabulary = self.tokenizer.vocabulary();
        let bos = vocabulary.special().bos.and_then(|id| vocabulary.text(id)).unwrap_or("");
        let add_special = bos.is_empty() || !text.starts_with(bos);
        Ok(self.tokenizer.encode(&text, Encode { add_special, parse_special: true })?)
    }

    /// Reads lines from the terminal and answers each with `generate`, until end of file.
    pub fn converse(
        &self,
        generate: &mut dyn FnMut(Vec<u32>) -> anyhow::Result<Streamed>,
    ) -> anyhow::Result<()> {
        note("A chat; an empty line or Ctrl-D ends it.");
        let mut messages = Vec::new();
        loop {
            let _ = write!(std::io::stderr(), "> ");
            let mut line = String::new();
            let read =
                std::io::stdin().lock().read_line(&mut line).context("cannot read a line")?;
            if read == 0 || line.trim().is_empty() {
                return Ok(());
            }
            messages.push(message("user", line.trim_end()));
            let streamed = generate(self.render(&messages)?)?;
            messages.push(message("assistant", &streamed.text));
        }
    }
}

fn message(role: &str, content: &str) -> Message {
    Message { role: role.into(), content: content.into() }
}
