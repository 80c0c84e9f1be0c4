//! Operations of streams: what each does, and what it waits for.

use crate::abi::Code;
use crate::clock::Clock;
use crate::kernels::Kernel;
use crate::memory::Move;
use crate::order::Touch;
use std::sync::Arc;

/// What an operation does.
#[derive(Clone)]
pub enum What {
    /// Records an event.
    Record(usize),
    /// Comes after the record of an event.
    Join(usize),
    /// Copies. `kept`: bytes that were taken when the copy was posted.
    Moves {
        moves: Arc<[Move]>,
        kept: Option<Arc<[u8]>>,
    },
    /// Fills memory with a byte.
    Fill {
        at: u64,
        bytes: u64,
        byte: u8,
    },
    Kernel {
        kernel: &'static Kernel,
        args: Arc<[u64]>,
    },
    /// Writes a value of 4 or 8 bytes.
    Write {
        at: u64,
        bytes: u64,
        value: u64,
    },
    /// Waits for a value.
    Wait(Wanted),
}

/// An operation that has not ended.
pub struct Op {
    pub name: &'static str,
    pub gpu: usize,
    pub stream: usize,
    pub number: u64,
    pub what: What,
    /// What lies before its beginning, as far as that has ended.
    pub clock: Clock,
    pub touches: Vec<Touch>,
    /// What an operation that it waits for came to, if its GPU was lost.
    pub lost: Option<Code>,
    /// How many operations it still waits for.
    pub pending: usize,
    pub dependents: Vec<u64>,
}

/// A value that a stream waits for.
#[derive(Debug, Clone, Copy)]
pub struct Wanted {
    pub at: u64,
    pub bytes: u64,
    pub value: u64,
    /// `CUstreamWaitValue_flags`.
    pub flags: u32,
}

impl Wanted {
    /// Whether a value that was found is the one.
    pub fn is(self, found: u64) -> bool {
        let (found, value) = if self.bytes == 4 {
            (found as u32 as u64, self.value as u32 as u64)
        } else {
            (found, self.value)
        };
        match self.flags & 3 {
            // A counter that wraps is still a counter: the difference decides.
            0 if self.bytes == 4 => (found as u32).wrapping_sub(value as u32) as i32 >= 0,
            0 => found.wrapping_sub(value) as i64 >= 0,
            1 => found == value,
            2 => found & value != 0,
            _ => !(found | value) != 0,
        }
    }
}
