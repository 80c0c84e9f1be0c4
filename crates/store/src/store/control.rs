//! What users say of single chunks, by name: that one is to stay, or that it is to leave memory;
//! and where one is. This file finds the tier that it concerns.

use super::Store;
use super::write_back::Dirty;
use crate::tenant::TenantId;
use crate::tier::Unchanged;
use forebay_kv::ChunkId;

/// Where a chunk of a tenant is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ChunkStatus {
    pub in_memory: bool,
    pub on_disk: bool,
    /// When its pin ends, in the mover's clock.
    pub pinned_until_us: Option<u64>,
}

impl Store {
    /// Keeps a chunk, and those that it continues, from being evicted from where it is: memory, or
    /// else the disk. For `ttl_us` or [`PIN_US_MAX`](crate::PIN_US_MAX); says until when. What is
    /// pinned still counts against the tenant's quota.
    pub fn pin(&self, tenant: TenantId, id: &ChunkId, ttl_us: u64) -> Result<u64, Unchanged> {
        let in_memory = self.shared.tier.lock().pin(self.shared.now_us(), tenant, id, ttl_us);
        match (in_memory, self.shared.open_disk()) {
            (Err(Unchanged::NotHere), Some(disk)) => disk.ssd.pin(tenant, id, ttl_us),
            (in_memory, _) => in_memory,
        }
    }

    /// Ends the pin of a chunk, wherever it is pinned.
    pub fn unpin(&self, tenant: TenantId, id: &ChunkId) -> Result<(), Unchanged> {
        let in_memory = self.shared.tier.lock().unpin(self.shared.now_us(), tenant, id);
        let Some(disk) = self.shared.open_disk() else { return in_memory };
        match (in_memory, disk.ssd.unpin(tenant, id)) {
            (Ok(()), _) | (_, Ok(())) => Ok(()),
            (Err(Unchanged::NotHere), on_disk) => on_disk,
            (in_memory, _) => in_memory,
        }
    }

    /// Has a chunk leave memory, if it is on disk. If it is not, it is written there now, whatever
    /// admission says, and stays.
    pub fn demote(&self, tenant: TenantId, id: &ChunkId) -> Result<(), Unchanged> {
        let shared = &self.shared;
        let disk = shared.open_disk().ok_or(Unchanged::NoDisk)?;
        if disk.ssd.has(tenant, id) {
            return match shared.tier.lock().demote(shared.now_us(), tenant, id) {
                // It has left already.
                Err(Unchanged::NotHere) => Ok(()),
                demoted => demoted,
            };
        }
        let (parent, bytes) = shared.tier.lock().described(tenant, id).ok_or(Unchanged::NotHere)?;
        disk.write_back.offer_admitted(shared.now_us(), Dirty { tenant, id: *id, parent, bytes });
        Err(Unchanged::NotOnDisk)
    }

    /// Where a chunk is, if it is the tenant's. Looking is no use.
    pub fn status(&self, tenant: TenantId, id: &ChunkId) -> ChunkStatus {
        let shared = &self.shared;
        let mut tier = shared.tier.lock();
        let (in_memory, pinned) = (tier.has(tenant, id), tier.pinned_until_us(shared.now_us(), tenant, id));
        drop(tier);
        let on_disk = shared.open_disk().filter(|disk| disk.ssd.has(tenant, id));
        let pinned_on_disk = on_disk.and_then(|disk| disk.ssd.pinned_until_us(tenant, id));
        ChunkStatus { in_memory, on_disk: on_disk.is_some(), pinned_until_us: pinned.or(pinned_on_disk) }
    }
}
