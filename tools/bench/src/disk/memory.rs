//! The memory that both sides use: for each object under way one buffer to read into and one to
//! write from, the latter filled with bytes whose checksum is known. It has the words for what is
//! moved, too.

use crc_fast::{CrcAlgorithm, checksum};
use forebay_transfer::Backing;
use forebay_transfer::{Arena, Pages};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::sync::Arc;

pub const MIB: u64 = 1 << 20;

/// Where the bytes go.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From disk.
    Read,
    /// To disk.
    Write,
}

/// What is moved.
#[derive(Clone, Copy)]
pub struct Objects {
    /// Size of each.
    pub bytes: u64,
    /// How many the disk has at a time.
    pub depth: usize,
    /// How many buffers there are in each direction: a multiple of `depth`.
    pub slots: usize,
}

/// Where an object of the ceiling lies: in which of the files, and where in it.
#[derive(Clone, Copy)]
pub struct At {
    pub file: usize,
    pub offset: u64,
}

/// Buffers in one piece of memory: first those to write from, then those to read into.
#[derive(Clone)]
pub struct Buffers {
    pub arena: Arc<Arena>,
    /// How it is divided.
    pub objects: Objects,
}

impl Buffers {
    /// Buffers of which those to write from hold random bytes.
    pub fn new(objects: Objects) -> Result<Buffers, forebay_transfer::ArenaError> {
        let bytes = (2 * objects.slots as u64 * objects.bytes).next_multiple_of(2 << 20);
        let buffers = Buffers { arena: Arc::new(Arena::new(bytes, Pages::Transparent)?), objects };
        let mut random = StdRng::seed_from_u64(1);
        for slot in 0..objects.slots {
            let mut source = vec![0; objects.bytes as usize];
            random.fill_bytes(&mut source);
            // SAFETY: the slot lies inside of the arena, which nobody else knows yet.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    source.as_ptr(),
                    buffers.start(Direction::Write, slot),
                    source.len(),
                )
            };
        }
        Ok(buffers)
    }

    /// Where a buffer starts in the memory.
    pub fn offset(&self, direction: Direction, slot: usize) -> u64 {
        let first = if direction == Direction::Write { 0 } else { self.objects.slots };
        (first + slot) as u64 * self.objects.bytes
    }

    /// Address of a buffer.
    pub fn start(&self, direction: Direction, slot: usize) -> *mut u8 {
        self.arena.as_ptr().wrapping_add(self.offset(direction, slot) as usize)
    }

    /// CRC-32C of a buffer.
    ///
    /// # Safety
    ///
    /// Nobody may be writing to the buffer, and the slot must be one of `slots`.
    pub unsafe fn sum(&self, direction: Direction, slot: usize) -> u32 {
        let start = self.start(direction, slot);
        // SAFETY: the buffer lies inside of the arena; the rest as the caller promises.
        let bytes = unsafe { std::slice::from_raw_parts(start, self.objects.bytes as usize) };
        checksum(CrcAlgorithm::Crc32Iscsi, bytes) as u32
    }
}
