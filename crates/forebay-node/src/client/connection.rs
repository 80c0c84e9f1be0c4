//! One connection to one instance of a node: requests go out, answers find who waits for them, and its end fails everybody
//! at once. This file is glue over the socket; it must never know what a chunk is.
//!
//! A connection that broke stays as a value until nothing writes the arena that came with it any more. Only then does the
//! socket close, with a word to the node that the slots of this client are quiet. A node that is stuck gets it when it goes on.

use super::arena::NodeArena;
use super::{ClientOptions, ConnectError};
use crate::local::answer::{Answer, Refusal};
use crate::local::frame::{Frame, Inbox};
use crate::local::request::{Hello, Request};
use crate::local::socket;
use forebay_mover::{Backing, MoverHandle, Place};
use forebay_store::Arena;
use rustix::fd::OwnedFd;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Bytes that are received at a time.
const RECEIVE_BYTES: usize = 256 << 10;

/// What becomes of a request. `None`: the node is gone, or was.
pub type OnAnswer = Box<dyn FnOnce(Option<Answer>) + Send>;

/// A connection, alive or broken.
#[derive(Debug)]
pub struct Connection {
    socket: OwnedFd,
    /// Held while a frame is sent, so that frames do not mix. What is left of one that was cut off: nothing else may follow it.
    sending: Mutex<Vec<u8>>,
    pending: Mutex<Pending>,
    next_number: AtomicU64,
    /// The arena that came with it, of this life of the node.
    pub arena: Arc<NodeArena>,
}

/// Who waits for answers.
#[derive(Default)]
struct Pending {
    waiting: HashMap<u64, OnAnswer>,
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
        let patience = Some(Duration::from_micros(options.answer_limit_us.max(1)));
        let failed = |error| ConnectError::Socket { path: options.socket.clone(), error };
        let socket = socket::connect_to(&options.socket).map_err(failed)?;
        socket::set_patience(&socket, patience, patience).map_err(failed)?;
        let ClientOptions { token, name, tenant, .. } = options.clone();
        let hello = Request::Hello(Hello { token, name, tenant }).encode(0);
        // A node that has no room hangs up before it hears who asks, and says why.
        let said = socket::send_all(&socket, &hello.encode());
        let (answer, descriptor) =
            first_answer(&socket).map_err(|error| failed(said.err().unwrap_or(error)))?;
        let (instance, arena_bytes) = match Answer::decode(&answer) {
            Ok(Answer::Welcome { instance, arena_bytes }) => (instance, arena_bytes),
            Ok(Answer::Refused(Refusal::Draining | Refusal::Limit, why)) => {
                return Err(ConnectError::Busy(why));
            }
            Ok(Answer::Refused(_, why)) => return Err(ConnectError::Refused(why)),
            other => return Err(ConnectError::Protocol(format!("no welcome but {other:?}"))),
        };
        let descriptor = descriptor.ok_or_else(|| ConnectError::Protocol("no arena".into()))?;
        let arena = Arena::attach(descriptor)?;
        if arena.len() as u64 != arena_bytes {
            let text = format!("an arena of {} bytes, not {arena_bytes}", arena.len());
            return Err(ConnectError::Protocol(text));
        }
        socket::set_patience(&socket, None, patience).map_err(failed)?;
        let memory = Arc::new(arena);
        let region = mover.register(place, Arc::clone(&memory) as Arc<dyn Backing>)?;
        Ok(Connection {
            socket,
            sending: Mutex::default(),
            pending: Mutex::default(),
            next_number: AtomicU64::new(1),
            arena: Arc::new(NodeArena::new(region, memory, instance)),
        })
    }

    fn pending(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks. `on_answer` is called exactly once, on the connection's thread or, if it is broken or the node would hang up, on this
    /// one.
    pub fn ask(&self, request: &Request, on_answer: impl FnOnce(Option<Answer>) + Send + 'static) {
        if let Err(bad) = request.check() {
            return on_answer(Some(Answer::Refused(Refusal::BadWords, bad.to_string())));
        }
        let number = self.next_number.fetch_add(1, Ordering::Relaxed);
        let mut pending = self.pending();
        if pending.broken {
            drop(pending);
            return on_answer(None);
        }
        if pending.waiting.is_empty() {
            pending.heard = Some(Instant::now());
        }
        pending.waiting.insert(number, Box::new(on_answer));
        drop(pending);
        self.send(&request.encode(number));
    }

    /// Says something that is not answered, unless the node would hang up.
    pub fn tell(&self, request: &Request) {
        if self.is_alive() && request.check().is_ok() {
            self.send(&request.encode(0));
        }
    }

    fn send(&self, frame: &Frame) {
        let bytes = frame.encode();
        let (mut rest, mut cut_off) =
            (&bytes[..], self.sending.lock().unwrap_or_else(PoisonError::into_inner));
        if !self.is_alive() {
            return;
        }
        let sent = socket::send_from(&self.socket, &mut rest);
        if sent.is_err() {
            // Whoever sends next finds it so, and neither waits as long nor goes on behind half a frame.
            self.pending().broken = true;
            if rest.len() < bytes.len() {
                cut_off.extend_from_slice(rest);
            }
        }
        drop(cut_off);
        if sent.is_err() {
            self.end();
        }
    }

    /// Whether the node is there, as far as is known.
    pub fn is_alive(&self) -> bool {
        !self.pending().broken
    }

    /// For how long the node has been silent although somebody waits.
    pub fn silent_for(&self) -> Option<Duration> {
        let pending = self.pending();
        pending.heard.filter(|_| !pending.waiting.is_empty()).map(|heard| heard.elapsed())
    }

    /// The connection is of no use any more: everybody who waits is told, and nobody gets anything of it from now on.
    pub fn end(&self) {
        let waiting = {
            let mut pending = self.pending();
            pending.broken = true;
            std::mem::take(&mut pending.waiting)
        };
        socket::hang_up(&self.socket);
        waiting.into_values().for_each(|on_answer| on_answer(None));
    }

    /// Takes in answers until the end, and gives those that nobody has asked for to `on_unasked`.
    pub fn receive(&self, on_unasked: impl Fn(Answer)) {
        let (mut inbox, mut bytes) = (Inbox::default(), vec![0; RECEIVE_BYTES]);
        while let Ok(received @ 1..) = socket::receive(&self.socket, &mut bytes) {
            inbox.put(&bytes[..received]);
            self.pending().heard = Some(Instant::now());
            loop {
                match inbox.next() {
                    Ok(Some(frame)) if frame.number == 0 => {
                        if let Ok(answer) = Answer::decode(&frame) {
                            on_unasked(answer);
                        }
                    }
                    Ok(Some(frame)) => self.dispatch(&frame),
                    Ok(None) => break,
                    Err(_) => return self.end(),
                }
            }
        }
        self.end();
    }

    fn dispatch(&self, frame: &Frame) {
        let waiting = self.pending().waiting.remove(&frame.number);
        let Some(on_answer) = waiting else { return };
        // What cannot be understood is no answer.
        let refused = |bad| Answer::Refused(Refusal::BadWords, format!("the node's answer: {bad}"));
        on_answer(Some(Answer::decode(frame).unwrap_or_else(refused)));
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // Whoever wrote the arena over this connection held it, so nothing does now. A node that is gone need not know.
        let mut last = std::mem::take(self.sending.get_mut().unwrap_or_else(PoisonError::into_inner));
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

/// Tells a node that takes nothing in, however long it is stuck. If it dies, or there is no thread, its slots have gone or go with
/// this process.
fn say_when_it_goes_on(socket: OwnedFd, last: Vec<u8>) {
    let say = move || {
        let _ = socket::set_patience(&socket, None, None).and_then(|()| socket::send_all(&socket, &last));
    };
    let _ = std::thread::Builder::new().name("forebay-bye".into()).spawn(say);
}

/// The first frame, and the descriptor that came with it.
fn first_answer(socket: &OwnedFd) -> std::io::Result<(Frame, Option<OwnedFd>)> {
    let (mut inbox, mut bytes) = (Inbox::default(), [0; 4096]);
    let mut descriptor = None;
    loop {
        let (received, came) = socket::receive_with(socket, &mut bytes)?;
        descriptor = descriptor.or(came);
        if received == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        inbox.put(&bytes[..received]);
        if let Some(frame) = inbox.next().map_err(std::io::Error::other)? {
            return Ok((frame, descriptor));
        }
    }
}
