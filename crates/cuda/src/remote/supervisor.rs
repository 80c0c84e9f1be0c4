//! The thread behind an attachment: it keeps the connection to the node, hands memory on, and takes
//! the relays out of service when the node dies. A node that returns is attached again.

use super::error::NotAttached;
use super::memory::{self, Memories, Reach};
use super::relay_paths::{Ground, RelayPaths};
use super::relays_at::RelaysAt;
use super::ring::{self, Header};
use super::session::Session;
use super::shared::SharedFile;
use super::socket::{self, Bell, Ringer};
use super::wire::{self, Hex, Message, Offer, VERSION};
use crate::device::Device;
use crate::driver::Relaxed;
use crate::kernels::Kernels;
use forebay_transfer::listen::credentials;
use forebay_transfer::lock::{Condvar, Mutex};
use forebay_transfer::{Backoff, LogGate};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Between two attempts to attach.
const RETRY_AFTER: Duration = Duration::from_secs(1);
/// The same where the node will not or cannot have this engine: the first time, and at most.
const FIRST_BACKOFF: Duration = Duration::from_secs(2);
const BACKOFF_MAX: Duration = Duration::from_secs(60);
/// A node that takes longer for its welcome is said to be silent. It is waited for all the same.
const WELCOME_TIMEOUT: Duration = Duration::from_secs(5);
/// Between two looks at whether a connection that ended is quiet.
const LOOK: Duration = Duration::from_millis(5);
/// How long an attachment that ends waits for a node that hangs. What is in flight then is left to
/// it for good.
const LAST_WAIT: Duration = Duration::from_secs(15);
const RELAYS_MAX: usize = 64;

/// How an attachment stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Status {
    Attached {
        relays: usize,
    },
    /// None are; it is tried again.
    Detached {
        reason: String,
    },
}

/// What the thread and its attachment both have.
#[derive(Debug)]
pub struct Supervised {
    pub ringer: Arc<Ringer>,
    pub reach: Arc<Reach>,
    pub state: Mutex<State>,
    pub changed: Condvar,
    /// How often a connection was lost.
    pub losses: AtomicU64,
}

#[derive(Debug)]
pub struct State {
    pub status: Status,
    pub session: Option<Arc<Session>>,
    pub closing: bool,
}

pub struct Supervisor {
    shared: Arc<Supervised>,
    at: RelaysAt,
    device: Arc<Device>,
    bell: Bell,
    memories: Memories,
    relays: RelayPaths,
    /// For lines that say why there are no relays.
    unattached: LogGate,
}

impl Supervisor {
    /// One that nobody has told to begin.
    pub fn new(
        ground: Ground,
        kernels: &Arc<Kernels>,
        at: RelaysAt,
    ) -> io::Result<(Supervisor, Arc<Supervised>)> {
        let (ringer, bell) = socket::bell()?;
        let status = Status::Detached { reason: "not tried yet".into() };
        let shared = Arc::new(Supervised {
            ringer: Arc::new(ringer),
            reach: Arc::default(),
            state: Mutex::new(State { status, session: None, closing: false }),
            changed: Condvar::new(),
            losses: AtomicU64::new(0),
        });
        let closing = Arc::clone(&shared);
        let memories = Memories::new(&ground.mover, &shared.reach, move || closing.state.lock().closing);
        let supervisor = Supervisor {
            shared: Arc::clone(&shared),
            at,
            device: Arc::clone(kernels.device()),
            bell,
            memories,
            relays: RelayPaths::new(ground, kernels),
            unattached: LogGate::new(),
        };
        Ok((supervisor, shared))
    }

    /// Attaches, now and whenever a node returns, until the attachment ends.
    pub fn run(mut self) {
        let _relaxed = Relaxed::enter(self.device.driver());
        let mut backoff = Backoff::new(FIRST_BACKOFF, BACKOFF_MAX);
        while !self.is_closing() {
            let attached = self.attach();
            let pause = match &attached {
                Err(NotAttached::NoRelays | NotAttached::Refused(_) | NotAttached::Part { .. }) => {
                    backoff.pause()
                }
                _ => {
                    backoff.reset();
                    RETRY_AFTER
                }
            };
            match attached {
                Ok((session, relays)) => {
                    self.set_status(Status::Attached { relays });
                    let reason = self.watch(&session);
                    self.set_status(Status::Detached { reason });
                    self.detach(session);
                }
                Err(error) => self.set_status(Status::Detached { reason: error.to_string() }),
            }
            self.pause(pause);
        }
    }

    fn is_closing(&self) -> bool {
        self.shared.state.lock().closing
    }

    fn set_status(&self, status: Status) {
        let before = std::mem::replace(&mut self.shared.state.lock().status, status.clone());
        self.shared.changed.notify_all();
        self.tell(&before, &status);
    }

    fn tell(&self, before: &Status, now: &Status) {
        let (gpu, node) = (self.device.index(), self.at.socket.display());
        match (before, now) {
            (_, Status::Attached { relays }) => {
                tracing::info!(gpu, %node, relays, "relays of the node found")
            }
            (Status::Attached { .. }, Status::Detached { reason }) if !self.is_closing() => {
                self.shared.losses.fetch_add(1, Ordering::Relaxed);
                tracing::warn!(gpu, %node, reason, "relays of the node lost; copies go over own links");
            }
            (Status::Detached { reason: before }, Status::Detached { reason }) if before != reason => {
                if let Some(repeated) = self.unattached.pass() {
                    tracing::warn!(gpu, %node, repeated, reason, "no relays of the node");
                }
            }
            _ => {}
        }
    }

    /// Waits for a while, or until the attachment ends.
    fn pause(&mut self, limit: Duration) {
        let until = Instant::now() + limit;
        while !self.is_closing() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || socket::wait(&[self.bell.as_fd()], &[], Some(left)).is_err() {
                return;
            }
            self.bell.clear();
            // Memory that goes is not kept for want of a node. A mover that has ended has none.
            let _ = self.memories.follow(None);
        }
    }

    fn attach(&mut self) -> Result<(Arc<Session>, usize), NotAttached> {
        let (session, offers) = self.greet()?;
        let session = Arc::new(session);
        let introduced = self.memories.introduce(&session);
        match introduced.and_then(|()| self.relays.install_all(&session, &offers)) {
            Ok(relays) => {
                self.shared.state.lock().session = Some(Arc::clone(&session));
                Ok((session, relays))
            }
            Err(error) => {
                self.detach(session);
                Err(error)
            }
        }
    }

    fn greet(&mut self) -> Result<(Session, Vec<Offer>), NotAttached> {
        let at = &self.at;
        if self.device.is_part()? {
            return Err(NotAttached::Part { name: self.device.name()? });
        }
        let socket = socket::connect_to(&at.socket)?;
        let process = credentials(&socket)?.process;
        let (token, gpu) = (at.token.clone(), Hex(self.device.uuid()?));
        let hello = Message::Hello { version: VERSION, token, gpu };
        say_hello(&socket, &hello)?;
        self.wait_for_welcome(&socket, &process)?;
        let (answer, descriptors) = memory::hear(&socket)?;
        let Message::Welcome { relays } = answer else {
            return Err(NotAttached::Nonsense(format!("{answer:?}")));
        };
        let nonsense = |why: &str| NotAttached::Nonsense(why.into());
        let [ring, bell] =
            <[OwnedFd; 2]>::try_from(descriptors).map_err(|_| nonsense("no ring or no bell"))?;
        let queues = 2 * relays.len();
        if relays.len() > RELAYS_MAX || relays.iter().any(|offer| offer.staging_bytes().is_none()) {
            return Err(nonsense("relays that cannot be"));
        }
        let most_bytes = (ring::words(queues) * 8) as u64;
        let ring = SharedFile::open(ring, most_bytes).map_err(|error| nonsense(&error.to_string()))?;
        Header::find(ring.words(), queues).ok_or_else(|| nonsense("a ring of another version"))?;
        let ringer = Ringer::received(bell);
        Ok((Session::new(socket, process, ring, ringer, Arc::clone(&self.shared.ringer)), relays))
    }

    /// Waits for the answer to a hello, however long a node that hangs takes for it: it hears each
    /// hello in the end, and would keep staging for those that were given up.
    fn wait_for_welcome(&mut self, socket: &OwnedFd, process: &OwnedFd) -> Result<(), NotAttached> {
        let mut timeout = Some(WELCOME_TIMEOUT);
        loop {
            let readable = [socket.as_fd(), process.as_fd(), self.bell.as_fd()];
            match socket::wait(&readable, &[], timeout)?[..] {
                [false, false, true] => self.bell.clear(),
                [false, false, false] => {
                    self.set_status(Status::Detached { reason: "the node is silent".into() });
                    timeout = None;
                    continue;
                }
                [false, true, _] => return Err(NotAttached::Io(io::ErrorKind::ConnectionReset.into())),
                _ => return Ok(()),
            };
            if self.is_closing() {
                // So that the node keeps nothing for it, whenever it hears the hello.
                wire::send(socket, &Message::Bye, &[])?;
                return Err(NotAttached::Io(io::ErrorKind::Interrupted.into()));
            }
            self.memories.follow(None)?;
        }
    }

    /// Waits until a connection is of no more use. Says why.
    fn watch(&mut self, session: &Session) -> String {
        loop {
            let followed = self.memories.follow(Some(session));
            if self.is_closing() {
                return "it was ended here".into();
            }
            if session.is_down() {
                return "the node shows no sign of life".into();
            }
            if let Err(error) = followed {
                return error.to_string();
            }
            let readable = [self.bell.as_fd(), session.process.as_fd()];
            match socket::wait(&readable, &[session.socket.as_fd()], None).as_deref() {
                Ok([_, false, false]) => self.bell.clear(),
                _ => return "the node has ended it".into(),
            };
        }
    }

    /// Takes the relays out of service, and waits until nothing uses their staging any more. What
    /// is unfinished goes over other paths.
    fn detach(&mut self, session: Arc<Session>) {
        self.shared.state.lock().session = None;
        self.memories.part();
        self.relays.take_down();
        let begun = Instant::now();
        while !self.is_quiet(&session) {
            if self.is_closing() && begun.elapsed() > LAST_WAIT {
                self.relays.abandon();
                return std::mem::forget(session);
            }
            std::thread::sleep(LOOK);
        }
        self.relays.close_staging();
        // A node that is gone needs no goodbye.
        let _ = wire::send(&session.socket, &Message::Bye, &[]);
    }

    /// Whether nothing of a connection is in flight. Requests are waited for as long as the node is
    /// there to answer them.
    fn is_quiet(&self, session: &Session) -> bool {
        let now = Some(Duration::ZERO);
        let seen = socket::wait(&[session.process.as_fd()], &[session.socket.as_fd()], now);
        let (gone, parted) = seen.map_or((false, false), |seen| (seen[0], seen[1]));
        if gone || parted {
            session.take_down();
        }
        session.settle(gone);
        session.is_settled() && self.relays.is_idle()
    }
}

/// A node that refuses may be gone before it is told anything. What it said is there all the same.
fn say_hello(socket: &OwnedFd, hello: &Message) -> Result<(), NotAttached> {
    match wire::send(socket, hello, &[]) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
            memory::hear(socket).and(Err(NotAttached::Io(error)))
        }
        sent => Ok(sent?),
    }
}
