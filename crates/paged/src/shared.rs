//! What the loads and stores of one cache share, and the lines that they write to the log.

use crate::access::Access;
use crate::cache::CacheShape;
use crate::copies::Copies;
use crate::jobs::Jobs;
use crate::limiter::Limiter;
use crate::stats::Counters;
use crate::thread_pool::TaskQueue;
use crate::verify::Verify;
use forebay_client::{Client, NodeArena};
use forebay_transfer::lock::{Mutex, RwLock};
use forebay_transfer::{LogGate, MoverHandle};
use std::sync::Arc;
use std::sync::atomic::Ordering;

#[derive(Debug)]
pub struct Shared {
    pub cache: CacheShape,
    pub copies: Arc<dyn Copies>,
    /// Who checks what was loaded, and sums up what is stored.
    pub verify: Verify,
    pub counters: Counters,
    pub jobs: Jobs,
    /// What is done soon.
    pub tasks: Arc<TaskQueue>,
    pub access: Arc<Access>,
    /// Chunks that the node is asked to bring.
    pub fetches: Arc<Limiter>,
    /// Chunks that the node has slots for.
    pub slots: Arc<Limiter>,
    pub log: Log,
    /// `None` when the cache is closed.
    pub client: RwLock<Option<Client>>,
    pub mover: MoverHandle,
    pub storing_bytes_max: u64,
}

/// The log's lines of one cache; of each kind one a minute.
#[derive(Debug, Default)]
pub struct Log {
    short: LogGate,
    late: LogGate,
    corrupt: LogGate,
    refused: LogGate,
    /// The node whose memory was met last.
    node: Mutex<Option<[u8; 16]>>,
}

impl Shared {
    /// The client of the node, until the cache is closed.
    pub fn client(&self) -> Option<Client> {
        self.client.read().clone()
    }

    pub fn now_us(&self) -> u64 {
        self.mover.now_us()
    }

    /// A node is there: tells whoever copies of its arena, unless the cache is closed. What is to
    /// be closed waits until that is said.
    pub fn meet(self: &Arc<Self>, arena: &Arc<NodeArena>) {
        let client = self.client.read();
        if client.is_none() {
            return;
        }
        self.copies.meet(arena);
        if self.log.node.lock().replace(arena.instance()) == Some(arena.instance()) {
            return;
        }
        tracing::info!(arena_bytes = arena.bytes(), "node found");
        let shared = Arc::downgrade(self);
        arena.when_gone(Box::new(move || {
            if shared.upgrade().is_some_and(|shared| shared.client().is_some()) {
                tracing::warn!("node lost");
            }
        }));
    }

    /// Whether so many more bytes may be stored now; then they are on their way.
    pub fn admit(&self, bytes: u64) -> bool {
        let fits = |storing: u64| storing.checked_add(bytes).filter(|sum| *sum <= self.storing_bytes_max);
        self.counters.bytes_storing.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_ok()
    }
}

impl Log {
    /// Of a load fewer tokens may be used than were asked for.
    pub fn short(&self, job: u64, tokens: u64, wanted: u64, reason: &str) {
        if let Some(repeated) = self.short.pass() {
            tracing::warn!(job, tokens, wanted, reason, repeated, "load ended short");
        }
    }

    /// A load's time limit has passed.
    pub fn late(&self, job: u64, limit_us: u64, layerwise: bool) {
        if let Some(repeated) = self.late.pass() {
            tracing::warn!(job, limit_us, layerwise, repeated, "load timed out");
        }
    }

    /// A layer has other bytes than were stored.
    pub fn corrupt(&self, job: u64, chunk: usize, layer: u32) {
        if let Some(repeated) = self.corrupt.pass() {
            tracing::error!(job, chunk, layer, repeated, "corrupt layer");
        }
    }

    pub fn refused(&self, job: u64, chunks: usize, reason: &str) {
        if let Some(repeated) = self.refused.pass() {
            tracing::warn!(job, chunks, reason, repeated, "chunks not stored");
        }
    }
}
