//! Connections to backends: one HTTP/1.1 exchange at a time, reused when it ended well.
//!
//! A connection is driven by whoever waits for its answer, not by a task of its own: an answer's
//! bytes reach the client with one wake-up instead of two.

use crate::config::{Limits, Target};
use crate::health::Failure;
use bytes::{Bytes, BytesMut};
use forebay_transfer::lock::Mutex;
use http::{Request, Response};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use std::collections::HashMap;
use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};
use tokio::net::TcpStream;

/// Answers are handed on in pieces of at most about this size.
const PIECE_BYTES: usize = 64 * 1024;

/// A request's body: up to three pieces, so that a change in the middle copies nothing.
#[derive(Debug, Clone, Default)]
pub struct Pieces {
    pieces: [Bytes; 3],
}

impl Pieces {
    /// A body of three parts; empty ones are skipped.
    pub fn new(pieces: [Bytes; 3]) -> Pieces {
        Pieces { pieces }
    }
}

impl Pieces {
    /// All of it as one piece.
    pub fn joined(&self) -> Bytes {
        self.pieces.concat().into()
    }
}

impl From<Bytes> for Pieces {
    fn from(whole: Bytes) -> Pieces {
        Pieces::new([whole, Bytes::new(), Bytes::new()])
    }
}

impl Body for Pieces {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let next = self.pieces.iter_mut().find(|piece| !piece.is_empty()).map(std::mem::take);
        Poll::Ready(next.map(|piece| Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.pieces.iter().all(Bytes::is_empty)
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.pieces.iter().map(|piece| piece.len() as u64).sum())
    }
}

/// An exchange that brought no answer.
#[derive(Debug, Clone, Copy)]
pub struct NoAnswer {
    pub failure: Failure,
    /// May the engine have seen the request?
    pub may_have_arrived: bool,
}

impl NoAnswer {
    /// It never left.
    pub fn before_sending(failure: Failure) -> NoAnswer {
        NoAnswer { failure, may_have_arrived: false }
    }

    /// Nobody knows.
    pub fn perhaps_arrived(failure: Failure) -> NoAnswer {
        NoAnswer { failure, may_have_arrived: true }
    }
}

#[derive(Debug)]
pub struct Upstream {
    sender: http1::SendRequest<Pieces>,
    connection: http1::Connection<TokioIo<TcpStream>, Pieces>,
    /// The connection's future has ended and must not be polled again.
    ended: bool,
}

impl Upstream {
    /// Connects within `limits.connect`.
    pub async fn connect(target: &Target, limits: &Limits) -> Result<Upstream, NoAnswer> {
        let unreachable = || NoAnswer::before_sending(Failure::Unreachable);
        let connecting = TcpStream::connect(&target.authority);
        let stream = match tokio::time::timeout(limits.connect, connecting).await {
            Ok(Ok(stream)) => stream,
            Ok(Err(error)) if error.kind() == std::io::ErrorKind::ConnectionRefused => {
                return Err(NoAnswer::before_sending(Failure::Refused));
            }
            Ok(Err(_)) | Err(_) => return Err(unreachable()),
        };
        stream.set_nodelay(true).map_err(|_| unreachable())?;
        let (sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(|_| unreachable())?;
        Ok(Upstream { sender, connection, ended: false })
    }

    /// Sends a request and waits for the head of its answer. Dropping the future leaves the
    /// connection unusable.
    pub async fn exchange(mut self, request: Request<Pieces>) -> Result<Response<Answer>, NoAnswer> {
        let sent = self.sender.try_send_request(request);
        let mut sent = pin!(sent);
        let head = poll_fn(|context| {
            if let Poll::Ready(head) = sent.as_mut().poll(context) {
                return Poll::Ready(head);
            }
            self.drive(context);
            sent.as_mut().poll(context)
        });
        let head = head.await.map_err(|mut lost| {
            let failure = if lost.error().is_parse() { Failure::Garbage } else { Failure::Closed };
            // A request that comes back was not written, not even in part.
            NoAnswer { failure, may_have_arrived: lost.take_message().is_none() }
        })?;
        Ok(head.map(|body| Answer { body, upstream: Some(self), broken: None, ended: false }))
    }

    /// Lets the connection read and write what it can.
    fn drive(&mut self, context: &mut Context) {
        // An error also reaches whoever waits for the head or the body.
        if !self.ended && Pin::new(&mut self.connection).poll(context).is_ready() {
            self.ended = true;
        }
    }

    /// Can it take a request? Notices when the backend has closed it.
    fn is_usable(&mut self) -> bool {
        self.drive(&mut Context::from_waker(Waker::noop()));
        !self.ended && self.sender.is_ready()
    }
}

/// The body of an answer.
#[derive(Debug)]
pub struct Answer {
    body: Incoming,
    /// Gone once the answer has ended.
    upstream: Option<Upstream>,
    /// A failure that came together with bytes, which go first.
    broken: Option<Failure>,
    ended: bool,
}

impl Answer {
    /// The bytes that have arrived, as one piece; `None` at the end.
    pub fn poll_bytes(&mut self, context: &mut Context) -> Poll<Option<Result<Bytes, Failure>>> {
        if let Some(failure) = self.broken.take() {
            return Poll::Ready(Some(Err(failure)));
        }
        let mut arrived = Arrived::default();
        let mut driven = false;
        while arrived.len() < PIECE_BYTES {
            match Pin::new(&mut self.body).poll_frame(context) {
                Poll::Ready(Some(Ok(frame))) => {
                    driven = false;
                    if let Ok(bytes) = frame.into_data() {
                        arrived.push(bytes);
                    }
                }
                Poll::Ready(Some(Err(_))) => {
                    self.broken = Some(Failure::BrokenOff);
                    break;
                }
                Poll::Ready(None) => {
                    self.ended = true;
                    break;
                }
                Poll::Pending if driven => break,
                Poll::Pending => {
                    driven = true;
                    if let Some(upstream) = &mut self.upstream {
                        upstream.drive(context);
                    }
                }
            }
        }
        match arrived.take() {
            Some(bytes) => Poll::Ready(Some(Ok(bytes))),
            None if self.ended => Poll::Ready(None),
            None => self.broken.take().map_or(Poll::Pending, |failure| Poll::Ready(Some(Err(failure)))),
        }
    }

    /// Has everything been handed out? Known before [`Answer::poll_bytes`] says so where the length
    /// was announced.
    pub fn has_ended(&self) -> bool {
        self.ended || (self.body.is_end_stream() && self.broken.is_none())
    }

    /// The connection, if the answer has ended and another request can follow.
    pub fn into_idle(self) -> Option<Upstream> {
        let mut upstream = self.upstream?;
        drop(self.body);
        upstream.is_usable().then_some(upstream)
    }
}

/// Frames that arrived together. A single one is not copied.
#[derive(Default)]
struct Arrived {
    first: Option<Bytes>,
    more: BytesMut,
}

impl Arrived {
    fn push(&mut self, bytes: Bytes) {
        match &self.first {
            None => self.first = Some(bytes),
            Some(first) => {
                if self.more.is_empty() {
                    self.more.reserve(4 * (first.len() + bytes.len()));
                    self.more.extend_from_slice(first);
                }
                self.more.extend_from_slice(&bytes);
            }
        }
    }

    fn len(&self) -> usize {
        self.more.len().max(self.first.as_ref().map_or(0, Bytes::len))
    }

    fn take(self) -> Option<Bytes> {
        if self.more.is_empty() { self.first } else { Some(self.more.freeze()) }
    }
}

/// The idle connections of one thread.
#[derive(Debug)]
pub struct Pool {
    /// By the ids of engines.
    idle: Mutex<HashMap<u64, Vec<(Instant, Upstream)>>>,
    max_idle: usize,
    keep: Duration,
}

impl Pool {
    /// No connections yet; at most `max_idle` are kept for each engine, and each at most for
    /// `keep`.
    pub fn new(max_idle: usize, keep: Duration) -> Pool {
        Pool { idle: Mutex::default(), max_idle, keep }
    }

    /// The connection that was used last, if the engine has not closed it and will not close it at
    /// this moment.
    pub fn take(&self, engine: u64) -> Option<Upstream> {
        loop {
            let (since, mut upstream) = self.idle.lock().get_mut(&engine)?.pop()?;
            if since.elapsed() < self.keep && upstream.is_usable() {
                return Some(upstream);
            }
        }
    }

    /// Keeps a connection for later.
    pub fn put(&self, engine: u64, upstream: Upstream) {
        let mut idle = self.idle.lock();
        let idle = idle.entry(engine).or_default();
        if idle.len() < self.max_idle {
            idle.push((Instant::now(), upstream));
        }
    }

    /// Drops the connections that engines have closed, or may close any moment.
    pub fn sweep(&self) {
        let is_good =
            |(since, upstream): &mut (Instant, Upstream)| since.elapsed() < self.keep && upstream.is_usable();
        self.idle.lock().retain(|_, idle| {
            idle.retain_mut(is_good);
            !idle.is_empty()
        });
    }
}
