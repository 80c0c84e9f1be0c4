//! Leases as users hold them: over a prefix in memory and what follows it on disk. This file knows
//! that a lease ends when its holder drops it.

use super::{Store, StoreInner};
use crate::chunk_leases::LeaseId;
use crate::ssd::DiskLease;
use crate::stat::Unreadable;
use crate::tenant::TenantId;
use forebay_kv::ChunkId;
use forebay_transfer::lock::Mutex;
use std::collections::HashMap;
use std::sync::Arc;

/// The right to load the chunks of a prefix until it expires, is released or dropped. The chunks
/// stay where they are as long. The first [`in_memory`](Lease::in_memory) of them are read from
/// memory, the others from disk.
#[derive(Debug)]
pub struct Lease {
    shared: Arc<StoreInner>,
    /// None for a lease of nothing in memory.
    id: Option<LeaseId>,
    in_memory: usize,
    disk: Option<DiskPart>,
}

/// The part of a lease that lies on disk.
#[derive(Debug)]
pub(super) struct DiskPart {
    pub lease: DiskLease,
    pub tenant: TenantId,
    /// The chunk before it, then its chunks.
    ids: Vec<Option<ChunkId>>,
    pub checksums: Arc<DiskChecksums>,
}

/// What the layers that were read from disk must be: their CRC-32C and length, by chunk of the
/// lease and layer.
#[derive(Debug, Default)]
pub(super) struct DiskChecksums(Mutex<HashMap<(usize, usize), (u32, u64)>>);

impl Store {
    /// Leases the longest prefix of `ids`, a sequence from its first chunk on, that is here, for
    /// `ttl_us` or the configured maximum. The lease is empty if nothing is here, or as many leases
    /// as may be are alive (counted in
    /// [`Counters::refusals`](crate::Counters::refusals)).
    pub fn lease(&self, tenant: TenantId, ids: &[ChunkId], ttl_us: u64) -> Lease {
        let lease = self.lease_uncounted(tenant, ids, ttl_us);
        if let Some(disk) = self.shared.open_disk() {
            disk.count_hits(lease.in_memory, lease.len() - lease.in_memory);
        }
        lease
    }

    /// The same without counting hits, for those who keep chunks and do not load them.
    pub fn lease_uncounted(&self, tenant: TenantId, ids: &[ChunkId], ttl_us: u64) -> Lease {
        let shared = Arc::clone(&self.shared);
        let granted = shared.tier.lock().lease(shared.now_us(), tenant, ids, ttl_us);
        let (id, in_memory) = granted.map_or((None, 0), |(id, chunks)| (Some(id), chunks));
        let disk = shared.open_disk().and_then(|disk| {
            let lease = disk.ssd.lease(tenant, &ids[in_memory..], ttl_us);
            DiskPart::new(lease, tenant, &ids[..in_memory], &ids[in_memory..])
        });
        Lease { shared, id, in_memory, disk }
    }
}

impl Lease {
    pub fn len(&self) -> usize {
        self.in_memory + self.disk.as_ref().map_or(0, |disk| disk.lease.len())
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The store whose chunks these are.
    pub(crate) fn store(&self) -> Store {
        Store { shared: Arc::clone(&self.shared) }
    }

    /// How many of its chunks, from the first on, are in memory.
    pub fn in_memory(&self) -> usize {
        self.in_memory
    }

    /// Lets the lease end `ttl_us` from now, or after the configured maximum. Fails if it is dead
    /// already.
    pub fn renew(&self, ttl_us: u64) -> Result<(), Unreadable> {
        if let Some(id) = self.id {
            let now_us = self.shared.now_us();
            self.shared.tier.lock().renew(now_us, id, ttl_us)?;
        }
        match &self.disk {
            Some(disk) => disk.lease.renew(ttl_us),
            None => self.memory_id().map(drop),
        }
    }

    /// Ends the lease; dropping it does the same. Loads under way go on.
    pub fn release(self) {}

    pub(super) fn memory_id(&self) -> Result<LeaseId, Unreadable> {
        self.id.ok_or(Unreadable::DeadLease)
    }

    /// The part that has `chunk`, and its place there, if it lies on disk. A chunk beyond the lease
    /// is in either part.
    pub(super) fn on_disk(&self, chunk: usize) -> Option<(&DiskPart, usize)> {
        Some((self.disk.as_ref()?, chunk.checked_sub(self.in_memory)?))
    }
}

impl DiskPart {
    fn new(lease: DiskLease, tenant: TenantId, before: &[ChunkId], ids: &[ChunkId]) -> Option<DiskPart> {
        if lease.is_empty() {
            return None;
        }
        let parent = before.last().copied();
        let ids = std::iter::once(parent).chain(ids[..lease.len()].iter().copied().map(Some)).collect();
        Some(DiskPart { lease, tenant, ids, checksums: Arc::default() })
    }

    /// A chunk's id and that of the chunk before it.
    pub fn name(&self, chunk: usize) -> Option<(ChunkId, Option<ChunkId>)> {
        let id = self.ids.get(chunk + 1).copied().flatten()?;
        Some((id, self.ids[chunk]))
    }
}

impl DiskChecksums {
    pub fn note(&self, chunk: usize, layer: usize, sum: u32, bytes: u64) {
        self.0.lock().insert((chunk, layer), (sum, bytes));
    }

    pub fn get(&self, chunk: usize, layer: usize) -> Option<(u32, u64)> {
        self.0.lock().get(&(chunk, layer)).copied()
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            let now_us = self.shared.now_us();
            self.shared.tier.lock().release(now_us, id);
        }
    }
}
