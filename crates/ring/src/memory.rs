//! A ring's memory: a file that both processes map, and the waits for its words.

use crate::layout::{Header, Layout, NoRing};
use forebay_transfer::{Arena, ArenaError, Backing, Pages};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::thread::futex;
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::time::Duration;
use thiserror::Error;

/// Why there is no ring.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum NotMapped {
    #[error(transparent)]
    Memory(#[from] ArenaError),
    #[error(transparent)]
    NoRing(#[from] NoRing),
}

/// The memory of a ring, mapped until this is dropped.
#[derive(Debug)]
pub struct RingMemory(Arena);

impl RingMemory {
    /// A new ring, in a file without a name whose length nobody can change.
    pub fn create(layout: Layout, epoch: u64) -> Result<RingMemory, NotMapped> {
        let memory = RingMemory(Arena::new(layout.bytes(), Pages::Base)?);
        Header::make(memory.words(), layout, epoch)?;
        Ok(memory)
    }

    /// The ring of another process, by its file.
    pub fn attach(file: OwnedFd) -> Result<(RingMemory, Layout), NotMapped> {
        let memory = RingMemory(Arena::attach(file)?);
        let (_, layout) = Header::find(memory.words())?;
        Ok((memory, layout))
    }

    /// Its words, which any process that has it may change at any time.
    pub fn words(&self) -> &[AtomicU64] {
        let (start, len) = (self.0.as_ptr(), self.0.len() / size_of::<AtomicU64>());
        // SAFETY: the mapping begins at a page, lives as long as the arena and cannot be shortened;
        // every pattern of bits is a word, and atomics allow for others that write.
        unsafe { std::slice::from_raw_parts(start.cast(), len) }
    }

    pub fn header(&self) -> Header<'_> {
        Header::of(self.words())
    }
}

impl AsFd for RingMemory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Waits until a word in which [sleep](crate::sleep) was announced is 0 again, at most so long. It
/// may return earlier.
pub fn wait(word: &AtomicU64, at_most: Option<Duration>) {
    let at_most = at_most.and_then(|at_most| futex::Timespec::try_from(at_most).ok());
    // Interrupted, late, or changed meanwhile: the caller looks again.
    let _ = futex::wait(low_half(word), futex::Flags::empty(), 1, at_most.as_ref());
}

/// Wakes whoever [waits](wait) for the word.
pub fn wake(word: &AtomicU64) {
    // Nobody who waits is no error.
    let _ = futex::wake(low_half(word), futex::Flags::empty(), u32::MAX >> 1);
}

/// The kernel waits for words of 32 bits.
fn low_half(word: &AtomicU64) -> &AtomicU32 {
    const { assert!(cfg!(target_endian = "little"), "the low half comes first") };
    // SAFETY: the first half of an aligned word of 64 bits is an aligned word of 32 that lives as
    // long; both are only reached as atomics, and the kernel only compares.
    unsafe { &*std::ptr::from_ref(word).cast() }
}
