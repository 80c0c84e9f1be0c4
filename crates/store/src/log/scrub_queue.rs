//! What is left to overwrite, in the order in which it is done.

use super::log_slot::LogSlot;
use std::collections::VecDeque;

/// What is left to overwrite.
#[derive(Debug, Default)]
pub(super) struct Scrubs {
    pub jobs: VecDeque<Job>,
    pub under_way: usize,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Job {
    /// A slot whose chunk was deleted. Its segment waits for it.
    Slot(LogSlot),
    /// All dead slots of a segment and what lies behind its slots, or all of it if it is free.
    Segment(usize),
    /// A piece of what lies behind the slots of a segment, where bytes of earlier generations may
    /// be. It starts at this offset, and the segment waits for it.
    Behind(usize, u64),
    /// What is left of a free segment, from this offset in it on.
    Rest(usize, u64),
}
