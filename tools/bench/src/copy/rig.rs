//! What is copied and where it lies: for each GPU a pattern in host memory and the same in its own,
//! and in both a place for copies. Where a copy goes is cleared; the copy is timed, and timed again
//! right behind; then every byte that came is looked at.

use super::bytes::{clear, fill, first_wrong};
use super::timing::{Cost, at_once};
use super::way::{Way, Ways};
use super::{Failure, Outcome};
use forebay_cuda::device::{Current, Device, DeviceMemory, Stream};
use forebay_cuda::driver::Driver;
use forebay_cuda::kernels::Piece;
use forebay_cuda::links::Direction;
use forebay_cuda::pinned::{PinnedBuffer, PinnedPool, PoolConfig};
use forebay_transfer::Backing;
use std::sync::Arc;

/// All GPUs with their memory, and everybody who copies.
pub struct Rig {
    ways: Ways,
    pub ends: Vec<Ends>,
}

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

/// What a copy costs.
#[derive(Debug, Clone, Copy)]
pub struct Timed {
    /// After a pause, and to host memory that no cache holds.
    pub first: Cost,
    /// Right behind the same copy, as one of many.
    pub again: Cost,
}

/// A copy for one GPU.
pub struct Job {
    /// Which one: the ordinal.
    pub gpu: usize,
    pub direction: Direction,
    /// Offsets in the memory of the two ends.
    offsets: Vec<Piece>,
    /// The same as addresses.
    pub pieces: Vec<Piece>,
    /// Bytes at the beginning of either memory that hold all pieces.
    bytes: u64,
}

impl Ends {
    fn new(device: Arc<Device>, pool: &PinnedPool, bytes: u64) -> Outcome<Ends> {
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
    fn clear(&self, direction: Direction, bytes: u64) -> Outcome<()> {
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

    /// Looks at every byte of a copy that has ended. The bytes of one to the GPU come back by way of `landing`.
    fn check(&self, job: &Job) -> Outcome<()> {
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

fn wrong_bytes(job: &Job, piece: Piece) -> Failure {
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

impl Rig {
    /// Opens every GPU that is visible, with as many bytes of each memory as `bytes_of` says for it, and starts the copier.
    pub fn start(driver: &'static Driver, count: u16, bytes_of: impl Fn(u16) -> u64) -> Outcome<Rig> {
        let all_bytes: u64 = (0..count).map(&bytes_of).sum();
        let open = |index| Device::open(driver, index);
        let devices: Vec<_> = (0..count).map(open).collect::<Result<_, _>>()?;
        let slab_bytes = (2 * bytes_of(0)).min(1 << 30);
        // Slabs are whole, so that a pool needs more than what is asked of it.
        let config = PoolConfig { slab_bytes, ..PoolConfig::new(4 * all_bytes + (u64::from(count) << 31)) };
        let pool = PinnedPool::new(&devices[0], config);
        let ends = devices.into_iter().map(|device| {
            let bytes = bytes_of(device.index());
            Ends::new(device, &pool, bytes)
        });
        let ends: Vec<Ends> = ends.collect::<Outcome<_>>()?;
        Ok(Rig { ways: Ways::start(&ends)?, ends })
    }

    /// Everybody who copies.
    pub fn ways(&self) -> &Ways {
        &self.ways
    }

    pub fn driver(&self) -> &'static Driver {
        self.ends[0].device.driver()
    }

    /// Whether a GPU has peers to relay for it.
    pub fn has_relays(&self, gpu: usize) -> bool {
        let (device, index) = (&self.ends[gpu].device, gpu as u16);
        self.ends.iter().any(|peer| peer.device.index() != index && device.connect(&peer.device))
    }

    /// The first bytes, in one piece.
    pub fn whole(&self, gpu: usize, direction: Direction, bytes: u64) -> Job {
        self.job(gpu, direction, vec![Piece { from: 0, to: 0, bytes }])
    }

    /// Pages that lie one after another on the host and scattered on the GPU: `order` says which is where.
    pub fn pages(&self, gpu: usize, direction: Direction, page_bytes: u64, order: &[u64]) -> Job {
        let page = |(nth, place): (u64, &u64)| {
            let (host, device) = (nth * page_bytes, place * page_bytes);
            match direction {
                Direction::HostToDevice => Piece { from: host, to: device, bytes: page_bytes },
                Direction::DeviceToHost => Piece { from: device, to: host, bytes: page_bytes },
            }
        };
        self.job(gpu, direction, (0..).zip(order).map(page).collect())
    }

    fn job(&self, gpu: usize, direction: Direction, offsets: Vec<Piece>) -> Job {
        let (from, to) = self.ends[gpu].addresses(direction);
        let address = |piece: &Piece| Piece { from: from + piece.from, to: to + piece.to, ..*piece };
        let pieces = offsets.iter().map(address).collect();
        let bytes = offsets.iter().map(|piece| (piece.from + piece.bytes).max(piece.to + piece.bytes)).max();
        let bytes = bytes.unwrap_or(0);
        assert!(bytes <= self.ends[gpu].bytes(), "a copy of {bytes} bytes does not fit into the rig");
        Job { gpu, direction, offsets, pieces, bytes }
    }

    /// Does copies at once, which differ in GPU or direction, twice, and looks at every byte.
    pub fn timed(&self, way: Way, jobs: &[Job]) -> Outcome<Timed> {
        self.clear(jobs)?;
        // A thread's first call of the driver takes longer.
        let ready = |job: &Job| self.enter(job.gpu).map(drop);
        let copy = || at_once(jobs, ready, |job| self.ways.copy(way, &self.ends[job.gpu], job));
        let timed = Timed { first: copy()?, again: copy()? };
        self.check(jobs)?;
        Ok(timed)
    }

    /// Makes the targets forget what they held.
    pub fn clear(&self, jobs: &[Job]) -> Outcome<()> {
        jobs.iter().try_for_each(|job| self.ends[job.gpu].clear(job.direction, job.bytes))
    }

    /// Looks at every byte of copies that have ended: first at those to the host, whose place the others pass through.
    pub fn check(&self, jobs: &[Job]) -> Outcome<()> {
        let to_host = |job: &&Job| job.direction == Direction::DeviceToHost;
        let (first, then): (Vec<&Job>, Vec<&Job>) = jobs.iter().partition(to_host);
        first.into_iter().chain(then).try_for_each(|job| self.ends[job.gpu].check(job))
    }

    /// Makes a GPU's context current.
    pub fn enter(&self, gpu: usize) -> Outcome<Current<'_>> {
        Ok(self.ends[gpu].device.enter()?)
    }
}
