//! A directory in etcd: each node keeps its record and the names of its chunks there, under a
//! lease, and follows what others keep there with a watch. Nodes that die disappear when their
//! leases do.
//!
//! It speaks the JSON gateway that every etcd from 3.4 has on its client port, with the HTTP client
//! that the project has anyway. The gRPC clients would bring a second HTTP stack and a code
//! generator for six calls; what the gateway costs, base64 and JSON, matters to nobody: a change of
//! a chunk is some 200 bytes, and chunks change slowly.
//!
//! Knows how to start and stop; what is done meanwhile is in the files below. Etcd is reached by
//! plain HTTP without a password: over TLS, or with users, it is not yet.

mod client;
mod driver;
mod keys;
mod ledger;
mod membership;
mod mirror;
#[cfg(test)]
mod simulation;
mod wire;

use super::{Directory, DirectoryStat, Holders, NodeRecord};
use client::Client;
use forebay_kv::ChunkId;
use forebay_transfer::lock::Mutex;
use membership::{Limits, Membership};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use thiserror::Error;
use tokio::sync::Notify;

pub(crate) const PREFIX_BYTES_MAX: usize = 256;
/// A lease's length, bounds.
pub(crate) const TTL_S: std::ops::RangeInclusive<u32> = 2..=3600;

/// How etcd is reached and used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EtcdConfig {
    /// `http://host:port` of each etcd; the next is tried when one does not answer.
    pub endpoints: Vec<String>,
    /// All keys are below it. Nodes with the same prefix find each other.
    pub prefix: String,
    /// A node that is silent for so long counts as dead.
    pub ttl_s: u32,
    pub request_limit_us: u64,
    /// Chunks of this node that others are told of.
    pub chunks_max: usize,
    /// Pairs of a chunk and a node that are remembered.
    pub holdings_max: usize,
    /// A watch that is silent for so long is tested with a write.
    pub quiet_us: u64,
}

impl Default for EtcdConfig {
    fn default() -> EtcdConfig {
        EtcdConfig {
            endpoints: vec!["http://127.0.0.1:2379".into()],
            prefix: "/forebay".into(),
            ttl_s: 10,
            request_limit_us: 2_000_000,
            chunks_max: 1 << 20,
            holdings_max: 1 << 22,
            quiet_us: 30_000_000,
        }
    }
}

/// Why a directory cannot be started. That etcd is down is no reason.
#[derive(Debug, Error)]
pub enum EtcdError {
    #[error("endpoint is {value:?}; allowed: {}", forebay_otlp::endpoint::ALLOWED)]
    Endpoint { value: String },
    #[error("prefix has {bytes} bytes; allowed: {PREFIX_BYTES_MAX}")]
    Prefix { bytes: usize },
    #[error("ttl_s is {value}; allowed: {} to {}", TTL_S.start(), TTL_S.end())]
    Ttl { value: u32 },
    #[error("the directory's thread: {0}")]
    Thread(std::io::Error),
}

/// A directory in etcd. Dropping it tells the others that this node is gone.
#[derive(Debug)]
pub struct EtcdDirectory {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    membership: Mutex<Membership>,
    started: Instant,
    closing: AtomicBool,
    /// Something is to be said, or everything is to end.
    stirred: Notify,
}

impl Shared {
    fn with_membership<T>(&self, f: impl FnOnce(&mut Membership, u64) -> T) -> T {
        let mut membership = self.membership.lock();
        f(&mut membership, self.now_us())
    }

    fn now_us(&self) -> u64 {
        self.started.elapsed().as_micros() as u64
    }

    fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }
}

impl EtcdDirectory {
    /// Joins, in the background: returns at once, whether etcd answers or not.
    pub fn start(config: &EtcdConfig, me: NodeRecord) -> Result<EtcdDirectory, EtcdError> {
        if config.prefix.len() > PREFIX_BYTES_MAX {
            return Err(EtcdError::Prefix { bytes: config.prefix.len() });
        }
        if !TTL_S.contains(&config.ttl_s) {
            return Err(EtcdError::Ttl { value: config.ttl_s });
        }
        let client = Client::new(&config.endpoints, Duration::from_micros(config.request_limit_us))?;
        let limits = Limits {
            ttl_s: config.ttl_s,
            chunks_max: config.chunks_max,
            holdings_max: config.holdings_max,
            quiet_us: config.quiet_us,
            test_us: config.request_limit_us,
        };
        let shared = Arc::new(Shared {
            membership: Mutex::new(Membership::new(&config.prefix, me, limits, 0)),
            started: Instant::now(),
            closing: AtomicBool::new(false),
            stirred: Notify::new(),
        });
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(EtcdError::Thread)?;
        let run = driver::run(Arc::clone(&shared), client);
        let thread = std::thread::Builder::new()
            .name("forebay-etcd".into())
            .spawn(move || {
                runtime.block_on(run);
                // A name that is being looked up keeps nobody from closing.
                runtime.shutdown_background();
            })
            .map_err(EtcdError::Thread)?;
        Ok(EtcdDirectory { shared, thread: Some(thread) })
    }
}

/// What another node with this one's name is told as.
fn conflict(namesake: &NodeRecord) -> String {
    let NodeRecord { name, address, .. } = namesake;
    format!(
        "another live node, at {address}, is called {name:?} as this one is; each hides the other's chunks: give each node \
         a name of its own"
    )
}

impl Directory for EtcdDirectory {
    fn nodes(&self) -> Vec<NodeRecord> {
        self.shared.with_membership(|membership, _| {
            let me = membership.me();
            membership.mirror().map(|mirror| mirror.nodes_but(me).cloned().collect()).unwrap_or_default()
        })
    }

    fn holders(&self, ids: &[ChunkId]) -> Holders {
        self.shared.with_membership(|membership, _| {
            let me = membership.me();
            let Some(mirror) = membership.mirror() else { return Holders::Unknown };
            Holders::Said(ids.iter().map(|&id| mirror.holders_but(id, me)).collect())
        })
    }

    fn announce(&self, added: &[ChunkId], removed: &[ChunkId]) {
        self.shared.with_membership(|membership, _| membership.announce(added, removed));
        self.shared.stirred.notify_one();
    }

    fn announce_all(&self, here: &[ChunkId]) {
        self.shared.with_membership(|membership, _| membership.announce_all(here));
        self.shared.stirred.notify_one();
    }

    fn conflict(&self) -> Option<String> {
        self.shared.with_membership(|membership, now_us| Some(conflict(membership.namesake(now_us)?)))
    }

    fn stat(&self) -> DirectoryStat {
        self.shared.with_membership(|membership, now_us| membership.stat(now_us))
    }
}

impl Drop for EtcdDirectory {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::Release);
        self.shared.stirred.notify_one();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has already been printed.
            let _ = thread.join();
        }
    }
}
