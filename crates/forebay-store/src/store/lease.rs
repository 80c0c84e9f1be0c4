//! Leases as users hold them. This file knows that a lease ends when its holder drops it; it must never know what it
//! keeps alive.

use super::{Shared, Store};
use crate::lease::LeaseId;
use crate::stat::Unreadable;
use crate::tenant::TenantId;
use forebay_kv::ChunkId;
use std::sync::Arc;

/// The right to load the chunks of a prefix until it expires, is released or dropped. The chunks stay in memory as long.
#[derive(Debug)]
pub struct Lease {
    shared: Arc<Shared>,
    /// None for a lease of nothing.
    id: Option<LeaseId>,
    chunks: usize,
}

impl Store {
    /// Leases the longest prefix of `ids` that is here, for `ttl_us` or the configured maximum. The lease is empty if
    /// nothing is here, or as many leases as may be are alive (counted in [`Stat::refusals`](crate::Stat::refusals)).
    pub fn lease(&self, tenant: TenantId, ids: &[ChunkId], ttl_us: u64) -> Lease {
        let now_us = self.shared.now_us();
        let granted = self.shared.tier().lease(now_us, tenant, ids, ttl_us);
        let (id, chunks) = granted.map_or((None, 0), |(id, chunks)| (Some(id), chunks));
        Lease { shared: Arc::clone(&self.shared), id, chunks }
    }
}

impl Lease {
    /// Number of chunks.
    pub fn len(&self) -> usize {
        self.chunks
    }

    /// Whether it gives access to nothing.
    pub fn is_empty(&self) -> bool {
        self.chunks == 0
    }

    /// Lets the lease end `ttl_us` from now, or after the configured maximum. Fails if it is dead already.
    pub fn renew(&self, ttl_us: u64) -> Result<(), Unreadable> {
        let now_us = self.shared.now_us();
        self.shared.tier().renew(now_us, self.id()?, ttl_us).map(drop)
    }

    /// Ends the lease; dropping it does the same. Loads under way go on.
    pub fn release(self) {}

    pub(super) fn id(&self) -> Result<LeaseId, Unreadable> {
        self.id.ok_or(Unreadable::DeadLease)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            let now_us = self.shared.now_us();
            self.shared.tier().release(now_us, id);
        }
    }
}
