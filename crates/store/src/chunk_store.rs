//! What an engine needs of whatever keeps its chunks, in this process or in another: to ask what is
//! there, to lease it, to load it, to check what arrived, and to hand over what was computed.
//! [`TenantStore`] is a store of this process; `forebay_client::Client` is a node.

use crate::{Lease, NotLoaded, NotVerified, Store, StoreEnd, TenantId, Unreadable};
use forebay_kv::ChunkId;
use forebay_transfer::{Class, End, Span, TraceContext};
use std::fmt::Debug;
use std::ops::Range;

/// How many chunks of a prefix lie where: first those in memory, then those on disk, then those
/// that other nodes have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Residence {
    /// In the memory of the store.
    pub memory: usize,
    pub disk: usize,
    pub peers: usize,
}

impl Residence {
    pub fn chunks(&self) -> usize {
        self.memory + self.disk + self.peers
    }

    /// The chunks of a range, by where they lie.
    pub fn of(&self, chunks: Range<usize>) -> Residence {
        let within =
            |from: usize, len: usize| (from + len).min(chunks.end).saturating_sub(from.max(chunks.start));
        let (memory, disk) = (self.memory, self.disk);
        Residence {
            memory: within(0, memory),
            disk: within(memory, disk),
            peers: within(memory + disk, self.peers),
        }
    }
}

pub type OnLoaded = Box<dyn FnOnce(End) + Send>;

pub type OnStored = Box<dyn FnOnce(StoreEnd) + Send>;

/// Something that keeps chunks for an engine. Ids are always a sequence from its first chunk on.
pub trait ChunkStore: Debug + Send + Sync {
    /// Whether it answers at all. One that does not has nothing and takes nothing, and may come
    /// back.
    fn is_reachable(&self) -> bool;

    /// How many of `ids`, from the first on, are there.
    fn lookup(&self, ids: &[ChunkId]) -> usize;

    /// A request uses these chunks, wherever they are or if they have to be computed.
    fn used(&self, ids: &[ChunkId], chunk_bytes: u64);

    /// The same store for work that is part of this span; none where stores trace nothing.
    fn within(&self, _within: TraceContext) -> Option<Box<dyn ChunkStore>> {
        None
    }

    /// Leases the longest prefix of `ids` that is there, for `ttl_us` at most.
    fn lease(&self, ids: &[ChunkId], ttl_us: u64) -> Box<dyn ChunkLease>;

    /// Takes a chunk in: for each layer the spans whose bytes, one after another, are the layer.
    /// They stay unchanged until `on_end`, which is called once, from any thread, unless the chunk
    /// is refused.
    fn store_chunk(
        &self,
        id: ChunkId,
        parent: Option<ChunkId>,
        layers: &[Vec<Span>],
        class: Class,
        on_end: OnStored,
    ) -> Result<(), NotTaken>;
}

/// The right to load the chunks of a prefix, until it is dropped or dies.
pub trait ChunkLease: Debug + Send {
    fn residence(&self) -> Residence;

    /// Loads a chunk into `targets`, a list of spans for each layer. `on_end` is called once, from
    /// any thread, unless this is a miss. What arrived must be verified before it is used.
    fn load_chunk(
        &self,
        chunk: usize,
        targets: &[Vec<Span>],
        class: Class,
        deadline_us: Option<u64>,
        on_end: OnLoaded,
    ) -> Result<(), Miss>;

    /// Whether `bytes` are what a layer of a chunk had when it was stored.
    fn verify(&self, chunk: usize, layer: usize, bytes: &[u8]) -> Result<(), Miss>;
}

/// A chunk that was not taken in, for whatever reason; `on_end` will not be called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NotTaken;

/// Why a chunk that was found cannot be used. Its tokens, and those behind it, are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Miss {
    /// Whoever kept it does not answer any more.
    NodeGone,
    /// The lease ended before the chunk was in use.
    DeadLease,
    Missing,
    Corrupt,
    /// It was not moved: the transfer failed or was refused.
    Unmoved,
}

impl From<Unreadable> for Miss {
    fn from(why: Unreadable) -> Miss {
        match why {
            Unreadable::DeadLease => Miss::DeadLease,
            Unreadable::Gone { .. } | Unreadable::Outside { .. } => Miss::Missing,
        }
    }
}

impl From<NotVerified> for Miss {
    fn from(why: NotVerified) -> Miss {
        match why {
            NotVerified::Corrupt { .. } => Miss::Corrupt,
            NotVerified::Unreadable(why) => why.into(),
            NotVerified::Length { .. } => Miss::Missing,
        }
    }
}

/// A store as one tenant sees it.
#[derive(Debug, Clone)]
pub struct TenantStore {
    store: Store,
    tenant: TenantId,
}

impl TenantStore {
    /// `store` as an engine of `tenant` sees it.
    pub fn new(store: Store, tenant: TenantId) -> TenantStore {
        TenantStore { store, tenant }
    }
}

impl ChunkStore for TenantStore {
    fn is_reachable(&self) -> bool {
        true
    }

    fn lookup(&self, ids: &[ChunkId]) -> usize {
        self.store.lookup(self.tenant, ids)
    }

    fn used(&self, ids: &[ChunkId], chunk_bytes: u64) {
        self.store.used(self.tenant, ids, chunk_bytes);
    }

    fn lease(&self, ids: &[ChunkId], ttl_us: u64) -> Box<dyn ChunkLease> {
        Box::new(self.store.lease(self.tenant, ids, ttl_us))
    }

    fn store_chunk(
        &self,
        id: ChunkId,
        parent: Option<ChunkId>,
        layers: &[Vec<Span>],
        class: Class,
        on_end: OnStored,
    ) -> Result<(), NotTaken> {
        self.store.store_chunk(self.tenant, id, parent, layers, class, on_end).map_err(|_| NotTaken)
    }
}

impl ChunkLease for Lease {
    fn residence(&self) -> Residence {
        let memory = self.in_memory();
        Residence { memory, disk: self.len() - memory, peers: 0 }
    }

    fn load_chunk(
        &self,
        chunk: usize,
        targets: &[Vec<Span>],
        class: Class,
        deadline_us: Option<u64>,
        on_end: OnLoaded,
    ) -> Result<(), Miss> {
        let begun = self.store().load_chunk(self, chunk, targets, class, deadline_us, on_end);
        begun.map_err(|not_loaded| match not_loaded {
            NotLoaded::Unreadable(why) => why.into(),
            _ => Miss::Unmoved,
        })
    }

    fn verify(&self, chunk: usize, layer: usize, bytes: &[u8]) -> Result<(), Miss> {
        Ok(self.store().verify(self, chunk, layer, &[bytes])?)
    }
}
