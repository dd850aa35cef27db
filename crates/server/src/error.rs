//! What is answered where a request cannot be served, in OpenAI's shape.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use reef_engine::{EngineError, Refusal};
use serde_json::{Value, json};

/// Seconds after which a client that was told to come back may.
const RETRY_AFTER_S: u32 = 1;

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

    /// The body.
    pub fn body(&self) -> Value {
        json!({"error": {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }})
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
            Refusal::Quota { .. } => ApiError {
                code: Some("quota_exceeded"),
                ..ApiError::invalid("max_tokens", message)
            },
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
            EngineError::Executor(_) => ApiError::unavailable(error.to_string()),
            _ => ApiError::internal(error.to_string()),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, axum::Json(self.body())).into_response();
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
