//! Storing chunks: the node reserves a slot, the client's mover copies the chunk there, once, and the client says what its
//! checksums are. This file knows these steps; it must never know what is evicted for the slot.
//!
//! A slot that a lost operation of the client's mover may still write is not given back before the mover says that it is
//! quiet.

use super::connection::Connection;
use super::load::{failed, span_bytes};
use super::{Client, Shared};
use crate::local::answer::Answer;
use crate::local::request::Request;
use forebay_kv::ChunkId;
use forebay_mover::{Class, End, Span, SpanPair, Transfer};
use forebay_store::{ChunkShape, ShapeError, StoreEnd, checksum};
use std::sync::Arc;
use thiserror::Error;

/// Why a chunk is not being stored. `on_end` was not and will not be called.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum NotStored {
    /// The layers do not make a chunk.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// There is no node to store it.
    #[error("the node is gone")]
    Disconnected,
}

type OnEnd = Box<dyn FnOnce(StoreEnd) + Send>;

/// What is done with bytes that have arrived, on the client's own thread: checksums cost too much time for the mover's.
pub(super) type Sealing = Box<dyn FnOnce() + Send>;

/// A chunk on its way into its slot. Dropped before it is committed, it gives the slot back.
struct Slot {
    shared: Arc<Shared>,
    connection: Arc<Connection>,
    slot: u64,
    layers: Vec<Vec<Span>>,
    /// The chunk's bytes in the arena.
    target: Span,
    shape: ChunkShape,
    committed: bool,
}

/// Slots that lost operations may still write. Each goes back when nothing does.
#[derive(Default)]
pub(super) struct Unquiet(Vec<(Slot, u64)>);

impl Client {
    /// Stores a chunk from `layers`: for each layer the spans whose bytes, one after another, are the layer.
    ///
    /// With `Ok`, `on_end` is called exactly once, on one of the client's threads or the mover's: when the chunk is visible
    /// or has failed; what the node refuses has failed with its reason. The spans must stay registered and unchanged until
    /// then.
    pub fn store_chunk(
        &self,
        id: ChunkId,
        parent: Option<ChunkId>,
        layers: &[Vec<Span>],
        class: Class,
        on_end: impl FnOnce(StoreEnd) + Send + 'static,
    ) -> Result<(), NotStored> {
        let shape = ChunkShape::new(layers.iter().map(|spans| span_bytes(spans)))?;
        let connection = self.shared.connection().ok_or(NotStored::Disconnected)?;
        let request = Request::Reserve { id, parent, shape: shape.clone() };
        let (shared, asked) = (Arc::clone(&self.shared), Arc::clone(&connection));
        let (layers, on_end): (_, OnEnd) = (layers.to_vec(), Box::new(on_end));
        self.shared.ask_patiently(&asked, &request, move |answer| match answer {
            Some(Answer::Reserved { slot, offset_bytes }) => {
                let target = Span::new(connection.arena, offset_bytes, shape.bytes());
                let slot = Slot { shared, connection, slot, layers, target, shape, committed: false };
                slot.fill(class, on_end);
            }
            Some(Answer::Here) => on_end(StoreEnd::AlreadyHere),
            Some(Answer::Refused(_, why)) => on_end(StoreEnd::Failed(failed(why))),
            Some(other) => {
                on_end(StoreEnd::Failed(failed(format!("an answer to something else: {other:?}"))))
            }
            None => on_end(StoreEnd::Failed(failed("the node is gone".into()))),
        });
        Ok(())
    }
}

impl Slot {
    fn fill(self, class: Class, on_end: OnEnd) {
        let end = self.target.offset.checked_add(self.target.len);
        if end.is_none_or(|end| end > self.connection.arena_bytes) {
            return on_end(StoreEnd::Failed(failed("the slot lies outside of the arena".into())));
        }
        let mut offset = self.target.offset;
        let pair = |span: &Span| {
            let to = Span::new(self.target.region, offset, span.len);
            offset += span.len;
            SpanPair::new(*span, to)
        };
        let spans = self.layers.iter().flatten().filter(|span| span.len > 0);
        let transfer = Transfer::new(spans.map(pair).collect(), class);
        let mover = self.shared.mover.clone();
        let guard = Untold(Some(on_end));
        // What the mover does not take in drops both.
        let _ = mover.submit(transfer, move |end| self.copied(end, guard));
    }

    /// The copy has ended; on the mover's thread.
    fn copied(self, end: End, untold: Untold) {
        let lost = match &end {
            End::Done { .. } => {
                let shared = Arc::clone(&self.shared);
                return shared.seal(Box::new(move || self.commit(untold)));
            }
            End::Failed(failure) => &failure.quarantined,
            End::Cancelled { quarantined, .. } => quarantined,
        };
        let arena = self.target.region;
        let lost_bytes = lost.iter().filter(|span| span.region == arena).map(|span| span.len).sum();
        if lost_bytes > 0 {
            let shared = Arc::clone(&self.shared);
            shared.unquiet().0.push((self, lost_bytes));
        }
        untold.tell(StoreEnd::Failed(end));
    }

    /// Takes the checksums, of the source where the host can read it, and has the chunk made visible.
    fn commit(mut self, untold: Untold) {
        let memory = self.shared.mover.memory();
        let copy = |layer: usize| {
            let extent = self.shape.layer(layer)?;
            let at = self.target.offset + extent.start;
            let span = Span::new(self.target.region, at, extent.end - extent.start);
            checksum::of_spans(memory, &[span])
        };
        let layers = self.layers.iter().enumerate();
        let sum =
            |(layer, source): (usize, &Vec<Span>)| checksum::of_spans(memory, source).or_else(|| copy(layer));
        let sums: Vec<u32> = layers.filter_map(sum).collect();
        self.committed = true;
        let (connection, bytes) = (Arc::clone(&self.connection), self.shape.bytes());
        let shared = Arc::clone(&self.shared);
        shared.ask_patiently(&connection, &Request::Commit { slot: self.slot, sums }, move |answer| {
            untold.tell(match answer {
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

/// Whoever waits for a store. Dropped, it says that the mover did not take it in.
struct Untold(Option<OnEnd>);

impl Untold {
    fn tell(mut self, end: StoreEnd) {
        if let Some(on_end) = self.0.take() {
            on_end(end);
        }
    }
}

impl Drop for Untold {
    fn drop(&mut self) {
        if let Some(on_end) = self.0.take() {
            on_end(StoreEnd::Failed(failed("the mover takes nothing in".into())));
        }
    }
}

impl Unquiet {
    /// Spans that were quarantined are touched by nobody any more.
    pub fn quiet(&mut self, spans: &[Span]) {
        for (slot, lost_bytes) in &mut self.0 {
            let arena = slot.target.offset..slot.target.offset + slot.target.len;
            let here = spans.iter().filter(|span| span.region == slot.target.region);
            let quiet: u64 = here.filter(|span| arena.contains(&span.offset)).map(|span| span.len).sum();
            *lost_bytes = lost_bytes.saturating_sub(quiet);
        }
        self.0.retain(|(_, lost_bytes)| *lost_bytes > 0);
    }
}

impl std::fmt::Debug for Unquiet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Unquiet").field("slots", &self.0.len()).finish()
    }
}
