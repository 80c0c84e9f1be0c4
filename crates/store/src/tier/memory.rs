//! The memory tier: a tier whose medium is the arena. This file knows slabs and the checksums of
//! what rests in them.

use super::{SlotRead, SlotWrite, Tier, WriteBegun};
use crate::chunk_leases::{ChunkLeases, LeaseId};
use crate::entry::{ChunkRef, State};
use crate::slots::{SlabError, Slots};
use crate::stat::{NotCommitted, Stat, Unreadable};
use crate::tenant::{Quotas, TenantId};
use forebay_kv::ChunkId;

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
