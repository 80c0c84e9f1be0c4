//! Storing chunks: the node reserves a slot, the client's mover copies the chunk there, once, and
//! the client says what its checksums are.
//!
//! A slot that a lost operation of the client's mover may still write is not given back before the
//! mover says that it is quiet.

use super::arena::span_bytes;
use super::load::failed;
use super::slot::{self, Reserved, Slot};
use super::{Client, Shared};
use crate::protocol::request::NewChunk;
use forebay_kv::ChunkId;
use forebay_store::{ChunkShape, ShapeError, StoreEnd};
use forebay_transfer::lock::Mutex;
use forebay_transfer::{Class, End, Forked, Span, SpanPair, Transfer};
use std::sync::Arc;
use thiserror::Error;

/// Why a chunk is not being stored. `on_end` was not and will not be called.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum NotStored {
    #[error(transparent)]
    Shape(#[from] ShapeError),
    #[error(transparent)]
    Forked(#[from] Forked),
    #[error("the node is gone")]
    Disconnected,
}

type OnEnd = Box<dyn FnOnce(StoreEnd) + Send>;

/// What is done with bytes that have arrived, on the client's own thread: checksums cost too much
/// time for the mover's.
pub(super) type Sealing = Box<dyn FnOnce() + Send>;

/// A chunk on its way into its slot.
struct Filling {
    shared: Arc<Shared>,
    slot: Slot,
    layers: Vec<Vec<Span>>,
}

/// Slots that lost operations may still write. Each goes back when nothing does.
#[derive(Default)]
pub(super) struct Unquiet(Vec<(Slot, u64)>);

impl Client {
    /// Stores a chunk from `layers`: for each layer the spans whose bytes, one after another, are
    /// the layer.
    ///
    /// With `Ok`, `on_end` is called exactly once, on one of the client's threads or the mover's:
    /// when the chunk is visible or has failed; what the node refuses has failed with its reason.
    /// The spans must stay registered and unchanged until then.
    pub fn store_chunk(
        &self,
        id: ChunkId,
        parent: Option<ChunkId>,
        layers: &[Vec<Span>],
        class: Class,
        on_end: impl FnOnce(StoreEnd) + Send + 'static,
    ) -> Result<(), NotStored> {
        self.here()?;
        let shape = ChunkShape::new(layers.iter().map(|spans| span_bytes(spans)))?;
        let connection = self.shared.connection().ok_or(NotStored::Disconnected)?;
        let (shared, layers) = (Arc::clone(&self.shared), layers.to_vec());
        let once = Mutex::new(Some((shared, layers, Box::new(on_end) as OnEnd)));
        let on_reserved = move |_, reserved| {
            let Some((shared, layers, on_end)) = once.lock().take() else { return };
            match reserved {
                Reserved::Slot(slot) => Filling { shared, slot, layers }.fill(class, on_end),
                Reserved::Here => on_end(StoreEnd::AlreadyHere),
                Reserved::Refused(why) => on_end(StoreEnd::Failed(failed(why))),
            }
        };
        let chunk = NewChunk { id, parent };
        slot::reserve(self, &connection, &shape, &[chunk], Arc::new(on_reserved));
        Ok(())
    }
}

impl Filling {
    fn fill(self, class: Class, on_end: OnEnd) {
        let target = self.slot.span();
        let mut offset = target.offset;
        let pair = |span: &Span| {
            let to = Span::new(target.region, offset, span.len);
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
        let arena = self.slot.span().region;
        let lost_bytes = lost.iter().filter(|span| span.region == arena).map(|span| span.len).sum();
        if lost_bytes > 0 {
            self.shared.unquiet.lock().0.push((self.slot, lost_bytes));
        }
        untold.tell(StoreEnd::Failed(end));
    }

    /// Takes the checksums and has the chunk made visible.
    fn commit(self, untold: Untold) {
        let sums = self.slot.sums(&self.layers);
        self.slot.commit(sums, move |end| untold.tell(end));
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
            let target = slot.span();
            let arena = target.offset..target.offset + target.len;
            let here = spans.iter().filter(|span| span.region == target.region);
            let quiet: u64 = here.filter(|span| arena.contains(&span.offset)).map(|span| span.len).sum();
            *lost_bytes = lost_bytes.saturating_sub(quiet);
        }
        self.0.retain(|(_, lost_bytes)| *lost_bytes > 0);
    }
}
