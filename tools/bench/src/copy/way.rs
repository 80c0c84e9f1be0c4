//! Who copies: the driver alone, one copy after another or a batch; a kernel; and the copier's
//! ways. Each gets a job and returns when it is done.

use super::ends::{Ends, Job};
use crate::output::{Error, Outcome};
use forebay_cuda::device::HostMemory;
use forebay_cuda::driver::{BatchCopy, CopyList};
use forebay_cuda::kernels::{Kernels, Piece};
use forebay_cuda::links::Direction;
use forebay_cuda::rates::Rates;
use forebay_cuda::{Copier, CopierOptions};
use forebay_transfer::lock::Mutex;
use forebay_transfer::{Class, End, RegionId, Span, SpanPair, Transfer};
use std::sync::OnceLock;
use std::sync::atomic::Ordering;

/// Which way bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Course {
    /// From the host to GPUs
    H2d,
    /// From GPUs to the host
    D2h,
    /// Both at once
    Both,
}

impl Course {
    pub fn directions(self) -> &'static [Direction] {
        match self {
            Course::H2d => &[Direction::HostToDevice],
            Course::D2h => &[Direction::DeviceToHost],
            Course::Both => &Direction::BOTH,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Course::H2d => "h2d",
            Course::D2h => "d2h",
            Course::Both => "both",
        }
    }
}

/// Who copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Way {
    /// The driver, over the GPU's own link
    Direct,
    /// A chain in a stream where the copier makes one
    Chain,
    /// The mover
    Mover,
    /// What the copier takes for a copy that is waited for
    Best,
    /// A chain however small the copy is.
    #[value(skip)]
    Eager,
    /// A chain by shares that follow nothing that was measured.
    #[value(skip)]
    Fixed,
    /// One call of the driver for all pieces.
    #[value(skip)]
    Batch,
    /// A kernel that reads or writes host memory, over the GPU's own link.
    #[value(skip)]
    Kernel,
}

impl Way {
    /// As rows and tables call it.
    pub fn name(self) -> &'static str {
        match self {
            Way::Direct => "cuMemcpyAsync",
            Way::Chain => "chain",
            Way::Mover => "mover",
            Way::Best => "best",
            Way::Eager => "eager",
            Way::Fixed => "fixed",
            Way::Batch => "cuMemcpyBatchAsync",
            Way::Kernel => "kernel",
        }
    }
}

/// All of them, ready.
pub struct Ways {
    copier: Copier,
    /// By GPU and direction: the regions of the source and of the target.
    regions: Vec<[(RegionId, RegionId); 2]>,
    /// Bytes of each GPU's memory that the copier's start took.
    pub start_bytes: Vec<u64>,
    /// Started when first used: its memory is no part of what a copier needs.
    eager: OnceLock<Copier>,
    fixed: OnceLock<Copier>,
    batch: Option<BatchCopy>,
    gathers: Vec<OnceLock<Gather>>,
}

impl Ways {
    /// Starts the copier and shows it the memory of every GPU.
    pub fn start(ends: &[Ends]) -> Outcome<Ways> {
        let free = || ends.iter().map(free_bytes).collect::<Outcome<Vec<u64>>>();
        let before = free()?;
        let copier = Copier::start(&CopierOptions::default())?;
        let start_bytes = before.iter().zip(free()?).map(|(before, after)| before.saturating_sub(after));
        let start_bytes = start_bytes.collect();
        let regions = ends.iter().map(|ends| regions(&copier, ends)).collect::<Outcome<_>>()?;
        let gathers = ends.iter().map(|_| OnceLock::new()).collect();
        let batch = ends.first().and_then(|ends| ends.device.driver().batch_copy());
        Ok(Ways {
            copier,
            regions,
            start_bytes,
            eager: OnceLock::new(),
            fixed: OnceLock::new(),
            batch,
            gathers,
        })
    }

    /// Whether the driver has batches.
    pub fn has_batches(&self) -> bool {
        self.batch.is_some()
    }

    /// Copies, and waits until it is done.
    pub fn copy(&self, way: Way, ends: &Ends, job: &Job) -> Outcome<()> {
        match way {
            Way::Direct => direct(ends, job),
            Way::Chain => chain(&self.copier, ends, job),
            Way::Eager => chain(self.eager()?, ends, job),
            Way::Fixed => chain(self.fixed()?, ends, job),
            Way::Mover => self.mover(ends, job),
            // SAFETY: the ranges are the rig's, pinned and of this GPU, and no two copies of the
            // rig at a time share any.
            Way::Best => unsafe {
                Ok(self.copier.copy_and_wait(job.gpu as u16, job.direction, &job.pieces)?)
            },
            Way::Batch => match self.batch {
                Some(batch) => batched(batch, ends, job),
                None => Err("the driver has no cuMemcpyBatchAsync".into()),
            },
            Way::Kernel => self.gather(ends)?.copy(ends, job),
        }
    }

    /// StreamCopies that were made however small the copy was.
    pub fn eager_chains(&self) -> Outcome<u64> {
        Ok(self.eager()?.stream_copies().counters().stream_copies.load(Ordering::Relaxed))
    }

    fn eager(&self) -> Outcome<&Copier> {
        ready(&self.eager, || {
            let always = |rates: Rates, direction| rates.with(direction, |own| own.break_even_bytes = 0);
            let rates = Direction::BOTH.into_iter().fold(self.copier.stream_copies().rates().clone(), always);
            Ok(Copier::start(&CopierOptions { rates: Some(rates), ..CopierOptions::default() })?)
        })
    }

    fn fixed(&self) -> Outcome<&Copier> {
        ready(&self.fixed, || {
            let rates = Some(self.copier.stream_copies().rates().clone().fixed());
            Ok(Copier::start(&CopierOptions { rates, ..CopierOptions::default() })?)
        })
    }

    fn gather(&self, ends: &Ends) -> Outcome<&Gather> {
        ready(&self.gathers[ends.device.index() as usize], || Gather::new(ends))
    }

    fn mover(&self, ends: &Ends, job: &Job) -> Outcome<()> {
        let (from, to) = self.regions[job.gpu][job.direction as usize];
        let (source, target) = ends.addresses(job.direction);
        let pair = |piece: &Piece| {
            let span = |region, at| Span::new(region, at, piece.bytes);
            SpanPair::new(span(from, piece.from - source), span(to, piece.to - target))
        };
        let pairs = job.pieces.iter().map(pair).collect();
        match self.copier.mover().run(Transfer::new(pairs, Class::Demand))? {
            End::Done { bytes } if bytes == job.pieces.iter().map(|piece| piece.bytes).sum::<u64>() => Ok(()),
            end => Err(format!("the copy ended as {end:?}").into()),
        }
    }
}

/// What is made at its first use.
fn ready<T>(place: &OnceLock<T>, make: impl FnOnce() -> Outcome<T>) -> Outcome<&T> {
    if place.get().is_none() {
        // Somebody else's is as good.
        let _ = place.set(make()?);
    }
    place.get().ok_or_else(|| Error::from("nothing was made"))
}

fn direct(ends: &Ends, job: &Job) -> Outcome<()> {
    let (_current, stream) = (ends.device.enter()?, ends.stream(job.direction));
    for piece in &job.pieces {
        // SAFETY: the ranges are the rig's, and no two copies of the rig at a time share any.
        unsafe { stream.copy(piece.from, piece.to, piece.bytes)? };
    }
    Ok(stream.synchronize()?)
}

fn batched(batch: BatchCopy, ends: &Ends, job: &Job) -> Outcome<()> {
    let (_current, stream) = (ends.device.enter()?, ends.stream(job.direction));
    let mut list = CopyList::with_room(job.pieces.len());
    job.pieces.iter().for_each(|piece| list.add(piece.from, piece.to, piece.bytes));
    // SAFETY: the ranges are the rig's, and no two copies of the rig at a time share any.
    unsafe { batch.queue(ends.device.driver(), &mut list, stream.handle())? };
    Ok(stream.synchronize()?)
}

fn chain(copier: &Copier, ends: &Ends, job: &Job) -> Outcome<()> {
    let (_current, stream) = (ends.device.enter()?, ends.stream(job.direction));
    // SAFETY: the ranges are the rig's, and no two copies of the rig at a time share any.
    unsafe { copier.copy_in_stream(&job.pieces, stream.handle())? };
    Ok(stream.synchronize()?)
}

fn regions(copier: &Copier, ends: &Ends) -> Outcome<[(RegionId, RegionId); 2]> {
    let both = |direction| -> Outcome<(RegionId, RegionId)> {
        let (host, gpu) = (ends.host(direction), ends.gpu(direction));
        let host = copier.register_host(host.clone())?;
        // SAFETY: the rig's memory outlives its copies, and no two copies at a time share any of
        // it.
        let gpu = unsafe { copier.register_device(ends.device.index(), gpu.address(), gpu.bytes())? };
        Ok(if direction == Direction::HostToDevice { (host, gpu) } else { (gpu, host) })
    };
    Ok([both(Direction::HostToDevice)?, both(Direction::DeviceToHost)?])
}

/// Free bytes of a GPU's memory.
fn free_bytes(ends: &Ends) -> Outcome<u64> {
    let (_current, driver) = (ends.device.enter()?, ends.device.driver());
    let (mut free, mut total) = (0, 0);
    // SAFETY: results are written to valid places; the device's context is current.
    driver.check("cuMemGetInfo", unsafe { (driver.table().memory_info)(&mut free, &mut total) })?;
    Ok(free as u64)
}

/// Blocks: one for nearly each multiprocessor, more than a link needs.
const BLOCKS: u32 = 128;
/// Pieces that a list has room for at first.
const PIECES: usize = 1 << 14;

/// A kernel that copies between a GPU and the host's memory by itself, and its list: the usual way
/// for small pages where no link but the GPU's own is used.
struct Gather {
    kernels: Kernels,
    list: Mutex<HostMemory>,
}

impl Gather {
    /// For one GPU.
    fn new(ends: &Ends) -> Outcome<Gather> {
        let list = Mutex::new(list_for(ends, PIECES)?);
        Ok(Gather { kernels: Kernels::load(&ends.device)?, list })
    }

    /// Copies, and waits until it is done.
    fn copy(&self, ends: &Ends, job: &Job) -> Outcome<()> {
        let (mut list, pieces) = (self.list.lock(), &job.pieces);
        if size_of_val(&pieces[..]) > list.bytes() {
            *list = list_for(ends, pieces.len())?;
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

fn list_for(ends: &Ends, pieces: usize) -> Outcome<HostMemory> {
    Ok(HostMemory::new(&ends.device, pieces * size_of::<Piece>())?)
}
