//! A kernel that copies between a GPU and the host's memory by itself: the usual way for small pages where no link but the
//! GPU's own is used. This file knows the list that it reads; it must never know which pages are in it.

use super::Outcome;
use super::rig::{Ends, Job};
use forebay_cuda::device::HostMemory;
use forebay_cuda::kernels::{Kernels, Piece};
use std::sync::{Mutex, PoisonError};

/// Blocks: one for nearly each multiprocessor, more than a link needs.
const BLOCKS: u32 = 128;
/// Pieces of a list at most.
const PIECES_MAX: usize = 1 << 18;

/// The kernel and its list.
pub struct Gather {
    kernels: Kernels,
    list: Mutex<HostMemory>,
}

impl Gather {
    /// For one GPU.
    pub fn new(ends: &Ends) -> Outcome<Gather> {
        let list = HostMemory::new(&ends.device, PIECES_MAX * size_of::<Piece>())?;
        Ok(Gather { kernels: Kernels::load(&ends.device)?, list: Mutex::new(list) })
    }

    /// Copies, and waits until it is done.
    pub fn copy(&self, ends: &Ends, job: &Job) -> Outcome<()> {
        let (list, pieces) = (self.list.lock().unwrap_or_else(PoisonError::into_inner), &job.pieces);
        if pieces.len() > PIECES_MAX {
            return Err(format!("{} pieces; a list has {PIECES_MAX} at most", pieces.len()).into());
        }
        let (_current, stream) = (ends.device.enter()?, ends.stream(job.direction));
        let bytes = pieces.iter().map(|piece| piece.bytes).sum();
        // SAFETY: the list has room and is held until the kernel has ended; the ranges are the rig's, and no two copies of the
        // rig at a time share any.
        unsafe {
            std::ptr::copy_nonoverlapping(pieces.as_ptr(), list.start().cast(), pieces.len());
            self.kernels.copy(stream, list.start() as u64, pieces.len() as u32, bytes, BLOCKS)?;
        }
        Ok(stream.synchronize()?)
    }
}
