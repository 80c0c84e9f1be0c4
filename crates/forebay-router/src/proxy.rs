//! The journey of one request: read it, choose a backend, send it, wait for the first byte, hand the answer on. It knows
//! the steps and what each failure means for the client; policies, bytes and sockets are others' business.
//!
//! Until the first byte of an answer's body has come, nothing has been sent to the client and another backend can be
//! tried; from then on the request belongs to its backend.

use crate::dispatcher::{Ask, BackendSet, End};
use crate::encoding::Coding;
use crate::health::Failure;
use crate::local::{self, no_backend};
use crate::models;
use crate::prefix::Chain;
use crate::relay::{Parts, Reader, Relay, Reply};
use crate::request::{self, Endpoint, PromptKind, RequestFacts};
use crate::request_log::Note;
use crate::respond::Refusal;
use crate::routes::{self, Group, Rule};
use crate::shared::{Flight, Permit, Shared};
use crate::sse::UsageTap;
use crate::upstream::{Answer, Pieces, Pool, Upstream};
use bytes::{Bytes, BytesMut};
use http::header::{self, HeaderName};
use http::request::Parts as Head;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Uri, Version};
use http_body::Body;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::time::{Sleep, sleep};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Names the backend that answered.
pub const BACKEND_HEADER: HeaderName = HeaderName::from_static("x-forebay-backend");

/// Headers that name a session, the first that is there counts. The second is sent by Claude Code.
const SESSION_HEADERS: [&str; 2] = ["x-session-id", "x-claude-code-session-id"];

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

/// What one thread works with.
#[derive(Debug)]
pub struct Worker {
    /// What all threads share.
    pub shared: Arc<Shared>,
    /// The thread's idle connections.
    pub pool: Arc<Pool>,
}

/// Answers one request, whatever it is. `reset` is there where the end of the connection is the end of an answer.
pub async fn answer(
    worker: Arc<Worker>,
    request: Request<Incoming>,
    reset: Option<Arc<AtomicBool>>,
) -> Response<Reply> {
    let shared = &worker.shared;
    let path = request.uri().path();
    let group = routes::find(path);
    if let Some(Rule::Own(own)) = group.map(|group| group.rule) {
        return local::answer(shared, own, group, &request)
            .await
            .unwrap_or_else(|refusal| refusal.response());
    }
    let mut journey =
        Journey { reset, note: shared.log.as_ref().map(|log| log.note(request.method(), path)) };
    let answer = match group {
        None => Err(unknown_path(path)),
        Some(group) => forward(&worker, group, request, &mut journey).await,
    };
    answer.unwrap_or_else(|refusal| {
        if refusal.status.is_client_error() {
            shared.bad_requests.fetch_add(1, Ordering::Relaxed);
        }
        shared.count_status(None, refusal.status);
        if let Some(note) = &mut journey.note {
            note.refused(refusal.status, &refusal.message);
        }
        refusal.response()
    })
}

/// What a request carries with it on its way.
struct Journey {
    reset: Option<Arc<AtomicBool>>,
    note: Option<Box<Note>>,
}

fn unknown_path(path: &str) -> Refusal {
    let message = format!(
        "{path} is not served; there are /v1/completions, /v1/chat/completions, /v1/models and others, which \
         docs/routing.md lists"
    );
    Refusal::of_client(StatusCode::NOT_FOUND, message)
}

/// Refuses a request by its path and method, or sends it to an engine.
async fn forward(
    worker: &Worker,
    group: &Group,
    request: Request<Incoming>,
    journey: &mut Journey,
) -> Result<Response<Reply>, Refusal> {
    let path = request.uri().path();
    let endpoint = match group.rule {
        // A browser asks what it may send: the engine knows, and it is no completion.
        Rule::Cache(_) if request.method() == Method::OPTIONS => None,
        Rule::Cache(endpoint) => Some(endpoint),
        Rule::Load | Rule::Own(_) => None,
        Rule::Refuse(status, reason) => {
            return Err(Refusal::of_client(status, format!("{path} is not routed: {reason}")));
        }
    };
    if !group.takes(request.method()) && request.method() != Method::OPTIONS {
        return Err(local::method_not_allowed(path, group));
    }
    complete(worker, endpoint, request, journey).await
}

/// A request that goes to a backend, in the form in which it can be sent more than once.
struct Outgoing {
    head: Head,
    body: Pieces,
    ask: Arc<Ask>,
    hide_usage: bool,
}

/// An answer whose first byte has come.
struct Started {
    head: Response<()>,
    first: Option<Bytes>,
    answer: Answer,
}

async fn complete(
    worker: &Worker,
    endpoint: Option<Endpoint>,
    request: Request<Incoming>,
    journey: &mut Journey,
) -> Result<Response<Reply>, Refusal> {
    let shared = &worker.shared;
    let overloaded = || {
        let message = format!("more than {} requests are under way", shared.limits.max_in_flight);
        Refusal::of_service(StatusCode::SERVICE_UNAVAILABLE, message)
    };
    let permit = shared.admit().ok_or_else(overloaded)?;
    let (head, body) = request.into_parts();
    let body = read_body(body, shared.limits.max_body_bytes, shared.limits.client_stall).await?;
    let facts = endpoint.map(|endpoint| read_facts(endpoint, &head, &body)).transpose()?;
    let model = match &facts {
        Some(facts) => facts.model(&body),
        None => request::model_of(&body),
    };
    let serving = match model.as_deref() {
        None => BackendSet::MAX,
        Some(model) => {
            if let Some(note) = &mut journey.note {
                note.model(model);
            }
            serving(shared, model, &head).await?
        }
    };
    let outgoing = match (endpoint, facts) {
        (Some(endpoint), Some(facts)) => prepare(shared, endpoint, head, body, &facts, serving),
        _ => prepare_by_load(head, body, serving),
    };
    send(worker, outgoing, permit, journey).await
}

fn read_facts(endpoint: Endpoint, head: &Head, body: &[u8]) -> Result<RequestFacts, Refusal> {
    let coding = head.headers.get(header::CONTENT_ENCODING).filter(|coding| *coding != "identity");
    if let Some(coding) = coding {
        let message = format!("content-encoding {coding:?}: the body must not be compressed");
        return Err(Refusal::of_client(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
    }
    request::read(endpoint, body).map_err(|bad| Refusal {
        field: bad.field(),
        ..Refusal::of_client(StatusCode::BAD_REQUEST, bad.to_string())
    })
}

/// The engines that may serve a model.
async fn serving(shared: &Arc<Shared>, model: &str, head: &Head) -> Result<BackendSet, Refusal> {
    match models::serving(shared, model, head.headers.get(header::AUTHORIZATION)).await {
        0 if shared.any_model => Ok(BackendSet::MAX),
        0 => Err(Refusal::of_model(model)),
        serving => Ok(serving),
    }
}

/// The whole body. A body that is too long is read on, up to as much again, so that the client gets to see the refusal.
async fn read_body(mut body: Incoming, max_bytes: usize, limit: Duration) -> Result<Bytes, Refusal> {
    let announced = body.size_hint().exact().map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX));
    let mut first = Bytes::new();
    let mut all = BytesMut::new();
    let mut length = 0_usize;
    let too_long = |length: usize| length > max_bytes || announced.is_some_and(|bytes| bytes > max_bytes);
    let reading = async {
        while let Some(frame) = body.frame().await {
            let Ok(bytes) = frame?.into_data() else { continue };
            length += bytes.len();
            if too_long(length) {
                first = Bytes::new();
                all = BytesMut::new();
                if length > max_bytes.saturating_mul(2) {
                    break;
                }
            } else if first.is_empty() && all.is_empty() {
                first = bytes;
            } else {
                if all.is_empty() {
                    all.reserve(announced.unwrap_or(2 * first.len()));
                    all.extend_from_slice(&first);
                }
                all.extend_from_slice(&bytes);
            }
        }
        Ok::<(), hyper::Error>(())
    };
    let read = tokio::time::timeout(limit, reading).await;
    match read {
        Err(_) => {
            let message = format!("the body did not come within {} s", limit.as_secs_f64());
            Err(Refusal::of_client(StatusCode::REQUEST_TIMEOUT, message))
        }
        Ok(Err(error)) => {
            Err(Refusal::of_client(StatusCode::BAD_REQUEST, format!("the body cannot be read: {error}")))
        }
        Ok(Ok(())) if too_long(length) => {
            let message = format!("the body is longer than the {max_bytes} bytes that are allowed");
            Err(Refusal::of_client(StatusCode::PAYLOAD_TOO_LARGE, message))
        }
        Ok(Ok(())) if all.is_empty() => Ok(first),
        Ok(Ok(())) => Ok(all.freeze()),
    }
}

fn prepare(
    shared: &Shared,
    endpoint: Endpoint,
    mut head: Head,
    body: Bytes,
    facts: &RequestFacts,
    serving: BackendSet,
) -> Outgoing {
    let [model, tools, instructions] = &facts.context;
    let root = [&body[model.clone()], &body[tools.clone()], &body[instructions.clone()], &[endpoint as u8]]
        .iter()
        .fold(shared.hash_seed, |root, part| xxh3_64_with_seed(part, root));
    let prompt = &body[facts.prompt.clone()];
    let chain = Chain::new(root, prompt);
    let named = SESSION_HEADERS.iter().find_map(|name| head.headers.get(*name)).map(HeaderValue::as_bytes);
    let named = named.or_else(|| facts.user.clone().map(|user| &body[user]));
    let session = match named {
        Some(name) => xxh3_64_with_seed(name, shared.hash_seed),
        None => chain.first().unwrap_or_else(|| xxh3_64_with_seed(prompt, root)),
    };
    let endpoint = (!prompt.is_empty()).then_some(endpoint);
    let ask = Ask { kind: facts.kind, prompt_bytes: prompt.len(), chain, session, endpoint, serving };
    address_to_engines(&mut head);
    let body = match &facts.ask_for_usage {
        None => Pieces::new([body, Bytes::new(), Bytes::new()]),
        Some(edit) => Pieces::new([
            body.slice(..edit.at.start),
            Bytes::from_static(edit.text.as_bytes()),
            body.slice(edit.at.end..),
        ]),
    };
    Outgoing { head, body, ask: Arc::new(ask), hide_usage: facts.ask_for_usage.is_some() }
}

/// A request that goes by load alone, as it came.
fn prepare_by_load(mut head: Head, body: Bytes, serving: BackendSet) -> Outgoing {
    let chain = Chain::new(0, &[]);
    let ask = Ask { kind: PromptKind::TokenIds, prompt_bytes: 0, chain, session: 0, endpoint: None, serving };
    address_to_engines(&mut head);
    let body = Pieces::new([body, Bytes::new(), Bytes::new()]);
    Outgoing { head, body, ask: Arc::new(ask), hide_usage: false }
}

/// Leaves of a request's head what is meant for engines. Usage is read in plain answers: these are asked for.
fn address_to_engines(head: &mut Head) {
    remove_connection_headers(&mut head.headers);
    head.headers.insert(header::ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    // A client that takes the router for a proxy sends a whole URL.
    if head.uri.authority().is_some()
        && let Some(path) = head.uri.path_and_query()
    {
        head.uri = Uri::from(path.clone());
    }
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

/// Tries backends until one begins to answer.
async fn send(
    worker: &Worker,
    outgoing: Outgoing,
    permit: Permit,
    journey: &mut Journey,
) -> Result<Response<Reply>, Refusal> {
    let shared = &worker.shared;
    let mut tried = 0;
    let mut last_failure = None;
    let mut deadline = Box::pin(sleep(shared.limits.first_byte));
    for attempt in 1..=shared.limits.attempts {
        let Some(mut flight) = shared.assign(&outgoing.ask, tried) else { break };
        tried |= 1 << flight.backend;
        if let Some(note) = &mut journey.note {
            note.attempt(&shared.targets[flight.backend].name);
        }
        if attempt > 1 {
            deadline.as_mut().reset(tokio::time::Instant::now() + shared.limits.first_byte);
        }
        let may_try_another =
            attempt < shared.limits.attempts && shared.has_other(tried | !outgoing.ask.serving);
        let failure = match begin(worker, &outgoing, flight.backend, &mut deadline).await {
            Ok(started) if !(may_try_another && is_busy(started.head.status())) => {
                return Ok(relay(worker, outgoing, started, flight, deadline, permit, journey));
            }
            Ok(_) => Failure::Unavailable,
            Err(failure) => failure,
        };
        flight.end(End::Failed(failure));
        last_failure = Some(failure);
    }
    shared.unanswered.fetch_add(1, Ordering::Relaxed);
    Err(last_failure.map_or_else(no_backend, |failure| no_answer(failure, tried.count_ones())))
}

/// Statuses that say that another backend may do better.
fn is_busy(status: StatusCode) -> bool {
    matches!(status, StatusCode::BAD_GATEWAY | StatusCode::SERVICE_UNAVAILABLE | StatusCode::GATEWAY_TIMEOUT)
}

fn no_answer(failure: Failure, tried: u32) -> Refusal {
    let (status, what) = match failure {
        Failure::Refused | Failure::Unreachable => (StatusCode::SERVICE_UNAVAILABLE, "cannot be reached"),
        Failure::Ejected | Failure::Unavailable => (StatusCode::SERVICE_UNAVAILABLE, "is not available"),
        Failure::FirstByteTimeout => (StatusCode::GATEWAY_TIMEOUT, "did not begin to answer in time"),
        Failure::Garbage => (StatusCode::BAD_GATEWAY, "answered something that is not HTTP"),
        Failure::Closed | Failure::ProgressTimeout | Failure::BrokenOff | Failure::ErrorEvent => {
            (StatusCode::BAD_GATEWAY, "closed the connection without an answer")
        }
    };
    Refusal::of_service(status, format!("no answer after {tried} attempt(s); the last engine {what}"))
}

/// Sends the request to one backend and waits for the first byte of the answer's body, until the deadline or until the
/// backend is ejected.
async fn begin(
    worker: &Worker,
    outgoing: &Outgoing,
    backend: usize,
    deadline: &mut Pin<Box<Sleep>>,
) -> Result<Started, Failure> {
    tokio::select! {
        biased;
        started = exchange(worker, outgoing, backend) => started,
        () = deadline => Err(Failure::FirstByteTimeout),
        () = worker.shared.ejection(backend) => Err(Failure::Ejected),
    }
}

async fn exchange(worker: &Worker, outgoing: &Outgoing, backend: usize) -> Result<Started, Failure> {
    if let Some(upstream) = worker.pool.take(backend) {
        match first_byte(upstream, worker, outgoing, backend).await {
            // The backend may have closed the idle connection at this moment: that says nothing about the backend.
            Err(Failure::Closed) => {}
            other => return other,
        }
    }
    let upstream = Upstream::connect(&worker.shared.targets[backend], &worker.shared.limits).await?;
    first_byte(upstream, worker, outgoing, backend).await
}

async fn first_byte(
    upstream: Upstream,
    worker: &Worker,
    outgoing: &Outgoing,
    backend: usize,
) -> Result<Started, Failure> {
    let mut request = Request::new(outgoing.body.clone());
    *request.method_mut() = outgoing.head.method.clone();
    *request.uri_mut() = outgoing.head.uri.clone();
    *request.headers_mut() = outgoing.head.headers.clone();
    request.headers_mut().insert(header::HOST, worker.shared.targets[backend].host.clone());
    let (head, mut answer) = upstream.exchange(request).await?.into_parts();
    let first = poll_fn(|context| answer.poll_bytes(context)).await.transpose();
    let first = first.map_err(|_| Failure::Closed)?;
    Ok(Started { head: Response::from_parts(head, ()), first, answer })
}

/// Begins to hand the answer on.
fn relay(
    worker: &Worker,
    outgoing: Outgoing,
    started: Started,
    mut flight: Flight,
    deadline: Pin<Box<Sleep>>,
    permit: Permit,
    journey: &mut Journey,
) -> Response<Reply> {
    flight.first_byte();
    let shared = &worker.shared;
    let status = started.head.status();
    shared.count_status(Some(flight.backend), status);
    let mut note = journey.note.take();
    if let Some(note) = &mut note {
        note.first_byte(status);
    }
    let backend = shared.targets[flight.backend].header.clone();
    let content_type = started.head.headers().get(header::CONTENT_TYPE);
    let is_stream = content_type.is_some_and(|value| value.as_bytes().starts_with(b"text/event-stream"));
    let (decoder, readable) = match Coding::of(started.head.headers()) {
        Coding::Plain => (None, true),
        Coding::Known(decoder) => (Some(decoder), true),
        Coding::Unknown => (None, false),
    };
    let reader = match (readable, is_stream) {
        (true, true) => Reader::Events(UsageTap::new(outgoing.hide_usage)),
        (true, false) => Reader::Document(BytesMut::new()),
        (false, _) => Reader::Unread,
    };
    let changes_length = decoder.is_some() || (readable && is_stream);
    let is_decoded = decoder.is_some();
    let mut response = started.head.map(|()| {
        Relay::start(Parts {
            first: started.first,
            answer: Some(started.answer),
            decoder,
            reader,
            status,
            flight,
            pool: worker.pool.clone(),
            deadline,
            progress: shared.limits.progress,
            reset: journey.reset.take(),
            note,
            _permit: permit,
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
    response
}
