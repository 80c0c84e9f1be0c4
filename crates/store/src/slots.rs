//! Slots: which bytes of the arena belong to which chunk. The arena is a line of slabs; a slab
//! holds slots for chunks of one shape, and returns to the pool when its last slot is free. This
//! file knows who occupies a slot and which operations still own it.

use crate::entry::Row;
use crate::operations::{Operations, Settled, Waits};
use crate::shape::ChunkShape;
use crate::stat::{ArenaUse, Refused};
use crate::tenant::TenantId;
use crate::tier::{Refund, SlotAllocator, Taken};
use crate::wipes::Wipes;
use forebay_kv::ChunkId;
use std::collections::{BTreeSet, HashMap};
use std::num::NonZeroU32;
use std::sync::Arc;
use thiserror::Error;

/// Slots start at multiples of this, so that a chunk can go to a disk by direct I/O. A slot is its
/// chunk's length rounded up to it.
pub const SLOT_ALIGN_BYTES: u64 = 4096;

/// Slabs of an arena, and slots of a slab, at most.
pub const SLABS_MAX: u64 = 65_535;

/// The longest slab. Chunks are mostly powers of two long, and then fill slabs that are, too.
pub const SLAB_BYTES_MAX: u64 = 256 << 20;

/// Names a slot: the slab's number and the slot's number in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SlotId(NonZeroU32);

impl SlotId {
    fn new(slab: u16, slot: u16) -> SlotId {
        // Numbers stay below SLABS_MAX, so the sum does not wrap.
        SlotId(NonZeroU32::MIN.saturating_add(u32::from(slab) << 16 | u32::from(slot)))
    }

    pub fn slab(self) -> u16 {
        ((self.0.get() - 1) >> 16) as u16
    }

    fn slot(self) -> u16 {
        (self.0.get() - 1) as u16
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum SlabError {
    #[error(
        "slab_bytes must be a multiple of {SLOT_ALIGN_BYTES} from {SLOT_ALIGN_BYTES} to {limit}, not {slab_bytes}"
    )]
    SlabBytes { slab_bytes: u64, limit: u64 },
    #[error("{capacity_bytes} bytes are {slabs} slabs of {slab_bytes} bytes; allowed are 1 to {SLABS_MAX}")]
    Slabs { capacity_bytes: u64, slab_bytes: u64, slabs: u64 },
}

#[derive(Debug)]
pub struct Slots {
    capacity_bytes: u64,
    slab_bytes: u64,
    slabs: Vec<Slab>,
    /// Numbers of slabs that belong to no shape.
    pool: BTreeSet<u16>,
    /// For each shape in use, its slabs that have a free slot. The lowest is filled first, so that
    /// others drain.
    open: HashMap<Arc<ChunkShape>, BTreeSet<u16>>,
    operations: Operations<SlotId>,
    pub(crate) wipes: Wipes<SlotId>,
    /// What a slab in the pool has for a shape: no layers.
    no_shape: Arc<ChunkShape>,
}

/// A slab; one in the pool has no slots.
#[derive(Debug)]
struct Slab {
    shape: Arc<ChunkShape>,
    occupants: Box<[Option<Row>]>,
    occupied: u32,
    free: Vec<u16>,
    /// CRC-32C of each layer of each slot.
    checksums: Box<[u32]>,
}

impl Slab {
    /// A slab with as many slots of this shape as fit into it.
    fn new(shape: &Arc<ChunkShape>, slab_bytes: u64) -> Slab {
        let slots = slab_bytes.checked_div(slot_bytes(shape)).unwrap_or(0).min(SLABS_MAX) as usize;
        Slab {
            shape: Arc::clone(shape),
            occupants: vec![None; slots].into(),
            occupied: 0,
            free: (0..slots as u16).rev().collect(),
            checksums: vec![0; slots * shape.layers()].into(),
        }
    }

    fn is_empty(&self) -> bool {
        self.free.len() == self.occupants.len()
    }
}

pub(crate) fn slot_bytes(shape: &ChunkShape) -> u64 {
    shape.bytes().checked_next_multiple_of(SLOT_ALIGN_BYTES).unwrap_or(u64::MAX)
}

impl Slots {
    pub fn new(capacity_bytes: u64, slab_bytes: u64) -> Result<Slots, SlabError> {
        let limit = SLAB_BYTES_MAX;
        if slab_bytes == 0 || slab_bytes > limit || !slab_bytes.is_multiple_of(SLOT_ALIGN_BYTES) {
            return Err(SlabError::SlabBytes { slab_bytes, limit });
        }
        let slabs = capacity_bytes / slab_bytes;
        if slabs == 0 || slabs > SLABS_MAX {
            return Err(SlabError::Slabs { capacity_bytes, slab_bytes, slabs });
        }
        let no_shape = Arc::new(ChunkShape::none());
        Ok(Slots {
            capacity_bytes,
            slab_bytes,
            slabs: (0..slabs).map(|_| Slab::new(&no_shape, slab_bytes)).collect(),
            pool: (0..slabs as u16).collect(),
            open: HashMap::new(),
            operations: Operations::new(),
            wipes: Wipes::new(),
            no_shape,
        })
    }

    pub fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes
    }

    /// Gives `occupant` a slot, if there is one for this shape.
    fn free_slot(&mut self, shape: &ChunkShape, occupant: Row) -> Option<SlotId> {
        let number = match self.open.get(shape).and_then(BTreeSet::first) {
            Some(number) => *number,
            None => self.open_first_slab(shape)?,
        };
        let slab = &mut self.slabs[usize::from(number)];
        let slot = slab.free.pop()?;
        slab.occupants[usize::from(slot)] = Some(occupant);
        slab.occupied += 1;
        if slab.free.is_empty()
            && let Some(open) = self.open.get_mut(shape)
        {
            open.remove(&number);
        }
        Some(SlotId::new(number, slot))
    }

    fn open_first_slab(&mut self, shape: &ChunkShape) -> Option<u16> {
        let number = *self.pool.first()?;
        self.open_slab(number, shape).then_some(number)
    }

    /// Gives a slab of the pool to chunks of this shape, if they fit into it.
    fn open_slab(&mut self, number: u16, shape: &ChunkShape) -> bool {
        if slot_bytes(shape) > self.slab_bytes || !self.pool.remove(&number) {
            return false;
        }
        let shape = match self.open.get_key_value(shape) {
            Some((shape, _)) => Arc::clone(shape),
            None => Arc::new(shape.clone()),
        };
        self.slabs[usize::from(number)] = Slab::new(&shape, self.slab_bytes);
        self.open.entry(shape).or_default().insert(number);
        true
    }

    /// Takes the slot in which a chunk lies already, if that can be one of its shape and nobody has
    /// it. When all are taken, [`count_free`](Slots::count_free) has to follow.
    pub fn adopt(&mut self, offset_bytes: u64, shape: &ChunkShape, occupant: Row) -> Option<SlotId> {
        let number = u16::try_from(offset_bytes / self.slab_bytes).ok()?;
        if self.pool.contains(&number) {
            self.open_slab(number, shape);
        }
        let slab = self.slabs.get_mut(usize::from(number)).filter(|slab| *slab.shape == *shape)?;
        let (in_slab, bytes) = (offset_bytes % self.slab_bytes, slot_bytes(shape));
        let slot =
            u16::try_from(in_slab.checked_div(bytes)?).ok().filter(|_| in_slab.is_multiple_of(bytes))?;
        let place = slab.occupants.get_mut(usize::from(slot)).filter(|place| place.is_none())?;
        *place = Some(occupant);
        slab.occupied += 1;
        Some(SlotId::new(number, slot))
    }

    /// Finds the slots that are free, after chunks were [adopted](Slots::adopt).
    pub fn count_free(&mut self) {
        for (number, slab) in (0..).zip(&mut self.slabs) {
            let occupants = &slab.occupants;
            let is_free = |slot: &u16| occupants[usize::from(*slot)].is_none();
            slab.free = (0..occupants.len() as u16).rev().filter(is_free).collect();
            if slab.free.is_empty()
                && let Some(open) = self.open.get_mut(&slab.shape)
            {
                open.remove(&number);
            }
        }
    }

    /// Whether no operation uses a slot, none that is lost may, and none is to be overwritten.
    pub fn is_quiet(&self) -> bool {
        self.operations.slots().next().is_none() && self.wipes.slots().next().is_none()
    }

    fn settle(&mut self, slot: SlotId, settled: Settled) -> Option<Refund> {
        let bytes = slot_bytes(self.shape(slot));
        if settled.free && !self.wipes.keep(slot) {
            self.free(slot);
        }
        settled.refunded.map(|tenant| Refund { tenant, bytes })
    }

    /// A slot was overwritten: it is free.
    pub fn end_wipe(&mut self, slot: SlotId) {
        self.wipes.done(slot);
        self.free(slot);
    }

    fn free(&mut self, slot: SlotId) {
        let number = slot.slab();
        let slab = &mut self.slabs[usize::from(number)];
        slab.free.push(slot.slot());
        let (empty, shape) = (slab.is_empty(), Arc::clone(&slab.shape));
        let open = self.open.entry(shape).or_default();
        open.insert(number);
        if empty {
            open.remove(&number);
            self.slabs[usize::from(number)] = Slab::new(&self.no_shape, self.slab_bytes);
            self.pool.insert(number);
            self.open.retain(|shape, open| !open.is_empty() || Arc::strong_count(shape) > 1);
        }
    }

    /// Where the slot starts in the arena.
    pub fn offset_bytes(&self, slot: SlotId) -> u64 {
        let in_slab = u64::from(slot.slot()) * slot_bytes(self.shape(slot));
        u64::from(slot.slab()) * self.slab_bytes + in_slab
    }

    pub fn shape(&self, slot: SlotId) -> &Arc<ChunkShape> {
        &self.slabs[usize::from(slot.slab())].shape
    }

    pub fn checksums(&self, slot: SlotId) -> &[u32] {
        let slab = &self.slabs[usize::from(slot.slab())];
        let layers = slab.shape.layers();
        &slab.checksums[usize::from(slot.slot()) * layers..][..layers]
    }

    /// Keeps the CRC-32C of each layer. The caller gives as many as the shape has layers.
    pub fn set_checksums(&mut self, slot: SlotId, checksums: &[u32]) {
        let slab = &mut self.slabs[usize::from(slot.slab())];
        let layers = slab.shape.layers();
        slab.checksums[usize::from(slot.slot()) * layers..][..layers].copy_from_slice(checksums);
    }

    /// Where every byte is, counted slab by slab.
    pub fn usage(&self) -> ArenaUse {
        let slabs_bytes = self.slabs.len() as u64 * self.slab_bytes;
        let mut usage = ArenaUse {
            tail_bytes: self.capacity_bytes - slabs_bytes,
            free_bytes: self.pool.len() as u64 * self.slab_bytes,
            ..ArenaUse::default()
        };
        for slab in self.slabs.iter().filter(|slab| !slab.occupants.is_empty()) {
            let (slots, bytes) = (slab.occupants.len() as u64, slot_bytes(&slab.shape));
            usage.free_bytes += slab.free.len() as u64 * bytes;
            usage.used_bytes += u64::from(slab.occupied) * bytes;
            usage.tail_bytes += self.slab_bytes - slots * bytes;
        }
        for (slot, waits) in self.operations.waiting() {
            let bytes = slot_bytes(self.shape(slot));
            match waits {
                Waits::Draining => usage.draining_bytes += bytes,
                Waits::Quarantined => usage.quarantined_bytes += bytes,
            }
        }
        let unused = self.wipes.slots().filter(|slot| !self.operations.contains(*slot));
        usage.draining_bytes += unused.map(|slot| slot_bytes(self.shape(slot))).sum::<u64>();
        usage
    }

    /// Bytes that the tables take: per slot an occupant, a free number and the checksums.
    pub fn table_bytes(&self) -> u64 {
        let slab = |slab: &Slab| {
            (size_of_val(&*slab.occupants) + slab.free.capacity() * 2 + size_of_val(&*slab.checksums)) as u64
        };
        self.slabs.iter().map(slab).sum()
    }
}

#[derive(Debug)]
pub struct InArena {
    offset_bytes: u64,
    shape: Arc<ChunkShape>,
}

impl InArena {
    /// Where the chunk starts.
    pub fn offset_bytes(&self) -> u64 {
        self.offset_bytes
    }

    pub fn shape(&self) -> &ChunkShape {
        &self.shape
    }
}

impl SlotAllocator for Slots {
    type Slot = SlotId;
    type Place = InArena;

    fn slot_bytes(&self, shape: &ChunkShape) -> Result<u64, Refused> {
        let (slot_bytes, slab_bytes) = (slot_bytes(shape), self.slab_bytes);
        if slot_bytes > slab_bytes {
            return Err(Refused::TooLarge { slot_bytes, slab_bytes });
        }
        Ok(slot_bytes)
    }

    fn bytes_of(&self, slot: SlotId) -> u64 {
        slot_bytes(self.shape(slot))
    }

    fn room_bytes(&self) -> u64 {
        self.capacity_bytes
    }

    fn take(&mut self, shape: &ChunkShape, occupant: Row) -> Taken<SlotId> {
        self.free_slot(shape, occupant).map_or(Taken::Evict, Taken::Slot)
    }

    fn slab_to_empty(&self, slot: SlotId, shape: &ChunkShape) -> Option<u16> {
        (**self.shape(slot) != *shape).then_some(slot.slab())
    }

    fn chunks_of_slab(&self, slab: u16) -> Vec<Row> {
        self.slabs[usize::from(slab)].occupants.iter().copied().flatten().collect()
    }

    fn is_slab_owned(&self, slab: u16) -> bool {
        self.operations.slots().chain(self.wipes.slots()).any(|slot| slot.slab() == slab)
    }

    fn place(&self, slot: SlotId, _id: &ChunkId) -> InArena {
        InArena { offset_bytes: self.offset_bytes(slot), shape: Arc::clone(self.shape(slot)) }
    }

    fn begin(&mut self, slot: SlotId) {
        self.operations.begin(slot);
    }

    fn end(&mut self, slot: SlotId, lost_bytes: u64) -> Option<Refund> {
        let settled = self.operations.end(slot, lost_bytes);
        self.settle(slot, settled)
    }

    fn at_offset(&self, _volume: usize, offset: u64) -> Option<(SlotId, u64)> {
        let number = u16::try_from(offset / self.slab_bytes).ok()?;
        let slab = self.slabs.get(usize::from(number))?;
        let bytes = slot_bytes(&slab.shape);
        let slot = (offset % self.slab_bytes).checked_div(bytes)?;
        let id = (slot < slab.occupants.len() as u64).then(|| SlotId::new(number, slot as u16))?;
        Some((id, self.offset_bytes(id) + bytes))
    }

    fn quiet(&mut self, slot: SlotId, bytes: u64) -> Option<Refund> {
        let settled = self.operations.quiet(slot, bytes);
        self.settle(slot, settled)
    }

    fn vacate(&mut self, slot: SlotId, tenant: TenantId, _id: &ChunkId) -> Option<Refund> {
        let slab = &mut self.slabs[usize::from(slot.slab())];
        slab.occupants[usize::from(slot.slot())] = None;
        slab.occupied -= 1;
        let settled = self.operations.vacate(slot, Some(tenant));
        self.settle(slot, settled)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = SLOT_ALIGN_BYTES;
    const TENANT: TenantId = TenantId(1);

    fn shape(bytes: u64) -> ChunkShape {
        ChunkShape::new([bytes]).unwrap()
    }

    fn row(position: usize) -> Row {
        Row::at(position).unwrap()
    }

    fn vacate(slots: &mut Slots, slot: SlotId) -> Option<Refund> {
        slots.vacate(slot, TENANT, &ChunkId::from_bytes([0; 32]))
    }

    #[test]
    fn impossible_divisions_are_refused() {
        assert!(matches!(Slots::new(PAGE, 0), Err(SlabError::SlabBytes { .. })));
        assert!(matches!(Slots::new(PAGE, 100), Err(SlabError::SlabBytes { .. })));
        assert!(matches!(Slots::new(PAGE - 1, PAGE), Err(SlabError::Slabs { slabs: 0, .. })));
        assert!(matches!(Slots::new(u64::MAX, PAGE), Err(SlabError::Slabs { .. })));
        assert!(Slots::new(u64::MAX, u64::MAX).is_err());
    }

    #[test]
    fn slots_of_two_shapes_tile_their_slabs_without_overlap() {
        let mut slots = Slots::new(4 * 3 * PAGE + 5, 3 * PAGE).unwrap();
        let taken =
            [PAGE, 2 * PAGE - 1, 1, 2 * PAGE, PAGE].map(|bytes| slots.free_slot(&shape(bytes), row(0)));
        let offsets = taken.map(|slot| slots.offset_bytes(slot.unwrap()));
        // Every length is a shape of its own: one, two, one, two and again one page, the last
        // beside the first.
        assert_eq!(offsets, [0, 3 * PAGE, 6 * PAGE, 9 * PAGE, PAGE]);
        assert!(
            taken.iter().flatten().all(|slot| slots
                .at_offset(0, slots.offset_bytes(*slot) + PAGE - 1)
                .unwrap()
                .0
                == *slot)
        );
        let usage = slots.usage();
        assert_eq!((usage.used_bytes, usage.tail_bytes), (7 * PAGE, 2 * PAGE + 5));
        assert_eq!(usage.free_bytes, 3 * PAGE);
    }

    #[test]
    fn chunks_of_a_power_of_two_fill_their_slabs_however_large_the_arena_is() {
        for gib in [1, 3, 10, 60, 1000] {
            let capacity_bytes = gib << 30;
            let mut slots =
                Slots::new(capacity_bytes, crate::TierConfig::new(capacity_bytes).slab_bytes).unwrap();
            for chunk_bytes in [64 << 10, 1 << 20, 16 << 20] {
                slots.free_slot(&shape(chunk_bytes), row(0)).unwrap();
            }
            assert_eq!(slots.usage().tail_bytes, 0, "{gib} GiB");
        }
        // A slab of the smallest slots has one less than its length would give: numbers are of 16
        // bits.
        let mut slots = Slots::new(SLAB_BYTES_MAX, SLAB_BYTES_MAX).unwrap();
        assert!(slots.free_slot(&shape(1), row(0)).is_some());
        assert_eq!(slots.usage().tail_bytes, PAGE);
    }

    #[test]
    fn an_empty_slab_serves_another_shape() {
        let mut slots = Slots::new(2 * PAGE, 2 * PAGE).unwrap();
        let first = slots.free_slot(&shape(PAGE), row(0)).unwrap();
        assert_eq!(slots.free_slot(&shape(2 * PAGE), row(1)), None);
        assert_eq!(vacate(&mut slots, first), Some(Refund { tenant: TENANT, bytes: PAGE }));
        assert!(slots.free_slot(&shape(2 * PAGE), row(1)).is_some());
        assert_eq!(slots.open.len(), 1, "a shape without slabs is forgotten");
    }

    #[test]
    fn a_vacated_slot_is_free_only_when_its_last_operation_has_ended() {
        let mut slots = Slots::new(PAGE, PAGE).unwrap();
        let slot = slots.free_slot(&shape(9), row(0)).unwrap();
        slots.begin(slot);
        slots.begin(slot);
        assert_eq!(vacate(&mut slots, slot), None);
        assert_eq!(slots.end(slot, 0), None);
        assert_eq!((slots.usage().draining_bytes, slots.free_slot(&shape(9), row(1))), (PAGE, None));
        assert_eq!(slots.end(slot, 0), Some(Refund { tenant: TENANT, bytes: PAGE }));
        assert!(slots.free_slot(&shape(9), row(1)).is_some());
    }

    #[test]
    fn a_slot_with_lost_bytes_is_quarantined_until_all_of_them_are_quiet() {
        let mut slots = Slots::new(PAGE, PAGE).unwrap();
        let slot = slots.free_slot(&shape(9), row(0)).unwrap();
        slots.begin(slot);
        slots.end(slot, 9);
        assert_eq!(slots.usage().used_bytes, PAGE, "the chunk still rests there");
        assert_eq!(vacate(&mut slots, slot), Some(Refund { tenant: TENANT, bytes: PAGE }));
        slots.quiet(slot, 4);
        assert_eq!((slots.usage().quarantined_bytes, slots.free_slot(&shape(9), row(1))), (PAGE, None));
        assert_eq!(slots.quiet(slot, 5), None, "the tenant was refunded already");
        assert!(slots.free_slot(&shape(9), row(1)).is_some());
    }

    #[test]
    fn checksums_belong_to_their_slot() {
        let mut slots = Slots::new(2 * PAGE, 2 * PAGE).unwrap();
        let layers = ChunkShape::new([5, 6]).unwrap();
        let [one, two] = [0, 1].map(|number| slots.free_slot(&layers, row(number)).unwrap());
        slots.set_checksums(one, &[1, 2]);
        slots.set_checksums(two, &[3, 4]);
        assert_eq!((slots.checksums(one), slots.checksums(two)), (&[1, 2][..], &[3, 4][..]));
    }
}
