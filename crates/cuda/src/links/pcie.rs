//! A GPU's own PCIe link in one direction. Long runs go by copy engine, and so do pages of which it
//! takes many by one call. Lots of smaller pages go
//! through a few staging slots on the GPU, so that the PCIe link carries long runs and a kernel
//! gathers or scatters at memory speed; where the host's side is in pieces too, a kernel copies
//! page by page.

use super::segment::{Segment, segments};
use super::table::{PIECES_MAX, Table, Tables};
use super::{
    Direction, ENGINE_PIECE_BYTES, WINDOW_LOTS, are_worth_a_batch, come_to_an_end, finish_when_passed,
};
use crate::addresses::Addresses;
use crate::device::{DeviceMemory, Event, Stream};
use crate::driver::{BatchCopy, CopyList, CudaError};
use crate::kernels::{Kernels, Piece};
use crate::poller::{Track, Tracks};
use forebay_transfer::{Completion, Link, LinkOp, Memory, Outcome};
use std::sync::Arc;

/// Staging slots of a PCIe link, and their size: enough that the PCIe link and the kernel never
/// wait for each other.
const SLOTS: usize = 4;
const SLOT_BYTES: u64 = 1 << 20;
const BLOCKS: u32 = 64;

#[derive(Debug)]
pub struct PcieLink {
    direction: Direction,
    copies: Track,
    shuffles: Track,
    kernels: Arc<Kernels>,
    tables: Arc<Tables>,
    addresses: Arc<Addresses>,
    slots: Vec<Slot>,
    next_slot: usize,
    /// Where the driver copies many pieces by one call.
    batch: Option<(BatchCopy, CopyList)>,
    _staging: DeviceMemory,
}

/// A staging slot. Both streams wait for the other's last use of it.
#[derive(Debug)]
struct Slot {
    address: u64,
    copied: Event,
    shuffled: Event,
}

impl PcieLink {
    pub fn new(
        direction: Direction,
        tracks: &Tracks,
        kernels: &Arc<Kernels>,
        addresses: &Arc<Addresses>,
    ) -> Result<PcieLink, CudaError> {
        let device = kernels.device();
        let staging = DeviceMemory::new(device, SLOTS as u64 * SLOT_BYTES)?;
        let slot = |index: usize| {
            let address = staging.address() + index as u64 * SLOT_BYTES;
            Ok(Slot { address, copied: Event::new(device)?, shuffled: Event::new(device)? })
        };
        Ok(PcieLink {
            direction,
            copies: tracks.track(Stream::new(device)?),
            shuffles: tracks.track(Stream::new(device)?),
            kernels: Arc::clone(kernels),
            tables: Tables::new(device, WINDOW_LOTS as usize)?,
            addresses: Arc::clone(addresses),
            slots: (0..SLOTS).map(slot).collect::<Result<_, CudaError>>()?,
            next_slot: 0,
            batch: device.driver().batch_copy().map(|batch| (batch, CopyList::default())),
            _staging: staging,
        })
    }

    /// By a call for all of them, if they are long enough for that and the driver has it: kernels
    /// wait for room on a GPU that computes.
    fn by_batch(&mut self, pieces: &[Piece], bytes: u64) -> Option<Result<(), CudaError>> {
        let (batch, list) = self.batch.as_mut().filter(|_| are_worth_a_batch(pieces.len(), bytes))?;
        pieces.iter().for_each(|piece| list.add(piece.from, piece.to, piece.bytes));
        let stream = self.copies.stream();
        // SAFETY: as for `by_engine`; no two pieces of a lot overlap, and the device was entered.
        Some(unsafe { batch.queue(stream.device().driver(), list, stream.handle()) })
    }

    fn by_engine(&self, pieces: &[Piece]) -> Result<(), CudaError> {
        for piece in pieces {
            // SAFETY: the pieces were resolved from registered memory, which the mover keeps
            // registered and to itself until the operation is finished.
            unsafe { self.copies.stream().copy(piece.from, piece.to, piece.bytes)? };
        }
        Ok(())
    }

    /// Fills a list with the pages of all segments, each segment with a slot of its own choice.
    fn list(&self, segments: &[Segment]) -> Option<Table> {
        let mut pieces = Vec::with_capacity(segments.iter().map(|segment| segment.pages.len()).sum());
        for (nth, segment) in segments.iter().enumerate() {
            let slot = self.slots[(self.next_slot + nth) % SLOTS].address;
            match self.direction {
                Direction::HostToDevice => pieces.extend(segment.scattered(slot)),
                Direction::DeviceToHost => pieces.extend(segment.gathered(slot)),
            }
        }
        self.tables.fill(&pieces)
    }

    /// Puts all segments through the slots.
    fn through_slots(&mut self, segments: &[Segment], table: &Table) -> Result<(), CudaError> {
        let mut first_page = 0;
        for segment in segments {
            let slot = self.next_slot;
            self.next_slot = (slot + 1) % SLOTS;
            let pages = (table.at(first_page), segment.pages.len() as u32);
            match self.direction {
                Direction::HostToDevice => {
                    self.copies.stream().wait_for(&self.slots[slot].shuffled)?;
                    self.copy_runs(segment, slot)?;
                    self.shuffles.stream().wait_for(&self.slots[slot].copied)?;
                    self.shuffle(pages, segment.bytes, slot)?;
                }
                Direction::DeviceToHost => {
                    self.shuffles.stream().wait_for(&self.slots[slot].copied)?;
                    self.shuffle(pages, segment.bytes, slot)?;
                    self.copies.stream().wait_for(&self.slots[slot].shuffled)?;
                    self.copy_runs(segment, slot)?;
                }
            }
            first_page += segment.pages.len();
        }
        Ok(())
    }

    fn copy_runs(&self, segment: &Segment, slot: usize) -> Result<(), CudaError> {
        let (stream, slot) = (self.copies.stream(), &self.slots[slot]);
        for &(host, offset, bytes) in &segment.runs {
            let (from, to) = self.direction.in_order(host, slot.address + offset);
            // SAFETY: the host's side was resolved from registered memory, which the mover keeps
            // registered and to itself until the operation is finished; the slot is ours, and
            // events keep its uses apart.
            unsafe { stream.copy(from, to, bytes)? };
        }
        slot.copied.record(stream)
    }

    fn shuffle(&self, (list, count): (u64, u32), bytes: u64, slot: usize) -> Result<(), CudaError> {
        let stream = self.shuffles.stream();
        // SAFETY: as for `copy_runs`; the list is held until the operation is finished.
        unsafe { self.kernels.copy(stream, list, count, bytes, BLOCKS)? };
        self.slots[slot].shuffled.record(stream)
    }

    /// After an error somewhere between the streams: has the last one wait for the other, so that
    /// its end is the end of all.
    fn join(&self) -> Result<(), CudaError> {
        let slot = &self.slots[0];
        let tracks = (&slot.copied, &self.copies);
        let ((event, first), _) = self.direction.in_order(tracks, (&slot.shuffled, &self.shuffles));
        event.record(first.stream())?;
        self.last().stream().wait_for(event)
    }

    /// The track whose end is the end of everything that `through_slots` puts in.
    fn last(&self) -> &Track {
        self.direction.in_order(&self.copies, &self.shuffles).1
    }

    fn start_small(&mut self, pieces: &[Piece], bytes: u64, done: Completion) {
        let segments = segments(pieces.iter().map(|piece| self.direction.sides(piece)), SLOT_BYTES);
        let runs = segments.iter().map(|segment| segment.runs.len() as u64).sum::<u64>();
        if bytes >= runs * ENGINE_PIECE_BYTES
            && let Some(table) = self.list(&segments)
        {
            let posted = self.through_slots(&segments, &table);
            if posted.is_err() && self.join().is_err() {
                come_to_an_end(&self.copies);
                come_to_an_end(&self.shuffles);
            }
            return finish_when_passed(self.last(), bytes, posted, done, table);
        }
        let Some(table) = self.tables.fill(pieces) else {
            let error = format!("{} pieces do not fit into a list of {PIECES_MAX}", pieces.len());
            return done.finish(Outcome::Failed { error });
        };
        let (stream, count) = (self.shuffles.stream(), pieces.len() as u32);
        // SAFETY: the pieces were resolved from registered memory, which the mover keeps registered
        // and to itself until the operation is finished; the list is held until then.
        let posted = unsafe { self.kernels.copy(stream, table.address(), count, bytes, BLOCKS) };
        finish_when_passed(&self.shuffles, bytes, posted, done, table);
    }
}

impl Link for PcieLink {
    fn start(&mut self, op: LinkOp, memory: &Arc<Memory>, done: Completion) {
        let pieces = match self.addresses.resolve(&op, memory) {
            Ok(pieces) => pieces,
            Err(error) => return done.finish(Outcome::Failed { error: error.to_string() }),
        };
        let device = Arc::clone(self.kernels.device());
        let _current = match device.enter() {
            Ok(current) => current,
            Err(error) => return done.finish(Outcome::Failed { error: error.to_string() }),
        };
        if op.bytes >= ENGINE_PIECE_BYTES * pieces.len() as u64 || pieces.len() == 1 {
            let posted = self.by_engine(&pieces);
            finish_when_passed(&self.copies, op.bytes, posted, done, ());
        } else if let Some(posted) = self.by_batch(&pieces, op.bytes) {
            finish_when_passed(&self.copies, op.bytes, posted, done, ());
        } else {
            self.start_small(&pieces, op.bytes, done);
        }
    }
}
