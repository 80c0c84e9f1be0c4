//! A slot of the arena that a client writes: reserved, filled by whoever copies, and committed or given back. This file knows
//! these words; it must never know who copies, nor what is evicted for the slot.

use super::arena::NodeArena;
use super::connection::Connection;
use super::load::failed;
use super::{Client, Shared};
use crate::protocol::answer::Answer;
use crate::protocol::request::Request;
use forebay_kv::ChunkId;
use forebay_store::{ChunkShape, StoreEnd, checksum};
use forebay_transfer::Span;
use std::sync::Arc;

/// What becomes of the wish for a slot.
#[derive(Debug)]
pub enum Reserved {
    /// It is there, and only its holder writes it.
    Slot(Slot),
    /// The chunk is with the node already.
    Here,
    /// There is none, and why.
    Refused(String),
}

/// Room for one chunk in the arena. Dropped before it is committed, it goes back to the node: so it must be held for as long as
/// anything may write it, whatever becomes of the chunk.
pub struct Slot {
    shared: Arc<Shared>,
    connection: Arc<Connection>,
    slot: u64,
    /// The chunk's bytes in the arena.
    target: Span,
    shape: ChunkShape,
    committed: bool,
}

impl Client {
    /// Reserves a slot for a chunk. `on_end` is called exactly once, on one of the client's threads or, if there is no node, on
    /// this one. Keep it short.
    pub fn reserve(
        &self,
        id: ChunkId,
        parent: Option<ChunkId>,
        shape: ChunkShape,
        on_end: impl FnOnce(Reserved) + Send + 'static,
    ) {
        match self.shared.connection() {
            Some(connection) => reserve(&self.shared, connection, id, parent, shape, on_end),
            None => on_end(Reserved::Refused(self.shared.why_gone())),
        }
    }
}

/// Asks the node of a connection for a slot.
pub(super) fn reserve(
    shared: &Arc<Shared>,
    connection: Arc<Connection>,
    id: ChunkId,
    parent: Option<ChunkId>,
    shape: ChunkShape,
    on_end: impl FnOnce(Reserved) + Send + 'static,
) {
    let request = Request::Reserve { id, parent, shape: shape.clone() };
    let (holder, asked) = (Arc::clone(shared), Arc::clone(&connection));
    shared.ask_patiently(&asked, &request, move |answer| {
        on_end(match answer {
            Some(Answer::Reserved { slot, offset_bytes }) => {
                match connection.arena.span(offset_bytes, shape.bytes()) {
                    Some(target) => Reserved::Slot(Slot {
                        shared: holder,
                        connection,
                        slot,
                        target,
                        shape,
                        committed: false,
                    }),
                    None => Reserved::Refused("the slot lies outside of the arena".into()),
                }
            }
            Some(Answer::Here) => Reserved::Here,
            Some(Answer::Refused(_, why)) => Reserved::Refused(why),
            Some(other) => Reserved::Refused(format!("an answer to something else: {other:?}")),
            None => Reserved::Refused("the node is gone".into()),
        });
    });
}

impl Slot {
    /// The memory that it lies in.
    pub fn arena(&self) -> &Arc<NodeArena> {
        &self.connection.arena
    }

    /// The whole of it.
    pub fn span(&self) -> Span {
        self.target
    }

    /// Where a layer of the chunk goes.
    pub fn layer(&self, layer: usize) -> Option<Span> {
        let extent = self.shape.layer(layer)?;
        Some(Span::new(self.target.region, self.target.offset + extent.start, extent.end - extent.start))
    }

    /// The CRC-32C of each layer: of its source if the host reads it, so that a slip of the copy is found when the chunk is
    /// loaded, else of the copy. Costs a pass over the bytes.
    pub fn sums(&self, sources: &[Vec<Span>]) -> Vec<u32> {
        let memory = self.shared.mover.memory();
        let sum = |layer: usize| {
            let source = sources.get(layer).and_then(|source| checksum::of_spans(memory, source));
            source.or_else(|| checksum::of_spans(memory, &[self.layer(layer)?]))
        };
        (0..self.shape.layers()).filter_map(sum).collect()
    }

    /// Has the chunk made visible. Nothing writes the slot any more. `on_end` is called exactly once, on one of the client's
    /// threads or this one.
    pub fn commit(mut self, sums: Vec<u32>, on_end: impl FnOnce(StoreEnd) + Send + 'static) {
        self.committed = true;
        let bytes = self.shape.bytes();
        let request = Request::Commit { slot: self.slot, sums };
        self.shared.ask_patiently(&self.connection, &request, move |answer| {
            on_end(match answer {
                Some(Answer::Committed(true)) => StoreEnd::Stored { bytes },
                Some(Answer::Committed(false)) => StoreEnd::Deleted,
                Some(Answer::Refused(_, why)) => StoreEnd::Failed(failed(why)),
                Some(other) => StoreEnd::Failed(failed(format!("an answer to something else: {other:?}"))),
                None => StoreEnd::Failed(failed("the node is gone".into())),
            });
        });
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if !self.committed {
            self.connection.tell(&Request::Abort { slot: self.slot });
        }
    }
}

impl std::fmt::Debug for Slot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Slot").field("slot", &self.slot).field("target", &self.target).finish_non_exhaustive()
    }
}
