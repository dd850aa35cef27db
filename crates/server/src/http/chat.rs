//! `POST /v1/chat/completions`, and what its prompt is in tokens.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use reef_model::chat_template::{ChatTemplate, ChatTemplateError, Render};
use reef_model::tokenizer::Encode;
use serde_json::{Map, Value};

use super::chat_answer::Answer;
use super::chat_stream::ChatStream;
use super::json::{Json, Sampled, SharedFields};
use super::narration::Narration;
use super::prompt::encode;
use super::render::document;
use crate::access::Asker;
use crate::app::{App, Model};
use crate::error::ApiError;
use crate::generation::{Generation, Job, Merged, TextOptions};
use crate::grammar::{Structure, StructureFields};
use crate::sse;
use crate::tools::Tools;
use crate::types::chat::{ChatRequest, Ending};
use crate::types::conversation::conversation;
use crate::types::sampling::{SamplingFields, at_most, can_stream};

/// `POST /v1/chat/completions`.
///
/// # Errors
/// What is wrong with the request, or why it is not taken now.
pub async fn chat(
    State(app): State<Arc<App>>,
    asker: Asker,
    Sampled(mut body, SharedFields { sampling, structure }): Sampled<ChatRequest>,
) -> Result<Response, ApiError> {
    let model = app.model_named(body.model.as_deref())?;
    let stream = body.stream.unwrap_or(false);
    if stream {
        can_stream(sampling.branches(&app.settings)?)?;
    }
    let Prompt { ids, tools } = prompt(model, &mut body).await?;
    let wanted = wanted(tools.as_ref(), &structure, model)?;
    let mut job = job(&app, model, &asker, (&body, &sampling), ids)?;
    // Tags of calls may be special tokens.
    job.text.show_special |= tools.is_some();
    if let Some(wanted) = wanted {
        job.request.constraint = Some(model.grammars.constraint(wanted).await?);
    }
    let answer = Answer::new(&app, model, &body, &job, tools);
    let generation = Generation::start(model, job).await?;
    if stream {
        let narration = Narration::new(ChatStream::new(answer));
        return Ok(sse::response(Merged::new(vec![generation]), narration));
    }
    Ok(answer.whole(generation.collect().await?))
}

/// `POST /v1/chat/completions/render`: the token ids of the prompt. Asks nothing of the engine.
///
/// # Errors
/// As `/v1/chat/completions`.
pub async fn render(
    State(app): State<Arc<App>>,
    Json(mut body): Json<ChatRequest>,
) -> Result<axum::Json<Value>, ApiError> {
    let model = app.model_named(body.model.as_deref())?;
    let Prompt { ids, .. } = prompt(model, &mut body).await?;
    Ok(axum::Json(document(&ids, app.model_name())))
}

/// The conversation as tokens, and the tools that it shows.
pub(super) struct Prompt {
    pub(super) ids: Vec<u32>,
    tools: Option<Tools>,
}

/// What `body` asks the model to go on with.
///
/// # Errors
/// What is wrong with messages, tools or the template.
pub(super) async fn prompt(model: &Model, body: &mut ChatRequest) -> Result<Prompt, ApiError> {
    let Some(template) = &model.template else {
        let text = format!("{}; or use /v1/completions", ChatTemplateError::Missing);
        return Err(ApiError::invalid("messages", text));
    };
    if body.chat_template.is_some() {
        let text = "chat_template is not taken from requests: start with --chat-template FILE";
        return Err(ApiError::invalid("chat_template", text));
    }
    let ending = body.ending()?;
    let tools = Tools::of(&body.tool_fields(), template.source())?;
    let knows_developer = template.source().contains("developer");
    let messages = conversation(std::mem::take(&mut body.messages), knows_developer)?;
    let options = Render {
        add_generation_prompt: ending == Ending::GenerationPrompt,
        tools: tools.as_ref().map(|tools| tools.rendered().clone()),
        variables: body.chat_template_kwargs.take().unwrap_or_default(),
        ..Render::default()
    };
    let text = rendered(template.clone(), messages, options, ending).await?;
    let add_special = body.add_special_tokens.unwrap_or(false);
    let ids = encode(&model.tokenizer, text, Encode { add_special, parse_special: true }).await?;
    Ok(Prompt { ids, tools })
}

async fn rendered(
    template: Arc<ChatTemplate>,
    messages: Vec<Map<String, Value>>,
    options: Render,
    ending: Ending,
) -> Result<String, ApiError> {
    let elsewhere = tokio::task::spawn_blocking(move || {
        let text = template.render(&messages, &options)?;
        Ok(match (ending, messages.last()) {
            (Ending::FinalMessage, Some(message)) => within_final(text, message),
            _ => Some(text),
        })
    });
    let done = elsewhere.await.map_err(|_| ApiError::internal("the chat template failed"))?;
    let text = done.map_err(|error: ChatTemplateError| {
        ApiError::invalid("messages", format!("messages: {error}"))
    })?;
    text.ok_or_else(|| {
        let text = "continue_final_message: the chat template does not show the last message as it \
                    is; leave it out";
        ApiError::invalid("continue_final_message", text)
    })
}

/// `text` up to the end of the last message's content, as transformers cut it; `None`: it is not there.
fn within_final(mut text: String, message: &Map<String, Value>) -> Option<String> {
    let content = message.get("content")?.as_str()?;
    let shown = content.trim();
    let start = text.rfind(shown)?;
    // A template may have trimmed what it shows.
    let kept = content.trim_start();
    let end = if text[start..].starts_with(kept) { kept.len() } else { shown.len() };
    text.truncate(start + end);
    Some(text)
}

/// What the answer must be: calls where they are demanded, else the structure that is asked for.
fn wanted(
    tools: Option<&Tools>,
    fields: &StructureFields,
    model: &Model,
) -> Result<Option<Structure>, ApiError> {
    let asked = fields.structure()?;
    let Some(tools) = tools.filter(|tools| tools.are_demanded()) else { return Ok(asked) };
    if let Some(asked) = asked {
        let text = format!("tool_choice demands a call: leave {} out", asked.field);
        return Err(ApiError::invalid("tool_choice", text));
    }
    Ok(tools.structure(&model.tokenizer))
}

fn job(
    app: &App,
    model: &Model,
    asker: &Asker,
    (body, fields): (&ChatRequest, &SamplingFields),
    ids: Vec<u32>,
) -> Result<Job, ApiError> {
    let most = app.settings.logprobs_max;
    at_most(body.prompt_logprobs.unwrap_or(0), most, "prompt_logprobs", "alternatives")?;
    let mut request = asker.request(app, model, ids, body.kv.clone(), body.priority)?;
    request.max_tokens = body.most_tokens()?;
    request.sampling = fields.sampling()?;
    request.branches = fields.branches(&app.settings)?;
    request.end_ids = fields.end_ids(model.tokenizer.vocabulary().end_of_generation())?;
    request.logprobs = body.alternatives(most)?;
    request.prompt_logprobs = body.prompt_logprobs;
    let text = TextOptions {
        stops: fields.stops()?,
        include_stop: fields.include_stop_str_in_output.unwrap_or(false),
        show_special: !fields.skip_special_tokens.unwrap_or(true),
        min_tokens: fields.min_tokens.unwrap_or(0),
    };
    Ok(Job { request, text })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_prompt_is_cut_within_the_final_message() {
        let cut = |text: &str, content: &str| {
            let message = json!({"role": "assistant", "content": content});
            within_final(text.to_owned(), message.as_object().unwrap())
        };
        let text = "<u>One, two<e><a>One, two <e>\n";
        assert_eq!(cut(text, "One, two ").as_deref(), Some("<u>One, two<e><a>One, two "));
        assert_eq!(cut(text, " One, two\n").as_deref(), Some("<u>One, two<e><a>One, two"));
        assert_eq!(cut(text, "three"), None);
    }
}
