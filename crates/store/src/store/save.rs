//! Storing a chunk: slot, copy, checksums, commit. This file knows these steps.

use super::load::span_bytes;
use super::reserve::{NotStored, Reservation};
use super::{Store, StoreInner};
use crate::shape::ChunkShape;
use crate::tenant::TenantId;
use forebay_kv::ChunkId;
use forebay_transfer::{Class, End, Span, SpanPair, Transfer};
use std::sync::mpsc::Receiver;

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

type OnEnd = Box<dyn FnOnce(StoreEnd) + Send>;

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
        let shape = ChunkShape::new(layers.iter().map(|spans| span_bytes(spans)))?;
        let Some(reservation) = self.reserve(tenant, id, parent, &shape)? else {
            on_end(StoreEnd::AlreadyHere);
            return Ok(());
        };
        let pairs = self.shared.pairs_to_arena(layers, reservation.offset_bytes());
        let layers = layers.to_vec();
        let on_copied = move |end| copied(reservation, layers, end, Box::new(on_end));
        self.shared.mover.submit(Transfer::new(pairs, class), on_copied)?;
        Ok(())
    }
}

impl StoreInner {
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
}

/// The copy has ended; on the mover's thread.
fn copied(reservation: Reservation, sources: Vec<Vec<Span>>, end: End, on_end: OnEnd) {
    let End::Done { bytes } = end else {
        reservation.abandon(&end);
        return on_end(StoreEnd::Failed(end));
    };
    let jobs = reservation.shared.checksum_jobs.clone();
    let finish = move || {
        let checksums = reservation.checksums_of(&sources);
        let stored = reservation.commit(&checksums).is_ok();
        on_end(if stored { StoreEnd::Stored { bytes } } else { StoreEnd::Deleted });
    };
    // The thread that takes it lives as long as the store, which the reservation keeps alive.
    let _ = jobs.send(Box::new(finish));
}

/// The store's own thread.
pub(super) fn run_all(jobs: Receiver<Job>) {
    jobs.into_iter().for_each(|job| job());
}
