//! A set: the streams, staging slots and events of chains for one GPU in one direction. While a chain is under way, only a
//! chain of the same stream may use its set, which waits for the first one anyway; so no chain ever waits for one that it
//! would not wait for without us. This file knows how a chain is queued; it must never know when that is allowed.

use super::strand::Strands;
use crate::device::{Device, DeviceMemory, Event, HostMemory, Stream};
use crate::driver::CudaError;
use crate::driver::abi::{Address, StreamHandle};
use crate::kernels::{Kernels, Piece};
use crate::links::{Direction, ENGINE_PIECE_BYTES, Parcel, parcels};
use std::collections::VecDeque;
use std::sync::Arc;

/// Staging slots of a way at least: fewer would not let its hops overlap.
const SLOTS_MIN: u64 = 4;
/// Larger slots gain nothing: the lane is busy for tens of microseconds with one of these.
const SLOT_BYTES_MAX: u64 = 2 << 20;
/// Staging on the target itself, for pages too small for a copy engine.
pub const OWN_STAGING_BYTES: u64 = 4 << 20;
/// A share is cut into this many parcels at least, if they are not too small then, so that its two hops overlap.
const PARCELS: u64 = 8;
const PARCEL_BYTES_MIN: u64 = 512 << 10;
/// Pieces that chains in flight may have listed for kernels.
const PIECES_MAX: usize = 65_536;
/// Blocks of a kernel.
const BLOCKS: u32 = 64;

/// Everything that chains for one GPU in one direction need.
#[derive(Debug)]
pub struct Set {
    direction: Direction,
    target: Arc<Kernels>,
    /// The target itself, for small pages, then its relays.
    vias: Vec<Via>,
    /// The relays again, for whole runs of memory that they reach.
    strands: Vec<Strands>,
    /// Passed when the caller's stream has come to the copy.
    begun: Event,
    /// Passed when the last chain is done.
    whole: Event,
    list: HostMemory,
    listed: usize,
    /// Whose chain is under way.
    holder: Option<StreamHandle>,
}

// SAFETY: a stream's handle is only compared and handed to the driver, which takes it from any thread.
unsafe impl Send for Set {}

/// The way over one GPU.
#[derive(Debug)]
struct Via {
    /// Carries host memory to or from the slots.
    lane: Stream,
    /// Carries the slots to or from the target. Always the target's own work: only it need reach its memory.
    hop: Stream,
    slots: Vec<Slot>,
    slot_bytes: u64,
    next: usize,
    ended: Event,
    _staging: DeviceMemory,
}

#[derive(Debug)]
struct Slot {
    address: Address,
    filled: Event,
    emptied: Event,
}

/// A chain to be queued.
#[derive(Debug)]
pub struct Chain {
    /// The caller's stream, of the target's context.
    pub stream: StreamHandle,
    /// What to copy, in the caller's order.
    pub pieces: VecDeque<Piece>,
    /// For the direct way, then for each relay.
    pub shares: Vec<u64>,
    /// Whether relays reach the target's side.
    pub peers_reach: bool,
}

impl Set {
    /// A set for `target` with its relays, on each of which its staging may have `staging_bytes`.
    pub fn new(
        direction: Direction,
        target: &Arc<Kernels>,
        relays: &[Arc<Kernels>],
        staging_bytes: u64,
    ) -> Result<Set, CudaError> {
        let (strand_bytes, staging_bytes) = (staging_bytes / 2, staging_bytes / 2);
        let own = (target, OWN_STAGING_BYTES);
        let gpus = std::iter::once(own).chain(relays.iter().map(|relay| (relay, staging_bytes)));
        let vias = gpus.map(|(via, bytes)| Via::new(direction, target.device(), via.device(), bytes));
        let strands = relays.iter().map(|relay| Strands::new(relay.device(), strand_bytes, SLOT_BYTES_MAX));
        Ok(Set {
            direction,
            target: Arc::clone(target),
            strands: strands.collect::<Result<_, CudaError>>()?,
            vias: vias.collect::<Result<_, CudaError>>()?,
            begun: Event::new(target.device())?,
            whole: Event::new(target.device())?,
            list: HostMemory::new(target.device(), PIECES_MAX * size_of::<Piece>())?,
            listed: 0,
            holder: None,
        })
    }

    /// Whether a chain is under way.
    pub fn is_busy(&mut self) -> bool {
        let passed = self.holder.is_none() || self.whole.is_passed().unwrap_or(false);
        if passed {
            (self.holder, self.listed) = (None, 0);
        }
        !passed
    }

    /// Takes the set for a chain of a stream. Says whether the stream is idle, so that the chain begins at once, or `None`
    /// when a chain of another stream has the set.
    pub fn take(&mut self, stream: StreamHandle) -> Result<Option<bool>, CudaError> {
        if self.is_busy() && self.holder != Some(stream) {
            return Ok(None);
        }
        self.begun.record_in(stream)?;
        self.begun.is_passed().map(Some)
    }

    /// Whether pieces of these sizes can be listed for kernels.
    pub fn has_room_for(&self, pieces: usize) -> bool {
        self.listed + pieces <= PIECES_MAX
    }

    /// The largest parcel that goes over a relay.
    pub fn slot_bytes(&self) -> u64 {
        self.vias.last().map_or(SLOT_BYTES_MAX, |via| via.slot_bytes)
    }

    /// Queues a chain. Whatever it returns, the caller's stream goes on only when everything that was queued is over.
    ///
    /// # Safety
    ///
    /// The set was taken for the chain's stream and the target's context is current. Until the stream has passed the chain,
    /// the pieces are valid for all contexts as far as they are host memory and for the target's as far as they are its, and
    /// the rules of a copy in that stream hold for who else may use them.
    pub unsafe fn queue(&mut self, chain: &mut Chain) -> Result<(), CudaError> {
        self.holder = Some(chain.stream);
        let direct = take(&mut chain.pieces, chain.shares[0]);
        let queued = self.queue_direct(chain.stream, &direct).and_then(|()| self.queue_relays(chain));
        let joined = self.join(chain.stream);
        let marked = self.whole.record_in(chain.stream);
        queued.and(joined).and(marked)
    }

    /// The direct way comes first: it is one call, and the lane is at work while the rest is queued.
    fn queue_direct(&mut self, stream: StreamHandle, pieces: &[Piece]) -> Result<(), CudaError> {
        let bytes = pieces.iter().map(|piece| piece.bytes).sum::<u64>();
        if pieces.len() > 1 && bytes < ENGINE_PIECE_BYTES * pieces.len() as u64 {
            return self.queue_via(0, pieces);
        }
        let device = self.target.device();
        for piece in pieces {
            // SAFETY: by the contract of `queue`.
            unsafe { device.copy_in(stream, piece.from, piece.to, piece.bytes)? };
        }
        Ok(())
    }

    fn queue_relays(&mut self, chain: &mut Chain) -> Result<(), CudaError> {
        for via in 1..self.vias.len() {
            let pieces = take(&mut chain.pieces, chain.shares[via]);
            let bytes = pieces.iter().map(|piece| piece.bytes).sum::<u64>();
            if chain.peers_reach && bytes >= ENGINE_PIECE_BYTES * pieces.len() as u64 {
                let strands = &mut self.strands[via - 1];
                let parcel_bytes = parcel_bytes(bytes, strands.slot_bytes());
                // SAFETY: by the contract of `queue`; the relay reaches the target's memory.
                unsafe { strands.queue(&pieces, parcel_bytes, &self.begun)? };
            } else {
                self.queue_via(via, &pieces)?;
            }
        }
        Ok(())
    }

    fn queue_via(&mut self, via: usize, pieces: &[Piece]) -> Result<(), CudaError> {
        let bytes = pieces.iter().map(|piece| piece.bytes).sum::<u64>();
        if bytes == 0 {
            return Ok(());
        }
        let (direction, way) = (self.direction, &self.vias[via]);
        way.first(direction).wait_for(&self.begun)?;
        let parcel_bytes = parcel_bytes(bytes, way.slot_bytes);
        let sides = |piece: &Piece| direction.sides(piece);
        for parcel in parcels(pieces.iter().map(sides), parcel_bytes) {
            self.queue_parcel(via, &parcel)?;
        }
        let way = &self.vias[via];
        way.ended.record(way.last(direction))
    }

    fn queue_parcel(&mut self, via: usize, parcel: &Parcel) -> Result<(), CudaError> {
        let index = self.vias[via].next;
        self.vias[via].next = (index + 1) % self.vias[via].slots.len();
        let (way, slot) = (&self.vias[via], &self.vias[via].slots[index]);
        match self.direction {
            Direction::HostToDevice => {
                way.lane.wait_for(&slot.emptied)?;
                way.copy_runs(self.direction, parcel, slot.address)?;
                slot.filled.record(&way.lane)?;
                way.hop.wait_for(&slot.filled)?;
                self.listed += self.hop(way, parcel, slot)?;
                slot.emptied.record(&way.hop)
            }
            Direction::DeviceToHost => {
                way.hop.wait_for(&slot.emptied)?;
                self.listed += self.hop(way, parcel, slot)?;
                slot.filled.record(&way.hop)?;
                way.lane.wait_for(&slot.filled)?;
                way.copy_runs(self.direction, parcel, slot.address)?;
                slot.emptied.record(&way.lane)
            }
        }
    }

    /// Between slot and target, by engine or kernel. Says how many pieces were listed.
    fn hop(&self, way: &Via, parcel: &Parcel, slot: &Slot) -> Result<usize, CudaError> {
        let pieces: Vec<Piece> = match self.direction {
            Direction::HostToDevice => parcel.scattered(slot.address).collect(),
            Direction::DeviceToHost => parcel.gathered(slot.address).collect(),
        };
        if parcel.bytes >= ENGINE_PIECE_BYTES * pieces.len() as u64 || pieces.len() == 1 {
            for piece in &pieces {
                // SAFETY: by the contract of `queue`; the slot is the chain's, and events keep its uses apart.
                unsafe { way.hop.copy(piece.from, piece.to, piece.bytes)? };
            }
            return Ok(0);
        }
        let list = self.list.start() as Address + (self.listed * size_of::<Piece>()) as Address;
        // SAFETY: there is room, which the caller has asked for; what is listed there belongs to chains that are over. The
        // rest is as above.
        unsafe {
            std::ptr::copy_nonoverlapping(pieces.as_ptr(), list as *mut Piece, pieces.len());
            self.target.copy(&way.hop, list, pieces.len() as u32, parcel.bytes, BLOCKS)?;
        }
        Ok(pieces.len())
    }

    /// Has the caller's stream wait for the last work of every way, of this chain or one before.
    fn join(&self, stream: StreamHandle) -> Result<(), CudaError> {
        let strands = self.strands.iter().map(|strands| strands.join(stream));
        let vias = self.vias.iter().map(|via| via.ended.hold(stream));
        // All of them, also after an error.
        strands.chain(vias).fold(Ok(()), Result::and)
    }
}

impl Via {
    fn new(
        direction: Direction,
        target: &Arc<Device>,
        via: &Arc<Device>,
        staging_bytes: u64,
    ) -> Result<Via, CudaError> {
        let slot_bytes = 1 << (staging_bytes / SLOTS_MIN).clamp(1, SLOT_BYTES_MAX).ilog2();
        let slots = staging_bytes / slot_bytes;
        let staging = DeviceMemory::new(via, slot_bytes * slots)?;
        // An event belongs to the device of the stream that it is recorded in.
        let (fills, empties) = match direction {
            Direction::HostToDevice => (via, target),
            Direction::DeviceToHost => (target, via),
        };
        let slot = |index| {
            let address = staging.address() + index * slot_bytes;
            Ok(Slot { address, filled: Event::new(fills)?, emptied: Event::new(empties)? })
        };
        Ok(Via {
            lane: Stream::new(via)?,
            hop: Stream::new(target)?,
            slots: (0..slots).map(slot).collect::<Result<_, CudaError>>()?,
            slot_bytes,
            next: 0,
            ended: Event::new(empties)?,
            _staging: staging,
        })
    }

    fn first(&self, direction: Direction) -> &Stream {
        match direction {
            Direction::HostToDevice => &self.lane,
            Direction::DeviceToHost => &self.hop,
        }
    }

    fn last(&self, direction: Direction) -> &Stream {
        match direction {
            Direction::HostToDevice => &self.hop,
            Direction::DeviceToHost => &self.lane,
        }
    }

    fn copy_runs(&self, direction: Direction, parcel: &Parcel, slot: Address) -> Result<(), CudaError> {
        // A copy, unlike a kernel, may be put into a stream of a device that is not current.
        for &(host, offset, bytes) in &parcel.runs {
            let (from, to) = match direction {
                Direction::HostToDevice => (host, slot + offset),
                Direction::DeviceToHost => (slot + offset, host),
            };
            // SAFETY: by the contract of `Set::queue`; the slot is the chain's, and events keep its uses apart.
            unsafe { self.lane.copy(from, to, bytes)? };
        }
        Ok(())
    }
}

/// How much of a share travels at a time.
fn parcel_bytes(share_bytes: u64, slot_bytes: u64) -> u64 {
    (share_bytes / PARCELS).max(PARCEL_BYTES_MIN).min(slot_bytes)
}

/// The first `bytes` bytes of the pieces.
fn take(pieces: &mut VecDeque<Piece>, mut bytes: u64) -> Vec<Piece> {
    let mut taken = Vec::new();
    while bytes > 0
        && let Some(front) = pieces.front_mut()
    {
        let part = front.bytes.min(bytes);
        taken.push(Piece { bytes: part, ..*front });
        bytes -= part;
        *front = Piece { from: front.from + part, to: front.to + part, bytes: front.bytes - part };
        if front.bytes == 0 {
            pieces.pop_front();
        }
    }
    taken
}
