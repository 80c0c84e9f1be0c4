//! The same with a GPU that publishes: round trips of a kernel that waits for each, as no kernel of
//! the product does, and commits whose contexts a kernel makes of sums, as those of the product do.

use super::{EPOCH, LIMIT, Quantiles, ROUND_TRIPS, Ring, SIZES, SLOTS, rate};
use crate::output::Outcome;
use crate::timing::{Cost, cost};
use forebay_cuda::checksum::{Checksums, Range, SumList, Width};
use forebay_cuda::commits::{Commit, CommitList, Commits};
use forebay_cuda::device::{Device, HostMemory, Stream};
use forebay_cuda::driver::abi::{self, Address};
use forebay_cuda::driver::{Driver, LoadError};
use forebay_cuda::kernels::Kernel;
use forebay_cuda::pinned::Pin;
use forebay_results::Row;
use forebay_ring::{CONTEXTS_MAX, Context, NotPosted, Op, Producer, Request};
use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Instant;

const PTX: &str = concat!(include_str!("../../kernels/ring.ptx"), "\0");
/// Layers of different bytes: a request names some that follow each other.
const LAYERS: usize = 4096;
const LAYER_BYTES: usize = 16;
/// Requests that one launch publishes at least, as an engine's stores are many chunks each.
const TOGETHER: usize = 16;
/// Launches whose lists are kept: none of them has requests that are still to be published when all
/// of the next ones' slots have come back.
const LISTS: usize = 4 * SLOTS as usize;

pub struct Gpu {
    device: Arc<Device>,
    stream: Stream,
    round_trips: Option<Kernel>,
    commits: Arc<Commits>,
    sums: Arc<SumList>,
    /// What the contexts of layers have to be.
    checksums: Vec<u32>,
    /// What was summed up.
    _layers: HostMemory,
}

impl Gpu {
    /// A GPU, where there is a driver.
    pub fn find(index: u16) -> Outcome<Option<Gpu>> {
        let driver = match Driver::load() {
            Ok(driver) => driver,
            Err(LoadError::NoLibrary { .. }) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        if Device::count(driver)? <= index {
            return Ok(None);
        }
        let device = Device::open(driver, index)?;
        let stream = Stream::new(&device)?;
        let round_trips = match Kernel::load(&device, PTX, c"forebay_ring_round_trips") {
            Ok(kernel) => Some(kernel),
            // The fake driver's kernels cannot wait.
            Err(error) if error.status == abi::NOT_FOUND => None,
            Err(error) => return Err(error.into()),
        };
        let (layers, sums, checksums) = sum_up(&device, &stream)?;
        let commits = Commits::load(&device)?;
        Ok(Some(Gpu { device, stream, round_trips, commits, sums, checksums, _layers: layers }))
    }

    pub fn name(&self) -> Outcome<String> {
        Ok(self.device.name()?)
    }

    pub fn rows(&self, runs: u32, contexts: u64) -> Outcome<Vec<Row>> {
        let mut rows = Vec::new();
        if let Some(kernel) = &self.round_trips {
            let mut times = Quantiles::default();
            for _ in 0..runs {
                let ring = Ring::new(CONTEXTS_MAX)?;
                times.add(ring.beside_consumer(|_, _| None, |ring| self.wait_for_each(ring, kernel))?.0);
            }
            rows.extend(times.rows("ring.round_trip_us"));
        }
        let mut torn = 0;
        for size in SIZES {
            let mut rates = Vec::new();
            for _ in 0..runs {
                let ring = Ring::new(size)?;
                let requests = contexts / u64::from(size);
                let check = |request: &Request, at: usize| {
                    let checksum = *self.checksums.get(first_layer(request.user) + at)?;
                    Some(Context { extent: 0, layer: at as u16, checksum })
                };
                let work = |ring: &Ring| self.publish_all(ring, size, requests);
                let (cost, wrong) = ring.beside_consumer(check, work)?;
                torn += wrong;
                rates.push(rate(requests * u64::from(size), cost));
            }
            rows.push(Row::of_runs(format!("ring.contexts_per_s.{size}"), "M/s", &rates));
        }
        rows.push(Row::of_runs("ring.torn", "contexts", &[torn as f64]));
        let all = u64::from(runs) * SIZES.iter().map(|size| contexts / u64::from(*size)).sum::<u64>();
        rows.push(Row::of_runs("ring.requests", "requests", &[all as f64]));
        Ok(rows)
    }

    /// The ring as the GPU reaches it.
    fn pin(&self, ring: &Ring) -> Outcome<Pin> {
        let words = ring.memory.words();
        let start = NonNull::from(words).cast();
        // SAFETY: the ring outlives the pin: both are the caller's, the ring first.
        Ok(unsafe { Pin::new(&self.device, start, size_of_val(words) as u64)? })
    }

    fn wait_for_each(&self, ring: &Ring, kernel: &Kernel) -> Outcome<Vec<f64>> {
        let (_pin, layout) = (self.pin(ring)?, ring.layout);
        let took = HostMemory::new(&self.device, ROUND_TRIPS * size_of::<u32>())?;
        // SAFETY: it has as many bytes, and no kernel runs.
        unsafe { took.start().write_bytes(0, took.bytes()) };
        let at = |word: usize| address_of(ring, word);
        let (mut requests, mut completions) = (at(layout.request(0)), at(layout.completion(0)));
        let (mut posted, mut places) = (u64::from(layout.posted()), u64::from(layout.completions()));
        let (mut epoch, mut count, mut to) = (EPOCH, ROUND_TRIPS as u64, took.start() as Address);
        let mut parameters = [
            (&raw mut requests).cast(),
            (&raw mut posted).cast(),
            (&raw mut completions).cast(),
            (&raw mut places).cast(),
            (&raw mut epoch).cast(),
            (&raw mut count).cast(),
            (&raw mut to).cast(),
        ];
        let current = self.device.enter()?;
        // SAFETY: the parameters have the types of the kernel's; the ring is pinned, and nobody
        // else posts to it.
        unsafe { kernel.launch(&self.stream, (1, 1), 1, &mut parameters)? };
        drop(current);
        self.stream.synchronize()?;
        // SAFETY: there are as many, and the kernel has ended.
        let us = |at: usize| f64::from(unsafe { took.start().cast::<u32>().add(at).read() }) / 1e3;
        let us: Vec<f64> = (0..ROUND_TRIPS).map(us).collect();
        if us.contains(&0.0) { Err("a request does not end".into()) } else { Ok(us) }
    }

    /// What it costs to have so many requests published, taken and ended.
    fn publish_all(&self, ring: &Ring, size: u16, requests: u64) -> Outcome<Cost> {
        let (_pin, mut producer) = (self.pin(ring)?, ring.producer());
        let spent = cost(|| {
            let (mut armed, mut ended, mut lists) = (0, 0, VecDeque::new());
            let mut since = Instant::now();
            while ended < requests {
                let before = ended;
                while producer.reap(ring.memory.words())?.is_some() {
                    ended += 1;
                }
                let free = usize::from(SLOTS) - producer.under_way();
                let next = if free >= TOGETHER { armed..requests } else { 0..0 };
                let commits = arm_free(&mut producer, ring, size, next)?;
                armed += commits.len() as u64;
                if !commits.is_empty() {
                    lists.push_back(self.publish(&commits)?);
                    lists.drain(..lists.len().saturating_sub(LISTS));
                }
                if ended > before {
                    since = Instant::now();
                } else if since.elapsed() > LIMIT {
                    return Err("requests do not end".into());
                }
            }
            Ok(self.stream.synchronize()?)
        })?;
        Ok(spent)
    }

    fn publish(&self, commits: &[Commit]) -> Outcome<CommitList> {
        let list = self.commits.list(&self.sums, commits)?;
        // SAFETY: the sums are there. Each request was just armed, with as many contexts, and the
        // list is kept until its slots have come back.
        unsafe { list.queue(&self.stream)? };
        Ok(list)
    }
}

/// Arms what there are free slots for, of the requests of these numbers.
fn arm_free(
    producer: &mut Producer,
    ring: &Ring,
    size: u16,
    requests: std::ops::Range<u64>,
) -> Outcome<Vec<Commit>> {
    let mut commits = Vec::new();
    for user in requests {
        let request = Request { user, lease: 0, op: Op::Commit, class: 0, contexts: size, within_us: 0 };
        let armed = match producer.arm(ring.memory.words(), &request, &[]) {
            Ok(armed) => armed,
            Err(NotPosted::Full { .. }) => break,
            Err(other) => return Err(other.into()),
        };
        let first = first_layer(user);
        commits.push(Commit {
            contexts: address_of(ring, ring.layout.context(armed.slot, 0)),
            word: address_of(ring, armed.word),
            value: armed.value,
            layers: first..first + usize::from(size),
        });
    }
    Ok(commits)
}

fn address_of(ring: &Ring, word: usize) -> Address {
    (&raw const ring.memory.words()[word]) as Address
}

/// Requests that follow each other in a slot have other layers.
fn first_layer(user: u64) -> usize {
    (user * 7 % (LAYERS as u64 - u64::from(CONTEXTS_MAX))) as usize
}

/// Layers of different bytes, their sums, and their checksums.
fn sum_up(device: &Arc<Device>, stream: &Stream) -> Outcome<(HostMemory, Arc<SumList>, Vec<u32>)> {
    let layers = HostMemory::new(device, LAYERS * LAYER_BYTES)?;
    for at in 0..LAYERS * LAYER_BYTES / size_of::<u64>() {
        let word = (at as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        // SAFETY: there is room for as many, and no kernel has it.
        unsafe { layers.start().cast::<u64>().add(at).write(word) };
    }
    let start = layers.start() as Address;
    let layer = |at: usize| Range { at: start + (at * LAYER_BYTES) as u64, bytes: LAYER_BYTES as u64 };
    let extents: Vec<Vec<Range>> = (0..LAYERS).map(|at| vec![layer(at)]).collect();
    let sums = Arc::new(Checksums::load(device)?.list(&extents)?);
    // SAFETY: the layers and the list live until the stream has come past it, and nobody writes.
    unsafe { sums.queue(stream, Width { blocks: 16, threads: 256 })? };
    stream.synchronize()?;
    let checksums = sums.sums();
    Ok((layers, sums, checksums))
}
