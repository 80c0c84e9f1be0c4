//! A store in the engine's own process. This file knows how the store's words are the engine's.

use super::{KvLease, KvStore, Miss, OnLoaded, OnStored, Refused};
use crate::scheduler::Residence;
use forebay_kv::ChunkId;
use forebay_store::{Lease, NotLoaded, Store, TenantId};
use forebay_transfer::{Class, Span};

/// A store and whose chunks the engine's are.
#[derive(Debug, Clone)]
pub struct InProcess {
    store: Store,
    tenant: TenantId,
}

/// A lease and its store.
#[derive(Debug)]
struct StoreLease {
    store: Store,
    lease: Lease,
}

impl InProcess {
    /// `store` as an engine of `tenant` sees it.
    pub fn new(store: Store, tenant: TenantId) -> InProcess {
        InProcess { store, tenant }
    }
}

impl KvStore for InProcess {
    fn is_reachable(&self) -> bool {
        true
    }

    fn lookup(&self, ids: &[ChunkId]) -> usize {
        self.store.lookup(ids)
    }

    fn used(&self, ids: &[ChunkId], chunk_bytes: u64) {
        self.store.used(self.tenant, ids, chunk_bytes);
    }

    fn lease(&self, ids: &[ChunkId], ttl_us: u64) -> Box<dyn KvLease> {
        let lease = self.store.lease(self.tenant, ids, ttl_us);
        Box::new(StoreLease { store: self.store.clone(), lease })
    }

    fn store_chunk(
        &self,
        id: ChunkId,
        parent: Option<ChunkId>,
        layers: &[Vec<Span>],
        class: Class,
        on_end: OnStored,
    ) -> Result<(), Refused> {
        self.store.store_chunk(self.tenant, id, parent, layers, class, on_end).map_err(|_| Refused)
    }
}

impl KvLease for StoreLease {
    fn residence(&self) -> Residence {
        let memory = self.lease.in_memory();
        Residence { memory, disk: self.lease.len() - memory, peers: 0 }
    }

    fn load_chunk(
        &self,
        chunk: usize,
        targets: &[Vec<Span>],
        class: Class,
        deadline_us: Option<u64>,
        on_end: OnLoaded,
    ) -> Result<(), Miss> {
        let begun = self.store.load_chunk(&self.lease, chunk, targets, class, deadline_us, on_end);
        begun.map_err(|not_loaded| match not_loaded {
            NotLoaded::Unreadable(why) => why.into(),
            _ => Miss::Unmoved,
        })
    }

    fn verify(&self, chunk: usize, layer: usize, bytes: &[u8]) -> Result<(), Miss> {
        Ok(self.store.verify(&self.lease, chunk, layer, &[bytes])?)
    }
}
