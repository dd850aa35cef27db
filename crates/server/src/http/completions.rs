//! `POST /v1/completions`.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use reef_engine::Usage;
use reef_engine::event::TokenLogprobs;
use reef_model::tokenizer::{Decode, Detokenizer, Encode, Tokenizer};
use serde::Serialize;
use serde_json::{Value, json};

use super::json::Sampled;
use super::prompt::token_ids;
use super::respond::{finish_reason, new_id, stop_reason, whole};
use super::structure::constraint;
use crate::access::Asker;
use crate::app::{App, Model, unix_time};
use crate::error::ApiError;
use crate::generation::{
    Collected, Completed, Ended, Generation, Job, Merged, Piece, TextOptions, Update,
};
use crate::sse::{self, Events, Narrator};
use crate::types::completion::{CompletionRequest, OnePrompt, Prompt};
use crate::types::logprobs::{CompletionLogprobs, TokenTexts, prompt_logprobs};
use crate::types::sampling::{SamplingFields, at_most};
use crate::usage::{degraded_header, usage_document};

/// Tokens generated at most where the request does not say: OpenAI's default.
const MAX_TOKENS: usize = 16;

/// How a prompt is told again.
const ECHO: Decode = Decode { show_special: true, continues: false };

/// `POST /v1/completions`.
///
/// # Errors
/// What is wrong with the request, or why it is not taken now.
pub async fn completions(
    State(app): State<Arc<App>>,
    asker: Asker,
    Sampled(mut body, shared): Sampled<CompletionRequest>,
) -> Result<Response, ApiError> {
    let model = app.model_named(body.model.as_deref())?;
    check(&body, &shared.sampling, &app)?;
    let constraint = constraint(model, &shared.structure).await?;
    let prompts = std::mem::replace(&mut body.prompt, Prompt::Ids(Vec::new()));
    let mut jobs = Vec::new();
    for prompt in each_prompt(prompts, app.settings.prompts_max)? {
        let mut job = job(&app, model, &asker, (&body, &shared.sampling), prompt).await?;
        job.request.constraint = constraint.clone();
        jobs.push(job);
        // Many prompts: others' answers go on in between.
        tokio::task::yield_now().await;
    }
    let answer = Answer::new(&app, model, &body, &jobs);
    let generations = Generation::start_all(model, jobs).await?;
    if body.stream.unwrap_or(false) {
        return Ok(sse::response(Merged::new(generations), Narration::new(answer)));
    }
    let mut collected = Vec::with_capacity(generations.len());
    for generation in generations {
        collected.push(generation.collect().await?);
    }
    Ok(answer.whole(collected))
}

/// The prompts of a request.
///
/// # Errors
/// None, or too many.
pub fn each_prompt(prompt: Prompt, most: usize) -> Result<Vec<OnePrompt>, ApiError> {
    let prompts = prompt.into_each();
    if prompts.is_empty() {
        return Err(ApiError::invalid("prompt", "prompt is empty: give a text or token ids"));
    }
    at_most(prompts.len(), most, "prompt", "prompts")?;
    Ok(prompts)
}

fn check(body: &CompletionRequest, sampling: &SamplingFields, app: &App) -> Result<(), ApiError> {
    if body.suffix.as_ref().is_some_and(|suffix| !suffix.is_empty()) {
        return Err(ApiError::invalid("suffix", "suffix is not supported: leave it out"));
    }
    let most = app.settings.logprobs_max;
    for (field, asked) in [("logprobs", body.logprobs), ("prompt_logprobs", body.prompt_logprobs)] {
        at_most(asked.unwrap_or(0), most, field, "alternatives")?;
    }
    let stream = body.stream.unwrap_or(false);
    if stream && sampling.branches(&app.settings)?.is_ranked() {
        let text = "best_of and beam search choose at the end: they cannot be streamed";
        return Err(ApiError::invalid("stream", text));
    }
    if body.max_tokens == Some(0) && !is_echo_only(body) {
        return Err(ApiError::invalid(
            "max_tokens",
            "max_tokens is 0: give at least 1 (0 goes only with echo)",
        ));
    }
    Ok(())
}

/// Nothing is to be generated: only the prompt is looked at.
fn is_echo_only(body: &CompletionRequest) -> bool {
    body.max_tokens == Some(0) && body.echo.unwrap_or(false)
}

async fn job(
    app: &App,
    model: &Model,
    asker: &Asker,
    (body, fields): (&CompletionRequest, &SamplingFields),
    prompt: OnePrompt,
) -> Result<Job, ApiError> {
    let options =
        Encode { add_special: body.add_special_tokens.unwrap_or(true), parse_special: true };
    let ids = token_ids(&model.tokenizer, prompt, options).await?;
    let mut request = asker.request(app, model, ids, body.kv.clone(), body.priority)?;
    request.max_tokens = Some(body.max_tokens.unwrap_or(MAX_TOKENS).max(1));
    request.sampling = fields.sampling()?;
    request.branches = fields.branches(&app.settings)?;
    request.end_ids = fields.end_ids(model.tokenizer.vocabulary().end_of_generation())?;
    request.logprobs = body.logprobs;
    request.prompt_logprobs = match body.echo.unwrap_or(false) {
        true => body.prompt_logprobs.max(body.logprobs),
        false => body.prompt_logprobs,
    };
    let text = TextOptions {
        stops: fields.stops()?,
        include_stop: fields.include_stop_str_in_output.unwrap_or(false),
        show_special: !fields.skip_special_tokens.unwrap_or(true),
        min_tokens: fields.min_tokens.unwrap_or(0),
    };
    Ok(Job { request, text })
}

/// What all parts of an answer need to know.
struct Answer {
    id: String,
    created: u64,
    model: String,
    tokenizer: Arc<Tokenizer>,
    /// The prompts, where they are told again.
    echoes: Option<Vec<Echo>>,
    /// Nothing but the prompt.
    echo_only: bool,
    with_logprobs: bool,
    with_prompt_logprobs: bool,
    tokens_as_ids: bool,
    /// Continuations of a prompt.
    choices: u32,
    /// Tokens of all prompts.
    prompt_tokens: usize,
    stream_usage: bool,
    continuous_usage: bool,
    comments: bool,
}

/// A prompt that is told again.
struct Echo {
    text: String,
    ids: Vec<u32>,
}

impl Answer {
    fn new(app: &App, model: &Model, body: &CompletionRequest, jobs: &[Job]) -> Answer {
        let echo = |job: &Job| Echo {
            text: model.tokenizer.decode(&job.request.prompt, ECHO),
            ids: job.request.prompt.clone(),
        };
        let stream = body.stream_options.unwrap_or_default();
        let choices = jobs.first().map_or(1, |job| job.request.branches.given());
        Answer {
            id: new_id("cmpl"),
            created: unix_time(),
            model: app.model_name().into(),
            tokenizer: model.tokenizer.clone(),
            echoes: body.echo.unwrap_or(false).then(|| jobs.iter().map(echo).collect()),
            echo_only: is_echo_only(body),
            with_logprobs: body.logprobs.is_some(),
            with_prompt_logprobs: body.prompt_logprobs.is_some(),
            tokens_as_ids: body.return_tokens_as_token_ids.unwrap_or(false),
            choices: choices as u32,
            prompt_tokens: jobs.iter().map(|job| job.request.prompt.len()).sum(),
            stream_usage: stream.includes_usage(),
            continuous_usage: stream.is_continuous(),
            comments: body.kv.as_ref().and_then(|kv| kv.comments).unwrap_or(false),
        }
    }

    fn texts(&self) -> TokenTexts<'_> {
        TokenTexts { tokenizer: &self.tokenizer, as_ids: self.tokens_as_ids }
    }

    fn index(&self, prompt: usize, choice: u32) -> u32 {
        prompt as u32 * self.choices + choice
    }

    /// The document of an answer that is not streamed.
    fn whole(&self, collected: Vec<Collected>) -> Response {
        let mut choices = Vec::new();
        for (prompt, one) in collected.iter().enumerate() {
            for (choice, completed) in one.completed.iter().enumerate() {
                choices.push(self.whole_choice(prompt, choice as u32, completed, one));
            }
        }
        let taken: Vec<(Usage, usize)> = collected
            .into_iter()
            .map(|one| (one.usage, if self.echo_only { 0 } else { one.completion_tokens }))
            .collect();
        let document = json!({
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "usage": usage_document(&taken),
        });
        whole(document, taken.iter().map(|(usage, _)| usage))
    }

    fn whole_choice(
        &self,
        prompt: usize,
        choice: u32,
        completed: &Completed,
        collected: &Collected,
    ) -> Value {
        let echo = self.echoes.as_ref().map(|echoes| &echoes[prompt]);
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
        if self.with_prompt_logprobs {
            document["prompt_logprobs"] =
                prompt_logprobs(&self.tokenizer, &collected.prompt_logprobs);
        }
        document
    }

    /// Log-probabilities of the prompt's tokens, as part of an answer that begins with it.
    fn push_prompt(&self, logprobs: &mut CompletionLogprobs, echo: &Echo, known: &[TokenLogprobs]) {
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

/// A chunk of a stream.
#[derive(Serialize)]
struct Chunk<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: &'a [ChunkChoice],
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    x_reef_degraded: Option<String>,
}

#[derive(Serialize)]
struct ChunkChoice {
    index: u32,
    text: String,
    logprobs: Option<CompletionLogprobs>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_reason: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<Value>,
}

/// Writes the answer as a stream.
struct Narration {
    answer: Answer,
    /// What the next chunk will say: the end of a continuation joins its last token, and what was degraded
    /// joins the end.
    held: Option<ChunkChoice>,
    /// Of each prompt.
    prompts: Vec<Told>,
    taken: Vec<(Usage, usize)>,
}

/// What was told of a prompt.
#[derive(Clone, Default)]
struct Told {
    prompt_logprobs: Vec<TokenLogprobs>,
    tokens: usize,
    /// Characters told of each continuation; empty before the first.
    offsets: Vec<Option<usize>>,
}

impl Narration {
    fn new(answer: Answer) -> Narration {
        Narration { answer, held: None, prompts: Vec::new(), taken: Vec::new() }
    }

    fn told(&mut self, prompt: usize) -> &mut Told {
        if self.prompts.len() <= prompt {
            self.prompts.resize(prompt + 1, Told::default());
        }
        &mut self.prompts[prompt]
    }

    /// The first chunk of a continuation tells the prompt where that was asked for. Gives the place of the
    /// next character.
    fn begin(&mut self, prompt: usize, choice: u32, events: &mut Events) -> usize {
        let told = self.told(prompt);
        let place = choice as usize;
        if told.offsets.len() <= place {
            told.offsets.resize(place + 1, None);
        }
        if let Some(offset) = told.offsets[place] {
            return offset;
        }
        let known = std::mem::take(&mut told.prompt_logprobs);
        let mut offset = 0;
        let answer = &self.answer;
        let echo = answer.echoes.as_ref().map(|echoes| &echoes[prompt]);
        if echo.is_some() || answer.with_prompt_logprobs {
            let mut logprobs = CompletionLogprobs::default();
            if let Some(echo) = echo {
                answer.push_prompt(&mut logprobs, echo, &known);
            }
            let text = echo.map_or(String::new(), |echo| echo.text.clone());
            offset = text.chars().count();
            let chunk = ChunkChoice {
                index: answer.index(prompt, choice),
                text,
                logprobs: (answer.with_logprobs && echo.is_some()).then_some(logprobs),
                finish_reason: None,
                stop_reason: None,
                prompt_logprobs: answer
                    .with_prompt_logprobs
                    .then(|| prompt_logprobs(&answer.tokenizer, &known)),
            };
            self.write_chunk(&[chunk], None, events);
        }
        let told = self.told(prompt);
        told.prompt_logprobs = known;
        told.offsets[place] = Some(offset);
        offset
    }

    fn piece(&mut self, prompt: usize, piece: Piece, events: &mut Events) {
        self.flush(events);
        let offset = self.begin(prompt, piece.choice, events);
        let told = self.told(prompt);
        told.tokens += 1;
        told.offsets[piece.choice as usize] = Some(offset + piece.chars);
        if self.answer.echo_only {
            return;
        }
        let logprobs = piece.logprobs.map(|token| {
            let mut logprobs = CompletionLogprobs::default();
            logprobs.push(&self.answer.texts(), &token, offset);
            logprobs
        });
        self.held = Some(ChunkChoice {
            index: self.answer.index(prompt, piece.choice),
            text: piece.text,
            logprobs,
            finish_reason: None,
            stop_reason: None,
            prompt_logprobs: None,
        });
    }

    fn ended(&mut self, prompt: usize, ended: Ended, events: &mut Events) {
        let index = self.answer.index(prompt, ended.choice);
        if self.held.as_ref().is_none_or(|held| held.index != index) {
            self.flush(events);
            self.begin(prompt, ended.choice, events);
        }
        let mut last = self.held.take().unwrap_or(ChunkChoice {
            index,
            text: String::new(),
            logprobs: None,
            finish_reason: None,
            stop_reason: None,
            prompt_logprobs: None,
        });
        if !self.answer.echo_only {
            last.text += &ended.text;
        }
        last.finish_reason = Some(finish_reason(ended.reason));
        last.stop_reason = stop_reason(ended.reason, ended.stop);
        self.held = Some(last);
    }

    /// Writes what is held.
    fn flush(&mut self, events: &mut Events) {
        self.flush_with(None, events);
    }

    fn flush_with(&mut self, degraded: Option<String>, events: &mut Events) {
        let Some(held) = self.held.take() else { return };
        let silent = held.text.is_empty() && held.logprobs.is_none();
        if !silent || held.finish_reason.is_some() {
            self.write_chunk(&[held], degraded, events);
        }
    }

    fn write_chunk(&self, choices: &[ChunkChoice], degraded: Option<String>, events: &mut Events) {
        let usage = self.answer.continuous_usage.then(|| self.usage_so_far());
        self.write_with(choices, usage, degraded, events);
    }

    fn write_with(
        &self,
        choices: &[ChunkChoice],
        usage: Option<Value>,
        x_reef_degraded: Option<String>,
        events: &mut Events,
    ) {
        let Answer { id, created, model, .. } = &self.answer;
        events.push(&Chunk {
            id,
            object: "text_completion",
            created: *created,
            model,
            choices,
            usage,
            x_reef_degraded,
        });
    }

    fn usage_so_far(&self) -> Value {
        let completion: usize = self.prompts.iter().map(|told| told.tokens).sum();
        let prompt = self.answer.prompt_tokens;
        json!({
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        })
    }
}

impl Narrator for Narration {
    fn write(&mut self, index: usize, update: Update, events: &mut Events) {
        match update {
            Update::Admitted { .. } => {}
            Update::PromptLogprobs(more) => self.told(index).prompt_logprobs.extend(more),
            Update::Piece(piece) => self.piece(index, piece, events),
            Update::Ended(ended) => self.ended(index, ended, events),
            Update::Paused(pause) if self.answer.comments => {
                Narration::flush(self, events);
                let (kind, reason) = (pause.kind.name(), pause.reason.name());
                events.push_comment(&format!("paused: {kind} ({reason})"));
            }
            Update::Resumed if self.answer.comments => events.push_comment("resumed"),
            Update::Paused(_) | Update::Resumed => {}
            Update::Failed(error) => {
                self.flush(events);
                events.push_error(&error);
            }
            Update::Finished(finish) => {
                self.flush_with(degraded_header(finish.usage()), events);
                let tokens = if self.answer.echo_only { 0 } else { finish.completion_tokens };
                self.taken.push((finish.outcome.usage, tokens));
            }
        }
    }

    fn flush(&mut self, events: &mut Events) {
        // An end waits for what was degraded, which comes next.
        if self.held.as_ref().is_some_and(|held| held.finish_reason.is_none()) {
            Narration::flush(self, events);
        }
    }

    fn end(&mut self, events: &mut Events) {
        Narration::flush(self, events);
        if self.answer.stream_usage && !self.taken.is_empty() {
            self.write_with(&[], Some(usage_document(&self.taken)), None, events);
        }
    }
}
