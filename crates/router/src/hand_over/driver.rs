//! Asks the two engines of a hand-over, as the state machine says, until the decoder begins to
//! answer. Sockets and clocks are here; what follows what is `HandOver`'s.

use super::params::{self, AtOnce, PrefillAnswer};
use super::{Action, Event, Form, HandOver, HandOverEnd, OpenHandOver, Protocol};
use crate::asking::{Begin, Started, Worker, begin as begin_at, cut, exchange};
use crate::dispatcher::End;
use crate::engines::Attempt;
use crate::health::Failure;
use crate::upstream::{Answer, NoAnswer, Pieces};
use bytes::{Bytes, BytesMut};
use http::StatusCode;
use std::future::{pending, poll_fn};
use std::pin::Pin;
use std::time::Duration;
use tokio::time::{Instant, sleep_until, timeout_at};

/// Of a prefiller's answer: block ids of a long prompt, and one token.
const ANSWER_BYTES_MAX: usize = 4 * 1024 * 1024;

/// Who computed the prompt of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answerer {
    /// The prefiller, and it was handed over.
    Both,
    /// The decoder itself.
    Decoder,
}

type Prefilling = Pin<Box<dyn Future<Output = Result<PrefillAnswer, HandOverEnd>> + Send>>;
type Decoding<'a> = Pin<Box<dyn Future<Output = Result<Started, NoAnswer>> + Send + 'a>>;

/// A hand-over under way.
struct Asking<'a> {
    worker: &'a Worker,
    /// How the decoder is asked.
    ask: Begin<'a>,
    attempt: &'a mut Attempt,
    open: OpenHandOver,
    machine: HandOver,
    began: Instant,
    /// The client's request.
    body: Bytes,
    /// Until when the prefiller's answer is of use.
    prefill_by: Instant,
    prefilling: Option<Prefilling>,
    decoding: Option<Decoding<'a>>,
    /// The client gets its first token now.
    is_first_token: bool,
    /// The decoder has been asked with parameters.
    was_asked: bool,
    sent_again: bool,
}

/// What came of it.
pub struct Answered {
    /// What the decoder answered, or why it did not, as an ordinary attempt would.
    pub begun: Result<Started, NoAnswer>,
    pub by: Answerer,
    /// The decoder was asked twice.
    pub sent_again: bool,
}

/// Has the prompt of a request computed by one engine and answered by another; `ask` is how the
/// latter is asked.
pub async fn begin<'a>(
    worker: &'a Worker,
    ask: Begin<'a>,
    attempt: &'a mut Attempt,
    protocol: Protocol,
    open: OpenHandOver,
) -> Answered {
    let at_once = match protocol {
        Protocol::Forebay => open.prefiller.ticket().and_then(|ticket| ticket.at_once(params::draw_key)),
        Protocol::Nixl => None,
    };
    Asking::new(worker, ask, attempt, at_once, open).run().await
}

impl<'a> Asking<'a> {
    /// Has the prefiller asked, and the decoder too where both are asked at once.
    fn new(
        worker: &'a Worker,
        ask: Begin<'a>,
        attempt: &'a mut Attempt,
        at_once: Option<AtOnce>,
        mut open: OpenHandOver,
    ) -> Asking<'a> {
        let began = Instant::now();
        let form = if at_once.is_some() { Form::AtOnce } else { Form::InTurn };
        let by_us = ask.by.saturating_duration_since(began).as_micros() as u64;
        let machine = HandOver::new(form, ask.outgoing.prepared.stream, open.plan().expected, 0, by_us);
        let body = ask.outgoing.body.joined();
        let (to_prefill, to_decode) = match at_once {
            Some(AtOnce { prefill, decode }) => (prefill, Some(decode)),
            None => (params::prefill_params().to_string(), None),
        };
        let prefilling = open.take_prefill().map(|attempt| {
            let body = params::prefill_body(&body, &to_prefill);
            Box::pin(prefill(worker.clone(), ask.outgoing.head.clone(), body, attempt)) as Prefilling
        });
        let prefill_by = began + Duration::from_micros(machine.deadline_us().unwrap_or(0));
        let mut asking = Asking {
            worker,
            ask,
            attempt,
            open,
            machine,
            began,
            body,
            prefill_by,
            prefilling,
            decoding: None,
            is_first_token: false,
            was_asked: false,
            sent_again: false,
        };
        if let Some(params) = to_decode {
            asking.ask_decode(params.as_bytes());
        }
        asking
    }

    async fn run(mut self) -> Answered {
        loop {
            let deadline = self.machine.deadline_us().map(|us| self.began + Duration::from_micros(us));
            tokio::select! {
                biased;
                started = some(&mut self.decoding) => {
                    if self.is_refused(&started) {
                        self.on(Event::DecodeRefused);
                    } else {
                        return self.decoded(started);
                    }
                }
                answer = some(&mut self.prefilling) => self.prefilled(answer),
                () = until(deadline) => {
                    self.on(Event::Tick);
                }
                () = cut(&self.worker.router) => {
                    let begun = Err(NoAnswer::perhaps_arrived(Failure::Shutdown));
                    return Answered { begun, by: Answerer::Decoder, sent_again: self.sent_again };
                }
            }
        }
    }

    /// The prefiller has answered, or not.
    fn prefilled(&mut self, answer: Result<PrefillAnswer, HandOverEnd>) {
        self.prefilling = None;
        match answer {
            Ok(answer) => {
                if self.on(Event::Prefilled) == Action::AskDecode {
                    self.ask_decode(&answer.params);
                }
            }
            Err(end) => {
                self.on(Event::PrefillFailed(end));
            }
        }
    }

    /// The decoder answers with an error while it is asked for what another engine computes.
    fn is_refused(&self, started: &Result<Started, NoAnswer>) -> bool {
        let is_error = started.as_ref().is_ok_and(|started| started.head.status().as_u16() >= 400);
        is_error && !self.machine.is_asked_plainly()
    }

    fn decoded(mut self, started: Result<Started, NoAnswer>) -> Answered {
        let has_begun = started.is_ok();
        self.is_first_token = has_begun && self.ask.outgoing.prepared.stream;
        self.on(match &started {
            Ok(started) if is_client_error(started.head.status()) => Event::ClientError,
            Ok(_) => Event::Began,
            Err(_) => Event::DecodeLost,
        });
        if let Some(prefilling) = self.prefilling.take().filter(|_| has_begun) {
            // What it answers is worth to be known: the next one may be asked at once.
            let prefill_by = self.prefill_by;
            tokio::spawn(async move { drop(timeout_at(prefill_by, prefilling).await) });
        }
        let is_handed = matches!(self.machine.end(), Some(HandOverEnd::Handed | HandOverEnd::Unseen));
        let by = if has_begun && is_handed { Answerer::Both } else { Answerer::Decoder };
        Answered { begun: started, by, sent_again: self.sent_again }
    }

    /// Tells the machine what has happened, does what it says, and tells the books of an end.
    fn on(&mut self, event: Event) -> Action {
        let now_us = self.began.elapsed().as_micros() as u64;
        let action = self.machine.on(now_us, event);
        match action {
            Action::Wait | Action::AskDecode => {}
            Action::AskPlainly => {
                self.prefilling = None;
                self.sent_again |= self.was_asked;
                // First of all: the engine must not have it twice.
                self.decoding = None;
                self.attempt.computes_itself();
                self.decoding = Some(Box::pin(begin_at(self.worker, self.ask)));
            }
        }
        if let Some(end) = self.machine.end() {
            self.open.end(end, self.is_first_token);
        }
        action
    }

    fn ask_decode(&mut self, params: &[u8]) {
        let body = params::decode_body(&self.body, params);
        self.was_asked = true;
        self.decoding = Some(Box::pin(ask_decode(self.worker, self.ask, body)));
    }
}

/// The engine says that the request is wrong, and not that it cannot serve it.
fn is_client_error(status: StatusCode) -> bool {
    status.is_client_error() && Failure::of_status(status.as_u16()).is_none()
}

/// Asks the decoder with another body; one that cannot be made is the client's own.
async fn ask_decode(worker: &Worker, ask: Begin<'_>, body: Option<Bytes>) -> Result<Started, NoAnswer> {
    let body = body.map_or_else(|| ask.body.clone(), Pieces::from);
    begin_at(worker, Begin { body: &body, ..ask }).await
}

/// Has the prefiller compute the prompt, and remembers what its answer says of itself.
async fn prefill(
    worker: Worker,
    head: http::request::Parts,
    body: Option<Bytes>,
    mut attempt: Attempt,
) -> Result<PrefillAnswer, HandOverEnd> {
    let Some(body) = body.map(Pieces::from) else { return Err(HandOverEnd::NoParameters) };
    let engine = attempt.engine.clone();
    let answer = match ask_prefill(&worker, &head, &body, &mut attempt).await {
        Ok((status, document)) => {
            let read = if status.is_success() { params::read_answer(&document) } else { None };
            let usage = read.as_ref().and_then(|read| read.usage);
            attempt.end(End::Answered { status: status.as_u16(), usage });
            let why =
                if status.is_success() { HandOverEnd::NoParameters } else { HandOverEnd::PrefillRefused };
            read.ok_or(why)
        }
        Err(failure) => {
            attempt.end(End::Failed(failure));
            Err(HandOverEnd::PrefillLost)
        }
    };
    engine.set_ticket(answer.as_ref().ok().and_then(|answer| answer.ticket.clone()));
    answer
}

/// Asks the prefiller and reads all that it answers.
async fn ask_prefill(
    worker: &Worker,
    head: &http::request::Parts,
    body: &Pieces,
    attempt: &mut Attempt,
) -> Result<(StatusCode, BytesMut), Failure> {
    let (engine, traceparent) = (attempt.engine.clone(), attempt.traceparent());
    let head = (head, traceparent.as_ref());
    let mut started = exchange(worker, head, body, &engine, false).await;
    if let Err(NoAnswer { failure: Failure::ClosedKept, .. }) = started {
        started = exchange(worker, head, body, &engine, true).await;
    }
    let Started { head, first, mut answer } = started.map_err(|lost| lost.failure)?;
    attempt.first_byte(head.status().as_u16());
    let document = read_whole(first, &mut answer).await?;
    if let Some(upstream) = answer.into_idle() {
        worker.pool.put(engine.id, upstream);
    }
    Ok((head.status(), document))
}

/// All of an answer, up to [`ANSWER_BYTES_MAX`].
async fn read_whole(first: Option<Bytes>, answer: &mut Answer) -> Result<BytesMut, Failure> {
    let mut document = BytesMut::from(&first.unwrap_or_default()[..]);
    while let Some(bytes) = poll_fn(|context| answer.poll_bytes(context)).await.transpose()? {
        if document.len() + bytes.len() > ANSWER_BYTES_MAX {
            return Err(Failure::BrokenOff);
        }
        document.extend_from_slice(&bytes);
    }
    Ok(document)
}

async fn some<T>(future: &mut Option<Pin<Box<dyn Future<Output = T> + Send + '_>>>) -> T {
    match future {
        Some(future) => future.await,
        None => pending().await,
    }
}

async fn until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => sleep_until(deadline).await,
        None => pending().await,
    }
}
