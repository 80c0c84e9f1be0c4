//! Copy streams: copies for one GPU in one direction in streams of our own, batch right behind
//! batch, so that no PCIe link is idle between two of them. A caller's stream copy begins when the
//! one before in its stream has ended; a copy stream's shares slots with it as soon as they are
//! free.

use super::division::Division;
use super::inspect::{Inspector, Outline};
use super::pages::Pages;
use super::path_set::{PathSet, how_to_relay};
use super::queued::{StreamCopy, Waits, is_small};
use super::relay_pipeline::How;
use super::submit_pool::SubmitPool;
use super::{DeclineReason, GpuDirection, StreamCopies};
use crate::checksum::{BEHIND_COPIES, SumList};
use crate::device::{Device, Event, Stream, StreamId};
use crate::driver::abi::Address;
use crate::driver::{CudaError, Relaxed};
use crate::kernels::Piece;
use crate::links::Direction;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Pieces of a batch at most.
pub const BATCH_PIECES_MAX: usize = 16_384;

/// What is awaited goes over relays from so many bytes on, which are those of a layer: 4k tokens of
/// Llama-3.1-8B. Over two H100s' links their layers came after 9 to 12 ms so beside computing, over
/// one after 11 to 15; those of 1k and 2k tokens were not ahead in an engine. In an engine 8k
/// tokens came sooner over both on one of three hosts, 16k and more on all.
const AWAITED_RELAYED_BYTES_MIN: u64 = 16 << 20;
/// And from so many on where relays hand over: the target's kernels, which carry on what comes by
/// them, wait for room on it. This was the border for all before; by handover no less was measured.
pub const AWAITED_HANDOVER_BYTES_MIN: u64 = 96 << 20;

/// Streams for copies that belong to nobody else's stream.
#[derive(Debug)]
pub struct CopyStream {
    device: Arc<Device>,
    direction: Direction,
    /// For what needs no slots, by turns: the first token of prompts of 4k tokens in small pages
    /// came after 16 ms on an H200 so, after 21 with one stream; that of longer ones as with one.
    work: [Stream; 2],
    turn: AtomicUsize,
    /// Passed when one of these has come to the end of a batch.
    worked: Event,
    /// Comes to the end of each batch in turn, and sums up what belongs to it.
    joined: Stream,
    /// What tells `joined` from other streams.
    holder: StreamId,
}

/// What a copy stream carries at a time.
#[derive(Debug, Clone, Copy)]
pub struct Batch<'a> {
    /// From where to where, [`BATCH_PIECES_MAX`] pieces at most. None goes across two registrations
    /// or allocations, and no two that follow each other touch where one of these ends: pieces that
    /// touch are copied as one.
    pub pieces: &'a [Piece],
    /// What has to be over before.
    pub after: Option<&'a Event>,
    /// Whether peers reach the GPU's side: see [`StreamCopies::is_open`].
    pub is_open: bool,
    /// If the GPU computes nothing meanwhile but what waits for this, so that kernels have room:
    /// how many bytes it waits for together, of which these are some.
    pub awaited_bytes: Option<u64>,
    /// What the GPU sums up behind this and all batches before it. It lives until the event has
    /// passed.
    pub sums: Option<&'a SumList>,
}

/// What became of a batch.
#[derive(Debug)]
pub enum Sent {
    /// Nothing, since too much is under way: it can be sent when another one has ended.
    Later,
    /// It was queued, as far as the result says. The event that was given passes when nothing of it
    /// is under way any more; after an error, [`settle`](StreamCopies::settle) says when.
    Queued(Result<Links, CudaError>),
}

/// Whose links a batch goes over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Links {
    /// The GPU's own alone: whether relays are whole is none of its business.
    Own,
    /// Relays have a part in it: see [`is_whole_since`](StreamCopies::is_whole_since).
    Several,
}

impl CopyStream {
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    fn next_work(&self) -> &Stream {
        &self.work[self.turn.fetch_add(1, Ordering::Relaxed) % self.work.len()]
    }

    /// Queues copies by engine alone.
    fn copy_alone(&self, batch: &Batch) -> Result<(), CudaError> {
        let work = self.next_work();
        if let Some(after) = batch.after {
            work.wait_for(after)?;
        }
        // SAFETY: by the contract of `StreamCopies::send`.
        let copy = |piece: &Piece| unsafe { work.copy(piece.from, piece.to, piece.bytes) };
        let copied = batch.pieces.iter().try_for_each(copy);
        let joined = self.worked.record(work).and_then(|()| self.joined.wait_for(&self.worked));
        copied.and(joined)
    }

    /// A batch was queued, or a part of it: sums up what belongs to it if it is whole, and records
    /// where all of it is over. What follows is copied meanwhile.
    fn end(
        &self,
        sums: Option<&SumList>,
        queued: Result<Links, CudaError>,
        ended: &Event,
    ) -> Result<Sent, CudaError> {
        // SAFETY: by the contract of `StreamCopies::send`.
        let sum = |list: &SumList| unsafe { list.queue(&self.joined, BEHIND_COPIES) };
        let summed = queued.and_then(|links| sums.map_or(Ok(()), sum).map(|()| links));
        ended.record(&self.joined)?;
        Ok(Sent::Queued(summed))
    }
}

impl StreamCopies {
    /// A copy stream for a GPU that is open, or `None` for another.
    pub fn copy_stream(&self, device: u16, direction: Direction) -> Option<Result<CopyStream, CudaError>> {
        let device = self.devices.iter().find(|known| known.index() == device)?;
        let make = || {
            let work = [Stream::new(device)?, Stream::new(device)?];
            // An engine waits for what is loaded, and so for its sums.
            let joined = match direction {
                Direction::HostToDevice => Stream::urgent(device)?,
                Direction::DeviceToHost => Stream::new(device)?,
            };
            let worked = Event::new(device)?;
            let current = device.enter()?;
            let holder = device.id_of(joined.handle())?;
            drop(current);
            let turn = AtomicUsize::new(0);
            // Now, so that no load waits until threads have begun.
            self.submit_pool();
            Ok(CopyStream { device: Arc::clone(device), direction, work, turn, worked, joined, holder })
        };
        Some(make())
    }

    /// Whether peers reach what is at an address of a GPU: they do not where it was mapped for that
    /// GPU alone.
    pub fn is_open(&self, address: Address) -> Result<bool, DeclineReason> {
        Inspector::new(self.driver).range_of(address).map(|range| range.is_open)
    }

    /// Queues a batch over all paths, behind those before it, and records `ended` where all of it
    /// is over. An error means that `ended` was not recorded: use [`settle`](StreamCopies::settle).
    ///
    /// # Safety
    ///
    /// The pieces go the copy stream's direction, between registered host memory and its GPU. Until
    /// `ended` has passed they stay valid, and nobody else writes what they read, or uses what they
    /// write, but for work that `after` is behind. The same holds for what is summed up: the GPU
    /// reaches it, and nobody else writes it.
    pub unsafe fn send(
        &self,
        copy_stream: &CopyStream,
        batch: &Batch,
        ended: &Event,
    ) -> Result<Sent, CudaError> {
        let _relaxed = Relaxed::enter(self.driver);
        let _current = copy_stream.device.enter()?;
        let Some(gpu_direction) =
            self.gpu_directions.get(&(copy_stream.device.index(), copy_stream.direction))
        else {
            // It had no room for stream copies, which was logged.
            let copied = copy_stream.copy_alone(batch).map(|()| Links::Own);
            return copy_stream.end(batch.sums, copied, ended);
        };
        let mut path_set = gpu_direction.path_set.lock();
        let queued = if !path_set.take_at_once(copy_stream.holder) {
            // Some caller's stream copy has it, and nobody knows for how long. A queue that is full
            // makes the next call wait.
            drop(path_set);
            self.counters.tell(DeclineReason::Busy);
            copy_stream.copy_alone(batch).map(|()| Links::Own)
        } else if let Some(places) = path_set.room_for(batch.pieces.len()) {
            self.queue_batch(copy_stream, batch, gpu_direction, &mut path_set, places)
        } else {
            return Ok(Sent::Later);
        };
        copy_stream.end(batch.sums, queued, ended)
    }

    /// Sums up what others have copied, and records `ended` behind that and all batches that were
    /// sent before.
    ///
    /// # Safety
    ///
    /// What is summed up lives, and nobody else writes it, until `ended` has passed.
    pub unsafe fn join(
        &self,
        copy_stream: &CopyStream,
        sums: Option<&SumList>,
        ended: &Event,
    ) -> Result<Sent, CudaError> {
        let _relaxed = Relaxed::enter(self.driver);
        let _current = copy_stream.device.enter()?;
        copy_stream.end(sums, Ok(Links::Own), ended)
    }

    fn queue_batch(
        &self,
        copy_stream: &CopyStream,
        batch: &Batch,
        gpu_direction: &GpuDirection,
        path_set: &mut PathSet,
        places: std::ops::Range<usize>,
    ) -> Result<Links, CudaError> {
        let outline = Outline::of(batch.pieces);
        let (bytes, holder) = (outline.bytes, copy_stream.holder);
        let is_scattered =
            is_small(batch.pieces.len(), bytes) && is_small(outline.host_runs(copy_stream.direction), bytes);
        let pages = Pages::new(batch.pieces, bytes);
        let least = match how_to_relay(copy_stream.direction, pages, batch.is_open) {
            How::SlotStreams => AWAITED_RELAYED_BYTES_MIN,
            _ => AWAITED_HANDOVER_BYTES_MIN,
        };
        let is_short = batch.awaited_bytes.is_some_and(|bytes| bytes < least);
        let is_alone =
            is_scattered || is_short || bytes < self.rates.of(copy_stream.direction).break_even_bytes;
        self.note(gpu_direction);
        let mut division = match is_alone {
            true => Division::direct(bytes),
            false => self.divide(gpu_direction, holder, bytes),
        };
        let direct_bytes = division.shares[0];
        let stream_copy = StreamCopy {
            stream: copy_stream.next_work().handle(),
            joined: copy_stream.joined.handle(),
            holder,
            pages,
            seams: &[],
            peers_reach: batch.is_open,
            is_scattered,
            awaited_bytes: batch.awaited_bytes,
            places,
            waits: batch.after.map_or(Waits::Nothing, Waits::For),
            submit_pool: (direct_bytes < bytes).then(|| self.submit_pool()).flatten(),
        };
        division.begin(gpu_direction);
        // SAFETY: by the contract of `send`; the path set was taken for the joined stream and the
        // device was entered.
        let queued = unsafe { path_set.queue(stream_copy, &mut division) };
        division.queued(gpu_direction);
        queued?;
        self.counters.count(direct_bytes, bytes - direct_bytes);
        Ok(if direct_bytes < bytes { Links::Several } else { Links::Own })
    }

    /// Threads for all relays of a GPU in both directions. None where there are no relays, or no
    /// threads: who sends a batch queues all of it then.
    fn submit_pool(&self) -> Option<&SubmitPool> {
        let most = self
            .gpu_directions
            .values()
            .map(|gpu_direction| gpu_direction.relays.len())
            .max()
            .filter(|relays| *relays > 0);
        self.submit_pool.get_or_init(|| most.and_then(|relays| SubmitPool::new(2 * relays))).as_ref()
    }

    /// Whether no relay was lost since there were so many [losses](StreamCopies::losses): what a
    /// copy stream carried meanwhile has arrived, once its event has passed.
    pub fn is_whole_since(&self, losses: u64, copy_stream: &CopyStream) -> Result<(), CudaError> {
        let _relaxed = Relaxed::enter(self.driver);
        let now = self.look_after_relays(copy_stream.device.index(), copy_stream.direction);
        if now == losses { Ok(()) } else { Err(CudaError::relay_lost()) }
    }

    /// Waits until nothing that a copy stream has queued is under way. Where a stream cannot be
    /// waited for its context is lost, and what was in it with it.
    pub fn settle(&self, copy_stream: &CopyStream) {
        let _relaxed = Relaxed::enter(self.driver);
        copy_stream.work.iter().for_each(|work| drop(work.synchronize()));
        self.settle_direction(copy_stream.device.index(), copy_stream.direction);
        let _ = copy_stream.joined.synchronize();
    }
}
