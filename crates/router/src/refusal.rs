//! Why a request is refused, and how a client is told: an HTTP status and OpenAI's error object.

use crate::config::Limits;
use crate::kv_hints::BadHint;
use crate::routes::Group;
use crate::slo::{BadSlo, Slo, TTFT_HEADER};
use http::StatusCode;
use serde::Serialize;
use std::time::Duration;

/// llm-d's word for requests that come in too great a number.
const SATURATED: &str = "rejected-saturated";

/// Nobody knows what will be after that.
const RETRY_AFTER_MAX_S: u64 = 60;

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
    /// After so many seconds it may be worth another try.
    pub retry_after_s: Option<u64>,
    /// Why a request is not served although it is right, as llm-d's router names it.
    pub dropped: Option<&'static str>,
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
        let kind = "invalid_request_error";
        Refusal { status, kind, message, field: None, code: None, retry_after_s: None, dropped: None }
    }

    /// The request is right, but it cannot be served.
    pub fn of_service(status: StatusCode, message: String) -> Refusal {
        let kind = "service_unavailable_error";
        let retry_after_s = (status == StatusCode::SERVICE_UNAVAILABLE).then_some(1);
        Refusal { status, kind, message, field: None, code: None, retry_after_s, dropped: None }
    }

    /// All engines are full, and none would begin the answer in time.
    pub fn of_slo(slo: Slo, earliest_us: u64) -> Refusal {
        let ttft_us = slo.ttft_us.unwrap_or_default();
        let [asked_ms, earliest_ms] = [ttft_us, earliest_us].map(|us| us as f64 / 1e3);
        let message = format!(
            "{TTFT_HEADER} is {asked_ms}: all engines are full, and the first token is expected after \
             {earliest_ms:.0} ms at the earliest"
        );
        let late_s = earliest_us.saturating_sub(ttft_us).div_ceil(1_000_000);
        Refusal {
            kind: "rate_limit_error",
            field: Some(TTFT_HEADER),
            code: Some("ttft_slo"),
            retry_after_s: Some(late_s.clamp(1, RETRY_AFTER_MAX_S)),
            dropped: Some(SATURATED),
            ..Refusal::of_client(StatusCode::TOO_MANY_REQUESTS, message)
        }
    }

    /// A header says no time that is allowed.
    pub fn of_bad_slo(bad: &BadSlo) -> Refusal {
        Refusal { field: Some(bad.header), ..Refusal::of_client(StatusCode::BAD_REQUEST, bad.to_string()) }
    }

    /// Hints of a request cannot be made, or not be put into its body.
    pub fn of_bad_hint(bad: &BadHint) -> Refusal {
        Refusal { field: bad.field(), ..Refusal::of_client(StatusCode::BAD_REQUEST, bad.to_string()) }
    }

    /// A request's body is longer than it may be.
    pub fn too_long(max_bytes: usize) -> Refusal {
        let message = format!("the body is longer than the {max_bytes} bytes that are allowed");
        Refusal::of_client(StatusCode::PAYLOAD_TOO_LARGE, message)
    }

    /// A request's body does not come.
    pub fn too_slow(limit: Duration) -> Refusal {
        let message = format!("the body did not come within {} s", limit.as_secs_f64());
        Refusal::of_client(StatusCode::REQUEST_TIMEOUT, message)
    }

    /// No engine serves this model.
    pub fn of_model(model: &str) -> Refusal {
        Refusal {
            field: Some("model"),
            code: Some("model_not_found"),
            ..Refusal::of_client(StatusCode::NOT_FOUND, format!("The model `{model}` does not exist"))
        }
    }

    /// Nothing is known of the path.
    pub fn of_path(path: &str) -> Refusal {
        let message = format!(
            "{path} is not served; there are /v1/completions, /v1/chat/completions, /v1/models and others, which \
             docs/routing.md lists"
        );
        Refusal::of_client(StatusCode::NOT_FOUND, message)
    }

    /// The method is none of those that the path takes.
    pub fn of_method(path: &str, group: &Group) -> Refusal {
        let message = format!("{path} takes {}", group.allowed());
        Refusal::of_client(StatusCode::METHOD_NOT_ALLOWED, message)
    }

    /// The router ends. Load balancers read it from `/health`, clients as an answer or as a
    /// stream's last event.
    pub fn shutting_down() -> Refusal {
        Refusal::dropped("rejected-shutting-down", "the router is shutting down".into())
    }

    /// No engine can be asked.
    pub fn no_backend() -> Refusal {
        Refusal::dropped("rejected-no-engine", "no engine is up".into())
    }

    /// Too many requests are under way.
    pub fn overloaded(limits: &Limits) -> Refusal {
        Refusal::dropped(SATURATED, format!("more than {} requests are under way", limits.max_in_flight))
    }

    fn dropped(reason: &'static str, message: String) -> Refusal {
        let refusal = Refusal::of_service(StatusCode::SERVICE_UNAVAILABLE, message);
        Refusal { dropped: Some(reason), ..refusal }
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
