//! The journey of one request: read it, have it answered, hand the answer on. It knows the steps;
//! choosing an engine, trying another, bytes and sockets are others' business.

use crate::asking::{Outgoing, Worker};
use crate::attempts::{self, Begun};
use crate::body;
use crate::clients::Reset;
use crate::kv_hints;
use crate::pages;
use crate::prepare::{self, Prepared};
use crate::reader::Reader;
use crate::refusal::Refusal;
use crate::relay::{Parts, Relay, Reply};
use crate::request::Endpoint;
use crate::request_log::LogEntry;
use crate::respond::{self, BACKEND_HEADER, PREFILL_HEADER};
use crate::routes;
use crate::state::{Permit, RouterState};
use crate::upstream::Pieces;
use bytes::Bytes;
use forebay_otlp::ActiveSpan;
use http::header::{self, HeaderName};
use http::request::Parts as Head;
use http::{HeaderMap, HeaderValue, Request, Response, Uri, Version};
use hyper::body::Incoming;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Headers that are about one connection (RFC 9110, section 7.6.1) or that the router sets anew.
const NOT_FORWARDED: [HeaderName; 12] = [
    header::CONNECTION,
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
    HeaderName::from_static("keep-alive"),
    header::HOST,
    header::CONTENT_LENGTH,
    header::EXPECT,
    header::ACCEPT_ENCODING,
];

/// Answers one request, whatever it is. `reset` is there where the end of the connection is the end
/// of an answer.
pub async fn answer(worker: Arc<Worker>, request: Request<Incoming>, reset: Reset) -> Response<Reply> {
    let router = &worker.router;
    let group = routes::find(request.uri().path());
    let request = match pages::answer(router, group, request).await {
        Ok(answer) => return answer,
        Err(request) => request,
    };
    let path = request.uri().path();
    let entry = router.log.as_ref().map(|log| log.begin(request.method(), path));
    let mut journey = Journey { reset, entry, span: None };
    let answer = match prepare::endpoint(group, request.method(), path) {
        Ok(endpoint) => complete(&worker, endpoint, request, &mut journey).await,
        Err(refusal) => Err(refusal),
    };
    answer.unwrap_or_else(|refusal| {
        router.counters.refused(&refusal);
        if let Some(entry) = &mut journey.entry {
            entry.refused(refusal.status, &refusal.message);
        }
        if let Some(span) = &mut journey.span {
            span.note("http.response.status_code", refusal.status.as_u16());
            span.fail(&refusal.message);
        }
        respond::refuse(&refusal)
    })
}

/// What a request carries with it on its way.
struct Journey {
    reset: Reset,
    entry: Option<Box<LogEntry>>,
    /// Its span, if it is traced.
    span: Option<Box<ActiveSpan>>,
}

/// Has an engine answer a request.
async fn complete(
    worker: &Worker,
    endpoint: Option<Endpoint>,
    request: Request<Incoming>,
    journey: &mut Journey,
) -> Result<Response<Reply>, Refusal> {
    let router = &worker.router;
    let permit = router.admit().ok_or_else(|| Refusal::overloaded(&router.limits))?;
    let (mut head, body) = request.into_parts();
    journey.span = router.tracing.begin(&mut head.headers);
    let body = body::read(body, router.limits.max_body_bytes, router.limits.client_stall).await?;
    let body = match router.hints_from_headers {
        true => with_hints(router, endpoint, &head, body)?,
        false => body,
    };
    let read = prepare::read(endpoint, &head.headers, &body)?;
    let serving = match read.model(&body) {
        None => None,
        Some(model) => {
            if let Some(entry) = &mut journey.entry {
                entry.model(&model);
            }
            prepare::serving(router, &model, &head.headers).await?
        }
    };
    let prepared = read.prepare(router, &head.headers, &body, serving);
    let outgoing = outgoing(head, body, prepared);
    let answer = attempts::send(worker, &outgoing, &mut journey.entry, journey.span.as_deref()).await?;
    Ok(relay(worker, &outgoing, answer, permit, journey))
}

/// A body with the hints of its headers, and none of its client's.
fn with_hints(
    router: &RouterState,
    endpoint: Option<Endpoint>,
    head: &Head,
    body: Bytes,
) -> Result<Bytes, Refusal> {
    let replaced = kv_hints::replaced(endpoint, &head.headers, &body);
    let Some(replaced) = replaced.map_err(|bad| Refusal::of_bad_hint(&bad))? else { return Ok(body) };
    router.counters.hints_removed.fetch_add(replaced.had_hints.into(), Ordering::Relaxed);
    Ok(replaced.body)
}

/// Leaves of a request's head what is meant for engines. Usage is read in plain answers: these are
/// asked for.
fn outgoing(mut head: Head, body: Bytes, prepared: Prepared) -> Outgoing {
    remove_connection_headers(&mut head.headers);
    head.headers.insert(header::ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    // A client that takes the router for a proxy sends a whole URL.
    if head.uri.authority().is_some()
        && let Some(path) = head.uri.path_and_query()
    {
        head.uri = Uri::from(path.clone());
    }
    let body = match &prepared.ask_for_usage {
        None => Pieces::from(body),
        Some(edit) => Pieces::new(edit.apply(&body)),
    };
    Outgoing { head, body, prepared }
}

fn remove_connection_headers(headers: &mut HeaderMap) {
    let named: Vec<HeaderValue> = headers.get_all(header::CONNECTION).iter().cloned().collect();
    for name in named.iter().flat_map(|named| named.to_str().unwrap_or_default().split(',')) {
        headers.remove(name.trim());
    }
    for name in NOT_FORWARDED {
        headers.remove(name);
    }
}

/// Begins to hand the answer on.
fn relay(
    worker: &Worker,
    outgoing: &Outgoing,
    answer: Begun,
    permit: Permit,
    journey: &mut Journey,
) -> Response<Reply> {
    let Begun { started, mut attempt, deadline, prefiller } = answer;
    let router = &worker.router;
    let status = started.head.status();
    attempt.engine.statuses.count(status);
    let mut entry = journey.entry.take();
    if let Some(entry) = &mut entry {
        entry.first_byte(status);
    }
    let mut span = journey.span.take();
    if let Some(span) = &mut span {
        span.note("http.response.status_code", status.as_u16());
        span.event(if outgoing.prepared.stream { "first-token" } else { "first-byte" });
    }
    let backend = attempt.engine.target.header.clone();
    let hide_usage = outgoing.prepared.ask_for_usage.is_some();
    let (reader, decoder) = Reader::of(started.head.headers(), hide_usage);
    let changes_length = decoder.is_some() || reader.is_of_events();
    if reader.is_of_events() {
        attempt.is_streamed();
    }
    let is_decoded = decoder.is_some();
    let mut response = started.head.map(|()| {
        Relay::start(Parts {
            first: started.first,
            answer: Some(started.answer),
            decoder,
            reader,
            status,
            attempt,
            pool: worker.pool.clone(),
            deadline,
            progress: router.limits.progress,
            reset: journey.reset.take(),
            entry,
            span,
            permit,
        })
    });
    // The length of a document does not change on its way, that of a stream may.
    let length = response.headers().get(header::CONTENT_LENGTH).filter(|_| !changes_length).cloned();
    if is_decoded {
        response.headers_mut().remove(header::CONTENT_ENCODING);
    }
    *response.version_mut() = Version::HTTP_11;
    remove_connection_headers(response.headers_mut());
    if let Some(length) = length {
        response.headers_mut().insert(header::CONTENT_LENGTH, length);
    }
    response.headers_mut().insert(BACKEND_HEADER, backend);
    if let Some(prefiller) = prefiller {
        response.headers_mut().insert(PREFILL_HEADER, prefiller.target.header.clone());
    }
    response
}
