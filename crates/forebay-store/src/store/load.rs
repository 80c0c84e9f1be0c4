//! Loading layers of a leased chunk, and verifying what arrived. This file knows leases, extents and checksums; it must
//! never know what the bytes mean or who waits for them.

use super::{Lease, Shared, Store};
use crate::checksum;
use crate::shape::ChunkShape;
use crate::stat::Unreadable;
use crate::tier::{Read, ReadEnd};
use forebay_mover::{Class, End, Span, SpanPair, SubmitError, Submitted, Transfer};
use std::ops::Range;
use std::sync::Arc;
use thiserror::Error;

/// Why layers are not being loaded. `on_end` was not and will not be called; to the caller it is a miss.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum NotLoaded {
    /// The lease does not give access to the chunk.
    #[error(transparent)]
    Unreadable(#[from] Unreadable),
    /// There is not one target per layer, or the chunk has no such layers.
    #[error("targets for {targets} layers, but {layers:?} of {chunk_layers} layers are to be loaded")]
    Layers {
        /// Layers asked for.
        layers: Range<usize>,
        /// Targets given.
        targets: usize,
        /// Layers of the chunk.
        chunk_layers: usize,
    },
    /// A layer's target has another length than the layer.
    #[error("layer {layer} has {layer_bytes} bytes, its target {target_bytes}")]
    Length {
        /// The layer.
        layer: usize,
        /// Its length.
        layer_bytes: u64,
        /// The length of its target.
        target_bytes: u64,
    },
    /// The mover takes nothing in.
    #[error(transparent)]
    Mover(#[from] SubmitError),
}

/// Why bytes may not be used. To the caller it is a miss.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum NotVerified {
    /// The lease no longer says what the bytes should be.
    #[error(transparent)]
    Unreadable(#[from] Unreadable),
    /// Not as many bytes as the layer has.
    #[error("layer {layer} has {layer_bytes} bytes, not {given_bytes}")]
    Length {
        /// The layer.
        layer: usize,
        /// Its length.
        layer_bytes: u64,
        /// Bytes given.
        given_bytes: u64,
    },
    /// The bytes are not those that were stored. The chunk was dropped and the fault counted.
    #[error("layer {layer} of chunk {chunk} is corrupt: its CRC-32C is {found:#010x}, not {stored:#010x}")]
    Corrupt {
        /// The chunk's place in the lease.
        chunk: usize,
        /// The layer.
        layer: usize,
        /// The checksum of the bytes that were stored.
        stored: u32,
        /// The checksum of the bytes given.
        found: u32,
    },
}

/// A read under way. Dropped before it was submitted, it lets go of the chunk.
#[derive(Debug)]
struct Outgoing {
    shared: Arc<Shared>,
    read: Option<Read>,
}

impl Store {
    /// Loads all layers of a chunk. See [`load_layers`](Store::load_layers).
    pub fn load_chunk(
        &self,
        lease: &Lease,
        chunk: usize,
        targets: &[Vec<Span>],
        class: Class,
        deadline_us: Option<u64>,
        on_end: impl FnOnce(End) + Send + 'static,
    ) -> Result<Submitted, NotLoaded> {
        self.load_layers(lease, chunk, 0..targets.len(), targets, class, deadline_us, on_end)
    }

    /// Loads layers of chunk `chunk` of the lease, counted from 0, into `targets`: for each layer the spans that its bytes
    /// fill one after another. `deadline_us` is in the mover's clock.
    ///
    /// With `Ok`, `on_end` is called exactly once, on the mover's thread. What arrived must be
    /// [verified](Store::verify) before it is used.
    #[expect(clippy::too_many_arguments, reason = "what, where to, how urgent and whom to tell, each plain")]
    pub fn load_layers(
        &self,
        lease: &Lease,
        chunk: usize,
        layers: Range<usize>,
        targets: &[Vec<Span>],
        class: Class,
        deadline_us: Option<u64>,
        on_end: impl FnOnce(End) + Send + 'static,
    ) -> Result<Submitted, NotLoaded> {
        let shared = &self.shared;
        let read = shared.tier().begin_read(shared.now_us(), lease.id()?, chunk)?;
        let outgoing = Outgoing { shared: Arc::clone(shared), read: Some(read) };
        let transfer = Transfer { pairs: outgoing.pairs(layers, targets)?, class, deadline_us };
        Ok(shared.mover.submit(transfer, move |end| {
            outgoing.ended(&end);
            on_end(end);
        })?)
    }

    /// Checks that `pieces`, one after another, are the bytes that layer `layer` of chunk `chunk` had when it was stored.
    /// The lease must be alive. Corrupt bytes end the chunk: from now on it is a miss for all.
    ///
    /// With the crate's feature `unverified`, which is for tests that prove that this check matters, corrupt bytes pass.
    pub fn verify(
        &self,
        lease: &Lease,
        chunk: usize,
        layer: usize,
        pieces: &[&[u8]],
    ) -> Result<(), NotVerified> {
        let shared = &self.shared;
        let id = lease.id()?;
        let (stored, layer_bytes) = shared.tier().sum(shared.now_us(), id, chunk, layer)?;
        let given_bytes = pieces.iter().map(|piece| piece.len() as u64).sum();
        if given_bytes != layer_bytes {
            return Err(NotVerified::Length { layer, layer_bytes, given_bytes });
        }
        let found = checksum::of_pieces(pieces);
        if found == stored || cfg!(feature = "unverified") {
            return Ok(());
        }
        shared.tier().drop_corrupt(shared.now_us(), id, chunk);
        Err(NotVerified::Corrupt { chunk, layer, stored, found })
    }
}

impl Outgoing {
    /// The bytes of each layer in the arena, one after another, to the spans of its target.
    fn pairs(&self, layers: Range<usize>, targets: &[Vec<Span>]) -> Result<Vec<SpanPair>, NotLoaded> {
        let Some(read) = &self.read else { return Ok(Vec::new()) };
        let shape = read.shape();
        let Some(extent) = shape.extent(layers.clone()).filter(|_| layers.len() == targets.len()) else {
            let (targets, chunk_layers) = (targets.len(), shape.layers());
            return Err(NotLoaded::Layers { layers, targets, chunk_layers });
        };
        check_lengths(shape, layers, targets)?;
        let mut offset = read.offset_bytes() + extent.start;
        let pair = |target: &Span| {
            let from = Span::new(self.shared.arena, offset, target.len);
            offset += target.len;
            SpanPair::new(from, *target)
        };
        Ok(targets.iter().flatten().filter(|span| span.len > 0).map(pair).collect())
    }

    /// The copy has ended; on the mover's thread.
    fn ended(mut self, end: &End) {
        self.end(match end {
            End::Done { .. } => ReadEnd::Done,
            _ => ReadEnd::Failed { lost_bytes: self.shared.lost_bytes(end) },
        });
    }

    fn end(&mut self, end: ReadEnd) {
        if let Some(read) = self.read.take() {
            self.shared.tier().end_read(self.shared.now_us(), read, end);
        }
    }
}

impl Drop for Outgoing {
    fn drop(&mut self) {
        self.end(ReadEnd::Done);
    }
}

fn check_lengths(shape: &ChunkShape, layers: Range<usize>, targets: &[Vec<Span>]) -> Result<(), NotLoaded> {
    for (layer, target) in layers.zip(targets) {
        let layer_bytes = shape.layer(layer).map_or(0, |extent| extent.end - extent.start);
        let target_bytes = target.iter().fold(0u64, |sum, span| sum.saturating_add(span.len));
        if target_bytes != layer_bytes {
            return Err(NotLoaded::Length { layer, layer_bytes, target_bytes });
        }
    }
    Ok(())
}
