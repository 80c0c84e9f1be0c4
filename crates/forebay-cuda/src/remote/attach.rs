//! The engine's side: attaches a copier's GPU to the relays of the node's process, gives its mover a route for each, and takes
//! them out of service when the node dies; a node that returns is attached again. This file knows routes, their staging and
//! the order in which they come and go; it must never know what a request looks like, nor what is copied.

use super::link::{Port, RemoteLink};
use super::ring::{self, Header};
use super::session::{Known, Session};
use super::shared::SharedFile;
use super::socket::{self, Bell, Ringer};
use super::wire::{self, Hex, Offer, Uuid, VERSION, Word};
use super::{lock, nonce};
use crate::copier::{Copier, SHARED, WINDOW_LOTS, spec};
use crate::device::{Device, ForeignMemory, Stream};
use crate::driver::{CudaError, Relaxed, abi::IpcHandle};
use crate::kernels::Kernels;
use crate::links::{Direction, PeerLink};
use forebay_mover::{Backing, Closed, LinkId, Place, RegionId, RouteError, RouteSpec, Staging};
use rustix::fs::fstat;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use thiserror::Error;

/// How long a node may take for a word. Memory has to be pinned, which takes seconds for what is large.
const PATIENCE: Duration = Duration::from_secs(5);
const PINNING_PATIENCE: Duration = Duration::from_secs(300);
/// Between two attempts to attach.
const REST: Duration = Duration::from_secs(1);
/// Between two looks at whether a connection that ended is quiet.
const LOOK: Duration = Duration::from_millis(5);
/// How long an attachment that ends waits for a node that hangs. What is in flight then is left to it for good.
const LAST_WAIT: Duration = Duration::from_secs(15);
/// Relays at most.
const RELAYS_MAX: usize = 64;
/// Where the staging of the first relay is, for the mover: no GPU has such an ordinal.
const FIRST_RELAY: u16 = 0x8000;

/// Whom to attach to.
#[derive(Debug, Clone)]
pub struct AttachOptions {
    /// The node's socket for relays.
    pub socket: PathBuf,
    /// What the node wants to be shown, if anything.
    pub token: String,
    /// The GPU of the copier that is to be relayed for, by ordinal.
    pub device: u16,
}

/// Why something did not work with the node.
#[derive(Debug, Error)]
pub enum NotAttached {
    /// The copier has no such GPU.
    #[error("device: the copier has no GPU {0}")]
    NoDevice(u16),
    /// The node will not.
    #[error("the node refuses: {0}")]
    Refused(String),
    /// What the node says makes no sense.
    #[error("the node's answer cannot be used: {0}")]
    Nonsense(String),
    /// There is no node, or no talking to it.
    #[error("the node: {0}")]
    Io(#[from] io::Error),
    /// The driver.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// The copier's mover has ended.
    #[error(transparent)]
    Closed(#[from] Closed),
    /// A route does not fit together.
    #[error(transparent)]
    Route(#[from] RouteError),
}

/// How an attachment stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Status {
    /// Relays are in use.
    Attached {
        /// How many.
        relays: usize,
    },
    /// None are; it is tried again.
    Detached {
        /// Why.
        reason: String,
    },
}

/// A copier's GPU and the relays of the node's process. Dropping it takes them out of service.
#[derive(Debug)]
pub struct Attachment {
    inner: Arc<Inner>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Inner {
    copier: Arc<Copier>,
    options: AttachOptions,
    ringer: Arc<Ringer>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    status: Status,
    session: Option<Arc<Session>>,
    files: Vec<File>,
    next_file: u64,
    closing: bool,
}

/// A file that the node maps while there is a connection, and the regions in it.
#[derive(Debug)]
struct File {
    number: u64,
    /// Device and inode.
    identity: (u64, u64),
    file: OwnedFd,
    regions: Vec<(RegionId, u64)>,
}

impl Attachment {
    /// Attaches in the background, now and whenever a node returns.
    pub fn start(copier: &Arc<Copier>, options: AttachOptions) -> Result<Attachment, NotAttached> {
        let kernels = copier.kernels(options.device).ok_or(NotAttached::NoDevice(options.device))?;
        let (kernels, device) = (Arc::clone(kernels), Arc::clone(kernels.device()));
        let (ringer, bell) = socket::bell()?;
        let status = Status::Detached { reason: "not tried yet".into() };
        let state = State { status, session: None, files: Vec::new(), next_file: 0, closing: false };
        let inner = Arc::new(Inner {
            copier: Arc::clone(copier),
            options,
            ringer: Arc::new(ringer),
            state: Mutex::new(state),
            changed: Condvar::new(),
        });
        let keeper = Keeper { inner: Arc::clone(&inner), device, kernels, bell, relays: Vec::new() };
        let thread = std::thread::Builder::new().name("forebay-attach".into()).spawn(move || keeper.run())?;
        Ok(Attachment { inner, thread: Some(thread) })
    }

    /// How it stands.
    pub fn status(&self) -> Status {
        lock(&self.inner.state).status.clone()
    }

    /// Waits until the status is one that `wanted` wants; gives the last one, wanted or not.
    pub fn wait(&self, limit: Duration, wanted: impl Fn(&Status) -> bool) -> Status {
        let state = lock(&self.inner.state);
        let waited = self.inner.changed.wait_timeout_while(state, limit, |state| !wanted(&state.status));
        waited.unwrap_or_else(PoisonError::into_inner).0.status.clone()
    }

    /// Registers pinned host memory that lies in a file from `offset` on, so that relays can reach it too: place
    /// [`SHARED`]. Without a connection it is given to the node once there is one.
    pub fn register(
        &self,
        memory: Arc<dyn Backing>,
        file: BorrowedFd<'_>,
        offset: u64,
    ) -> Result<RegionId, NotAttached> {
        let handle = self.inner.copier.mover();
        let region = handle.register(SHARED, memory)?;
        let added = lock(&self.inner.state).add(region, file, offset);
        if added.is_err() {
            // Nobody has been told of the region, so nothing uses it.
            let _ = handle.unregister(region)?;
        }
        added.map(|()| region)
    }

    /// Forgets a region, unless a transfer uses it.
    pub fn unregister(&self, region: RegionId) -> Result<Result<(), forebay_mover::Refused>, Closed> {
        let gone = self.inner.copier.unregister(region)?;
        if gone.is_ok() {
            lock(&self.inner.state).remove(region);
        }
        Ok(gone)
    }
}

impl Drop for Attachment {
    fn drop(&mut self) {
        lock(&self.inner.state).closing = true;
        self.inner.ringer.ring();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has already been printed; there is nobody left to tell.
            let _ = thread.join();
        }
    }
}

impl State {
    fn add(&mut self, region: RegionId, file: BorrowedFd<'_>, offset: u64) -> Result<(), NotAttached> {
        let stat = fstat(file).map_err(io::Error::from)?;
        let identity = (stat.st_dev, stat.st_ino);
        let index = match self.files.iter().position(|known| known.identity == identity) {
            Some(index) => index,
            None => self.add_file(identity, file.try_clone_to_owned()?)?,
        };
        let file = &mut self.files[index];
        file.regions.push((region, offset));
        if let Some(session) = &self.session {
            session.know(region, Known { memory: file.number, offset });
        }
        Ok(())
    }

    fn add_file(&mut self, identity: (u64, u64), file: OwnedFd) -> Result<usize, NotAttached> {
        let file = File { number: self.next_file, identity, file, regions: Vec::new() };
        self.next_file += 1;
        if let Some(session) = &self.session {
            match give(session, &file) {
                // The keeper sees to it, and gives the memory to the next node.
                Err(NotAttached::Io(_)) => session.take_down(),
                given => given?,
            }
        }
        self.files.push(file);
        Ok(self.files.len() - 1)
    }

    fn remove(&mut self, region: RegionId) {
        for file in &mut self.files {
            file.regions.retain(|(known, _)| *known != region);
        }
        if let Some(session) = &self.session {
            session.forget(region);
            for file in self.files.iter().filter(|file| file.regions.is_empty()) {
                if ask(&session.socket, &Word::Forget { memory: file.number }, &[], PATIENCE).is_err() {
                    session.take_down();
                }
            }
        }
        self.files.retain(|file| !file.regions.is_empty());
    }
}

/// Gives a node memory, and notes the regions in it.
fn give(session: &Session, file: &File) -> Result<(), NotAttached> {
    let word = Word::Memory { memory: file.number };
    match ask(&session.socket, &word, &[file.file.as_fd()], PINNING_PATIENCE)?.0 {
        Word::Done => {}
        word => return Err(NotAttached::Nonsense(format!("{word:?}"))),
    }
    for (region, offset) in &file.regions {
        session.know(*region, Known { memory: file.number, offset: *offset });
    }
    Ok(())
}

/// Says a word and hears the answer.
fn ask(
    socket: &OwnedFd,
    word: &Word,
    descriptors: &[BorrowedFd<'_>],
    patience: Duration,
) -> Result<(Word, Vec<OwnedFd>), NotAttached> {
    socket::set_patience(socket, Some(patience))?;
    wire::send(socket, word, descriptors)?;
    match wire::receive(socket)? {
        (Word::Refused { reason }, _) => Err(NotAttached::Refused(reason)),
        answer => Ok(answer),
    }
}

/// The thread that keeps the connection.
struct Keeper {
    inner: Arc<Inner>,
    device: Arc<Device>,
    kernels: Arc<Kernels>,
    bell: Bell,
    relays: Vec<Relay>,
}

/// A relay's links, for good, and its staging, while there is a connection.
struct Relay {
    gpu: Uuid,
    slot_bytes: u64,
    slots: u32,
    /// In the order of [`Direction::BOTH`].
    ways: [Way; 2],
    memory: Option<ForeignMemory>,
}

/// One direction of a relay.
struct Way {
    staging: RegionId,
    port: Arc<Port>,
    /// The lane and the NVLink pair.
    links: [LinkId; 2],
}

impl Keeper {
    fn run(mut self) {
        let _relaxed = Relaxed::enter(self.device.driver());
        while !self.is_closing() {
            match self.attach() {
                Ok((session, relays)) => {
                    self.set_status(Status::Attached { relays });
                    let reason = self.watch(&session);
                    self.set_status(Status::Detached { reason });
                    self.detach(session);
                }
                Err(error) => self.set_status(Status::Detached { reason: error.to_string() }),
            }
            self.rest(REST);
        }
    }

    fn is_closing(&self) -> bool {
        lock(&self.inner.state).closing
    }

    fn set_status(&self, status: Status) {
        lock(&self.inner.state).status = status;
        self.inner.changed.notify_all();
    }

    /// Waits for a while, or until the attachment ends.
    fn rest(&self, limit: Duration) {
        let until = Instant::now() + limit;
        while !self.is_closing() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || socket::wait(&[self.bell.as_fd()], &[], Some(left)).is_err() {
                return;
            }
            self.bell.clear();
        }
    }

    fn attach(&mut self) -> Result<(Arc<Session>, usize), NotAttached> {
        let (session, offers) = self.greet()?;
        let session = Arc::new(session);
        let attached = self.announce(&session).and_then(|()| self.install_all(&session, &offers));
        match attached {
            Ok(relays) => Ok((session, relays)),
            Err(error) => {
                self.detach(session);
                Err(error)
            }
        }
    }

    /// Gives the node all memory. What is registered from now on is given to it then.
    fn announce(&self, session: &Arc<Session>) -> Result<(), NotAttached> {
        let mut state = lock(&self.inner.state);
        state.files.iter().try_for_each(|file| give(session, file))?;
        state.session = Some(Arc::clone(session));
        Ok(())
    }

    /// Connects and says hello.
    fn greet(&self) -> Result<(Session, Vec<Offer>), NotAttached> {
        let options = &self.inner.options;
        let socket = socket::connect_to(&options.socket)?;
        let process = socket::credentials(&socket)?.process;
        let (token, gpu) = (options.token.clone(), Hex(self.device.uuid()?));
        let hello = Word::Hello { version: VERSION, token, gpu };
        let (answer, descriptors) = ask(&socket, &hello, &[], PATIENCE)?;
        let Word::Welcome { relays } = answer else {
            return Err(NotAttached::Nonsense(format!("{answer:?}")));
        };
        let nonsense = |why: &str| NotAttached::Nonsense(why.into());
        let [ring, bell] =
            <[OwnedFd; 2]>::try_from(descriptors).map_err(|_| nonsense("no ring or no bell"))?;
        let lanes = 2 * relays.len();
        if relays.len() > RELAYS_MAX || relays.iter().any(|offer| offer.staging_bytes().is_none()) {
            return Err(nonsense("relays that cannot be"));
        }
        let most_bytes = (ring::words(lanes) * 8) as u64;
        let ring = SharedFile::open(ring, most_bytes).map_err(|error| nonsense(&error.to_string()))?;
        Header::find(ring.words(), lanes).ok_or_else(|| nonsense("a ring of another version"))?;
        let ringer = Ringer::received(bell);
        Ok((Session::new(socket, process, ring, ringer, Arc::clone(&self.inner.ringer)), relays))
    }

    /// Puts all relays that this GPU reaches into service. Says how many.
    fn install_all(&mut self, session: &Arc<Session>, offers: &[Offer]) -> Result<usize, NotAttached> {
        let mut installed = 0;
        for (index, offer) in offers.iter().enumerate() {
            let Some(memory) = self.open(offer)? else { continue };
            let relay = match self.relays.iter().position(|relay| relay.gpu == offer.gpu) {
                Some(known) => known,
                None => self.add_relay(offer)?,
            };
            installed += usize::from(self.install(relay, memory, session, index, offer)?);
        }
        let none = || NotAttached::Nonsense("none of its relays can be reached from this GPU".into());
        (installed > 0).then_some(installed).ok_or_else(none)
    }

    /// Opens a relay's staging. `None` where this GPU does not reach it.
    fn open(&self, offer: &Offer) -> Result<Option<ForeignMemory>, NotAttached> {
        let Ok(memory) = ForeignMemory::open(&self.device, IpcHandle(offer.handle.0)) else {
            return Ok(None);
        };
        let read = nonce::read(&self.device, memory.address())?;
        Ok((read == offer.nonce.0).then_some(memory))
    }

    /// Puts a relay into service. Staging of other sizes than its routes have is not used.
    fn install(
        &mut self,
        relay: usize,
        memory: ForeignMemory,
        session: &Arc<Session>,
        index: usize,
        offer: &Offer,
    ) -> Result<bool, NotAttached> {
        let copier = &self.inner.copier;
        let relay = &mut self.relays[relay];
        if (relay.slot_bytes, relay.slots) != (offer.slot_bytes, offer.slots) || relay.memory.is_some() {
            return Ok(false);
        }
        let staging_bytes = relay.slot_bytes * u64::from(relay.slots);
        for (nth, way) in relay.ways.iter().enumerate() {
            let address = memory.address() + nth as u64 * staging_bytes;
            copier.addresses().insert(way.staging, address, staging_bytes);
            way.port.connect(session, 2 * index + nth);
        }
        relay.memory = Some(memory);
        for link in relay.links() {
            copier.mover().set_link_up(link, true)?;
        }
        Ok(true)
    }

    /// Gives the mover links and routes of a relay that was never seen before, out of service.
    fn add_relay(&mut self, offer: &Offer) -> Result<usize, NotAttached> {
        let index = self.relays.len();
        let [there, back] = Direction::BOTH;
        let ways = [self.add_way(index, offer, there)?, self.add_way(index, offer, back)?];
        let Offer { gpu, slot_bytes, slots, .. } = *offer;
        self.relays.push(Relay { gpu, slot_bytes, slots, ways, memory: None });
        Ok(index)
    }

    fn add_way(&self, index: usize, offer: &Offer, direction: Direction) -> Result<Way, NotAttached> {
        let (copier, handle) = (&self.inner.copier, self.inner.copier.mover());
        let place = Place::Device(FIRST_RELAY + index as u16);
        let Offer { slot_bytes, slots, .. } = *offer;
        let staging = handle.register_opaque(place, slot_bytes * u64::from(slots))?;
        let port = Arc::<Port>::default();
        let lane = RemoteLink::new(direction, &port, copier.tracks().watch_track());
        let [engine, kernel] = [Stream::new(&self.device)?, Stream::new(&self.device)?];
        let (engine, kernel) = (copier.tracks().track(engine), copier.tracks().track(kernel));
        let pair = PeerLink::new(Some(engine), kernel, &self.kernels, copier.addresses(), WINDOW_LOTS)?;
        let (short, gpu) = (String::from(offer.gpu).split_off(24), self.device.index());
        let way = match direction {
            Direction::HostToDevice => "h2d",
            Direction::DeviceToHost => "d2h",
        };
        let lane = handle.add_link(spec(format!("relay-{short}.{way}")), Box::new(lane))?;
        let pair = handle.add_link(spec(format!("relay-{short}.gpu{gpu}.{way}")), Box::new(pair))?;
        let links = [lane, pair];
        for link in links {
            handle.set_link_up(link, false)?;
        }
        let hops = match direction {
            Direction::HostToDevice => [lane, pair],
            Direction::DeviceToHost => [pair, lane],
        };
        let (from, to) = direction.ends(SHARED, gpu);
        let slots = Staging { region: staging, slot_bytes, slots };
        handle.add_route(RouteSpec::relayed(from, to, hops, slots, false))??;
        Ok(Way { staging, port, links })
    }

    /// Waits until a connection is of no more use. Says why.
    fn watch(&self, session: &Session) -> String {
        loop {
            if self.is_closing() {
                return "it was ended here".into();
            }
            if session.is_down() {
                return "the node shows no sign of life".into();
            }
            let readable = [self.bell.as_fd(), session.process.as_fd()];
            match socket::wait(&readable, &[session.socket.as_fd()], None).as_deref() {
                Ok([_, false, false]) => self.bell.clear(),
                _ => return "the node has ended it".into(),
            };
        }
    }

    /// Takes the relays out of service, and waits until nothing uses their staging any more. What is unfinished goes over
    /// other routes.
    fn detach(&mut self, session: Arc<Session>) {
        lock(&self.inner.state).session = None;
        let handle = self.inner.copier.mover();
        for link in self.relays.iter().flat_map(Relay::links) {
            // A mover that has ended starts nothing more.
            let _ = handle.set_link_up(link, false);
        }
        self.relays.iter().flat_map(|relay| &relay.ways).for_each(|way| way.port.disconnect());
        let begun = Instant::now();
        while !self.is_quiet(&session) {
            if self.is_closing() && begun.elapsed() > LAST_WAIT {
                return std::mem::forget((session, self.relays.drain(..).collect::<Vec<_>>()));
            }
            std::thread::sleep(LOOK);
        }
        for relay in &mut self.relays {
            relay.ways.iter().for_each(|way| self.inner.copier.addresses().remove(way.staging));
            relay.memory = None;
        }
        // A node that is gone needs no goodbye.
        let _ = wire::send(&session.socket, &Word::Bye, &[]);
    }

    /// Whether nothing of a connection is in flight. Requests are waited for as long as the node is there to answer them.
    fn is_quiet(&self, session: &Session) -> bool {
        let now = Some(Duration::ZERO);
        let seen = socket::wait(&[session.process.as_fd()], &[session.socket.as_fd()], now);
        let (gone, parted) = seen.map_or((false, false), |seen| (seen[0], seen[1]));
        if gone || parted {
            session.take_down();
        }
        session.settle(gone);
        let idle = self.inner.copier.telemetry().map_or(true, |telemetry| {
            let mut ours = self.relays.iter().flat_map(Relay::links);
            ours.all(|link| telemetry.links[link.index()].in_flight_lots == 0)
        });
        session.is_settled() && idle
    }
}

impl Relay {
    fn links(&self) -> impl Iterator<Item = LinkId> {
        self.ways.iter().flat_map(|way| way.links)
    }
}
