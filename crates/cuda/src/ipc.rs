//! Memory of a GPU that engines of one host read of each other: what a process exports of its own,
//! and copies from what another one has exported. The driver maps it, and the reader's GPU copies,
//! over NVLink or PCIe. Who may read what, and until when, is the business of whoever exports.

use crate::device::{Device, Event, HostMemory, Stream};
use crate::driver::abi::{Address, IpcHandle};
use crate::driver::{CudaError, Driver};
use crate::kernels::{Kernels, Piece};
use crate::links::PEER_BLOCKS;
use crate::stream_copy::{DeclineReason, pointer_range};
use forebay_transfer::lock::Mutex;
use std::sync::Arc;
use thiserror::Error;

/// Pieces of one launch. A launch of pages of 64 KiB is then 128 MiB, half a millisecond over
/// NVLink: long enough to hide the next one's list.
const LAUNCH_PIECES: usize = 2048;
/// Lists that are written while others are read.
const LISTS: usize = 8;

/// An allocation that other processes may open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exported {
    pub handle: IpcHandle,
    /// Where it begins in this process.
    pub start: Address,
    pub bytes: u64,
}

/// Why memory is not exported.
#[derive(Debug, Error)]
pub enum NotExported {
    #[error("{address:#x} is no memory of a GPU: {why}")]
    Foreign { address: Address, why: DeclineReason },
    #[error(
        "{address:#x} was mapped for its own GPU, by vLLM's sleep mode or expandable segments; allowed is \
         memory of cudaMalloc"
    )]
    Mapped { address: Address },
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

/// The allocation that an address lies in, for other processes.
pub fn export(device: &Device, address: Address) -> Result<Exported, NotExported> {
    let range = pointer_range(device.driver(), address);
    let range = range.map_err(|why| NotExported::Foreign { address, why })?;
    if !range.is_open {
        return Err(NotExported::Mapped { address });
    }
    let handle = device.export(range.start)?;
    Ok(Exported { handle, start: range.start, bytes: range.bytes() })
}

/// How many bytes lie in the allocation from an address on.
pub fn bytes_from(driver: &Driver, address: Address) -> Option<u64> {
    let range = pointer_range(driver, address).ok()?;
    Some(range.start + range.bytes() - address)
}

/// Copies between memory that a GPU reaches, its own and its peers', by its own kernels.
#[derive(Debug)]
pub struct PeerCopies {
    kernels: Kernels,
    stream: Stream,
    lists: Mutex<Lists>,
}

/// Lists of pieces in pinned memory. Each is written again when the launch that read it is over.
#[derive(Debug)]
struct Lists {
    memory: HostMemory,
    read: Vec<Event>,
    next: usize,
}

impl Lists {
    /// A list for these pieces, after the launch before has read it. The host waits for that: it is
    /// a launch of ours, which waits for nobody who waits for us.
    fn write(&mut self, pieces: &[Piece]) -> Result<(Address, &Event), CudaError> {
        let number = self.next;
        self.next = (self.next + 1) % LISTS;
        self.read[number].synchronize()?;
        let places = LAUNCH_PIECES.min(pieces.len());
        // SAFETY: the memory has `LISTS` lists of `LAUNCH_PIECES` pieces each, and pinned memory is
        // aligned to pages. No launch reads this one any more.
        let list = unsafe {
            let start = self.memory.start().cast::<Piece>().add(number * LAUNCH_PIECES);
            start.copy_from_nonoverlapping(pieces.as_ptr(), places);
            start
        };
        Ok((list as Address, &self.read[number]))
    }
}

impl PeerCopies {
    pub fn new(device: &Arc<Device>) -> Result<PeerCopies, CudaError> {
        let kernels = Kernels::load(device)?;
        let memory = HostMemory::new(device, LISTS * LAUNCH_PIECES * size_of::<Piece>())?;
        let read = (0..LISTS).map(|_| Event::new(device)).collect::<Result<_, _>>()?;
        let lists = Mutex::new(Lists { memory, read, next: 0 });
        // A request waits for them, and few multiprocessors do them.
        Ok(PeerCopies { kernels, stream: Stream::urgent(device)?, lists })
    }

    /// Where copies are queued, for what comes behind them.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Passed when all that was queued until now has been copied.
    pub fn mark(&self) -> Result<Event, CudaError> {
        let _current = self.kernels.device().enter()?;
        let mark = Event::new(self.kernels.device())?;
        mark.record(&self.stream)?;
        Ok(mark)
    }

    /// Copies pieces after what `after` was recorded behind. After an error nothing of it is under
    /// way any more.
    ///
    /// # Safety
    ///
    /// Until the stream has come past them the ranges are valid for the GPU, and nothing else
    /// touches the targets. What is read may change meanwhile: then it is unknown what arrives.
    pub unsafe fn copy(&self, pieces: &[Piece], after: &Event) -> Result<(), CudaError> {
        let _current = self.kernels.device().enter()?;
        // SAFETY: by this function's contract.
        let queued = unsafe { self.queue(pieces, after) };
        if queued.is_err() {
            // Where it cannot be waited for, the context is lost, and all that was in it.
            let _ = self.stream.synchronize();
        }
        queued
    }

    /// As [`copy`](PeerCopies::copy), with its contract.
    unsafe fn queue(&self, pieces: &[Piece], after: &Event) -> Result<(), CudaError> {
        let mut lists = self.lists.lock();
        self.stream.wait_for(after)?;
        for launch in pieces.chunks(LAUNCH_PIECES) {
            let (list, read) = lists.write(launch)?;
            let bytes = launch.iter().map(|piece| piece.bytes).sum();
            // SAFETY: the list stays until `read` has passed; the rest is the caller's word.
            unsafe { self.kernels.copy(&self.stream, list, launch.len() as u32, bytes, PEER_BLOCKS)? };
            read.record(&self.stream)?;
        }
        Ok(())
    }
}
