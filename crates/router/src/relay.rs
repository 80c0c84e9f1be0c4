//! The body of an answer on its way to the client. It watches the engine's deadlines, reads the
//! usage that passes, and tells the attempt how it ended.

use crate::dispatcher::End;
use crate::encoding::Decoder;
use crate::engines::Attempt;
use crate::health::Failure;
use crate::reader::Reader;
use crate::refusal::Refusal;
use crate::request_log::LogEntry;
use crate::state::Permit;
use crate::upstream::{Answer, Pool};
use bytes::Bytes;
use forebay_otlp::ActiveSpan;
use http::StatusCode;
use http_body::{Body, Frame, SizeHint};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::time::{Instant, Sleep};

/// A body for the client.
#[derive(Debug)]
pub enum Reply {
    /// The router's own.
    Whole(Option<Bytes>),
    /// A backend's.
    Relayed(Box<Relay>),
}

impl Reply {
    /// The router's own answer.
    pub fn whole(bytes: Bytes) -> Reply {
        Reply::Whole((!bytes.is_empty()).then_some(bytes))
    }

    /// All of it, if it is the router's own.
    pub fn into_whole(self) -> Bytes {
        match self {
            Reply::Whole(bytes) => bytes.unwrap_or_default(),
            Reply::Relayed(_) => Bytes::new(),
        }
    }
}

/// The answer broke off: the client's connection is closed, so that it cannot be taken for whole.
#[derive(Debug, thiserror::Error)]
#[error("the backend's answer broke off")]
pub struct BrokeOff;

impl Body for Reply {
    type Data = Bytes;
    type Error = BrokeOff;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context,
    ) -> Poll<Option<Result<Frame<Bytes>, BrokeOff>>> {
        match self.get_mut() {
            Reply::Whole(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Reply::Relayed(relay) => {
                relay.poll(context).map(|piece| piece.map(|bytes| bytes.map(Frame::data)))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Reply::Whole(None))
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Reply::Whole(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
            Reply::Relayed(_) => SizeHint::default(),
        }
    }
}

/// An answer under way.
#[derive(Debug)]
pub struct Relay {
    state: State,
    parts: Parts,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Passing,
    /// The answer broke off: what has been handed on gets one turn to reach the socket before the
    /// connection is closed.
    Flushing,
    Closing,
    Ended,
}

/// What a relay works with.
#[derive(Debug)]
pub struct Parts {
    /// The bytes that have come already; `None` if the answer is empty.
    pub first: Option<Bytes>,
    /// The rest; gone when it has ended.
    pub answer: Option<Answer>,
    /// Makes it plain, where it came compressed.
    pub decoder: Option<Box<Decoder>>,
    /// How usage is found in it.
    pub reader: Reader,
    pub status: StatusCode,
    /// The request's attempt.
    pub attempt: Attempt,
    /// Where the connection goes at the end.
    pub pool: Arc<Pool>,
    /// A timer to use.
    pub deadline: Pin<Box<Sleep>>,
    /// How long it may wait between two pieces.
    pub progress: Duration,
    /// Set when the answer breaks off and the end of the connection would make it look whole.
    pub reset: Option<Arc<AtomicBool>>,
    /// What the request log will say of it.
    pub entry: Option<Box<LogEntry>>,
    /// The request's span, if it is traced.
    pub span: Option<Box<ActiveSpan>>,
    /// The request's right to be under way.
    pub permit: Permit,
}

impl Relay {
    /// Starts to pass an answer on.
    pub fn start(mut parts: Parts) -> Reply {
        parts.deadline.as_mut().reset(Instant::now() + parts.progress);
        let mut relay = Box::new(Relay { state: State::Passing, parts });
        if relay.has_ended() {
            // Nobody polls the body of an answer to HEAD, or one that is announced as empty.
            return Reply::whole(relay.finish());
        }
        Reply::Relayed(relay)
    }

    fn poll(&mut self, context: &mut Context) -> Poll<Option<Result<Bytes, BrokeOff>>> {
        match self.state {
            State::Passing => self.poll_passing(context),
            State::Flushing => {
                self.state = State::Closing;
                context.waker().wake_by_ref();
                Poll::Pending
            }
            State::Closing => {
                self.state = State::Ended;
                Poll::Ready(Some(Err(BrokeOff)))
            }
            State::Ended => Poll::Ready(None),
        }
    }

    fn poll_passing(&mut self, context: &mut Context) -> Poll<Option<Result<Bytes, BrokeOff>>> {
        loop {
            let piece = match ready!(self.poll_piece(context)) {
                Some(Ok(bytes)) => match self.plain(bytes) {
                    Ok(bytes) => self.parts.reader.pass(bytes),
                    Err(failure) => return self.fail(failure, context),
                },
                Some(Err(failure)) => return self.fail(failure, context),
                None => Bytes::new(),
            };
            // A document of announced length is not polled again after its last byte: its end must
            // be seen here.
            let rest = if self.has_ended() { self.finish() } else { Bytes::new() };
            match (piece.is_empty(), rest.is_empty()) {
                (true, true) if self.state == State::Ended => return Poll::Ready(None),
                (true, true) => {}
                (false, true) => return Poll::Ready(Some(Ok(piece))),
                (true, false) => return Poll::Ready(Some(Ok(rest))),
                (false, false) => return Poll::Ready(Some(Ok([piece, rest].concat().into()))),
            }
        }
    }

    fn plain(&mut self, bytes: Bytes) -> Result<Bytes, Failure> {
        let Some(decoder) = &mut self.parts.decoder else { return Ok(bytes) };
        decoder.decode(&bytes).map_err(|_| Failure::Garbage)
    }

    fn has_ended(&self) -> bool {
        self.parts.first.is_none() && self.parts.answer.as_ref().is_none_or(Answer::has_ended)
    }

    /// The next bytes as they come from the backend, in time.
    fn poll_piece(&mut self, context: &mut Context) -> Poll<Option<Result<Bytes, Failure>>> {
        if let Some(first) = self.parts.first.take() {
            return Poll::Ready(Some(Ok(first)));
        }
        let Some(answer) = &mut self.parts.answer else { return Poll::Ready(None) };
        if self.parts.permit.is_cut() {
            return Poll::Ready(Some(Err(Failure::Shutdown)));
        }
        if let Poll::Ready(piece) = answer.poll_bytes(context) {
            self.parts.deadline.as_mut().reset(Instant::now() + self.parts.progress);
            return Poll::Ready(piece);
        }
        ready!(self.parts.deadline.as_mut().poll(context));
        Poll::Ready(Some(Err(Failure::ProgressTimeout)))
    }

    /// The answer is whole.
    fn finish(&mut self) -> Bytes {
        self.state = State::Ended;
        let rest = self.parts.reader.finish();
        let failed = self.parts.attempt.end_whole(self.parts.status, &self.parts.reader);
        if let Some(mut entry) = self.parts.entry.take() {
            let end = if failed { Failure::ErrorEvent.name() } else { "answered" };
            entry.ended(end, self.parts.reader.outcome().0);
        }
        drop(self.parts.span.take());
        if let Some(upstream) = self.parts.answer.take().and_then(Answer::into_idle) {
            self.parts.pool.put(self.parts.attempt.engine.id, upstream);
        }
        rest
    }

    /// The answer is not whole. A stream says why before it breaks off, a document just breaks off.
    fn fail(&mut self, failure: Failure, context: &mut Context) -> Poll<Option<Result<Bytes, BrokeOff>>> {
        self.parts.attempt.is_broken(failure);
        self.parts.attempt.end(End::Failed(failure));
        if let Some(mut entry) = self.parts.entry.take() {
            entry.ended(failure.name(), self.parts.reader.outcome().0);
        }
        if let Some(mut span) = self.parts.span.take() {
            span.fail(failure.name());
        }
        if let Some(reset) = &self.parts.reset {
            reset.store(true, Ordering::Relaxed);
        }
        self.parts.answer = None;
        self.state = State::Flushing;
        if !self.parts.reader.is_of_events() {
            return self.poll(context);
        }
        let bad_gateway = |message| Refusal::of_service(StatusCode::BAD_GATEWAY, message);
        let refusal = match failure {
            Failure::Shutdown => Refusal::shutting_down(),
            Failure::ProgressTimeout => {
                let seconds = self.parts.progress.as_secs_f64();
                bad_gateway(format!("the engine sent nothing for {seconds} s"))
            }
            _ => bad_gateway("the engine's answer broke off".to_owned()),
        };
        let error = refusal.json();
        Poll::Ready(Some(Ok([b"data: ", &error[..], b"\n\n"].concat().into())))
    }
}
