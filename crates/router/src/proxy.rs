//! The journey of one request: read it, have it answered, hand the answer on. It knows the steps;
//! choosing an engine, trying another, bytes and sockets are others' business.

use crate::admin;
use crate::asking::{Outgoing, Worker};
use crate::attempts::{self, Begun};
use crate::body;
use crate::chain::Chain;
use crate::dispatcher::RoutingFacts;
use crate::encoding::Coding;
use crate::listing;
use crate::local;
use crate::media;
use crate::refusal::Refusal;
use crate::relay::{Parts, Reader, Relay, Reply};
use crate::request::{self, Endpoint, PromptKind, RequestFacts};
use crate::request_log::LogEntry;
use crate::respond::{self, BACKEND_HEADER, PREFILL_HEADER};
use crate::routes::{self, Group, Rule};
use crate::slo::Slo;
use crate::slots::Serving;
use crate::sse::UsageTap;
use crate::state::{Permit, RouterState};
use crate::tokens::Length;
use crate::upstream::Pieces;
use bytes::{Bytes, BytesMut};
use http::header::{self, HeaderName};
use http::request::Parts as Head;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Uri, Version};
use hyper::body::Incoming;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use xxhash_rust::xxh3::xxh3_64_with_seed;

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

/// Answers one request, whatever it is. `reset` is there where the end of the connection is the end
/// of an answer.
pub async fn answer(
    worker: Arc<Worker>,
    request: Request<Incoming>,
    reset: Option<Arc<AtomicBool>>,
) -> Response<Reply> {
    let router = &worker.router;
    let path = request.uri().path();
    let group = routes::find(path);
    if let Some(Rule::Own(own)) = group.map(|group| group.rule) {
        return local::answer(router, own, group, &request)
            .await
            .unwrap_or_else(|refusal| respond::refuse(&refusal));
    }
    if let Some(Rule::Admin(page)) = group.map(|group| group.rule) {
        return admin::answer(router, page, group, request)
            .await
            .unwrap_or_else(|refusal| respond::refuse(&refusal));
    }
    let mut journey =
        Journey { reset, entry: router.log.as_ref().map(|log| log.begin(request.method(), path)) };
    let answer = match group {
        None => Err(unknown_path(path)),
        Some(group) => forward(&worker, group, request, &mut journey).await,
    };
    answer.unwrap_or_else(|refusal| {
        if refusal.status == StatusCode::TOO_MANY_REQUESTS {
            router.counters.too_late.fetch_add(1, Ordering::Relaxed);
        } else if refusal.status.is_client_error() {
            router.counters.bad_requests.fetch_add(1, Ordering::Relaxed);
        }
        router.counters.own_statuses.count(refusal.status);
        if let Some(entry) = &mut journey.entry {
            entry.refused(refusal.status, &refusal.message);
        }
        respond::refuse(&refusal)
    })
}

/// What a request carries with it on its way.
struct Journey {
    reset: Option<Arc<AtomicBool>>,
    entry: Option<Box<LogEntry>>,
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
        Rule::Load | Rule::Own(_) | Rule::Admin(_) => None,
        Rule::Refuse(status, reason) => {
            return Err(Refusal::of_client(status, format!("{path} is not routed: {reason}")));
        }
    };
    if !group.takes(request.method()) && request.method() != Method::OPTIONS {
        return Err(Refusal::of_method(path, group));
    }
    complete(worker, endpoint, request, journey).await
}

async fn complete(
    worker: &Worker,
    endpoint: Option<Endpoint>,
    request: Request<Incoming>,
    journey: &mut Journey,
) -> Result<Response<Reply>, Refusal> {
    let router = &worker.router;
    let overloaded = || {
        let message = format!("more than {} requests are under way", router.limits.max_in_flight);
        Refusal::of_service(StatusCode::SERVICE_UNAVAILABLE, message)
    };
    let permit = router.admit().ok_or_else(overloaded)?;
    let (head, body) = request.into_parts();
    let slo = Slo::read(&head.headers).map_err(|bad| Refusal::of_bad_slo(&bad))?;
    let body = body::read(body, router.limits.max_body_bytes, router.limits.client_stall).await?;
    let facts = endpoint.map(|endpoint| read_facts(endpoint, &head, &body)).transpose()?;
    let model = match &facts {
        Some(facts) => facts.model(&body),
        None => request::model_of(&body),
    };
    let serving = match model.as_deref() {
        None => None,
        Some(model) => {
            if let Some(entry) = &mut journey.entry {
                entry.model(model);
            }
            serving(router, model, &head).await?
        }
    };
    let outgoing = match (endpoint, facts) {
        (Some(endpoint), Some(facts)) => prepare(router, endpoint, head, body, &facts, serving, slo),
        _ => prepare_by_load(head, body, serving),
    };
    let answer = attempts::send(worker, &outgoing, &mut journey.entry).await?;
    Ok(relay(worker, &outgoing, answer, permit, journey))
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
async fn serving(router: &Arc<RouterState>, model: &str, head: &Head) -> Result<Serving, Refusal> {
    if router.any_model {
        let serving = router.engines.models.serving(model);
        return Ok((!serving.is_empty()).then_some(serving));
    }
    let serving = listing::serving(router, model, head.headers.get(header::AUTHORIZATION)).await;
    match serving.is_empty() {
        false => Ok(Some(serving)),
        // Nobody can say that there is no such model.
        true if router.engines.models.is_empty() => Ok(None),
        true => Err(Refusal::of_model(model)),
    }
}

fn prepare(
    router: &RouterState,
    endpoint: Endpoint,
    mut head: http::request::Parts,
    body: Bytes,
    facts: &RequestFacts,
    serving: Serving,
    slo: Slo,
) -> Outgoing {
    let root = prefix_hash_seed(router, endpoint, &head.headers, &body, facts);
    let prompt = &body[facts.prompt.clone()];
    let media = if facts.has_media { media::find(prompt) } else { Vec::new() };
    let stood_in = (!media.is_empty()).then(|| media::with_stand_ins(prompt, &media));
    let prompt = stood_in.as_deref().unwrap_or(prompt);
    let chain = Chain::new(root, prompt);
    let named = SESSION_HEADERS.iter().find_map(|name| head.headers.get(*name)).map(HeaderValue::as_bytes);
    let named = named.or_else(|| facts.user.clone().map(|user| &body[user]));
    let session = match named {
        Some(name) => xxh3_64_with_seed(name, router.hash_seed),
        None => chain.first().unwrap_or_else(|| xxh3_64_with_seed(prompt, root)),
    };
    let endpoint = (!prompt.is_empty()).then_some(endpoint);
    let bytes = facts.preamble_bytes + prompt.len();
    let length = Length { kind: facts.kind, bytes, media: media.len() };
    let routing =
        RoutingFacts { length, preamble_bytes: facts.preamble_bytes, chain, session, endpoint, serving, slo };
    address_to_engines(&mut head);
    let body = match &facts.ask_for_usage {
        None => Pieces::new([body, Bytes::new(), Bytes::new()]),
        Some(edit) => Pieces::new([
            body.slice(..edit.at.start),
            Bytes::from_static(edit.text.as_bytes()),
            body.slice(edit.at.end..),
        ]),
    };
    let hide_usage = facts.ask_for_usage.is_some();
    let may_hand_over = router.hand_over.is_some() && facts.may_hand_over && routing.endpoint.is_some();
    let routing = Arc::new(routing);
    Outgoing { head, body, routing, stream: facts.stream, hide_usage, may_hand_over }
}

/// A request that goes by load alone, as it came.
fn prepare_by_load(mut head: Head, body: Bytes, serving: Serving) -> Outgoing {
    let chain = Chain::new(0, &[]);
    let length = Length { kind: PromptKind::TokenIds, bytes: 0, media: 0 };
    let slo = Slo::default();
    let routing = RoutingFacts { length, preamble_bytes: 0, chain, session: 0, endpoint: None, serving, slo };
    address_to_engines(&mut head);
    let body = Pieces::new([body, Bytes::new(), Bytes::new()]);
    let routing = Arc::new(routing);
    Outgoing { head, body, routing, stream: false, hide_usage: false, may_hand_over: false }
}

/// Leaves of a request's head what is meant for engines. Usage is read in plain answers: these are
/// asked for.
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

/// What the hashes of a prompt's chunks start from: prompts that can share no KV have different
/// ones.
fn prefix_hash_seed(
    router: &RouterState,
    endpoint: Endpoint,
    headers: &HeaderMap,
    body: &[u8],
    facts: &RequestFacts,
) -> u64 {
    let mut root = xxh3_64_with_seed(&[endpoint as u8], router.hash_seed);
    for (number, at) in &facts.separators {
        root = xxh3_64_with_seed(&body[at.clone()], root.wrapping_add(u64::from(*number) + 1));
    }
    // vLLM: the rank that is to serve a request. Ranks share no KV.
    if let Some(rank) = headers.get("x-data-parallel-rank") {
        root = xxh3_64_with_seed(rank.as_bytes(), !root);
    }
    root
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
    let Begun { started, attempt, deadline, prefiller } = answer;
    let router = &worker.router;
    let status = started.head.status();
    attempt.engine.statuses.count(status);
    let mut entry = journey.entry.take();
    if let Some(entry) = &mut entry {
        entry.first_byte(status);
    }
    let backend = attempt.engine.target.header.clone();
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
            attempt,
            pool: worker.pool.clone(),
            deadline,
            progress: router.limits.progress,
            reset: journey.reset.take(),
            entry,
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
