//! Copies between an arena and a cache on a GPU: the contract of [`copies`](crate::copies), kept by
//! copy streams and events. Nobody on the host waits for a copy: an engine's stream does, and who
//! wants to know an end is told by a thread that sleeps until then. This folder vouches for
//! addresses of the cache and the arena.
//!
//! - [`queue`] says how much is on its way, [`segment`] how a batch is cut.
//! - [`job`] knows what a load or store waits for, [`stalls`] how long an engine's stream did,
//!   [`arenas`] what is pinned.
//! - [`links`] knows over which links copies go, [`relayed`] has large ones carried by the node's
//!   relays too: those the host sees end.

mod arenas;
mod job;
mod links;
mod queue;
mod relayed;
mod segment;
mod stalls;

use crate::cache::CacheShape;
use crate::copies::{Copies, Direction, Job, NotCopied, Relayed};
use arenas::Arenas;
use forebay_client::NodeArena;
use forebay_cuda::checksum::Checksums;
use forebay_cuda::device::{Device, Event};
use forebay_cuda::driver::{CudaError, Driver, Relaxed, abi::StreamHandle};
use forebay_cuda::event_waiter::EventWaiter;
use forebay_cuda::remote::NodeRelays;
use forebay_cuda::stream_copy::{self, AWAITED_BATCH_BYTES_MIN, Batch, CopyStream, Sent};
use forebay_transfer::RegionId;
use forebay_transfer::lock::Mutex;
use job::{GpuJob, Route, Segment};
use links::Links;
use queue::{Queue, QueueLimit};
use relayed::Returns;
use stalls::{EventPool, Stalls};
use std::sync::Arc;
use std::time::Duration;

/// Batches of one load that may be on their way: each is a layer, and the copy stream takes what it
/// can carry. Of a short load it may be all that [`LOAD_LIMIT`] has room for, so that no link and
/// no engine waits until threads have seen that a layer has ended.
const BATCHES_MIN: usize = 8;
/// What is copied at a time. A PCIe link does 64 MiB in a millisecond; a thread sees its end well
/// before what follows has ended too.
const LOAD_SEGMENT_BYTES: u64 = 64 << 20;
/// Shorter, since a load that comes has to wait for the one that is on its way.
const STORE_SEGMENT_BYTES: u64 = 16 << 20;
/// What loads may have on their way: no more operations than the driver's queues hold.
const LOAD_LIMIT: QueueLimit = QueueLimit { segments: 32, bytes: 256 << 20 };
/// The same for short layers that an engine waits for. The driver lets one thread at a time queue
/// work: a thread that queues all layers of a prompt of 1k tokens at once, which takes it 3 ms,
/// keeps the engine's from queueing what computes the first of them. On an H100 such a prompt was
/// loaded and a token computed behind it after 7.7 ms so, and after 9.3 without a limit. Longer
/// layers are copied by calls that take long themselves: with fewer of these at a time 8k tokens
/// came after 33 instead of 25 ms.
const SHORT_LAYERS_LIMIT: QueueLimit = QueueLimit { segments: 4, bytes: 256 << 20 };
/// The same for stores, while there are no loads and while there are.
const STORE_LIMIT: QueueLimit = QueueLimit { segments: 16, bytes: 128 << 20 };
const YIELDING_LIMIT: QueueLimit = QueueLimit { segments: 1, bytes: 0 };
/// Loads at a time for which an engine's thread makes no events.
const LOADS_TIMED: usize = 2;

#[derive(Debug)]
pub struct CudaCopies(Arc<Gpu>);

/// A GPU, what is on its way in each direction, and the arenas that it reaches.
#[derive(Debug)]
pub struct Gpu {
    cache: CacheShape,
    /// Whether peers reach all of the cache.
    is_open: bool,
    device: Arc<Device>,
    // Dropped in this order: threads that wait, what they wait for, and the driver's things that
    // all of it uses.
    begins: EventWaiter,
    /// Where the node relays.
    returns: Option<Returns>,
    loads: Sender,
    stores: Sender,
    arenas: Arenas,
    events: EventPool,
    checksums: Arc<Checksums>,
    links: Links,
}

/// One direction: what waits, and the copy stream that it goes by.
#[derive(Debug)]
struct Sender {
    ends: EventWaiter,
    copy_stream: CopyStream,
    queue: Mutex<Queue<Segment>>,
}

/// The limit for what an engine waits for, if it does: by the bytes that it waits for together.
fn limit_of(awaited_bytes: Option<u64>, usual: QueueLimit) -> QueueLimit {
    let is_short = awaited_bytes.is_some_and(|bytes| bytes < AWAITED_BATCH_BYTES_MIN);
    if is_short { SHORT_LAYERS_LIMIT } else { usual }
}

fn failed(error: impl ToString) -> NotCopied {
    NotCopied(error.to_string())
}

impl CudaCopies {
    /// The way to a cache in memory of the GPU of an ordinal, over the links of all GPUs that are
    /// visible but for its siblings; where it is the only one, over the node's relays too.
    ///
    /// # Safety
    ///
    /// The pages of the cache are memory of that GPU and stay so until everything that was begun
    /// has ended.
    pub unsafe fn new(
        cache: &CacheShape,
        device: u16,
        siblings: &[u16],
        relays: &NodeRelays,
    ) -> Result<CudaCopies, NotCopied> {
        let driver = Driver::load().map_err(failed)?;
        let links = Links::open(driver, device, siblings, relays)?;
        let stream_copies = links.stream_copies();
        let sender = |direction, name| {
            let no_device = || failed(format!("device: {device} is not visible"));
            let copy_stream =
                stream_copies.copy_stream(device, direction).ok_or_else(no_device)?.map_err(failed)?;
            let ends = EventWaiter::spawn(driver, name).map_err(failed)?;
            Ok(Sender { ends, copy_stream, queue: Mutex::default() })
        };
        let loads = sender(links::way(Direction::Load), "forebay-loads")?;
        let stores = sender(links::way(Direction::Store), "forebay-stores")?;
        let mut is_open = true;
        for (number, layer) in cache.layers().iter().enumerate() {
            let open = stream_copies.is_open(layer.address);
            is_open &= open.map_err(|why| failed(format!("layer {number} is not memory of a GPU: {why}")))?;
        }
        let device = Arc::clone(loads.copy_stream.device());
        let begins = EventWaiter::spawn(driver, "forebay-begins").map_err(failed)?;
        let checksums = Checksums::load(&device).map_err(failed)?;
        let events = EventPool::filled(&device, LOADS_TIMED * cache.layers().len()).map_err(failed)?;
        let (arenas, cache) = (Arenas::new(&device, links.with_node().is_some()), cache.clone());
        let returns = links.with_node().map(|_| Returns::spawn()).transpose().map_err(failed)?;
        Ok(CudaCopies(Arc::new(Gpu {
            cache,
            is_open,
            device,
            begins,
            returns,
            loads,
            stores,
            arenas,
            events,
            checksums,
            links,
        })))
    }

    /// The GPU, for who copies to and from its pages besides.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.0
    }
}

impl Copies for CudaCopies {
    fn begin(&self, direction: Direction, is_awaited: bool, stream: u64) -> Result<Arc<dyn Job>, NotCopied> {
        let begun = self.0.begun(stream)?;
        Ok(Arc::new(GpuJob::new(&self.0, direction, is_awaited, begun)))
    }

    fn region(&self, _layer: u32) -> Option<RegionId> {
        None
    }

    fn has_sums(&self) -> bool {
        true
    }

    fn batches_max(&self, bytes: u64) -> usize {
        let QueueLimit { segments, bytes: most } = LOAD_LIMIT;
        usize::try_from(most / bytes.max(1)).unwrap_or(segments).clamp(BATCHES_MIN, segments)
    }

    fn relayed(&self) -> Relayed {
        self.0.links.relayed(self.0.device.index())
    }

    fn meet(&self, arena: &Arc<NodeArena>) {
        // Should it fail, whoever copies from it is told why.
        let _ = self.0.arenas.of(arena);
    }

    fn close(&self) {
        self.0.arenas.close();
    }
}

impl Gpu {
    /// While it lives, this thread's calls do not break what others capture into graphs.
    pub fn relaxed(&self) -> Relaxed {
        Relaxed::enter(self.device.driver())
    }

    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub fn cache(&self) -> &CacheShape {
        &self.cache
    }

    pub fn checksums(&self) -> &Arc<Checksums> {
        &self.checksums
    }

    /// Passed when an engine's stream has come to where it is now.
    pub fn begun(&self, stream: u64) -> Result<Arc<Event>, NotCopied> {
        let _relaxed = self.relaxed();
        let _current = self.device.enter().map_err(failed)?;
        let stream = self.engine_stream(stream)?;
        let begun = Event::to_sleep_for(&self.device).map_err(failed)?;
        // SAFETY: the engine gives a stream that lives, and the device's context is current.
        unsafe { begun.record_behind(stream) }.map_err(failed)?;
        Ok(Arc::new(begun))
    }

    /// The most that is carried at a time.
    fn segment_bytes(direction: Direction) -> u64 {
        match direction {
            Direction::Load => LOAD_SEGMENT_BYTES,
            Direction::Store => STORE_SEGMENT_BYTES,
        }
    }

    /// An engine's stream comes to where it needs a layer, and passes behind the last copy of that.
    pub fn pass(
        &self,
        stream: u64,
        layer: u32,
        last: Arc<Event>,
        stalls: &mut Stalls,
    ) -> Result<(), NotCopied> {
        let _relaxed = self.relaxed();
        let _current = self.device.enter().map_err(failed)?;
        let stream = self.engine_stream(stream)?;
        // SAFETY: as in `begin`.
        unsafe { stalls.pass(&self.events, &self.device, layer, last, stream) }.map_err(failed)
    }

    /// An engine's stream comes to where it needs a layer.
    pub fn open_stall(&self, stream: u64, layer: u32, stalls: &mut Stalls) -> Result<(), NotCopied> {
        let _relaxed = self.relaxed();
        let _current = self.device.enter().map_err(failed)?;
        let stream = self.engine_stream(stream)?;
        // SAFETY: as in `begin`.
        unsafe { stalls.open(&self.events, &self.device, layer, stream) }.map_err(failed)
    }

    /// It may pass behind the last copy of that layer. The stream is that of
    /// [`open_stall`](Gpu::open_stall), which looked at it.
    pub fn close_stall(
        &self,
        stream: u64,
        layer: u32,
        last: Option<Arc<Event>>,
        stalls: &mut Stalls,
    ) -> Result<(), NotCopied> {
        let _relaxed = self.relaxed();
        let _current = self.device.enter().map_err(failed)?;
        // SAFETY: as in `begin`.
        unsafe { stalls.close(&self.device, layer, last, stream as StreamHandle) }.map_err(failed)
    }

    /// Of layers that an engine's stream has waited for, each and how long.
    pub fn take_stalls(&self, stalls: &mut Stalls) -> Vec<(u32, Duration)> {
        let _relaxed = self.relaxed();
        stalls.take(&self.events)
    }

    /// Calls back when an event in an engine's stream has passed.
    pub fn when_begun(&self, begun: Arc<Event>, then: impl FnOnce(Result<(), NotCopied>) + Send + 'static) {
        self.begins.when_passed(begun, Box::new(move |passed| then(passed.map_err(failed))));
    }

    /// Puts segments behind those that wait, and on their way as far as there is room.
    pub fn add(self: &Arc<Self>, direction: Direction, segments: Vec<Segment>) {
        if segments.is_empty() {
            return;
        }
        let mut queue = self.sender(direction).queue.lock();
        for segment in segments {
            let bytes = segment.bytes;
            queue.push(segment, bytes);
        }
        drop(queue);
        self.pump(direction);
    }

    fn sender(&self, direction: Direction) -> &Sender {
        match direction {
            Direction::Load => &self.loads,
            Direction::Store => &self.stores,
        }
    }

    /// Stores yield to loads: the host's memory and the GPU's kernels are theirs first.
    fn limit(&self, direction: Direction) -> QueueLimit {
        match direction {
            Direction::Load => LOAD_LIMIT,
            Direction::Store if self.loads.queue.lock().is_idle() => STORE_LIMIT,
            Direction::Store => YIELDING_LIMIT,
        }
    }

    /// Puts on their way what there is room for.
    fn pump(self: &Arc<Self>, direction: Direction) {
        let sender = self.sender(direction);
        loop {
            let usual = self.limit(direction);
            let next = sender.queue.lock().next(|segment: &Segment| segment.limit(usual));
            let Some((segment, bytes)) = next else { return };
            if !self.post(sender, segment, bytes) {
                return;
            }
        }
    }

    /// Puts a segment on its way. Says whether to go on with the next one.
    fn post(self: &Arc<Self>, sender: &Sender, mut segment: Segment, bytes: u64) -> bool {
        let stream_copies = self.links.stream_copies();
        let (losses, direction) = (stream_copies.losses(), segment.job.direction());
        let is_copied = match std::mem::replace(&mut segment.route, Route::Stream) {
            Route::Stream => false,
            Route::Relayed(hosts) => {
                self.relay(segment, bytes, hosts);
                return true;
            }
            Route::Back(Ok(())) => true,
            Route::Back(Err(why)) => {
                self.drop_segment(sender, segment, bytes, why);
                return true;
            }
        };
        let own = self.links.own_copy(self.device.index(), direction, bytes).filter(|_| !is_copied);
        let (sent, event) = match self.send(sender, &segment, is_copied) {
            Ok(sent) => sent,
            Err(error) => {
                // What did get in is over, or its context is lost.
                stream_copies.settle(&sender.copy_stream);
                self.drop_segment(sender, segment, bytes, failed(error));
                return true;
            }
        };
        let Sent::Queued(queued) = sent else {
            // By itself: `drop_segment` takes the lock as well.
            let later = sender.queue.lock().later(segment, bytes);
            return match later {
                Ok(again) => again,
                Err(segment) => {
                    let why = failed("others have all places of lists");
                    self.drop_segment(sender, segment, bytes, why);
                    true
                }
            };
        };
        segment.is_posted(&event);
        let gpu = Arc::clone(self);
        let on_passed = move |passed: Result<(), CudaError>| {
            drop(own);
            // What a relay carried that was lost meanwhile may not have arrived, whatever the
            // driver says.
            let copy_stream = &gpu.sender(direction).copy_stream;
            let ended = queued.and_then(|links| passed.map(|()| links)).and_then(|links| match links {
                stream_copy::Links::Own => Ok(()),
                stream_copy::Links::Several => gpu.links.stream_copies().is_whole_since(losses, copy_stream),
            });
            gpu.ended(segment, bytes, ended);
        };
        sender.ends.when_passed(event, Box::new(on_passed));
        // Last: from here on another thread may post. Events are noted and waited for in the order
        // of the queue, or a layer's last event would be that of an earlier segment.
        sender.queue.lock().posted();
        true
    }

    /// Queues a segment in its copy stream: its copies, unless it is copied, and its sums.
    fn send(
        &self,
        sender: &Sender,
        segment: &Segment,
        is_copied: bool,
    ) -> Result<(Sent, Arc<Event>), CudaError> {
        let _relaxed = self.relaxed();
        let Segment { job, pieces, .. } = segment;
        // Of a load it says when an engine's stream, which waited for that, could go on.
        let event = Arc::new(match job.direction() {
            Direction::Load => Event::with_time(&self.device)?,
            Direction::Store => Event::to_sleep_for(&self.device)?,
        });
        let (stream_copies, copy_stream) = (self.links.stream_copies(), &sender.copy_stream);
        if is_copied {
            // SAFETY: as below; what the mover copied is there, and nothing of it is under way.
            return Ok((unsafe { stream_copies.join(copy_stream, segment.sums(), &event)? }, event));
        }
        let (after, awaited_bytes, sums) = (job.after(), segment.awaited_bytes(), segment.sums());
        let batch = Batch { pieces, after, is_open: self.is_open, awaited_bytes, sums };
        // SAFETY: pages are valid and the connector's by the contract of `new`; the segment keeps
        // the arena mapped and pinned, and the list of what is summed up.
        let sent = unsafe { stream_copies.send(copy_stream, &batch, &event)? };
        Ok((sent, event))
    }

    /// A segment that was taken ends without having been on its way.
    fn drop_segment(&self, sender: &Sender, segment: Segment, bytes: u64, why: NotCopied) {
        let mut queue = sender.queue.lock();
        queue.posted();
        queue.ended(bytes);
        drop(queue);
        segment.drop_for(why);
    }

    /// A segment has ended, and others have room.
    fn ended(self: &Arc<Self>, segment: Segment, bytes: u64, outcome: Result<(), CudaError>) {
        let direction = segment.job.direction();
        let sender = self.sender(direction);
        if outcome.is_err() {
            // Other streams may still be at work on it.
            self.links.stream_copies().settle(&sender.copy_stream);
        }
        segment.end(outcome.map_err(failed));
        sender.queue.lock().ended(bytes);
        self.pump(direction);
        if direction == Direction::Load && sender.queue.lock().is_idle() {
            self.pump(Direction::Store);
        }
    }

    /// A stream that the engine gave, unless it is being captured: nothing of ours belongs into a
    /// graph. The device was entered.
    fn engine_stream(&self, stream: u64) -> Result<StreamHandle, NotCopied> {
        let stream = stream as StreamHandle;
        if self.links.stream_copies().is_captured(stream) {
            return Err(failed("the stream is being captured into a graph"));
        }
        Ok(stream)
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        self.arenas.close();
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod checked;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
