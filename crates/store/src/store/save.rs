//! Storing a chunk: slot, copy, checksums, commit. This file knows these steps.

use super::load::span_bytes;
use super::write_back::Dirty;
use super::{Shared, Store};
use crate::checksum;
use crate::shape::{ChunkShape, ShapeError};
use crate::stat::Refused;
use crate::tenant::TenantId;
use crate::tier::{Begun, Write};
use forebay_kv::ChunkId;
use forebay_transfer::{Class, End, Span, SpanPair, SubmitError, Transfer};
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use thiserror::Error;

/// How storing a chunk ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StoreEnd {
    /// The chunk is visible.
    Stored { bytes: u64 },
    /// It was here before; nothing was copied.
    AlreadyHere,
    /// It was deleted while it was copied.
    Deleted,
    /// The copy failed or was cancelled.
    Failed(End),
}

/// Why a chunk is not being stored. `on_end` was not and will not be called.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum NotStored {
    #[error(transparent)]
    Shape(#[from] ShapeError),
    #[error(transparent)]
    Refused(#[from] Refused),
    #[error(transparent)]
    Mover(#[from] SubmitError),
}

type OnEnd = Box<dyn FnOnce(StoreEnd) + Send>;

/// A chunk on its way in. Dropped before it is committed, it gives its slot back.
#[derive(Debug)]
struct Incoming {
    shared: Arc<Shared>,
    write: Option<Write>,
    layers: Vec<Vec<Span>>,
    dirty: Dirty,
}

/// What is to be done with bytes that have arrived, on the store's own thread: checksums cost
/// milliseconds a chunk, too long for the mover's.
pub(super) type Job = Box<dyn FnOnce() + Send>;

impl Store {
    /// Stores a chunk from `layers`: for each layer the spans whose bytes, one after another, are
    /// the layer.
    ///
    /// With `Ok`, `on_end` is called exactly once: at once and on this thread if the chunk is here
    /// already, else when it is visible or has failed. The spans must stay registered and unchanged
    /// until then, because the checksums are taken from them: what a copy got wrong is found by
    /// whoever loads it.
    pub fn store_chunk(
        &self,
        tenant: TenantId,
        id: ChunkId,
        parent: Option<ChunkId>,
        layers: &[Vec<Span>],
        class: Class,
        on_end: impl FnOnce(StoreEnd) + Send + 'static,
    ) -> Result<(), NotStored> {
        let shared = &self.shared;
        let shape = ChunkShape::new(layers.iter().map(|spans| span_bytes(spans)))?;
        let begun = shared.begin_write(tenant, &id, parent.as_ref(), &shape)?;
        let Begun::Write(write) = begun else {
            on_end(StoreEnd::AlreadyHere);
            return Ok(());
        };
        let pairs = shared.pairs_to_arena(layers, write.offset_bytes());
        let dirty = Dirty { tenant, id, parent, bytes: shape.bytes() };
        let incoming =
            Incoming { shared: Arc::clone(shared), write: Some(write), layers: layers.to_vec(), dirty };
        shared
            .mover
            .submit(Transfer::new(pairs, class), move |end| incoming.copied(end, Box::new(on_end)))?;
        Ok(())
    }
}

impl Shared {
    /// Each span to the bytes of the arena that follow those of the span before.
    pub(super) fn pairs_to_arena(&self, layers: &[Vec<Span>], offset_bytes: u64) -> Vec<SpanPair> {
        let mut offset = offset_bytes;
        let spans = layers.iter().flatten().filter(|span| span.len > 0);
        let pair = |span: &Span| {
            let to = Span::new(self.arena, offset, span.len);
            offset += span.len;
            SpanPair::new(*span, to)
        };
        spans.map(pair).collect()
    }

    /// The checksum of a layer that was copied to the arena: of its source where the host can read
    /// it, else of the copy.
    pub(super) fn checksum_of(&self, write: &Write, layer: usize, source: &[Span]) -> Option<u32> {
        let memory = self.mover.memory();
        let copy = || {
            let extent = write.shape().layer(layer)?;
            let offset = write.offset_bytes() + extent.start;
            checksum::of_spans(memory, &[Span::new(self.arena, offset, extent.end - extent.start)])
        };
        checksum::of_spans(memory, source).or_else(copy)
    }

    /// Makes a chunk visible, and offers it to the disk. Says whether it is.
    pub(super) fn commit(&self, write: Write, checksums: &[u32], dirty: Dirty) -> bool {
        let visible = self.tier.lock().commit(self.now_us(), write, checksums).is_ok();
        if visible {
            self.offer_to_disk(dirty);
        }
        visible
    }
}

impl Incoming {
    /// The copy has ended; on the mover's thread.
    fn copied(mut self, end: End, on_end: OnEnd) {
        if let End::Done { bytes } = end {
            let jobs = self.shared.checksum_jobs.clone();
            // The thread that takes it lives as long as the store, which this chunk keeps alive.
            let _ = jobs.send(Box::new(move || self.finish(bytes, on_end)));
            return;
        }
        let lost_bytes = self.shared.lost_bytes(&end);
        self.abort(lost_bytes);
        on_end(StoreEnd::Failed(end));
    }

    fn abort(&mut self, lost_bytes: u64) {
        if let Some(write) = self.write.take() {
            self.shared.tier.lock().abort(self.shared.now_us(), write, lost_bytes);
        }
    }

    /// Takes the checksums and makes the chunk visible.
    fn finish(self, bytes: u64, on_end: OnEnd) {
        let visible = self.commit();
        on_end(if visible { StoreEnd::Stored { bytes } } else { StoreEnd::Deleted });
    }

    fn commit(mut self) -> bool {
        let Some(write) = self.write.take() else { return false };
        let layers = self.layers.iter().enumerate();
        let checksums: Vec<u32> =
            layers.filter_map(|(layer, source)| self.shared.checksum_of(&write, layer, source)).collect();
        self.shared.commit(write, &checksums, self.dirty)
    }
}

impl Drop for Incoming {
    fn drop(&mut self) {
        self.abort(0);
    }
}

/// The store's own thread.
pub(super) fn run_all(jobs: Receiver<Job>) {
    jobs.into_iter().for_each(|job| job());
}
