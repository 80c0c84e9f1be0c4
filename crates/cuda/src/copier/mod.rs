//! The copier: a mover with every path between host memory and the GPUs of a process, and stream
//! copies for callers with streams.

mod build;
mod relayed;

use build::Built;
pub use relayed::pays_to_relay;

use crate::addresses::Addresses;
use crate::device::{Device, DeviceMemory, Event, Stream};
use crate::driver::abi::{Address, StreamHandle};
use crate::driver::{CudaError, Driver, LoadError, Relaxed};
use crate::kernels::{Kernels, Piece};
use crate::links::{Direction, HOST};
use crate::open::{self, LeftOut};
use crate::peers::Peers;
use crate::poller::Poller;
use crate::profile::Profile;
use crate::quarantine::Quarantine;
use crate::rates::Rates;
use crate::relay::Relay;
use crate::remote::{Attachment, Ground, Hex, NodeRelays, RELAYS_VARIABLE, RelaysAt, TOKEN_VARIABLE};
use crate::stream_copy::{self, DeclineReason, StreamCopies};
use crate::topology::Topology;
use forebay_transfer::lock::Mutex;
use forebay_transfer::{
    Backing, Class, Closed, End, Limits, MoverHandle, MoverThread, PathError, Place, Reason, RegionId, Span,
    SpanPair, SubmitError, Telemetry, Transfer,
};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use thiserror::Error;

/// Of the time that a copy takes at least, the part that is slept through, and its limit.
const SLEEP_PART: f64 = 0.9;
const SLEEP_MAX_S: f64 = 10.0;

/// What a copier is made of. What is not given is as it was measured on this host, if it was
/// ([`Profile::kept`]), and otherwise as it is on most hosts: starting never measures, since the
/// first copy must not wait for that.
#[derive(Debug, Clone, Default)]
pub struct CopierOptions {
    /// GPUs to use, by ordinal; none means every one that is visible.
    pub devices: Option<Vec<u16>>,
    /// How relays work towards GPUs.
    pub to_device: Option<Relay>,
    /// How they work towards the host.
    pub to_host: Option<Relay>,
    /// What is known of the paths.
    pub rates: Option<Rates>,
    /// The node whose relays are used too: with them a process that sees one GPU copies over all of
    /// the host.
    pub relays: NodeRelays,
}

/// Why a copier did not start.
#[derive(Debug, Error)]
pub enum StartError {
    #[error(transparent)]
    Driver(#[from] LoadError),
    #[error(transparent)]
    Cuda(#[from] CudaError),
    #[error("devices: {index} does not exist; {count} GPUs are visible, the first is 0")]
    NoDevice { index: u16, count: u16 },
    #[error("devices: none; at least one GPU is needed")]
    NoDevices,
    #[error("a thread did not start: {0}")]
    Thread(#[from] std::io::Error),
    #[error("{RELAYS_VARIABLE} and {TOKEN_VARIABLE}: {0}")]
    Relays(std::io::Error),
    #[error("no GPU can be used: {0}")]
    LeftOut(#[from] LeftOut),
    #[error(transparent)]
    Closed(#[from] Closed),
    #[error(transparent)]
    Route(#[from] PathError),
}

/// Why a copy did not happen in full. What its targets hold is not known.
#[derive(Debug, Error)]
pub enum CopyError {
    #[error("device: {index} is not one of this copier's")]
    NoDevice { index: u16 },
    #[error(
        "copy {index}, {} bytes from {:#x} to {:#x}, is not between pinned host memory and a GPU: {why}",
        .piece.bytes, .piece.from, .piece.to
    )]
    NotBetween { index: usize, piece: Piece, why: DeclineReason },
    #[error(transparent)]
    Cuda(#[from] CudaError),
    #[error(transparent)]
    Submit(#[from] SubmitError),
    #[error("the copy failed: {0}")]
    Failed(Reason),
    #[error("the copy was cancelled")]
    Cancelled,
}

/// All paths between the host's memory and the GPUs that a process sees.
#[derive(Debug)]
pub struct Copier {
    // Dropped in this order: what another process does for it, links, then the thread that ends
    // their operations, then what both use.
    relays: Vec<Attachment>,
    _mover: MoverThread,
    _poller: Poller,
    _staging: Vec<DeviceMemory>,
    handle: MoverHandle,
    addresses: Arc<Addresses>,
    gpus: Vec<Arc<Kernels>>,
    stream_copies: StreamCopies,
    quarantine: Arc<Quarantine>,
    /// All addresses of the host and of each GPU, for callers that have no regions.
    anywhere: Anywhere,
    /// Streams that callers wait for, each with the event behind its last copy.
    spare: Mutex<Vec<(Stream, Event)>>,
}

/// Regions that hold every address of a place.
#[derive(Debug)]
struct Anywhere {
    host: RegionId,
    devices: HashMap<u16, RegionId>,
}

impl Copier {
    /// Loads the driver and starts with the GPUs asked for.
    pub fn start(options: &CopierOptions) -> Result<Copier, StartError> {
        Copier::with_driver(Driver::load()?, options)
    }

    pub fn with_driver(driver: &'static Driver, options: &CopierOptions) -> Result<Copier, StartError> {
        let opened = open(driver, options.devices.as_deref())?;
        let made = Made::of(driver, options)?;
        let (mover, poller) = (MoverThread::spawn(Limits::default())?, Poller::spawn(driver)?);
        let (handle, tracks) = (mover.handle(), poller.tracks());
        let addresses = Arc::<Addresses>::default();
        let Built { gpus, staging, peers } = build::build(&handle, &tracks, &addresses, &opened, &made)?;
        let devices: Vec<Arc<Device>> = gpus.iter().map(|gpu| Arc::clone(gpu.device())).collect();
        let stream_copies = StreamCopies::new(driver, &gpus, peers, made.rates);
        let anywhere = Anywhere::new(&handle, &addresses, &devices)?;
        let quarantine = Quarantine::of(&handle)?;
        let own = devices.iter().map(|device| Ok(Hex(device.uuid()?))).collect::<Result<_, CudaError>>()?;
        let ground = Ground { mover: handle.clone(), addresses: Arc::clone(&addresses), tracks, own };
        let attach = |at: &RelaysAt, gpu| Attachment::start(ground.clone(), gpu, at.clone());
        let relays = made.relays_at.iter().flat_map(|at| gpus.iter().map(|gpu| attach(at, gpu)));
        Ok(Copier {
            relays: relays.collect::<Result<_, _>>()?,
            _mover: mover,
            _poller: poller,
            _staging: staging,
            handle,
            addresses,
            gpus,
            stream_copies,
            quarantine,
            anywhere,
            spare: Mutex::default(),
        })
    }

    /// The GPUs, in the order of the options.
    pub fn devices(&self) -> impl ExactSizeIterator<Item = &Arc<Device>> {
        self.gpus.iter().map(|gpu| gpu.device())
    }

    /// Sets by what stream copies are divided from now on, and which copies are whose.
    pub fn set_rates(&mut self, rates: Rates) -> Result<(), CudaError> {
        self.stream_copies.set_rates(rates)
    }

    pub fn stream_copies(&self) -> &StreamCopies {
        &self.stream_copies
    }

    pub fn mover(&self) -> &MoverHandle {
        &self.handle
    }

    /// The relays of a node's process that copies of a GPU use too, if there are to be any.
    pub fn relays(&self, device: u16) -> Option<&Attachment> {
        self.relays.iter().find(|relays| relays.device() == device)
    }

    pub fn register_host(&self, memory: Arc<dyn Backing>) -> Result<RegionId, Closed> {
        self.handle.register(HOST, memory)
    }

    /// Registers memory of a GPU.
    ///
    /// # Safety
    ///
    /// The range stays allocated until it is unregistered, and spans of it are not used by others
    /// while transfers that name them have not ended.
    pub unsafe fn register_device(
        &self,
        device: u16,
        start: Address,
        bytes: u64,
    ) -> Result<RegionId, Closed> {
        let region = self.handle.register_opaque(Place::Device(device), bytes)?;
        self.addresses.insert(region, start, bytes);
        Ok(region)
    }

    /// Forgets a region, unless a transfer uses it.
    pub fn unregister(&self, region: RegionId) -> Result<Result<(), forebay_transfer::Refused>, Closed> {
        let gone = self.handle.unregister(region)?;
        if gone.is_ok() {
            self.addresses.remove(region);
        }
        Ok(gone)
    }

    pub fn driver(&self) -> &'static Driver {
        self.gpus[0].device().driver()
    }

    /// Copies pieces in a caller's stream: as a stream copy over all paths, or as the driver would
    /// where a stream copy cannot be. Says why it was not a stream copy, if so.
    ///
    /// # Safety
    ///
    /// What holds for `cuMemcpyAsync` holds for every piece.
    pub unsafe fn copy_in_stream(
        &self,
        pieces: &[Piece],
        stream: StreamHandle,
    ) -> Result<Option<DeclineReason>, CudaError> {
        // SAFETY: by this function's contract.
        let Err(declined) = (unsafe { self.stream_copies.copy(pieces, stream) }) else { return Ok(None) };
        // SAFETY: by this function's contract.
        unsafe { self.copy_as_driver(pieces, stream)? };
        Ok(Some(declined))
    }

    /// As [`copy_in_stream`](Copier::copy_in_stream), in a stream of ours. After a refused call
    /// some of a stream copy may be under way behind nothing; a caller's stream could not be waited
    /// for, this one is.
    ///
    /// # Safety
    ///
    /// As there.
    unsafe fn copy_in_own(
        &self,
        device: u16,
        direction: Direction,
        pieces: &[Piece],
        stream: &Stream,
    ) -> Result<Option<DeclineReason>, CudaError> {
        // SAFETY: by this function's contract.
        let Err(declined) = (unsafe { self.stream_copies.copy(pieces, stream.handle()) }) else {
            return Ok(None);
        };
        if declined == DeclineReason::Fault {
            let _ = stream.synchronize();
            self.stream_copies.settle_direction(device, direction);
        }
        // SAFETY: by this function's contract.
        unsafe { self.copy_as_driver(pieces, stream.handle())? };
        Ok(Some(declined))
    }

    /// Has the driver copy pieces in a stream, one by one.
    ///
    /// # Safety
    ///
    /// As for [`copy_in_stream`](Copier::copy_in_stream).
    unsafe fn copy_as_driver(&self, pieces: &[Piece], stream: StreamHandle) -> Result<(), CudaError> {
        for piece in pieces {
            // SAFETY: by this function's contract; what is current is the caller's business, as it
            // is with the driver.
            unsafe { self.gpus[0].device().copy_in(stream, piece.from, piece.to, piece.bytes)? };
        }
        Ok(())
    }

    /// Copies pieces between pinned host memory and GPUs, each whichever way its addresses say, and
    /// waits. Whatever it returns, nothing of it is under way any more.
    ///
    /// # Safety
    ///
    /// As for [`copy_and_wait`](Copier::copy_and_wait), but that the driver is asked what the
    /// addresses are.
    pub unsafe fn copy_all_and_wait(&self, pieces: &[Piece]) -> Result<(), CopyError> {
        let not_between = |(index, why)| CopyError::NotBetween { index, piece: pieces[index], why };
        let groups = stream_copy::groups(self.driver(), pieces).map_err(not_between)?;
        let unknown = groups.iter().find(|group| !self.anywhere.devices.contains_key(&group.device));
        if let Some(group) = unknown {
            return Err(CopyError::NoDevice { index: group.device });
        }
        for group in groups {
            // SAFETY: by this function's contract; the driver has said that the ways are these.
            unsafe { self.copy_and_wait(group.device, group.direction, &group.pieces)? };
        }
        Ok(())
    }

    /// Copies pieces between pinned host memory and a GPU, at once, over all paths, and waits.
    /// Large copies are the mover's, whose paths share out the work while it is done; others are
    /// stream copies, which begin sooner.
    ///
    /// # Safety
    ///
    /// All ranges are valid, of pinned host memory on one side and of the GPU on the other; nothing
    /// else touches the targets or writes the sources until this returns.
    pub unsafe fn copy_and_wait(
        &self,
        device: u16,
        direction: Direction,
        pieces: &[Piece],
    ) -> Result<(), CopyError> {
        let bytes = pieces.iter().map(|piece| piece.bytes).sum::<u64>();
        let _own = self.own_copy(device, direction, bytes);
        let hosts = pays_to_relay(bytes, false).then(|| self.hosts_of(device, direction, pieces)).flatten();
        if let Some(hosts) = hosts {
            return self.by_mover(device, direction, pieces, hosts);
        }
        if bytes >= self.stream_copies.rates().of(direction).mover_bytes {
            let host = |piece: &Piece| Span::new(self.anywhere.host, direction.sides(piece).0, piece.bytes);
            return self.by_mover(device, direction, pieces, pieces.iter().map(host).collect());
        }
        let gpu = self.gpus.iter().find(|gpu| gpu.device().index() == device);
        let gpu = gpu.ok_or(CopyError::NoDevice { index: device })?.device();
        if bytes < self.stream_copies.rates().least_bytes() {
            // SAFETY: by this function's contract.
            return unsafe { self.copy_alone(gpu, pieces) }.map_err(CopyError::from);
        }
        let _relaxed = Relaxed::enter(self.driver());
        let _current = gpu.enter()?;
        let (stream, ended) = self.spare_stream(gpu)?;
        let (begin, losses) = (Instant::now(), self.stream_copies.losses());
        // SAFETY: by this function's contract; the stream is of this device, which is current.
        let copied = unsafe { self.copy_in_own(device, direction, pieces, &stream) };
        let rates = self.stream_copies.rates();
        let least_s = match copied {
            Ok(None) => rates.least_s(direction, self.gpus.len(), bytes),
            _ => rates.least_alone_s(device, direction, bytes),
        };
        let least = Duration::from_secs_f64((least_s * SLEEP_PART).clamp(0.0, SLEEP_MAX_S));
        let passed = ended.record(&stream).and_then(|()| {
            sleep_if_long(least.saturating_sub(begin.elapsed()));
            pass(&ended, begin)
        });
        if copied.is_err() || passed.is_err() {
            // What did get queued uses the memory until the stream has come to its end, or its
            // context to its own.
            let _ = stream.synchronize();
        }
        let mut whole = copied.map(drop).and(passed);
        if whole.is_ok() && self.stream_copies.look_after_relays(device, direction) != losses {
            // A relay is lost, and what it carried may not have arrived.
            // SAFETY: by this function's contract.
            let again = unsafe { self.copy_as_driver(pieces, stream.handle()) };
            whole = again.and(stream.synchronize());
        }
        if whole.is_ok() {
            self.spare.lock().push((stream, ended));
        }
        Ok(whole?)
    }

    /// Copies as the driver would and no more: a small copy has no time for anything else.
    ///
    /// # Safety
    ///
    /// As for [`copy_and_wait`](Copier::copy_and_wait).
    unsafe fn copy_alone(&self, gpu: &Arc<Device>, pieces: &[Piece]) -> Result<(), CudaError> {
        let _current = gpu.enter()?;
        let (stream, event) = self.spare_stream(gpu)?;
        // SAFETY: by this function's contract.
        let copy = |piece: &Piece| unsafe { stream.copy(piece.from, piece.to, piece.bytes) };
        let copied = pieces.iter().try_for_each(copy);
        let waited = stream.synchronize();
        if waited.is_ok() {
            self.spare.lock().push((stream, event));
        }
        copied.and(waited)
    }

    fn spare_stream(&self, device: &Arc<Device>) -> Result<(Stream, Event), CudaError> {
        let mut spare = self.spare.lock();
        let known = spare.iter().position(|(stream, _)| stream.device().index() == device.index());
        known.map_or_else(
            || Ok((Stream::new(device)?, Event::new(device)?)),
            |index| Ok(spare.swap_remove(index)),
        )
    }

    /// Copies one span over all paths and waits for its end, which names what may still be touched,
    /// if anything.
    pub fn copy(&self, from: Span, to: Span) -> Result<End, SubmitError> {
        self.handle.run(Transfer::new(vec![SpanPair::new(from, to)], Class::Demand))
    }

    pub fn telemetry(&self) -> Result<Telemetry, Closed> {
        self.handle.telemetry()
    }
}

/// Waits for an event of a copy that began then. Looks at it again and again, but of a copy that
/// takes longer than expected, on a PCIe link that others use too, no more often than a few hundred
/// times in all: then it costs little of a processor either.
fn pass(event: &Event, begin: Instant) -> Result<(), CudaError> {
    const LEAST: Duration = Duration::from_micros(20);
    while !event.is_passed()? {
        let pause = begin.elapsed() / 512;
        if pause >= LEAST {
            std::thread::sleep(pause);
        } else {
            std::hint::spin_loop();
        }
    }
    Ok(())
}

/// Sleeps, if that is worth it: waiting for a large copy then costs little of a processor.
fn sleep_if_long(time: Duration) {
    const LEAST: Duration = Duration::from_micros(300);
    if time >= LEAST {
        std::thread::sleep(time);
    }
}

impl Anywhere {
    fn new(handle: &MoverHandle, addresses: &Addresses, devices: &[Arc<Device>]) -> Result<Anywhere, Closed> {
        let all = |place| {
            let region = handle.register_opaque(place, u64::MAX)?;
            addresses.insert(region, 0, u64::MAX);
            Ok::<_, Closed>(region)
        };
        let device = |device: &Arc<Device>| Ok((device.index(), all(Place::Device(device.index()))?));
        let devices = devices.iter().map(device).collect::<Result<_, Closed>>()?;
        Ok(Anywhere { host: all(HOST)?, devices })
    }
}

/// What a copier is made of once nothing is left open.
struct Made {
    /// By direction, as in [`Direction::BOTH`].
    relays: [Relay; 2],
    rates: Rates,
    relays_at: Option<RelaysAt>,
}

impl Made {
    fn of(driver: &'static Driver, options: &CopierOptions) -> Result<Made, StartError> {
        let CopierOptions { to_device, to_host, rates, .. } = options;
        let complete = to_device.is_some() && to_host.is_some() && rates.is_some();
        let (kept, known) = if complete { Default::default() } else { known(driver) };
        let measured = |direction| Some(kept.as_ref()?.relayed?.of(direction).relay);
        let relay =
            |asked: &Option<Relay>, direction| asked.or_else(|| measured(direction)).unwrap_or_default();
        let relays_at = match &options.relays {
            NodeRelays::At(at) => Some(at.clone()),
            NodeRelays::None => None,
            NodeRelays::FromEnvironment => RelaysAt::from_environment().map_err(StartError::Relays)?,
        };
        Ok(Made {
            relays_at,
            relays: [relay(to_device, Direction::HostToDevice), relay(to_host, Direction::DeviceToHost)],
            rates: rates.clone().unwrap_or(known),
        })
    }
}

/// What is known of a host before anything was copied: what was measured once, and which GPUs share
/// a port.
fn known(driver: &'static Driver) -> (Option<Profile>, Rates) {
    let Ok(host) = Topology::read(driver) else { return Default::default() };
    let kept = Profile::kept_of(&host);
    let rates = kept.as_ref().map(Rates::from).unwrap_or_default().with_ports(&host);
    (kept, rates)
}

/// Copies in streams alone, over the GPUs asked for; none means every one that is visible. There is
/// no mover then, nor the threads and staging that one takes.
pub fn start_stream_copies(
    driver: &'static Driver,
    devices: Option<&[u16]>,
) -> Result<StreamCopies, StartError> {
    let _relaxed = Relaxed::enter(driver);
    let gpus = open(driver, devices)?;
    Ok(StreamCopies::new(driver, &gpus, Peers::check(&gpus), known(driver).1))
}

fn open(driver: &'static Driver, wanted: Option<&[u16]>) -> Result<Vec<Arc<Kernels>>, StartError> {
    let count = Device::count(driver)?;
    let all: Vec<u16> = (0..count).collect();
    let wanted = wanted.unwrap_or(&all);
    if let Some(index) = wanted.iter().find(|index| **index >= count) {
        return Err(StartError::NoDevice { index: *index, count });
    }
    if wanted.is_empty() {
        return Err(StartError::NoDevices);
    }
    Ok(open::open(driver, wanted)?)
}
