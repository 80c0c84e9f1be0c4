//! A kernel that copies between a GPU and the host's memory by itself: the usual way for small
//! pages where no link but the GPU's own is used.

use super::ends::{Ends, Job};
use crate::output::Outcome;
use forebay_cuda::device::HostMemory;
use forebay_cuda::kernels::{Kernels, Piece};
use parking_lot::Mutex;

/// Blocks: one for nearly each multiprocessor, more than a link needs.
const BLOCKS: u32 = 128;
/// Pieces that a list has room for at first.
const PIECES: usize = 1 << 14;

/// The kernel and its list.
pub struct Gather {
    kernels: Kernels,
    list: Mutex<HostMemory>,
}

impl Gather {
    /// For one GPU.
    pub fn new(ends: &Ends) -> Outcome<Gather> {
        let list = Mutex::new(list(ends, PIECES)?);
        Ok(Gather { kernels: Kernels::load(&ends.device)?, list })
    }

    /// Copies, and waits until it is done.
    pub fn copy(&self, ends: &Ends, job: &Job) -> Outcome<()> {
        let (mut list, pieces) = (self.list.lock(), &job.pieces);
        if size_of_val(&pieces[..]) > list.bytes() {
            *list = self::list(ends, pieces.len())?;
        }
        let (_current, stream) = (ends.device.enter()?, ends.stream(job.direction));
        let bytes = pieces.iter().map(|piece| piece.bytes).sum();
        // SAFETY: the list has room and is held until the kernel has ended; the ranges are the
        // rig's, and no two copies of the rig at a time share any.
        unsafe {
            std::ptr::copy_nonoverlapping(pieces.as_ptr(), list.start().cast(), pieces.len());
            self.kernels.copy(stream, list.start() as u64, pieces.len() as u32, bytes, BLOCKS)?;
        }
        Ok(stream.synchronize()?)
    }
}

fn list(ends: &Ends, pieces: usize) -> Outcome<HostMemory> {
    Ok(HostMemory::new(&ends.device, pieces * size_of::<Piece>())?)
}
