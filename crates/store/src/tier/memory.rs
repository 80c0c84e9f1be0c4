//! The memory tier: a tier whose medium is the arena. This file knows slabs and the checksums of
//! what rests in them.

use super::{SlotAllocator, SlotRead, SlotWrite, Tier, WriteBegun};
use crate::absence::Absence;
use crate::chunk_leases::{ChunkLeases, LeaseId};
use crate::entry::{ChunkRef, State};
use crate::slots::{SlabError, SlotId, Slots};
use crate::stat::{NotCommitted, Stat, Unreadable};
use crate::tenant::{Quotas, TenantId};
use forebay_kv::ChunkId;
use std::sync::mpsc::Sender;

/// Chunks in memory.
pub type MemoryTier = Tier<Slots>;
/// A read from memory.
pub type Read = SlotRead<Slots>;
/// A write to memory.
pub type Write = SlotWrite<Slots>;
/// What became of the wish to store a chunk in memory.
pub type Begun = WriteBegun<Slots>;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TierConfig {
    pub capacity_bytes: u64,
    /// Length of a slab: the largest chunk, and the unit in which memory passes between chunks of
    /// different shapes. A multiple of [`SLOT_ALIGN_BYTES`](crate::SLOT_ALIGN_BYTES).
    pub slab_bytes: u64,
    /// Chunks known at most. Tables for so many are reserved at the start, 90 bytes each, and
    /// touched as they fill.
    pub max_chunks: u32,
    pub max_leases: usize,
    /// Longest time to live of a lease; longer wishes are cut to it.
    pub max_lease_us: u64,
    /// What a tenant may use that is not named in `quotas`.
    pub default_quota_bytes: u64,
    /// What single tenants may use.
    pub quotas: Vec<(TenantId, u64)>,
}

impl TierConfig {
    /// A tier without quotas: slabs of the largest power of two up to a 64th of the capacity and
    /// 256 MiB, an index for chunks of 64 KiB and larger, 65,536 leases of at most a minute.
    pub fn new(capacity_bytes: u64) -> TierConfig {
        let align = crate::SLOT_ALIGN_BYTES;
        let slab = (capacity_bytes / 64).clamp(align, crate::slots::SLAB_BYTES_MAX);
        TierConfig {
            capacity_bytes,
            slab_bytes: 1 << slab.ilog2(),
            max_chunks: u32::try_from(capacity_bytes / (64 << 10)).unwrap_or(u32::MAX).max(1024),
            max_leases: 65_536,
            max_lease_us: 60_000_000,
            default_quota_bytes: u64::MAX,
            quotas: Vec::new(),
        }
    }
}

/// The slot of a chunk that is forgotten, in the hands of whoever overwrites it.
#[derive(Debug)]
#[must_use = "the slot stays taken until the wipe is ended"]
pub struct Wipe {
    pub offset_bytes: u64,
    pub bytes: u64,
    slot: SlotId,
}

impl MemoryTier {
    pub fn new(config: TierConfig) -> Result<MemoryTier, SlabError> {
        let slots = Slots::new(config.capacity_bytes, config.slab_bytes)?;
        let leases = ChunkLeases::new(config.max_leases, config.max_lease_us);
        let quotas = Quotas::new(config.default_quota_bytes, config.quotas);
        Ok(Tier::with_space(slots, config.max_chunks, leases, quotas))
    }

    /// All bytes of the chunk are in its slot: it becomes visible, with the CRC-32C of each layer.
    pub fn commit(&mut self, now_us: u64, write: Write, checksums: &[u32]) -> Result<(), NotCommitted> {
        self.advance(now_us);
        let layers = write.shape().layers();
        if checksums.len() != layers {
            self.abort(now_us, write, 0);
            return Err(NotCommitted::Checksums { given: checksums.len(), layers });
        }
        let slot = write.slot;
        self.finish(write)?;
        self.space.set_checksums(slot, checksums);
        Ok(())
    }

    /// Begins to read a chunk of a lease, and gives the CRC-32C of its layers.
    pub fn begin_read_with_checksums(
        &mut self,
        now_us: u64,
        lease: LeaseId,
        chunk: usize,
    ) -> Result<(Read, Vec<u32>), Unreadable> {
        self.advance(now_us);
        let (chunk, slot) = self.readable(lease, chunk)?;
        let checksums = self.space.checksums(slot).to_vec();
        Ok((self.start_reading(chunk, slot), checksums))
    }

    /// Begins to read a chunk for a tier below, and gives the CRC-32C of its layers. No lease is
    /// needed, and it is no use: the chunk stays as cold as it is.
    pub fn begin_copy(&mut self, now_us: u64, tenant: TenantId, id: &ChunkId) -> Option<(Read, Vec<u32>)> {
        self.advance(now_us);
        let row = self.index.find(id)?;
        let entry = self.entry(row);
        let slot = entry.slot.filter(|_| entry.is_resident() && entry.tenant == tenant)?;
        let chunk = ChunkRef { row, generation: entry.generation };
        let checksums = self.space.checksums(slot).to_vec();
        Some((self.start_reading(chunk, slot), checksums))
    }

    /// Drops a chunk as [`delete`](MemoryTier::delete) does, and has its bytes overwritten before
    /// anybody else gets them. Says whether it was here, or being written.
    pub fn forget(&mut self, tenant: TenantId, id: &ChunkId) -> bool {
        let Some(row) = self.index.find(id).filter(|row| self.entry(*row).tenant == tenant) else {
            return false;
        };
        let slot = self.entry(row).slot;
        slot.into_iter().for_each(|slot| self.space.wipes.want(slot));
        self.drop_bytes(row, Absence::Deleted)
    }

    /// Has `bell` rung whenever a slot is to be overwritten that nobody uses any more.
    pub(crate) fn set_wipe_bell(&mut self, bell: Sender<()>) {
        self.space.wipes.set_bell(bell);
    }

    /// A slot to be overwritten now.
    pub fn next_wipe(&mut self) -> Option<Wipe> {
        let slot = self.space.wipes.next()?;
        let (offset_bytes, bytes) = (self.space.offset_bytes(slot), self.space.bytes_of(slot));
        Some(Wipe { offset_bytes, bytes, slot })
    }

    /// It was overwritten: others may have it.
    pub fn end_wipe(&mut self, wipe: Wipe) {
        self.space.end_wipe(wipe.slot);
    }

    /// Slots that are not overwritten yet.
    pub fn to_overwrite(&self) -> usize {
        self.space.wipes.slots().count()
    }

    /// The chunk that a chunk continues, and its length, if it is here and the tenant's.
    pub(crate) fn described(&self, tenant: TenantId, id: &ChunkId) -> Option<(Option<ChunkId>, u64)> {
        let row = self.index.find(id).filter(|_| self.has(tenant, id))?;
        let slot = self.entry(row).slot?;
        Some((self.parent_id(row), self.space.shape(slot).bytes()))
    }

    /// Whether the chunk is here or on its way, so that others may be stored below it.
    pub fn takes_below(&self, id: &ChunkId) -> bool {
        self.index.find(id).is_some_and(|row| self.entry(row).state != State::Hole)
    }

    /// Whether the chunk that is read is still here: nobody deleted it or found it corrupt
    /// meanwhile.
    pub fn is_current(&self, read: &Read) -> bool {
        self.is_live(&read.chunk)
    }

    /// The CRC-32C that a layer had when it was stored, and its length.
    pub fn sum(
        &mut self,
        now_us: u64,
        lease: LeaseId,
        chunk: usize,
        layer: usize,
    ) -> Result<(u32, u64), Unreadable> {
        self.advance(now_us);
        let (_, slot) = self.readable(lease, chunk)?;
        let outside = Unreadable::Outside { chunk, layer };
        let extent = self.space.shape(slot).layer(layer).ok_or(outside)?;
        let sum = self.space.checksums(slot).get(layer).copied().ok_or(outside)?;
        Ok((sum, extent.end - extent.start))
    }

    pub fn stat(&self) -> Stat {
        Stat {
            capacity_bytes: self.space.capacity_bytes(),
            arena: self.space.usage(),
            counters: self.counters(),
            slot_table_bytes: self.space.table_bytes(),
        }
    }
}
