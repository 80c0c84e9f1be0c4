//! Having one request answered: it is sent to an engine, and to another one where its failure
//! allows that. `proxy` calls it; engines are chosen by the dispatcher.
//!
//! Nothing goes to the client before the first byte of an answer's body has come. Until then a
//! request that provably never arrived is sent again, and one that may have arrived is sent again
//! once, to another engine: so no request runs more than twice. The second time may be at the same
//! engine only if there is no other, and the connection had been kept from an earlier request.

use crate::asking::{Begin, Outgoing, Started, Worker, begin, has_other};
use crate::dispatcher::{End, Unassigned};
use crate::engine::Engine;
use crate::engines::Attempt;
use crate::hand_over::{self, Answerer, OpenHandOver};
use crate::health::Failure;
use crate::prepare::Prepared;
use crate::refusal::Refusal;
use crate::request_log::LogEntry;
use crate::state::RouterState;
use forebay_otlp::{ActiveSpan, SpanKind};
use http::StatusCode;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tokio::time::{Instant, Sleep, sleep};

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

/// Sends the request until an engine begins to answer.
///
/// The request log gets each attempt's engine.
pub async fn send(
    worker: &Worker,
    outgoing: &Outgoing,
    entry: &mut Option<Box<LogEntry>>,
    span: Option<&ActiveSpan>,
) -> Result<Begun, Refusal> {
    let router = &worker.router;
    let limit = if outgoing.prepared.stream { router.limits.first_byte } else { router.limits.answer };
    let mut deadline = Box::pin(sleep(limit));
    // By their ids: another engine may come to the slot of one that leaves.
    let mut tried: Vec<u64> = Vec::new();
    let mut sent_again = false;
    // An answer for which another engine might do better: it is the client's if none does.
    let mut second_best = None;
    let mut last_failure: Option<(Arc<Engine>, Failure)> = None;
    for number in 1..=router.limits.attempts {
        let (mut attempt, hand_over) = match assign(router, &outgoing.prepared, &tried, number, span) {
            Ok(assigned) => assigned,
            Err(Unassigned::NoEngine) if number > 1 => break,
            Err(none) => return Err(unassigned(router, &outgoing.prepared, &none)),
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
        let traceparent = attempt.traceparent();
        let traceparent = traceparent.as_ref();
        let body = &outgoing.body;
        let ask = Begin { outgoing, body, engine: &engine, traceparent, by, elsewhere, fresh };
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
                let is_over =
                    sent_again || (lost.failure == Failure::FirstByteTimeout && !outgoing.prepared.stream);
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
    let (attempts, failure) = (tried.len() as u32, last_failure.map(|(_, failure)| failure));
    tell_unanswered(router, attempts, failure);
    Err(failure.map_or_else(Refusal::no_backend, |failure| no_answer(failure, attempts)))
}

/// Chooses an engine, and at the first attempt perhaps another one for the prompt.
pub fn assign(
    router: &RouterState,
    prepared: &Prepared,
    tried: &[u64],
    number: u32,
    span: Option<&ActiveSpan>,
) -> Result<(Attempt, Option<OpenHandOver>), Unassigned> {
    let Prepared { routing, may_hand_over, .. } = prepared;
    let choice = span.map(|span| span.child("choose", SpanKind::Internal));
    let (mut decode, mut prefill) = router.engines.assign(routing, tried, number, *may_hand_over)?;
    if let Some(mut choice) = choice {
        decode.explain(&mut choice);
    }
    let handing =
        span.and_then(|span| trace(span, &mut decode, prefill.as_mut().map(|(attempt, _)| attempt)));
    let decoder = decode.engine.clone();
    let open = prefill
        .map(|(attempt, plan)| OpenHandOver::new(router.engines.clone(), plan, attempt, decoder, handing));
    Ok((decode, open))
}

/// Traces attempts as parts of a request. The span of a hand-over, if it is one.
fn trace(span: &ActiveSpan, decode: &mut Attempt, prefill: Option<&mut Attempt>) -> Option<ActiveSpan> {
    let Some(prefill) = prefill else {
        decode.trace(span.child("attempt", SpanKind::Client));
        return None;
    };
    let hand_over = span.child("hand-over", SpanKind::Internal);
    prefill.trace(hand_over.child("prefill", SpanKind::Client));
    decode.trace(hand_over.child("decode", SpanKind::Client));
    Some(hand_over)
}

/// What a client is told whose request goes nowhere.
pub fn unassigned(router: &RouterState, prepared: &Prepared, none: &Unassigned) -> Refusal {
    match none {
        Unassigned::NoEngine => {
            tell_unanswered(router, 0, None);
            Refusal::no_backend()
        }
        Unassigned::TooLate { earliest_us, .. } => Refusal::of_slo(prepared.routing.slo, *earliest_us),
    }
}

fn tell_unanswered(router: &RouterState, attempts: u32, failure: Option<Failure>) {
    router.counters.unanswered.fetch_add(1, Ordering::Relaxed);
    router.engines.lines.unanswered(attempts, failure);
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
        | Failure::PassedOver
        | Failure::Shutdown => (StatusCode::SERVICE_UNAVAILABLE, "is not available"),
    };
    Refusal::of_service(status, format!("no answer after {tried} attempt(s); the last engine {what}"))
}
