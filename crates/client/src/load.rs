//! Loading chunks of a lease: the node has them lie in the arena, and the client's own mover copies
//! them from there to their target, once.

use super::arena::span_bytes;
use super::lease::{Held, Lease};
use super::{Client, LeasedChunk, leased_chunk};
use crate::protocol::answer::ChunkPlace;
use forebay_store::{ChunkShape, Unreadable};
use forebay_transfer::lock::Mutex;
use forebay_transfer::{Class, End, Failure, Forked, Reason, Span, SpanPair, SubmitError, Transfer};
use std::ops::Range;
use std::sync::Arc;
use thiserror::Error;

/// Why layers are not being loaded. `on_end` was not and will not be called; to the caller it is a
/// miss.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum NotLoaded {
    /// The lease does not give access to the chunk; with the node every lease dies.
    #[error(transparent)]
    Unreadable(#[from] Unreadable),
    /// There is not one target per layer, or the chunk has no such layers.
    #[error("targets for {targets} layers, but {layers:?} of {chunk_layers} layers are to be loaded")]
    Layers {
        layers: Range<usize>,
        targets: usize,
        /// Layers of the chunk, where they are known.
        chunk_layers: usize,
    },
    /// A layer's target has another length than the layer.
    #[error("layer {layer} has {layer_bytes} bytes, its target {target_bytes}")]
    Length {
        layer: usize,
        layer_bytes: u64,
        /// The length of its target.
        target_bytes: u64,
    },
    /// The client is another process's.
    #[error(transparent)]
    Forked(#[from] Forked),
    /// The mover takes nothing in.
    #[error(transparent)]
    Mover(#[from] SubmitError),
}

type OnEnd = Box<dyn FnOnce(End) + Send>;

/// What is to be copied as soon as the chunk lies in the arena.
struct Copy {
    held: Arc<Held>,
    layers: Range<usize>,
    targets: Vec<Vec<Span>>,
    class: Class,
    deadline_us: Option<u64>,
}

impl Client {
    /// Loads all layers of a chunk of the lease, counted from 0. `deadline_us` is in the mover's
    /// clock. A chunk on the node's disk or on a peer comes into the node's memory first, verified
    /// there.
    ///
    /// With `Ok`, `on_end` is called exactly once, on the mover's thread or the connection's: keep
    /// it short, and do not wait for the client or the mover in it. It is told the number of bytes
    /// that are in place, or why they are not; if the node failed, nothing was written to the
    /// targets. What arrived must be [verified](Client::verify) before it is used, and the lease
    /// must be held until then.
    pub fn load_chunk(
        &self,
        lease: &Lease,
        chunk: usize,
        targets: &[Vec<Span>],
        class: Class,
        deadline_us: Option<u64>,
        on_end: impl FnOnce(End) + Send + 'static,
    ) -> Result<(), NotLoaded> {
        self.here()?;
        let held = lease.alive()?;
        if chunk >= lease.len() {
            return Err(Unreadable::Outside { chunk, layer: 0 }.into());
        }
        let layers = 0..targets.len();
        if layers.is_empty() {
            return Err(NotLoaded::Layers { layers, targets: 0, chunk_layers: 0 });
        }
        let copy = Copy { held: Arc::clone(held), layers, targets: targets.to_vec(), class, deadline_us };
        match held.place(chunk) {
            Some(place) => copy.start(&place, Box::new(on_end)).map_err(|(error, _)| error),
            None => {
                copy.bring(chunk, Box::new(on_end));
                Ok(())
            }
        }
    }
}

impl Copy {
    /// Has the node lay the chunk into the arena, and copies it from there.
    fn bring(self, chunk: usize, on_end: OnEnd) {
        let (held, class, deadline_us) = (Arc::clone(&self.held), self.class, self.deadline_us);
        let once = Mutex::new(Some((self, on_end)));
        let on_brought = move |_, brought: Result<LeasedChunk, String>| {
            let Some((copy, on_end)) = once.lock().take() else { return };
            let place = match brought {
                Ok(_) => copy.held.place(chunk),
                Err(why) => return on_end(failed(why)),
            };
            let Some(place) = place else { return on_end(failed("the chunk is not in the arena".into())) };
            if let Err((error, Some(on_end))) = copy.start(&place, on_end) {
                on_end(failed(error.to_string()));
            }
        };
        leased_chunk::bring(&held, &[chunk], class, deadline_us, Arc::new(on_brought));
    }

    /// From the arena to the targets. What is refused gives back whom to tell, unless the mover
    /// dropped it.
    fn start(self, place: &ChunkPlace, on_end: OnEnd) -> Result<(), (NotLoaded, Option<OnEnd>)> {
        let pairs = match self.pairs(place) {
            Ok(pairs) => pairs,
            Err(error) => return Err((error, Some(on_end))),
        };
        let transfer = Transfer { pairs, class: self.class, deadline_us: self.deadline_us };
        let (mover, held) = (self.held.shared.mover.clone(), self.held);
        let told = Arc::new(Mutex::new(Some(on_end)));
        let take = |told: &Mutex<Option<OnEnd>>| told.lock().take();
        let on_copied = Arc::clone(&told);
        let submitted = mover.submit(transfer, move |end| {
            // The bytes may go from the arena only when nothing reads them any more.
            drop(held);
            if let Some(on_end) = take(&on_copied) {
                on_end(end);
            }
        });
        submitted.map(drop).map_err(|error| (error.into(), take(&told)))
    }

    fn pairs(&self, place: &ChunkPlace) -> Result<Vec<SpanPair>, NotLoaded> {
        let (shape, layers) = (&place.shape, self.layers.clone());
        let mut pairs = Vec::new();
        for (layer, target) in layers.clone().zip(&self.targets) {
            let Some(extent) = shape.layer(layer) else {
                let (targets, chunk_layers) = (self.targets.len(), shape.layers());
                return Err(NotLoaded::Layers { layers, targets, chunk_layers });
            };
            check_length(shape, layer, target)?;
            let mut offset = place.offset_bytes + extent.start;
            for span in target.iter().filter(|span| span.len > 0) {
                pairs.push(SpanPair::new(self.held.span(offset, span.len), *span));
                offset += span.len;
            }
        }
        Ok(pairs)
    }
}

fn check_length(shape: &ChunkShape, layer: usize, target: &[Span]) -> Result<(), NotLoaded> {
    let layer_bytes = shape.layer(layer).map_or(0, |extent| extent.end - extent.start);
    let target_bytes = span_bytes(target);
    match target_bytes == layer_bytes {
        true => Ok(()),
        false => Err(NotLoaded::Length { layer, layer_bytes, target_bytes }),
    }
}

/// Nothing was written to any target.
pub(super) fn failed(error: String) -> End {
    let reason = Reason::Link { link: "node".to_owned(), error, attempts: 1 };
    End::Failed(Failure { reason, unmoved: Vec::new(), moved_bytes: 0, quarantined: Vec::new() })
}
