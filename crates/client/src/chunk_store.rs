//! A node as a [`ChunkStore`]: what an engine asks of a store, it asks of a client in the same
//! words.

use crate::{Client, Lease, NotLoaded};
use forebay_kv::ChunkId;
use forebay_store::chunk_store::{ChunkLease, ChunkStore, Miss, NotTaken, OnLoaded, OnStored, Residence};
use forebay_transfer::{Class, Span, TraceContext};

/// A lease and the client that it was asked for.
#[derive(Debug)]
struct NodeLease {
    client: Client,
    lease: Lease,
}

impl ChunkStore for Client {
    fn is_reachable(&self) -> bool {
        self.is_connected()
    }

    fn lookup(&self, ids: &[ChunkId]) -> usize {
        Client::lookup(self, ids)
    }

    fn used(&self, ids: &[ChunkId], chunk_bytes: u64) {
        Client::used(self, ids, chunk_bytes);
    }

    fn within(&self, within: TraceContext) -> Option<Box<dyn ChunkStore>> {
        Some(Box::new(Client::within(self, Some(within))))
    }

    fn lease(&self, ids: &[ChunkId], ttl_us: u64) -> Box<dyn ChunkLease> {
        Box::new(NodeLease { client: self.clone(), lease: Client::lease(self, ids, ttl_us) })
    }

    fn store_chunk(
        &self,
        id: ChunkId,
        parent: Option<ChunkId>,
        layers: &[Vec<Span>],
        class: Class,
        on_end: OnStored,
    ) -> Result<(), NotTaken> {
        Client::store_chunk(self, id, parent, layers, class, on_end).map_err(|_| NotTaken)
    }
}

impl ChunkLease for NodeLease {
    fn residence(&self) -> Residence {
        let (memory, disk) = (self.lease.in_memory(), self.lease.on_disk());
        Residence { memory, disk, peers: self.lease.on_peers() }
    }

    fn load_chunk(
        &self,
        chunk: usize,
        targets: &[Vec<Span>],
        class: Class,
        deadline_us: Option<u64>,
        on_end: OnLoaded,
    ) -> Result<(), Miss> {
        let begun = self.client.load_chunk(&self.lease, chunk, targets, class, deadline_us, on_end);
        begun.map_err(|not_loaded| match not_loaded {
            NotLoaded::Unreadable(why) => why.into(),
            _ => Miss::Unmoved,
        })
    }

    fn verify(&self, chunk: usize, layer: usize, bytes: &[u8]) -> Result<(), Miss> {
        Ok(self.client.verify(&self.lease, chunk, layer, &[bytes])?)
    }
}
