//! A GPU as the driver of a pair of queues: its kernels write commands and lists, ring doorbells
//! and take completions. The host fills pages, starts kernels and compares. Which controller has
//! the queues makes no difference.

use crate::GuestMemory;
use crate::shape::random_bytes;
use forebay_cuda::checksum::{Checksums, Range, Width};
use forebay_cuda::device::{Device, HostMemory, Stream};
use forebay_cuda::driver::CudaError;
use forebay_cuda::driver::abi::Address;
use forebay_cuda::kernels::Kernel;
use forebay_cuda::pinned::{Pin, PinError};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::sync::Arc;
use std::time::{Duration, Instant};
use thiserror::Error;

/// Source and build script are in the folder `kernels`.
const PTX: &str = concat!(include_str!("../kernels/nvme.ptx"), "\0");
const WARP: u32 = 32;
const PAGE_BYTES: u64 = 4096;
const BLOCK_BYTES: u64 = 512;
/// Pages of a transfer at most. Each transfer has room for as many, and a page for its list.
const PAGES_MAX: u32 = 32;
const AREA_BYTES: u64 = (PAGES_MAX as u64 + 1) * PAGE_BYTES;
const BLOCKS_MAX: u64 = PAGES_MAX as u64 * PAGE_BYTES / BLOCK_BYTES;
/// What pages hold before they are read.
const NOTHING: u8 = 0xa5;
const WRITE: u32 = 1;
const READ: u32 = 2;
/// How long a kernel looks for completions at a time. Those of the product look once.
const LOOK: Duration = Duration::from_millis(20);
const LIMIT: Duration = Duration::from_secs(60);
const CHECK: Width = Width { blocks: 16, threads: 256 };

/// Where the controller finds a pair of queues, and their doorbells.
#[derive(Debug, Clone, Copy)]
pub struct QueuePlaces {
    /// Entries of each.
    pub entries: u16,
    /// The submission queue's address.
    pub submission: u64,
    /// The completion queue's address.
    pub completion: u64,
    /// The word that is relayed to the tail doorbell.
    pub tail_doorbell: u64,
    /// The word that is relayed to the head doorbell.
    pub head_doorbell: u64,
}

/// Commands that a GPU gave, and those of transfers that went wrong.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// All of them.
    pub commands: u64,
    /// That did not end once and well, or moved wrong bytes.
    pub bad: u64,
}

/// Why a GPU does not drive the queues.
#[derive(Debug, Error)]
pub enum NotDriven {
    /// A call of the driver.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// Guest memory is not pinned.
    #[error(transparent)]
    Pin(#[from] PinError),
    /// Commands are under way, and none ends.
    #[error("{taken} of {count} commands have ended after a minute")]
    Silent {
        /// That have ended.
        taken: u64,
        /// That were given.
        count: u64,
    },
}

/// A GPU that has a pair of queues. What it does with them is the kernels' business.
#[derive(Debug)]
pub struct GpuDriver<'a> {
    memory: &'a GuestMemory,
    /// The first area for a transfer's pages and list.
    areas: u64,
    /// Transfers under way at most.
    depth: u32,
    stream: Stream,
    submit: Kernel,
    take: Kernel,
    checksums: Arc<Checksums>,
    queue: HostMemory,
    transfers: HostMemory,
    outcomes: HostMemory,
    given: u64,
    _pin: Pin,
}

/// The layout is the kernels'.
#[repr(C)]
struct QueueState {
    submissions: Address,
    completions: Address,
    tail_doorbell: Address,
    head_doorbell: Address,
    entries: u32,
    tail: u32,
    head: u32,
    phase: u32,
    taken: u64,
}

/// The layout is the kernels'.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Transfer {
    first_block: u64,
    data: u64,
    list: u64,
    list_here: Address,
    pages: u32,
    blocks: u32,
    command_id: u32,
    kind: u32,
}

impl<'a> GpuDriver<'a> {
    /// Takes over a pair of queues that nobody has used. From `areas` on, memory is nobody else's.
    ///
    /// # Panics
    /// Where there is too little memory for the queue's depth.
    pub fn new(
        device: &Arc<Device>,
        memory: &'a GuestMemory,
        places: QueuePlaces,
        areas: u64,
    ) -> Result<GpuDriver<'a>, NotDriven> {
        // One entry stays free.
        let depth = u32::from(places.entries) - 1;
        let areas = areas.next_multiple_of(PAGE_BYTES);
        let end = areas + u64::from(depth) * AREA_BYTES;
        assert!(end <= memory.bytes(), "{depth} areas from {areas:#x} on, of {:#x} bytes", memory.bytes());
        // SAFETY: it is mapped as long as it is borrowed here.
        let pin = unsafe { Pin::new(device, memory.start(), memory.bytes())? };
        let here = |address: u64| memory.start().as_ptr() as Address + address;
        let queue = HostMemory::new(device, size_of::<QueueState>())?;
        let state = QueueState {
            submissions: here(places.submission),
            completions: here(places.completion),
            tail_doorbell: here(places.tail_doorbell),
            head_doorbell: here(places.head_doorbell),
            entries: places.entries.into(),
            tail: 0,
            head: 0,
            phase: 1,
            taken: 0,
        };
        // SAFETY: there is room for it, and no kernel runs.
        unsafe { queue.start().cast::<QueueState>().write(state) };
        let kernel = |name| Kernel::load(device, PTX, name);
        Ok(GpuDriver {
            memory,
            areas,
            depth,
            stream: Stream::new(device)?,
            submit: kernel(c"forebay_nvme_submit")?,
            take: kernel(c"forebay_nvme_take")?,
            checksums: Checksums::load(device)?,
            queue,
            transfers: HostMemory::new(device, depth as usize * size_of::<Transfer>())?,
            outcomes: HostMemory::new(device, depth as usize * size_of::<u32>())?,
            given: 0,
            _pin: pin,
        })
    }

    /// Writes random pages in one format and reads them in another, as many transfers at once as
    /// the queue has room for, until so many commands have been given.
    pub fn round_trips(&mut self, commands: u64, seed: u64) -> Result<Counts, NotDriven> {
        let (mut rng, mut counts) = (StdRng::seed_from_u64(seed), Counts::default());
        while counts.commands < commands {
            let transfers: Vec<Transfer> = (0..self.depth).map(|id| self.transfer(&mut rng, id)).collect();
            let wanted: Vec<u32> = transfers.iter().map(|transfer| self.fill(&mut rng, transfer)).collect();
            let written = self.carry_out(&transfers)?;
            for transfer in &transfers {
                self.memory.fill(transfer.data, pages_bytes(transfer), NOTHING);
            }
            let read: Vec<Transfer> = transfers.iter().map(|transfer| back(&mut rng, transfer)).collect();
            let outcomes = written.into_iter().zip(self.carry_out(&read)?);
            let good = outcomes.zip(self.sums(&read)?).zip(wanted);
            let bad = good.filter(|((ends, found), wanted)| *ends != (true, true) || found != wanted);
            counts.bad += 2 * bad.count() as u64;
            counts.commands += 2 * u64::from(self.depth);
        }
        Ok(counts)
    }

    fn transfer(&self, rng: &mut StdRng, id: u32) -> Transfer {
        let data = self.areas + u64::from(id) * AREA_BYTES;
        let list = data + u64::from(PAGES_MAX) * PAGE_BYTES;
        let pages = rng.random_range(1..=PAGES_MAX);
        Transfer {
            first_block: u64::from(id) * BLOCKS_MAX,
            data,
            list,
            list_here: self.memory.start().as_ptr() as Address + list,
            pages,
            blocks: pages * (PAGE_BYTES / BLOCK_BYTES) as u32,
            command_id: id,
            kind: WRITE | u32::from(rng.random::<bool>()) << 8,
        }
    }

    /// Fills the pages of a transfer; gives the checksum of its blocks.
    fn fill(&self, rng: &mut StdRng, transfer: &Transfer) -> u32 {
        let pages = pages(transfer);
        pages.fold(0, |sum, page| {
            let bytes = random_bytes(rng, PAGE_BYTES);
            self.memory.write(page, &bytes);
            crc32c::crc32c_append(sum, &bytes)
        })
    }

    /// Gives commands to the controller and waits for their ends: whether each ended once and well.
    fn carry_out(&mut self, transfers: &[Transfer]) -> Result<Vec<bool>, NotDriven> {
        let count = transfers.len() as u32;
        let to = self.transfers.start().cast::<Transfer>();
        // SAFETY: there is room for as many, and no kernel runs.
        unsafe {
            to.copy_from_nonoverlapping(transfers.as_ptr(), transfers.len());
            self.outcomes.start().write_bytes(0, self.outcomes.bytes());
        }
        self.launch_submit(count)?;
        self.given += u64::from(count);
        let since = Instant::now();
        while self.taken() < self.given {
            self.launch_take((self.given - self.taken()) as u32)?;
            self.stream.synchronize()?;
            if since.elapsed() > LIMIT {
                return Err(NotDriven::Silent { taken: self.taken(), count: self.given });
            }
        }
        // SAFETY: there is room for as many words, and no kernel runs.
        let outcome = |id: u32| unsafe { self.outcomes.start().cast::<u32>().add(id as usize).read() };
        Ok((0..count).map(|id| outcome(id) == 1 << 16).collect())
    }

    fn taken(&self) -> u64 {
        // SAFETY: it was written by `new`, and no kernel runs.
        unsafe { (*self.queue.start().cast::<QueueState>()).taken }
    }

    fn launch_submit(&self, mut count: u32) -> Result<(), CudaError> {
        let (mut queue, mut transfers) = (self.queue.start() as Address, self.transfers.start() as Address);
        let mut parameters = [(&raw mut queue).cast(), (&raw mut transfers).cast(), (&raw mut count).cast()];
        let _current = self.stream.device().enter()?;
        // SAFETY: the parameters have the types of the kernel's. What it reaches is pinned, and
        // nobody else's.
        unsafe { self.submit.launch(&self.stream, (1, 1), WARP, &mut parameters) }
    }

    fn launch_take(&self, mut count: u32) -> Result<(), CudaError> {
        let (mut queue, mut outcomes) = (self.queue.start() as Address, self.outcomes.start() as Address);
        let mut within_ns = LOOK.as_nanos() as u64;
        let mut parameters = [
            (&raw mut queue).cast(),
            (&raw mut count).cast(),
            (&raw mut within_ns).cast(),
            (&raw mut outcomes).cast(),
        ];
        let _current = self.stream.device().enter()?;
        // SAFETY: as above. Commands have the numbers of words of `outcomes`.
        unsafe { self.take.launch(&self.stream, (1, 1), 1, &mut parameters) }
    }

    /// What the GPU makes of the pages of transfers.
    fn sums(&self, transfers: &[Transfer]) -> Result<Vec<u32>, CudaError> {
        let start = self.memory.start().as_ptr() as Address;
        let range = |page| Range { at: start + page, bytes: PAGE_BYTES };
        let extents: Vec<Vec<Range>> =
            transfers.iter().map(|transfer| pages(transfer).map(range).collect()).collect();
        let list = self.checksums.list(&extents)?;
        // SAFETY: the pages are pinned, nobody writes them, and the list lives until the stream has
        // come past it.
        unsafe { list.queue(&self.stream, CHECK)? };
        self.stream.synchronize()?;
        Ok(list.sums())
    }
}

/// The pages of a transfer in the order of its blocks: the last one lies first.
fn pages(transfer: &Transfer) -> impl Iterator<Item = u64> + use<> {
    let data = transfer.data;
    (0..u64::from(transfer.pages)).rev().map(move |page| data + page * PAGE_BYTES)
}

fn pages_bytes(transfer: &Transfer) -> usize {
    transfer.pages as usize * PAGE_BYTES as usize
}

/// Reads what was written, in any format.
fn back(rng: &mut StdRng, transfer: &Transfer) -> Transfer {
    Transfer { kind: READ | u32::from(rng.random::<bool>()) << 8, ..*transfer }
}
