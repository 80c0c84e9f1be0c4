//! Slots for those who write the arena by themselves, in other processes or from other machines.
//! This file knows that a slot is theirs until they commit or give it up.
//!
//! Whoever may still write a slot keeps its reservation. A reservation whose writer cannot be asked
//! any more is kept until the writer is known to be dead: its slot is in nobody's way but that of
//! the quota.

use super::write_back::Dirty;
use super::{NotStored, Shared, Store};
use crate::checksum;
use crate::shape::ChunkShape;
use crate::stat::NotCommitted;
use crate::tenant::TenantId;
use crate::tier::{Begun, Write};
use forebay_kv::ChunkId;
use forebay_transfer::{End, Span};
use std::sync::Arc;

/// A slot for a chunk that nobody sees before it is committed. Dropped, it is given up: nobody may
/// write it from then on.
#[derive(Debug)]
pub struct Reservation {
    shared: Arc<Shared>,
    /// Only taken when the reservation ends.
    write: Option<Write>,
    dirty: Dirty,
}

impl Store {
    /// Reserves a slot for chunk `id`, which continues `parent` or starts a sequence. `None` if the
    /// chunk is here already.
    pub fn reserve(
        &self,
        tenant: TenantId,
        id: ChunkId,
        parent: Option<ChunkId>,
        shape: &ChunkShape,
    ) -> Result<Option<Reservation>, NotStored> {
        let begun = self.shared.begin_write(tenant, &id, parent.as_ref(), shape)?;
        let dirty = Dirty { tenant, id, parent, bytes: shape.bytes() };
        Ok(self.reserved(begun, dirty))
    }

    /// The same for a chunk that somebody waits for: whoever writes it now finds it deleted.
    pub fn reserve_over(
        &self,
        tenant: TenantId,
        id: ChunkId,
        parent: Option<ChunkId>,
        shape: &ChunkShape,
    ) -> Result<Option<Reservation>, NotStored> {
        let begun = self.shared.begin_write_over(tenant, &id, parent.as_ref(), shape)?;
        let dirty = Dirty { tenant, id, parent, bytes: shape.bytes() };
        Ok(self.reserved(begun, dirty))
    }

    fn reserved(&self, begun: Begun, dirty: Dirty) -> Option<Reservation> {
        match begun {
            Begun::Write(write) => {
                Some(Reservation { shared: Arc::clone(&self.shared), write: Some(write), dirty })
            }
            Begun::AlreadyHere => None,
        }
    }
}

impl Reservation {
    /// Where the slot starts in the arena.
    pub fn offset_bytes(&self) -> u64 {
        self.write().offset_bytes()
    }

    /// The lengths of the chunk's layers.
    pub fn shape(&self) -> &ChunkShape {
        self.write().shape()
    }

    /// Where the layers lie, for the mover.
    pub fn layers(&self) -> Vec<Span> {
        let (shape, at) = (self.shape(), self.offset_bytes());
        let extents = (0..shape.layers()).filter_map(|layer| shape.layer(layer));
        extents
            .map(|extent| Span::new(self.shared.arena, at + extent.start, extent.end - extent.start))
            .collect()
    }

    /// The CRC-32C of the layers as they lie in the slot now. It takes as long as reading the
    /// chunk.
    pub fn checksums(&self) -> Vec<u32> {
        let memory = self.shared.mover.memory();
        self.layers().iter().filter_map(|layer| checksum::of_spans(memory, &[*layer])).collect()
    }

    /// All bytes are in the slot and nobody writes it any more: the chunk becomes visible, with the
    /// CRC-32C of each layer.
    pub fn commit(mut self, checksums: &[u32]) -> Result<(), NotCommitted> {
        let layers = self.shape().layers();
        if checksums.len() != layers {
            return Err(NotCommitted::Checksums { given: checksums.len(), layers });
        }
        let Some(write) = self.write.take() else { return Err(NotCommitted::Deleted) };
        match self.shared.commit(write, checksums, self.dirty) {
            true => Ok(()),
            false => Err(NotCommitted::Deleted),
        }
    }

    /// The transfer that was to fill the slot has failed. Bytes that a lost operation may still
    /// write are nobody else's before the mover says that they are quiet.
    pub fn abandon(mut self, end: &End) {
        let extent = self.offset_bytes()..self.offset_bytes() + self.shape().bytes();
        let lost_bytes = self.shared.lost_bytes_in(end, &extent);
        if let Some(write) = self.write.take() {
            self.shared.tier.lock().abort(self.shared.now_us(), write, lost_bytes);
        }
    }

    fn write(&self) -> &Write {
        match &self.write {
            Some(write) => write,
            None => unreachable!("the write is only taken when the reservation ends"),
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if let Some(write) = self.write.take() {
            self.shared.tier.lock().abort(self.shared.now_us(), write, 0);
        }
    }
}
