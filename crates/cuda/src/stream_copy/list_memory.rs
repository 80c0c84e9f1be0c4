//! The pinned memory of lists, which stream copies in flight share: each has its places until the
//! GPU has read them.

use super::kernel_list::KernelList;
use super::ring::Ring;
use crate::device::{Device, Event, HostMemory};
use crate::driver::CudaError;
use crate::driver::abi::{Address, StreamHandle};
use crate::kernels::Piece;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

/// Pieces that stream copies in flight may have listed for kernels.
const PIECES_MAX: usize = 65_536;
/// Pieces that the ends of segments and shares may add where there are few.
const CUTS_MAX: usize = 256;
/// StreamCopies in flight that have listed something.
const COPIES_MAX: usize = 64;

/// Lists of one path set.
#[derive(Debug)]
pub struct ListMemory {
    memory: HostMemory,
    ring: Ring,
    /// Passed when a stream copy's places have been read, in the order of the ring.
    read: VecDeque<Event>,
    spare: Vec<Event>,
}

impl ListMemory {
    /// Lists that a device reads.
    pub fn new(device: &Arc<Device>) -> Result<ListMemory, CudaError> {
        let memory = HostMemory::new(device, PIECES_MAX * size_of::<Piece>())?;
        let spare = (0..COPIES_MAX).map(|_| Event::new(device)).collect::<Result<_, _>>()?;
        let (ring, read) = (Ring::new(PIECES_MAX), VecDeque::with_capacity(COPIES_MAX));
        Ok(ListMemory { memory, ring, read, spare })
    }

    /// Places for a stream copy of so many pieces, or `None` until stream copies that are under way
    /// have come further. Segments cut some of the pieces.
    pub fn room_for(&mut self, pieces: usize) -> Option<Range<usize>> {
        while self.read.front().is_some_and(|read| read.is_passed().unwrap_or(false)) {
            self.ring.give_back();
            self.spare.extend(self.read.pop_front());
        }
        self.ring.room(2 * pieces + CUTS_MAX).filter(|_| !self.spare.is_empty())
    }

    /// A list of places that [`room_for`](ListMemory::room_for) has just given.
    pub fn open<'a>(&'a mut self, places: &Range<usize>, seams: &'a [Address]) -> KernelList<'a> {
        // SAFETY: the ring's places are those of the allocation, and no kernel that is under way
        // reads the free ones.
        let free = unsafe {
            let start = self.memory.start().cast::<Piece>().add(places.start);
            std::slice::from_raw_parts_mut(start, places.len())
        };
        KernelList::new(free, seams)
    }

    /// The first of these places are read until the stream has come to here. After an error nobody
    /// knows until when: none may be given to others before [`clear`](ListMemory::clear).
    pub fn close(&mut self, places: Range<usize>, stream: StreamHandle) -> Result<(), CudaError> {
        if places.is_empty() {
            return Ok(());
        }
        let Some(read) = self.spare.pop() else { return Ok(()) };
        let marked = read.record_in(stream);
        self.ring.take(places);
        self.read.push_back(read);
        marked
    }

    /// Nothing is read any more.
    pub fn clear(&mut self) {
        self.spare.extend(self.read.drain(..));
        self.ring = Ring::new(PIECES_MAX);
    }
}
