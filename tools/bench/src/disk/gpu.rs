//! A GPU at the end of the way: what was read is copied there and its checksums are made there;
//! what is stored comes from there with checksums that were made there. The host's processors look
//! at no byte.

use super::memory::{Buffers, Direction};
use crate::output::Outcome;
use forebay_cuda::checksum::{Checksums, Range, SumList, Width};
use forebay_cuda::device::{Device, DeviceMemory, Event, Stream};
use forebay_cuda::driver::Driver;
use forebay_cuda::driver::abi::Address;
use forebay_cuda::pinned::Pin;
use forebay_transfer::Backing;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

const WIDTH: Width = Width { blocks: 16, threads: 256 };
/// How long to wait before looking again whether the GPU is done.
const LOOK: Duration = Duration::from_micros(20);

/// What the driver calls a GPU.
pub fn name(gpu: u16) -> Outcome<String> {
    Ok(Device::open(Driver::load()?, gpu)?.name()?)
}

/// GPU memory with as many bytes as the buffers, at the same places.
pub struct GpuSide {
    stream: Stream,
    checksums: Arc<Checksums>,
    memory: DeviceMemory,
    buffers: Buffers,
    /// Last: the buffers are pinned as long as the stream may use them.
    _pin: Pin,
}

/// Buffers that are on their way.
pub struct Moving {
    sums: SumList,
    end: Event,
}

impl GpuSide {
    /// Takes the bytes to write from over to the GPU.
    pub fn new(gpu: u16, buffers: &Buffers) -> Outcome<GpuSide> {
        let device = Device::open(Driver::load()?, gpu)?;
        let (start, bytes) = (buffers.arena.as_ptr(), buffers.arena.len() as u64);
        let start = NonNull::new(start).ok_or("memory at address 0")?;
        // SAFETY: the buffers keep the arena, and are dropped after the pin.
        let pin = unsafe { Pin::new(&device, start, bytes)? };
        let side = GpuSide {
            stream: Stream::new(&device)?,
            checksums: Checksums::load(&device)?,
            memory: DeviceMemory::new(&device, bytes)?,
            buffers: buffers.clone(),
            _pin: pin,
        };
        side.copy(start.as_ptr() as Address, side.memory.address(), bytes)?;
        side.stream.synchronize()?;
        Ok(side)
    }

    /// Has so many buffers from `first` on copied: those that were read to the GPU, those to write
    /// from it. Nobody else uses them until that has [ended](Moving::ended).
    pub fn begin(&self, direction: Direction, first: usize, count: usize) -> Outcome<Moving> {
        let (object_bytes, offset) = (self.buffers.objects.bytes, self.buffers.offset(direction, first));
        let (there, here) = (self.memory.address() + offset, self.buffers.start(direction, first) as Address);
        let (from, to) = if direction == Direction::Read { (here, there) } else { (there, here) };
        self.copy(from, to, count as u64 * object_bytes)?;
        let object = |at: u64| vec![Range { at: there + at * object_bytes, bytes: object_bytes }];
        let extents: Vec<Vec<Range>> = (0..count as u64).map(object).collect();
        let (sums, end) = (self.checksums.list(&extents)?, Event::new(self.memory.device())?);
        let _current = self.memory.device().enter()?;
        // SAFETY: the memory is ours, and the list lives until the event was passed.
        unsafe { sums.queue(&self.stream, WIDTH)? };
        end.record(&self.stream)?;
        Ok(Moving { sums, end })
    }

    fn copy(&self, from: Address, to: Address, bytes: u64) -> Outcome<()> {
        let _current = self.memory.device().enter()?;
        // SAFETY: both ranges are as long, pinned or the GPU's, and nobody else uses them.
        unsafe { self.stream.copy(from, to, bytes)? };
        Ok(())
    }
}

impl Moving {
    /// Waits until they are there; gives the checksum of each.
    pub fn ended(self) -> Outcome<Vec<u32>> {
        while !self.end.is_passed()? {
            std::thread::sleep(LOOK);
        }
        Ok(self.sums.sums())
    }
}
