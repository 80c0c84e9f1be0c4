//! A set: what chains for one GPU in one direction have in common. While a chain is under way, only a chain of the same
//! stream may use its set, which waits for the first one anyway; so no chain ever waits for one that it would not wait
//! for without us. This file knows how a chain is divided among crews; it must never know when that is allowed.

use super::crew::{Crew, How, Work};
use super::list::List;
use super::lists::Lists;
use super::pages::{Pages, are_shorter};
use crate::device::{Event, StreamId};
use crate::driver::CudaError;
use crate::driver::abi::{Address, StreamHandle};
use crate::driver::{BatchCopy, CopyList};
use crate::kernels::Kernels;
use crate::links::{Direction, ENGINE_PIECE_BYTES};
use std::ops::{DerefMut, Range};
use std::sync::Arc;

/// Slots of the target's own crew, for pages too small for a copy engine. While an engine computes, a parcel's kernel waits until one of
/// the engine's has ended: beside a prefill these carried 16 to 22 GB/s on an H200, four of 8 MiB 33. Those would be more than the
/// 64 MiB that a GPU gives in all.
const OWN_SLOTS: u64 = 3;
const OWN_SLOT_BYTES: u64 = 2 << 20;
/// A share is cut into this many parcels at least, if they are not too small then, so that its two hops overlap.
const PARCELS: u64 = 4;
const PARCEL_BYTES_MIN: u64 = 512 << 10;
/// Pages as long as this on average go by copy engine too, many by one call: pages of 64 KiB came to an H200 at 54 of 55 GB/s so,
/// with nothing to wait for while the engine computes, where a kernel waits for room on the GPU with each parcel (16 GB/s
/// beside a prefill). Pages of 16 KiB came at 5 GB/s.
const BATCH_PIECE_BYTES: u64 = 48 << 10;
/// Pages as long as this on average go through a relay in strands. Shorter ones were not tried so.
const STRAND_PIECE_BYTES: u64 = 48 << 10;
/// Copies of one call. Before the first of them begins, a call takes half a microsecond for each (one call of 4,096 moved 39 GB/s);
/// those of the call before keep the link busy meanwhile.
const BATCH_COPIES: usize = 1024;
/// Beside relays, which the same thread has to queue. A call for more than some 256 to 512 does not return before the link has done a part
/// of them, and relays have nothing to do meanwhile: over two H100s' links, 32k tokens of 64 KiB pages came after 111 ms with calls for 1,024
/// copies and after 66 with 128.
const BATCH_COPIES_BESIDE: usize = 128;
/// As many long pieces go by such calls too. One by one, there is a gap behind each: pieces of 1 MiB came to an H200 at 45 GB/s so, and at
/// 51 to 53 by batches; the first token of a prompt of 128k tokens after 496 and 404 ms. A few pieces are there before a batch begins.
const BATCH_COPIES_MIN: usize = 32;
/// What is awaited goes by kernels if it is less in all, which are there before a batch has begun. They wait for room on the GPU while layers
/// before compute: the first token of prompts of 1k, 4k, 8k and 16k tokens (4 to 64 MiB a layer) came after 13, 22, 42 and 82 ms on an H200 by
/// kernels, and after 14, 16, 27 and 50 by batches.
const AWAITED_BATCH_BYTES_MIN: u64 = 8 << 20;
/// And if its pieces are shorter than this on average, though long enough for a copy engine: behind each call there is a gap, in which
/// a kernel reads on. The first token of a prompt of 8k tokens came after 49 ms on an H200 by calls for 256 KiB each, after 43 with 512 KiB.
const AWAITED_CALL_BYTES_MIN: u64 = 1 << 20;

/// Everything that chains for one GPU in one direction need, but for the crews of its peers.
#[derive(Debug)]
pub struct Set {
    target: Arc<Kernels>,
    own: Crew,
    /// Where the driver copies many pieces by one call.
    batch: Option<(BatchCopy, CopyList)>,
    /// Passed when the caller's stream has come to the copy.
    begun: Event,
    /// Passed when the direct way's copies are over, where they are in a stream of their own.
    direct: Event,
    /// Passed when the last chain is done.
    done: Arc<Event>,
    lists: Lists,
    /// Whose chain is under way.
    holder: Option<StreamId>,
    /// The driver refused what was to tell where a chain ends, so nobody knows when the set is free.
    is_lost: bool,
}

/// A chain to be queued.
#[derive(Debug)]
pub struct Chain<'a> {
    /// A stream of the target's context, in which the direct way's copies are queued.
    pub stream: StreamHandle,
    /// The stream that goes on when all of the chain is over. For a caller's chain it is the same one.
    pub joined: StreamHandle,
    /// Which one that is: by this the set and its crews are held.
    pub holder: StreamId,
    /// What to copy, in the caller's order.
    pub pages: Pages<'a>,
    /// Where pieces that touch are two all the same: see [`List`].
    pub seams: &'a [Address],
    /// For the direct way, then for each crew.
    pub shares: Vec<u64>,
    /// Whether peers reach the target's side.
    pub peers_reach: bool,
    /// Whether host memory is in pieces too small for a copy engine. There are no crews then.
    pub is_scattered: bool,
    /// If the GPU computes nothing meanwhile but what waits for this: how many bytes it waits for, of which these are some.
    pub awaited_bytes: Option<u64>,
    /// Where its lists may be, as [`Set::room_for`] said.
    pub places: Range<usize>,
    pub waits: Waits<'a>,
}

/// What a chain waits for.
#[derive(Debug, Clone, Copy)]
pub enum Waits<'a> {
    Nothing,
    /// Until its stream has come to where the set was taken. The direct way is in that stream.
    Stream,
    /// An event that is somebody else's.
    For(&'a Event),
}

impl Set {
    /// A set for `target`.
    pub fn new(direction: Direction, target: &Arc<Kernels>) -> Result<Set, CudaError> {
        let (device, itself) = (target.device(), std::slice::from_ref(target));
        Ok(Set {
            target: Arc::clone(target),
            own: Crew::new(direction, target, itself, OWN_SLOTS, OWN_SLOT_BYTES)?,
            batch: device.driver().batch_copy().map(|batch| (batch, CopyList::with_room(BATCH_COPIES))),
            begun: Event::new(device)?,
            direct: Event::new(device)?,
            done: Arc::new(Event::new(device)?),
            lists: Lists::new(device)?,
            holder: None,
            is_lost: false,
        })
    }

    /// Whether a chain is under way.
    pub fn is_busy(&mut self) -> bool {
        let passed = self.holder.is_none() || self.done.is_passed().unwrap_or(false);
        if passed && !self.is_lost {
            self.holder = None;
        }
        !passed || self.is_lost
    }

    /// Takes the set for a chain of a stream. Says whether the stream is idle, so that the chain begins at once, or `None`
    /// when a chain of another stream has the set.
    pub fn take(&mut self, stream: StreamHandle, holder: StreamId) -> Result<Option<bool>, CudaError> {
        if !self.take_at_once(holder) {
            return Ok(None);
        }
        self.begun.record_in(stream)?;
        self.begun.is_passed().map(Some)
    }

    /// Takes the set for a chain that ends in a stream, whatever is in that. `false`: a chain of another stream has it.
    pub fn take_at_once(&mut self, joined: StreamId) -> bool {
        !self.is_busy() || (self.holder == Some(joined) && !self.is_lost)
    }

    /// Where a chain of so many pieces can have its lists; `None` until chains that are under way have come further.
    pub fn room_for(&mut self, pieces: usize) -> Option<Range<usize>> {
        self.lists.room_for(pieces)
    }

    /// Queues a chain over the target's own lane and crews that are free for its stream. Whatever it returns, the joined
    /// stream goes on only when everything that was queued is over.
    ///
    /// # Safety
    ///
    /// The set was taken for the chain's stream and the target's context is current. Until the stream has passed the chain,
    /// the pieces are valid for all contexts as far as they are host memory and for the target's as far as they are its, and
    /// the rules of a copy in that stream hold for who else may use them.
    pub unsafe fn queue<C: DerefMut<Target = Crew>>(
        &mut self,
        mut chain: Chain,
        crews: &mut [C],
    ) -> Result<(), CudaError> {
        self.holder = Some(chain.holder);
        let direct = chain.pages.share(chain.shares[0]);
        let by_batch = self.goes_by_batch(&chain, direct);
        let call_bytes =
            if chain.awaited_bytes.is_some() { AWAITED_CALL_BYTES_MIN } else { ENGINE_PIECE_BYTES };
        let by_kernel = !by_batch && are_shorter(call_bytes, direct.pieces(), direct.bytes());
        // Few calls for the direct way, so that the lane is at work while the rest is queued.
        let whole = if by_kernel { Ok(()) } else { self.queue_direct(&chain, direct, by_batch) };
        let begun = match chain.waits {
            Waits::Nothing => None,
            Waits::Stream => Some(&self.begun),
            Waits::For(event) => Some(event),
        };
        let mut at_work: Vec<(&mut Crew, Work)> = Vec::with_capacity(crews.len() + 1);
        if by_kernel {
            let is_straight = chain.is_scattered || !is_small(direct.pieces(), direct.bytes());
            let how = if is_straight { How::Straight } else { How::Turns };
            let work = Work { call_bytes, ..work(direct, &self.own, how) };
            at_work.push((&mut self.own, work));
        }
        for (crew, share) in crews.iter_mut().zip(&chain.shares[1..]) {
            let pages = chain.pages.share(*share);
            let work = work(pages, crew, how_to_relay(crew.direction(), pages, chain.peers_reach));
            at_work.push((&mut **crew, work));
        }
        let target = self.target.device().index();
        let mut list = self.lists.open(&chain.places, chain.seams);
        let begin =
            |(crew, work): &mut (&mut Crew, Work)| crew.begin(chain.holder, &self.done, begun, target, work);
        let queued = at_work.iter_mut().try_for_each(begin);
        let queued = queued.and_then(|()| queue_in_turn(&mut at_work, target, &mut list));
        let listed = chain.places.len() - list.left();
        // All of them, also after an error.
        let joins = at_work.iter().map(|(crew, work)| crew.join(chain.joined, target, work));
        let joined = joins.fold(Ok(()), Result::and);
        let read = self.lists.close(chain.places.start..chain.places.start + listed, chain.joined);
        let ended = joined.and(read).and(self.done.record_in(chain.joined));
        if ended.is_err() {
            self.is_lost = true;
            // Those that did not begin are not this set's to wait for.
            let begun = at_work.iter_mut().filter(|(crew, _)| crew.works_until(&self.done));
            begun.for_each(|(crew, _)| crew.lose());
        }
        whole.and(queued).and(ended)
    }

    /// Waits until nothing of the target's own crew is under way. Says whether the set is lost, and until when its crews work: it is
    /// lost until all of these have been waited for too, and [`regain`](Set::regain) is told.
    pub fn settle(&mut self) -> (bool, Arc<Event>) {
        self.own.settle();
        (self.is_lost, Arc::clone(&self.done))
    }

    /// Nothing of any chain is under way any more.
    pub fn regain(&mut self) {
        self.lists.clear();
        self.holder = None;
        self.is_lost = false;
    }

    /// Whether a row is long enough for a batch, in a stream that takes one.
    fn goes_by_batch(&self, chain: &Chain, pages: Pages) -> bool {
        let least_copies = if is_small(pages.pieces(), pages.bytes()) { 2 } else { BATCH_COPIES_MIN };
        let may_wait = chain.awaited_bytes.is_none_or(|bytes| bytes >= AWAITED_BATCH_BYTES_MIN);
        let is_possible = self.batch.is_some() && BatchCopy::fits(chain.stream);
        pages.pieces() >= least_copies && is_worth_a_batch(pages) && may_wait && is_possible
    }

    /// Queues the direct way's copies in the chain's stream.
    fn queue_direct(&mut self, chain: &Chain, pages: Pages, by_batch: bool) -> Result<(), CudaError> {
        if let Waits::For(event) = chain.waits {
            event.hold(chain.stream)?;
        }
        let queued = match &mut self.batch {
            Some((batch, list)) if by_batch => {
                let most = if chain.shares.len() > 1 { BATCH_COPIES_BESIDE } else { BATCH_COPIES };
                queue_batch(&self.target, *batch, list, most, chain.stream, pages)
            }
            _ => queue_one_by_one(&self.target, chain.stream, pages),
        };
        if chain.joined == chain.stream {
            return queued;
        }
        let joined = self.direct.record_in(chain.stream).and_then(|()| self.direct.hold(chain.joined));
        queued.and(joined)
    }
}

/// Queues a row's copies, as many as that by one call.
fn queue_batch(
    target: &Kernels,
    batch: BatchCopy,
    list: &mut CopyList,
    most: usize,
    stream: StreamHandle,
    mut pages: Pages,
) -> Result<(), CudaError> {
    let driver = target.device().driver();
    while let Some(piece) = pages.next(u64::MAX) {
        list.add(piece.from, piece.to, piece.bytes);
        if list.len() == most || pages.bytes() == 0 {
            // SAFETY: by the contract of `Set::queue`; whoever calls this has asked whether the stream takes batches.
            unsafe { batch.queue(driver, list, stream)? };
        }
    }
    Ok(())
}

/// Queues a row's copies.
fn queue_one_by_one(target: &Kernels, stream: StreamHandle, mut pages: Pages) -> Result<(), CudaError> {
    while let Some(piece) = pages.next(u64::MAX) {
        // SAFETY: by the contract of `Set::queue`.
        unsafe { target.device().copy_in(stream, piece.from, piece.to, piece.bytes)? };
    }
    Ok(())
}

/// Whether these are pages too small for a copy engine.
pub fn is_small(pieces: usize, bytes: u64) -> bool {
    are_shorter(ENGINE_PIECE_BYTES, pieces, bytes)
}

/// Whether pieces are long enough on average for copy engines that take many by one call.
fn is_worth_a_batch(pages: Pages) -> bool {
    pages.bytes() >= BATCH_PIECE_BYTES * pages.pieces() as u64
}

/// How a relay works. Kernels of the target wait for room on it while an engine computes, and what the engine waits for comes late. So
/// pages that are long enough for few blocks of a relay's kernel to keep up with its link are not left to these.
fn how_to_relay(direction: Direction, pages: Pages, peers_reach: bool) -> How {
    let least = match direction {
        Direction::HostToDevice => STRAND_PIECE_BYTES,
        Direction::DeviceToHost => ENGINE_PIECE_BYTES,
    };
    if peers_reach && !are_shorter(least, pages.pieces(), pages.bytes()) { How::Strands } else { How::Turns }
}

/// What a crew is to do with its share.
fn work<'a>(pages: Pages<'a>, crew: &Crew, how: How) -> Work<'a> {
    let parcel_bytes = (pages.bytes() / PARCELS).max(PARCEL_BYTES_MIN).min(crew.slot_bytes());
    let parcels = pages.bytes().div_ceil(parcel_bytes);
    let call_bytes = ENGINE_PIECE_BYTES;
    Work { how, slots: crew.slots_for(parcels, how), pages, parcel_bytes, call_bytes }
}

/// Queues a parcel of each crew in turn, so that all lanes are at work soon.
fn queue_in_turn(at_work: &mut [(&mut Crew, Work)], target: u16, list: &mut List) -> Result<(), CudaError> {
    while at_work.iter().any(|(_, work)| work.pages.bytes() > 0) {
        for (crew, work) in at_work.iter_mut() {
            if list.left() == 0 {
                return Err(CudaError::full("list of pages"));
            }
            // SAFETY: by the contract of `Set::queue`; the list is pinned.
            unsafe { crew.queue(target, work, list)? };
        }
    }
    Ok(())
}
