//! What a tier needs of the medium that its chunks rest on. The arena and the log are such media.
//! This file knows slots by name.

use crate::entry::Row;
use crate::shape::ChunkShape;
use crate::stat::Refused;
use crate::tenant::TenantId;
use forebay_kv::ChunkId;
use std::fmt::Debug;

/// Gives slots to chunks and takes them back.
pub trait SlotAllocator: Debug {
    type Slot: Copy + Eq + Debug;
    /// Where a slot is, for those who move its bytes.
    type Place: Debug;

    /// What a chunk of this shape takes, unless none can ever be taken in.
    fn slot_bytes(&self, shape: &ChunkShape) -> Result<u64, Refused>;

    /// What the chunk in a slot takes.
    fn bytes_of(&self, slot: Self::Slot) -> u64;

    /// What all chunks together can take.
    fn room_bytes(&self) -> u64;

    /// Gives `occupant` a slot for a chunk of this shape.
    fn take(&mut self, shape: &ChunkShape, occupant: Row) -> Taken<Self::Slot>;

    /// The slab that `slot` is in, if the slot is of use for this shape only when all of the slab
    /// is free. A medium without slabs has none.
    fn slab_to_empty(&self, _slot: Self::Slot, _shape: &ChunkShape) -> Option<u16> {
        None
    }

    fn chunks_of_slab(&self, _slab: u16) -> Vec<Row> {
        Vec::new()
    }

    /// Whether operations own a slot of the slab, so that it would not be free without its chunks.
    fn is_slab_owned(&self, _slab: u16) -> bool {
        false
    }

    /// Where the slot of chunk `id` is.
    fn place(&self, slot: Self::Slot, id: &ChunkId) -> Self::Place;

    /// An operation begins to read or write the slot. Until it ends the slot is not given to
    /// anybody else.
    fn begin(&mut self, slot: Self::Slot);

    /// An operation ended. `lost_bytes` of the slot may still be touched by a part of it that is
    /// lost.
    fn end(&mut self, slot: Self::Slot, lost_bytes: u64) -> Option<Refund>;

    /// The slot that holds the byte at this offset of a volume, and where the slot ends there. The
    /// arena is a single volume.
    fn at_offset(&self, volume: usize, offset: u64) -> Option<(Self::Slot, u64)>;

    /// Bytes of the slot that were lost are touched by nobody any more.
    fn quiet(&mut self, slot: Self::Slot, bytes: u64) -> Option<Refund>;

    /// Chunk `id` leaves its slot, for which `tenant` paid.
    fn vacate(&mut self, slot: Self::Slot, tenant: TenantId, id: &ChunkId) -> Option<Refund>;
}

/// What became of the wish for a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Taken<Slot> {
    Slot(Slot),
    /// There is none until another chunk goes.
    Evict,
    /// There is none, and it would not help if a chunk went now.
    Full,
}

/// A payment that ends: the slot is free, or quarantined and nobody's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refund {
    pub tenant: TenantId,
    pub bytes: u64,
}
