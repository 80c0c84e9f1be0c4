//! Rows of a tier's tables: a [`Row`] is the number that a chunk has in all of them, an [`Entry`]
//! is what the table of states has in a row, and a [`ChunkRef`] tells the chunks apart that a row
//! holds one after another.

use crate::tenant::TenantId;
use std::num::NonZeroU32;

/// Names a row that all tables of the tier share: ids, relatives, recency and state. Rows are
/// reused; a [`ChunkRef`] is not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Row(NonZeroU32);

impl Row {
    /// Rows at most: one value is spent on `Option<Row>`.
    pub const LIMIT: u32 = u32::MAX - 1;

    /// The row at `position`, if there can be one.
    pub fn at(position: usize) -> Option<Row> {
        u32::try_from(position).ok().and_then(|row| row.checked_add(1)).and_then(NonZeroU32::new).map(Row)
    }

    pub fn position(self) -> usize {
        self.0.get() as usize - 1
    }

    /// As stored in compact tables; never 0.
    pub fn to_raw(self) -> u32 {
        self.0.get()
    }

    /// From a compact table, where 0 means none.
    pub fn from_raw(raw: u32) -> Option<Row> {
        NonZeroU32::new(raw).map(Row)
    }
}

/// A row and what was in it at the time. Dead as soon as the row's bytes go, whatever the row holds
/// later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ChunkRef {
    pub row: Row,
    pub generation: u32,
}

/// What is known of one row.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Entry<Slot> {
    /// Raised whenever the bytes in this row go. A row whose generations are used up is never used
    /// again.
    pub generation: u32,
    /// Leases and reads that need the bytes.
    pub holds: u32,
    /// Where the bytes are. Only a hole has none.
    pub slot: Option<Slot>,
    pub tenant: TenantId,
    pub state: State,
    pub pinned: bool,
}

/// What a row stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    /// The id is known, the bytes are not here: they went while descendants stayed. A hole has at
    /// least one child.
    Hole,
    /// Bytes are being written. Nobody sees the chunk.
    Writing,
    /// Bytes are here, and the chunk waits in the recency lists.
    Listed,
    /// Bytes are here, and the chunk was set aside by an eviction that could not take it.
    Parked,
}

impl<Slot> Entry<Slot> {
    pub fn unused(tenant: TenantId) -> Entry<Slot> {
        Entry { generation: 0, holds: 0, slot: None, tenant, state: State::Hole, pinned: false }
    }

    /// Whether the chunk's bytes can be found and read.
    pub fn is_resident(&self) -> bool {
        matches!(self.state, State::Listed | State::Parked)
    }

    /// Whether nobody needs the bytes to stay.
    pub fn is_unheld(&self) -> bool {
        self.is_resident() && self.holds == 0 && !self.pinned
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_of_state_is_sixteen_bytes_and_an_optional_row_number_four() {
        assert_eq!(size_of::<Entry<crate::slots::SlotId>>(), 16);
        assert_eq!(size_of::<Option<Row>>(), 4);
    }

    #[test]
    fn row_numbers_survive_the_compact_form() {
        for position in [0, 1, 77, Row::LIMIT as usize - 1] {
            let entry = Row::at(position).unwrap();
            assert_eq!((entry.position(), Row::from_raw(entry.to_raw())), (position, Some(entry)));
        }
        assert_eq!(Row::from_raw(0), None);
        assert_eq!(Row::at(u32::MAX as usize), None);
    }
}
