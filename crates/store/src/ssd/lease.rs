//! Leases as users hold them. This file knows that a lease ends when its holder drops it.

use super::Ssd;
use super::inner::SsdInner;
use crate::chunk_leases::LeaseId;
use crate::log::SlotShape;
use crate::stat::Unreadable;
use crate::tenant::TenantId;
use crate::tier::ReadEnd;
use forebay_kv::ChunkId;
use std::sync::Arc;

/// The right to read the chunks of a prefix until it expires or is dropped. The chunks stay on disk
/// as long.
#[derive(Debug)]
pub struct DiskLease {
    shared: Arc<SsdInner>,
    /// None for a lease of nothing.
    id: Option<LeaseId>,
    tenant: TenantId,
    chunks: usize,
}

impl Ssd {
    /// Leases the longest prefix of `ids` that is here, for `ttl_us` or the configured maximum. The
    /// lease is empty if nothing is here, or if as many leases as may be are alive, which is
    /// counted.
    pub fn lease(&self, tenant: TenantId, ids: &[ChunkId], ttl_us: u64) -> DiskLease {
        let shared = self.shared();
        let granted = shared.change(|tier, now_us| tier.lease(now_us, tenant, ids, ttl_us));
        let (id, chunks) = granted.map_or((None, 0), |(id, chunks)| (Some(id), chunks));
        DiskLease { shared: Arc::clone(shared), id, tenant, chunks }
    }
}

impl DiskLease {
    pub fn len(&self) -> usize {
        self.chunks
    }

    pub fn is_empty(&self) -> bool {
        self.chunks == 0
    }

    /// Lets the lease end `ttl_us` from now, or after the configured maximum. Fails if it is dead
    /// already.
    pub fn renew(&self, ttl_us: u64) -> Result<(), Unreadable> {
        let id = self.id()?;
        self.shared.change(|tier, now_us| tier.renew(now_us, id, ttl_us)).map(drop)
    }

    /// How a chunk lies on disk, and whether it can be read into memory from there without a copy.
    pub(crate) fn layout_of(&self, chunk: usize) -> Result<(Arc<SlotShape>, bool), Unreadable> {
        let id = self.id()?;
        let shape = self.shared.change_quietly(|tier, now_us| {
            let read = tier.begin_read(now_us, id, chunk)?;
            let shape = Arc::clone(&read.shape);
            tier.end_read(now_us, read, ReadEnd::Done);
            Ok(shape)
        })?;
        let is_plain = shape.is_dense() && !self.shared.keys.has(self.tenant);
        Ok((shape, is_plain))
    }

    pub(super) fn id(&self) -> Result<LeaseId, Unreadable> {
        self.id.ok_or(Unreadable::DeadLease)
    }
}

impl Drop for DiskLease {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            self.shared.change(|tier, now_us| tier.release(now_us, id));
        }
    }
}
