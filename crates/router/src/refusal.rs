//! Why a request is refused, and how a client is told: an HTTP status and OpenAI's error object.

use crate::routes::Group;
use http::StatusCode;
use serde::Serialize;

/// A refusal: status, kind and message, and the field at fault.
#[derive(Debug, Clone)]
pub struct Refusal {
    pub status: StatusCode,
    /// The `type` of OpenAI's error object.
    pub kind: &'static str,
    pub message: String,
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

    /// The method is none of those that the path takes.
    pub fn of_method(path: &str, group: &Group) -> Refusal {
        let message = format!("{path} takes {}", group.allowed());
        Refusal::of_client(StatusCode::METHOD_NOT_ALLOWED, message)
    }

    /// The router ends. Load balancers read it from `/health`, clients as an answer or as a
    /// stream's last event.
    pub fn shutting_down() -> Refusal {
        Refusal::of_service(StatusCode::SERVICE_UNAVAILABLE, "the router is shutting down".into())
    }

    /// No engine can be asked.
    pub fn no_backend() -> Refusal {
        Refusal::of_service(StatusCode::SERVICE_UNAVAILABLE, "no engine is up".into())
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
}
