//! Loading layers of leased chunks from memory, and verifying what arrived. This file knows leases,
//! extents and checksums; `load_disk.rs` brings what lies on disk.

use super::{Lease, Store, StoreInner};
use crate::checksum;
use crate::shape::ChunkShape;
use crate::ssd::NotRead;
use crate::stat::Unreadable;
use crate::tier::{Read, ReadEnd};
use forebay_transfer::{Class, End, Span, SpanPair, SubmitError, Transfer};
use std::ops::Range;
use std::sync::Arc;
use thiserror::Error;

/// Why layers are not being loaded. `on_end` was not and will not be called; to the caller it is a
/// miss.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum NotLoaded {
    /// The lease does not give access to the chunk.
    #[error(transparent)]
    Unreadable(#[from] Unreadable),
    /// There is not one target per layer, or the chunk has no such layers.
    #[error("targets for {targets} layers, but {layers:?} of {chunk_layers} layers are to be loaded")]
    Layers { layers: Range<usize>, targets: usize, chunk_layers: usize },
    /// A layer's target has another length than the layer.
    #[error("layer {layer} has {layer_bytes} bytes, its target {target_bytes}")]
    Length {
        layer: usize,
        /// Its length.
        layer_bytes: u64,
        /// The length of its target.
        target_bytes: u64,
    },
    /// The disk tier does not begin to read.
    #[error(transparent)]
    Disk(#[from] NotRead),
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
        layer: usize,
        /// Its length.
        layer_bytes: u64,
        given_bytes: u64,
    },
    /// The bytes are not those that were stored, and the fault was counted. A chunk in memory was
    /// dropped; one that was right when it came from the disk stays there.
    #[error("layer {layer} of chunk {chunk} is corrupt: its CRC-32C is {found:#010x}, not {stored:#010x}")]
    Corrupt {
        /// The chunk's place in the lease.
        chunk: usize,
        layer: usize,
        /// The checksum of the bytes that were stored.
        stored: u32,
        /// The checksum of the bytes given.
        found: u32,
    },
}

/// Layers of a chunk that are to be loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Load {
    /// The chunk's place in the lease, counted from 0.
    pub chunk: usize,
    pub layers: Range<usize>,
    /// For each layer the spans that its bytes fill one after another.
    pub targets: Vec<Vec<Span>>,
}

/// How urgent a load is.
#[derive(Debug, Clone, Copy)]
pub(super) struct Urgency {
    pub class: Class,
    pub deadline_us: Option<u64>,
}

/// Chunks of the arena that are being read. Dropped before they were copied, they are let go.
#[derive(Debug)]
pub(super) struct Outgoing {
    shared: Arc<StoreInner>,
    reads: Vec<Read>,
}

impl Store {
    /// Loads all layers of a chunk. See [`load_chunks`](Store::load_chunks).
    pub fn load_chunk(
        &self,
        lease: &Lease,
        chunk: usize,
        targets: &[Vec<Span>],
        class: Class,
        deadline_us: Option<u64>,
        on_end: impl FnOnce(End) + Send + 'static,
    ) -> Result<(), NotLoaded> {
        self.load_layers(lease, chunk, 0..targets.len(), targets, class, deadline_us, on_end)
    }

    /// Loads layers of a chunk. See [`load_chunks`](Store::load_chunks).
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
    ) -> Result<(), NotLoaded> {
        let load = Load { chunk, layers, targets: targets.to_vec() };
        self.load_chunks(lease, vec![load], class, deadline_us, on_end)
    }

    /// Loads layers of chunks of the lease. `deadline_us` is in the mover's clock.
    ///
    /// What lies on disk is read first, all of it at once or none, and verified in staging; then
    /// everything goes to its targets in one transfer. Who wants what lies in memory sooner loads
    /// it by itself. A chunk that was read whole from the disk is offered to the memory tier behind
    /// that.
    ///
    /// With `Ok`, `on_end` is called exactly once, on a thread of the store or the mover, or on
    /// this one if it is known at once that there is no staging. It is told the number of bytes
    /// that are in place, or why they are not; if the disk failed nothing was written to the
    /// targets, and the failure names no spans. What arrived must be [verified](Store::verify)
    /// before it is used.
    pub fn load_chunks(
        &self,
        lease: &Lease,
        loads: Vec<Load>,
        class: Class,
        deadline_us: Option<u64>,
        on_end: impl FnOnce(End) + Send + 'static,
    ) -> Result<(), NotLoaded> {
        let (on_disk, in_memory): (Vec<Load>, Vec<Load>) =
            loads.into_iter().partition(|load| lease.on_disk(load.chunk).is_some());
        let mut outgoing = Outgoing { shared: Arc::clone(&self.shared), reads: Vec::new() };
        let mut pairs = Vec::new();
        for load in &in_memory {
            outgoing.add(lease, load, &mut pairs)?;
        }
        let urgency = Urgency { class, deadline_us };
        if !on_disk.is_empty() {
            return self.load_from_disk(lease, on_disk, outgoing, pairs, urgency, Box::new(on_end));
        }
        let transfer = Transfer { pairs, class, deadline_us };
        self.shared.mover.submit(transfer, move |end| {
            outgoing.ended(&end);
            on_end(end);
        })?;
        Ok(())
    }

    /// Checks that `pieces`, one after another, are the bytes that layer `layer` of chunk `chunk`
    /// had when it was stored. The lease must be alive, and a chunk on disk must have been loaded
    /// under it. Corrupt bytes end a chunk in memory: from now on it is a miss for all.
    ///
    /// With the crate's feature `unverified`, which is for tests that prove that this check
    /// matters, corrupt bytes pass.
    pub fn verify(
        &self,
        lease: &Lease,
        chunk: usize,
        layer: usize,
        pieces: &[&[u8]],
    ) -> Result<(), NotVerified> {
        let (stored, layer_bytes) = self.sum(lease, chunk, layer)?;
        let given_bytes = pieces.iter().map(|piece| piece.len() as u64).sum();
        if given_bytes != layer_bytes {
            return Err(NotVerified::Length { layer, layer_bytes, given_bytes });
        }
        let found = checksum::of_pieces(pieces);
        if found == stored || cfg!(feature = "unverified") {
            return Ok(());
        }
        let shared = &self.shared;
        match (&shared.disk, lease.memory_id()) {
            (Some(disk), _) if lease.on_disk(chunk).is_some() => disk.count_bad_copy(),
            (_, Ok(id)) => {
                let name = shared.tier.lock().drop_corrupt(shared.now_us(), id, chunk);
                shared.drop_unchecked_copy(name);
            }
            (_, Err(_)) => {}
        }
        Err(NotVerified::Corrupt { chunk, layer, stored, found })
    }

    /// The CRC-32C and length that a layer must have.
    fn sum(&self, lease: &Lease, chunk: usize, layer: usize) -> Result<(u32, u64), Unreadable> {
        match lease.on_disk(chunk) {
            Some((disk, place)) => {
                disk.checksums.get(place, layer).ok_or(Unreadable::Outside { chunk, layer })
            }
            None => self.shared.tier.lock().sum(self.shared.now_us(), lease.memory_id()?, chunk, layer),
        }
    }
}

impl Outgoing {
    /// Begins to read a chunk, and adds the bytes of each layer in the arena, one after another,
    /// with the spans of its target.
    fn add(&mut self, lease: &Lease, load: &Load, pairs: &mut Vec<SpanPair>) -> Result<(), NotLoaded> {
        let shared = &self.shared;
        let read = shared.tier.lock().begin_read(shared.now_us(), lease.memory_id()?, load.chunk)?;
        let arena = shared.arena;
        self.reads.push(read);
        let Some(read) = self.reads.last() else { return Ok(()) };
        let (shape, layers) = (read.shape(), load.layers.clone());
        let Some(extent) = shape.extent(layers.clone()).filter(|_| layers.len() == load.targets.len()) else {
            let (targets, chunk_layers) = (load.targets.len(), shape.layers());
            return Err(NotLoaded::Layers { layers, targets, chunk_layers });
        };
        check_lengths(shape, layers, &load.targets)?;
        let from = Span::new(arena, read.offset_bytes() + extent.start, extent.end - extent.start);
        pairs.extend(spread(from, load.targets.iter().flatten()));
        Ok(())
    }

    /// The copy has ended; on the mover's thread.
    pub fn ended(mut self, end: &End) {
        for read in std::mem::take(&mut self.reads) {
            let extent = read.offset_bytes()..read.offset_bytes() + read.shape().bytes();
            let ended = match end {
                End::Done { .. } => ReadEnd::Done,
                _ => ReadEnd::Failed { lost_bytes: self.shared.lost_bytes_in(end, &extent) },
            };
            self.shared.tier.lock().end_read(self.shared.now_us(), read, ended);
        }
    }
}

impl Drop for Outgoing {
    fn drop(&mut self) {
        for read in std::mem::take(&mut self.reads) {
            self.shared.tier.lock().end_read(self.shared.now_us(), read, ReadEnd::Done);
        }
    }
}

/// The bytes of `from`, one after another, to the spans of a target that has as many.
pub(super) fn spread<'a>(
    from: Span,
    target: impl Iterator<Item = &'a Span>,
) -> impl Iterator<Item = SpanPair> {
    let mut offset = from.offset;
    target.filter(|span| span.len > 0).map(move |span| {
        let part = Span::new(from.region, offset, span.len);
        offset += span.len;
        SpanPair::new(part, *span)
    })
}

fn check_lengths(shape: &ChunkShape, layers: Range<usize>, targets: &[Vec<Span>]) -> Result<(), NotLoaded> {
    for (layer, target) in layers.zip(targets) {
        let layer_bytes = shape.layer(layer).map_or(0, |extent| extent.end - extent.start);
        let target_bytes = span_bytes(target);
        if target_bytes != layer_bytes {
            return Err(NotLoaded::Length { layer, layer_bytes, target_bytes });
        }
    }
    Ok(())
}

/// Bytes of all spans. A sum that cannot be fits nothing, whatever number stands for it.
pub(super) fn span_bytes(spans: &[Span]) -> u64 {
    spans.iter().fold(0, |sum, span| sum.saturating_add(span.len))
}
