//! What is copied and where it lies: for each GPU a pattern in host memory and the same in its own,
//! and in both a place for copies. Where a copy goes is cleared; the copy is timed, and timed again
//! right behind; then every byte that came is looked at.

use super::ends::{Ends, Job};
use super::way::{Way, Ways};
use crate::output::Outcome;
use crate::timing::{Cost, at_once};
use forebay_cuda::device::{Current, Device};
use forebay_cuda::driver::Driver;
use forebay_cuda::kernels::Piece;
use forebay_cuda::links::Direction;
use forebay_cuda::pinned::{PinnedPool, PoolConfig};

/// All GPUs with their memory, and everybody who copies.
pub struct Rig {
    ways: Ways,
    pub ends: Vec<Ends>,
}

/// What a copy costs.
#[derive(Debug, Clone, Copy)]
pub struct Timed {
    /// After a pause, and to host memory that no cache holds.
    pub first: Cost,
    /// Right behind the same copy, as one of many.
    pub again: Cost,
}

impl Rig {
    /// Opens every GPU that is visible, with as many bytes of each memory as `bytes_of` says for
    /// it, and starts the copier.
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

    /// Pages that lie one after another on the host and scattered on the GPU: `order` says which is
    /// where.
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

    /// Looks at every byte of copies that have ended: first at those to the host, whose place the
    /// others pass through.
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
