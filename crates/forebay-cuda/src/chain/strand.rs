//! Strands: a relay's own streams, each with one staging slot. A parcel's two hops follow each other in one strand, and the
//! next parcel goes to the next strand, so order needs no events at all. The relay does both hops; so it must reach the
//! target's memory, which it does unless that was mapped for the target alone. This file knows streams and slots; it must
//! never know which bytes are a relay's.

use crate::device::{Device, DeviceMemory, Event, Stream};
use crate::driver::CudaError;
use crate::driver::abi::{Address, StreamHandle};
use crate::kernels::Piece;
use std::sync::Arc;

/// Strands of a relay: while one fills its slot, others empty theirs.
const STRANDS: u64 = 4;

/// The strands of one relay for one target in one direction.
#[derive(Debug)]
pub struct Strands {
    strands: Vec<Strand>,
    slot_bytes: u64,
    next: usize,
    _staging: DeviceMemory,
}

#[derive(Debug)]
struct Strand {
    stream: Stream,
    slot: Address,
    ended: Event,
}

impl Strands {
    pub fn new(relay: &Arc<Device>, staging_bytes: u64, slot_bytes_max: u64) -> Result<Strands, CudaError> {
        let slot_bytes = 1 << (staging_bytes / STRANDS).clamp(1, slot_bytes_max).ilog2();
        let staging = DeviceMemory::new(relay, slot_bytes * STRANDS)?;
        let strand = |index| {
            let slot = staging.address() + index * slot_bytes;
            Ok(Strand { stream: Stream::new(relay)?, slot, ended: Event::new(relay)? })
        };
        let strands = (0..STRANDS).map(strand).collect::<Result<_, CudaError>>()?;
        Ok(Strands { strands, slot_bytes, next: 0, _staging: staging })
    }

    pub fn slot_bytes(&self) -> u64 {
        self.slot_bytes
    }

    /// Queues pieces, cut into parcels of at most `parcel_bytes`, to begin when `begun` has passed.
    ///
    /// # Safety
    ///
    /// As for [`Set::queue`](super::set::Set::queue); and the relay reaches the target's memory.
    pub unsafe fn queue(
        &mut self,
        pieces: &[Piece],
        parcel_bytes: u64,
        begun: &Event,
    ) -> Result<(), CudaError> {
        let parcels = pieces.iter().map(|piece| piece.bytes.div_ceil(parcel_bytes)).sum::<u64>();
        for strand in self.strands.iter().cycle().skip(self.next).take(parcels.min(STRANDS) as usize) {
            strand.stream.wait_for(begun)?;
        }
        for piece in pieces {
            let mut at = 0;
            while at < piece.bytes {
                let bytes = parcel_bytes.min(piece.bytes - at);
                let strand = &self.strands[self.next];
                self.next = (self.next + 1) % self.strands.len();
                // SAFETY: by this function's contract; the slot is the strand's, whose work runs in order.
                unsafe {
                    strand.stream.copy(piece.from + at, strand.slot, bytes)?;
                    strand.stream.copy(strand.slot, piece.to + at, bytes)?;
                }
                at += bytes;
            }
        }
        Ok(())
    }

    /// Has a stream wait for everything that is queued.
    pub fn join(&self, stream: StreamHandle) -> Result<(), CudaError> {
        for strand in &self.strands {
            strand.ended.record(&strand.stream)?;
            strand.ended.hold(stream)?;
        }
        Ok(())
    }
}
