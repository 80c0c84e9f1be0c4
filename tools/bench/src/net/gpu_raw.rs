//! The ceiling between GPUs: the same blocks between the same two allocations, by one call for all
//! of them and by a kernel, and all bytes in one piece. The owner does nothing; nothing is checked.

use super::blocks::Shape;
use super::gpu::GpuMemory;
use super::segment::End;
use crate::output::Error;
use forebay_cuda::device::{Device, Event, ForeignMemory, Stream};
use forebay_cuda::driver::abi::IpcHandle;
use forebay_cuda::driver::{CopyList, CudaError};
use forebay_cuda::ipc::PeerCopies;
use forebay_cuda::kernels::Piece;
use forebay_net::Op;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The asking end's GPU, and the owner's memory, mapped.
pub struct GpuRaw {
    device: Arc<Device>,
    own: Arc<GpuMemory>,
    theirs: ForeignMemory,
    shape: Shape,
    stream: Stream,
    kernels: PeerCopies,
}

/// How long all bytes take, each way.
pub struct GpuTimes {
    pub batch: Duration,
    pub kernel: Duration,
    pub contiguous: Duration,
}

impl GpuRaw {
    /// Opens what the owner has exported.
    pub fn open(own: &Arc<GpuMemory>, exported: &str, shape: Shape) -> Result<GpuRaw, Error> {
        let handle: [u8; 64] = hex::decode(exported)?.try_into().map_err(|_| "it is no handle")?;
        let device = Arc::clone(own.device());
        let theirs = ForeignMemory::open(&device, IpcHandle(handle))?;
        let (stream, kernels) = (Stream::new(&device)?, PeerCopies::new(&device)?);
        Ok(GpuRaw { device, own: Arc::clone(own), theirs, shape, stream, kernels })
    }

    /// Moves all bytes once each way.
    pub fn run(&self, op: Op) -> Result<GpuTimes, Error> {
        let _current = self.device.enter()?;
        let pieces = self.pieces(op);
        let bytes = self.shape.bytes() as u64;
        let first = |here: u64, there: u64| if op == Op::Read { (there, here) } else { (here, there) };
        let (from, to) = first(self.own.start(), self.theirs.address());
        // SAFETY: both memories are as long and stay, and no transfer is under way meanwhile.
        let contiguous = self.timed(|| unsafe { self.stream.copy(from, to, bytes) })?;
        let batch = self.timed(|| self.by_batch(&pieces))?;
        let kernel = self.timed_kernel(&pieces)?;
        Ok(GpuTimes { batch, kernel, contiguous })
    }

    fn pieces(&self, op: Op) -> Vec<Piece> {
        let shape = self.shape;
        let piece = |block| {
            let here = self.own.start() + shape.offset(End::Asking, block) as u64;
            let there = self.theirs.address() + shape.offset(End::Owner, block) as u64;
            let (from, to) = if op == Op::Read { (there, here) } else { (here, there) };
            Piece { from, to, bytes: shape.block_bytes as u64 }
        };
        (0..shape.blocks).map(piece).collect()
    }

    /// One by one where the driver has no batches.
    fn by_batch(&self, pieces: &[Piece]) -> Result<(), CudaError> {
        let driver = self.device.driver();
        let Some(batch) = driver.batch_copy() else {
            // SAFETY: as in `run`.
            return pieces
                .iter()
                .try_for_each(|piece| unsafe { self.stream.copy(piece.from, piece.to, piece.bytes) });
        };
        let mut list = CopyList::with_room(pieces.len());
        pieces.iter().for_each(|piece| list.add(piece.from, piece.to, piece.bytes));
        // SAFETY: as in `run`; no two blocks overlap, and the stream is no default stream.
        unsafe { batch.queue(driver, &mut list, self.stream.handle()) }
    }

    fn timed(&self, queue: impl FnOnce() -> Result<(), CudaError>) -> Result<Duration, Error> {
        let begin = Instant::now();
        queue()?;
        self.stream.synchronize()?;
        Ok(begin.elapsed())
    }

    fn timed_kernel(&self, pieces: &[Piece]) -> Result<Duration, Error> {
        // Behind nothing: an event that was not recorded has passed.
        let after = Event::new(&self.device)?;
        let begin = Instant::now();
        // SAFETY: as in `run`.
        unsafe { self.kernels.copy(pieces, &after)? };
        self.kernels.stream().synchronize()?;
        Ok(begin.elapsed())
    }
}
