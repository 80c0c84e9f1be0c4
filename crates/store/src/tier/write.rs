//! Letting chunks in: a write begins with a slot of its own and ends committed or aborted. This
//! file knows what a chunk needs to be let in.

use super::{SlotAllocator, Tier};
use crate::absence::Absence;
use crate::entry::{ChunkRef, Entry, Row, State};
use crate::shape::ChunkShape;
use crate::stat::{NotCommitted, Refused};
use crate::tenant::TenantId;
use forebay_kv::ChunkId;
use std::ops::Deref;

/// What became of the wish to store a chunk.
#[derive(Debug)]
pub enum WriteBegun<S: SlotAllocator> {
    /// There is a slot: write the bytes, then end the write.
    Write(SlotWrite<S>),
    /// The chunk is here already. Nothing is to be done.
    AlreadyHere,
}

/// A chunk being written. The slot is the writer's until the write is ended; if this value is
/// dropped instead, the slot is lost to the tier.
#[derive(Debug)]
#[must_use = "the slot stays taken until the write is ended"]
pub struct SlotWrite<S: SlotAllocator> {
    pub(crate) chunk: ChunkRef,
    pub(crate) slot: S::Slot,
    pub(crate) place: S::Place,
}

impl<S: SlotAllocator> Deref for SlotWrite<S> {
    type Target = S::Place;

    fn deref(&self) -> &S::Place {
        &self.place
    }
}

impl<S: SlotAllocator> Tier<S> {
    /// Asks for a slot for chunk `id`, which continues `parent` or starts a sequence. Others are
    /// evicted as needed.
    ///
    /// The parent must be here or being written. Should its write fail, this chunk is not found
    /// until the parent is stored again.
    pub fn begin_write(
        &mut self,
        now_us: u64,
        tenant: TenantId,
        id: &ChunkId,
        parent: Option<&ChunkId>,
        shape: &ChunkShape,
    ) -> Result<WriteBegun<S>, Refused> {
        self.advance(now_us);
        let begun = self.admit(tenant, id, parent, shape);
        if let Err(refused) = &begun {
            self.refusals.count(refused);
            if *refused != Refused::BeingWritten {
                self.absences.note(self.clock_us, id, refused.into());
            }
        }
        begun
    }

    fn admit(
        &mut self,
        tenant: TenantId,
        id: &ChunkId,
        parent: Option<&ChunkId>,
        shape: &ChunkShape,
    ) -> Result<WriteBegun<S>, Refused> {
        let known = self.own(tenant, id)?;
        match known.map(|row| (row, self.entry(row).state)) {
            Some((_, State::Writing)) => return Err(Refused::BeingWritten),
            Some((row, State::Listed | State::Parked)) => {
                self.touch(row);
                return Ok(WriteBegun::AlreadyHere);
            }
            Some((_, State::Hole)) | None => {}
        }
        let slot_bytes = self.space.slot_bytes(shape)?;
        let row = self.claim(tenant, id, parent)?;
        match self.evict_within_quota(tenant, slot_bytes).and_then(|()| self.make_slot(shape, row)) {
            Ok(slot) => Ok(WriteBegun::Write(self.start(row, tenant, slot, slot_bytes))),
            Err(refused) => {
                self.drop_bytes(row, (&refused).into());
                Err(refused)
            }
        }
    }

    /// The row of an id, unless it is another tenant's.
    fn own(&self, tenant: TenantId, id: &ChunkId) -> Result<Option<Row>, Refused> {
        let row = self.index.find(id);
        match row.map(|row| self.entry(row).tenant) {
            Some(owner) if owner != tenant => Err(Refused::OtherTenant { owner }),
            _ => Ok(row),
        }
    }

    /// Gives the id a row below its parent and marks it as being written, so that from here on
    /// neither the row nor its parent can be evicted.
    fn claim(&mut self, tenant: TenantId, id: &ChunkId, parent: Option<&ChunkId>) -> Result<Row, Refused> {
        let parent = match parent {
            None => None,
            Some(parent) => Some(
                self.own(tenant, parent)?
                    .filter(|row| self.entry(*row).state != State::Hole)
                    .ok_or(Refused::ParentMissing)?,
            ),
        };
        // The parent may be the coldest chunk of all.
        if let Some(parent) = parent {
            self.entry_mut(parent).holds += 1;
        }
        let room = self.make_row();
        if let Some(parent) = parent {
            self.entry_mut(parent).holds -= 1;
            self.relist(parent);
        }
        room?;
        let full = Refused::IndexFull { limit: self.index.limit() };
        let row = match self.index.find(id) {
            // Bytes in a row whose generations are used up could not be told from earlier ones.
            Some(hole) if self.entry(hole).generation == u32::MAX => return Err(full),
            Some(hole) => hole,
            None => {
                let row = self.index.insert(id).ok_or(full)?;
                if row.position() >= self.entries.len() {
                    self.entries.push(Entry::unused(tenant));
                }
                self.tree.add(row, parent);
                row
            }
        };
        let generation = self.entry(row).generation;
        *self.entry_mut(row) = Entry { generation, state: State::Writing, ..Entry::unused(tenant) };
        Ok(row)
    }

    fn start(&mut self, row: Row, tenant: TenantId, slot: S::Slot, slot_bytes: u64) -> SlotWrite<S> {
        self.quotas.charge(tenant, slot_bytes);
        self.space.begin(slot);
        self.entry_mut(row).slot = Some(slot);
        SlotWrite {
            chunk: ChunkRef { row, generation: self.entry(row).generation },
            slot,
            place: self.space.place(slot, self.index.id(row)),
        }
    }

    /// Puts a chunk that was found at rest into a row that is new, as the one used last.
    pub(crate) fn put_recovered(&mut self, row: Row, parent: Option<Row>, entry: Entry<S::Slot>) {
        let tenant = entry.tenant;
        if row.position() >= self.entries.len() {
            self.entries.push(Entry::unused(tenant));
        }
        let generation = self.entry(row).generation;
        *self.entry_mut(row) = Entry { generation, ..entry };
        self.tree.add(row, parent);
        self.list(row);
        self.chunks += 1;
    }

    /// All bytes of the chunk are in its slot: it becomes visible, unless it was deleted meanwhile.
    pub(crate) fn finish(&mut self, write: SlotWrite<S>) -> Result<(), NotCommitted> {
        let refund = self.space.end(write.slot, 0);
        self.refund(refund);
        if !self.is_live(&write.chunk) {
            return Err(NotCommitted::Deleted);
        }
        self.list(write.chunk.row);
        self.changes.note(self.index.id(write.chunk.row));
        self.chunks += 1;
        self.stored += 1;
        Ok(())
    }

    /// The write failed. `lost_bytes` of the slot may still be written by a part of it that is
    /// lost; they are reported to `quiet` once they cannot.
    pub fn abort(&mut self, now_us: u64, write: SlotWrite<S>, lost_bytes: u64) {
        self.advance(now_us);
        self.faults.writes += 1;
        self.faults.lost += u64::from(lost_bytes > 0);
        if self.is_live(&write.chunk) {
            let row = write.chunk.row;
            self.absences.note(self.clock_us, self.index.id(row), Absence::NotWritten);
            self.drop_bytes(row, Absence::NotWritten);
        }
        let refund = self.space.end(write.slot, lost_bytes);
        self.refund(refund);
    }
}
