//! Having one request answered: it is sent to an engine, and to another one where its failure
//! allows that. `proxy` calls it; engines are chosen by the dispatcher.
//!
//! Nothing goes to the client before the first byte of an answer's body has come. Until then a
//! request that provably never arrived is sent again, and one that may have arrived is sent again
//! once, to another engine: so no request runs more than twice. The second time may be at the same
//! engine only if there is no other, and the connection had been kept from an earlier request.

use crate::dispatcher::{End, RoutingFacts, Unassigned};
use crate::engine::Engine;
use crate::engines::Attempt;
use crate::hand_over::{self, Answerer, OpenHandOver};
use crate::health::Failure;
use crate::refusal::Refusal;
use crate::request_log::LogEntry;
use crate::state::{Phase, RouterState};
use crate::upstream::{Answer, NoAnswer, Pieces, Pool, Upstream};
use bytes::Bytes;
use http::{Request, Response, StatusCode, header};
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Poll;
use tokio::time::{Instant, Sleep, sleep, sleep_until};

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
    /// What routing needs to know of it.
    pub routing: Arc<RoutingFacts>,
    /// The client asked for a stream: its first byte comes when the prompt is computed.
    pub stream: bool,
    /// The client did not ask for usage.
    pub hide_usage: bool,
    /// Another engine may compute its prompt.
    pub may_hand_over: bool,
}

/// An answer whose first byte has come.
pub struct Started {
    /// Status and headers.
    pub head: Response<()>,
    /// The first bytes; `None` if there are none.
    pub first: Option<Bytes>,
    pub answer: Answer,
}

/// An answer that is the client's.
pub struct Begun {
    pub started: Started,
    /// The attempt that brought it.
    pub attempt: Attempt,
    /// A timer to use.
    pub deadline: Pin<Box<Sleep>>,
    /// The engine that computed the prompt, if that is another one.
    pub prefiller: Option<Arc<Engine>>,
}

/// How one engine is asked.
#[derive(Clone, Copy)]
pub struct Begin<'a> {
    pub outgoing: &'a Outgoing,
    pub body: &'a Pieces,
    pub engine: &'a Engine,
    /// When the first byte must have come.
    pub by: Instant,
    /// It may be given up for an engine that is not among these.
    pub elsewhere: Option<&'a [u64]>,
    /// On a new connection.
    pub fresh: bool,
}

/// Sends the request until an engine begins to answer.
///
/// The request log gets each attempt's engine.
pub async fn send(
    worker: &Worker,
    outgoing: &Outgoing,
    entry: &mut Option<Box<LogEntry>>,
) -> Result<Begun, Refusal> {
    let router = &worker.router;
    let limit = if outgoing.stream { router.limits.first_byte } else { router.limits.answer };
    let mut deadline = Box::pin(sleep(limit));
    // By their ids: another engine may come to the slot of one that leaves.
    let mut tried: Vec<u64> = Vec::new();
    let mut sent_again = false;
    // An answer for which another engine might do better: it is the client's if none does.
    let mut second_best = None;
    let mut last_failure: Option<(Arc<Engine>, Failure)> = None;
    for number in 1..=router.limits.attempts {
        let (mut attempt, hand_over) = match assign(router, outgoing, &tried, number) {
            Ok(assigned) => assigned,
            Err(Unassigned::NoEngine) => break,
            Err(Unassigned::TooLate { earliest_us, .. }) => {
                return Err(Refusal::of_slo(outgoing.routing.slo, earliest_us));
            }
        };
        let mut prefiller = None;
        let engine = attempt.engine.clone();
        if let Some((from, failure)) = &last_failure {
            router.engines.tell_sent_elsewhere(from, &engine, *failure);
        }
        tried.push(engine.id);
        if let Some(entry) = entry {
            entry.attempt(engine.name());
        }
        if number > 1 {
            deadline.as_mut().reset(Instant::now() + limit);
        }
        let may_move = number < router.limits.attempts && !sent_again;
        let elsewhere = may_move.then_some(&tried[..]);
        // What remains of an earlier request is not trusted after it has failed once.
        let fresh = last_failure.as_ref().is_some_and(|(_, failure)| *failure == Failure::ClosedKept);
        let by = deadline.deadline();
        let ask = Begin { outgoing, body: &outgoing.body, engine: &engine, by, elsewhere, fresh };
        let begun = match (hand_over, router.hand_over) {
            (Some(open), Some(protocol)) => {
                let from = open.prefiller.clone();
                let answered = hand_over::begin(worker, ask, &mut attempt, protocol, open).await;
                prefiller = Some(from).filter(|_| answered.by == Answerer::Both);
                sent_again |= answered.sent_again;
                answered.begun
            }
            _ => begin(worker, ask).await,
        };
        let failure = match begun {
            Ok(started) => {
                let status = started.head.status().as_u16();
                attempt.first_byte(status);
                match Failure::of_status(status) {
                    Some(failure) if may_move && has_other(router, outgoing, &tried) => {
                        sent_again = true;
                        attempt.end(End::Failed(failure));
                        second_best = Some((started, attempt));
                        failure
                    }
                    Some(Failure::NotFound) if second_best.is_some() => {
                        attempt.end(End::Failed(Failure::NotFound));
                        break;
                    }
                    _ => return Ok(Begun { started, attempt, deadline, prefiller }),
                }
            }
            Err(lost) => {
                attempt.end(End::Failed(lost.failure));
                let is_over = sent_again || (lost.failure == Failure::FirstByteTimeout && !outgoing.stream);
                if lost.failure == Failure::Shutdown {
                    return Err(Refusal::shutting_down());
                }
                if lost.may_have_arrived && is_over {
                    last_failure = Some((engine, lost.failure));
                    break;
                }
                sent_again |= lost.may_have_arrived;
                if lost.failure == Failure::ClosedKept && !has_other(router, outgoing, &tried) {
                    tried.pop();
                }
                lost.failure
            }
        };
        last_failure = Some((engine, failure));
    }
    if let Some((started, attempt)) = second_best {
        return Ok(Begun { started, attempt, deadline, prefiller: None });
    }
    router.counters.unanswered.fetch_add(1, Ordering::Relaxed);
    let (attempts, failure) = (tried.len() as u32, last_failure.map(|(_, failure)| failure));
    router.engines.lines.unanswered(attempts, failure);
    Err(failure.map_or_else(Refusal::no_backend, |failure| no_answer(failure, attempts)))
}

/// Chooses an engine, and at the first attempt perhaps another one for the prompt.
fn assign(
    router: &RouterState,
    outgoing: &Outgoing,
    tried: &[u64],
    number: u32,
) -> Result<(Attempt, Option<OpenHandOver>), Unassigned> {
    router.engines.assign(&outgoing.routing, tried, number, outgoing.may_hand_over)
}

fn no_answer(failure: Failure, tried: u32) -> Refusal {
    let (status, what) = match failure {
        Failure::Refused | Failure::Unreachable => (StatusCode::SERVICE_UNAVAILABLE, "cannot be reached"),
        Failure::FirstByteTimeout => (StatusCode::GATEWAY_TIMEOUT, "did not begin to answer in time"),
        Failure::Garbage => (StatusCode::BAD_GATEWAY, "answered something that is not HTTP"),
        Failure::Closed | Failure::ClosedKept | Failure::ProgressTimeout | Failure::BrokenOff => {
            (StatusCode::BAD_GATEWAY, "closed the connection without an answer")
        }
        Failure::Ejected
        | Failure::NotFound
        | Failure::TooManyRequests
        | Failure::Unavailable
        | Failure::ServerError
        | Failure::ErrorEvent
        | Failure::Shutdown => (StatusCode::SERVICE_UNAVAILABLE, "is not available"),
    };
    Refusal::of_service(status, format!("no answer after {tried} attempt(s); the last engine {what}"))
}

fn has_other(router: &RouterState, outgoing: &Outgoing, tried: &[u64]) -> bool {
    router.engines.has_other(outgoing.routing.serving.as_deref(), tried)
}

/// Sends the request to one engine and waits for the first byte of the answer's body until the
/// deadline. If the engine stops answering probes meanwhile, and the request may go `elsewhere` (to
/// an engine that is not among these), it is given up; else it is waited for, but not for longer
/// than a first byte may take.
pub async fn begin(worker: &Worker, ask: Begin<'_>) -> Result<Started, NoAnswer> {
    let Begin { outgoing, body, engine, by: last, elsewhere, fresh } = ask;
    let router = &worker.router;
    let mut exchange = pin!(exchange(worker, &outgoing.head, body, engine, fresh));
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

/// Sends a request to an engine and waits for the first byte of the answer's body.
pub async fn exchange(
    worker: &Worker,
    head: &http::request::Parts,
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
    head: &http::request::Parts,
    body: &Pieces,
    engine: &Engine,
) -> Result<Started, NoAnswer> {
    let mut request = Request::new(body.clone());
    *request.method_mut() = head.method.clone();
    *request.uri_mut() = head.uri.clone();
    *request.headers_mut() = head.headers.clone();
    request.headers_mut().insert(header::HOST, engine.target.host.clone());
    let (head, mut answer) = upstream.exchange(request).await?.into_parts();
    let first = poll_fn(|context| answer.poll_bytes(context)).await.transpose();
    let first = first.map_err(|_| NoAnswer::perhaps_arrived(Failure::Closed))?;
    Ok(Started { head: Response::from_parts(head, ()), first, answer })
}
