//! The answer of `/v1/completions` as one document.

use std::sync::Arc;

use axum::response::Response;
use reef_engine::Usage;
use reef_engine::event::TokenLogprobs;
use reef_model::tokenizer::{Decode, Detokenizer, Tokenizer};
use serde_json::{Value, json};

use super::head::Head;
use super::respond::{finish_reason, stop_reason, whole};
use crate::app::{App, Model};
use crate::generation::{Collected, Completed, Job};
use crate::types::completion::CompletionRequest;
use crate::types::logprobs::{CompletionLogprobs, TokenTexts, prompt_logprobs};

/// How a prompt is told again.
const ECHO: Decode = Decode { show_special: true, continues: false };

/// What all parts of an answer need to know.
pub struct Answer {
    /// Who it is.
    pub head: Head,
    tokenizer: Arc<Tokenizer>,
    /// The prompts, where they are told again.
    echoes: Option<Vec<Echo>>,
    /// Nothing but the prompt.
    pub echo_only: bool,
    /// Log-probabilities of tokens were asked for.
    pub with_logprobs: bool,
    with_prompt_logprobs: bool,
    tokens_as_ids: bool,
    /// Continuations of a prompt.
    choices: u32,
}

/// A prompt that is told again.
pub struct Echo {
    /// The prompt.
    pub text: String,
    ids: Vec<u32>,
}

impl Answer {
    /// The answer to `body`, whose prompts became `jobs`.
    pub fn new(app: &App, model: &Model, body: &CompletionRequest, jobs: &[Job]) -> Answer {
        let echo = |job: &Job| Echo {
            text: model.tokenizer.decode(&job.request.prompt, ECHO),
            ids: job.request.prompt.clone(),
        };
        let prompt_tokens = jobs.iter().map(|job| job.request.prompt.len()).sum();
        let choices = jobs.first().map_or(1, |job| job.request.branches.given());
        Answer {
            head: Head::new(app, "cmpl", prompt_tokens, body.stream_options, body.kv.as_ref()),
            tokenizer: model.tokenizer.clone(),
            echoes: body.echo.unwrap_or(false).then(|| jobs.iter().map(echo).collect()),
            echo_only: body.is_echo_only(),
            with_logprobs: body.logprobs.is_some(),
            with_prompt_logprobs: body.prompt_logprobs.is_some(),
            tokens_as_ids: body.return_tokens_as_token_ids.unwrap_or(false),
            choices: choices as u32,
        }
    }

    /// How log-probabilities name tokens.
    pub fn texts(&self) -> TokenTexts<'_> {
        TokenTexts { tokenizer: &self.tokenizer, as_ids: self.tokens_as_ids }
    }

    /// Where a continuation of a prompt stands among all.
    pub fn index(&self, prompt: usize, choice: u32) -> u32 {
        prompt as u32 * self.choices + choice
    }

    /// A prompt that is told again, if it is.
    pub fn echo(&self, prompt: usize) -> Option<&Echo> {
        self.echoes.as_ref().map(|echoes| &echoes[prompt])
    }

    /// Log-probabilities of a prompt, where they were asked for by themselves.
    pub fn prompt_logprobs(&self, known: &[TokenLogprobs]) -> Option<Value> {
        self.with_prompt_logprobs.then(|| prompt_logprobs(&self.tokenizer, known))
    }

    /// The document of an answer that is not streamed.
    pub fn whole(&self, collected: Vec<Collected>) -> Response {
        let mut choices = Vec::new();
        for (prompt, one) in collected.iter().enumerate() {
            for (choice, completed) in one.completed.iter().enumerate() {
                choices.push(self.choice(prompt, choice as u32, completed, one));
            }
        }
        let taken: Vec<(Usage, usize)> = collected
            .into_iter()
            .map(|one| (one.usage, if self.echo_only { 0 } else { one.completion_tokens }))
            .collect();
        let document = self.head.document("text_completion", choices, &taken);
        whole(document, taken.iter().map(|(usage, _)| usage))
    }

    fn choice(
        &self,
        prompt: usize,
        choice: u32,
        completed: &Completed,
        collected: &Collected,
    ) -> Value {
        let echo = self.echo(prompt);
        let mut text = echo.map_or(String::new(), |echo| echo.text.clone());
        let mut logprobs = CompletionLogprobs::default();
        if let Some(echo) = echo {
            self.push_prompt(&mut logprobs, echo, &collected.prompt_logprobs);
        }
        let mut offset = text.chars().count();
        if !self.echo_only {
            for (token, chars) in completed.logprobs.iter().zip(&completed.chars) {
                logprobs.push(&self.texts(), token, offset);
                offset += chars;
            }
            text += &completed.text;
        }
        let mut document = json!({
            "index": self.index(prompt, choice),
            "text": text,
            "logprobs": self.with_logprobs.then_some(logprobs),
            "finish_reason": finish_reason(completed.reason),
            "stop_reason": stop_reason(completed.reason, completed.stop.clone()),
        });
        if let Some(known) = self.prompt_logprobs(&collected.prompt_logprobs) {
            document["prompt_logprobs"] = known;
        }
        document
    }

    /// Log-probabilities of the prompt's tokens, as part of an answer that begins with it.
    pub fn push_prompt(
        &self,
        logprobs: &mut CompletionLogprobs,
        echo: &Echo,
        known: &[TokenLogprobs],
    ) {
        let texts = self.texts();
        let Some(&first) = echo.ids.first() else { return };
        // A token's own text would count a character that several make up more than once.
        let mut detokenizer = Detokenizer::new(&*self.tokenizer, ECHO);
        let mut offset = detokenizer.push(first).chars().count();
        logprobs.push_first(texts.text(first));
        for token in known {
            logprobs.push(&texts, token, offset);
            offset += detokenizer.push(token.id).chars().count();
        }
    }
}
