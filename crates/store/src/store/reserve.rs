//! Slots of memory for chunks that come: from those who write the arena by themselves, in other
//! processes or from other machines, from a transfer of the mover, or from the disk. This file
//! knows that a slot is its reservation's until that is committed or given up.
//!
//! Whoever may still write a slot keeps its reservation. A reservation whose writer cannot be asked
//! any more is kept until the writer is known to be dead: its slot is in nobody's way but that of
//! the quota.

use super::write_back::Dirty;
use super::{Store, StoreInner, quarantined};
use crate::checksum;
use crate::lost::bytes_in;
use crate::shape::{ChunkShape, ShapeError};
use crate::slots::slot_bytes;
use crate::stat::{NotCommitted, Refused};
use crate::tenant::TenantId;
use crate::tier::{Begun, Write};
use forebay_kv::ChunkId;
use forebay_transfer::{End, Span, SubmitError};
use std::ops::Range;
use std::sync::Arc;
use thiserror::Error;

/// What a chunk is called.
#[derive(Debug, Clone, Copy)]
pub(super) struct ChunkName {
    pub tenant: TenantId,
    pub id: ChunkId,
    pub parent: Option<ChunkId>,
}

/// A slot for a chunk that nobody sees before it is committed. Dropped, it is given up: nobody may
/// write it from then on.
#[derive(Debug)]
pub struct Reservation {
    pub(super) shared: Arc<StoreInner>,
    pub(super) name: ChunkName,
    /// Only taken when the reservation ends.
    write: Option<Write>,
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
        Ok(self.shared.reserve(ChunkName { tenant, id, parent }, shape, false)?)
    }

    /// The same for a chunk that somebody waits for: whoever writes it now finds it deleted.
    pub fn reserve_over(
        &self,
        tenant: TenantId,
        id: ChunkId,
        parent: Option<ChunkId>,
        shape: &ChunkShape,
    ) -> Result<Option<Reservation>, NotStored> {
        Ok(self.shared.reserve(ChunkName { tenant, id, parent }, shape, true)?)
    }
}

impl StoreInner {
    /// Reserves a slot. If somebody waits for the chunk (`is_awaited`), whoever writes it now finds
    /// it deleted: how long that takes, and whether it ends well, is in the hands of that one
    /// alone.
    pub(super) fn reserve(
        self: &Arc<Self>,
        name: ChunkName,
        shape: &ChunkShape,
        is_awaited: bool,
    ) -> Result<Option<Reservation>, Refused> {
        let mut begun = self.begin_write(&name, shape);
        if is_awaited && matches!(begun, Err(Refused::BeingWritten)) {
            self.tier.lock().delete(name.tenant, &[name.id]);
            begun = self.begin_write(&name, shape);
        }
        Ok(match begun? {
            Begun::Write(write) => Some(Reservation { shared: Arc::clone(self), name, write: Some(write) }),
            Begun::AlreadyHere => None,
        })
    }

    /// Asks the memory tier for a slot. A chunk whose parent is on disk only starts a sequence of
    /// its own there: it is found all the same, behind its parent, once it has been written to the
    /// disk too or its parent is in memory again.
    fn begin_write(&self, name: &ChunkName, shape: &ChunkShape) -> Result<Begun, Refused> {
        let on_disk = |id: &ChunkId| self.open_disk().is_some_and(|disk| disk.ssd.contains(id));
        let parent = name.parent.as_ref();
        let parent = parent.filter(|parent| self.tier.lock().takes_below(parent) || !on_disk(parent));
        let mut tier = self.tier.lock();
        let pins_broken = tier.pins_broken();
        let begun = tier.begin_write(self.now_us(), name.tenant, &name.id, parent, shape);
        let pins_broken = tier.pins_broken() - pins_broken;
        drop(tier);
        if pins_broken > 0
            && let Some(repeated) = self.pins_gave_way.pass()
        {
            tracing::warn!(tenant = name.tenant.0, pins = pins_broken, repeated, "pins gave way");
        }
        if let Err(reason @ (Refused::Full { .. } | Refused::Quota { .. } | Refused::IndexFull { .. })) =
            &begun
            && let Some(repeated) = self.memory_full.pass()
        {
            tracing::warn!(tenant = name.tenant.0, %reason, repeated, "memory takes no more chunks");
        }
        begun
    }
}

impl Reservation {
    /// Where the slot starts in the arena.
    pub fn offset_bytes(&self) -> u64 {
        self.write().offset_bytes()
    }

    pub fn shape(&self) -> &ChunkShape {
        self.write().shape()
    }

    /// The slot's bytes in the arena: the chunk and what is left of its last page.
    pub(super) fn slot(&self) -> Range<u64> {
        self.offset_bytes()..self.offset_bytes() + slot_bytes(self.shape())
    }

    /// Where the layers lie, for the mover.
    pub fn layers(&self) -> Vec<Span> {
        self.shared.layers_of(self.write()).collect()
    }

    /// The CRC-32C of the layers as they lie in the slot now. It takes as long as reading the
    /// chunk.
    pub fn checksums(&self) -> Vec<u32> {
        let memory = self.shared.mover.memory();
        self.layers().iter().filter_map(|layer| checksum::of_spans(memory, &[*layer])).collect()
    }

    /// The CRC-32C of the layers that were copied here: of their sources where the host can read
    /// them, else of the copies.
    pub(super) fn checksums_of(&self, sources: &[Vec<Span>]) -> Vec<u32> {
        let memory = self.shared.mover.memory();
        let sum = |(source, copy): (&Vec<Span>, Span)| {
            checksum::of_spans(memory, source).or_else(|| checksum::of_spans(memory, &[copy]))
        };
        sources.iter().zip(self.layers()).filter_map(sum).collect()
    }

    /// All bytes are in the slot and nobody writes it any more: the chunk becomes visible, with the
    /// CRC-32C of each layer, and is offered to the disk.
    pub fn commit(mut self, checksums: &[u32]) -> Result<(), NotCommitted> {
        let layers = self.shape().layers();
        if checksums.len() != layers {
            return Err(NotCommitted::Checksums { given: checksums.len(), layers });
        }
        let ChunkName { tenant, id, parent } = self.name;
        let dirty = Dirty { tenant, id, parent, bytes: self.shape().bytes() };
        self.make_visible(checksums)?;
        self.shared.offer_to_disk(dirty);
        Ok(())
    }

    /// The chunk becomes visible, and nobody is told.
    pub(super) fn make_visible(&mut self, checksums: &[u32]) -> Result<(), NotCommitted> {
        let write = self.write.take().ok_or(NotCommitted::Deleted)?;
        self.shared.tier.lock().commit(self.shared.now_us(), write, checksums)
    }

    /// The transfer that was to fill the slot has failed. Bytes that a lost operation may still
    /// write are nobody else's before the mover says that they are quiet.
    pub fn abandon(self, end: &End) {
        self.give_up(quarantined(end));
    }

    /// The same, of bytes that lost operations on these spans may still touch.
    pub(super) fn give_up(mut self, quarantined: &[Span]) {
        let lost_bytes = bytes_in(self.shared.arena, &self.slot(), quarantined);
        self.abort(lost_bytes);
    }

    fn abort(&mut self, lost_bytes: u64) {
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
        self.abort(0);
    }
}
