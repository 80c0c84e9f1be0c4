//! A GPU with its memory and the host's, between which is copied, and one copy of it. Every byte of
//! a copy is looked at.

use super::bytes::{clear, fill, first_wrong};
use crate::output::{Error, Outcome};
use forebay_cuda::device::{Device, DeviceMemory, Stream};
use forebay_cuda::kernels::Piece;
use forebay_cuda::links::Direction;
use forebay_cuda::pinned::{PinnedBuffer, PinnedPool};
use forebay_transfer::Backing;
use std::sync::Arc;

/// A GPU, and memory that is copied between it and the host.
pub struct Ends {
    pub device: Arc<Device>,
    /// Copies each way are independent of each other.
    streams: [Stream; 2],
    /// Host memory that is only read, and the same bytes on the GPU.
    pattern: Arc<PinnedBuffer>,
    given: DeviceMemory,
    /// Where copies go.
    landing: Arc<PinnedBuffer>,
    taken: DeviceMemory,
}

/// A copy for one GPU.
pub struct Job {
    /// Which one: the ordinal.
    pub gpu: usize,
    pub direction: Direction,
    /// Offsets in the memory of the two ends.
    pub offsets: Vec<Piece>,
    /// The same as addresses.
    pub pieces: Vec<Piece>,
    /// Bytes at the beginning of either memory that hold all pieces.
    pub bytes: u64,
}

impl Ends {
    /// Takes the memory and makes the pattern.
    pub fn new(device: Arc<Device>, pool: &PinnedPool, bytes: u64) -> Outcome<Ends> {
        let (pattern, landing) = (Arc::new(pool.take(bytes)?), Arc::new(pool.take(bytes)?));
        let ends = Ends {
            streams: [Stream::new(&device)?, Stream::new(&device)?],
            given: DeviceMemory::new(&device, bytes)?,
            taken: DeviceMemory::new(&device, bytes)?,
            pattern,
            landing,
            device,
        };
        ends.fill(bytes)?;
        Ok(ends)
    }

    /// Makes the pattern, on both sides.
    fn fill(&self, bytes: u64) -> Outcome<()> {
        // SAFETY: nobody else has the buffer yet.
        fill(unsafe { memory(&self.pattern, bytes) }, u64::from(self.device.index()) + 1);
        let (_current, stream) = (self.device.enter()?, self.stream(Direction::HostToDevice));
        // SAFETY: both ranges are the rig's, as long as each other, and waited for.
        unsafe { stream.copy(self.pattern.as_ptr() as u64, self.given.address(), bytes)? };
        Ok(stream.synchronize()?)
    }

    /// Bytes of each memory.
    pub fn bytes(&self) -> u64 {
        self.given.bytes()
    }

    /// The stream for copies one way.
    pub fn stream(&self, direction: Direction) -> &Stream {
        &self.streams[direction as usize]
    }

    /// Host memory that copies one way use.
    pub fn host(&self, direction: Direction) -> &Arc<PinnedBuffer> {
        match direction {
            Direction::HostToDevice => &self.pattern,
            Direction::DeviceToHost => &self.landing,
        }
    }

    /// Memory of the GPU that copies one way use.
    pub fn gpu(&self, direction: Direction) -> &DeviceMemory {
        match direction {
            Direction::HostToDevice => &self.taken,
            Direction::DeviceToHost => &self.given,
        }
    }

    /// The first byte of the source and of the target of copies one way.
    pub fn addresses(&self, direction: Direction) -> (u64, u64) {
        let (host, gpu) = (self.host(direction).as_ptr() as u64, self.gpu(direction).address());
        match direction {
            Direction::HostToDevice => (host, gpu),
            Direction::DeviceToHost => (gpu, host),
        }
    }

    /// Makes the target of a copy forget what it held.
    pub fn clear(&self, direction: Direction, bytes: u64) -> Outcome<()> {
        if direction == Direction::DeviceToHost {
            // SAFETY: nothing copies now.
            clear(unsafe { memory(&self.landing, bytes) });
            return Ok(());
        }
        let (_current, stream) = (self.device.enter()?, self.stream(direction));
        let driver = self.device.driver();
        // SAFETY: the range is allocated, and the stream is of the current device.
        let status =
            unsafe { (driver.table().set_async)(self.taken.address(), 0, bytes as usize, stream.handle()) };
        driver.check("cuMemsetD8Async", status)?;
        Ok(stream.synchronize()?)
    }

    /// Looks at every byte of a copy that has ended. The bytes of one to the GPU come back by way
    /// of `landing`.
    pub fn check(&self, job: &Job) -> Outcome<()> {
        if job.direction == Direction::HostToDevice {
            let (_current, stream) = (self.device.enter()?, self.stream(Direction::DeviceToHost));
            // SAFETY: both ranges are the rig's and hold as many bytes; nothing else uses them now.
            unsafe { stream.copy(self.taken.address(), self.landing.as_ptr() as u64, job.bytes)? };
            stream.synchronize()?;
        }
        // SAFETY: nothing copies now.
        let (from, to) = unsafe { (memory(&self.pattern, job.bytes), memory(&self.landing, job.bytes)) };
        match first_wrong(from, to, &job.offsets) {
            None => Ok(()),
            Some(piece) => Err(wrong_bytes(job, piece)),
        }
    }
}

fn wrong_bytes(job: &Job, piece: Piece) -> Error {
    let (Piece { from, to, bytes }, gpu) = (piece, job.gpu);
    format!("wrong bytes: {:?} for GPU {gpu}, {bytes} bytes from {from} to {to}", job.direction).into()
}

/// The first bytes of a buffer.
///
/// # Safety
///
/// Nothing writes them in the meantime, and nobody reads them while they are written through this.
#[allow(clippy::mut_from_ref)]
unsafe fn memory(buffer: &PinnedBuffer, bytes: u64) -> &mut [u8] {
    let bytes = (bytes as usize).min(buffer.len());
    // SAFETY: the buffer has these bytes; the rest is this function's contract.
    unsafe { std::slice::from_raw_parts_mut(buffer.as_ptr(), bytes) }
}
