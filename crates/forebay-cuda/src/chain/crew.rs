//! Crews: what one GPU brings along to work for another in one direction: staging slots, streams and events. A chain has a
//! crew to itself. It works in one of two ways. In *strands*, each slot has a stream of the crew's GPU and a parcel's two hops
//! follow each other there, so order needs no events; for that the GPU must reach the target's memory. In *turns*, a
//! lane carries parcels between host memory and slots, and the target itself carries them on, page by page if need be.
//! This file knows streams and slots; it must never know which bytes are a crew's.

use crate::device::{Device, DeviceMemory, Event, Stream};
use crate::driver::CudaError;
use crate::driver::abi::{Address, StreamHandle};
use crate::kernels::{Kernels, Piece};
use crate::links::{Direction, ENGINE_PIECE_BYTES, Parcel};
use std::collections::HashMap;
use std::sync::Arc;

/// Blocks of a kernel.
const BLOCKS: u32 = 64;

/// A GPU at work for others, or for itself where pages are small.
#[derive(Debug)]
pub struct Crew {
    direction: Direction,
    lane: Stream,
    slots: Vec<Slot>,
    slot_bytes: u64,
    next: usize,
    /// By the target's ordinal.
    hops: HashMap<u16, Hop>,
    /// Passed when the lane has come to the end of a chain.
    ended: Event,
    /// Whose chain it works for, and what is passed when that is done.
    holder: Option<(StreamHandle, Arc<Event>)>,
    _staging: DeviceMemory,
}

// SAFETY: a stream's handle is only compared.
unsafe impl Send for Crew {}

/// A slot, its strand, and the event of the crew's own GPU for its state: filled or emptied, by direction.
#[derive(Debug)]
struct Slot {
    address: Address,
    strand: Stream,
    near: Event,
}

/// What the crew has on a target: a stream for the second hop, and that GPU's events for the slots' state.
#[derive(Debug)]
struct Hop {
    kernels: Arc<Kernels>,
    stream: Stream,
    far: Vec<Event>,
    ended: Event,
}

/// What a crew is to do.
#[derive(Debug)]
pub enum Work {
    /// In strands: a parcel is one run of memory.
    Strands(Vec<Piece>),
    /// In turns.
    Turns(Vec<Parcel>),
}

impl Work {
    /// How many parcels it is.
    pub fn parcels(&self) -> usize {
        match self {
            Work::Strands(pieces) => pieces.len(),
            Work::Turns(parcels) => parcels.len(),
        }
    }
}

/// Where lists of pieces for kernels are written.
#[derive(Debug)]
pub struct List {
    pub start: Address,
    pub pieces: usize,
}

impl Crew {
    /// The crew of a GPU for the targets that it serves.
    pub fn new(
        direction: Direction,
        gpu: &Arc<Device>,
        targets: &[Arc<Kernels>],
        slots: u64,
        slot_bytes: u64,
    ) -> Result<Crew, CudaError> {
        let staging = DeviceMemory::new(gpu, slots * slot_bytes)?;
        let slot = |index| {
            let address = staging.address() + index * slot_bytes;
            Ok(Slot { address, strand: Stream::new(gpu)?, near: Event::new(gpu)? })
        };
        let hop = |target: &Arc<Kernels>| {
            let device = target.device();
            let far = (0..slots).map(|_| Event::new(device)).collect::<Result<_, CudaError>>()?;
            let (stream, ended) = (Stream::new(device)?, Event::new(device)?);
            Ok((device.index(), Hop { kernels: Arc::clone(target), stream, far, ended }))
        };
        Ok(Crew {
            direction,
            lane: Stream::new(gpu)?,
            slots: (0..slots).map(slot).collect::<Result<_, CudaError>>()?,
            slot_bytes,
            next: 0,
            hops: targets.iter().map(hop).collect::<Result<_, CudaError>>()?,
            ended: Event::new(gpu)?,
            holder: None,
            _staging: staging,
        })
    }

    /// The largest parcel.
    pub fn slot_bytes(&self) -> u64 {
        self.slot_bytes
    }

    /// Whether a chain of `stream` may have it: nobody has, or an earlier chain of the same stream.
    pub fn is_free_for(&self, stream: StreamHandle) -> bool {
        let held = self.holder.as_ref();
        held.is_none_or(|(holder, done)| *holder == stream || done.is_passed().unwrap_or(false))
    }

    /// Gives it to a chain. Its work waits for `begun`, behind which no other work of this crew is left; for nothing if that
    /// has passed already.
    pub fn begin(
        &mut self,
        stream: StreamHandle,
        done: &Arc<Event>,
        begun: Option<&Event>,
        target: u16,
        work: &Work,
    ) -> Result<(), CudaError> {
        self.holder = Some((stream, Arc::clone(done)));
        self.next = 0;
        let Some(begun) = begun else { return Ok(()) };
        match work {
            Work::Strands(_) => self.strands(work).try_for_each(|slot| slot.strand.wait_for(begun)),
            Work::Turns(_) => {
                let Some(hop) = self.hops.get(&target) else { return Ok(()) };
                self.lane.wait_for(begun)?;
                hop.stream.wait_for(begun)
            }
        }
    }

    /// The strands that a chain uses: each costs a few calls, so a short chain has few.
    fn strands(&self, work: &Work) -> impl Iterator<Item = &Slot> {
        self.slots.iter().take((work.parcels() / 2).max(2).min(work.parcels()))
    }

    /// Queues the parcel of an index. Says how many pieces it has listed.
    ///
    /// # Safety
    ///
    /// As for [`Set::queue`](super::set::Set::queue). In strands, the crew's GPU reaches the target's memory. The list has room.
    pub unsafe fn queue(
        &mut self,
        target: u16,
        work: &Work,
        index: usize,
        list: &List,
    ) -> Result<usize, CudaError> {
        let in_use = match work {
            Work::Strands(_) => self.strands(work).count(),
            Work::Turns(_) => self.slots.len(),
        };
        let slot = self.next;
        self.next = (slot + 1) % in_use.max(1);
        match work {
            Work::Strands(pieces) => {
                let Some(piece) = pieces.get(index) else { return Ok(0) };
                let Slot { address, strand, .. } = &self.slots[slot];
                // SAFETY: by this function's contract; the slot is the strand's, whose work runs in order.
                unsafe {
                    strand.copy(piece.from, *address, piece.bytes)?;
                    strand.copy(*address, piece.to, piece.bytes)?;
                }
                Ok(0)
            }
            Work::Turns(parcels) => match (parcels.get(index), self.hops.get(&target)) {
                (Some(parcel), Some(hop)) => self.turn(parcel, hop, slot, list),
                _ => Ok(0),
            },
        }
    }

    fn turn(&self, parcel: &Parcel, hop: &Hop, index: usize, list: &List) -> Result<usize, CudaError> {
        let (slot, far) = (&self.slots[index], &hop.far[index]);
        match self.direction {
            Direction::HostToDevice => {
                self.lane.wait_for(far)?;
                self.copy_runs(parcel, slot.address)?;
                slot.near.record(&self.lane)?;
                hop.stream.wait_for(&slot.near)?;
                let listed = hop.carry(parcel.scattered(slot.address).collect(), parcel.bytes, list)?;
                far.record(&hop.stream)?;
                Ok(listed)
            }
            Direction::DeviceToHost => {
                hop.stream.wait_for(&slot.near)?;
                let listed = hop.carry(parcel.gathered(slot.address).collect(), parcel.bytes, list)?;
                far.record(&hop.stream)?;
                self.lane.wait_for(far)?;
                self.copy_runs(parcel, slot.address)?;
                slot.near.record(&self.lane)?;
                Ok(listed)
            }
        }
    }

    fn copy_runs(&self, parcel: &Parcel, slot: Address) -> Result<(), CudaError> {
        // A copy, unlike a kernel, may be put into a stream of a device that is not current.
        for &(host, offset, bytes) in &parcel.runs {
            let (from, to) = match self.direction {
                Direction::HostToDevice => (host, slot + offset),
                Direction::DeviceToHost => (slot + offset, host),
            };
            // SAFETY: by the contract of `queue`; the slot is the chain's, and events keep its uses apart.
            unsafe { self.lane.copy(from, to, bytes)? };
        }
        Ok(())
    }

    /// Has the chain's stream wait for all of the chain's work here.
    pub fn join(&self, stream: StreamHandle, target: u16, work: &Work) -> Result<(), CudaError> {
        let behind = |event: &Event, last: &Stream| event.record(last).and_then(|()| event.hold(stream));
        match (work, self.hops.get(&target), self.direction) {
            (Work::Strands(_), ..) => {
                // All of them, also after an error.
                self.strands(work).map(|slot| behind(&slot.near, &slot.strand)).fold(Ok(()), Result::and)
            }
            (Work::Turns(_), Some(hop), Direction::HostToDevice) => behind(&hop.ended, &hop.stream),
            (Work::Turns(_), _, _) => behind(&self.ended, &self.lane),
        }
    }
}

impl Hop {
    /// Between a slot and the target's memory, by engine or kernel. Says how many pieces were listed.
    fn carry(&self, pieces: Vec<Piece>, bytes: u64, list: &List) -> Result<usize, CudaError> {
        if bytes >= ENGINE_PIECE_BYTES * pieces.len() as u64 || pieces.len() == 1 {
            for piece in &pieces {
                // SAFETY: by the contract of `Crew::queue`.
                unsafe { self.stream.copy(piece.from, piece.to, piece.bytes)? };
            }
            return Ok(0);
        }
        let start = list.start + (list.pieces * size_of::<Piece>()) as Address;
        // SAFETY: there is room, by the contract of `Crew::queue`; what was listed there belongs to chains that are over.
        unsafe {
            std::ptr::copy_nonoverlapping(pieces.as_ptr(), start as *mut Piece, pieces.len());
            self.kernels.copy(&self.stream, start, pieces.len() as u32, bytes, BLOCKS)?;
        }
        Ok(pieces.len())
    }
}
