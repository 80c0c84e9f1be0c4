//! The memory tier: a tier whose medium is the arena. This file knows slabs and the checksums of
//! what rests in them.

use super::{Beginning, Reading, Refund, Space, Taken, Tier, TierLimits, Writing};
use crate::entry::{ChunkRef, EntryIx, State};
use crate::lease_table::LeaseId;
use crate::shape::ChunkShape;
use crate::slots::{SlabError, SlotId, Slots, slot_bytes};
use crate::stat::{NotCommitted, Refused, Stat, Unreadable};
use crate::tenant::TenantId;
use forebay_kv::ChunkId;
use std::sync::Arc;

/// Chunks in memory.
pub type MemoryTier = Tier<Slots>;
/// A read from memory.
pub type Read = Reading<Slots>;
/// A write to memory.
pub type Write = Writing<Slots>;
/// What became of the wish to store a chunk in memory.
pub type Begun = Beginning<Slots>;

/// The limits of a memory tier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TierConfig {
    pub capacity_bytes: u64,
    /// Length of a slab: the largest chunk, and the unit in which memory passes between chunks of
    /// different shapes. A multiple of [`SLOT_ALIGN_BYTES`](crate::SLOT_ALIGN_BYTES).
    pub slab_bytes: u64,
    /// Chunks known at most. Tables for so many are reserved at the start, 90 bytes each, and
    /// touched as they fill.
    pub max_chunks: u32,
    /// Leases alive at most.
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

/// Where a chunk lies in the arena.
#[derive(Debug)]
pub struct InArena {
    offset_bytes: u64,
    shape: Arc<ChunkShape>,
}

impl Read {
    /// Where the chunk starts in the arena.
    pub fn offset_bytes(&self) -> u64 {
        self.place.offset_bytes
    }

    /// The lengths of its layers.
    pub fn shape(&self) -> &ChunkShape {
        &self.place.shape
    }
}

impl Write {
    /// Where the chunk starts in the arena.
    pub fn offset_bytes(&self) -> u64 {
        self.place.offset_bytes
    }

    /// The lengths of its layers.
    pub fn shape(&self) -> &ChunkShape {
        &self.place.shape
    }
}

impl Space for Slots {
    type Slot = SlotId;
    type Place = InArena;

    fn slot_bytes(&self, shape: &ChunkShape) -> Result<u64, Refused> {
        let (slot_bytes, slab_bytes) = (slot_bytes(shape), self.slab_bytes());
        if slot_bytes > slab_bytes {
            return Err(Refused::TooLarge { slot_bytes, slab_bytes });
        }
        Ok(slot_bytes)
    }

    fn take(&mut self, shape: &ChunkShape, occupant: EntryIx) -> Taken<SlotId> {
        Slots::take(self, shape, occupant).map_or(Taken::Evict, Taken::Slot)
    }

    fn slab_to_empty(&self, slot: SlotId, shape: &ChunkShape) -> Option<u16> {
        (**self.shape(slot) != *shape).then_some(slot.slab())
    }

    fn chunks_of_slab(&self, slab: u16) -> Vec<EntryIx> {
        self.occupants(slab).collect()
    }

    fn is_slab_owned(&self, slab: u16) -> bool {
        Slots::is_slab_owned(self, slab)
    }

    fn place(&self, slot: SlotId, _id: &ChunkId) -> InArena {
        InArena { offset_bytes: self.offset_bytes(slot), shape: Arc::clone(self.shape(slot)) }
    }

    fn begin(&mut self, slot: SlotId) {
        Slots::begin(self, slot);
    }

    fn end(&mut self, slot: SlotId, lost_bytes: u64) -> Option<Refund> {
        Slots::end(self, slot, lost_bytes)
    }

    fn vacate(&mut self, slot: SlotId, tenant: TenantId, _id: &ChunkId) -> Option<Refund> {
        Slots::vacate(self, slot, tenant)
    }
}

impl MemoryTier {
    pub fn new(config: TierConfig) -> Result<MemoryTier, SlabError> {
        let slots = Slots::new(config.capacity_bytes, config.slab_bytes)?;
        let limits = TierLimits {
            max_chunks: config.max_chunks,
            max_leases: config.max_leases,
            max_lease_us: config.max_lease_us,
            default_quota_bytes: config.default_quota_bytes,
            quotas: config.quotas,
        };
        Ok(Tier::with_space(slots, limits))
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
        let chunk = ChunkRef { entry: row, generation: entry.generation };
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

    /// Bytes of the arena at `offset_bytes` that were reported as lost are touched by nobody any
    /// more. They may be of several slots side by side.
    pub fn quiet(&mut self, offset_bytes: u64, bytes: u64) {
        let (mut at, end) = (offset_bytes, offset_bytes.saturating_add(bytes));
        while at < end
            && let Some(slot) = self.space.at_offset(at)
        {
            let slot_end = self.space.offset_bytes(slot) + slot_bytes(self.space.shape(slot));
            let part_end = slot_end.min(end);
            let refund = self.space.quiet(slot, part_end - at);
            self.refund(refund);
            at = part_end;
        }
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
