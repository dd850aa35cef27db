//! `POST /v1/completions`.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use reef_model::tokenizer::Encode;

use super::completion_answer::Answer;
use super::completion_stream::CompletionStream;
use super::json::Sampled;
use super::narration::Narration;
use super::prompt::token_ids;
use super::structure::constraint;
use crate::access::Asker;
use crate::app::{App, Model};
use crate::error::ApiError;
use crate::generation::{Generation, Job, Merged, TextOptions};
use crate::sse;
use crate::types::completion::{CompletionRequest, OnePrompt, Prompt};
use crate::types::sampling::{SamplingFields, at_most, can_stream};

/// Tokens generated at most where the request does not say: OpenAI's default.
const MAX_TOKENS: usize = 16;

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
        let narration = Narration::new(CompletionStream::new(answer));
        return Ok(sse::response(Merged::new(generations), narration));
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
    if body.stream.unwrap_or(false) {
        can_stream(sampling.branches(&app.settings)?)?;
    }
    if body.max_tokens == Some(0) && !body.is_echo_only() {
        return Err(ApiError::invalid(
            "max_tokens",
            "max_tokens is 0: give at least 1 (0 goes only with echo)",
        ));
    }
    Ok(())
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
