//! The name of a slot of the log.

use std::num::NonZeroU32;

/// Names a slot of any segment of any volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LogSlot {
    /// The segment's number over all volumes, plus one: so that `Option<LogSlot>` is no longer.
    segment: NonZeroU32,
    slot: u16,
}

impl LogSlot {
    pub(super) fn new(segment: usize, slot: u16) -> LogSlot {
        // Volumes are refused when their segments are too many to be numbered.
        LogSlot { segment: NonZeroU32::MIN.saturating_add(segment as u32), slot }
    }

    pub(super) fn segment(self) -> usize {
        self.segment.get() as usize - 1
    }

    pub(super) fn slot(self) -> u16 {
        self.slot
    }
}
