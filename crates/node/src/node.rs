//! The node: the store, its mover, the clients of this host and other nodes, joined. This file
//! starts and stops them; `ending` ends them in order, `giving` hands the memory over to another
//! node, and `taking` begins with that of another one.

mod ending;
mod error;
mod giving;
mod joining;
mod memory;
mod opening;
mod taking;

pub use crate::local::clients::{ClientStat, Inherited};
pub use crate::local::control_counts::ControlStat;
pub use crate::local::ring_counts::RingStat;
pub use ending::{DrainError, Drained};
pub use error::NodeError;
pub use giving::{HandOverError, HandedOver};
pub use memory::{MemoryBound, NoMemory};

use crate::config::NodeConfig;
use crate::hand_over::Left;
use crate::local::clients::Clients;
use crate::local::listener::Listener;
use crate::metrics::{Metrics, MetricsServer};
use crate::peering::{Peering, PeeringStat};
use ending::Ender;
use forebay_client::protocol::answer::NodeStat;
use forebay_client::protocol::socket::WakeUp;
use forebay_cuda::driver::Driver;
use forebay_cuda::remote::{Relays, RelaysStat};
use forebay_otlp::Push;
use forebay_store::Store;
use forebay_transfer::listen::Admission;
use forebay_transfer::{HostLink, Limits, LinkSpec, MoverThread, PathSpec, Place};
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Where the arena is for the mover.
pub const HOST: Place = Place::Host(0);
/// Copies in flight from staging to the arena: lots, and bytes.
const COPY_WINDOW: (u32, u64) = (4, 64 << 20);
/// How long a node that stops waits for its clients' threads.
const STOP_PATIENCE: Duration = Duration::from_secs(5);

/// A node at work. Dropping it ends it at once, as a crash would: leases die, and what was not
/// durable is lost.
pub struct Node {
    clients: Arc<Clients>,
    peering: Option<Arc<Peering>>,
    relays: Option<Arc<Relays>>,
    metrics: Option<MetricsServer>,
    _push: Option<Push>,
    listener: Option<JoinHandle<Listener>>,
    wake_up: Arc<WakeUp>,
    ender: Ender,
    close_limit: Duration,
    /// Ends last.
    _mover: MoverThread,
}

impl Node {
    /// Whether a node can be told so on this machine: what the start asks first, and the check of a
    /// configuration too.
    pub fn check(config: &NodeConfig) -> Result<(), NodeError> {
        config.check().map_err(NodeError::Config)?;
        config.check_machine().map_err(NodeError::Config)?;
        match config.relays {
            Some(_) => Ok(Driver::load().map(drop)?),
            None => Ok(()),
        }
    }

    /// Whether the memory is left that a node with this configuration takes at its start.
    pub fn check_memory(config: &NodeConfig) -> Result<(), NoMemory> {
        opening::check_memory(config)
    }

    /// Starts a node: opens its logs, makes its arena and lets clients in.
    pub fn start(config: &NodeConfig) -> Result<Node, NodeError> {
        Node::check(config)?;
        // Before a log is made: one that is there keeps its segments.
        let effective = config.effective();
        let failed = |error| NodeError::Socket { path: config.socket.clone(), error };
        let listener = Listener::bind(&config.socket, &admission(config)).map_err(failed)?;
        Node::open(config, None)?.serve(listener, &effective)
    }

    /// Everything but letting clients in. With memory that another node has left, no byte of that
    /// changes before they are.
    fn open(config: &NodeConfig, left: Option<Left>) -> Result<Node, NodeError> {
        let system = |doing| move |error| NodeError::System { doing, error };
        let ender = Ender::start().map_err(system("the thread that ends the node"))?;
        let mover = MoverThread::spawn(Limits::default()).map_err(system("the mover"))?;
        let handle = mover.handle();
        let (window_lots, window_bytes) = COPY_WINDOW;
        let link = HostLink::new(config.copy_threads).map_err(system("threads that copy"))?;
        let link = handle.add_link(LinkSpec::new("h2h", window_lots, window_bytes), Box::new(link))?;
        handle.add_path(PathSpec::direct(HOST, HOST, link))??;
        let store = opening::open_store(&handle, config, left)?;
        let mut instance = [0; 16];
        let drawn = rustix::rand::getrandom(&mut instance, rustix::rand::GetRandomFlags::empty());
        drawn.map_err(|error| NodeError::System { doing: "drawing an instance", error: error.into() })?;
        let metrics = Arc::new(Metrics::new());
        let spans = Arc::clone(metrics.spans());
        let clients = Clients::new(store, handle, instance, spans, admission(config), &config.limits);
        let wake_up = Arc::new(WakeUp::new().map_err(system("an eventfd"))?);
        let node = Node {
            clients: Arc::new(clients),
            peering: None,
            relays: None,
            metrics: None,
            _push: None,
            listener: None,
            wake_up,
            ender,
            close_limit: Duration::from_secs(config.limits.close_s),
            _mover: mover,
        };
        node.join(config, metrics)
    }

    /// Lets clients in.
    fn serve(mut self, listener: Listener, effective: &NodeConfig) -> Result<Node, NodeError> {
        let (all, called) = (Arc::clone(&self.clients), Arc::clone(&self.wake_up));
        let run = move || {
            listener.run(&all, &called);
            listener
        };
        let thread = std::thread::Builder::new().name("forebay-listen".into()).spawn(run);
        let failed = |error| NodeError::System { doing: "the socket's thread", error };
        self.listener = Some(thread.map_err(failed)?);
        self.log_start(effective);
        Ok(self)
    }

    /// Says that the node is there, and what it was told.
    fn log_start(&self, config: &NodeConfig) {
        let shown = |address: Option<SocketAddr>| address.map(|address| address.to_string());
        tracing::info!(
            name = config.name,
            socket = %config.socket.display(),
            peers = shown(self.peer_address()),
            metrics = shown(self.metrics_address()),
            // A structure of tables, numbers and text always has a JSON form.
            config = serde_json::to_string(config).unwrap_or_default(),
            "node started"
        );
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
        &self.clients.store
    }

    /// This life of the node.
    pub fn instance(&self) -> [u8; 16] {
        self.clients.instance
    }

    pub fn stat(&self) -> NodeStat {
        self.clients.stat()
    }

    /// Who is connected.
    pub fn clients(&self) -> Vec<ClientStat> {
        self.clients.clients()
    }

    /// What clients asked through their rings.
    pub fn rings(&self) -> RingStat {
        self.clients.rings.stat()
    }

    /// The memory with which it began, if it did not begin empty.
    pub fn inherited(&self) -> Option<Inherited> {
        self.clients.inherited.get().copied()
    }

    /// Nodes that were to go on with its memory, and were refused it.
    pub fn successors_refused(&self) -> u64 {
        self.clients.not_given()
    }

    fn stop(&self) {
        self.clients.stop();
        if let Some(remote) = self.clients.remote() {
            remote.stop();
        }
        self.wake_up.wake();
        self.clients.wait_until_gone(Instant::now() + STOP_PATIENCE);
        // Not when the last share of the clients goes: a thread that has just counted itself out
        // may have it for a moment more, and the node that comes after listens on the same port.
        if let Some(remote) = self.clients.remote() {
            remote.close_port();
        }
    }
}

fn admission(config: &NodeConfig) -> Admission {
    Admission::new(config.token.clone(), config.allow_uids.clone())
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
