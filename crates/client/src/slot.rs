//! Slots of the arena that a client writes: reserved, filled by whoever copies, and committed or
//! given back.
//!
//! Slots that are reserved together are committed together: a commit is kept until the last slot of
//! its group is filled or given back, or [`COMMITTED_AT`] of them wait. So a long prompt costs a
//! few messages, a chunk that is reserved alone is committed at once, and no timer is needed.

use super::arena::NodeArena;
use super::connection::{Connection, Question};
use super::load::failed;
use super::{Client, Shared};
use crate::protocol::answer::{Answer, Commitment, Reservation};
use crate::protocol::request::{Filled, NewChunk, Request, TOGETHER_MAX};
use forebay_store::{ChunkShape, StoreEnd, checksum};
use forebay_transfer::Span;
use forebay_transfer::lock::Mutex;
use std::sync::Arc;

/// Filled slots of a group that wait to be committed at most.
const COMMITTED_AT: usize = 128;

/// What becomes of the wish for a slot.
#[derive(Debug)]
pub enum Reserved {
    /// It is there, and only its holder writes it.
    Slot(Slot),
    Here,
    /// There is none, and why.
    Refused(String),
}

/// Is told what became of each chunk, by its place among those that were asked for.
pub(super) type OnReserved = Arc<dyn Fn(usize, Reserved) + Send + Sync>;

/// Room for one chunk in the arena. Dropped before it is committed, it goes back to the node: so it
/// must be held for as long as anything may write it, whatever becomes of the chunk.
pub struct Slot {
    group: Arc<Group>,
    slot: u64,
    /// The chunk's bytes in the arena.
    target: Span,
    committed: bool,
}

/// Slots that were reserved together.
struct Group {
    shared: Arc<Shared>,
    connection: Arc<Connection>,
    shape: ChunkShape,
    state: Mutex<GroupState>,
}

struct GroupState {
    /// Slots that are neither filled nor given back.
    open: usize,
    ready: Vec<Ready>,
}

struct Ready {
    filled: Filled,
    on_end: Box<dyn FnOnce(StoreEnd) + Send>,
}

impl Client {
    /// Reserves a slot for each of `chunks`, all of one shape. `on_end` is called once for each,
    /// with its place in `chunks`, on one of the client's threads or, if there is no node, on this
    /// one. Keep it short.
    pub fn reserve(
        &self,
        shape: &ChunkShape,
        chunks: &[NewChunk],
        on_end: impl Fn(usize, Reserved) + Send + Sync + 'static,
    ) {
        match self.shared.connection() {
            Some(connection) => reserve(self, &connection, shape, chunks, Arc::new(on_end)),
            None => {
                (0..chunks.len()).for_each(|chunk| on_end(chunk, Reserved::Refused(self.shared.why_gone())))
            }
        }
    }
}

/// Asks the node of a connection for slots.
pub(super) fn reserve(
    client: &Client,
    connection: &Arc<Connection>,
    shape: &ChunkShape,
    chunks: &[NewChunk],
    on_end: OnReserved,
) {
    let shared = &client.shared;
    for (number, chunks) in chunks.chunks(TOGETHER_MAX).enumerate() {
        let request = Request::Reserve { shape: shape.clone(), chunks: chunks.to_vec() };
        let (first, asked, on_end) = (number * TOGETHER_MAX, chunks.len(), Arc::clone(&on_end));
        let (holder, shape) = ((Arc::clone(shared), Arc::clone(connection)), shape.clone());
        shared.ask_patiently(connection, Question::new(&request, client.context), move |answer| {
            let why = match answer {
                Some(Answer::Reserved(all)) if all.len() == asked => {
                    let all = Group::slots(holder, shape, all);
                    return all.into_iter().enumerate().for_each(|(chunk, end)| on_end(first + chunk, end));
                }
                Some(Answer::Refused(_, why)) => why,
                Some(other) => format!("an answer to something else: {other:?}"),
                None => "the node is gone".into(),
            };
            (first..first + asked).for_each(|chunk| on_end(chunk, Reserved::Refused(why.clone())));
        });
    }
}

impl Group {
    fn slots(
        (shared, connection): (Arc<Shared>, Arc<Connection>),
        shape: ChunkShape,
        all: Vec<Reservation>,
    ) -> Vec<Reserved> {
        let open = all.iter().filter(|end| matches!(end, Reservation::Slot { .. })).count();
        let (arena, bytes) = (Arc::clone(&connection.arena), shape.bytes());
        let state = Mutex::new(GroupState { open, ready: Vec::new() });
        let group = Arc::new(Group { shared, connection, shape, state });
        let reserved = |end| match end {
            Reservation::Slot { slot, offset_bytes } => match arena.span(offset_bytes, bytes) {
                Some(target) => {
                    Reserved::Slot(Slot { group: Arc::clone(&group), slot, target, committed: false })
                }
                None => {
                    group.close(None);
                    Reserved::Refused("the slot lies outside of the arena".into())
                }
            },
            Reservation::Here => Reserved::Here,
            Reservation::Refused(_, why) => Reserved::Refused(why),
        };
        all.into_iter().map(reserved).collect()
    }

    /// A slot is filled, or given back.
    fn close(&self, ready: Option<Ready>) {
        if let Err(forked) = self.shared.process.check() {
            // A thread of the parent may have held the lock when it forked.
            return ready
                .into_iter()
                .for_each(|ready| (ready.on_end)(StoreEnd::Failed(failed(forked.to_string()))));
        }
        let mut state = self.state.lock();
        state.open -= 1;
        state.ready.extend(ready);
        if state.open > 0 && state.ready.len() < COMMITTED_AT {
            return;
        }
        let ready = std::mem::take(&mut state.ready);
        drop(state);
        if !ready.is_empty() {
            self.commit(ready);
        }
    }

    fn commit(&self, ready: Vec<Ready>) {
        let (filled, on_ends): (Vec<_>, Vec<_>) =
            ready.into_iter().map(|Ready { filled, on_end }| (filled, on_end)).unzip();
        let bytes = self.shape.bytes();
        self.shared.ask_patiently(&self.connection, &Request::Commit(filled), move |answer| {
            let why = match answer {
                Some(Answer::Committed(all)) if all.len() == on_ends.len() => {
                    return on_ends.into_iter().zip(all).for_each(|(on_end, end)| on_end(stored(end, bytes)));
                }
                Some(Answer::Refused(_, why)) => why,
                Some(other) => format!("an answer to something else: {other:?}"),
                None => "the node is gone".into(),
            };
            on_ends.into_iter().for_each(|on_end| on_end(StoreEnd::Failed(failed(why.clone()))));
        });
    }
}

fn stored(end: Commitment, bytes: u64) -> StoreEnd {
    match end {
        Commitment::Visible => StoreEnd::Stored { bytes },
        Commitment::Deleted => StoreEnd::Deleted,
        Commitment::Refused(_, why) => StoreEnd::Failed(failed(why)),
    }
}

impl Slot {
    /// The memory that it lies in.
    pub fn arena(&self) -> &Arc<NodeArena> {
        &self.group.connection.arena
    }

    /// The whole of it.
    pub fn span(&self) -> Span {
        self.target
    }

    /// Where a layer of the chunk goes.
    pub fn layer(&self, layer: usize) -> Option<Span> {
        let extent = self.group.shape.layer(layer)?;
        Some(Span::new(self.target.region, self.target.offset + extent.start, extent.end - extent.start))
    }

    /// The CRC-32C of each layer: of its source if the host reads it, so that a slip of the copy is
    /// found when the chunk is loaded, else of the copy. Costs a pass over the bytes.
    pub fn sums(&self, sources: &[Vec<Span>]) -> Vec<u32> {
        Slot::sums_of(&[(self, sources)]).pop().unwrap_or_default()
    }

    /// The same of several slots of one shape, each with its sources. Memory is looked at once for
    /// each layer.
    pub fn sums_of(slots: &[(&Slot, &[Vec<Span>])]) -> Vec<Vec<u32>> {
        let Some((first, _)) = slots.first() else { return Vec::new() };
        let memory = first.group.shared.mover.memory();
        let mut sums = vec![Vec::new(); slots.len()];
        for layer in 0..first.group.shape.layers() {
            let spans = |(slot, sources): &(&Slot, &[Vec<Span>])| match sources.get(layer) {
                Some(source) if !source.is_empty() => source.clone(),
                _ => slot.layer(layer).into_iter().collect(),
            };
            let lists: Vec<Vec<Span>> = slots.iter().map(spans).collect();
            let lists: Vec<&[Span]> = lists.iter().map(Vec::as_slice).collect();
            for (((slot, _), sum), sums) in slots.iter().zip(checksum::of_each(memory, &lists)).zip(&mut sums)
            {
                let of_copy = || checksum::of_spans(memory, &[slot.layer(layer)?]);
                sums.extend(sum.or_else(of_copy));
            }
        }
        sums
    }

    /// Has the chunk made visible, with those that were reserved with it. Nothing writes the slot
    /// any more. `on_end` is called exactly once, on one of the client's threads or this one.
    pub fn commit(mut self, sums: Vec<u32>, on_end: impl FnOnce(StoreEnd) + Send + 'static) {
        self.committed = true;
        let filled = Filled { slot: self.slot, sums };
        self.group.close(Some(Ready { filled, on_end: Box::new(on_end) }));
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if !self.committed {
            self.group.connection.tell(&Request::Abort { slot: self.slot });
            self.group.close(None);
        }
    }
}

impl std::fmt::Debug for Slot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Slot").field("slot", &self.slot).field("target", &self.target).finish_non_exhaustive()
    }
}
