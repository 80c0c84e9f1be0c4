//! What a store has when there is a disk below its memory: the disk tier, write-back and counters.
//! This file joins them.

use super::promote::PromotionStat;
use super::write_back::{Dirty, WriteBack};
use super::{Store, StoreInner, WriteBackStat};
use crate::admission::{Chunk, ChunkKey};
use crate::ssd::{ReadResults, Ssd, SsdError, SsdStat, Staged};
use crate::tenant::TenantId;
use forebay_kv::ChunkId;
use forebay_transfer::lock::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The disk below.
#[derive(Debug)]
pub(super) struct Disk {
    pub ssd: Ssd,
    pub write_back: Arc<WriteBack>,
    counts: Mutex<DiskSideStat>,
    closed: AtomicBool,
}

/// A read of the disk, from before it begins until this is dropped, as write-back sees it.
pub(super) struct DiskReading {
    shared: Arc<StoreInner>,
    began_us: u64,
    bytes: u64,
}

/// Chunks that were leased to be loaded, by where they were.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Hits {
    pub memory: u64,
    /// On disk and not in memory.
    pub disk: u64,
}

/// What a store with a disk counts beside its memory tier's [`Stat`](crate::Stat).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DiskSideStat {
    pub hits: Hits,
    pub write_back: WriteBackStat,
    pub promotions: PromotionStat,
    /// Layers that were right in staging and wrong at their target.
    pub bad_copies: u64,
    pub ssd: SsdStat,
}

impl Disk {
    pub fn new(ssd: Ssd, write_back: Arc<WriteBack>) -> Disk {
        Disk { ssd, write_back, counts: Mutex::default(), closed: AtomicBool::new(false) }
    }

    pub fn count_hits(&self, memory: usize, disk: usize) {
        let hits = &mut self.counts.lock().hits;
        hits.memory += memory as u64;
        hits.disk += disk as u64;
    }

    pub fn count_bad_copy(&self) {
        self.counts.lock().bad_copies += 1;
    }

    fn stat(&self) -> DiskSideStat {
        let counts = self.counts.lock().clone();
        DiskSideStat { write_back: self.write_back.stat(), ssd: self.ssd.stat(), ..counts }
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        self.write_back.close();
    }
}

impl Store {
    /// Notes that a request uses a chain of chunks of `chunk_bytes` each, wherever they are and
    /// also if they have to be computed. In memory, those that are there from the first one on are
    /// the ones used last. Admission to the disk learns from it which chunks are used again; those
    /// of them that memory has and the disk has not are offered once more. To be called once for
    /// each request, as early as may be: it may wait long before it loads.
    pub fn used(&self, tenant: TenantId, ids: &[ChunkId], chunk_bytes: u64) {
        self.shared.tier.lock().used(tenant, ids);
        let Some(disk) = self.shared.open_disk() else { return };
        let chain: Vec<Chunk> =
            ids.iter().map(|id| Chunk { key: ChunkKey::from(id), bytes: chunk_bytes }).collect();
        disk.write_back.used(&chain);
        let in_memory = self.shared.tier.lock().lookup(tenant, ids);
        let on_disk = disk.ssd.lookup(tenant, &ids[..in_memory]);
        let dirty = (on_disk..in_memory).map(|at| {
            let parent = at.checked_sub(1).map(|before| ids[before]);
            Dirty { tenant, id: ids[at], parent, bytes: chunk_bytes }
        });
        disk.write_back.offer(self.shared.now_us(), dirty);
    }

    /// Waits until no chunk waits to be written to the disk and all that were written are durable.
    /// At once without a disk.
    pub fn flush(&self) -> Result<(), SsdError> {
        let Some(disk) = &self.shared.disk else { return Ok(()) };
        disk.write_back.drain();
        disk.ssd.flush()
    }

    /// Writes what waits, makes it durable and closes the disk, so that it opens fast. From now on
    /// there are hits in memory only. A store that is dropped instead loses what was not durable,
    /// and nothing else.
    pub fn close(&self) -> Result<(), SsdError> {
        let Some(disk) = &self.shared.disk else { return Ok(()) };
        disk.closed.store(true, Ordering::Release);
        disk.write_back.drain();
        self.close_at_once()
    }

    /// The same without writing what waits: for memory with which another process goes on.
    pub fn close_at_once(&self) -> Result<(), SsdError> {
        let Some(disk) = &self.shared.disk else { return Ok(()) };
        disk.closed.store(true, Ordering::Release);
        disk.write_back.close();
        disk.ssd.clone().close()
    }

    pub fn disk_stat(&self) -> Option<DiskSideStat> {
        self.shared.disk.as_ref().map(Disk::stat)
    }
}

impl StoreInner {
    /// The disk, as long as it can be read.
    pub(super) fn open_disk(&self) -> Option<&Disk> {
        self.disk.as_ref().filter(|disk| !disk.closed.load(Ordering::Acquire))
    }

    /// A chunk has become visible in memory. A disk that is being closed has enough to write.
    pub(super) fn offer_to_disk(&self, dirty: Dirty) {
        if let Some(disk) = self.open_disk() {
            disk.write_back.offer(self.now_us(), [dirty]);
        }
    }

    /// The disk is about to be read. Writes to it make way.
    pub(super) fn disk_reading(self: &Arc<Self>) -> DiskReading {
        let began_us = self.now_us();
        if let Some(disk) = &self.disk {
            disk.write_back.read_began(began_us);
        }
        DiskReading { shared: Arc::clone(self), began_us, bytes: 0 }
    }

    pub(super) fn count_promotion(&self, counter: impl FnOnce(&mut PromotionStat) -> &mut u64) {
        if let Some(disk) = &self.disk {
            *counter(&mut disk.counts.lock().promotions) += 1;
        }
    }
}

impl DiskReading {
    /// The disk has answered.
    pub fn end(mut self, ends: &ReadResults) {
        self.bytes = ends.iter().flatten().map(Staged::len_bytes).sum();
    }
}

impl Drop for DiskReading {
    fn drop(&mut self) {
        let now_us = self.shared.now_us();
        if let Some(disk) = &self.shared.disk {
            disk.write_back.read_ended(now_us, now_us.saturating_sub(self.began_us), self.bytes);
        }
    }
}
