//! Which slots of a pipe's own memory are free. Bytes of messages wait in slots on their way out and in: nothing but slots is
//! ever shown to UCX. This file counts; `pipe.rs` has the memory.

/// Slots by number.
#[derive(Debug)]
pub(super) struct Slots {
    free: Vec<usize>,
    count: usize,
}

impl Slots {
    /// All free.
    pub fn new(count: usize) -> Slots {
        Slots { free: (0..count).collect(), count }
    }

    pub fn take(&mut self) -> Option<usize> {
        self.free.pop()
    }

    pub fn give_back(&mut self, slot: usize) {
        debug_assert!(!self.free.contains(&slot));
        self.free.push(slot);
    }

    pub fn any_free(&self) -> bool {
        !self.free.is_empty()
    }

    /// Those that are in use.
    pub fn in_use(&self) -> usize {
        self.count - self.free.len()
    }
}
