//! A load or a store on a GPU. Its segments wait until the engine's stream has come to where it
//! began: on the host, where that holds up nobody else, unless the engine itself already waits for
//! a layer; then on the GPU. This file knows one job's segments and events.

use super::queue::QueueLimit;
use super::segment::{BatchEnd, arena_ranges, cut};
use super::stalls::Stalls;
use super::{Gpu, limit_of};
use crate::copies::{Batch, Direction, Job, NotCopied, OnCopied};
use forebay_cuda::checksum::SumList;
use forebay_cuda::device::Event;
use forebay_cuda::kernels::Piece;
use forebay_transfer::Span;
use forebay_transfer::lock::{Condvar, Mutex};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

#[derive(Debug)]
pub struct GpuJob(Arc<Inner>);

/// A job, as its segments have it.
#[derive(Debug)]
pub struct Inner {
    gpu: Arc<Gpu>,
    direction: Direction,
    /// The engine computes nothing meanwhile but what waits for this.
    is_awaited: bool,
    /// Passed when the engine's stream has come to where the job began.
    begun: Arc<Event>,
    /// Somebody has seen that it was passed.
    has_begun: AtomicBool,
    state: Mutex<State>,
    posted: Condvar,
    /// Of the engine's stream, for its layers.
    stalls: Mutex<Stalls>,
}

/// A segment of a batch.
#[derive(Debug)]
pub struct Segment {
    pub job: Arc<Inner>,
    layer: u32,
    pub pieces: Vec<Piece>,
    pub bytes: u64,
    /// Behind all others of its batch.
    is_last: bool,
    batch_end: Arc<BatchEnd>,
    pub route: Route,
}

/// How a segment is copied. All segments of a batch go the same way, or its sums might be taken
/// before it is there.
#[derive(Debug)]
pub enum Route {
    /// By the copy stream, behind what that has.
    Stream,
    /// By the mover, over the node's relays too, which knows the arena's sides so.
    Relayed(Vec<Span>),
    /// The mover is done with it.
    Back(Result<(), NotCopied>),
}

#[derive(Debug)]
struct State {
    /// Segments may go: the engine's stream has come that far, or they wait for it on the GPU.
    may_go: bool,
    is_watched: bool,
    held: Vec<Segment>,
    /// Of each layer: segments that are not on their way yet, and the event behind the last one
    /// that is.
    layers: Vec<(usize, Option<Arc<Event>>)>,
}

impl GpuJob {
    /// A job that began where `begun` was recorded.
    pub fn new(gpu: &Arc<Gpu>, direction: Direction, is_awaited: bool, begun: Arc<Event>) -> GpuJob {
        let layers = vec![(0, None); gpu.cache.layers().len()];
        let state = Mutex::new(State { may_go: false, is_watched: false, held: Vec::new(), layers });
        let (gpu, posted) = (Arc::clone(gpu), Condvar::new());
        let (has_begun, stalls) = (AtomicBool::new(false), Mutex::default());
        GpuJob(Arc::new(Inner { gpu, direction, is_awaited, begun, has_begun, state, posted, stalls }))
    }
}

impl Job for GpuJob {
    fn copy(&self, layer: u32, batch: Batch, on_copied: OnCopied) {
        let inner = &self.0;
        let pinned = match inner.gpu.arenas.of(&batch.arena) {
            Ok(pinned) => pinned,
            Err(why) => return on_copied(Err(why)),
        };
        let (ranges, gpu) = (arena_ranges(&batch), &inner.gpu);
        let (direction, segment_bytes) = (inner.direction, Gpu::segment_bytes(inner.direction));
        let (lists, batch_end) =
            cut(batch, &gpu.cache, direction, &pinned, &gpu.checksums, segment_bytes, on_copied);
        let last = lists.len().saturating_sub(1);
        let class = (direction, inner.is_awaited);
        let hosts = gpu.links.hosts_of(gpu.device.index(), class, batch_end.bytes(), &lists);
        let mut hosts = hosts.map(Vec::into_iter);
        let segment = |(number, pieces): (usize, Vec<Piece>)| {
            let bytes = pieces.iter().map(|piece| piece.bytes).sum();
            let route = hosts.as_mut().and_then(Iterator::next).map_or(Route::Stream, Route::Relayed);
            let (job, batch_end) = (Arc::clone(inner), Arc::clone(&batch_end));
            Segment { job, layer, pieces, bytes, is_last: number == last, batch_end, route }
        };
        let segments: Vec<Segment> = lists.into_iter().enumerate().map(segment).collect();
        drop(batch_end);
        if let Some((unposted, _)) = inner.state.lock().layers.get_mut(layer as usize) {
            *unposted += segments.len();
        }
        let own = Arc::clone(inner);
        let on_pinned = move |pinned: Result<(), String>| match pinned {
            Ok(()) => own.add(segments),
            Err(why) => {
                let why = NotCopied(format!("the arena is not pinned: {why}"));
                segments.into_iter().for_each(|segment| segment.drop_for(why.clone()));
            }
        };
        pinned.when_pinned(ranges.into_iter(), Box::new(on_pinned));
    }

    fn pass(&self, layer: u32, stream: u64) -> Result<bool, NotCopied> {
        let inner = &self.0;
        let last = match inner.state.lock().layers.get(layer as usize) {
            Some((0, Some(last))) => Arc::clone(last),
            _ => return Ok(false),
        };
        inner.gpu.pass(stream, layer, last, &mut inner.stalls.lock())?;
        Ok(true)
    }

    fn come(&self, layer: u32, stream: u64) -> Result<bool, NotCopied> {
        self.0.gpu.open_stall(stream, layer, &mut self.0.stalls.lock())?;
        Ok(true)
    }

    fn follow(&self, layer: u32, stream: u64) -> Result<bool, NotCopied> {
        let inner = &self.0;
        let first = {
            let mut state = inner.state.lock();
            state.may_go = true;
            // What is behind it is for a thread that is not the engine's: see `rest`.
            state.held.extract_if(.., |segment| segment.layer <= layer).collect()
        };
        inner.gpu.add(inner.direction, first);
        let last = inner.when_posted(layer)?;
        inner.gpu.close_stall(stream, layer, last, &mut inner.stalls.lock())?;
        Ok(true)
    }

    fn rest(&self) -> Option<Box<dyn FnOnce() + Send>> {
        let inner = Arc::clone(&self.0);
        let is_held = !inner.state.lock().held.is_empty();
        is_held.then(|| -> Box<dyn FnOnce() + Send> { Box::new(move || inner.go(Ok(()))) })
    }

    fn stalls(&self) -> Vec<(u32, Duration)> {
        self.0.gpu.take_stalls(&mut self.0.stalls.lock())
    }
}

impl Segment {
    /// If the engine computes nothing meanwhile but what waits for this: the bytes of the batch
    /// that it belongs to.
    pub fn awaited_bytes(&self) -> Option<u64> {
        self.job.is_awaited.then(|| self.batch_end.bytes())
    }

    /// How much may be on its way for it to go, where others have the usual limit.
    pub fn limit(&self, usual: QueueLimit) -> QueueLimit {
        limit_of(self.awaited_bytes(), usual)
    }

    /// What is summed up behind it.
    pub fn sums(&self) -> Option<&SumList> {
        self.batch_end.sums().filter(|_| self.is_last)
    }

    /// It is on its way, up to an event.
    pub fn is_posted(&self, event: &Arc<Event>) {
        self.job.note(self.layer, Some(Arc::clone(event)));
    }

    /// It is over: its bytes have arrived, or nothing touches them any more.
    pub fn end(self, outcome: Result<(), NotCopied>) {
        self.batch_end.end(outcome);
    }

    /// It ends without having been on its way.
    pub fn drop_for(self, why: NotCopied) {
        self.job.note(self.layer, None);
        self.end(Err(why));
    }
}

impl Inner {
    pub fn direction(&self) -> Direction {
        self.direction
    }

    /// What its segments have to wait for on the GPU, if they still do.
    pub fn after(&self) -> Option<&Event> {
        if self.has_begun.load(Ordering::Relaxed) {
            return None;
        }
        let _relaxed = self.gpu.relaxed();
        let has_begun = self.begun.is_passed().unwrap_or(false);
        self.has_begun.store(has_begun, Ordering::Relaxed);
        Some(&*self.begun).filter(|_| !has_begun)
    }

    /// The same for who waits on the host.
    pub fn begun(&self) -> Option<Arc<Event>> {
        self.after().map(|_| Arc::clone(&self.begun))
    }

    /// Waits until all segments of a layer are on their way or never will be. Gives the event
    /// behind the last one.
    fn when_posted(&self, layer: u32) -> Result<Option<Arc<Event>>, NotCopied> {
        let mut state = self.state.lock();
        loop {
            match state.layers.get(layer as usize) {
                Some((0, last)) => return Ok(last.clone()),
                Some(_) => self.posted.wait(&mut state),
                None => return Err(NotCopied(format!("there is no layer {layer}"))),
            }
        }
    }

    /// A segment of a layer is on its way, up to an event; or never will be.
    fn note(&self, layer: u32, event: Option<Arc<Event>>) {
        let mut state = self.state.lock();
        if let Some((unposted, last)) = state.layers.get_mut(layer as usize) {
            *unposted -= 1;
            if event.is_some() {
                *last = event;
            }
        }
        drop(state);
        self.posted.notify_all();
    }

    /// Adds segments whose memory is pinned.
    fn add(self: &Arc<Self>, segments: Vec<Segment>) {
        let mut state = self.state.lock();
        if !state.may_go && self.after().is_none() {
            state.may_go = true;
        }
        state.held.extend(segments);
        if state.may_go {
            let held = std::mem::take(&mut state.held);
            drop(state);
            return self.gpu.add(self.direction, held);
        }
        if !std::mem::replace(&mut state.is_watched, true) {
            drop(state);
            let own = Arc::clone(self);
            self.gpu.when_begun(Arc::clone(&self.begun), move |begun| own.go(begun));
        }
    }

    /// The engine's stream has come to where the job began, or never will.
    fn go(&self, begun: Result<(), NotCopied>) {
        let mut state = self.state.lock();
        state.may_go = true;
        let held = std::mem::take(&mut state.held);
        drop(state);
        match begun {
            Ok(()) => self.gpu.add(self.direction, held),
            Err(why) => held.into_iter().for_each(|segment| segment.drop_for(why.clone())),
        }
    }
}
