//! Copies in a caller's stream, over all paths, with nothing but events between them.
//! Everything is queued at once and the host has no part in what follows, so a stream copy can no
//! more deadlock than the copy that it replaces: the argument is in
//! docs/decisions/006-streams-are-kept-by-events.md. What a stream copy cannot do exactly as the
//! driver would, it declines.

mod copy_stream;
mod decline;
mod direct;
mod division;
mod inspect;
mod kernel_list;
mod list_memory;
mod meter;
mod pages;
mod path_set;
mod queued;
mod relay_pipeline;
mod ring;
mod submit_pool;

use crate::device::Device;
use crate::driver::abi::{self, StreamHandle};
use crate::driver::{CudaError, Driver, Relaxed};
use crate::kernels::{Kernels, Piece};
use crate::links::Direction;
use crate::peers::Peers;
use crate::plan;
use crate::rates::Rates;
pub(crate) use copy_stream::AWAITED_HANDOVER_BYTES_MIN;
pub use copy_stream::{BATCH_PIECES_MAX, Batch, CopyStream, Links, Sent};
pub use decline::{Counters, DeclineReason};
pub use direct::AWAITED_BATCH_BYTES_MIN;
use division::Division;
pub use division::PathRate;
use forebay_transfer::lock::Mutex;
pub use inspect::{Group, groups};
use inspect::{Inspected, Outline, inspect};
pub(crate) use inspect::{context_of, pointer_range};
use meter::Meter;
use pages::Pages;
use path_set::PathSet;
use queued::{StreamCopy, Waits, is_small};
use relay_pipeline::RelayPipeline;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;
use submit_pool::SubmitPool;

/// Slots of a pipeline. A pipeline works for one stream copy at a time, so the number of GPUs does
/// not matter: staging on a relay is twice this, for both directions.
const PIPELINE_SLOTS: u64 = 6;
const PIPELINE_SLOT_BYTES: u64 = 2 << 20;
/// A GPU with a copy of its own less than this ago is about to have another.
const LATELY_US: u64 = 10_000;
/// Whoever has copied at the same time as another GPU will again, for this long.
const CONCURRENT_LOADS_HOLD_US: u64 = 1_000_000;
/// Segments of a path's share, at most, of a copy into a stream that is not idle: more operations
/// than the driver's queues hold would make the caller wait for its own stream.
const QUEUED_SEGMENTS_MAX: u64 = 128;

/// A copy by which the start tells how large ones are divided.
const LARGE_BYTES: u64 = 256 << 20;

#[derive(Debug)]
pub struct StreamCopies {
    driver: &'static Driver,
    devices: Vec<Arc<Device>>,
    rates: Rates,
    gpu_directions: HashMap<(u16, Direction), GpuDirection>,
    pipelines: HashMap<(u16, Direction), Mutex<RelayPipeline>>,
    /// For copy streams' batches: a caller's thread queues its own stream copy.
    submit_pool: OnceLock<Option<SubmitPool>>,
    counters: Counters,
    /// Pipelines whose context was lost since the start, and their GPUs.
    losses: AtomicU64,
    lost: Mutex<HashSet<u16>>,
    peers: Peers,
    epoch: Instant,
}

/// Stream copies for one GPU in one direction.
#[derive(Debug)]
struct GpuDirection {
    target: u16,
    direction: Direction,
    relays: Vec<u16>,
    /// Whether there are peers that could relay and are not trusted to.
    has_untrusted: bool,
    path_set: Mutex<PathSet>,
    meter: Mutex<Meter>,
    /// Held by whoever waits until nothing is under way.
    settling: Mutex<()>,
    /// When a copy of its own was last asked for; 0 if never.
    used_us: AtomicU64,
    /// When that was at the same time as a copy of another GPU; 0 if never.
    crowded_us: AtomicU64,
}

impl GpuDirection {
    fn was_used(&self, now_us: u64, within_us: u64) -> bool {
        is_within(self.used_us.load(Ordering::Relaxed), now_us, within_us)
    }

    fn was_crowded(&self, now_us: u64) -> bool {
        is_within(self.crowded_us.load(Ordering::Relaxed), now_us, CONCURRENT_LOADS_HOLD_US)
    }
}

fn is_within(then_us: u64, now_us: u64, within_us: u64) -> bool {
    then_us > 0 && now_us.saturating_sub(then_us) < within_us
}

impl StreamCopies {
    /// StreamCopies over GPUs that are open, of which some relay for each other. Staging and
    /// streams are made here and nowhere else. A GPU that has no room for them has none, and is no
    /// relay: it is logged.
    pub fn new(driver: &'static Driver, gpus: &[Arc<Kernels>], peers: Peers, rates: Rates) -> StreamCopies {
        let mut stream_copies = StreamCopies {
            driver,
            devices: gpus.iter().map(|gpu| Arc::clone(gpu.device())).collect(),
            rates,
            gpu_directions: HashMap::new(),
            pipelines: HashMap::new(),
            submit_pool: OnceLock::new(),
            counters: Counters::default(),
            losses: AtomicU64::new(0),
            lost: Mutex::default(),
            peers,
            epoch: Instant::now(),
        };
        for gpu in gpus {
            let own = gpu.device().index();
            let served: Vec<_> = gpus
                .iter()
                .filter(|other| stream_copies.peers.relay(own, other.device().index()))
                .cloned()
                .collect();
            if let Err(error) = stream_copies.add_pipelines(gpu, &served) {
                tracing::warn!(gpu = own, reason = %error, "GPU is no relay");
            }
        }
        for gpu in gpus {
            if let Err(error) = stream_copies.add_directions(gpu) {
                let own = gpu.device().index();
                tracing::warn!(gpu = own, reason = %error, "GPU copies over its own link alone");
            }
            stream_copies.log_start(gpu.device().index());
        }
        stream_copies
    }

    /// What a GPU needs to relay for others, in both directions or none.
    fn add_pipelines(&mut self, gpu: &Arc<Kernels>, served: &[Arc<Kernels>]) -> Result<(), CudaError> {
        if served.is_empty() {
            return Ok(());
        }
        let pipeline = |direction| {
            let made = RelayPipeline::new(direction, gpu, served, PIPELINE_SLOTS, PIPELINE_SLOT_BYTES)?;
            Ok(((gpu.device().index(), direction), Mutex::new(made)))
        };
        let pipelines: Result<Vec<_>, CudaError> = Direction::BOTH.into_iter().map(pipeline).collect();
        self.pipelines.extend(pipelines?);
        Ok(())
    }

    /// What stream copies of a GPU's own need, in both directions or none.
    fn add_directions(&mut self, gpu: &Arc<Kernels>) -> Result<(), CudaError> {
        let own = gpu.device().index();
        let gpu_direction = |direction| {
            let is_relay = |other: &u16| {
                self.peers.relay(own, *other) && self.pipelines.contains_key(&(*other, direction))
            };
            let relays: Vec<u16> = self.devices.iter().map(|other| other.index()).filter(is_relay).collect();
            let made = GpuDirection {
                target: own,
                direction,
                meter: Mutex::new(self.meter(direction, own, &relays)?),
                relays,
                has_untrusted: self.peers.has_untrusted(own),
                path_set: Mutex::new(PathSet::new(direction, gpu)?),
                settling: Mutex::new(()),
                used_us: AtomicU64::new(0),
                crowded_us: AtomicU64::new(0),
            };
            Ok(((own, direction), made))
        };
        let gpu_directions: Result<Vec<_>, CudaError> =
            Direction::BOTH.into_iter().map(gpu_direction).collect();
        self.gpu_directions.extend(gpu_directions?);
        Ok(())
    }

    pub fn rates(&self) -> &Rates {
        &self.rates
    }

    pub(crate) fn set_rates(&mut self, rates: Rates) -> Result<(), CudaError> {
        self.rates = rates;
        for own in self.gpu_directions.values() {
            *own.meter.lock() = self.meter(own.direction, own.target, &own.relays)?;
        }
        Ok(())
    }

    pub(crate) fn devices(&self) -> &[Arc<Device>] {
        &self.devices
    }

    pub fn peers(&self) -> &Peers {
        &self.peers
    }

    pub fn has_relays(&self, device: u16) -> bool {
        self.gpu_directions
            .get(&(device, Direction::HostToDevice))
            .is_some_and(|gpu_direction| !gpu_direction.relays.is_empty())
    }

    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Copies pieces in the caller's stream: after everything that is in it, before everything that
    /// comes. All pieces go the same direction, between host memory and one GPU. The stream null is
    /// the legacy default stream of the current context.
    ///
    /// # Safety
    ///
    /// What holds for `cuMemcpyAsync` holds for every piece.
    pub unsafe fn copy(&self, pieces: &[Piece], stream: StreamHandle) -> Result<(), DeclineReason> {
        // SAFETY: by this function's contract.
        unsafe { self.copy_asked(pieces, None, stream) }
    }

    /// As [`copy`](StreamCopies::copy), for a caller who may have said in which direction it is to
    /// go: another one is the driver's to refuse.
    ///
    /// # Safety
    ///
    /// As for [`copy`](StreamCopies::copy).
    pub(crate) unsafe fn copy_asked(
        &self,
        pieces: &[Piece],
        asked: Option<Direction>,
        stream: StreamHandle,
    ) -> Result<(), DeclineReason> {
        // SAFETY: by this function's contract.
        let copied = unsafe { self.queue(pieces, asked, stream) };
        if let Err(why) = copied {
            self.counters.decline(why);
        }
        copied
    }

    /// What a GPU's copies begin with: its relays, its link's rates, and what goes direct of a
    /// large copy.
    fn log_start(&self, gpu: u16) {
        let [h2d, d2h] = Direction::BOTH.map(|direction| {
            let own = self.gpu_directions.get(&(gpu, direction));
            let paths = self.rates.paths(direction, gpu, own.map_or(&[], |own| &own.relays));
            let batch = plan::Batch { bytes: LARGE_BYTES, probe: None };
            let direct_bytes = plan::shares(&paths, batch)[0];
            (paths.paths.len() - 1, paths.paths[0].bytes_per_s / 1e9, 100 * direct_bytes / LARGE_BYTES)
        });
        tracing::info!(
            gpu,
            relays = h2d.0,
            h2d_gb_per_s = h2d.1,
            d2h_gb_per_s = d2h.1,
            h2d_direct_percent = h2d.2,
            d2h_direct_percent = d2h.2,
            "GPU copies over its links"
        );
    }

    /// Waits until no stream copy for a GPU in a direction has anything under way outside of the
    /// stream that it is in: what is in that waits for the rest, unless a call was refused.
    pub fn settle_direction(&self, device: u16, direction: Direction) {
        let Some(gpu_direction) = self.gpu_directions.get(&(device, direction)) else { return };
        let _relaxed = Relaxed::enter(self.driver);
        // One at a time: what the second one finds lost must not have been regained and given away
        // meanwhile.
        let _settling = gpu_direction.settling.lock();
        let Some(done) = gpu_direction.path_set.lock().settle() else { return };
        for pipeline in
            gpu_direction.relays.iter().filter_map(|relay| self.pipelines.get(&(*relay, direction)))
        {
            let mut pipeline = pipeline.lock();
            // What it does for another GPU may be behind a stream that somebody holds up.
            if pipeline.works_until(&done) {
                pipeline.settle();
            }
        }
        // A path set that is lost has had no stream copy since.
        gpu_direction.path_set.lock().regain();
    }

    /// As [`settle_direction`](StreamCopies::settle_direction), if nothing is under way now: nobody
    /// waits.
    fn settle_if_quiet(&self, gpu_direction: &GpuDirection) {
        let Some(_settling) = gpu_direction.settling.try_lock() else { return };
        let Some(done) = gpu_direction.path_set.lock().lost_and_quiet() else { return };
        let pipelines = gpu_direction
            .relays
            .iter()
            .filter_map(|relay| self.pipelines.get(&(*relay, gpu_direction.direction)));
        for pipeline in pipelines {
            let Some(mut pipeline) = pipeline.try_lock() else { return };
            if pipeline.works_until(&done) {
                if !pipeline.is_quiet() {
                    return;
                }
                pipeline.regain();
            }
        }
        gpu_direction.path_set.lock().regain();
    }

    /// Relays whose context was lost so far. What one of them had a part in while the number rose
    /// may not have arrived, whatever the driver says of the stream that waited for it.
    pub fn losses(&self) -> u64 {
        self.losses.load(Ordering::Acquire)
    }

    /// Finds out which relays of a GPU are lost, and says how many were so far.
    pub fn look_after_relays(&self, device: u16, direction: Direction) -> u64 {
        let gpu_direction = self.gpu_directions.get(&(device, direction));
        for relay in gpu_direction.iter().flat_map(|gpu_direction| &gpu_direction.relays) {
            if let Some(pipeline) = self.pipelines.get(&(*relay, direction)) {
                self.look_after(*relay, &mut pipeline.lock());
            }
        }
        self.losses()
    }

    fn look_after(&self, relay: u16, pipeline: &mut RelayPipeline) {
        let Some(error) = pipeline.look_after() else { return };
        self.losses.fetch_add(1, Ordering::Release);
        // It relays in both directions, and is said to be lost once.
        if self.lost.lock().insert(relay) {
            tracing::warn!(gpu = relay, reason = %error, "relay lost");
        }
    }

    /// As [`copy`](StreamCopies::copy), with its contract.
    unsafe fn queue(
        &self,
        pieces: &[Piece],
        asked: Option<Direction>,
        stream: StreamHandle,
    ) -> Result<(), DeclineReason> {
        let outline = Outline::of(pieces);
        let bytes = outline.bytes;
        if bytes < self.rates.least_bytes() {
            return Err(DeclineReason::Small);
        }
        check_capture(self.driver, stream)?;
        let _relaxed = Relaxed::enter(self.driver);
        let device = self.device_of(stream)?;
        let Inspected { device: target, direction, pieces, seams, peers_reach } =
            inspect(self.driver, pieces, &outline)?;
        if asked.is_some_and(|asked| asked != direction) {
            return Err(DeclineReason::DriverJudges);
        }
        if device.index() != target {
            return Err(DeclineReason::ForeignContext);
        }
        if bytes < self.rates.of(direction).break_even_bytes {
            return Err(DeclineReason::Small);
        }
        let gpu_direction = self.gpu_directions.get(&(target, direction)).ok_or(DeclineReason::NoRelay)?;
        self.note(gpu_direction);
        let _current = device.enter().map_err(|_| DeclineReason::Fault)?;
        let holder = device.id_of(stream).map_err(|_| DeclineReason::Fault)?;
        let mut path_set = gpu_direction.path_set.lock();
        if path_set.is_lost() {
            drop(path_set);
            self.settle_if_quiet(gpu_direction);
            path_set = gpu_direction.path_set.lock();
        }
        let idle =
            path_set.take(stream, holder).map_err(|_| DeclineReason::Fault)?.ok_or(DeclineReason::Busy)?;
        let pages_are_small = is_small(pieces.len(), bytes);
        // Host memory in small pieces is the target's own kernels' to read or write: copy engines
        // would need a call for each.
        let is_scattered = pages_are_small && is_small(outline.host_runs(direction), bytes);
        let mut division = match is_scattered {
            true => Division::direct(bytes),
            false => self.divide(gpu_direction, holder, bytes),
        };
        // Small pages gain from a stream copy of their own GPU alone: its kernels deal with them,
        // not a call for each.
        if division.pipelines.is_empty() && !pages_are_small {
            return Err(match gpu_direction.relays.is_empty() {
                true if gpu_direction.has_untrusted => DeclineReason::Untrusted,
                true => DeclineReason::NoRelay,
                false => DeclineReason::Busy,
            });
        }
        let by_segments = division.shares.iter().skip(usize::from(!pages_are_small));
        let segments = by_segments.max().copied().unwrap_or(0) / PIPELINE_SLOT_BYTES;
        if !idle && segments > QUEUED_SEGMENTS_MAX {
            return Err(DeclineReason::Busy);
        }
        let places = path_set.room_for(pieces.len()).ok_or(DeclineReason::Busy)?;
        let direct_bytes = division.shares[0];
        let pages = Pages::new(&pieces, bytes);
        let waits = if idle { Waits::Nothing } else { Waits::Stream };
        let (joined, seams) = (stream, &*seams);
        let stream_copy = StreamCopy {
            stream,
            joined,
            holder,
            pages,
            seams,
            peers_reach,
            is_scattered,
            awaited_bytes: None, // Nobody knows what the GPU computes meanwhile.
            places,
            waits,
            submit_pool: None,
        };
        division.begin(gpu_direction);
        // SAFETY: by this function's contract; the path set was taken and the target's context is
        // current.
        let queued = unsafe { path_set.queue(stream_copy, &mut division) };
        division.queued(gpu_direction);
        // After an error some of it is in the stream and does no harm: the driver copies the same
        // bytes again, behind it.
        queued.map_err(|_| DeclineReason::Fault)?;
        self.counters.count(direct_bytes, bytes - direct_bytes);
        Ok(())
    }

    /// Waits until a stream has come to its end; gives the driver's status. What other threads have
    /// put into the stream since the copy is waited for too. They cannot know that it came second:
    /// they call at the same time as the copy's caller.
    pub(crate) fn wait(&self, stream: StreamHandle) -> abi::Status {
        let _relaxed = Relaxed::enter(self.driver);
        // SAFETY: the stream is the caller's.
        unsafe { (self.driver.table().stream_synchronize)(stream) }
    }

    /// As [`copy`](StreamCopies::copy), and waits until the stream has come to its end; gives the
    /// driver's status. If a relay was lost meanwhile, the driver has copied it all again.
    ///
    /// # Safety
    ///
    /// As for [`copy`](StreamCopies::copy).
    pub(crate) unsafe fn copy_and_wait(
        &self,
        pieces: &[Piece],
        asked: Option<Direction>,
        stream: StreamHandle,
    ) -> Result<abi::Status, DeclineReason> {
        let before = self.losses();
        // SAFETY: by this function's contract.
        unsafe { self.copy_asked(pieces, asked, stream)? };
        let status = self.wait(stream);
        if status != abi::SUCCESS || !self.is_any_lost_since(before) {
            return Ok(status);
        }
        for piece in pieces {
            let Piece { from, to, bytes } = *piece;
            // SAFETY: by this function's contract.
            let status = unsafe { (self.driver.table().copy_async)(to, from, bytes as abi::Size, stream) };
            if status != abi::SUCCESS {
                return Ok(status);
            }
        }
        Ok(self.wait(stream))
    }

    /// Whether a relay was lost since there were so many losses.
    fn is_any_lost_since(&self, before: u64) -> bool {
        let _relaxed = Relaxed::enter(self.driver);
        for ((relay, _), pipeline) in &self.pipelines {
            self.look_after(*relay, &mut pipeline.lock());
        }
        self.losses() != before
    }

    /// Whether a stream is being captured into a graph.
    pub fn is_captured(&self, stream: StreamHandle) -> bool {
        check_capture(self.driver, stream).is_err()
    }

    /// The GPU whose primary context a stream belongs to.
    fn device_of(&self, stream: StreamHandle) -> Result<Arc<Device>, DeclineReason> {
        let mut context = std::ptr::null_mut();
        let table = self.driver.table();
        let is_default = stream as usize <= abi::PER_THREAD_STREAM as usize;
        // SAFETY: the result is written to a valid place; the stream is the caller's.
        let status = unsafe {
            if is_default {
                (table.context_current)(&mut context)
            } else {
                (table.stream_context)(stream, &mut context)
            }
        };
        let device = self.devices.iter().find(|device| device.context() == context);
        device.filter(|_| status == abi::SUCCESS).cloned().ok_or(DeclineReason::ForeignContext)
    }
}

/// Whether a copy could go over several links, as far as can be told before any GPU but the
/// program's own is used.
pub(crate) fn is_candidate(
    driver: &'static Driver,
    pieces: &[Piece],
    asked: Option<Direction>,
    stream: StreamHandle,
) -> Result<(), DeclineReason> {
    let outline = Outline::of(pieces);
    if outline.bytes < Rates::default().least_bytes() {
        return Err(DeclineReason::Small);
    }
    check_capture(driver, stream)?;
    let _relaxed = Relaxed::enter(driver);
    let direction = inspect(driver, pieces, &outline)?.direction;
    if asked.is_some_and(|asked| asked != direction) { Err(DeclineReason::DriverJudges) } else { Ok(()) }
}

fn check_capture(driver: &Driver, stream: StreamHandle) -> Result<(), DeclineReason> {
    let mut status = abi::CAPTURE_NONE;
    // SAFETY: the status is written to a valid place; the stream is the caller's. The legacy stream
    // answers with an error while another stream is captured.
    let asked = unsafe { (driver.table().stream_is_capturing)(stream, &mut status) };
    if asked == abi::SUCCESS && status == abi::CAPTURE_NONE { Ok(()) } else { Err(DeclineReason::Capturing) }
}
