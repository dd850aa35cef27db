//! What is answered where a request cannot be served, in OpenAI's shape.

use std::borrow::Cow;

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use reef_engine::{EngineError, Refusal};
use serde_json::{Value, json};

use crate::types::sampling::field_of;

/// Seconds after which a client that was told to come back may.
const RETRY_AFTER_S: u32 = 1;

/// Bytes of a message and of a field's path at most.
const MESSAGE_BYTES: usize = 1024;
const PARAM_BYTES: usize = 128;

/// What a refusal's line in the log says of it: rides on the response.
#[derive(Clone, Copy, Debug)]
pub struct Refused {
    /// [`ApiError::kind`].
    pub kind: &'static str,
    /// [`ApiError::code`].
    pub code: Option<&'static str>,
}

/// A refusal or a failure: status, and OpenAI's error body.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// HTTP status.
    pub status: StatusCode,
    /// OpenAI's `type`.
    pub kind: &'static str,
    /// For people: names the field, the value and the mend.
    pub message: String,
    /// The field that it is about.
    pub param: Option<String>,
    /// For programs. A string or null: clients' parsers break on numbers.
    pub code: Option<&'static str>,
    /// Seconds after which to try again.
    pub retry_after_s: Option<u32>,
}

impl ApiError {
    /// An error of `status` about nothing in particular.
    pub fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> ApiError {
        let (message, param, code, retry_after_s) = (message.into(), None, None, None);
        ApiError { status, kind, message, param, code, retry_after_s }
    }

    /// 400: the request is wrong, in `param` where one field is to blame.
    pub fn invalid(param: impl Into<Option<&'static str>>, message: impl Into<String>) -> ApiError {
        let error = ApiError::new(StatusCode::BAD_REQUEST, "invalid_request_error", message);
        ApiError { param: param.into().map(str::to_string), ..error }
    }

    /// 404: no such thing.
    pub fn not_found(message: impl Into<String>, code: Option<&'static str>) -> ApiError {
        let error = ApiError::new(StatusCode::NOT_FOUND, "invalid_request_error", message);
        ApiError { code, ..error }
    }

    /// 503: not now.
    pub fn unavailable(message: impl Into<String>) -> ApiError {
        let error = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", message);
        ApiError { retry_after_s: Some(RETRY_AFTER_S), ..error }
    }

    /// 500: our own fault.
    pub fn internal(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message)
    }

    /// The body. What a client sent may be in it, but not all of a long text.
    pub fn body(&self) -> Value {
        json!({"error": {
            "message": clipped(&self.message, MESSAGE_BYTES),
            "type": self.kind,
            "param": self.param.as_deref().map(|param| clipped(param, PARAM_BYTES)),
            "code": self.code,
        }})
    }
}

/// The start of `text`, in `most` bytes.
fn clipped(text: &str, most: usize) -> Cow<'_, str> {
    match text.len() <= most {
        true => text.into(),
        false => format!("{}...", &text[..text.floor_char_boundary(most - 3)]).into(),
    }
}

impl From<&Refusal> for ApiError {
    fn from(refusal: &Refusal) -> ApiError {
        let message = refusal.to_string();
        match refusal {
            Refusal::QueueFull { .. } => ApiError {
                retry_after_s: Some(RETRY_AFTER_S),
                code: Some("queue_full"),
                ..ApiError::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message)
            },
            Refusal::Context { .. } | Refusal::TooLarge { .. } => ApiError {
                code: Some("context_length_exceeded"),
                ..ApiError::invalid("max_tokens", message)
            },
            Refusal::Branches { .. } => ApiError::invalid("n", message),
            Refusal::Kept { .. } => ApiError::invalid("kv.keep", message),
            Refusal::Quota { .. } => ApiError {
                code: Some("quota_exceeded"),
                ..ApiError::invalid("max_tokens", message)
            },
            Refusal::Field(_) => ApiError::invalid(field_of(&message), message),
            Refusal::EmptyPrompt | Refusal::Token { .. } => ApiError::invalid("prompt", message),
            _ => ApiError::invalid(None, message),
        }
    }
}

impl From<&EngineError> for ApiError {
    fn from(error: &EngineError) -> ApiError {
        match error {
            EngineError::Refused(refusal) => refusal.into(),
            EngineError::Failed(error) => (&**error).into(),
            EngineError::Batch(_) => ApiError::invalid("prompt", error.to_string()),
            EngineError::Constraint { .. } => ApiError::invalid(None, error.to_string()),
            EngineError::Executor(_) => ApiError::unavailable(error.to_string()),
            _ => ApiError::internal(error.to_string()),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, axum::Json(self.body())).into_response();
        let refused = Refused { kind: self.kind, code: self.code };
        response.extensions_mut().insert(refused);
        if self.status == StatusCode::UNAUTHORIZED {
            let challenge = HeaderValue::from_static("Bearer realm=\"reef\"");
            response.headers_mut().insert(header::WWW_AUTHENTICATE, challenge);
        }
        if let Some(seconds) = self.retry_after_s {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_does_not_repeat_a_long_request() {
        let long = "\u{e9}".repeat(5000);
        let error = ApiError { param: Some(long.clone()), ..ApiError::invalid(None, long) };
        let body = error.body();
        let length = |field: &str| body["error"][field].as_str().unwrap().len();
        // A character is not cut.
        assert_eq!((length("message"), length("param")), (1023, 127));
        assert_eq!(
            ApiError::invalid(None, "\u{e9}".repeat(512)).body()["error"]["message"],
            "\u{e9}".repeat(512)
        );
    }

    #[test]
    fn refusals_have_their_status_and_a_code_that_is_no_number() {
        let full = Refusal::QueueFull { waiting: 4, most: 4 };
        let response = ApiError::from(&full).into_response();
        assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(response.headers()[header::RETRY_AFTER], "1");
        let long = Refusal::Context { prompt: 9, max_tokens: 1, context: 8 };
        let error = ApiError::from(&long);
        assert_eq!(error.status, StatusCode::BAD_REQUEST);
        assert_eq!(error.body()["error"]["code"], "context_length_exceeded");
        assert_eq!(error.body()["error"]["param"], "max_tokens");
        assert!(ApiError::internal("x").body()["error"]["code"].is_null());
    }
}
