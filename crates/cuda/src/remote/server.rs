//! What the handlers of all engines share: the GPUs that relay, who may attach, and which
//! connections there are. `serve` makes connections of it, `handler` speaks on one.

use super::control::{Engine, Shared};
use super::pinned_files::PinnedFiles;
use super::shared::SharedFile;
use super::socket::{self, Bell, Ringer};
use super::staging::{RelayGpu, Share};
use super::wire::{Hex, Uuid};
use crate::device::Device;
use crate::driver::{CudaError, Driver};
use crate::gpu::Gpu;
use crate::open::{LeftOut, open_one, those_that_open};
use crate::pinned::Shareable;
use forebay_transfer::LogGate;
use forebay_transfer::listen::{Admission, Room};
use forebay_transfer::lock::{Condvar, Mutex};
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use thiserror::Error;

pub const ENGINES_MAX: usize = 64;
/// Connections that have not said who they are. They take no engine's place.
const UNAUTHENTICATED_MAX: usize = 64;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RelaysConfig {
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
    #[error(transparent)]
    Cuda(#[from] CudaError),
    #[error("gpus: {asked} is not visible here; visible are: {visible}")]
    NoGpu { asked: Uuid, visible: String },
    #[error("gpus: none can be used: {0}")]
    LeftOut(#[from] LeftOut),
    #[error("gpus: none; at least one is needed to relay")]
    NoGpus,
    #[error("socket {path}: {error}")]
    Socket { path: PathBuf, error: io::Error },
    #[error("a thread did not start: {0}")]
    Thread(#[from] io::Error),
}

/// What all request handlers share.
#[derive(Debug)]
pub struct RelayServer {
    pub config: RelaysConfig,
    pub admission: Admission,
    /// Connections that have not said who they are, by process.
    pub room: Arc<Room<i32>>,
    gpus: Vec<Arc<RelayGpu>>,
    /// GPUs that each relay is divided among.
    served: u64,
    pub control: Arc<Shared>,
    pub files: PinnedFiles,
    connections: Mutex<Connections>,
    left: Condvar,
    stopping: AtomicBool,
    /// Rung once, when the relays end.
    stop: (Ringer, Bell),
    refused: AtomicU64,
    refused_lines: LogGate,
    violations: AtomicU64,
}

#[derive(Debug, Default)]
struct Connections {
    next: u64,
    open: HashMap<u64, Connection>,
}

/// How far a connection has come.
#[derive(Debug)]
enum Connection {
    /// It has not said who it is.
    Greeting,
    /// It may attach, or has just left: it has an engine's place.
    Admitted,
    Attached(Arc<Engine>),
}

impl RelayServer {
    pub fn new(
        driver: &'static Driver,
        config: RelaysConfig,
        own: Option<Arc<dyn Shareable>>,
        control: &Arc<Shared>,
    ) -> Result<RelayServer, RelayError> {
        Ok(RelayServer {
            gpus: open(driver, config.gpus.as_deref())?,
            admission: Admission::new(config.token.clone(), config.uids.clone()),
            config,
            room: Room::new("the relays' socket", UNAUTHENTICATED_MAX),
            served: u64::from(Gpu::count(driver)?).saturating_sub(1).max(1),
            control: Arc::clone(control),
            files: PinnedFiles::new(own),
            connections: Mutex::default(),
            left: Condvar::new(),
            stopping: AtomicBool::new(false),
            stop: socket::bell()?,
            refused: AtomicU64::new(0),
            refused_lines: LogGate::new(),
            violations: AtomicU64::new(0),
        })
    }

    /// Counts a new connection in, and gives its number.
    pub fn enter(&self) -> u64 {
        let mut connections = self.connections.lock();
        let number = connections.next;
        connections.next += 1;
        connections.open.insert(number, Connection::Greeting);
        number
    }

    /// Gives a connection that has shown its token an engine's place, if one is free.
    pub fn admit(&self, number: u64) -> Result<(), String> {
        let mut connections = self.connections.lock();
        let is_engine = |connection: &&Connection| !matches!(connection, Connection::Greeting);
        if connections.open.values().filter(is_engine).count() >= ENGINES_MAX {
            return Err(format!("{ENGINES_MAX} engines are attached; no more may be"));
        }
        connections.open.insert(number, Connection::Admitted);
        Ok(())
    }

    /// Notes an engine that is served from now on. Says whether the relays still go on.
    pub fn attach(&self, number: u64, engine: &Arc<Engine>) -> bool {
        self.connections.lock().open.insert(number, Connection::Attached(Arc::clone(engine)));
        !self.is_stopping()
    }

    /// A connection is over, and so is what it had.
    pub fn leave(&self, number: u64) {
        let engine = self.connections.lock().open.insert(number, Connection::Admitted);
        // Without the lock: unpinning its memory takes seconds.
        drop(engine);
        self.connections.lock().open.remove(&number);
        self.left.notify_all();
    }

    pub fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// Lets nobody in any more.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
        self.stop.0.ring();
    }

    /// Parts from everybody, and waits until all have left.
    pub fn part_from_all(&self) {
        self.room.clear();
        let mut connections = self.connections.lock();
        for connection in connections.open.values() {
            if let Connection::Attached(engine) = connection {
                socket::part(&engine.socket);
            }
        }
        while !connections.open.is_empty() {
            self.left.wait(&mut connections);
        }
    }

    pub fn engines(&self) -> usize {
        let connections = self.connections.lock();
        let is_attached = |connection: &&Connection| matches!(connection, Connection::Attached(_));
        connections.open.values().filter(is_attached).count()
    }

    /// GPUs that relay, and the staging that engines have on them.
    pub fn gpus(&self) -> (usize, u64) {
        (self.gpus.len(), self.gpus.iter().map(|gpu| gpu.used_bytes()).sum())
    }

    /// Connections that were refused, and engines that wrote nonsense.
    pub fn counts(&self) -> (u64, u64) {
        (self.refused.load(Ordering::Relaxed), self.violations.load(Ordering::Relaxed))
    }

    /// Waits until a connection comes, or the relays end.
    pub fn wait_for_connection(&self, listener: &OwnedFd) -> io::Result<()> {
        socket::wait(&[listener.as_fd(), self.stop.1.as_fd()], &[], None).map(drop)
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

    pub fn count_refused(&self, reason: &str) {
        self.refused.fetch_add(1, Ordering::Relaxed);
        if let Some(repeated) = self.refused_lines.pass() {
            tracing::warn!(repeated, reason, "engine is refused relays");
        }
    }

    pub fn count_violation(&self) {
        self.violations.fetch_add(1, Ordering::Relaxed);
    }

    /// Staging for an engine on every GPU but its own that has room for it; a reason where none
    /// has.
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

    pub fn ring(&self, relays: usize) -> io::Result<SharedFile> {
        let bytes = (super::ring::words(2 * relays) * 8) as u64;
        let ring = SharedFile::create(bytes).map_err(io::Error::other)?;
        super::ring::Header::make(ring.words());
        Ok(ring)
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
    // A node has no context on a GPU that one process may use, and that is an engine's.
    let open = |(uuid, index)| {
        if Gpu::find(driver, index)?.is_part()? {
            return Err(LeftOut::Part);
        }
        Ok(RelayGpu::new(uuid, open_one(driver, index, false)?))
    };
    if wanted.is_some() {
        // Those that were asked for by name are all wanted.
        return chosen.into_iter().map(open).collect::<Result<_, LeftOut>>().map_err(RelayError::from);
    }
    let open = |(uuid, index)| {
        let left_out = |why: &LeftOut| tracing::warn!(gpu = index, %uuid, reason = %why, "GPU is no relay");
        open((uuid, index)).inspect_err(left_out)
    };
    Ok(those_that_open(chosen.into_iter().map(open))?)
}

#[cfg(test)]
mod tests {
    use super::super::serve::Relays;
    use super::super::tests::{config, driver};
    use super::*;
    use crate::pinned::PinnedBehind;
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
            self.lets_in.store(self.server.connections.try_lock().is_some(), Ordering::Relaxed);
        }
    }

    #[test]
    fn others_are_let_in_while_the_memory_of_an_engine_that_left_is_unpinned() {
        let folder = tempfile::tempdir().unwrap();
        let relays = Relays::start(driver(), config(folder.path())).unwrap();
        let (server, lets_in) = (Arc::clone(relays.server()), Arc::new(AtomicBool::new(false)));
        let (socket, _other) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        let engine = Arc::new(Engine::new(Hex([0; 16]), socket, server.ring(1).unwrap()));
        let memory = HostBuffer::new(4096);
        let watched = Watched { memory, server: Arc::clone(&server), lets_in: Arc::clone(&lets_in) };
        let pinned = PinnedBehind::start(server.device(), Arc::new(watched), 4096, 1).unwrap();
        engine.memories.write().insert(0, Arc::new(pinned));
        assert!(server.attach(7, &engine));
        drop(engine);
        server.leave(7);
        testkit::eventually("it is let go of", || lets_in.load(Ordering::Relaxed));
        assert_eq!(server.connections.lock().open.len(), 0);
    }
}
