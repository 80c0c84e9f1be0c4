//! One connection to one instance of a node: requests go out, answers find who waits for them, and
//! its end fails everybody at once.
//!
//! An answer that does not name what was asked belongs to somebody else: then somebody else reads
//! or writes this socket, and the connection ends. A child of `fork()` shares the socket, and uses
//! it for nothing.
//!
//! A connection that broke stays as a value until nothing writes the arena that came with it any
//! more. Only then does the socket close, with a word to the node that the slots of this client are
//! quiet. A node that is stuck gets it when it goes on.

use super::arena::NodeArena;
use super::greeting::{self, Greeted};
use super::{ClientOptions, ConnectError};
use crate::protocol::answer::{Answer, Refusal};
use crate::protocol::frame::{Asked, BadFrame, Frame, Inbox};
use crate::protocol::request::Request;
use crate::protocol::socket;
use forebay_store::TenantId;
use forebay_transfer::lock::Mutex;
use forebay_transfer::{Arena, Backing, MoverHandle, Place, Process, TraceContext};
use rustix::fd::OwnedFd;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Bytes that are received at a time.
const RECEIVE_BYTES: usize = 256 << 10;

/// What requests are asked for, beside the client itself.
#[derive(Debug, Clone, Copy, Default)]
pub struct RequestContext {
    /// The span that they are part of, if that is traced.
    pub within: Option<TraceContext>,
    /// Whose chunks are meant, if they are not the client's own tenant's.
    pub tenant: Option<TenantId>,
}

impl RequestContext {
    /// What is said before the request of this number.
    fn encode(self, number: u64) -> Vec<Frame> {
        let span = self.within.map(|within| Request::Traced(within).encode(number));
        span.into_iter().chain(self.tenant.map(|tenant| Request::For(tenant).encode(number))).collect()
    }
}

/// A request, and what it is asked for.
#[derive(Debug, Clone, Copy)]
pub struct Question<'a> {
    request: &'a Request,
    context: RequestContext,
}

impl<'a> Question<'a> {
    pub fn new(request: &'a Request, context: RequestContext) -> Question<'a> {
        Question { request, context }
    }
}

impl<'a> From<&'a Request> for Question<'a> {
    fn from(request: &'a Request) -> Question<'a> {
        Question::new(request, RequestContext::default())
    }
}

/// Takes an answer to a request, and says whether there is more to come. `None`: the node is gone,
/// or was.
type OnAnswer = Box<dyn FnMut(Option<Answer>) -> bool + Send>;

/// A connection, alive or broken.
#[derive(Debug)]
pub struct Connection {
    /// In any other process it is as good as broken.
    process: Process,
    socket: OwnedFd,
    /// Held while a frame is sent, so that frames do not mix. What is left of one that was cut off:
    /// nothing else may follow it.
    sending: Mutex<Vec<u8>>,
    pending: Mutex<Pending>,
    next_number: AtomicU64,
    messages: AtomicU64,
    /// What came with the last answer that had one.
    descriptor: Mutex<Option<OwnedFd>>,
    /// The arena that came with it, of this life of the node.
    pub arena: Arc<NodeArena>,
}

/// Who waits for an answer, and to what.
struct Waiting {
    asked: Asked,
    on_answer: OnAnswer,
}

/// Who waits for answers.
#[derive(Default)]
struct Pending {
    waiting: HashMap<u64, Waiting>,
    /// When the node was last heard, or asked after a silence in which nobody waited for anything.
    heard: Option<Instant>,
    broken: bool,
}

impl std::fmt::Debug for Pending {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pending").field("waiting", &self.waiting.len()).field("broken", &self.broken).finish()
    }
}

impl Connection {
    /// Connects, is let in, and maps the arena.
    pub fn open(
        mover: &MoverHandle,
        place: Place,
        options: &ClientOptions,
    ) -> Result<Connection, ConnectError> {
        let Greeted { socket, instance, arena_bytes, arena } = greeting::greet(options)?;
        let failed = |error| ConnectError::Socket { path: options.socket.clone(), error };
        let arena = Arena::attach(arena)?;
        if arena.len() as u64 != arena_bytes {
            let text = format!("an arena of {} bytes, not {arena_bytes}", arena.len());
            return Err(ConnectError::Protocol(text));
        }
        let patience = Some(greeting::patience(options));
        socket::set_timeouts(&socket, None, patience).map_err(failed)?;
        let memory = Arc::new(arena);
        let region = mover.register(place, Arc::clone(&memory) as Arc<dyn Backing>)?;
        Ok(Connection {
            process: Process::current(),
            socket,
            sending: Mutex::default(),
            pending: Mutex::default(),
            next_number: AtomicU64::new(1),
            messages: AtomicU64::new(0),
            descriptor: Mutex::default(),
            arena: Arc::new(NodeArena::new(region, memory, instance)),
        })
    }

    /// Asks. `on_answer` is called exactly once, on the connection's thread or, if it is broken or
    /// the node would hang up, on this one.
    pub fn ask<'a>(
        &self,
        question: impl Into<Question<'a>>,
        on_answer: impl FnOnce(Option<Answer>) + Send + 'static,
    ) {
        let mut on_answer = Some(on_answer);
        self.ask_for_many(question, move |answer| {
            if let Some(on_answer) = on_answer.take() {
                on_answer(answer);
            }
            false
        });
    }

    /// The same for a request that has several answers: `on_answer` says whether more are to come.
    pub fn ask_for_many<'a>(
        &self,
        question: impl Into<Question<'a>>,
        mut on_answer: impl FnMut(Option<Answer>) -> bool + Send + 'static,
    ) {
        let mut gone = |answer| {
            on_answer(answer);
        };
        let Question { request, context } = question.into();
        if let Err(bad) = request.check() {
            return gone(Some(Answer::Refused(Refusal::BadRequest, bad.to_string())));
        }
        if !self.process.is_current() {
            return gone(None);
        }
        let number = self.next_number.fetch_add(1, Ordering::Relaxed);
        let (mut frames, frame) = (context.encode(number), request.encode(number));
        let mut pending = self.pending.lock();
        if pending.broken {
            drop(pending);
            return gone(None);
        }
        if pending.waiting.is_empty() {
            pending.heard = Some(Instant::now());
        }
        let waiting = Waiting { asked: frame.asked(), on_answer: Box::new(on_answer) };
        pending.waiting.insert(number, waiting);
        drop(pending);
        frames.push(frame);
        self.send(&frames);
    }

    /// Says something that is not answered, unless the node would hang up.
    pub fn tell<'a>(&self, question: impl Into<Question<'a>>) {
        let Question { request, context } = question.into();
        if self.is_alive() && request.check().is_ok() {
            // Only what is answered is traced.
            let mut frames = RequestContext { within: None, ..context }.encode(0);
            frames.push(request.encode(0));
            self.send(&frames);
        }
    }

    /// Sends frames with nothing between them.
    fn send(&self, frames: &[Frame]) {
        self.messages.fetch_add(frames.len() as u64, Ordering::Relaxed);
        let bytes: Vec<u8> = frames.iter().flat_map(Frame::encode).collect();
        let (mut rest, mut cut_off) = (&bytes[..], self.sending.lock());
        if !self.is_alive() {
            return;
        }
        let sent = socket::send_from(&self.socket, &mut rest);
        if sent.is_err() {
            // Whoever sends next finds it so, and neither waits as long nor goes on behind half a
            // frame.
            self.pending.lock().broken = true;
            if rest.len() < bytes.len() {
                cut_off.extend_from_slice(rest);
            }
        }
        drop(cut_off);
        if sent.is_err() {
            self.end();
        }
    }

    /// The descriptor that came with an answer; for who is told that.
    pub fn take_descriptor(&self) -> Option<OwnedFd> {
        self.descriptor.lock().take()
    }

    /// Frames that went out and came in so far.
    pub fn messages(&self) -> u64 {
        self.messages.load(Ordering::Relaxed)
    }

    /// Whether the node is there, as far as is known.
    pub fn is_alive(&self) -> bool {
        // First: a thread of the parent may have held the lock when it forked.
        self.process.is_current() && !self.pending.lock().broken
    }

    /// For how long the node has been silent although somebody waits.
    pub fn silent_for(&self) -> Option<Duration> {
        if !self.process.is_current() {
            return None;
        }
        let pending = self.pending.lock();
        pending.heard.filter(|_| !pending.waiting.is_empty()).map(|heard| heard.elapsed())
    }

    /// The connection is of no use any more: everybody who waits is told, and nobody gets anything
    /// of it from now on.
    pub fn end(&self) {
        if !self.process.is_current() {
            return;
        }
        let waiting = {
            let mut pending = self.pending.lock();
            pending.broken = true;
            std::mem::take(&mut pending.waiting)
        };
        socket::shut_receiving(&self.socket);
        for mut waiting in waiting.into_values() {
            (waiting.on_answer)(None);
        }
    }

    /// Takes in answers until the end, and gives those that nobody has asked for to `on_unasked`.
    pub fn receive(&self, on_unasked: impl Fn(Answer)) {
        let (mut inbox, mut bytes) = (Inbox::default(), vec![0; RECEIVE_BYTES]);
        while let Ok((received @ 1.., came)) = socket::receive_with(&self.socket, &mut bytes) {
            if came.is_some() {
                *self.descriptor.lock() = came;
            }
            inbox.put(&bytes[..received]);
            self.pending.lock().heard = Some(Instant::now());
            loop {
                match inbox.next_frame() {
                    Ok(Some(frame)) => {
                        self.messages.fetch_add(1, Ordering::Relaxed);
                        if let Err(bad) = self.take(&frame, &on_unasked) {
                            return self.end_wrong(&bad);
                        }
                    }
                    Ok(None) => break,
                    Err(bad) => return self.end_wrong(&bad),
                }
            }
        }
        self.end();
    }

    /// Somebody else reads or writes this socket, or the node's words are none.
    fn end_wrong(&self, bad: &BadFrame) {
        if self.is_alive() {
            tracing::warn!(reason = %bad, "wrong answer from the node; the connection ends");
        }
        self.end();
    }

    /// Gives a frame to whoever waits for it. An error: it is not for this end.
    fn take(&self, frame: &Frame, on_unasked: &impl Fn(Answer)) -> Result<(), BadFrame> {
        if frame.number == 0 {
            frame.check_unasked()?;
            if let Ok(answer) = Answer::decode(frame) {
                on_unasked(answer);
            }
            return Ok(());
        }
        let waiting = self.pending.lock().waiting.remove(&frame.number);
        let nobody = BadFrame::Digest { kind: frame.kind, number: frame.number };
        let mut waiting = waiting.ok_or(nobody)?;
        if let Err(crossed) = frame.check(waiting.asked) {
            // Before whoever asked goes on: nobody gets anything more of this connection.
            self.end_wrong(&crossed);
            (waiting.on_answer)(None);
            return Err(crossed);
        }
        // What cannot be understood is no answer.
        let refused = |bad| Answer::Refused(Refusal::BadRequest, format!("the node's answer: {bad}"));
        let answer = Answer::decode(frame).unwrap_or_else(refused);
        if (waiting.on_answer)(Some(answer)) {
            self.wait_on(frame.number, waiting);
        }
        Ok(())
    }

    /// More answers to a request are to come.
    fn wait_on(&self, number: u64, mut waiting: Waiting) {
        let mut pending = self.pending.lock();
        if pending.broken {
            drop(pending);
            (waiting.on_answer)(None);
        } else {
            pending.waiting.insert(number, waiting);
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if !self.process.is_current() {
            // The socket closes here, and is the parent's as before.
            return;
        }
        // Whoever wrote the arena over this connection held it, so nothing does now. A node that is
        // gone need not know.
        let mut last = std::mem::take(self.sending.get_mut());
        last.extend(Request::Bye.encode(0).encode());
        let sent = socket::send_some(&self.socket, &last).unwrap_or(last.len());
        if sent < last.len()
            && let Ok(socket) = self.socket.try_clone()
        {
            last.drain(..sent);
            say_when_it_goes_on(socket, last);
        }
    }
}

/// Tells a node that takes nothing in, however long it is stuck. If it dies, or there is no thread,
/// its slots have gone or go with this process.
fn say_when_it_goes_on(socket: OwnedFd, last: Vec<u8>) {
    let say = move || {
        let _ = socket::set_timeouts(&socket, None, None).and_then(|()| socket::send_all(&socket, &last));
    };
    let _ = std::thread::Builder::new().name("forebay-bye".into()).spawn(say);
}

#[cfg(test)]
mod tests {
    use crate::protocol::answer::{Answer, Found};
    use crate::protocol::frame::{Asked, Frame, Inbox};
    use crate::protocol::request::Request;
    use crate::protocol::socket;
    use crate::{Client, ClientOptions};
    use forebay_kv::ChunkId;
    use forebay_transfer::{Arena, Pages};
    use forebay_transfer::{Backing, Limits, MoverThread, Place};
    use rustix::fd::{AsFd, OwnedFd};
    use std::os::unix::net::UnixListener;
    use std::path::Path;
    use std::thread::JoinHandle;
    use std::time::{Duration, Instant};

    /// A node that says to each request what `answer` makes of it, as long as the client stays.
    fn node(path: &Path, answer: impl Fn(&Frame) -> Vec<Frame> + Send + 'static) -> JoinHandle<()> {
        let listener = UnixListener::bind(path).unwrap();
        std::thread::spawn(move || {
            let stream: OwnedFd = listener.accept().unwrap().0.into();
            let arena = Arena::new(1 << 20, Pages::Base).unwrap();
            let (mut inbox, mut bytes) = (Inbox::default(), [0; 4096]);
            while let Ok(received @ 1..) = socket::receive(&stream, &mut bytes) {
                inbox.put(&bytes[..received]);
                while let Some(frame) = inbox.next_frame().unwrap() {
                    if matches!(Request::decode(&frame), Ok(Request::Hello(_))) {
                        let welcome = Answer::Welcome { instance: [1; 16], arena_bytes: arena.len() as u64 };
                        socket::send_with(&stream, &welcome.encode(frame.asked()).encode(), arena.as_fd())
                            .unwrap();
                        continue;
                    }
                    answer(&frame).iter().for_each(|frame| drop(socket::send_all(&stream, &frame.encode())));
                }
            }
        })
    }

    fn found(asked: Asked) -> Frame {
        Answer::Found(Found { in_memory: 1, ..Found::default() }).encode(asked)
    }

    /// What a client finds of a chunk, and whether it stays connected; if it does not, a line says
    /// why.
    fn look(answer: impl Fn(&Frame) -> Vec<Frame> + Send + 'static) -> (usize, bool) {
        let (log, folder) = (testkit::Log::alone(), tempfile::tempdir().unwrap());
        let socket = folder.path().join("socket");
        let node = node(&socket, answer);
        let mover = MoverThread::spawn(Limits::default()).unwrap();
        let options = ClientOptions { answer_limit_us: 60_000_000, ..ClientOptions::new(&socket) };
        let client = Client::connect(&mover.handle(), Place::Host(0), options).unwrap();
        let (begun, found) = (Instant::now(), client.lookup(&[ChunkId::from_bytes([2; 32])]));
        assert!(begun.elapsed() < Duration::from_secs(30), "it was not waited for what never comes");
        let is_connected = client.is_connected();
        client.close();
        drop(client);
        node.join().unwrap();
        let fault = ["wrong answer from the node; the connection ends", "its digest is wrong"];
        assert_eq!(log.lines(&fault).len(), usize::from(!is_connected));
        (found, is_connected)
    }

    #[test]
    fn an_answer_that_names_what_was_asked_is_taken() {
        assert_eq!(look(|frame| vec![found(frame.asked())]), (1, true));
    }

    #[test]
    fn an_answer_to_what_another_asked_under_the_same_number_is_a_miss_and_ends_the_connection() {
        let crossed = |frame: &Frame| {
            // What a child of the client asks on the socket that both have.
            let other = Request::Lookup(vec![ChunkId::from_bytes([1; 32])]).encode(frame.number);
            vec![found(other.asked())]
        };
        assert_eq!(look(crossed), (0, false));
    }

    #[test]
    fn an_answer_under_a_number_that_nobody_asked_with_ends_the_connection() {
        let stray = |frame: &Frame| {
            let asked = Request::Lookup(vec![ChunkId::from_bytes([2; 32])]).encode(frame.number + 7).asked();
            vec![found(asked)]
        };
        assert_eq!(look(stray), (0, false));
    }

    #[test]
    fn bytes_of_two_answers_put_together_are_a_miss() {
        let torn = |frame: &Frame| {
            let mut head = found(frame.asked());
            head.body = Answer::Found(Found { in_memory: 9, ..Found::default() }).encode(frame.asked()).body;
            vec![head]
        };
        assert_eq!(look(torn), (0, false));
    }
}
