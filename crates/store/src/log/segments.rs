//! Segments as a medium for chunks: which slots of which segments of which volumes hold which rows,
//! and what must be written down about it. This file knows slots, generations of segments and
//! records.
//!
//! A slot is written once in a generation of its segment. So a chunk that leaves gives no room by
//! itself: room comes when all of a segment's chunks have left and nobody touches their bytes. The
//! tier is therefore told to evict while more live bytes are here than
//! [`Segments::live_limit_bytes`], which leaves dead bytes to be reclaimed segment by segment.

use super::format::{ChunkCopy, Record, SegmentHeader, SegmentState, SlotRef, SlotShape, Slots};
use super::volume_state::VolumeState;
use crate::entry::Row;
use crate::operations::{Operations, Settled};
use crate::shape::ChunkShape;
use crate::stat::Refused;
use crate::tenant::TenantId;
use crate::tier::{Refund, SlotAllocator, Taken};
use forebay_kv::ChunkId;
use std::collections::{HashMap, VecDeque};
use std::num::NonZeroU32;
use std::sync::Arc;

/// Names a slot of any segment of any volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LogSlot {
    /// The segment's number over all volumes, plus one: so that `Option<LogSlot>` is no longer.
    segment: NonZeroU32,
    slot: u16,
}

impl LogSlot {
    pub(super) fn new(segment: usize, slot: u16) -> LogSlot {
        // Volumes are refused when their segments are too many to be numbered.
        LogSlot { segment: NonZeroU32::MIN.saturating_add(segment as u32), slot }
    }

    pub(super) fn segment(self) -> usize {
        self.segment.get() as usize - 1
    }

    pub(super) fn slot(self) -> u16 {
        self.slot
    }
}

#[derive(Debug, Clone)]
pub struct DiskPlace {
    pub volume: usize,
    pub slot_at: u64,
    pub copy: ChunkCopy,
    pub shape: Arc<SlotShape>,
}

#[derive(Debug)]
pub(super) struct Segment {
    pub volume: u16,
    pub state: State,
    /// Whether no bytes of earlier generations are in it, or, if it is in use, from `frontier` on.
    pub clean: bool,
    pub sequence: u64,
    /// How it is divided; without slots if it was never opened.
    pub slots: Slots,
    pub occupants: Vec<Option<Row>>,
    /// Slots from here on hold nothing of this generation.
    pub frontier: u16,
    pub live: u16,
    /// A slot's share of the segment, with its part of header, summary and what is left over.
    pub share_bytes: u64,
    /// Slots with operations or lost bytes, and other work that the segment waits for.
    pub busy: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    Free,
    Open,
    Sealed,
    /// Empty; free as soon as that is durable.
    Freeing,
    /// Free, and being overwritten with zeros.
    Scrubbing,
    /// Its space belongs, or is being given, to the file system.
    Withdrawn,
}

impl State {
    /// What a checkpoint says of it.
    pub fn on_disk(self) -> SegmentState {
        match self {
            State::Free | State::Freeing | State::Scrubbing => SegmentState::Free,
            State::Open => SegmentState::Open,
            State::Sealed => SegmentState::Sealed,
            State::Withdrawn => SegmentState::Withdrawn,
        }
    }
}

#[derive(Debug)]
pub struct Segments {
    pub(super) volumes: Vec<VolumeState>,
    pub(super) segments: Vec<Segment>,
    /// For each shape and volume the segment that takes its chunks.
    open: HashMap<Arc<SlotShape>, Vec<Option<usize>>>,
    /// Shapes of chunks and how they lie in slots.
    shapes: HashMap<ChunkShape, Arc<SlotShape>>,
    operations: Operations<LogSlot>,
    /// Of each slot with a chunk its share of the segment, unused rest included.
    pub(super) live_bytes: u64,
    pub(super) relocation: RelocationBudget,
    pub(super) scrubs: Scrubs,
    /// The volume that the next chunk goes to.
    next_volume: usize,
}

/// What is left to overwrite.
#[derive(Debug, Default)]
pub(super) struct Scrubs {
    pub jobs: VecDeque<Job>,
    pub under_way: usize,
    /// All that is dead is to be overwritten when nothing else is, and time enough has passed since
    /// that was begun last.
    pub sweep_is_due: bool,
    pub swept_us: Option<u64>,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Job {
    /// A slot whose chunk was deleted. Its segment waits for it.
    Slot(LogSlot),
    /// All dead slots of a segment and what lies behind its slots, or all of it if it is free.
    Segment(usize),
    /// A piece of what lies behind the slots of a segment, where bytes of earlier generations may
    /// be. It starts at this offset, and the segment waits for it.
    Behind(usize, u64),
    /// What is left of a free segment, from this offset in it on.
    Rest(usize, u64),
}

#[derive(Debug)]
pub(super) struct RelocationBudget {
    percent: u32,
    allowed_bytes: u64,
    pub chunks: u64,
    pub bytes: u64,
}

impl RelocationBudget {
    pub fn new(percent: u32) -> RelocationBudget {
        RelocationBudget { percent, allowed_bytes: 0, chunks: 0, bytes: 0 }
    }

    /// Bytes were stored, which pays for a share of them to be relocated.
    pub fn allow(&mut self, stored_bytes: u64) {
        let share = u128::from(stored_bytes) * u128::from(self.percent) / 100;
        self.allowed_bytes = self.allowed_bytes.saturating_add(u64::try_from(share).unwrap_or(u64::MAX));
    }

    pub fn has_room(&self, bytes: u64) -> bool {
        self.allowed_bytes >= bytes
    }

    pub fn spend(&mut self, bytes: u64) {
        self.allowed_bytes = self.allowed_bytes.saturating_sub(bytes);
        self.chunks += 1;
        self.bytes += bytes;
    }
}

/// Segments that are kept free so that writes need not wait: one in so many, within bounds.
const FREE_SHARE: usize = 32;

/// Segments of a volume that take chunks at most: one in so many. Each is for chunks of one shape,
/// and of tails of prompts there are as many shapes as a chunk has tokens.
const OPEN_SHARE: usize = 8;
/// As many may do so in any case, if that is no more than half of all: a few shapes by turns would
/// seal each other's.
const OPEN_SEGMENTS_MIN: usize = 8;

impl Segments {
    pub(super) fn new(volumes: Vec<VolumeState>, segments: Vec<Segment>, relocated_percent: u32) -> Segments {
        Segments {
            volumes,
            segments,
            open: HashMap::new(),
            shapes: HashMap::new(),
            operations: Operations::new(),
            live_bytes: 0,
            relocation: RelocationBudget::new(relocated_percent),
            scrubs: Scrubs::default(),
            next_volume: 0,
        }
    }

    fn slot_shape(&self, shape: &ChunkShape) -> Result<Arc<SlotShape>, Refused> {
        if let Some(known) = self.shapes.get(shape) {
            return Ok(Arc::clone(known));
        }
        let unfit = |reason: super::format::Unfit| Refused::Unfit { reason: reason.to_string() };
        let slot_shape = Arc::new(SlotShape::new(shape).map_err(unfit)?);
        let smallest = self.volumes.iter().map(|volume| volume.layout.segment_bytes).min().unwrap_or(0);
        Slots::fit(Arc::clone(&slot_shape), smallest).map_err(unfit)?;
        Ok(slot_shape)
    }

    /// A slot for a chunk that is relocated on its volume.
    pub(super) fn take_for_relocation(&mut self, from: LogSlot, occupant: Row) -> Option<LogSlot> {
        let Segment { volume, slots, .. } = &self.segments[from.segment()];
        let (volume, shape) = (usize::from(*volume), Arc::clone(&slots.shape));
        let number = self.segment_with_room_on(volume, &shape)?;
        Some(self.take_in(number, occupant))
    }

    /// The next slot of a segment that has one.
    fn take_in(&mut self, number: usize, occupant: Row) -> LogSlot {
        let segment = &mut self.segments[number];
        let slot = LogSlot::new(number, segment.frontier);
        segment.frontier += 1;
        self.occupy(slot, occupant);
        slot
    }

    pub(super) fn occupy(&mut self, slot: LogSlot, occupant: Row) {
        let segment = &mut self.segments[slot.segment()];
        segment.live += 1;
        segment.occupants[usize::from(slot.slot())] = Some(occupant);
        self.live_bytes += segment.share_bytes;
    }

    /// The segment that takes a chunk of this shape next, on any volume. Opens one where it must.
    fn segment_with_room(&mut self, shape: &Arc<SlotShape>) -> Option<usize> {
        let (volumes, first) = (self.volumes.len(), self.next_volume);
        for volume in (0..volumes).map(|step| (first + step) % volumes) {
            if let Some(found) = self.segment_with_room_on(volume, shape) {
                self.next_volume = (volume + 1) % volumes;
                return Some(found);
            }
        }
        None
    }

    fn segment_with_room_on(&mut self, volume: usize, shape: &Arc<SlotShape>) -> Option<usize> {
        let open = self.open.get(shape).and_then(|open| open[volume]);
        open.filter(|segment| self.segments[*segment].has_room()).or_else(|| {
            open.into_iter().for_each(|full| self.seal(full));
            self.open_segment(volume, shape)
        })
    }

    fn open_segment(&mut self, volume: usize, shape: &Arc<SlotShape>) -> Option<usize> {
        let owner = &self.volumes[volume];
        if owner.is_congested() {
            return None;
        }
        let slots = Slots::fit(Arc::clone(shape), owner.layout.segment_bytes).ok()?;
        self.seal_one_of_many(volume);
        let owner = &mut self.volumes[volume];
        let number = owner.free.pop_front()?;
        let sequence = owner.take_sequence();
        let count = slots.count;
        let header = SegmentHeader { segment: owner.local(number), sequence, slots: slots.clone() };
        owner.note_opened(&header);
        let segment = &mut self.segments[number];
        *segment = Segment {
            state: State::Open,
            sequence,
            slots,
            occupants: vec![None; usize::from(count)],
            share_bytes: self.volumes[volume].layout.segment_bytes / u64::from(count.max(1)),
            ..Segment::unused(segment.volume, segment.clean)
        };
        let open = self.open.entry(Arc::clone(shape)).or_insert_with(|| vec![None; self.volumes.len()]);
        open[volume] = Some(number);
        Some(number)
    }

    /// Seals the segment of a volume that was opened first, if no further one may be open.
    fn seal_one_of_many(&mut self, volume: usize) {
        let open = || self.open.values().filter_map(|open| open[volume]);
        let usable = self.volumes[volume].usable;
        if open().count() >= (usable / OPEN_SHARE).max(OPEN_SEGMENTS_MIN.min(usable / 2))
            && let Some(oldest) = open().min_by_key(|number| self.segments[*number].sequence)
        {
            self.seal(oldest);
        }
    }

    /// Lets a segment take no more chunks.
    pub(super) fn seal(&mut self, number: usize) {
        let segment = &mut self.segments[number];
        if segment.state != State::Open {
            return;
        }
        segment.state = State::Sealed;
        let volume = usize::from(segment.volume);
        let sequence = segment.sequence;
        if let Some(open) = self.open.get_mut(&segment.slots.shape) {
            open[volume] = None;
        }
        self.open.retain(|_, open| open.iter().any(Option::is_some));
        let owner = &mut self.volumes[volume];
        let segment = owner.local(number);
        owner.pending.push(Record::Sealed { segment, sequence });
        owner.to_summarise.push(number);
        self.free_if_empty(number);
    }

    pub(super) fn open_segments(&self) -> Vec<usize> {
        self.open.values().flatten().copied().flatten().collect()
    }

    /// A sealed segment in which nothing lives and that nobody uses begins to become free.
    pub(super) fn free_if_empty(&mut self, number: usize) {
        let segment = &mut self.segments[number];
        if segment.state != State::Sealed || segment.live > 0 || segment.busy > 0 {
            return;
        }
        segment.state = State::Freeing;
        segment.clean = false;
        let (sequence, volume) = (segment.sequence, usize::from(segment.volume));
        let owner = &mut self.volumes[volume];
        let local = owner.local(number);
        owner.pending.push(Record::Freed { segment: local, sequence });
        owner.freeing.push(number);
        owner.to_summarise.retain(|waiting| *waiting != number);
    }

    /// A chunk's bytes and footer are in the file.
    pub(super) fn note_stored(
        &mut self,
        slot: LogSlot,
        tenant: TenantId,
        id: ChunkId,
        moved_from: Option<LogSlot>,
    ) {
        let (number, sequence) = (slot.segment(), self.segments[slot.segment()].sequence);
        let moved_from = moved_from.map(|from| self.slot_ref(from));
        let at = self.slot_ref(slot);
        let owner = self.volume_of(number);
        owner.pending.push(Record::Stored { tenant, id, at, sequence, moved_from });
    }

    /// A slot's chunk is gone.
    pub(super) fn note_forgotten(&mut self, slot: LogSlot, id: &ChunkId) {
        let (at, sequence) = (self.slot_ref(slot), self.segments[slot.segment()].sequence);
        self.volume_of(slot.segment()).pending.push(Record::Forgotten { id: *id, at, sequence });
    }

    fn slot_ref(&self, slot: LogSlot) -> SlotRef {
        let volume = &self.volumes[usize::from(self.segments[slot.segment()].volume)];
        SlotRef { segment: volume.local(slot.segment()), slot: slot.slot() }
    }

    pub(super) fn volume_of(&mut self, segment: usize) -> &mut VolumeState {
        &mut self.volumes[usize::from(self.segments[segment].volume)]
    }

    fn stride(&self, slot: LogSlot) -> u64 {
        self.segments[slot.segment()].stride_bytes()
    }

    /// The chunk of a slot is gone or elsewhere. `payer` paid for the slot, unless somebody goes on
    /// paying elsewhere.
    pub(super) fn leave(&mut self, slot: LogSlot, payer: Option<TenantId>) -> Option<Refund> {
        let was_busy = self.operations.contains(slot);
        let segment = &mut self.segments[slot.segment()];
        segment.occupants[usize::from(slot.slot())] = None;
        segment.live -= 1;
        self.live_bytes -= segment.share_bytes;
        let settled = self.operations.vacate(slot, payer);
        self.settle(slot, settled, was_busy)
    }

    fn settle(&mut self, slot: LogSlot, settled: Settled, was_busy: bool) -> Option<Refund> {
        let bytes = self.stride(slot);
        let is_busy = self.operations.contains(slot);
        let segment = &mut self.segments[slot.segment()];
        segment.busy = segment.busy + u32::from(is_busy) - u32::from(was_busy);
        self.free_if_empty(slot.segment());
        settled.refunded.map(|tenant| Refund { tenant, bytes })
    }

    /// Whether operations or lost bytes keep a slot from being overwritten.
    pub(super) fn is_in_use(&self, slot: LogSlot) -> bool {
        self.operations.contains(slot)
    }

    /// Segments of a volume that should be free.
    pub(super) fn free_goal(&self, volume: usize) -> usize {
        let usable = self.volumes[volume].usable;
        (usable / FREE_SHARE).clamp(1, 64).min(usable / 4)
    }

    /// Live bytes at most: what the segments hold, without those that should be free, one that is
    /// being filled, one from which the coldest chunks have left, and a sixteenth for dead chunks
    /// among live ones.
    pub(super) fn live_limit_bytes(&self) -> u64 {
        let volume_limit = |(number, volume): (usize, &VolumeState)| {
            let filled = volume.usable.saturating_sub(self.free_goal(number) + 2).max(1) as u64;
            filled * volume.layout.segment_bytes / 16 * 15
        };
        self.volumes.iter().enumerate().map(volume_limit).sum()
    }

    pub(super) fn table_bytes(&self) -> u64 {
        let occupants = |segment: &Segment| segment.occupants.capacity() * size_of::<Option<Row>>();
        let rows: usize = self.segments.iter().map(|segment| size_of::<Segment>() + occupants(segment)).sum();
        rows as u64
    }
}

impl Segment {
    pub fn unused(volume: u16, clean: bool) -> Segment {
        Segment {
            volume,
            state: State::Free,
            clean,
            sequence: 0,
            slots: Slots::none(),
            occupants: Vec::new(),
            frontier: 0,
            live: 0,
            share_bytes: 0,
            busy: 0,
        }
    }

    fn has_room(&self) -> bool {
        self.state == State::Open && usize::from(self.frontier) < self.occupants.len()
    }

    pub fn stride_bytes(&self) -> u64 {
        self.slots.shape.stride_bytes()
    }
}

impl SlotAllocator for Segments {
    type Slot = LogSlot;
    type Place = DiskPlace;

    fn slot_bytes(&self, shape: &ChunkShape) -> Result<u64, Refused> {
        Ok(self.slot_shape(shape)?.stride_bytes())
    }

    fn bytes_of(&self, slot: LogSlot) -> u64 {
        self.stride(slot)
    }

    fn room_bytes(&self) -> u64 {
        self.live_limit_bytes()
    }

    fn take(&mut self, shape: &ChunkShape, occupant: Row) -> Taken<LogSlot> {
        let Ok(slot_shape) = self.slot_shape(shape) else { return Taken::Full };
        let most_bytes = self.live_limit_bytes().saturating_sub(slot_shape.stride_bytes());
        if self.live_bytes > most_bytes && self.live_bytes > 0 {
            return Taken::Evict;
        }
        let Some(number) = self.segment_with_room(&slot_shape) else { return Taken::Full };
        self.shapes.entry(shape.clone()).or_insert(slot_shape);
        Taken::Slot(self.take_in(number, occupant))
    }

    fn place(&self, slot: LogSlot, id: &ChunkId) -> DiskPlace {
        let segment = &self.segments[slot.segment()];
        let volume = usize::from(segment.volume);
        let owner = &self.volumes[volume];
        let local = owner.local(slot.segment());
        let in_segment = segment.slots.slot_at(slot.slot());
        let copy = ChunkCopy {
            log: owner.log,
            id: *id,
            segment: local,
            sequence: segment.sequence,
            slot: slot.slot(),
        };
        let shape = Arc::clone(&segment.slots.shape);
        DiskPlace { volume, slot_at: owner.layout.segment_at(local) + in_segment, copy, shape }
    }

    fn begin(&mut self, slot: LogSlot) {
        let was_busy = self.operations.contains(slot);
        self.operations.begin(slot);
        self.segments[slot.segment()].busy += u32::from(!was_busy);
    }

    fn end(&mut self, slot: LogSlot, lost_bytes: u64) -> Option<Refund> {
        let was_busy = self.operations.contains(slot);
        let settled = self.operations.end(slot, lost_bytes);
        self.settle(slot, settled, was_busy)
    }

    fn at_offset(&self, volume: usize, offset: u64) -> Option<(LogSlot, u64)> {
        let owner = self.volumes.get(volume)?;
        let in_segments = offset.checked_sub(owner.layout.segments_at)?;
        let local = usize::try_from(in_segments / owner.layout.segment_bytes).ok()?;
        let number = owner.first_segment + local;
        let segment = self.segments.get(number).filter(|segment| usize::from(segment.volume) == volume)?;
        let slots = &segment.slots;
        let in_slots = (in_segments % owner.layout.segment_bytes).checked_sub(slots.head_bytes())?;
        let stride = slots.shape.stride_bytes();
        let slot = in_slots / stride;
        let end = offset - in_slots % stride + stride;
        (slot < u64::from(slots.count)).then(|| (LogSlot::new(number, slot as u16), end))
    }

    fn quiet(&mut self, slot: LogSlot, bytes: u64) -> Option<Refund> {
        let was_busy = self.operations.contains(slot);
        let settled = self.operations.quiet(slot, bytes);
        self.settle(slot, settled, was_busy)
    }

    fn vacate(&mut self, slot: LogSlot, tenant: TenantId, id: &ChunkId) -> Option<Refund> {
        self.note_forgotten(slot, id);
        self.leave(slot, Some(tenant))
    }
}
