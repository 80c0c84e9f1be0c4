//! A set: what chains for one GPU in one direction have in common. While a chain is under way, only a chain of the same
//! stream may use its set, which waits for the first one anyway; so no chain ever waits for one that it would not wait
//! for without us. This file knows how a chain is divided among crews; it must never know when that is allowed.

use super::crew::{Crew, List, Work};
use crate::device::{Event, HostMemory};
use crate::driver::CudaError;
use crate::driver::abi::{Address, StreamHandle};
use crate::kernels::{Kernels, Piece};
use crate::links::{Direction, ENGINE_PIECE_BYTES, parcels};
use std::collections::VecDeque;
use std::ops::DerefMut;
use std::sync::Arc;

/// Slots of the target's own crew, for pages too small for a copy engine.
const OWN_SLOTS: u64 = 3;
const OWN_SLOT_BYTES: u64 = 2 << 20;
/// A share is cut into this many parcels at least, if they are not too small then, so that its two hops overlap.
const PARCELS: u64 = 4;
const PARCEL_BYTES_MIN: u64 = 512 << 10;
/// Pieces that chains in flight may have listed for kernels.
const PIECES_MAX: usize = 65_536;

/// Everything that chains for one GPU in one direction need, but for the crews of its peers.
#[derive(Debug)]
pub struct Set {
    direction: Direction,
    target: Arc<Kernels>,
    own: Crew,
    /// Passed when the caller's stream has come to the copy.
    begun: Event,
    /// Passed when the last chain is done.
    done: Arc<Event>,
    list: HostMemory,
    listed: usize,
    /// Whose chain is under way.
    holder: Option<StreamHandle>,
}

// SAFETY: a stream's handle is only compared and handed to the driver, which takes it from any thread.
unsafe impl Send for Set {}

/// A chain to be queued.
#[derive(Debug)]
pub struct Chain {
    /// The caller's stream, of the target's context.
    pub stream: StreamHandle,
    /// What to copy, in the caller's order.
    pub pieces: VecDeque<Piece>,
    /// For the direct way, then for each crew.
    pub shares: Vec<u64>,
    /// Whether peers reach the target's side.
    pub peers_reach: bool,
    /// Whether the stream has come to the copy already.
    pub has_begun: bool,
}

impl Set {
    /// A set for `target`.
    pub fn new(direction: Direction, target: &Arc<Kernels>) -> Result<Set, CudaError> {
        let (device, itself) = (target.device(), std::slice::from_ref(target));
        Ok(Set {
            direction,
            target: Arc::clone(target),
            own: Crew::new(direction, device, itself, OWN_SLOTS, OWN_SLOT_BYTES)?,
            begun: Event::new(device)?,
            done: Arc::new(Event::new(device)?),
            list: HostMemory::new(device, PIECES_MAX * size_of::<Piece>())?,
            listed: 0,
            holder: None,
        })
    }

    /// Whether a chain is under way.
    pub fn is_busy(&mut self) -> bool {
        let passed = self.holder.is_none() || self.done.is_passed().unwrap_or(false);
        if passed {
            (self.holder, self.listed) = (None, 0);
        }
        !passed
    }

    /// Takes the set for a chain of a stream. Says whether the stream is idle, so that the chain begins at once, or `None`
    /// when a chain of another stream has the set.
    pub fn take(&mut self, stream: StreamHandle) -> Result<Option<bool>, CudaError> {
        if self.is_busy() && self.holder != Some(stream) {
            return Ok(None);
        }
        self.begun.record_in(stream)?;
        self.begun.is_passed().map(Some)
    }

    /// Whether pieces of these sizes can be listed for kernels.
    pub fn has_room_for(&self, pieces: usize) -> bool {
        self.listed + pieces <= PIECES_MAX
    }

    /// Queues a chain over the target's own lane and crews that are free for its stream. Whatever it returns, the caller's
    /// stream goes on only when everything that was queued is over.
    ///
    /// # Safety
    ///
    /// The set was taken for the chain's stream and the target's context is current. Until the stream has passed the chain,
    /// the pieces are valid for all contexts as far as they are host memory and for the target's as far as they are its, and
    /// the rules of a copy in that stream hold for who else may use them.
    pub unsafe fn queue<C: DerefMut<Target = Crew>>(
        &mut self,
        chain: &mut Chain,
        crews: &mut [C],
    ) -> Result<(), CudaError> {
        self.holder = Some(chain.stream);
        let direct = take(&mut chain.pieces, chain.shares[0]);
        let is_small = is_small(&direct, bytes_of(&direct));
        // Few calls for the direct way, so that the lane is at work while the rest is queued.
        let whole = if is_small { Ok(()) } else { self.queue_direct(chain.stream, &direct) };
        let mut at_work: Vec<(&mut Crew, Work)> = Vec::with_capacity(crews.len() + 1);
        for (crew, share) in crews.iter_mut().zip(&chain.shares[1..]) {
            let pieces = take(&mut chain.pieces, *share);
            let work = work(self.direction, &pieces, crew.slot_bytes(), chain.peers_reach);
            at_work.push((&mut **crew, work));
        }
        if is_small {
            let work = work(self.direction, &direct, self.own.slot_bytes(), false);
            at_work.push((&mut self.own, work));
        }
        let target = self.target.device().index();
        let begun = (!chain.has_begun).then_some(&self.begun);
        let mut list = List { start: self.list.start() as Address, pieces: self.listed };
        let begin =
            |(crew, work): &mut (&mut Crew, Work)| crew.begin(chain.stream, &self.done, begun, target, work);
        let queued = at_work.iter_mut().try_for_each(begin);
        let queued = queued.and_then(|()| queue_in_turn(&mut at_work, target, &mut list));
        self.listed = list.pieces;
        // All of them, also after an error.
        let joins = at_work.iter().map(|(crew, work)| crew.join(chain.stream, target, work));
        let joined = joins.fold(Ok(()), Result::and);
        let marked = self.done.record_in(chain.stream);
        whole.and(queued).and(joined).and(marked)
    }

    fn queue_direct(&self, stream: StreamHandle, pieces: &[Piece]) -> Result<(), CudaError> {
        let device = self.target.device();
        for piece in pieces {
            // SAFETY: by the contract of `queue`.
            unsafe { device.copy_in(stream, piece.from, piece.to, piece.bytes)? };
        }
        Ok(())
    }
}

/// Whether these are pages too small for a copy engine.
pub fn is_small(pieces: impl IntoIterator<IntoIter: ExactSizeIterator>, bytes: u64) -> bool {
    let pieces = pieces.into_iter().len() as u64;
    pieces > 1 && bytes < ENGINE_PIECE_BYTES * pieces
}

fn bytes_of(pieces: &[Piece]) -> u64 {
    pieces.iter().map(|piece| piece.bytes).sum()
}

/// How a crew does its share.
fn work(direction: Direction, pieces: &[Piece], slot_bytes: u64, peers_reach: bool) -> Work {
    let bytes = bytes_of(pieces);
    let parcel_bytes = (bytes / PARCELS).max(PARCEL_BYTES_MIN).min(slot_bytes);
    if peers_reach && bytes >= ENGINE_PIECE_BYTES * pieces.len() as u64 {
        return Work::Strands(pieces.iter().flat_map(|piece| cut(*piece, parcel_bytes)).collect());
    }
    Work::Turns(parcels(pieces.iter().map(|piece| direction.sides(piece)), parcel_bytes))
}

/// Queues a parcel of each crew in turn, so that all lanes are at work soon.
fn queue_in_turn(at_work: &mut [(&mut Crew, Work)], target: u16, list: &mut List) -> Result<(), CudaError> {
    let rounds = at_work.iter().map(|(_, work)| work.parcels()).max().unwrap_or(0);
    for index in 0..rounds {
        for (crew, work) in at_work.iter_mut() {
            // SAFETY: by the contract of `Set::queue`, whose caller has asked for room in the list.
            list.pieces += unsafe { crew.queue(target, work, index, list)? };
        }
    }
    Ok(())
}

/// A piece in parts of at most `part_bytes`.
fn cut(piece: Piece, part_bytes: u64) -> impl Iterator<Item = Piece> {
    (0..piece.bytes.div_ceil(part_bytes)).map(move |nth| {
        let at = nth * part_bytes;
        Piece { from: piece.from + at, to: piece.to + at, bytes: part_bytes.min(piece.bytes - at) }
    })
}

/// The first `bytes` bytes of the pieces.
fn take(pieces: &mut VecDeque<Piece>, mut bytes: u64) -> Vec<Piece> {
    let mut taken = Vec::new();
    while bytes > 0
        && let Some(front) = pieces.front_mut()
    {
        let part = front.bytes.min(bytes);
        taken.push(Piece { bytes: part, ..*front });
        bytes -= part;
        *front = Piece { from: front.from + part, to: front.to + part, bytes: front.bytes - part };
        if front.bytes == 0 {
            pieces.pop_front();
        }
    }
    taken
}
