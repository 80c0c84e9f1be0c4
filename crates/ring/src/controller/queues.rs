//! The controller's side of queues: where they are, what was fetched, what was posted, and what
//! doorbells may say.

use std::collections::BTreeMap;

/// A ring of entries in host memory.
#[derive(Debug, Clone, Copy)]
pub struct Ring {
    pub address: u64,
    pub entries: u32,
    pub head: u32,
    pub tail: u32,
}

impl Ring {
    pub fn new(address: u64, entries: u32) -> Ring {
        Ring { address, entries, head: 0, tail: 0 }
    }

    pub fn is_empty(&self) -> bool {
        self.head == self.tail
    }

    pub fn after(&self, at: u32) -> u32 {
        (at + 1) % self.entries
    }

    /// Entries from one place to another.
    fn between(&self, from: u32, to: u32) -> u32 {
        (to + self.entries - from) % self.entries
    }
}

#[derive(Debug)]
pub struct SubmissionQueue {
    pub ring: Ring,
    pub completion_queue: u16,
}

#[derive(Debug)]
pub struct CompletionQueue {
    pub ring: Ring,
    /// Of the entries of this round.
    pub phase: bool,
    /// An entry is written but for its last word, which follows at this step.
    pub unfinished: Option<Unfinished>,
}

#[derive(Debug, Clone, Copy)]
pub struct Unfinished {
    pub due: u64,
    pub last_word: u32,
}

impl CompletionQueue {
    pub fn new(address: u64, entries: u32) -> CompletionQueue {
        CompletionQueue { ring: Ring::new(address, entries), phase: true, unfinished: None }
    }

    pub fn has_room(&self) -> bool {
        self.unfinished.is_none() && self.ring.after(self.ring.tail) != self.ring.head
    }

    /// The entry at the tail was written.
    pub fn advance(&mut self) {
        self.ring.tail = self.ring.after(self.ring.tail);
        self.phase ^= self.ring.tail == 0;
    }
}

/// A doorbell that was rung in vain. A real controller tells it by an asynchronous event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DoorbellError {
    /// There is no doorbell there, or no queue that it belongs to.
    InvalidRegister { offset: u64 },
    /// Outside of the queue, no change, more than was free, or more than was posted.
    InvalidValue { offset: u64, value: u32 },
}

/// All queues; number 0 are the admin queues.
#[derive(Debug, Default)]
pub struct Queues {
    pub submission: BTreeMap<u16, SubmissionQueue>,
    pub completion: BTreeMap<u16, CompletionQueue>,
}

impl Queues {
    /// Takes what was written to a doorbell, if it may be.
    pub fn ring(&mut self, offset: u64, stride: u64, value: u32) -> Result<(), DoorbellError> {
        let no_register = DoorbellError::InvalidRegister { offset };
        let from_first =
            offset.checked_sub(0x1000).filter(|from| from.is_multiple_of(stride)).ok_or(no_register)?;
        let number = from_first / stride;
        let queue = u16::try_from(number / 2).map_err(|_| no_register)?;
        let is_right = if number.is_multiple_of(2) {
            let ring = &mut self.submission.get_mut(&queue).ok_or(no_register)?.ring;
            // One entry stays free.
            let free = ring.entries - 1 - ring.between(ring.head, ring.tail);
            move_up(&mut ring.tail, value, ring.entries, free)
        } else {
            let ring = &mut self.completion.get_mut(&queue).ok_or(no_register)?.ring;
            let posted = ring.between(ring.head, ring.tail);
            move_up(&mut ring.head, value, ring.entries, posted)
        };
        if is_right { Ok(()) } else { Err(DoorbellError::InvalidValue { offset, value }) }
    }
}

/// Moves a place of a ring of `entries` up to `to`, if that is 1 to `most` entries on.
fn move_up(at: &mut u32, to: u32, entries: u32, most: u32) -> bool {
    let is_right = to < entries && (1..=most).contains(&((to + entries - *at) % entries));
    if is_right {
        *at = to;
    }
    is_right
}
