//! The node: the store, its mover, and the clients of this host, joined. This file starts and ends them and counts; it must
//! never know what a client wants or where a chunk lies.

mod ending;
mod memory;
pub(crate) mod opening;
mod telling;

pub use ending::{DrainError, Drained};
pub use memory::NoMemory;

use crate::config::{CollectorConfig, ConfigError, NodeConfig};
use crate::directory::{
    Directory, EtcdConfig, EtcdDirectory, EtcdError, NodeRecord, StaticDirectory, StaticError, node_of_name,
};
use crate::elsewhere::Elsewhere;
use crate::local::desk::Desk;
use crate::local::listener::Listener;
use crate::local::session::SessionLimits;
use crate::metrics::sources::{
    PortsStat, of_agent, of_clients, of_directory, of_mover, of_peering, of_ports, of_process, of_relays,
    of_store,
};
use crate::metrics::{HttpLimits, Metrics, MetricsServer, Push, PushConfig, PushError, Spans};
use crate::peering::{Nobody, Peering, PeeringStat};
use forebay_client::protocol::answer::{NodeStat, REFUSALS, Refusal};
use forebay_client::protocol::frame::Unfinished;
use forebay_client::protocol::socket::WakeUp;
use forebay_cuda::driver::{Driver, LoadError};
use forebay_cuda::remote::{RelayError, Relays, RelaysStat};
use forebay_net::AgentError;
use forebay_transfer::listen::{Admission, Room};
use forebay_transfer::{HostLink, LogGate};

use ending::Ender;
use forebay_store::ssd::SsdError;
use forebay_store::{OpenError, Store};
use forebay_transfer::{Closed, Limits, LinkSpec, MoverHandle, MoverThread, PathError, PathSpec, Place};
use parking_lot::{Condvar, Mutex};
use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use thiserror::Error;

/// Where the arena is for the mover.
pub const HOST: Place = Place::Host(0);
/// Copies in flight from staging to the arena: lots, and bytes.
const COPY_WINDOW: (u32, u64) = (4, 64 << 20);
/// How long a node that stops waits for its clients' threads.
const STOP_PATIENCE: Duration = Duration::from_secs(5);

/// Why there is no node.
#[derive(Debug, Error)]
pub enum NodeError {
    /// The socket cannot be had.
    #[error("socket {}: {error}", path.display())]
    Socket {
        /// Where.
        path: PathBuf,
        /// Why.
        error: std::io::Error,
    },
    /// There is not enough memory left.
    #[error(transparent)]
    Memory(#[from] NoMemory),
    /// There is no log, and none is to be made.
    #[error(
        "ssd.path: {}: there is no log, and ssd.create is false: mount its disk (that directory is on the \
         file system that is mounted at {}), or make a log with `forebay store init`",
        path.display(), mount.display()
    )]
    NoLog {
        /// Where it should be.
        path: PathBuf,
        /// What is mounted there.
        mount: PathBuf,
    },
    /// Memory, threads or the mover.
    #[error(transparent)]
    Store(#[from] OpenError),
    /// A log cannot be had.
    #[error("ssd: {0}")]
    Ssd(#[from] SsdError),
    /// The mover has ended.
    #[error(transparent)]
    Mover(#[from] Closed),
    /// The mover refused a route.
    #[error(transparent)]
    Route(#[from] PathError),
    /// The way to peers.
    #[error("peers: {0}")]
    Peers(#[from] AgentError),
    /// The list of nodes.
    #[error("directory: {0}")]
    File(#[from] StaticError),
    /// etcd.
    #[error("directory: {0}")]
    Etcd(#[from] EtcdError),
    /// Tenants' keys, or GPUs that relay.
    #[error(transparent)]
    Config(ConfigError),
    /// There is no driver for relays.
    #[error("relays: {0}")]
    Driver(#[from] LoadError),
    /// Relays do not start.
    #[error("relays: {0}")]
    Relays(#[from] RelayError),
    /// The way to the collector.
    #[error("metrics.push: {0}")]
    Push(#[from] PushError),
    /// The system gives no thread or descriptor.
    #[error("{doing}: {error}")]
    System {
        /// What was tried.
        doing: &'static str,
        /// Why it failed.
        error: std::io::Error,
    },
}

/// What clients may do, in numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NodeLimits {
    pub clients: usize,
    pub session: SessionLimits,
    /// Longest time that a lease lives without being renewed.
    pub lease_us: u64,
    /// How long a client may take to say who it is.
    pub authentication: Duration,
}

/// What the node's threads share.
pub(crate) struct Shared {
    pub store: Store,
    pub mover: MoverHandle,
    pub instance: [u8; 16],
    pub limits: NodeLimits,
    pub admission: Admission,
    /// Connections that have not said who they are, by process.
    pub room: Arc<Room<i32>>,
    pub unfinished: Arc<Unfinished>,
    /// For the lines that say so, one for each kind, so that none hides another.
    refused_gates: [LogGate; REFUSALS],
    pub spans: Arc<Spans>,
    elsewhere: OnceLock<Arc<dyn Elsewhere>>,
    seats: Mutex<HashMap<u64, Weak<Desk>>>,
    next_seat: AtomicU64,
    /// Threads of clients that are let in.
    inside: AtomicUsize,
    /// Threads of connections that are not let in yet.
    greeting: AtomicUsize,
    counts: Counts,
    /// Whether the store tells those who watch what has left it.
    telling: Mutex<bool>,
    draining: AtomicBool,
    stopped: AtomicBool,
    /// Something was let go.
    lighter: Condvar,
    waiting: Mutex<()>,
}

#[derive(Debug, Default)]
struct Counts {
    hits_memory: AtomicU64,
    hits_disk: AtomicU64,
    hits_peers: AtomicU64,
    refused: AtomicU64,
    orphans: AtomicU64,
    corrupt: AtomicU64,
}

/// A node at work. Dropping it ends it at once, as a crash would: leases die, and what was not durable is lost.
pub struct Node {
    shared: Arc<Shared>,
    peering: Option<Arc<Peering>>,
    relays: Option<Arc<Relays>>,
    metrics: Option<MetricsServer>,
    _push: Option<Push>,
    listener: Option<JoinHandle<()>>,
    wake_up: Arc<WakeUp>,
    ender: Ender,
    close_limit: Duration,
    /// Ends last.
    _mover: MoverThread,
}

/// A client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientStat {
    /// What it calls itself.
    pub name: String,
    /// Leases that it holds.
    pub leases: usize,
    /// Slots that it writes.
    pub slots: usize,
}

/// A client that is let in, among all of them.
pub(crate) struct Seat {
    node: Arc<Shared>,
    number: u64,
}

/// A client's thread.
pub(crate) struct Inside(Arc<Shared>);

/// The thread of a connection that is not let in yet.
pub(crate) struct Greeting(Arc<Shared>);

impl Node {
    /// Whether a node can be told so on this machine: what the start asks first, and the check of a configuration too.
    pub fn check(config: &NodeConfig) -> Result<(), NodeError> {
        config.check().map_err(NodeError::Config)?;
        config.check_machine().map_err(NodeError::Config)?;
        match config.relays {
            Some(_) => Ok(Driver::load().map(drop)?),
            None => Ok(()),
        }
    }

    /// Starts a node: opens its logs, makes its arena and lets clients in.
    pub fn start(config: &NodeConfig) -> Result<Node, NodeError> {
        let system = |doing| move |error| NodeError::System { doing, error };
        Node::check(config)?;
        let failed = |error| NodeError::Socket { path: config.socket.clone(), error };
        let admission = Admission::new(config.token.clone(), config.allow_uids.clone());
        let listener = Listener::bind(&config.socket, &admission).map_err(failed)?;
        let ender = Ender::start().map_err(system("the thread that ends the node"))?;
        let mover = MoverThread::spawn(Limits::default()).map_err(system("the mover"))?;
        let handle = mover.handle();
        let (window_lots, window_bytes) = COPY_WINDOW;
        let link = HostLink::new(config.copy_threads).map_err(system("threads that copy"))?;
        let link = handle.add_link(LinkSpec::new("h2h", window_lots, window_bytes), Box::new(link))?;
        handle.add_path(PathSpec::direct(HOST, HOST, link))??;
        let store = opening::open_store(&handle, config)?;
        let mut instance = [0; 16];
        let drawn = rustix::rand::getrandom(&mut instance, rustix::rand::GetRandomFlags::empty());
        drawn.map_err(|error| NodeError::System { doing: "drawing an instance", error: error.into() })?;
        let metrics = Arc::new(Metrics::new());
        let spans = Arc::clone(metrics.spans());
        let shared = Arc::new(Shared::new(store, handle, instance, spans, admission, config));
        let wake_up = Arc::new(WakeUp::new().map_err(system("an eventfd"))?);
        let (node, called) = (Arc::clone(&shared), Arc::clone(&wake_up));
        let listener = std::thread::Builder::new()
            .name("forebay-door".into())
            .spawn(move || listener.run(&node, &called))
            .map_err(system("the socket's thread"))?;
        let listener = Some(listener);
        let (peering, relays, metrics_server, _push) = (None, None, None, None);
        let node = Node {
            shared,
            peering,
            relays,
            metrics: metrics_server,
            _push,
            listener,
            wake_up,
            ender,
            close_limit: Duration::from_secs(config.limits.close_s),
            _mover: mover,
        };
        node.join(config, metrics)
    }

    /// Meets other nodes, and shows itself.
    fn join(mut self, config: &NodeConfig, metrics: Arc<Metrics>) -> Result<Node, NodeError> {
        let shared = &self.shared;
        if let Some(peers) = &config.peers {
            let directory = open_directory(config, peers.told(), shared.instance)?;
            metrics.add("directory", of_directory(Arc::clone(&directory)));
            let ground = (&shared.store, &shared.mover, HOST);
            let peering = Arc::new(Peering::start(
                peers,
                &config.name,
                ground,
                &config.limits,
                directory,
                Arc::clone(&shared.spans),
            )?);
            // Set once: nobody else does.
            let _ = shared.elsewhere.set(Arc::clone(&peering) as Arc<dyn Elsewhere>);
            let others = Arc::downgrade(&peering);
            let peers = move || others.upgrade().map(|others| others.stat().peers).unwrap_or_default();
            metrics.add("agent", of_agent(peers));
            let others = Arc::downgrade(&peering);
            metrics.add("peering", of_peering(move || others.upgrade().map(|others| others.stat())));
            self.peering = Some(peering);
        }
        if let Some(relays) = &config.relays {
            let relays = relays.for_relays(&config.token, &config.allow_uids).map_err(NodeError::Config)?;
            let relays = Arc::new(Relays::start(Driver::load()?, relays)?);
            let shown = Arc::downgrade(&relays);
            metrics.add("relays", of_relays(move || shown.upgrade().map(|relays| relays.stat())));
            self.relays = Some(relays);
        }
        if let Some(shown) = &config.metrics {
            metrics.add("process", of_process());
            metrics.add("store", of_store(Arc::new(shared.store.clone())));
            let mover = shared.mover.clone();
            metrics.add("mover", of_mover(move || mover.telemetry().unwrap_or_default()));
            let node = Arc::downgrade(shared);
            metrics
                .add("clients", of_clients(move || node.upgrade().map(|node| (node.stat(), node.clients()))));
            let node = Arc::downgrade(shared);
            let peering = self.peering.as_ref().map(Arc::downgrade);
            let ready = move || match node.upgrade() {
                Some(node) if !node.is_draining() => match peering.as_ref().and_then(Weak::upgrade) {
                    Some(peering) => peering.readiness(),
                    None => Ok(String::new()),
                },
                _ => Err("the node is shutting down".into()),
            };
            let system = |error| NodeError::System { doing: "the port for metrics", error };
            let limits = HttpLimits {
                pending_max: config.limits.unauthenticated,
                request_limit: Duration::from_millis(config.limits.authentication_ms),
                metrics_max: shown.requests_max,
            };
            let listen = |at| MetricsServer::listen(at, Arc::clone(&metrics), limits, ready).map_err(system);
            self.metrics = shown.listen.map(listen).transpose()?;
            let port = self.metrics.as_ref().map(MetricsServer::pending);
            let (node, peering) = (Arc::downgrade(shared), self.peering.as_ref().map(Arc::downgrade));
            metrics.add(
                "ports",
                of_ports(move || {
                    let clients = node.upgrade().map(|node| (node.room.stat(), Arc::clone(&node.unfinished)));
                    let peers = peering.as_ref().and_then(Weak::upgrade).and_then(|peering| peering.port());
                    PortsStat { clients, peers, metrics: port.as_ref().map(|port| port.stat()) }
                }),
            );
            self._push = shown.push.as_ref().map(|to| push(to, &config.name, metrics)).transpose()?;
        }
        Ok(self)
    }

    /// Where peers connect, if they may.
    pub fn peer_address(&self) -> Option<SocketAddr> {
        self.peering.as_ref().and_then(|peering| peering.address())
    }

    /// What went on between this node and others.
    pub fn peering_stat(&self) -> Option<PeeringStat> {
        self.peering.as_ref().map(|peering| peering.stat())
    }

    /// What GPUs did that relay for engines, if any do.
    pub fn relays_stat(&self) -> Option<RelaysStat> {
        self.relays.as_ref().map(|relays| relays.stat())
    }

    /// Where the node shows itself, if it does.
    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.metrics.as_ref().map(MetricsServer::address)
    }

    /// The store, for those who count.
    pub fn store(&self) -> &Store {
        &self.shared.store
    }

    /// This life of the node.
    pub fn instance(&self) -> [u8; 16] {
        self.shared.instance
    }

    /// What is counted.
    pub fn stat(&self) -> NodeStat {
        self.shared.stat()
    }

    /// Who is connected.
    pub fn clients(&self) -> Vec<ClientStat> {
        self.shared.clients()
    }

    fn stop(&self) {
        let shared = &self.shared;
        shared.stopped.store(true, Ordering::Release);
        if let Some(elsewhere) = shared.elsewhere.get() {
            elsewhere.stop();
        }
        self.wake_up.wake();
        shared.desks().iter().for_each(|desk| desk.outbox.wake_up().wake());
        let until = Instant::now() + STOP_PATIENCE;
        let mut waiting = shared.waiting.lock();
        shared.room.clear();
        while shared.inside.load(Ordering::Acquire) + shared.greeting.load(Ordering::Acquire) > 0 {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            shared.lighter.wait_for(&mut waiting, left);
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.stop();
        if let Some(listener) = self.listener.take() {
            // A panic of the thread has already been printed; there is nobody left to tell.
            let _ = listener.join();
        }
    }
}

impl std::fmt::Debug for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Node").field("stat", &self.stat()).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("limits", &self.limits).finish_non_exhaustive()
    }
}

fn open_directory(
    config: &NodeConfig,
    address: SocketAddr,
    instance: [u8; 16],
) -> Result<Arc<dyn Directory>, NodeError> {
    let node = node_of_name(&config.name);
    let Some(directory) = &config.directory else { return Ok(Arc::new(Nobody)) };
    if let Some(file) = &directory.file {
        return Ok(Arc::new(StaticDirectory::open(file, node)?));
    }
    let me = NodeRecord { node, instance, name: config.name.clone(), address };
    let etcd = EtcdConfig {
        endpoints: directory.etcd.clone(),
        prefix: directory.prefix.clone(),
        ttl_s: directory.ttl_s,
        ..EtcdConfig::default()
    };
    Ok(Arc::new(EtcdDirectory::start(&etcd, me)?))
}

/// Tells a collector, and traces for it.
fn push(to: &CollectorConfig, node: &str, metrics: Arc<Metrics>) -> Result<Push, PushError> {
    metrics.spans().sample_one_of(to.trace_one_of);
    let (endpoint, node, limit_us) = (to.endpoint.clone(), node.to_owned(), to.limit_ms.saturating_mul(1000));
    Push::start(&PushConfig { endpoint, node, every_s: to.every_s, limit_us }, metrics)
}

impl Shared {
    fn new(
        store: Store,
        mover: MoverHandle,
        instance: [u8; 16],
        spans: Arc<Spans>,
        admission: Admission,
        config: &NodeConfig,
    ) -> Shared {
        let limits = &config.limits;
        let session = SessionLimits {
            leases: limits.leases_per_client,
            slots: limits.slots_per_client,
            loads: limits.loads_per_client,
        };
        Shared {
            store,
            mover,
            instance,
            limits: NodeLimits {
                clients: limits.clients,
                session,
                lease_us: limits.lease_us(),
                authentication: Duration::from_millis(limits.authentication_ms),
            },
            room: Room::new("the clients' socket", limits.unauthenticated),
            unfinished: Arc::new(Unfinished::new(limits.unfinished)),
            refused_gates: [const { LogGate::new() }; REFUSALS],
            admission,
            spans,
            elsewhere: OnceLock::new(),
            seats: Mutex::default(),
            next_seat: AtomicU64::new(0),
            inside: AtomicUsize::new(0),
            greeting: AtomicUsize::new(0),
            counts: Counts::default(),
            telling: Mutex::default(),
            draining: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
            lighter: Condvar::new(),
            waiting: Mutex::default(),
        }
    }

    pub fn now_us(&self) -> u64 {
        self.mover.now_us()
    }

    /// Other nodes, if there may be any.
    pub fn elsewhere(&self) -> Option<&Arc<dyn Elsewhere>> {
        self.elsewhere.get()
    }

    fn start_draining(&self) {
        self.draining.store(true, Ordering::Release);
    }

    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    fn desks(&self) -> Vec<Arc<Desk>> {
        self.seats.lock().values().filter_map(Weak::upgrade).collect()
    }

    /// One more client's thread, if there may be.
    pub fn enter(self: &Arc<Self>) -> Option<Inside> {
        let room = |inside: usize| (inside < self.limits.clients).then_some(inside + 1);
        let entered = self.inside.fetch_update(Ordering::AcqRel, Ordering::Acquire, room);
        entered.ok().map(|_| Inside(Arc::clone(self)))
    }

    /// One more thread of a connection that is not let in yet; their room bounds them.
    pub fn greet(self: &Arc<Self>) -> Greeting {
        self.greeting.fetch_add(1, Ordering::AcqRel);
        Greeting(Arc::clone(self))
    }

    /// A client is let in.
    pub fn seat(self: &Arc<Self>, desk: &Arc<Desk>) -> Seat {
        let number = self.next_seat.fetch_add(1, Ordering::Relaxed);
        self.seats.lock().insert(number, Arc::downgrade(desk));
        Seat { node: Arc::clone(self), number }
    }

    /// A client let something go.
    pub fn let_go(&self) {
        if self.is_draining() || self.is_stopped() {
            drop(self.waiting.lock());
            self.lighter.notify_all();
        }
    }

    /// Waits until no client holds anything, and says what they hold when the time is over.
    fn wait_until_light(&self, until: Instant) -> usize {
        let mut waiting = self.waiting.lock();
        loop {
            let held: usize = self.desks().iter().map(|desk| desk.session().holds()).sum();
            let left = until.saturating_duration_since(Instant::now());
            if held == 0 || left.is_zero() {
                return held;
            }
            self.lighter.wait_for(&mut waiting, left);
        }
    }

    pub fn count_hits(&self, memory: usize, disk: usize, peers: usize) {
        let counts = &self.counts;
        counts.hits_memory.fetch_add(memory as u64, Ordering::Relaxed);
        counts.hits_disk.fetch_add(disk as u64, Ordering::Relaxed);
        counts.hits_peers.fetch_add(peers as u64, Ordering::Relaxed);
    }

    /// A client is not let in. Told at most once a minute for each kind of refusal.
    pub fn count_refused(&self, refusal: Refusal, why: &str) {
        self.counts.refused.fetch_add(1, Ordering::Relaxed);
        let gate = self.refused_gates.get(refusal as usize);
        if let Some(before) = gate.and_then(LogGate::pass) {
            tracing::warn!("a client was refused: {refusal:?}: {why} ({before} more since the last line)");
        }
    }

    /// Slots whose client went without a word.
    pub fn count_orphans(&self, slots: usize) {
        self.counts.orphans.fetch_add(slots as u64, Ordering::Relaxed);
    }

    pub fn count_corrupt(&self) {
        self.counts.corrupt.fetch_add(1, Ordering::Relaxed);
    }

    pub fn clients(&self) -> Vec<ClientStat> {
        let stat = |desk: Arc<Desk>| {
            let session = desk.session();
            ClientStat { name: desk.name.clone(), leases: session.leases(), slots: session.slots() }
        };
        self.desks().into_iter().map(stat).collect()
    }

    pub fn stat(&self) -> NodeStat {
        let stat = self.store.stat();
        let desks = self.desks();
        let (pulled, not_pulled) = self.elsewhere().map_or((0, 0), |elsewhere| elsewhere.pulled());
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let counts = &self.counts;
        NodeStat {
            capacity_bytes: stat.capacity_bytes,
            used_bytes: stat.arena.used_bytes,
            chunks: stat.chunks as u64,
            corrupt: load(&counts.corrupt),
            clients: desks.len() as u64,
            leases: desks.iter().map(|desk| desk.session().leases() as u64).sum(),
            slots: desks.iter().map(|desk| desk.session().slots() as u64).sum(),
            orphans: load(&counts.orphans),
            refused: load(&counts.refused),
            hits: [load(&counts.hits_memory), load(&counts.hits_disk), load(&counts.hits_peers)],
            pulled,
            not_pulled,
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.node.seats.lock().remove(&self.number);
    }
}

impl Drop for Greeting {
    fn drop(&mut self) {
        self.0.greeting.fetch_sub(1, Ordering::AcqRel);
        self.0.let_go();
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        self.0.inside.fetch_sub(1, Ordering::AcqRel);
        self.0.let_go();
    }
}
