//! Errors as OpenAI's API reports them. This file knows status codes and the error object.

use crate::job::Rejected;
use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Serialize;

/// An error with its status. Serialised as `{"error": {..}}`.
#[derive(Clone, Debug, Serialize)]
pub struct ApiError {
    error: Body,
    #[serde(skip)]
    status: StatusCode,
}

#[derive(Clone, Debug, Serialize)]
struct Body {
    message: String,
    r#type: &'static str,
    /// The field that is wrong.
    param: Option<String>,
    code: Option<&'static str>,
}

impl ApiError {
    fn new(
        status: StatusCode,
        r#type: &'static str,
        code: Option<&'static str>,
        message: String,
    ) -> ApiError {
        ApiError { error: Body { message, r#type, param: None, code }, status }
    }

    /// 400: the body as a whole is wrong.
    pub fn bad_request(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::BAD_REQUEST, "invalid_request_error", None, message.into())
    }

    /// 400: one field is wrong. The message starts with its name.
    pub fn field(field: &str, message: impl std::fmt::Display) -> ApiError {
        ApiError::bad_request(format!("{field}: {message}")).with_param(field)
    }

    /// 404: no such path.
    pub fn not_found(message: String) -> ApiError {
        ApiError::new(StatusCode::NOT_FOUND, "invalid_request_error", None, message)
    }

    /// 404: another model than the one served.
    pub fn unknown_model(model: &str, served: &str) -> ApiError {
        let message = format!("the model `{model}` does not exist; `{served}` is served");
        let code = Some("model_not_found");
        ApiError::new(StatusCode::NOT_FOUND, "invalid_request_error", code, message).with_param("model")
    }

    /// 405: the path exists, the method does not.
    pub fn wrong_method(message: String) -> ApiError {
        ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "invalid_request_error", None, message)
    }

    /// The body could not be read: 413 if it is too large.
    pub fn body(status: StatusCode, message: String) -> ApiError {
        ApiError::new(status, "invalid_request_error", None, message)
    }

    /// 500: the engine could not finish what it accepted.
    pub fn failed(message: String) -> ApiError {
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", None, message)
    }

    fn with_param(mut self, param: &str) -> ApiError {
        self.error.param = Some(param.to_owned());
        self
    }
}

impl From<Rejected> for ApiError {
    fn from(rejected: Rejected) -> ApiError {
        let message = rejected.to_string();
        match rejected {
            Rejected::EmptyPrompt => ApiError::field("prompt", message),
            Rejected::TooLong { .. } => {
                let code = Some("context_length_exceeded");
                ApiError::new(StatusCode::BAD_REQUEST, "invalid_request_error", code, message)
                    .with_param("prompt")
            }
            Rejected::Full { .. } | Rejected::Draining => ApiError::new(
                StatusCode::SERVICE_UNAVAILABLE,
                "overloaded_error",
                Some("overloaded"),
                message,
            ),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        (self.status, Json(self)).into_response()
    }
}
