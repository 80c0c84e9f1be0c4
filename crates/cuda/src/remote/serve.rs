//! The node's side: the GPUs that relay, how much staging there is on each, and who is let in. This file knows limits and the
//! threads that there are; it must never know what an engine says, nor what is copied.

use super::control::{Control, Engine, Shared};
use super::handler;

use super::socket::{self, Bell, Ringer};
use super::wire::{Hex, Offer, Uuid};
use super::{nonce, shared::SharedFile};
use crate::device::{Device, DeviceMemory};
use crate::driver::{CudaError, Driver, abi, abi::Address};
use crate::gpu::Gpu;
use crate::opened::LeftOut;
use crate::pinned::Registered;
use forebay_transfer::listen::{Admission, SocketFile, bind_socket};
use parking_lot::{Condvar, Mutex};
use rustix::net::SocketType;
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;
use thiserror::Error;

/// Staging on a relay for all engines together.
pub const RELAY_STAGING_BYTES: u64 = 24 << 20;
/// Slots of an engine on a relay in each direction, at least: fewer would not let the two hops overlap.
const SLOTS_MIN: u64 = 4;
const SLOT_BYTES_MAX: u64 = 2 << 20;
/// Engines at a time.
pub const ENGINES_MAX: usize = 64;
/// Pause when the system has no descriptors or threads left.
const RETRY_AFTER: Duration = Duration::from_millis(100);

/// What relays are told at their start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RelaysConfig {
    /// Where engines attach.
    pub socket: PathBuf,
    /// GPUs that relay; none means every one that is visible.
    pub gpus: Option<Vec<Uuid>>,
    /// What engines have to show. Empty: nothing.
    pub token: Vec<u8>,
    /// Users beside root and the node's own.
    pub uids: Vec<u32>,
    /// Host memory that one engine may have the node map and pin.
    pub memory_limit_bytes: u64,
}

/// Why relays did not start.
#[derive(Debug, Error)]
pub enum RelayError {
    /// The driver refused something.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// A GPU that is not here.
    #[error("gpus: {asked} is not visible here; visible are: {visible}")]
    NoGpu {
        /// What was asked for.
        asked: Uuid,
        /// What there is.
        visible: String,
    },
    /// No GPU can be opened: why the first one cannot.
    #[error("gpus: none can be used: {0}")]
    LeftOut(#[from] LeftOut),
    /// No GPU at all.
    #[error("gpus: none; at least one is needed to relay")]
    NoGpus,
    /// The socket.
    #[error("socket {path}: {error}")]
    Socket {
        /// Where.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// The system starts no more threads.
    #[error("a thread did not start: {0}")]
    Thread(#[from] io::Error),
}

/// What relays did and hold.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RelaysStat {
    /// GPUs that relay.
    pub gpus: usize,
    /// Engines that are attached.
    pub engines: usize,
    /// Staging that they have, on all GPUs together.
    pub staging_bytes: u64,
    /// Requests that were started, and their bytes.
    pub requests: u64,
    /// Bytes of these.
    pub bytes: u64,
    /// Engines that were not let in.
    pub refused: u64,
    /// Engines that wrote nonsense and were parted from.
    pub violations: u64,
}

/// The relays of a node. Dropping them parts from all engines.
#[derive(Debug)]
pub struct Relays {
    server: Arc<RelayServer>,
    listener: Option<JoinHandle<()>>,
    file: Option<SocketFile>,
    // Dropped last: request handlers wait for it.
    _control: Control,
}

/// What all request handlers share.
#[derive(Debug)]
pub struct RelayServer {
    pub config: RelaysConfig,
    pub admission: Admission,
    gpus: Vec<Arc<RelayGpu>>,
    /// GPUs that each relay is divided among.
    served: u64,
    pub control: Arc<Shared>,
    /// Memory that is pinned already, by device and inode: engines may share it.
    pub pinned: Mutex<HashMap<(u64, u64), Weak<Registered>>>,
    handlers: Mutex<Handlers>,
    left: Condvar,
    stopping: AtomicBool,
    /// Rung once, when the relays end.
    stop: (Ringer, Bell),
    refused: AtomicU64,
    violations: AtomicU64,
}

#[derive(Debug, Default)]
struct Handlers {
    next: u64,
    open: HashMap<u64, Option<Arc<Engine>>>,
}

/// A GPU that relays.
#[derive(Debug)]
struct RelayGpu {
    uuid: Uuid,
    device: Arc<Device>,
    /// Staging that engines have.
    used_bytes: Mutex<u64>,
}

/// An engine's staging on a GPU, both directions side by side.
#[derive(Debug)]
pub struct Share {
    gpu: Arc<RelayGpu>,
    slot_bytes: u64,
    slots: u32,
    /// Taken only by `drop`.
    memory: Option<DeviceMemory>,
}

impl Relays {
    /// Opens the GPUs and the socket.
    pub fn start(driver: &'static Driver, config: RelaysConfig) -> Result<Relays, RelayError> {
        let gpus = open(driver, config.gpus.as_deref())?;
        let control = Control::spawn()?;
        let path = config.socket.clone();
        let admission = Admission::new(config.token.clone(), config.uids.clone());
        let (listener, file) = bind_socket(&path, SocketType::SEQPACKET, admission.mode())
            .map_err(|error| RelayError::Socket { path: path.clone(), error })?;
        let server = Arc::new(RelayServer {
            config,
            admission,
            gpus,
            served: u64::from(Gpu::count(driver)?).saturating_sub(1).max(1),
            control: Arc::clone(control.shared()),
            pinned: Mutex::default(),
            handlers: Mutex::default(),
            left: Condvar::new(),
            stopping: AtomicBool::new(false),
            stop: socket::bell()?,
            refused: AtomicU64::new(0),
            violations: AtomicU64::new(0),
        });
        let own = Arc::clone(&server);
        let listener =
            std::thread::Builder::new().name("forebay-listen".into()).spawn(move || own.let_in(&listener))?;
        Ok(Relays { server, listener: Some(listener), file: Some(file), _control: control })
    }

    /// Where engines attach.
    pub fn socket(&self) -> &Path {
        &self.server.config.socket
    }

    /// What they did and hold.
    pub fn stat(&self) -> RelaysStat {
        let (requests, bytes) = self.server.control.counters();
        RelaysStat {
            gpus: self.server.gpus.len(),
            engines: self.server.handlers.lock().open.values().flatten().count(),
            staging_bytes: self.server.gpus.iter().map(|gpu| *gpu.used_bytes.lock()).sum(),
            requests,
            bytes,
            refused: self.server.refused.load(Ordering::Relaxed),
            violations: self.server.violations.load(Ordering::Relaxed),
        }
    }
}

impl Drop for Relays {
    fn drop(&mut self) {
        let server = &self.server;
        server.stopping.store(true, Ordering::Release);
        server.stop.0.ring();
        if let Some(listener) = self.listener.take() {
            // A panic of the thread has already been printed; there is nobody left to tell.
            let _ = listener.join();
        }
        // The next node finds its place free.
        self.file = None;
        let mut handlers = server.handlers.lock();
        handlers.open.values().flatten().for_each(|engine| socket::part(&engine.socket));
        while !handlers.open.is_empty() {
            server.left.wait(&mut handlers);
        }
    }
}

fn open(driver: &'static Driver, wanted: Option<&[Uuid]>) -> Result<Vec<Arc<RelayGpu>>, RelayError> {
    let visible = (0..Gpu::count(driver)?)
        .map(|index| Ok((Hex(Gpu::find(driver, index)?.uuid()?), index)))
        .collect::<Result<Vec<(Uuid, u16)>, CudaError>>()?;
    let find = |asked: &Uuid| {
        let found = visible.iter().find(|(uuid, _)| uuid == asked).copied();
        found.ok_or_else(|| {
            let visible = visible.iter().map(|(uuid, _)| uuid.to_string()).collect::<Vec<_>>().join(", ");
            RelayError::NoGpu { asked: *asked, visible }
        })
    };
    let chosen = match wanted {
        Some(wanted) => wanted.iter().map(find).collect::<Result<Vec<_>, _>>()?,
        None => visible.clone(),
    };
    if chosen.is_empty() {
        return Err(RelayError::NoGpus);
    }
    let mut first = None;
    let mut opened = Vec::with_capacity(chosen.len());
    for (uuid, index) in chosen {
        match open_one(driver, index) {
            Ok(device) => opened.push(Arc::new(RelayGpu { uuid, device, used_bytes: Mutex::new(0) })),
            // Those that were asked for by name are all wanted.
            Err(why) if wanted.is_some() => return Err(why.into()),
            Err(why) => {
                tracing::warn!("GPU {index} ({uuid}) is no relay: {why}; the others are");
                first.get_or_insert(why);
            }
        }
    }
    match first {
        Some(why) if opened.is_empty() => Err(why.into()),
        _ => Ok(opened),
    }
}

/// A node has no context on a GPU that one process may use, and that is an engine's.
fn open_one(driver: &'static Driver, index: u16) -> Result<Arc<Device>, LeftOut> {
    match Gpu::find(driver, index)?.attribute(abi::ATTRIBUTE_COMPUTE_MODE)? {
        abi::COMPUTE_MODE_DEFAULT => Ok(Device::open(driver, index)?),
        abi::COMPUTE_MODE_PROHIBITED => Err(LeftOut::Prohibited),
        _ => Err(LeftOut::Exclusive),
    }
}

impl RelayServer {
    /// Gives each engine a thread, until the relays end.
    fn let_in(self: &Arc<RelayServer>, listener: &OwnedFd) {
        while !self.is_stopping() {
            if socket::wait(&[listener.as_fd(), self.stop.1.as_fd()], &[], None).is_err() {
                std::thread::sleep(RETRY_AFTER);
            }
            match socket::accept_from(listener) {
                Ok(socket) => self.admit(socket),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => std::thread::sleep(RETRY_AFTER),
            }
        }
    }

    fn admit(self: &Arc<RelayServer>, socket: OwnedFd) {
        let mut handlers = self.handlers.lock();
        if handlers.open.len() >= ENGINES_MAX {
            drop(handlers);
            let why = format!("{ENGINES_MAX} engines are attached; no more may be");
            return handler::refuse(self, &socket, why);
        }
        let number = handlers.next;
        handlers.next += 1;
        handlers.open.insert(number, None);
        drop(handlers);
        let server = Arc::clone(self);
        let serve = move || {
            handler::serve(&server, number, socket);
            server.leave(number);
        };
        if std::thread::Builder::new().name("forebay-relays".into()).spawn(serve).is_err() {
            // An engine for whom there is no thread sees the end.
            self.leave(number);
        }
    }

    /// Notes an engine that was let in. Says whether the relays still go on.
    pub fn attach(&self, number: u64, engine: &Arc<Engine>) -> bool {
        self.handlers.lock().open.insert(number, Some(Arc::clone(engine)));
        !self.is_stopping()
    }

    fn leave(&self, number: u64) {
        let engine = self.handlers.lock().open.insert(number, None);
        // Without the lock: unpinning its memory takes seconds.
        drop(engine);
        self.handlers.lock().open.remove(&number);
        self.left.notify_all();
    }

    fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// Waits until a process has ended, or the relays end.
    pub fn wait_for_end(&self, process: &OwnedFd) {
        while !self.is_stopping() {
            match socket::wait(&[process.as_fd(), self.stop.1.as_fd()], &[], None).as_deref() {
                Ok([false, _]) => {}
                _ => return,
            }
        }
    }

    pub fn count_refused(&self) {
        self.refused.fetch_add(1, Ordering::Relaxed);
    }

    pub fn count_violation(&self) {
        self.violations.fetch_add(1, Ordering::Relaxed);
    }

    /// Staging for an engine on every GPU but its own that has room for it; a reason where none has.
    pub fn shares(&self, gpu: Uuid) -> Result<Vec<Share>, String> {
        let (mut shares, mut reasons) = (Vec::new(), Vec::new());
        for relay in self.gpus.iter().filter(|relay| relay.uuid != gpu) {
            match Share::new(relay, self.served) {
                Ok(share) => shares.push(share),
                Err(reason) => reasons.push(reason),
            }
        }
        if shares.is_empty() && reasons.is_empty() {
            reasons.push("no other GPU than the engine's own relays here".into());
        }
        if shares.is_empty() { Err(reasons.join("; ")) } else { Ok(shares) }
    }

    /// Any GPU, to pin memory with.
    pub fn device(&self) -> &Arc<Device> {
        &self.gpus[0].device
    }

    /// A ring for so many relays.
    pub fn ring(&self, relays: usize) -> io::Result<SharedFile> {
        let bytes = (super::ring::words(2 * relays) * 8) as u64;
        let ring = SharedFile::create(bytes).map_err(io::Error::other)?;
        super::ring::Header::make(ring.words());
        Ok(ring)
    }
}

/// Size and number of an engine's slots on a relay in each direction, when there may be `served` engines.
fn slots(served: u64) -> (u64, u32) {
    let each = RELAY_STAGING_BYTES / (2 * served.max(1));
    let slot_bytes = (each / SLOTS_MIN).min(SLOT_BYTES_MAX);
    let slot_bytes = 1 << slot_bytes.ilog2();
    (slot_bytes, (each / slot_bytes) as u32)
}

impl Share {
    fn new(gpu: &Arc<RelayGpu>, served: u64) -> Result<Share, String> {
        let (slot_bytes, slots) = slots(served);
        let bytes = 2 * slot_bytes * u64::from(slots);
        let mut used_bytes = gpu.used_bytes.lock();
        if *used_bytes + bytes > RELAY_STAGING_BYTES {
            let left_bytes = RELAY_STAGING_BYTES - *used_bytes;
            let uuid = gpu.uuid;
            return Err(format!(
                "GPU {uuid}: an engine needs {bytes} bytes of staging; {left_bytes} of {RELAY_STAGING_BYTES} are left"
            ));
        }
        let memory = DeviceMemory::new(&gpu.device, bytes).map_err(|error| error.to_string())?;
        *used_bytes += bytes;
        Ok(Share { gpu: Arc::clone(gpu), slot_bytes, slots, memory: Some(memory) })
    }

    pub fn device(&self) -> &Arc<Device> {
        &self.gpu.device
    }

    /// Address and length of the staging of one direction: the first or the second.
    pub fn staging(&self, direction: usize) -> (Address, u64) {
        let bytes = self.slot_bytes * u64::from(self.slots);
        let start = self.memory.as_ref().map_or(0, DeviceMemory::address);
        (start + direction as u64 * bytes, bytes)
    }

    /// What the engine is told of it.
    pub fn offer(&self) -> Result<Offer, String> {
        let Share { gpu, slot_bytes, slots, memory } = self;
        let memory = memory.as_ref().ok_or("no memory")?;
        let mut nonce = [0; 16];
        let filled = rustix::rand::getrandom(&mut nonce[..], rustix::rand::GetRandomFlags::empty());
        if !matches!(filled, Ok(16)) {
            return Err("the system gives no random bytes".into());
        }
        let handle = memory.export().map_err(|error| error.to_string())?;
        nonce::write(&gpu.device, memory.address(), nonce).map_err(|error| error.to_string())?;
        let (gpu, handle, nonce) = (gpu.uuid, Hex(handle.0), Hex(nonce));
        Ok(Offer { gpu, handle, nonce, slot_bytes: *slot_bytes, slots: *slots })
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let bytes = self.memory.as_ref().map_or(0, DeviceMemory::bytes);
        self.memory = None;
        *self.gpu.used_bytes.lock() -= bytes;
    }
}

#[cfg(test)]
mod slot_tests {
    use super::*;

    #[test]
    fn a_relay_keeps_to_its_staging_however_many_engines_it_serves() {
        for served in 1..=15 {
            let (slot_bytes, slots) = slots(served);
            assert!(u64::from(slots) >= SLOTS_MIN, "{served}");
            assert!(2 * served * slot_bytes * u64::from(slots) <= RELAY_STAGING_BYTES, "{served}");
        }
    }
}

#[cfg(test)]
mod leave_tests {
    use super::super::tests::{config, driver};
    use super::*;
    use forebay_transfer::{Backing, HostBuffer};
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    /// Memory that notes whether others could be let in while it was let go of.
    struct Watched {
        memory: HostBuffer,
        server: Arc<RelayServer>,
        lets_in: Arc<AtomicBool>,
    }

    // SAFETY: the bytes are those of `memory`.
    unsafe impl Backing for Watched {
        fn as_ptr(&self) -> *mut u8 {
            self.memory.as_ptr()
        }

        fn len(&self) -> usize {
            self.memory.len()
        }
    }

    impl Drop for Watched {
        fn drop(&mut self) {
            self.lets_in.store(self.server.handlers.try_lock().is_some(), Ordering::Relaxed);
        }
    }

    #[test]
    fn others_are_let_in_while_the_memory_of_an_engine_that_left_is_unpinned() {
        let folder = tempfile::tempdir().unwrap();
        let relays = Relays::start(driver(), config(folder.path())).unwrap();
        let (server, lets_in) = (Arc::clone(&relays.server), Arc::new(AtomicBool::new(false)));
        let (socket, _other) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        let engine = Arc::new(Engine::new(Hex([0; 16]), socket, server.ring(1).unwrap()));
        let memory = HostBuffer::new(4096);
        let watched = Watched { memory, server: Arc::clone(&server), lets_in: Arc::clone(&lets_in) };
        let pinned = Registered::new(server.device(), Arc::new(watched)).unwrap();
        engine.memories.write().insert(0, Arc::new(pinned));
        assert!(server.attach(7, &engine));
        drop(engine);
        server.leave(7);
        assert!(lets_in.load(Ordering::Relaxed));
        assert_eq!(server.handlers.lock().open.len(), 0);
    }
}
