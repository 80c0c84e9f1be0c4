//! The answers that the router gives itself. It knows status codes and the shape of OpenAI's error object; it must never
//! know why an answer is given.

use crate::relay::Reply;
use bytes::Bytes;
use http::header::{CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderValue, Response, StatusCode};
use serde::Serialize;

/// A refusal: status, kind and message, and the field at fault.
#[derive(Debug, Clone)]
pub struct Refusal {
    /// HTTP status.
    pub status: StatusCode,
    /// The `type` of OpenAI's error object.
    pub kind: &'static str,
    /// What is wrong, for a person.
    pub message: String,
    /// The field at fault.
    pub field: Option<&'static str>,
    /// The `code` of OpenAI's error object, where it has a name for it; else it is the status.
    pub code: Option<&'static str>,
}

#[derive(Serialize)]
struct ErrorBody<'a> {
    error: ErrorObject<'a>,
}

#[derive(Serialize)]
struct ErrorObject<'a> {
    message: &'a str,
    r#type: &'a str,
    param: Option<&'a str>,
    code: Code,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Code {
    Name(&'static str),
    Status(u16),
}

impl Refusal {
    /// The client's request is wrong.
    pub fn of_client(status: StatusCode, message: String) -> Refusal {
        Refusal { status, kind: "invalid_request_error", message, field: None, code: None }
    }

    /// The request is right, but it cannot be served.
    pub fn of_service(status: StatusCode, message: String) -> Refusal {
        Refusal { status, kind: "service_unavailable_error", message, field: None, code: None }
    }

    /// No engine serves this model.
    pub fn of_model(model: &str) -> Refusal {
        Refusal {
            field: Some("model"),
            code: Some("model_not_found"),
            ..Refusal::of_client(StatusCode::NOT_FOUND, format!("The model `{model}` does not exist"))
        }
    }

    /// OpenAI's error object.
    pub fn json(&self) -> Vec<u8> {
        let error = ErrorObject {
            message: &self.message,
            r#type: self.kind,
            param: self.field,
            code: self.code.map_or(Code::Status(self.status.as_u16()), Code::Name),
        };
        // Strings and numbers: nothing in it can fail.
        serde_json::to_vec(&ErrorBody { error }).unwrap_or_default()
    }

    /// The answer. With 503 it asks to come again in a second.
    pub fn response(&self) -> Response<Reply> {
        let mut response = json(self.json());
        *response.status_mut() = self.status;
        if self.status == StatusCode::SERVICE_UNAVAILABLE {
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}

/// A JSON answer with status 200.
pub fn json(body: impl Into<Bytes>) -> Response<Reply> {
    with_type("application/json", body.into())
}

/// A text answer with status 200.
pub fn text(body: String) -> Response<Reply> {
    with_type("text/plain; version=0.0.4; charset=utf-8", body.into())
}

fn with_type(content_type: &'static str, body: Bytes) -> Response<Reply> {
    let mut response = Response::new(Reply::whole(body));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}
