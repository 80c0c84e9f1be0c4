//! A relay pipeline: what one GPU brings along to work for another in one direction: staging slots,
//! each with a stream of the pipeline's GPU and events. A stream copy has a pipeline
//! to itself. It works in one of three ways. In *slot streams*, a segment's two hops follow each
//! other in its slot's stream, so order needs no events, the driver copies many pieces by one call,
//! and a kernel of the pipeline's GPU writes small pages; for that the GPU must reach the target's
//! memory. By *handover*, the slot streams carry segments between host memory and slots, and the
//! target itself carries them on, page by page if need be. *Straight* is for a target's own
//! pipeline, where host memory is in small pieces too, or a call for each takes too long: its
//! kernel copies page by page. Slots have streams of their own because a copy engine takes up the
//! next copy of another stream at once, but waits for an event between two of one.

use super::kernel_list::{KernelList, Listed};
use super::meter::Part;
use super::pages::Pages;
use crate::device::{DeviceMemory, Event, Stream, StreamId};
use crate::driver::abi::{Address, StreamHandle};
use crate::driver::{BatchCopy, CopyList, CudaError};
use crate::kernels::{Kernels, Piece};
use crate::links::Direction;
use std::collections::HashMap;
use std::sync::Arc;

/// Blocks of a target's kernel.
const BLOCKS: u32 = 64;
/// Blocks of a kernel that writes to a peer, of whose 132 multiprocessors an engine on an H100 has
/// the others: 8 and 32 were as fast. Products of matrices there took 1 % longer meanwhile, and of
/// matrices and vectors 5 %, where copy engines relayed 1 and 3 %.
const SLOT_STREAM_BLOCKS: u32 = 16;

/// A GPU at work for others, or for itself where pages are small.
#[derive(Debug)]
pub struct RelayPipeline {
    direction: Direction,
    slots: Vec<Slot>,
    slot_bytes: u64,
    next: usize,
    /// Where the driver copies many pieces by one call.
    batch: Option<(BatchCopy, CopyList)>,
    kernels: Arc<Kernels>,
    /// By the target's ordinal.
    hops: HashMap<u16, Hop>,
    /// Whether it works, or worked last, in slot streams.
    in_slot_streams: bool,
    /// Something was not queued: events may say of a slot that it is done with when it is not.
    is_torn: bool,
    /// Nobody knows when its last stream copy is done.
    is_lost: bool,
    /// Its GPU's context is lost, and with it all that it would ever do.
    is_gone: bool,
    /// Whose stream copy it works for, and what is passed when that is done.
    holder: Option<(StreamId, Arc<Event>)>,
    _staging: DeviceMemory,
}

/// A slot, its stream, and the event of the pipeline's own GPU for its state: filled or emptied, by
/// direction.
#[derive(Debug)]
struct Slot {
    address: Address,
    stream: Stream,
    near: Event,
}

/// What the pipeline has on a target: a stream for the second hop, and that GPU's events for the
/// slots' state.
#[derive(Debug)]
struct Hop {
    kernels: Arc<Kernels>,
    stream: Stream,
    far: Vec<Event>,
    ended: Event,
}

/// What a pipeline is to do.
#[derive(Debug)]
pub struct Work<'a> {
    pub how: How,
    pub slots: usize,
    /// What is left of its share.
    pub pages: Pages<'a>,
    pub segment_bytes: u64,
    /// Pieces as long as this on average go by a call each, shorter ones by kernel.
    pub call_bytes: u64,
    /// What times it.
    pub part: Option<&'a mut Part>,
}

impl Work<'_> {
    /// Places that it takes at most: a piece is cut where a segment ends, and segments of one piece
    /// keep none.
    pub fn places(&self) -> usize {
        let (pieces, ends) = (self.pages.pieces(), self.pages.bytes() / self.segment_bytes);
        pieces + usize::try_from(ends).map_or(pieces, |ends| ends.min(pieces)) + 1
    }
}

/// How a pipeline works.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum How {
    /// A segment is what fits into a slot. Copy engines carry it, and the pipeline's kernel if it
    /// goes to small pages.
    SlotStreams,
    /// A segment is the same, but the target carries it between slot and pages, by its kernel if
    /// these are small.
    Handover,
    /// The target's kernel reads or writes host memory itself, page by page, without a slot.
    Straight,
}

impl RelayPipeline {
    /// The pipeline of a GPU for the targets that it serves.
    pub fn new(
        direction: Direction,
        kernels: &Arc<Kernels>,
        targets: &[Arc<Kernels>],
        slots: u64,
        slot_bytes: u64,
    ) -> Result<RelayPipeline, CudaError> {
        let gpu = kernels.device();
        let staging = DeviceMemory::new(gpu, slots * slot_bytes)?;
        let slot = |index| {
            let address = staging.address() + index * slot_bytes;
            Ok(Slot { address, stream: Stream::new(gpu)?, near: Event::new(gpu)? })
        };
        let hop = |target: &Arc<Kernels>| {
            let device = target.device();
            let far = (0..slots).map(|_| Event::new(device)).collect::<Result<_, CudaError>>()?;
            let (stream, ended) = (Stream::new(device)?, Event::new(device)?);
            Ok((device.index(), Hop { kernels: Arc::clone(target), stream, far, ended }))
        };
        Ok(RelayPipeline {
            direction,
            slots: (0..slots).map(slot).collect::<Result<_, CudaError>>()?,
            slot_bytes,
            next: 0,
            batch: gpu.driver().batch_copy().map(|batch| (batch, CopyList::default())),
            kernels: Arc::clone(kernels),
            hops: targets.iter().map(hop).collect::<Result<_, CudaError>>()?,
            in_slot_streams: false,
            is_torn: false,
            is_lost: false,
            is_gone: false,
            holder: None,
            _staging: staging,
        })
    }

    pub fn slot_bytes(&self) -> u64 {
        self.slot_bytes
    }

    /// Whether a stream copy of `stream` may have it: nobody has, or an earlier stream copy of the
    /// same stream.
    pub fn is_free_for(&self, stream: StreamId) -> bool {
        let is_over = |done: &Event| match done.is_passed() {
            Ok(is_over) => is_over,
            // The other GPU's context is lost, and nobody will tell.
            Err(_) => self.is_quiet(),
        };
        let held = self.holder.as_ref();
        let is_free = held.is_none_or(|(holder, done)| *holder == stream || is_over(done));
        is_free && !self.is_lost && !self.is_gone
    }

    /// Whether its GPU's context is lost, which is found out now if nobody knew. The error, the
    /// first time.
    pub fn look_after(&mut self) -> Option<CudaError> {
        if self.is_gone {
            return None;
        }
        // An event that was never recorded has passed: only a context that is lost says otherwise.
        let slot = self.slots.first()?;
        slot.near.is_passed().err()?;
        // One call may be refused for other reasons.
        let error = slot.stream.is_idle().err()?;
        self.is_gone = true;
        Some(error)
    }

    /// Whether nothing of it is under way. A stream that cannot be asked is lost, and its work with
    /// it.
    pub fn is_quiet(&self) -> bool {
        let slot_streams = self.slots.iter().map(|slot| &slot.stream);
        let hops = self.hops.values().map(|hop| &hop.stream);
        slot_streams.chain(hops).all(|stream| stream.is_idle().unwrap_or(true))
    }

    /// It was found quiet, so it may have another stream copy.
    pub fn regain(&mut self) {
        self.is_lost = false;
    }

    /// Is nobody's to have before it was waited for.
    pub fn lose(&mut self) {
        self.is_lost = true;
    }

    /// Gives it to a stream copy. Its work waits for `begun`, behind which no other work of this
    /// pipeline is left; for nothing if that has passed already.
    pub fn begin(
        &mut self,
        stream: StreamId,
        done: &Arc<Event>,
        begun: Option<&Event>,
        target: u16,
        work: &mut Work,
    ) -> Result<(), CudaError> {
        let before = self.holder.replace((stream, Arc::clone(done)));
        let was_in_slot_streams = std::mem::replace(&mut self.in_slot_streams, work.how == How::SlotStreams);
        // Where a stream copy does not wait for the one before in its stream, slots are kept apart
        // by their streams or by their events. These know nothing of each other. After an error
        // below it is torn all the same: the next stream copy waits then.
        let was_torn = std::mem::replace(&mut self.is_torn, true);
        // What it did for another stream is over, and that one's event may be a later stream copy's
        // by now.
        let before = before.filter(|(holder, _)| {
            *holder == stream && (was_torn || was_in_slot_streams != self.in_slot_streams)
        });
        self.next = 0;
        // All slots, also those that this stream copy leaves to the next one, which will not ask.
        let waits = before.iter().map(|(_, done)| (&**done, self.slots.len()));
        for (event, slots) in waits.chain(begun.map(|begun| (begun, work.slots))) {
            self.slots.iter().take(slots).try_for_each(|slot| slot.stream.wait_for(event))?;
            if let (How::Handover | How::Straight, Some(hop)) = (work.how, self.hops.get(&target)) {
                hop.stream.wait_for(event)?;
            }
        }
        self.is_torn = false;
        if let (Some(stream), Some(part)) = (self.carries(0, target, work.how), &mut work.part) {
            part.begins(stream.handle());
        }
        Ok(())
    }

    /// The stream in which the PCIe link's hop of a slot's segments is.
    fn carries(&self, slot: usize, target: u16, how: How) -> Option<&Stream> {
        match how {
            How::Straight => self.hops.get(&target).map(|hop| &hop.stream),
            How::SlotStreams | How::Handover => self.slots.get(slot).map(|slot| &slot.stream),
        }
    }

    pub fn direction(&self) -> Direction {
        self.direction
    }

    /// The slots that a stream copy of so many segments uses: each costs a few calls, so a short
    /// stream copy has few.
    pub fn slots_for(&self, segments: u64, how: How) -> usize {
        let useful = match how {
            How::SlotStreams => (segments / 2).max(2).min(segments),
            How::Handover => segments,
            How::Straight => 0,
        };
        usize::try_from(useful).unwrap_or(usize::MAX).min(self.slots.len())
    }

    /// Queues the next segment of its work, if something is left of that.
    ///
    /// # Safety
    ///
    /// As for [`PathSet::queue`](super::path_set::PathSet::queue). In slot streams, the pipeline's
    /// GPU reaches the target's memory. The list lies in pinned memory.
    pub unsafe fn queue(
        &mut self,
        target: u16,
        work: &mut Work,
        list: &mut KernelList,
    ) -> Result<(), CudaError> {
        if work.pages.bytes() == 0 {
            return Ok(());
        }
        let slot = self.next;
        self.next = (slot + 1) % work.slots.max(1);
        // SAFETY: by this function's contract.
        let queued = unsafe { self.queue_in(slot, target, work, list) };
        self.is_torn |= queued.is_err();
        if work.pages.bytes() == 0
            && queued.is_ok()
            && let (Some(stream), Some(part)) = (self.carries(slot, target, work.how), &mut work.part)
        {
            part.ends(stream.handle());
        }
        queued
    }

    /// Queues the next segment by way of a slot.
    ///
    /// # Safety
    ///
    /// As for [`queue`](RelayPipeline::queue).
    unsafe fn queue_in(
        &mut self,
        slot: usize,
        target: u16,
        work: &mut Work,
        list: &mut KernelList,
    ) -> Result<(), CudaError> {
        match (work.how, self.hops.get(&target)) {
            // SAFETY: by this function's contract.
            (How::SlotStreams, _) => unsafe { self.in_slot_stream(work, slot, list) },
            (How::Handover, Some(hop)) => self.hand_over(work, hop, slot, list),
            (How::Straight, Some(hop)) => {
                let listed = list.straight(&mut work.pages, work.segment_bytes);
                let kept = hop.carry(&listed, work.call_bytes)?;
                list.keep(kept);
                Ok(())
            }
            (_, None) => Ok(()),
        }
    }

    /// Both hops in the slot's stream, where they run in order.
    ///
    /// # Safety
    ///
    /// As for [`queue`](RelayPipeline::queue).
    unsafe fn in_slot_stream(
        &mut self,
        work: &mut Work,
        index: usize,
        list: &mut KernelList,
    ) -> Result<(), CudaError> {
        let (slot, batch) = (&self.slots[index], &mut self.batch);
        let listed = list.through_slot(self.direction, &mut work.pages, slot.address, work.segment_bytes);
        let by_kernel = self.direction == Direction::HostToDevice && listed.are_shorter(work.call_bytes);
        let pages: &[Piece] = if by_kernel { &[] } else { listed.pages };
        let hops: [_; 2] = self.direction.in_order(listed.runs, pages).into();
        // SAFETY: by this function's contract; the slot is the stream's.
        hops.into_iter().try_for_each(|pieces| unsafe { slot.carry(batch.as_mut(), pieces) })?;
        if by_kernel {
            let (address, pages, bytes) = (listed.address(), listed.pages.len(), listed.bytes);
            let _current = self.kernels.device().enter()?;
            // SAFETY: as above; these places are kept as they are.
            unsafe { self.kernels.copy(&slot.stream, address, pages as u32, bytes, SLOT_STREAM_BLOCKS)? };
            list.keep(pages);
        }
        Ok(())
    }

    fn hand_over(
        &self,
        work: &mut Work,
        hop: &Hop,
        index: usize,
        list: &mut KernelList,
    ) -> Result<(), CudaError> {
        let (slot, far) = (&self.slots[index], &hop.far[index]);
        let listed = list.through_slot(self.direction, &mut work.pages, slot.address, work.segment_bytes);
        let (kept, queued) = match self.direction {
            Direction::HostToDevice => {
                slot.stream.wait_for(far)?;
                slot.copy_runs(listed.runs)?;
                slot.near.record(&slot.stream)?;
                hop.stream.wait_for(&slot.near)?;
                (hop.carry(&listed, work.call_bytes)?, far.record(&hop.stream))
            }
            Direction::DeviceToHost => {
                hop.stream.wait_for(&slot.near)?;
                let kept = hop.carry(&listed, work.call_bytes)?;
                let followed = far.record(&hop.stream).and_then(|()| slot.stream.wait_for(far));
                let copied = followed.and_then(|()| slot.copy_runs(listed.runs));
                (kept, copied.and_then(|()| slot.near.record(&slot.stream)))
            }
        };
        // Also after an error: the kernel is queued and will read them.
        list.keep(kept);
        queued
    }

    /// Whether it works, or worked last, for a stream copy that is done when this is passed.
    pub fn works_until(&self, done: &Arc<Event>) -> bool {
        self.holder.as_ref().is_some_and(|(_, held)| Arc::ptr_eq(held, done))
    }

    /// Waits until nothing of it is under way. A stream that cannot be waited for is lost, and its
    /// work with it.
    pub fn settle(&mut self) {
        let slot_streams = self.slots.iter().map(|slot| &slot.stream);
        let hops = self.hops.values().map(|hop| &hop.stream);
        slot_streams.chain(hops).for_each(|stream| drop(stream.synchronize()));
        self.is_lost = false;
    }

    /// Has the stream copy's stream wait for all of the stream copy's work here. Segments end in
    /// the second hop or in their slots' streams; where something was not queued, some have come no
    /// further than the other of the two.
    pub fn join(&self, stream: StreamHandle, target: u16, work: &Work) -> Result<(), CudaError> {
        let behind = |event: &Event, last: &Stream| event.record(last).and_then(|()| event.hold(stream));
        let hop = self.hops.get(&target).filter(|_| work.how != How::SlotStreams);
        let end_in_hop =
            hop.is_some() && (work.how == How::Straight || self.direction == Direction::HostToDevice);
        let hops = hop.into_iter().filter(|_| end_in_hop || self.is_torn);
        let slots = self.slots.iter().take(work.slots).filter(|_| !end_in_hop || self.is_torn);
        let hops = hops.map(|hop| behind(&hop.ended, &hop.stream));
        let slots = slots.map(|slot| behind(&slot.near, &slot.stream));
        // All of them, also after an error.
        hops.chain(slots).fold(Ok(()), Result::and)
    }
}

impl Slot {
    /// Copies pieces in the slot's stream, by one call if there is one for that.
    ///
    /// # Safety
    ///
    /// As for [`RelayPipeline::queue`], in slot streams.
    unsafe fn carry(
        &self,
        batch: Option<&mut (BatchCopy, CopyList)>,
        pieces: &[Piece],
    ) -> Result<(), CudaError> {
        let Some((batch, list)) = batch.filter(|_| pieces.len() > 1) else { return self.copy_runs(pieces) };
        let device = self.stream.device();
        let _current = device.enter()?;
        pieces.iter().for_each(|piece| list.add(piece.from, piece.to, piece.bytes));
        // SAFETY: by this function's contract; its device was entered, and it is no default stream.
        unsafe { batch.queue(device.driver(), list, self.stream.handle()) }
    }

    fn copy_runs(&self, runs: &[Piece]) -> Result<(), CudaError> {
        // A copy, unlike a kernel, may be put into a stream of a device that is not current.
        for run in runs {
            // SAFETY: by the contract of `RelayPipeline::queue`; the slot is the stream copy's, and
            // events keep its uses apart.
            unsafe { self.stream.copy(run.from, run.to, run.bytes)? };
        }
        Ok(())
    }
}

impl Hop {
    /// Carries what is listed, by calls if pieces are so long, else by a kernel. Says how many
    /// places of the list that reads.
    fn carry(&self, listed: &Listed, call_bytes: u64) -> Result<usize, CudaError> {
        let Listed { pages, bytes, .. } = *listed;
        if !listed.are_shorter(call_bytes) {
            for page in pages {
                // SAFETY: by the contract of `RelayPipeline::queue`.
                unsafe { self.stream.copy(page.from, page.to, page.bytes)? };
            }
            return Ok(0);
        }
        // SAFETY: by the contract of `RelayPipeline::queue`; the caller keeps these places as they
        // are.
        unsafe { self.kernels.copy(&self.stream, listed.address(), pages.len() as u32, bytes, BLOCKS)? };
        Ok(pages.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{Device, HostMemory};
    use crate::remote::tests::driver;
    use proptest::prelude::*;
    use std::time::{Duration, Instant};

    #[test]
    fn a_pipeline_waits_for_no_later_stream_copy_of_whom_it_worked_for_before() {
        let [target, relay] = [0, 1].map(|gpu| Device::open(driver(), gpu).unwrap());
        let [targets, relays] = [&target, &relay].map(|gpu| Arc::new(Kernels::load(gpu).unwrap()));
        let mut pipeline =
            RelayPipeline::new(Direction::HostToDevice, &relays, &[targets], 2, 1 << 20).unwrap();
        let _current = target.enter().unwrap();
        let [one, other] = [(); 2].map(|()| Stream::new(&target).unwrap());
        let [one_id, other_id] = [&one, &other].map(|stream| target.id_of(stream.handle()).unwrap());
        let [done, others_done] = [(); 2].map(|()| Arc::new(Event::new(&target).unwrap()));
        let work = |how| Work {
            how,
            slots: 2,
            pages: Pages::new(&[], 0),
            segment_bytes: 1,
            call_bytes: 1,
            part: None,
        };
        let (bytes, memory) = (256 << 20, DeviceMemory::new(&target, 256 << 20).unwrap());
        let host = HostMemory::new(&target, bytes).unwrap();
        let mut began_first = || {
            pipeline.begin(one_id, &done, None, 0, &mut work(How::SlotStreams)).unwrap();
            done.record(&one).unwrap();
            one.synchronize().unwrap();
            assert!(pipeline.is_free_for(other_id));
            // The first stream's next stream copy, in which this pipeline has no part, is queued
            // before the other one's begins. SAFETY: both are as long as that, and nobody else uses
            // them.
            unsafe { one.copy(host.start() as Address, memory.address(), bytes as u64).unwrap() };
            done.record(&one).unwrap();
            pipeline.begin(other_id, &others_done, None, 0, &mut work(How::Handover)).unwrap();
            let begun = Event::new(&relay).unwrap();
            begun.record(&pipeline.slots[0].stream).unwrap();
            let since = Instant::now();
            while !begun.is_passed().unwrap() && since.elapsed() < Duration::from_secs(60) {
                std::thread::yield_now();
            }
            let is_first = !done.is_passed().unwrap();
            one.synchronize().unwrap();
            is_first
        };
        // On a busy machine the copy may be over before this thread is asked again.
        assert!(
            (0..10).any(|_| began_first()),
            "it waited for a copy of a stream that it has nothing to do with"
        );
    }

    proptest! {
        #[test]
        fn a_share_has_places_for_all_that_its_kernels_read(
            lens in prop::collection::vec(1..900_u64, 1..40),
            how in prop::sample::select(vec![How::SlotStreams, How::Straight]),
            segment_bytes in 1..2000_u64,
            call_bytes in 1..900_u64,
        ) {
            let piece = |(nth, bytes): (u64, &u64)| Piece { from: nth * 2000, to: (1 << 40) - nth * 2000, bytes: *bytes };
            let pieces: Vec<Piece> = (0..).zip(&lens).map(piece).collect();
            let pages = Pages::new(&pieces, lens.iter().sum());
            let mut work = Work { how, slots: 1, pages, segment_bytes, call_bytes, part: None };
            let mut places = vec![Piece { from: 0, to: 0, bytes: 0 }; 2 * work.places()];
            let (places, mut all) = (work.places(), KernelList::new(&mut places, &[]));
            let mut list = all.part(places);
            prop_assert_eq!((list.left(), all.left()), (places, places));
            while work.pages.bytes() > 0 {
                prop_assert!(list.left() > 0);
                let whole = segment_bytes.min(work.pages.bytes());
                let listed = match how {
                    How::Straight => list.straight(&mut work.pages, segment_bytes),
                    _ => list.through_slot(Direction::HostToDevice, &mut work.pages, 0, segment_bytes),
                };
                prop_assert_eq!(listed.bytes, whole);
                let kept = if listed.are_shorter(call_bytes) { listed.pages.len() } else { 0 };
                list.keep(kept);
            }
        }
    }
}
