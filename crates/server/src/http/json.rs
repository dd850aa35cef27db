//! Bodies of requests: JSON, whatever the content type says; errors name the field.

use axum::extract::rejection::BytesRejection;
use axum::extract::{FromRequest, Request};
use axum::http::StatusCode;
use bytes::Bytes;
use serde::de::DeserializeOwned;

use crate::error::ApiError;
use crate::grammar::StructureFields;
use crate::types::sampling::SamplingFields;

/// A request's body.
pub struct Json<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned + Send + 'static> FromRequest<S> for Json<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Json<T>, ApiError> {
        let bytes = Bytes::from_request(request, state).await.map_err(of_body)?;
        parsed(bytes, |bytes| parse(bytes).map(Json)).await
    }
}

/// A request's body whose fields are those of `T` and those that all ways to ask for text share. (Serde's
/// `flatten` would lose the names of wrong fields.)
pub struct Sampled<T>(pub T, pub SharedFields);

/// Fields that all ways to ask for text share.
#[derive(Clone, Debug, Default)]
pub struct SharedFields {
    /// How tokens are chosen and when text ends.
    pub sampling: SamplingFields,
    /// What the text must be.
    pub structure: StructureFields,
}

impl<S: Send + Sync, T: DeserializeOwned + Send + 'static> FromRequest<S> for Sampled<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Sampled<T>, ApiError> {
        let bytes = Bytes::from_request(request, state).await.map_err(of_body)?;
        let parse = |bytes: &[u8]| {
            let shared = SharedFields { sampling: parse(bytes)?, structure: parse(bytes)? };
            Ok(Sampled(parse(bytes)?, shared))
        };
        parsed(bytes, parse).await
    }
}

/// A request's body that may be read as `A` or as `B`, whichever its fields tell.
pub struct Either<A, B>(pub A, pub B);

impl<S, A, B> FromRequest<S> for Either<A, B>
where
    S: Send + Sync,
    A: DeserializeOwned + Send + 'static,
    B: DeserializeOwned + Send + 'static,
{
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Either<A, B>, ApiError> {
        let bytes = Bytes::from_request(request, state).await.map_err(of_body)?;
        parsed(bytes, |bytes| Ok(Either(parse(bytes)?, parse(bytes)?))).await
    }
}

/// Bytes that are parsed at once, in under a millisecond; more of them are parsed elsewhere, so that others'
/// answers go on.
const BYTES_AT_ONCE: usize = 64 << 10;

async fn parsed<T: Send + 'static>(
    bytes: Bytes,
    parse: impl FnOnce(&[u8]) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    if bytes.len() <= BYTES_AT_ONCE {
        return parse(&bytes);
    }
    let elsewhere = tokio::task::spawn_blocking(move || parse(&bytes)).await;
    elsewhere.map_err(|_| ApiError::internal("the body's parser failed"))?
}

fn of_body(rejection: BytesRejection) -> ApiError {
    match rejection.status() {
        StatusCode::PAYLOAD_TOO_LARGE => ApiError::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            "invalid_request_error",
            "the body is larger than this server takes (--max-body-size)",
        ),
        _ => ApiError::invalid(None, format!("the body cannot be read: {}", rejection.body_text())),
    }
}

/// Reads `bytes` as a `T`.
///
/// # Errors
/// 400 with the field's path and what is wrong with it.
pub fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    let mut deserializer = serde_json::Deserializer::from_slice(bytes);
    let value = serde_path_to_error::deserialize(&mut deserializer).map_err(|error| {
        let path = error.path().to_string();
        let reason = error.inner();
        match path.as_str() {
            "." => ApiError::invalid(None, format!("the body is not as it should be: {reason}")),
            _ => ApiError {
                param: Some(path.clone()),
                ..ApiError::invalid(None, format!("{path}: {reason}"))
            },
        }
    })?;
    let after = |error| ApiError::invalid(None, format!("after the JSON of the body: {error}"));
    deserializer.end().map_err(after)?;
    Ok(value)
}
