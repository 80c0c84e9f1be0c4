//! A node with a log in the store's directory, and a client that reaches it by way of `between`.
//! This file starts and ends them.

use super::between;
use crate::faults::Faults;
use crate::protocol::Setup;
use forebay_client::{Client, ClientOptions, Lease};
use forebay_kv::{ChunkId, Digest};
use forebay_node::{Node, NodeConfig, SsdConfig, WriteBackPolicy};
use forebay_transfer::lock::Mutex;
use forebay_transfer::{HostLink, Limits, LinkSpec, MoverHandle, MoverThread, PathSpec, Place};
use std::collections::VecDeque;
use std::error::Error;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

pub const HOST: Place = Place::Host(0);
/// The log is cut into so many segments, roughly.
const SEGMENTS: u64 = 32;
/// Leases that a client keeps at most.
const LEASES_MAX: u64 = 32;
/// How long the node may take to end.
const END_LIMIT: Duration = Duration::from_secs(20);
/// A client that waits for its node for so long is not stuck because the machine is busy.
const ANSWER_LIMIT_US: u64 = 20_000_000;

type Failure = Box<dyn Error + Send + Sync>;

/// Both, and the client's mover. The client goes first.
pub struct Site {
    pub client: Client,
    pub mover: MoverHandle,
    _mover: MoverThread,
    pub node: Node,
    pub value_bytes: u64,
    namespace: String,
    /// Those of the last requests, which an engine still has under way.
    leases: Mutex<VecDeque<Arc<Lease>>>,
    leases_max: usize,
}

impl Site {
    pub fn open(setup: &Setup, faults: &Arc<Faults>) -> Result<Site, Failure> {
        let sockets = Sockets::make()?;
        let node = Node::start(&config(setup, sockets.0.join("node")))?;
        between::listen(&sockets.0.join("user"), &sockets.0.join("node"), faults)?;
        let thread = MoverThread::spawn(Limits::default())?;
        let mover = thread.handle();
        let link = mover.add_link(LinkSpec::new("host", 4, 64 << 20), Box::new(HostLink::new(1)?))?;
        mover.add_path(PathSpec::direct(HOST, HOST, link))??;
        let options =
            ClientOptions { answer_limit_us: ANSWER_LIMIT_US, ..ClientOptions::new(sockets.0.join("user")) };
        let client = Client::connect(&mover, HOST, options)?;
        let (value_bytes, namespace) = (setup.value_bytes, setup.namespace.clone());
        // Most of the memory is for those that come.
        let leases_max = LEASES_MAX.min(setup.staging_bytes / value_bytes / 4) as usize;
        let leases = Mutex::default();
        Ok(Site { client, mover, _mover: thread, node, value_bytes, namespace, leases, leases_max })
    }

    /// Keeps a lease until some others have come.
    pub fn hold(&self, lease: Arc<Lease>) {
        let mut leases = self.leases.lock();
        leases.push_back(lease);
        let oldest = if leases.len() > self.leases_max { leases.pop_front() } else { None };
        drop((leases, oldest));
    }

    pub fn id(&self, key: u64) -> ChunkId {
        let name = [self.namespace.as_bytes(), &key.to_le_bytes()].concat();
        ChunkId::from_bytes(*Digest::of(&name).as_bytes())
    }

    pub fn close(self) -> Result<(), Failure> {
        self.leases.lock().clear();
        self.client.close();
        self.node.drain(END_LIMIT)?;
        Ok(())
    }
}

fn config(setup: &Setup, socket: PathBuf) -> NodeConfig {
    let mut config = NodeConfig::new(socket, setup.staging_bytes);
    config.memory.largest_chunk = setup.value_bytes;
    config.memory.chunk_size = setup.value_bytes;
    config.copy_threads = 1;
    config.write_back = WriteBackPolicy::All;
    let segment_size = (setup.capacity_bytes / SEGMENTS).next_power_of_two();
    let (path, size) = (setup.dir.join("log"), setup.capacity_bytes);
    config.ssd = vec![SsdConfig { path, size, segment_size, create: true }];
    config
}

/// Where the sockets are until both ends are connected. Their paths must be short, and a store's
/// directory holds its files only.
struct Sockets(PathBuf);

impl Sockets {
    fn make() -> std::io::Result<Sockets> {
        let dir = std::env::temp_dir().join(format!("forebay-torture-sockets-{}", std::process::id()));
        std::fs::create_dir(&dir).map(|()| Sockets(dir))
    }
}

impl Drop for Sockets {
    fn drop(&mut self) {
        // What cannot be removed says by its name what it was for.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
