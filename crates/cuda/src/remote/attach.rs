//! The engine's side: attaches a copier's GPU to the relays of the node's process, gives its mover
//! a path for each, and takes them out of service when the node dies; a node that returns is
//! attached again.

use super::link::{Port, RemoteLink};
use super::memory::{self, Memories, Reach};
use super::nonce;
use super::ring::{self, Header};
use super::session::{OwnCopy, Session};
use super::shared::SharedFile;
use super::socket::{self, Bell, Ringer};
use super::wire::{self, Hex, Message, Offer, Uuid, VERSION};
use crate::addresses::Addresses;
use crate::copier::{SHARED, WINDOW_LOTS, spec};
use crate::device::{Device, ForeignMemory, Stream};
use crate::driver::{CudaError, Relaxed, abi::IpcHandle};
use crate::kernels::{Kernels, Piece};
use crate::links::{Direction, PeerLink};
use crate::peers;
use crate::pinned::{self, OnChange};
use crate::poller::Tracks;
use forebay_transfer::listen::{NotWatched, credentials};
use forebay_transfer::{
    Backoff, Closed, LinkId, LogGate, MoverHandle, PathError, PathSpec, Place, RegionId, Span, Staging,
};
use parking_lot::{Condvar, Mutex};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use thiserror::Error;

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
/// Relays at most.
const RELAYS_MAX: usize = 64;
/// Where the staging of the first relay is, for the mover: no GPU has such an ordinal.
const FIRST_RELAY: u16 = 0x8000;

/// Where a process reads which node's relays to use, unless it says so itself: the path of the
/// socket.
pub const RELAYS_VARIABLE: &str = "FOREBAY_RELAYS";
/// Where it reads in which file the token is, if the node wants one.
pub const TOKEN_VARIABLE: &str = "FOREBAY_TOKEN_FILE";

/// Which node's relays a copier uses beside its own.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum NodeRelays {
    /// Those that the environment names, if any ([`RelaysAt::from_environment`]).
    #[default]
    FromEnvironment,
    /// None, whatever the environment says: for a copier none of whose copies would go over them.
    None,
    At(RelaysAt),
}

/// Whom to attach to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RelaysAt {
    /// The node's socket for relays.
    pub socket: PathBuf,
    /// What the node wants to be shown, if anything.
    pub token: String,
}

impl RelaysAt {
    /// What the environment says; nothing where it names no socket.
    pub fn from_environment() -> io::Result<Option<RelaysAt>> {
        let Some(socket) = std::env::var_os(RELAYS_VARIABLE).filter(|path| !path.is_empty()) else {
            return Ok(None);
        };
        let token = match std::env::var_os(TOKEN_VARIABLE).filter(|path| !path.is_empty()) {
            Some(file) => std::fs::read_to_string(file)?.trim_end().to_owned(),
            None => String::new(),
        };
        Ok(Some(RelaysAt { socket: socket.into(), token }))
    }
}

/// Why something did not work with the node.
#[derive(Debug, Error)]
pub enum NotAttached {
    /// The node will not.
    #[error("the node refuses: {0}")]
    Refused(String),
    /// What the node says makes no sense.
    #[error("the node's answer cannot be used: {0}")]
    Nonsense(String),
    /// Nothing to gain, or staging of other sizes than before.
    #[error("none of the node's relays is another GPU that this one reaches, with staging as it was before")]
    NoRelays,
    /// There is no node, or no talking to it.
    #[error("the node: {0}")]
    Io(#[from] io::Error),
    /// It would not be seen when the node ends.
    #[error("the node's process cannot be watched: {0}")]
    Unwatched(#[from] NotWatched),
    /// The driver.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// The copier's mover has ended.
    #[error(transparent)]
    Closed(#[from] Closed),
    /// A path does not fit together.
    #[error(transparent)]
    Route(#[from] PathError),
}

/// How an attachment stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Status {
    /// Relays are in use.
    Attached { relays: usize },
    /// None are; it is tried again.
    Detached {
        /// Why.
        reason: String,
    },
}

/// What of a copier an attachment builds on.
#[derive(Debug, Clone)]
pub(crate) struct Ground {
    pub mover: MoverHandle,
    pub addresses: Arc<Addresses>,
    pub tracks: Tracks,
    /// GPUs that the copier has itself: it needs no other process to go over them.
    pub own: Vec<Uuid>,
}

/// A copier's GPU and the relays of the node's process. Dropping it takes them out of service.
pub struct Attachment {
    inner: Arc<Inner>,
    device: u16,
    thread: Option<JoinHandle<()>>,
    /// Called when there is more memory to give to the node, or less.
    _on_change: Arc<OnChange>,
}

#[derive(Debug)]
struct Inner {
    ground: Ground,
    at: RelaysAt,
    ringer: Arc<Ringer>,
    reach: Arc<Reach>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    status: Status,
    session: Option<Arc<Session>>,
    closing: bool,
}

impl Attachment {
    /// Attaches in the background, now and whenever a node returns. The node is given all memory
    /// that is published in this process, now and later.
    pub(crate) fn start(ground: Ground, kernels: &Arc<Kernels>, at: RelaysAt) -> io::Result<Attachment> {
        let (kernels, device) = (Arc::clone(kernels), Arc::clone(kernels.device()));
        let (ringer, bell) = socket::bell()?;
        let status = Status::Detached { reason: "not tried yet".into() };
        let inner = Arc::new(Inner {
            ground,
            at,
            ringer: Arc::new(ringer),
            reach: Arc::default(),
            state: Mutex::new(State { status, session: None, closing: false }),
            changed: Condvar::new(),
        });
        let ringer = Arc::clone(&inner.ringer);
        let on_change: Arc<OnChange> = Arc::new(move || ringer.ring());
        pinned::on_change(&on_change);
        let its = Arc::clone(&inner);
        let memories = Memories::new(&inner.ground.mover, &inner.reach, move || its.state.lock().closing);
        let index = device.index();
        let supervisor = Supervisor {
            inner: Arc::clone(&inner),
            device,
            kernels,
            bell,
            memories,
            relays: vec![],
            untrusted: vec![],
            unattached: LogGate::new(),
        };
        let thread =
            std::thread::Builder::new().name("forebay-attach".into()).spawn(move || supervisor.run())?;
        Ok(Attachment { inner, device: index, thread: Some(thread), _on_change: on_change })
    }

    /// The GPU that is relayed for, by its ordinal.
    pub fn device(&self) -> u16 {
        self.device
    }

    /// How it stands.
    pub fn status(&self) -> Status {
        self.inner.state.lock().status.clone()
    }

    /// Waits until the status is one that `wanted` wants; gives the last one, wanted or not.
    pub fn wait(&self, limit: Duration, wanted: impl Fn(&Status) -> bool) -> Status {
        let mut state = self.inner.state.lock();
        self.inner.changed.wait_while_for(&mut state, |state| !wanted(&state.status), limit);
        state.status.clone()
    }

    /// Bytes of host memory that relays reach now. It takes the node a moment to pin what is new.
    pub fn shared_bytes(&self) -> u64 {
        self.inner.reach.bytes()
    }

    /// Where the host sides of pieces lie, if relays reach them all now: regions whose place is
    /// [`SHARED`].
    pub(crate) fn spans(&self, direction: Direction, pieces: &[Piece]) -> Option<Vec<Span>> {
        self.inner.reach.spans(direction, pieces)
    }

    /// Tells the node, until the value is dropped, that this GPU's PCIe link is in use by its own
    /// engine.
    pub(crate) fn own_copy(&self, direction: Direction) -> Option<OwnCopy> {
        let session = self.inner.state.lock().session.clone();
        session.map(|session| OwnCopy::new(session, direction))
    }
}

impl std::fmt::Debug for Attachment {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Attachment").field("device", &self.device).field("status", &self.status()).finish()
    }
}

impl Drop for Attachment {
    fn drop(&mut self) {
        self.inner.state.lock().closing = true;
        self.inner.ringer.ring();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has already been printed; there is nobody left to tell.
            let _ = thread.join();
        }
    }
}

/// The thread that keeps the connection.
struct Supervisor {
    inner: Arc<Inner>,
    device: Arc<Device>,
    kernels: Arc<Kernels>,
    bell: Bell,
    memories: Memories,
    relays: Vec<Relay>,
    /// Relays whose memory this GPU was seen to reach wrong: they are never used.
    untrusted: Vec<Uuid>,
    /// For lines that say why there are no relays.
    unattached: LogGate,
}

/// A relay's links, for good, and its staging, while there is a connection.
struct Relay {
    gpu: Uuid,
    slot_bytes: u64,
    slots: u32,
    /// In the order of [`Direction::BOTH`].
    directions: [RelayDirection; 2],
    memory: Option<ForeignMemory>,
}

struct RelayDirection {
    staging: RegionId,
    port: Arc<Port>,
    /// The relay's PCIe link and the NVLink pair.
    links: [LinkId; 2],
}

impl Supervisor {
    fn run(mut self) {
        let _relaxed = Relaxed::enter(self.device.driver());
        let mut backoff = Backoff::new(FIRST_BACKOFF, BACKOFF_MAX);
        while !self.is_closing() {
            let attached = self.attach();
            let pause = match &attached {
                Err(NotAttached::NoRelays | NotAttached::Refused(_)) => backoff.pause(),
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
        self.inner.state.lock().closing
    }

    fn set_status(&self, status: Status) {
        let before = std::mem::replace(&mut self.inner.state.lock().status, status.clone());
        self.inner.changed.notify_all();
        self.log(&before, &status);
    }

    fn log(&self, before: &Status, now: &Status) {
        let (gpu, node) = (self.device.index(), self.inner.at.socket.display());
        match (before, now) {
            (_, Status::Attached { relays }) => {
                tracing::info!(gpu, %node, relays, "relays of the node found")
            }
            (Status::Attached { .. }, Status::Detached { reason }) if !self.is_closing() => {
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
        match introduced.and_then(|()| self.install_all(&session, &offers)) {
            Ok(relays) => {
                self.inner.state.lock().session = Some(Arc::clone(&session));
                Ok((session, relays))
            }
            Err(error) => {
                self.detach(session);
                Err(error)
            }
        }
    }

    /// Connects and says hello.
    fn greet(&mut self) -> Result<(Session, Vec<Offer>), NotAttached> {
        let at = &self.inner.at;
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
        Ok((Session::new(socket, process, ring, ringer, Arc::clone(&self.inner.ringer)), relays))
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

    /// Puts all relays into service that this GPU reaches and the copier does not have itself. Says
    /// how many.
    fn install_all(&mut self, session: &Arc<Session>, offers: &[Offer]) -> Result<usize, NotAttached> {
        let mut installed = 0;
        let others = |offer: &Offer| !self.inner.ground.own.contains(&offer.gpu);
        let offers: Vec<_> = offers.iter().enumerate().filter(|(_, offer)| others(offer)).collect();
        for (index, offer) in offers {
            let Some(memory) = self.open(offer)? else { continue };
            let relay = match self.relays.iter().position(|relay| relay.gpu == offer.gpu) {
                Some(known) => known,
                None => self.add_relay(offer)?,
            };
            installed += usize::from(self.install(relay, memory, session, index, offer)?);
        }
        let none = || NotAttached::NoRelays;
        (installed > 0).then_some(installed).ok_or_else(none)
    }

    /// Opens a relay's staging. `None` where this GPU does not reach it.
    fn open(&mut self, offer: &Offer) -> Result<Option<ForeignMemory>, NotAttached> {
        if self.untrusted.contains(&offer.gpu) {
            return Ok(None);
        }
        let Ok(memory) = ForeignMemory::open(&self.device, IpcHandle(offer.handle.0)) else {
            return Ok(None);
        };
        let read = nonce::read(&self.device, memory.address())?;
        if read != offer.nonce.0 || offer.staging_bytes().is_none_or(|bytes| bytes < peers::OPENED_BYTES) {
            return Ok(None);
        }
        if let Err(why) = peers::check_opened(&self.kernels, memory.address()) {
            let (gpu, relay, advice) = (self.device.index(), offer.gpu, peers::ADVICE);
            tracing::warn!(gpu, %relay, advice, reason = %why, "relay of the node is not used");
            self.untrusted.push(offer.gpu);
            return Ok(None);
        }
        Ok(Some(memory))
    }

    /// Puts a relay into service. Staging of other sizes than its paths have is not used.
    fn install(
        &mut self,
        relay: usize,
        memory: ForeignMemory,
        session: &Arc<Session>,
        index: usize,
        offer: &Offer,
    ) -> Result<bool, NotAttached> {
        let ground = &self.inner.ground;
        let relay = &mut self.relays[relay];
        if (relay.slot_bytes, relay.slots) != (offer.slot_bytes, offer.slots) || relay.memory.is_some() {
            return Ok(false);
        }
        let staging_bytes = relay.slot_bytes * u64::from(relay.slots);
        for (nth, direction) in relay.directions.iter().enumerate() {
            let address = memory.address() + nth as u64 * staging_bytes;
            ground.addresses.insert(direction.staging, address, staging_bytes);
            direction.port.connect(session, 2 * index + nth);
        }
        relay.memory = Some(memory);
        for link in relay.links() {
            ground.mover.set_link_up(link, true)?;
        }
        Ok(true)
    }

    /// Gives the mover links and paths of a relay that was never seen before, out of service.
    fn add_relay(&mut self, offer: &Offer) -> Result<usize, NotAttached> {
        let index = self.relays.len();
        let [there, back] = Direction::BOTH;
        // What the driver may refuse comes first, since links and paths are for good.
        let (to_gpu, from_gpu) = (self.pair()?, self.pair()?);
        let directions = [
            self.add_direction(index, offer, there, to_gpu)?,
            self.add_direction(index, offer, back, from_gpu)?,
        ];
        let Offer { gpu, slot_bytes, slots, .. } = *offer;
        self.relays.push(Relay { gpu, slot_bytes, slots, directions, memory: None });
        Ok(index)
    }

    /// The NVLink pair between this GPU and staging.
    fn pair(&self) -> Result<PeerLink, CudaError> {
        let Ground { addresses, tracks, .. } = &self.inner.ground;
        let [engine, kernel] = [Stream::new(&self.device)?, Stream::new(&self.device)?];
        let (engine, kernel) = (tracks.track(engine), tracks.track(kernel));
        PeerLink::new(Some(engine), kernel, &self.kernels, addresses, WINDOW_LOTS)
    }

    fn add_direction(
        &self,
        index: usize,
        offer: &Offer,
        direction: Direction,
        pair: PeerLink,
    ) -> Result<RelayDirection, NotAttached> {
        let ground = &self.inner.ground;
        let (handle, tracks) = (&ground.mover, &ground.tracks);
        let place = Place::Device(FIRST_RELAY + index as u16);
        let Offer { slot_bytes, slots, .. } = *offer;
        let staging = handle.register_opaque(place, slot_bytes * u64::from(slots))?;
        let port = Arc::<Port>::default();
        let remote = RemoteLink::new(direction, &port, tracks.watch_track());
        let (short, gpu) = (String::from(offer.gpu).split_off(24), self.device.index());
        let name = match direction {
            Direction::HostToDevice => "h2d",
            Direction::DeviceToHost => "d2h",
        };
        let remote = handle.add_link(spec(format!("relay-{short}.{name}")), Box::new(remote))?;
        let pair = handle.add_link(spec(format!("relay-{short}.gpu{gpu}.{name}")), Box::new(pair))?;
        let links = [remote, pair];
        for link in links {
            handle.set_link_up(link, false)?;
        }
        let hops = match direction {
            Direction::HostToDevice => [remote, pair],
            Direction::DeviceToHost => [pair, remote],
        };
        let (from, to) = direction.ends(SHARED, gpu);
        let slots = Staging { region: staging, slot_bytes, slots };
        handle.add_path(PathSpec::relayed(from, to, hops, slots, false))??;
        Ok(RelayDirection { staging, port, links })
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
        self.inner.state.lock().session = None;
        self.memories.part();
        let handle = &self.inner.ground.mover;
        for link in self.relays.iter().flat_map(Relay::links) {
            // A mover that has ended starts nothing more.
            let _ = handle.set_link_up(link, false);
        }
        self.relays
            .iter()
            .flat_map(|relay| &relay.directions)
            .for_each(|direction| direction.port.disconnect());
        let begun = Instant::now();
        while !self.is_quiet(&session) {
            if self.is_closing() && begun.elapsed() > LAST_WAIT {
                return std::mem::forget((session, self.relays.drain(..).collect::<Vec<_>>()));
            }
            std::thread::sleep(LOOK);
        }
        for relay in &mut self.relays {
            relay.directions.iter().for_each(|one| self.inner.ground.addresses.remove(one.staging));
            relay.memory = None;
        }
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
        let idle = self.inner.ground.mover.telemetry().map_or(true, |telemetry| {
            let mut ours = self.relays.iter().flat_map(Relay::links);
            ours.all(|link| telemetry.links[link.index()].in_flight_lots == 0)
        });
        session.is_settled() && idle
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

impl Relay {
    fn links(&self) -> impl Iterator<Item = LinkId> {
        self.directions.iter().flat_map(|direction| direction.links)
    }
}
