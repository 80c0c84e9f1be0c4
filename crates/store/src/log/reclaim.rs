//! Reclaiming segments: the one with the fewest live bytes goes first, and what still lives in it
//! is relocated as far as the budget for that allows, the rest is dropped. This file knows what to
//! relocate.

use super::segments::{LogSlot, Segment, Segments, State};
use super::tier::{DiskRead, DiskTier, DiskWrite};
use crate::entry::{ChunkRef, Row, State as ChunkState};
use crate::tier::{ReadEnd, SlotAllocator, SlotWrite};

/// Above this share of live bytes, in sixteenths, a segment is not worth copying.
const DENSE_SIXTEENTHS: u64 = 15;

/// A chunk to be copied from its slot to another one, with a footer of its own.
///
/// Both slots are the relocator's until the value is given to
/// [`end_relocation`](DiskTier::end_relocation).
#[derive(Debug)]
#[must_use = "both slots stay taken until the relocation is ended"]
pub struct Relocation {
    /// From where. All of it is to be verified.
    pub read: DiskRead,
    pub write: DiskWrite,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RelocationEnd {
    /// The chunk and its new footer are in the new slot.
    Written,
    /// What was read is not what was written there once. The chunk is dropped, and the fault
    /// counted.
    Corrupt,
    /// Reading or writing failed. The chunk stays where it is.
    Failed {
        /// Bytes of the old slot that a lost operation may still read.
        read_lost_bytes: u64,
        /// Bytes of the new slot that a lost operation may still write.
        write_lost_bytes: u64,
    },
}

impl Segments {
    /// The segment to empty next, if a volume has fewer free ones than it should.
    fn victim(&self, volume: usize) -> Option<usize> {
        let owner = &self.volumes[volume];
        let to_come = owner.freeing.len() + owner.committing_freed;
        if owner.free.len() + to_come >= self.free_goal(volume) || owner.is_congested() {
            return None;
        }
        owner.segments().filter(|number| self.segments[*number].can_be_emptied()).min_by_key(|number| {
            let segment = &self.segments[*number];
            (segment.live_bytes(), segment.sequence)
        })
    }

    /// Whether chunks of a segment's shape are elsewhere on its volume. The last ones of a shape
    /// would take a segment for the one that they leave.
    fn has_company(&self, number: usize) -> bool {
        let Segment { volume, slots, .. } = &self.segments[number];
        let mut others = self.volumes[usize::from(*volume)].segments().filter(|other| *other != number);
        others.any(|other| self.segments[other].live > 0 && self.segments[other].slots.shape == slots.shape)
    }
}

impl Segment {
    fn live_bytes(&self) -> u64 {
        u64::from(self.live) * self.share_bytes
    }

    /// Whether something lives here that nobody works on.
    fn can_be_emptied(&self) -> bool {
        self.state == State::Sealed && u32::from(self.live) > self.busy
    }
}

impl DiskTier {
    /// A chunk to be relocated, if segments must be emptied. Chunks that are not worth it are
    /// dropped on the way.
    pub fn next_relocation(&mut self, now_us: u64) -> Option<Relocation> {
        self.advance(now_us);
        (0..self.volumes()).find_map(|volume| {
            while let Some(number) = self.space.victim(volume) {
                let emptied = self.empty(number);
                if emptied.is_some() || self.space.victim(volume) == Some(number) {
                    return emptied;
                }
            }
            None
        })
    }

    /// Drops chunks of a segment until there is one to relocate or nothing more can be done.
    fn empty(&mut self, number: usize) -> Option<Relocation> {
        let segment = &self.space.segments[number];
        let dense = segment.live_bytes() * 16 > self.segment_bytes(number) * DENSE_SIXTEENTHS;
        let is_worth_it = !dense && self.space.has_company(number);
        let stride = segment.stride_bytes();
        for slot in 0..self.space.segments[number].frontier {
            let at = LogSlot::new(number, slot);
            let Some(row) = self.space.segments[number].occupants.get(usize::from(slot)).copied().flatten()
            else {
                continue;
            };
            let entry = self.entry(row);
            if self.space.is_in_use(at) || entry.slot != Some(at) || entry.state == ChunkState::Writing {
                continue;
            }
            let needed = !entry.is_unheld();
            if needed || (is_worth_it && self.space.relocation.has_room(stride)) {
                if let Some(relocation) = self.begin_relocation(row, at) {
                    return Some(relocation);
                }
                if needed || self.room_comes(number) {
                    continue;
                }
            }
            self.drop_reclaimed(row);
        }
        None
    }

    /// Whether a segment of the same volume is free as soon as a commit has ended.
    fn room_comes(&self, number: usize) -> bool {
        let owner = &self.space.volumes[usize::from(self.space.segments[number].volume)];
        owner.committing || !owner.freeing.is_empty()
    }

    pub(super) fn segment_bytes(&self, number: usize) -> u64 {
        let volume = usize::from(self.space.segments[number].volume);
        self.space.volumes[volume].layout.segment_bytes
    }

    fn begin_relocation(&mut self, row: Row, from: LogSlot) -> Option<Relocation> {
        let to = self.space.take_for_relocation(from, row)?;
        let chunk = ChunkRef { row, generation: self.entry(row).generation };
        let read = self.start_reading(chunk, from);
        self.space.begin(to);
        let place = self.space.place(to, self.id_of(row));
        Some(Relocation { read, write: SlotWrite { chunk, slot: to, place } })
    }

    pub fn end_relocation(&mut self, now_us: u64, relocation: Relocation, end: RelocationEnd) {
        self.advance(now_us);
        let Relocation { read, write } = relocation;
        let (chunk, from, to, id) = (read.chunk, read.slot, write.slot, read.place.copy.id);
        let stride = write.place.shape.stride_bytes();
        let (read_end, write_lost_bytes) = match end {
            RelocationEnd::Failed { read_lost_bytes, write_lost_bytes } => {
                (ReadEnd::Failed { lost_bytes: read_lost_bytes }, write_lost_bytes)
            }
            RelocationEnd::Corrupt => (ReadEnd::Corrupt, 0),
            RelocationEnd::Written => (ReadEnd::Done, 0),
        };
        let moved =
            end == RelocationEnd::Written && self.is_live(&chunk) && self.entry(chunk.row).slot == Some(from);
        let left = if moved {
            let tenant = self.entry(chunk.row).tenant;
            self.entry_mut(chunk.row).slot = Some(to);
            self.space.note_stored(to, tenant, id, Some(from));
            self.space.relocation.spend(stride);
            from
        } else {
            to
        };
        if !self.is_live(&chunk) {
            self.space.scrub_copy(to);
        }
        // Nobody is refunded: whoever pays for the chunk goes on doing so.
        self.space.leave(left, None);
        self.space.end(to, write_lost_bytes);
        self.end_read(now_us, read, read_end);
    }
}
