//! `POST /inference/v1/generate`: token ids in, token ids out, as in vLLM; streamed as well.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use reef_engine::Usage;
use reef_model::tokenizer::Tokenizer;
use serde_json::{Value, json};

use super::json::Json;
use super::prompt::known;
use super::respond::{finish_reason, new_id, stop_reason, whole};
use crate::access::Asker;
use crate::app::{App, Model};
use crate::error::ApiError;
use crate::generation::{Collected, Completed, Generation, Job, Merged, TextOptions, Update};
use crate::sse::{self, Events, Narrator};
use crate::types::generate::GenerateRequest;
use crate::types::logprobs::{TokenTexts, chat_logprob, prompt_logprobs};
use crate::types::sampling::{at_most, can_stream};
use crate::usage::{degraded_header, usage_document};

/// Tokens generated at most where the request does not say: vLLM's default.
const MAX_TOKENS: usize = 16;

/// `POST /inference/v1/generate`.
///
/// # Errors
/// What is wrong with the request, or why it is not taken now.
pub async fn generate(
    State(app): State<Arc<App>>,
    asker: Asker,
    Json(mut body): Json<GenerateRequest>,
) -> Result<Response, ApiError> {
    let model = app.model_named(body.model.as_deref())?;
    let job = job(&app, model, &asker, &mut body)?;
    let stream = body.stream.unwrap_or(false);
    if stream {
        can_stream(job.request.branches)?;
    }
    let answer = Answer {
        request_id: body.request_id.unwrap_or_else(|| new_id("generate")),
        tokenizer: model.tokenizer.clone(),
        logprobs: job.request.logprobs,
        with_prompt_logprobs: job.request.prompt_logprobs.is_some(),
        with_usage: body.stream_options.unwrap_or_default().includes_usage(),
    };
    let generation = Generation::start(model, job).await?;
    if stream {
        let narration = Narration { answer, usage: None };
        return Ok(sse::response(Merged::new(vec![generation]), narration));
    }
    Ok(answer.whole(generation.collect().await?))
}

fn job(
    app: &App,
    model: &Model,
    asker: &Asker,
    body: &mut GenerateRequest,
) -> Result<Job, ApiError> {
    let sampling = body.sampling_params.take().unwrap_or_default();
    let (fields, most) = (&sampling.fields, app.settings.logprobs_max);
    at_most(sampling.logprobs.unwrap_or(0), most, "logprobs", "alternatives")?;
    at_most(sampling.prompt_logprobs.unwrap_or(0), most, "prompt_logprobs", "alternatives")?;
    let ids = known(&model.tokenizer, "token_ids", std::mem::take(&mut body.token_ids))?;
    let mut request = asker.request(app, model, ids, body.kv.take(), body.priority)?;
    request.max_tokens = Some(sampling.max_tokens.unwrap_or(MAX_TOKENS));
    request.sampling = fields.sampling()?;
    request.branches = fields.branches(&app.settings)?;
    request.end_ids = fields.end_ids(model.tokenizer.vocabulary().end_of_generation())?;
    request.logprobs = sampling.logprobs;
    request.prompt_logprobs = sampling.prompt_logprobs;
    let min_tokens = fields.min_tokens.unwrap_or(0);
    let text = TextOptions { stops: fields.stops()?, min_tokens, ..TextOptions::default() };
    Ok(Job { request, text })
}

/// What all parts of an answer need to know.
struct Answer {
    request_id: String,
    tokenizer: Arc<Tokenizer>,
    logprobs: Option<usize>,
    with_prompt_logprobs: bool,
    with_usage: bool,
}

impl Answer {
    fn texts(&self) -> TokenTexts<'_> {
        TokenTexts { tokenizer: &self.tokenizer, as_ids: true }
    }

    fn whole(&self, collected: Collected) -> Response {
        let choices = collected.completed.iter().enumerate();
        let choices: Vec<Value> = choices.map(|(index, one)| self.choice(index, one)).collect();
        let prompt = &collected.prompt_logprobs;
        let taken = [(collected.usage, collected.completion_tokens)];
        let document = json!({
            "request_id": self.request_id,
            "choices": choices,
            "prompt_logprobs":
                self.with_prompt_logprobs.then(|| prompt_logprobs(&self.tokenizer, prompt)),
            "kv_transfer_params": null,
            "usage": usage_document(&taken),
        });
        whole(document, taken.iter().map(|(usage, _)| usage))
    }

    fn choice(&self, index: usize, completed: &Completed) -> Value {
        let logprobs = self.logprobs.map(|most| {
            let tokens = completed.logprobs.iter();
            let content = tokens.map(|token| chat_logprob(&self.texts(), token, most));
            json!({"content": content.collect::<Vec<Value>>()})
        });
        json!({
            "index": index,
            "logprobs": logprobs,
            "finish_reason": finish_reason(completed.reason),
            "stop_reason": stop_reason(completed.reason, completed.stop.clone()),
            "token_ids": completed.token_ids,
        })
    }

    fn chunk(&self, choices: Value, events: &mut Events) {
        events.push(&json!({"request_id": self.request_id, "choices": choices}));
    }
}

/// Writes the answer as a stream.
struct Narration {
    answer: Answer,
    usage: Option<(Usage, usize)>,
}

impl Narrator for Narration {
    fn write(&mut self, _index: usize, update: Update, events: &mut Events) {
        let answer = &self.answer;
        match update {
            Update::Admitted { .. } | Update::Paused(_) | Update::Resumed => {}
            Update::PromptLogprobs(known) => {
                if answer.with_prompt_logprobs {
                    let prompt = prompt_logprobs(&answer.tokenizer, &known);
                    events.push(&json!({
                        "request_id": answer.request_id, "choices": [], "prompt_logprobs": prompt,
                    }));
                }
            }
            Update::Piece(piece) => {
                let most = answer.logprobs.unwrap_or(0);
                let logprobs = piece
                    .logprobs
                    .map(|token| json!({"content": [chat_logprob(&answer.texts(), &token, most)]}));
                let choice = json!({
                    "index": piece.choice,
                    "logprobs": logprobs,
                    "finish_reason": null,
                    "token_ids": [piece.token_id],
                });
                answer.chunk(json!([choice]), events);
            }
            Update::Ended(ended) => {
                let choice = json!({
                    "index": ended.choice,
                    "logprobs": null,
                    "finish_reason": finish_reason(ended.reason),
                    "stop_reason": stop_reason(ended.reason, ended.stop),
                    "token_ids": [],
                });
                answer.chunk(json!([choice]), events);
            }
            Update::Failed(error) => events.push_error(&error),
            Update::Finished(finish) => {
                self.usage = Some((finish.outcome.usage, finish.completion_tokens));
            }
        }
    }

    fn flush(&mut self, _events: &mut Events) {}

    fn end(&mut self, events: &mut Events) {
        let Some(taken) = self.usage.take() else { return };
        let request_id = &self.answer.request_id;
        if self.answer.with_usage {
            let usage = usage_document(&[taken]);
            events.push(&json!({"request_id": request_id, "choices": [], "usage": usage}));
        } else if let Some(degraded) = degraded_header(&taken.0) {
            events.push(&json!({
                "request_id": request_id, "choices": [], "x_reef_degraded": degraded,
            }));
        }
    }
}
