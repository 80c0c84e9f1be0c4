//! Which slots of a pipe are free, and how large they are.

use crate::tcp::CHUNK_BYTES_MAX;

/// Bytes of a message at most: a DATA of the wire with what surrounds it.
pub(super) const SLOT_BYTES: usize = CHUNK_BYTES_MAX as usize + (4 << 10);
/// Messages that wait on their way out, and as many on their way in.
pub(super) const SLOTS: usize = 8;

/// Which slots of a side are free.
#[derive(Debug)]
pub(super) struct Free(Vec<usize>);

impl Free {
    pub fn all() -> Free {
        Free((0..SLOTS).collect())
    }

    pub fn take(&mut self) -> Option<usize> {
        self.0.pop()
    }

    pub fn give_back(&mut self, slot: usize) {
        debug_assert!(!self.0.contains(&slot));
        self.0.push(slot);
    }

    pub fn any(&self) -> bool {
        !self.0.is_empty()
    }

    pub fn are_all(&self) -> bool {
        self.0.len() == SLOTS
    }
}
