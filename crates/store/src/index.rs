//! The index: from a chunk id to its row. An open-addressing table of row numbers and short tags
//! beside the ids themselves; about 43 bytes a chunk. This file knows ids and rows.

use crate::entry::Row;
use forebay_kv::ChunkId;

/// Ids looked up together, so that the processor fetches their cache lines at the same time.
pub(crate) const BATCH: usize = 16;

/// Cells per four rows that may be in use: the table is at most three quarters full.
const CELLS_PER_ROWS: (u64, u64) = (4, 3);

/// Row numbers of ids.
///
/// Ids are digests, so their bits serve as hash bits as they are. A cell holds a row number and 32
/// further bits of its id; the whole id is compared on every hit. Cells are probed one after
/// another and closed up on removal.
#[derive(Debug)]
pub(crate) struct Index {
    cells: Box<[Cell]>,
    /// The id of each row; meaningless for rows that are free.
    ids: Vec<ChunkId>,
    /// Rows that were used and are free again.
    free: Vec<Row>,
    limit: usize,
    len: usize,
}

/// `row` 0 is an empty cell.
#[derive(Debug, Clone, Copy, Default)]
struct Cell {
    row: u32,
    tag: u32,
}

/// Two independent parts of an id: where to start probing, and the tag.
fn hash(id: &ChunkId) -> (u64, u32) {
    let bytes = id.as_bytes();
    let mut place = [0; 8];
    place.copy_from_slice(&bytes[..8]);
    let mut tag = [0; 4];
    tag.copy_from_slice(&bytes[8..12]);
    (u64::from_le_bytes(place), u32::from_le_bytes(tag))
}

impl Index {
    /// An index for at most `limit` ids. Memory is reserved now and touched as it fills.
    pub fn new(limit: u32) -> Index {
        let limit = limit.min(Row::LIMIT);
        let cells = u64::from(limit) * CELLS_PER_ROWS.0 / CELLS_PER_ROWS.1 + 1;
        Index {
            cells: vec![Cell::default(); cells as usize].into(),
            ids: Vec::with_capacity(limit as usize),
            free: Vec::new(),
            limit: limit as usize,
            len: 0,
        }
    }

    pub fn limit(&self) -> usize {
        self.limit
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn has_room(&self) -> bool {
        !self.free.is_empty() || self.ids.len() < self.limit
    }

    pub fn id(&self, row: Row) -> &ChunkId {
        &self.ids[row.position()]
    }

    pub fn find(&self, id: &ChunkId) -> Option<Row> {
        let (place, tag) = hash(id);
        self.probe(id, self.home(place), tag)
    }

    /// The rows of up to [`BATCH`] ids, in their order. The loads of one stage do not depend on
    /// each other.
    pub fn find_batch(&self, ids: &[ChunkId]) -> [Option<Row>; BATCH] {
        let mut homes = [(0, 0); BATCH];
        for (home, id) in homes.iter_mut().zip(ids) {
            let (place, tag) = hash(id);
            *home = (self.home(place), tag);
        }
        let mut rows = [None; BATCH];
        for ((row, id), (home, tag)) in rows.iter_mut().zip(ids).zip(homes) {
            *row = self.probe(id, home, tag);
        }
        rows
    }

    fn probe(&self, id: &ChunkId, home: usize, tag: u32) -> Option<Row> {
        let mut at = home;
        loop {
            let cell = self.cells[at];
            let row = Row::from_raw(cell.row)?;
            if cell.tag == tag && self.ids[row.position()] == *id {
                return Some(row);
            }
            at = self.after(at);
        }
    }

    /// Adds an id that is not known yet. `None` when there is no room.
    pub fn insert(&mut self, id: &ChunkId) -> Option<Row> {
        debug_assert!(self.find(id).is_none(), "an id has one row");
        let row = self.free_row()?;
        self.ids[row.position()] = *id;
        let (place, tag) = hash(id);
        let mut at = self.home(place);
        while self.cells[at].row != 0 {
            at = self.after(at);
        }
        self.cells[at] = Cell { row: row.to_raw(), tag };
        self.len += 1;
        Some(row)
    }

    fn free_row(&mut self) -> Option<Row> {
        if let Some(row) = self.free.pop() {
            return Some(row);
        }
        let row = Row::at(self.ids.len()).filter(|_| self.ids.len() < self.limit)?;
        self.ids.push(ChunkId::from_bytes([0; 32]));
        Some(row)
    }

    /// Forgets a row's id. The row is used again only if `reusable`.
    pub fn remove(&mut self, row: Row, reusable: bool) {
        let (place, _) = hash(&self.ids[row.position()]);
        let mut at = self.home(place);
        while self.cells[at].row != row.to_raw() {
            if self.cells[at].row == 0 {
                debug_assert!(false, "only known rows are removed");
                return;
            }
            at = self.after(at);
        }
        self.close_up(at);
        self.len -= 1;
        if reusable {
            self.free.push(row);
        }
    }

    /// Empties a cell and moves later ones of its run back, so that no probe ends too early.
    fn close_up(&mut self, mut gap: usize) {
        let mut at = gap;
        loop {
            at = self.after(at);
            let Some(row) = Row::from_raw(self.cells[at].row) else { break };
            let home = self.home(hash(&self.ids[row.position()]).0);
            // The cell may fill the gap unless its home lies cyclically behind the gap.
            if self.distance(home, at) >= self.distance(gap, at) {
                self.cells[gap] = self.cells[at];
                gap = at;
            }
        }
        self.cells[gap] = Cell::default();
    }

    /// Bytes of the table and the ids, as reserved.
    pub fn table_bytes(&self) -> u64 {
        (size_of_val(&*self.cells) + self.ids.capacity() * size_of::<ChunkId>()) as u64
    }

    /// Maps 64 hash bits to a cell by multiplication, so that the table can have any length.
    fn home(&self, place: u64) -> usize {
        ((u128::from(place) * self.cells.len() as u128) >> 64) as usize
    }

    fn after(&self, at: usize) -> usize {
        if at + 1 == self.cells.len() { 0 } else { at + 1 }
    }

    fn distance(&self, from: usize, to: usize) -> usize {
        if to >= from { to - from } else { to + self.cells.len() - from }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    /// Few distinct homes and tags, so that runs collide and wrap.
    fn id(number: u8) -> ChunkId {
        let mut bytes = [number; 32];
        bytes[..12].fill(0);
        bytes[7] = [0, 0x40, 0xff][usize::from(number) % 3];
        bytes[8] = number % 2;
        ChunkId::from_bytes(bytes)
    }

    proptest! {
        #[test]
        fn the_index_finds_exactly_the_ids_it_holds(steps in prop::collection::vec((any::<bool>(), 0u8..40), 1..300)) {
            let mut index = Index::new(24);
            let mut model: HashMap<u8, Row> = HashMap::new();
            for (add, number) in steps {
                match (add, model.get(&number).copied()) {
                    (true, None) => match index.insert(&id(number)) {
                        Some(row) => prop_assert!(model.insert(number, row).is_none()),
                        None => prop_assert_eq!(model.len(), 24),
                    },
                    (false, Some(row)) => {
                        index.remove(row, true);
                        model.remove(&number);
                    }
                    _ => {}
                }
                prop_assert_eq!(index.len(), model.len());
                for number in 0..40 {
                    prop_assert_eq!(index.find(&id(number)), model.get(&number).copied());
                }
            }
        }

        #[test]
        fn a_batch_finds_what_single_lookups_find(held in prop::collection::vec(0u8..40, 0..24), asked in prop::collection::vec(0u8..40, 0..=BATCH)) {
            let mut index = Index::new(64);
            for number in held {
                if index.find(&id(number)).is_none() {
                    index.insert(&id(number));
                }
            }
            let ids: Vec<ChunkId> = asked.into_iter().map(id).collect();
            let single: Vec<_> = ids.iter().map(|id| index.find(id)).collect();
            prop_assert_eq!(&index.find_batch(&ids)[..ids.len()], &single[..]);
        }
    }

    #[test]
    fn a_row_whose_generations_are_used_up_is_never_given_out_again() {
        let mut index = Index::new(2);
        let first = index.insert(&id(1)).unwrap();
        index.remove(first, false);
        assert_ne!(index.insert(&id(2)), Some(first));
        assert_eq!(index.insert(&id(3)), None);
    }
}
