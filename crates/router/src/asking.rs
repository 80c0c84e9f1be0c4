//! One engine is asked, and waited for until the first byte of its answer's body has come.

use crate::engine::Engine;
use crate::health::Failure;
use crate::prepare::Prepared;
use crate::request_trace::TRACEPARENT;
use crate::state::{Phase, RouterState};
use crate::upstream::{Answer, NoAnswer, Pieces, Pool, Upstream};
use bytes::Bytes;
use http::{HeaderValue, Request, Response, header};
use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use tokio::time::{Instant, sleep_until};

/// What one thread works with.
#[derive(Debug, Clone)]
pub struct Worker {
    /// What all threads share.
    pub router: Arc<RouterState>,
    /// The thread's idle connections.
    pub pool: Arc<Pool>,
}

/// A request that goes to an engine, in the form in which it can be sent more than once.
pub struct Outgoing {
    /// Method, path and headers.
    pub head: http::request::Parts,
    pub body: Pieces,
    /// What the router made of it.
    pub prepared: Prepared,
}

/// An answer whose first byte has come.
pub struct Started {
    /// Status and headers.
    pub head: Response<()>,
    /// The first bytes; `None` if there are none.
    pub first: Option<Bytes>,
    pub answer: Answer,
}

/// How one engine is asked.
#[derive(Clone, Copy)]
pub struct Begin<'a> {
    pub outgoing: &'a Outgoing,
    pub body: &'a Pieces,
    pub engine: &'a Engine,
    /// What it is told of its trace, if that is not what the client says.
    pub traceparent: Option<&'a HeaderValue>,
    /// When the first byte must have come.
    pub by: Instant,
    /// It may be given up for an engine that is not among these.
    pub elsewhere: Option<&'a [u64]>,
    /// On a new connection.
    pub fresh: bool,
}

/// Whether an engine that is not among these may have the request.
pub fn has_other(router: &RouterState, outgoing: &Outgoing, tried: &[u64]) -> bool {
    router.engines.has_other(outgoing.prepared.routing.serving.as_deref(), tried)
}

/// Sends the request to one engine and waits for the first byte of the answer's body until the
/// deadline. If the engine stops answering probes meanwhile, and the request may go `elsewhere` (to
/// an engine that is not among these), it is given up; else it is waited for, but not for longer
/// than a first byte may take.
pub async fn begin(worker: &Worker, ask: Begin<'_>) -> Result<Started, NoAnswer> {
    let Begin { outgoing, body, engine, traceparent, by: last, elsewhere, fresh } = ask;
    let router = &worker.router;
    let mut exchange = pin!(exchange(worker, (&outgoing.head, traceparent), body, engine, fresh));
    let mut deadline = pin!(sleep_until(last));
    let mut was_silent = false;
    loop {
        let mut news = pin!(engine.news.notified());
        news.as_mut().enable();
        let is_silent = router.engines.is_silent(engine);
        if is_silent && elsewhere.is_some_and(|tried| has_other(router, outgoing, tried)) {
            return Err(NoAnswer::perhaps_arrived(Failure::Ejected));
        }
        if is_silent != was_silent {
            let soon = Instant::now() + router.limits.first_byte;
            deadline.as_mut().reset(if is_silent { last.min(soon) } else { last });
            was_silent = is_silent;
        }
        tokio::select! {
            biased;
            started = exchange.as_mut() => return started,
            () = deadline.as_mut() => return Err(NoAnswer::perhaps_arrived(Failure::FirstByteTimeout)),
            () = cut(router) => return Err(NoAnswer::perhaps_arrived(Failure::Shutdown)),
            () = news => {}
        }
    }
}

/// Waits until answers must end. The connection to the client wakes this task when the phase
/// changes, so that nothing has to be registered for each request.
pub async fn cut(router: &RouterState) {
    let is_cut = |_: &mut std::task::Context| match router.phase() {
        Phase::Cut => Poll::Ready(()),
        _ => Poll::Pending,
    };
    poll_fn(is_cut).await;
}

/// Sends a request to an engine and waits for the first byte of the answer's body. `head`: with
/// what the engine is told of its trace.
pub async fn exchange(
    worker: &Worker,
    head: (&http::request::Parts, Option<&HeaderValue>),
    body: &Pieces,
    engine: &Engine,
    fresh: bool,
) -> Result<Started, NoAnswer> {
    while !fresh && let Some(upstream) = worker.pool.take(engine.id) {
        match first_byte(upstream, head, body, engine).await {
            // The engine closed it before anything was written.
            Err(lost) if !lost.may_have_arrived => {}
            Err(NoAnswer { failure: Failure::Closed, .. }) => {
                return Err(NoAnswer::perhaps_arrived(Failure::ClosedKept));
            }
            other => return other,
        }
    }
    let upstream = Upstream::connect(&engine.target, &worker.router.limits).await?;
    first_byte(upstream, head, body, engine).await
}

async fn first_byte(
    upstream: Upstream,
    (head, traceparent): (&http::request::Parts, Option<&HeaderValue>),
    body: &Pieces,
    engine: &Engine,
) -> Result<Started, NoAnswer> {
    let mut request = Request::new(body.clone());
    *request.method_mut() = head.method.clone();
    *request.uri_mut() = head.uri.clone();
    *request.headers_mut() = head.headers.clone();
    request.headers_mut().insert(header::HOST, engine.target.host.clone());
    if let Some(traceparent) = traceparent {
        request.headers_mut().insert(TRACEPARENT, traceparent.clone());
    }
    let (head, mut answer) = upstream.exchange(request).await?.into_parts();
    let first = poll_fn(|context| answer.poll_bytes(context)).await.transpose();
    let first = first.map_err(|_| NoAnswer::perhaps_arrived(Failure::Closed))?;
    Ok(Started { head: Response::from_parts(head, ()), first, answer })
}
