//! Prompts become token ids.

use std::sync::Arc;

use reef_model::tokenizer::{Encode, Tokenizer};

use crate::error::ApiError;
use crate::types::completion::OnePrompt;

/// Bytes of text that are tokenized at once, in under a millisecond; more of it is done elsewhere, so that
/// others' answers go on.
const BYTES_AT_ONCE: usize = 16 << 10;

/// The token ids of `prompt`.
///
/// # Errors
/// A text that is too long for any tokenizer, or a token that the model does not have.
pub async fn token_ids(
    tokenizer: &Arc<Tokenizer>,
    prompt: OnePrompt,
    options: Encode,
) -> Result<Vec<u32>, ApiError> {
    match prompt {
        OnePrompt::Ids(ids) => known(tokenizer, "prompt", ids),
        OnePrompt::Text(text) => encode(tokenizer, text, options).await,
    }
}

/// `ids`, all of which the model has.
///
/// # Errors
/// One that it does not have, in `field`.
pub fn known(
    tokenizer: &Tokenizer,
    field: &'static str,
    ids: Vec<u32>,
) -> Result<Vec<u32>, ApiError> {
    let vocabulary = tokenizer.vocabulary().len();
    match ids.iter().find(|id| **id as usize >= vocabulary) {
        None => Ok(ids),
        Some(id) => {
            let text = format!("{field}: token id {id} is outside the vocabulary of {vocabulary}");
            Err(ApiError::invalid(field, text))
        }
    }
}

/// The token ids of `text`.
///
/// # Errors
/// A text that is too long for any tokenizer.
pub async fn encode(
    tokenizer: &Arc<Tokenizer>,
    text: String,
    options: Encode,
) -> Result<Vec<u32>, ApiError> {
    let encoded = if text.len() <= BYTES_AT_ONCE {
        tokenizer.encode(&text, options)
    } else {
        let tokenizer = tokenizer.clone();
        let elsewhere = tokio::task::spawn_blocking(move || tokenizer.encode(&text, options));
        elsewhere.await.map_err(|_| ApiError::internal("the tokenizer failed"))?
    };
    encoded.map_err(|error| ApiError::invalid("prompt", format!("prompt: {error}")))
}
