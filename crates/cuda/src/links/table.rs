//! Lists of pieces in pinned memory, where kernels read them, each held by an operation until it is
//! over.

use crate::device::{Device, HostMemory};
use crate::driver::{CudaError, abi::Address};
use crate::kernels::Piece;
use forebay_transfer::lock::Mutex;
use std::sync::Arc;

/// Pieces in a list at most: those of the largest lot, and the cuts that staging adds.
pub const PIECES_MAX: usize = 16_384 + 256;

#[derive(Debug)]
pub struct Tables {
    memory: HostMemory,
    free: Mutex<Vec<usize>>,
}

/// A list that an operation holds until it is over.
#[derive(Debug)]
pub struct Table {
    tables: Arc<Tables>,
    index: usize,
}

impl Tables {
    /// Makes this many lists, all of them free.
    pub fn new(device: &Arc<Device>, lists: usize) -> Result<Arc<Tables>, CudaError> {
        let memory = HostMemory::new(device, lists * PIECES_MAX * size_of::<Piece>())?;
        Ok(Arc::new(Tables { memory, free: Mutex::new((0..lists).collect()) }))
    }

    /// A free list, filled with `pieces`. `None` when all are in use or the pieces are too many.
    pub fn fill(self: &Arc<Tables>, pieces: &[Piece]) -> Option<Table> {
        if pieces.len() > PIECES_MAX {
            return None;
        }
        let index = self.free.lock().pop()?;
        let table = Table { tables: Arc::clone(self), index };
        let start = table.address() as *mut Piece;
        // SAFETY: the list lies inside the allocation, is long enough, and is held by nobody else.
        unsafe { std::ptr::copy_nonoverlapping(pieces.as_ptr(), start, pieces.len()) };
        Some(table)
    }
}

// SAFETY: lists are written by who holds them only.
unsafe impl Sync for Tables {}

impl Table {
    pub fn address(&self) -> Address {
        self.at(0)
    }

    pub fn at(&self, piece: usize) -> Address {
        let offset = (self.index * PIECES_MAX + piece) * size_of::<Piece>();
        self.tables.memory.start() as Address + offset as Address
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        self.tables.free.lock().push(self.index);
    }
}
