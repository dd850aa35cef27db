//! Text to tokens and back, as vLLM's clients ask for it.

use std::sync::Arc;

use axum::extract::State;
use reef_model::tokenizer::{Decode, Encode};
use serde::Deserialize;
use serde_json::{Value, json};

use super::chat::prompt;
use super::json::{Either, Json};
use super::prompt::{encode, known};
use crate::app::App;
use crate::error::ApiError;
use crate::types::chat::ChatRequest;
use crate::types::logprobs::TokenTexts;

/// The request of `/tokenize` for a text; one for `messages` has the fields of a chat.
#[derive(Deserialize)]
pub struct TokenizeRequest {
    model: Option<String>,
    prompt: Option<String>,
    add_special_tokens: Option<bool>,
    return_token_strs: Option<bool>,
}

/// `POST /tokenize`.
///
/// # Errors
/// Another model, neither text nor messages, or a text that is too long.
pub async fn tokenize(
    State(app): State<Arc<App>>,
    Either(body, mut chat): Either<TokenizeRequest, ChatRequest>,
) -> Result<axum::Json<Value>, ApiError> {
    let model = app.model_named(body.model.as_deref())?;
    let tokens = match body.prompt {
        Some(text) => {
            let add_special = body.add_special_tokens.unwrap_or(true);
            encode(&model.tokenizer, text, Encode { add_special, parse_special: true }).await?
        }
        None if chat.messages.is_empty() => {
            return Err(ApiError::invalid("prompt", "give a prompt, or messages to render"));
        }
        None => prompt(model, &mut chat).await?.ids,
    };
    let texts = TokenTexts { tokenizer: &model.tokenizer, as_ids: false };
    let strings = || tokens.iter().map(|id| texts.text(*id)).collect::<Vec<String>>();
    Ok(axum::Json(json!({
        "count": tokens.len(),
        "max_model_len": model.context,
        "tokens": tokens,
        "token_strs": body.return_token_strs.unwrap_or(false).then(strings),
    })))
}

/// The request of `/detokenize`.
#[derive(Deserialize)]
pub struct DetokenizeRequest {
    model: Option<String>,
    tokens: Vec<u32>,
}

/// `POST /detokenize`.
///
/// # Errors
/// Another model, or a token that it does not have.
pub async fn detokenize(
    State(app): State<Arc<App>>,
    Json(body): Json<DetokenizeRequest>,
) -> Result<axum::Json<Value>, ApiError> {
    let model = app.model_named(body.model.as_deref())?;
    let tokens = known(&model.tokenizer, "tokens", body.tokens)?;
    let show = Decode { show_special: true, continues: false };
    Ok(axum::Json(json!({"prompt": model.tokenizer.decode(&tokens, show)})))
}

/// `GET /tokenizer_info`: what a `tokenizer_config.json` would say.
///
/// # Errors
/// 503 while loading.
pub async fn info(State(app): State<Arc<App>>) -> Result<axum::Json<Value>, ApiError> {
    let model = app.model()?;
    let vocabulary = model.tokenizer.vocabulary();
    let special = vocabulary.special();
    let text = |id: Option<u32>| id.and_then(|id| vocabulary.text(id));
    Ok(axum::Json(json!({
        "tokenizer_class": "ReefTokenizer",
        "vocab_size": vocabulary.len(),
        "model_max_length": model.context,
        "add_bos_token": model.tokenizer.adds_bos(),
        "add_eos_token": model.tokenizer.adds_eos(),
        "bos_token": text(special.bos),
        "eos_token": text(special.eos),
        "unk_token": text(special.unknown),
        "pad_token": text(special.padding),
    })))
}
