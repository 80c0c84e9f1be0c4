//! Which GPUs may relay for each other: those that reach each other's memory and were seen to move
//! a pattern right, by each means that relays use. Some drivers and boards report peer access, and
//! success, where copies move nothing or kernels read something else.

use crate::device::{Device, DeviceMemory, HostMemory, Stream};
use crate::driver::abi::Address;
use crate::driver::{CopyList, CudaError};
use crate::kernels::{Kernels, Piece};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use thiserror::Error;

/// Bytes that are moved by each means in each direction.
const PART_BYTES: u64 = 64 << 10;
/// A pair's GPUs both move in both directions, so each GPU sends this many parts and gets as many.
const PARTS: u64 = 2;
/// Memory of each GPU: what it sends, then what it gets.
const MEMORY_BYTES: u64 = 2 * PARTS * PART_BYTES;
const BLOCKS: u32 = 16;

/// How much memory of a peer [`check_opened`] uses.
pub(crate) const OPENED_BYTES: u64 = PART_BYTES;
/// What to do about wrong bytes.
pub(crate) const ADVICE: &str = "look at the IOMMU and ACS settings, and update the driver";

/// By what bytes go from one GPU to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Means {
    Copy,
    /// Several copies by one call.
    Batch,
    Kernel,
}

impl Means {
    const ALL: [Means; 3] = [Means::Copy, Means::Batch, Means::Kernel];

    fn words(self) -> &'static str {
        match self {
            Means::Copy => "a copy",
            Means::Batch => "a batch of copies",
            Means::Kernel => "a kernel",
        }
    }
}

/// Two GPUs that do not relay for each other although the driver says that they reach each other.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Error)]
#[error("GPU {one} and GPU {other} do not relay for each other: {why}")]
pub struct Untrusted {
    pub one: u16,
    pub other: u16,
    pub why: Distrust,
}

/// Why GPUs do not relay for each other.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Error)]
#[serde(rename_all = "snake_case")]
pub enum Distrust {
    #[error(
        "{} of GPU {by} moved wrong bytes from GPU {from} to GPU {to} and reported success", .means.words()
    )]
    WrongBytes { means: Means, by: u16, from: u16, to: u16 },
    #[error("{} to its memory and back moved wrong bytes and reported success", .means.words())]
    WrongBytesThereAndBack { means: Means },
    #[error("a pattern could not be moved between them: {0}")]
    Refused(String),
}

/// Memory of a check.
type Kept = (Vec<Result<Site, CudaError>>, Option<HostMemory>);

/// Pairs of GPUs that relay for each other. It keeps the memory of its check, since giving memory
/// back waits for what a program has under way.
#[derive(Debug, Default)]
pub struct Peers {
    trusted: Vec<(u16, u16)>,
    untrusted: Vec<Untrusted>,
    _kept: Kept,
}

impl Peers {
    /// Lets all GPUs reach each other, and checks those that do. It uses streams of its own, a few
    /// hundred KiB of each GPU and a millisecond a pair. What is found is logged.
    pub fn check(gpus: &[Arc<Kernels>]) -> Peers {
        let mut peers = Peers::default();
        let pairs: Vec<(usize, usize)> =
            (0..gpus.len()).flat_map(|one| (one + 1..gpus.len()).map(move |other| (one, other))).collect();
        let index = |nth: usize| gpus[nth].device().index();
        let connected = |&(one, other): &(usize, usize)| gpus[one].device().connect(gpus[other].device());
        let connected: Vec<_> = pairs.into_iter().filter(connected).collect();
        let Some(&(first, _)) = connected.first() else { return peers };
        let host = HostMemory::new(gpus[first].device(), 2 * MEMORY_BYTES as usize);
        let sites: Vec<Result<Site, CudaError>> = gpus.iter().map(Site::new).collect();
        for (seed, (one, other)) in (1..).zip(connected) {
            let seen = match (&sites[one], &sites[other], &host) {
                (Ok(one), Ok(other), Ok(host)) => pair(seed, host, [one, other]),
                (Err(error), ..) | (_, Err(error), _) | (.., Err(error)) => {
                    Err(Distrust::Refused(error.to_string()))
                }
            };
            match seen {
                Ok(()) => peers.trusted.push((index(one), index(other))),
                Err(why) => peers.untrusted.push(Untrusted { one: index(one), other: index(other), why }),
            }
        }
        for Untrusted { one, other, why } in &peers.untrusted {
            tracing::warn!(gpu = one, peer = other, advice = ADVICE, reason = %why, "GPUs do not relay for each other");
        }
        peers._kept = (sites, host.ok());
        peers
    }

    pub fn relay(&self, one: u16, other: u16) -> bool {
        self.trusted.contains(&(one.min(other), one.max(other)))
            || self.trusted.contains(&(one.max(other), one.min(other)))
    }

    pub fn untrusted(&self) -> &[Untrusted] {
        &self.untrusted
    }

    /// Whether a GPU has peers that could relay for it and are not trusted to.
    pub fn has_untrusted(&self, gpu: u16) -> bool {
        self.untrusted.iter().any(|pair| pair.one == gpu || pair.other == gpu)
    }
}

/// Checks that a GPU writes and reads right what another process has on a peer, of which it opened
/// [`OPENED_BYTES`] at an address: what is there is lost. Only the GPU's own means are used.
pub(crate) fn check_opened(gpu: &Arc<Kernels>, peer: Address) -> Result<(), Distrust> {
    let refused = |error: CudaError| Distrust::Refused(error.to_string());
    let (site, host) = (
        Site::new(gpu).map_err(refused)?,
        HostMemory::new(gpu.device(), 2 * MEMORY_BYTES as usize).map_err(refused)?,
    );
    for (seed, means) in (1..).zip(Means::ALL) {
        fill(&host, 0, seed);
        fill(&host, MEMORY_BYTES, !seed);
        let (own, source) = (site.memory.address(), host.start() as Address);
        let back = own + PARTS * PART_BYTES;
        let moved = site.copy(source, own, PART_BYTES).and_then(|()| {
            site.copy(source + MEMORY_BYTES, back, PART_BYTES)?;
            site.carry(means, own, peer)?;
            site.carry(means, peer, back)?;
            site.copy(back, source + MEMORY_BYTES, PART_BYTES)?;
            site.stream.synchronize()
        });
        if moved.is_err() {
            let _ = site.stream.synchronize();
        }
        moved.map_err(refused)?;
        if !are_equal(&host, 0, MEMORY_BYTES) {
            return Err(Distrust::WrongBytesThereAndBack { means });
        }
    }
    Ok(())
}

/// A GPU with memory and a stream for the check.
#[derive(Debug)]
struct Site {
    kernels: Arc<Kernels>,
    memory: DeviceMemory,
    stream: Stream,
    list: HostMemory,
}

/// A part on its way between two GPUs.
struct Step {
    /// Of the pair, by place: the one that executes it, and where its bytes come from. They go to
    /// the other one.
    by: usize,
    from: usize,
}

impl Step {
    const ALL: [Step; 4] =
        [Step { by: 0, from: 0 }, Step { by: 1, from: 0 }, Step { by: 0, from: 1 }, Step { by: 1, from: 1 }];
}

impl Site {
    fn new(kernels: &Arc<Kernels>) -> Result<Site, CudaError> {
        let device = kernels.device();
        Ok(Site {
            kernels: Arc::clone(kernels),
            memory: DeviceMemory::new(device, MEMORY_BYTES)?,
            stream: Stream::new(device)?,
            list: HostMemory::new(device, 2 * PARTS as usize * size_of::<Piece>())?,
        })
    }

    fn device(&self) -> &Arc<Device> {
        self.kernels.device()
    }

    /// Where a part is that this GPU sends, or gets.
    fn part(&self, nth: usize, is_sent: bool) -> Address {
        self.memory.address() + (nth as u64 + if is_sent { 0 } else { PARTS }) * PART_BYTES
    }

    fn copy(&self, from: Address, to: Address, bytes: u64) -> Result<(), CudaError> {
        let _current = self.device().enter()?;
        // SAFETY: both are memory of the check, which lives until its streams were waited for.
        unsafe { self.stream.copy(from, to, bytes) }
    }

    /// Moves a part by one means, in this GPU's stream.
    fn carry(&self, means: Means, from: Address, to: Address) -> Result<(), CudaError> {
        let driver = self.device().driver();
        let _current = self.device().enter()?;
        match (means, driver.batch_copy()) {
            (Means::Batch, Some(batch)) => {
                let mut list = CopyList::with_room(2);
                let half = PART_BYTES / 2;
                list.add(from, to, half);
                list.add(from + half, to + half, half);
                // SAFETY: as for `copy`; the stream is no default stream and its context is
                // current.
                unsafe { batch.queue(driver, &mut list, self.stream.handle()) }
            }
            (Means::Copy | Means::Batch, _) => self.copy(from, to, PART_BYTES),
            (Means::Kernel, _) => {
                // The kernel before reads its list until then.
                self.stream.synchronize()?;
                let list = self.list.start().cast::<Piece>();
                // SAFETY: the list has room for a piece, and no kernel reads it.
                unsafe { list.write(Piece { from, to, bytes: PART_BYTES }) };
                // SAFETY: as for `copy`; the list is pinned and stays.
                unsafe { self.kernels.copy(&self.stream, list as Address, 1, PART_BYTES, BLOCKS) }
            }
        }
    }
}

/// Has two GPUs move patterns both ways by each means, and compares what arrives.
fn pair(seed: u64, host: &HostMemory, sites: [&Site; 2]) -> Result<(), Distrust> {
    for (nth, means) in (0..).zip(Means::ALL) {
        let seed = seed * Means::ALL.len() as u64 + nth;
        let arrived = moved(seed, host, sites, means);
        if arrived.is_err() {
            // What did get in uses memory that the next check uses. A stream that cannot be waited
            // for is lost, and its work with it.
            let _ = both(sites, |site| site.stream.synchronize());
        }
        let wrong = arrived.map_err(|error| Distrust::Refused(error.to_string()))?;
        if let Some(Step { by, from }) = wrong {
            let index = |nth: usize| sites[nth].device().index();
            return Err(Distrust::WrongBytes {
                means,
                by: index(by),
                from: index(from),
                to: index(1 - from),
            });
        }
    }
    Ok(())
}

/// The same by one means. Says which step moved wrong bytes, if one did.
fn moved(seed: u64, host: &HostMemory, sites: [&Site; 2], means: Means) -> Result<Option<Step>, CudaError> {
    let at = |offset: u64| host.start() as Address + offset;
    let half = PARTS * PART_BYTES;
    // What each sends, and, where it gets something, what was there before.
    for (nth, site) in (0..).zip(sites) {
        fill(host, nth * MEMORY_BYTES, seed << 8 | nth);
        fill(host, nth * MEMORY_BYTES + half, !(seed << 8 | nth));
        site.copy(at(nth * MEMORY_BYTES), site.memory.address(), MEMORY_BYTES)?;
    }
    both(sites, |site| site.stream.synchronize())?;
    for Step { by, from } in Step::ALL {
        sites[by].carry(means, sites[from].part(by, true), sites[1 - from].part(by, false))?;
    }
    both(sites, |site| site.stream.synchronize())?;
    for (nth, site) in (0..).zip(sites) {
        site.copy(site.part(0, false), at(nth * MEMORY_BYTES + half), half)?;
    }
    both(sites, |site| site.stream.synchronize())?;
    let part = |nth: usize| nth as u64 * PART_BYTES;
    let is_wrong = |step: &Step| {
        let (sent, got) = (step.from as u64 * MEMORY_BYTES, (1 - step.from) as u64 * MEMORY_BYTES + half);
        !are_equal(host, sent + part(step.by), got + part(step.by))
    };
    Ok(Step::ALL.into_iter().find(is_wrong))
}

/// Of both, also after an error: nothing is left under way.
fn both(sites: [&Site; 2], act: impl Fn(&Site) -> Result<(), CudaError>) -> Result<(), CudaError> {
    sites.into_iter().map(act).fold(Ok(()), Result::and)
}

/// Fills half of a GPU's share of host memory with a pattern.
fn fill(host: &HostMemory, offset: u64, seed: u64) {
    let words = PARTS * PART_BYTES / 8;
    for word in 0..words {
        let value = (word ^ seed << 32).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(17);
        // SAFETY: host memory has two shares of whole words; no copy is under way.
        unsafe { host.start().add(offset as usize).cast::<u64>().add(word as usize).write(value) };
    }
}

fn are_equal(host: &HostMemory, one: u64, other: u64) -> bool {
    // SAFETY: both parts lie in the allocation and were written; no copy is under way.
    let [one, other] = [one, other].map(|offset| unsafe {
        std::slice::from_raw_parts(host.start().add(offset as usize), PART_BYTES as usize)
    });
    one == other
}
