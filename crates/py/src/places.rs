//! Memory that is registered with a node's client: which region an address is. This file knows
//! addresses and bounds.

use crate::errors::NotFoundError;
use crate::rows::Row;
use forebay_transfer::{RegionId, Span};
use pyo3::PyResult;
use pyo3::buffer::PyUntypedBuffer;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Registered memory. A buffer stays exported, so in its place, as long as somebody holds this.
pub struct Place {
    pub start: u64,
    pub len: u64,
    pub region: RegionId,
    _buffer: Option<PyUntypedBuffer>,
}

impl Place {
    pub fn new(start: u64, len: u64, region: RegionId, buffer: Option<PyUntypedBuffer>) -> Place {
        Place { start, len, region, _buffer: buffer }
    }
}

/// A piece of a layer: where it is, and what keeps it there.
#[derive(Clone)]
pub struct Piece {
    pub place: Arc<Place>,
    pub offset: u64,
    pub len: u64,
}

impl Piece {
    /// What it is to the mover.
    pub fn span(&self) -> Span {
        Span::new(self.place.region, self.offset, self.len)
    }

    /// Its first byte.
    pub fn start(&self) -> *const u8 {
        (self.place.start + self.offset) as *const u8
    }
}

/// Registered memory by its first address. Ranges do not overlap.
#[derive(Default)]
pub struct Places(BTreeMap<u64, Arc<Place>>);

impl Places {
    /// The memory that has one of these addresses, if there is one.
    pub fn overlapping(&self, start: u64, len: u64) -> Option<&Arc<Place>> {
        let before = self.0.range(..start.saturating_add(len)).next_back();
        before.map(|(_, place)| place).filter(|place| place.start + place.len > start)
    }

    pub fn insert(&mut self, place: Arc<Place>) {
        self.0.insert(place.start, place);
    }

    pub fn remove(&mut self, place: &Place) {
        self.0.remove(&place.start);
    }

    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// A descriptor's memory, which must lie in one registered place.
    pub fn find(&self, &[address, len, _device]: &Row) -> PyResult<Piece> {
        let found = self.0.range(..=address).next_back().and_then(|(start, place)| {
            let offset = address - start;
            (offset.checked_add(len)? <= place.len).then(|| Piece { place: Arc::clone(place), offset, len })
        });
        found.ok_or_else(|| {
            NotFoundError::new_err(format!("{len} bytes at {address:#x} do not lie in one registered place"))
        })
    }
}
