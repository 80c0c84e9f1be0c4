//! The answers that the router gives itself.

use crate::refusal::Refusal;
use crate::relay::Reply;
use crate::routes::Group;
use bytes::Bytes;
use http::header::{ALLOW, CONTENT_TYPE, HeaderName, RETRY_AFTER};
use http::{HeaderValue, Response, StatusCode};

/// Names the backend that answered.
pub const BACKEND_HEADER: HeaderName = HeaderName::from_static("x-forebay-backend");

/// Names the backend that computed the prompt, where that is another one.
pub const PREFILL_HEADER: HeaderName = HeaderName::from_static("x-forebay-prefill");

/// Why a request was dropped, in the words of llm-d's router.
pub const DROPPED_HEADER: HeaderName = HeaderName::from_static("x-llm-d-request-dropped-reason");

/// A refusal's answer.
pub fn refuse(refusal: &Refusal) -> Response<Reply> {
    let mut response = json(refusal.json());
    *response.status_mut() = refusal.status;
    if let Some(seconds) = refusal.retry_after_s {
        response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(seconds));
    }
    if let Some(reason) = refusal.dropped {
        response.headers_mut().insert(DROPPED_HEADER, HeaderValue::from_static(reason));
    }
    response
}

/// The answer to who asks for the methods of a path.
pub fn options(group: &Group) -> Response<Reply> {
    let mut response = Response::new(Reply::whole(Bytes::new()));
    *response.status_mut() = StatusCode::NO_CONTENT;
    if let Ok(allowed) = HeaderValue::from_str(&group.allowed()) {
        response.headers_mut().insert(ALLOW, allowed);
    }
    response
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
