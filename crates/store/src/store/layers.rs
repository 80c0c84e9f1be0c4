//! Storing a chunk layer by layer, as they are computed. This file knows which layers have arrived; it must never know when
//! they are computed. The chunk becomes visible with its last layer, and never without one of them.

use super::load::span_bytes;
use super::write_back::Dirty;
use super::{NotStored, Shared, Store};
use crate::shape::{ChunkShape, ShapeError};
use crate::tenant::TenantId;
use crate::tier::{Begun, Write};
use forebay_kv::ChunkId;
use forebay_transfer::{Class, End, Span, Transfer};
use parking_lot::Mutex;
use std::sync::Arc;

/// Takes in the layers of a chunk, the first one first. Dropped before it was given the last one, it gives the chunk up.
#[derive(Debug)]
pub struct ChunkWriter {
    open: Arc<Open>,
    next_layer: usize,
}

/// How storing a layer ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LayerEnd {
    /// Its bytes are in memory; other layers are missing.
    Copied {
        /// Its length.
        bytes: u64,
    },
    /// It was the last one to arrive, and the chunk is visible.
    Stored {
        /// The chunk's length.
        bytes: u64,
    },
    /// It was the last one to arrive, and the chunk had been deleted.
    Deleted,
    /// The copy failed or was cancelled. The chunk will never be visible.
    Failed(End),
}

/// A chunk of which layers are missing. When the writer and the last copy are gone, so is it.
#[derive(Debug)]
struct Open {
    shared: Arc<Shared>,
    dirty: Dirty,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// None when the chunk is committed.
    write: Option<Write>,
    sums: Vec<Option<u32>>,
    /// Bytes of the slot that lost copies may still write.
    lost_bytes: u64,
}

impl Store {
    /// Begins to store a chunk of a shape, whose layers are given one by one. `None` if it is here already.
    pub fn open_chunk(
        &self,
        tenant: TenantId,
        id: ChunkId,
        parent: Option<ChunkId>,
        shape: &ChunkShape,
    ) -> Result<Option<ChunkWriter>, NotStored> {
        let shared = &self.shared;
        let begun = shared.begin_write(tenant, &id, parent.as_ref(), shape)?;
        let Begun::Write(write) = begun else { return Ok(None) };
        let state = State { write: Some(write), sums: vec![None; shape.layers()], lost_bytes: 0 };
        let dirty = Dirty { tenant, id, parent, bytes: shape.bytes() };
        let open = Open { shared: Arc::clone(shared), dirty, state: Mutex::new(state) };
        Ok(Some(ChunkWriter { open: Arc::new(open), next_layer: 0 }))
    }
}

impl ChunkWriter {
    /// Stores the next layer from `source`, the spans whose bytes, one after another, are the layer.
    ///
    /// With `Ok`, `on_end` is called exactly once; the spans must stay registered and unchanged until then. Layers may be
    /// on their way at the same time. After an error the same layer may be tried again.
    pub fn store_layer(
        &mut self,
        source: &[Span],
        class: Class,
        on_end: impl FnOnce(LayerEnd) + Send + 'static,
    ) -> Result<(), NotStored> {
        let (layer, open) = (self.next_layer, Arc::clone(&self.open));
        let to = open.extent(layer, span_bytes(source))?;
        let pairs = open.shared.pairs_to_arena(&[source.to_vec()], to.offset);
        let (source, shared) = (source.to_vec(), Arc::clone(&open.shared));
        shared
            .mover
            .submit(Transfer::new(pairs, class), move |end| open.copied(layer, source, end, on_end))?;
        self.next_layer += 1;
        Ok(())
    }

    /// How many layers were given.
    pub fn layers(&self) -> usize {
        self.next_layer
    }
}

impl Open {
    /// Where a layer of so many bytes goes.
    fn extent(&self, layer: usize, bytes: u64) -> Result<Span, ShapeError> {
        let state = self.state.lock();
        let extent = state.write.as_ref().and_then(|write| {
            let extent = write.shape().layer(layer)?;
            Some(write.offset_bytes() + extent.start..write.offset_bytes() + extent.end)
        });
        let Some(extent) = extent else { return Err(ShapeError::Layers { layers: layer + 1 }) };
        let layer_bytes = extent.end - extent.start;
        if layer_bytes != bytes {
            return Err(ShapeError::LayerBytes { layer, layer_bytes, bytes });
        }
        Ok(Span::new(self.shared.arena, extent.start, bytes))
    }

    /// A copy has ended; on the mover's thread.
    fn copied(
        self: Arc<Open>,
        layer: usize,
        source: Vec<Span>,
        end: End,
        on_end: impl FnOnce(LayerEnd) + Send + 'static,
    ) {
        if let End::Done { bytes } = end {
            let sealer = self.shared.sealer.clone();
            // The thread that takes it lives as long as the store, which this chunk keeps alive.
            let _ = sealer.send(Box::new(move || on_end(self.seal(layer, &source, bytes))));
            return;
        }
        self.state.lock().lost_bytes += self.shared.lost_bytes(&end);
        drop(self);
        on_end(LayerEnd::Failed(end));
    }

    /// Takes the checksum of a layer, and with the last one makes the chunk visible.
    fn seal(&self, layer: usize, source: &[Span], bytes: u64) -> LayerEnd {
        let mut state = self.state.lock();
        let sum = state.write.as_ref().and_then(|write| self.shared.sum_of(write, layer, source));
        if let Some(slot) = state.sums.get_mut(layer) {
            *slot = sum;
        }
        let Some(sums) = state.sums.iter().copied().collect::<Option<Vec<u32>>>() else {
            return LayerEnd::Copied { bytes };
        };
        let Some(write) = state.write.take() else { return LayerEnd::Deleted };
        match self.shared.commit(write, &sums, self.dirty) {
            true => LayerEnd::Stored { bytes: self.dirty.bytes },
            false => LayerEnd::Deleted,
        }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        let state = self.state.get_mut();
        if let Some(write) = state.write.take() {
            self.shared.tier.lock().abort(self.shared.now_us(), write, state.lost_bytes);
        }
    }
}
