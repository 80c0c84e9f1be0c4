//! A path set: what stream copies for one GPU in one direction have in common. While a stream copy
//! is under way, only a stream copy of the same stream may use its path set, which waits for the
//! first one anyway; so no stream copy ever waits for one that it would not wait for without us.

use super::direct::{Direct, Row};
use super::division::Division;
use super::kernel_list::KernelList;
use super::list_memory::ListMemory;
use super::pages::{Pages, are_shorter};
use super::queued::{StreamCopy, Waits, is_small};
use super::relay_pipeline::{How, RelayPipeline, Work};
use crate::device::{Event, StreamId};
use crate::driver::abi::StreamHandle;
use crate::driver::{CudaError, Relaxed};
use crate::kernels::Kernels;
use crate::links::{Direction, ENGINE_PIECE_BYTES};
use std::ops::Range;
use std::sync::Arc;

/// Slots of the target's own pipeline, for pages too small for a copy engine. While an engine
/// computes, a segment's kernel waits until one of the engine's has ended: beside a prefill these
/// carried 16 to 22 GB/s on an H200, four of 8 MiB 33. Those would be more than the 64 MiB that a
/// GPU gives in all.
const OWN_SLOTS: u64 = 3;
const OWN_SLOT_BYTES: u64 = 2 << 20;
/// A share is cut into this many segments at least, if they are not too small then, so that its two
/// hops overlap.
const SEGMENTS: u64 = 4;
const SEGMENT_BYTES_MIN: u64 = 512 << 10;
/// The same where the target's kernel needs no slot, so that nothing overlaps: a call costs more
/// then than a segment gains.
const STRAIGHT_SEGMENT_BYTES_MIN: u64 = 8 << 20;
/// Pages as long as this on average go through a relay in slot streams. Shorter ones were not tried
/// so.
const SLOT_STREAM_PIECE_BYTES: u64 = 48 << 10;
/// What is awaited goes by kernels if its pieces are shorter than this on average, though long
/// enough for a copy engine: behind each call there is a gap, in which a kernel reads on. The first
/// token of a prompt of 8k tokens came after 49 ms on an H200 by calls for 256 KiB each, after 43
/// with 512 KiB.
const AWAITED_CALL_BYTES_MIN: u64 = 1 << 20;

/// Everything that stream copies for one GPU in one direction need, but for the pipelines of its
/// peers.
#[derive(Debug)]
pub struct PathSet {
    target: Arc<Kernels>,
    direct: Direct,
    own: RelayPipeline,
    /// Passed when the caller's stream has come to the copy.
    begun: Event,
    /// Passed when the last stream copy is done.
    done: Arc<Event>,
    lists: ListMemory,
    /// Whose stream copy is under way.
    holder: Option<StreamId>,
    /// The driver refused what was to tell where a stream copy ends, so nobody knows when the path
    /// set is free.
    is_lost: bool,
}

impl PathSet {
    pub fn new(direction: Direction, target: &Arc<Kernels>) -> Result<PathSet, CudaError> {
        let (device, itself) = (target.device(), std::slice::from_ref(target));
        Ok(PathSet {
            target: Arc::clone(target),
            direct: Direct::new(target)?,
            own: RelayPipeline::new(direction, target, itself, OWN_SLOTS, OWN_SLOT_BYTES)?,
            begun: Event::new(device)?,
            done: Arc::new(Event::new(device)?),
            lists: ListMemory::new(device)?,
            holder: None,
            is_lost: false,
        })
    }

    pub fn is_busy(&mut self) -> bool {
        let passed = self.holder.is_none() || self.done.is_passed().unwrap_or(false);
        if passed && !self.is_lost {
            self.holder = None;
        }
        !passed || self.is_lost
    }

    /// Takes the path set for a stream copy of a stream. Says whether the stream is idle, so that
    /// the stream copy begins at once, or `None` when a stream copy of another stream has the path
    /// set.
    pub fn take(&mut self, stream: StreamHandle, holder: StreamId) -> Result<Option<bool>, CudaError> {
        if !self.take_at_once(holder) {
            return Ok(None);
        }
        self.begun.record_in(stream)?;
        self.begun.is_passed().map(Some)
    }

    /// Takes the path set for a stream copy that ends in a stream, whatever is in that. `false`: a
    /// stream copy of another stream has it.
    pub fn take_at_once(&mut self, joined: StreamId) -> bool {
        !self.is_busy() || (self.holder == Some(joined) && !self.is_lost)
    }

    /// Where a stream copy of so many pieces can have its lists; `None` until stream copies that
    /// are under way have come further.
    pub fn room_for(&mut self, pieces: usize) -> Option<Range<usize>> {
        self.lists.room_for(pieces)
    }

    /// Queues a stream copy over the target's own PCIe link and pipelines that are free for its
    /// stream. Whatever it returns, the joined stream goes on only when everything that was queued
    /// is over.
    ///
    /// # Safety
    ///
    /// The path set was taken for the stream copy's stream and the target's context is current.
    /// Until the stream has passed the stream copy, the pieces are valid for all contexts as far as
    /// they are host memory and for the target's as far as they are its, and the rules of a copy in
    /// that stream hold for who else may use them.
    pub unsafe fn queue(
        &mut self,
        mut stream_copy: StreamCopy,
        division: &mut Division,
    ) -> Result<(), CudaError> {
        self.holder = Some(stream_copy.holder);
        let Division { pipelines, shares, parts, .. } = division;
        let (share, is_beside) = (stream_copy.pages.share(shares[0]), shares.len() > 1);
        let by_batch = self.direct.goes_by_batch(&stream_copy, share);
        let (direct_part, relay_parts) = parts.split_at_mut(1);
        let mut direct_part = direct_part[0].as_mut();
        let call_bytes =
            if stream_copy.awaited_bytes.is_some() { AWAITED_CALL_BYTES_MIN } else { ENGINE_PIECE_BYTES };
        let by_kernel = !by_batch && are_shorter(call_bytes, share.pieces(), share.bytes());
        let begun = match stream_copy.waits {
            Waits::Nothing => None,
            Waits::Stream => Some(&self.begun),
            Waits::For(event) => Some(event),
        };
        let mut at_work: Vec<(&mut RelayPipeline, Work)> = Vec::with_capacity(pipelines.len() + 1);
        if by_kernel {
            let is_straight = stream_copy.is_scattered || !is_small(share.pieces(), share.bytes());
            let how = if is_straight { How::Straight } else { How::Handover };
            let work = Work { call_bytes, part: direct_part.take(), ..work(share, &self.own, how) };
            at_work.push((&mut self.own, work));
        }
        for ((pipeline, share), part) in pipelines.iter_mut().zip(&shares[1..]).zip(relay_parts) {
            let pages = stream_copy.pages.share(*share);
            let how = how_to_relay(pipeline.direction(), pages, stream_copy.peers_reach);
            let work = Work { part: part.as_mut(), ..work(pages, pipeline, how) };
            at_work.push((&mut **pipeline, work));
        }
        let target = self.target.device().index();
        let mut list = self.lists.open(&stream_copy.places, stream_copy.seams);
        let order = Order { holder: stream_copy.holder, done: &self.done, begun, target: &self.target };
        let (direct, is_direct) = (&mut self.direct, !by_kernel);
        let mut direct = || match is_direct {
            // SAFETY: by this function's contract.
            true => unsafe {
                let row = Row { pages: share, by_batch, is_beside, part: direct_part.take() };
                direct.queue(&stream_copy, row)
            },
            false => Ok(()),
        };
        let (whole, queued) = match stream_copy.submit_pool {
            Some(submit_pool) => {
                let (own, relays) = at_work.split_at_mut(usize::from(by_kernel));
                let parts: Vec<_> =
                    relays.iter_mut().map(|work| (list.part(work.1.places()), work)).collect();
                let each = |(mut list, work)| order.queue_here(std::slice::from_mut(work), &mut list);
                submit_pool.beside(parts, each, || direct().and(order.queue(own, &mut list)))
            }
            // Few calls for the direct path, so that the PCIe link is at work while the rest is
            // queued.
            None => (direct(), order.queue(&mut at_work, &mut list)),
        };
        let listed = stream_copy.places.len() - list.left();
        // All of them, also after an error.
        let joins = at_work.iter().map(|(pipeline, work)| pipeline.join(stream_copy.joined, target, work));
        let joined = joins.fold(Ok(()), Result::and);
        let read =
            self.lists.close(stream_copy.places.start..stream_copy.places.start + listed, stream_copy.joined);
        let ended = joined.and(read).and(self.done.record_in(stream_copy.joined));
        if ended.is_err() {
            self.is_lost = true;
            // Those that did not begin are not this path set's to wait for.
            let begun = at_work.iter_mut().filter(|(pipeline, _)| pipeline.works_until(&self.done));
            begun.for_each(|(pipeline, _)| pipeline.lose());
        }
        whole.and(queued).and(ended)
    }

    /// If the path set is lost, waits until nothing of the target's own pipeline is under way. Says
    /// until when its other pipelines work: it is lost until all of these have been waited for too,
    /// and [`regain`](PathSet::regain) is told.
    pub fn settle(&mut self) -> Option<Arc<Event>> {
        // What is not lost is behind the stream of its stream copy, which may be anybody's.
        if !self.is_lost {
            return None;
        }
        self.own.settle();
        Some(Arc::clone(&self.done))
    }

    /// If the path set is lost and nothing of the target's own pipeline is under way, says until
    /// when its other pipelines work.
    pub fn lost_and_quiet(&self) -> Option<Arc<Event>> {
        (self.is_lost && self.own.is_quiet()).then(|| Arc::clone(&self.done))
    }

    /// Whether the driver refused what was to tell where a stream copy ends.
    pub fn is_lost(&self) -> bool {
        self.is_lost
    }

    /// Nothing of any stream copy is under way any more.
    pub fn regain(&mut self) {
        self.own.regain();
        self.lists.clear();
        self.holder = None;
        self.is_lost = false;
    }
}

/// How a relay works. Kernels of the target wait for room on it while an engine computes, and what
/// the engine waits for comes late. So pages that are long enough for few blocks of a relay's
/// kernel to keep up with its link are not left to these.
pub fn how_to_relay(direction: Direction, pages: Pages, peers_reach: bool) -> How {
    let least = match direction {
        Direction::HostToDevice => SLOT_STREAM_PIECE_BYTES,
        Direction::DeviceToHost => ENGINE_PIECE_BYTES,
    };
    if peers_reach && !are_shorter(least, pages.pieces(), pages.bytes()) {
        How::SlotStreams
    } else {
        How::Handover
    }
}

/// What a pipeline is to do with its share.
fn work<'a>(pages: Pages<'a>, pipeline: &RelayPipeline, how: How) -> Work<'a> {
    let segment_bytes = match how {
        How::Straight => (pages.bytes() / SEGMENTS).max(STRAIGHT_SEGMENT_BYTES_MIN),
        _ => (pages.bytes() / SEGMENTS).max(SEGMENT_BYTES_MIN).min(pipeline.slot_bytes()),
    };
    let segments = pages.bytes().div_ceil(segment_bytes);
    let call_bytes = ENGINE_PIECE_BYTES;
    Work { how, slots: pipeline.slots_for(segments, how), pages, segment_bytes, call_bytes, part: None }
}

/// For whom pipelines work, and when they may begin.
#[derive(Debug, Clone, Copy)]
struct Order<'a> {
    holder: StreamId,
    done: &'a Arc<Event>,
    begun: Option<&'a Event>,
    target: &'a Kernels,
}

impl<'a> Order<'a> {
    /// Has pipelines begin, and queues a segment of each in turn, so that all PCIe links are at
    /// work soon. The target's context is current.
    fn queue(
        self,
        at_work: &mut [(&mut RelayPipeline, Work)],
        list: &mut KernelList,
    ) -> Result<(), CudaError> {
        let target = self.target.device().index();
        for (pipeline, work) in at_work.iter_mut() {
            pipeline.begin(self.holder, self.done, self.begun, target, work)?;
        }
        while at_work.iter().any(|(_, work)| work.pages.bytes() > 0) {
            for (pipeline, work) in at_work.iter_mut() {
                if list.left() == 0 {
                    return Err(CudaError::full("list of pages"));
                }
                // SAFETY: by the contract of `PathSet::queue`; the list is pinned.
                unsafe { pipeline.queue(target, work, list)? };
            }
        }
        Ok(())
    }

    /// The same for some of them, on whatever thread.
    fn queue_here(
        self,
        at_work: &mut [(&mut RelayPipeline, Work)],
        list: &mut KernelList,
    ) -> Result<(), CudaError> {
        let device = self.target.device();
        let _relaxed = Relaxed::enter(device.driver());
        let _current = device.enter()?;
        self.queue(at_work, list)
    }
}
