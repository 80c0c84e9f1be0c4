//! A tier: which chunks rest on one medium, who may read them, and what goes when room is needed. A
//! sans-IO state machine: time is an argument, and the bytes move elsewhere between a `begin` and
//! its end. This file holds the state, lookups and what changes single chunks; `write.rs` lets
//! chunks in, `read.rs` grants and serves leases, `evict.rs` makes room, `pin.rs` says what stays,
//! `memory.rs` is what only the memory tier has, `kept.rs` what another process goes on with. None
//! of them must ever touch bytes or know what they mean.

mod allocator;
mod changes;
mod evict;
mod kept;
mod known;
mod memory;
mod pin;
mod read;
mod write;

pub use allocator::{Refund, SlotAllocator, Taken};
pub(crate) use changes::Names;
pub use kept::{Kept, KeptChunk, NotAdopted};
pub(crate) use known::KnownChunk;
pub use memory::{Begun, MemoryTier, Read, TierConfig, Wipe, Write};
pub use pin::Unchanged;
pub use read::{ReadEnd, SlotRead};
pub use write::{SlotWrite, WriteBegun};

use crate::absence::{Absence, AbsenceLog, REMEMBERED};
use crate::chunk_leases::ChunkLeases;
use crate::entry::{ChunkRef, Entry, Row, State};
use crate::index::{BATCH, Index};
use crate::pins::Pins;
use crate::recency::Recency;
use crate::stat::{Counters, Faults, Refusals};
use crate::tenant::{Quotas, TenantId};
use crate::tree::Tree;
use changes::Changes;
use forebay_kv::ChunkId;

/// Chunks on a medium.
///
/// What may be found: the longest prefix of a sequence whose chunks are all here. A chunk is let in
/// only below a parent that is here or on its way, becomes visible when all of it is written, and
/// is evicted before its parent, never after.
///
/// A chunk that is deleted or found corrupt while chunks below it stay leaves a *hole*: its id
/// without bytes. Lookups end before it; storing it again makes what is below visible again.
#[derive(Debug)]
pub struct Tier<S: SlotAllocator> {
    pub(crate) index: Index,
    pub(crate) entries: Vec<Entry<S::Slot>>,
    tree: Tree,
    recency: Recency,
    pub(crate) space: S,
    leases: ChunkLeases,
    pub(crate) quotas: Quotas,
    pins: Pins,
    pub(crate) changes: Changes,
    /// Why chunks are not here.
    pub(crate) absences: AbsenceLog,
    /// The latest time that any caller gave: time never runs backwards here.
    pub(crate) clock_us: u64,
    chunks: usize,
    stored: u64,
    evicted: u64,
    pins_broken: u64,
    refusals: Refusals,
    faults: Faults,
}

impl<S: SlotAllocator> Tier<S> {
    pub(crate) fn with_space(space: S, max_chunks: u32, leases: ChunkLeases, quotas: Quotas) -> Tier<S> {
        let index = Index::new(max_chunks);
        let limit = index.limit();
        Tier {
            index,
            entries: Vec::with_capacity(limit),
            tree: Tree::new(limit),
            recency: Recency::new(limit),
            space,
            leases,
            quotas,
            pins: Pins::default(),
            changes: Changes::default(),
            absences: AbsenceLog::new(REMEMBERED),
            clock_us: 0,
            chunks: 0,
            stored: 0,
            evicted: 0,
            pins_broken: 0,
            refusals: Refusals::default(),
            faults: Faults::default(),
        }
    }

    pub fn contains(&self, id: &ChunkId) -> bool {
        self.index.find(id).is_some_and(|row| self.entry(row).is_resident())
    }

    /// How many of `ids`, a sequence from its first chunk on, are here and the tenant's,
    /// without a gap. Looking is not using: only a lease and [`used`](Tier::used) keep a chunk
    /// warm.
    pub fn lookup(&self, tenant: TenantId, ids: &[ChunkId]) -> usize {
        self.prefix(tenant, ids).count()
    }

    /// The rows of the longest prefix that is resident and the tenant's.
    fn prefix<'a>(&'a self, tenant: TenantId, ids: &'a [ChunkId]) -> impl Iterator<Item = Row> + 'a {
        let is_own = move |row: &Row| {
            let entry = self.entry(*row);
            entry.is_resident() && entry.tenant == tenant
        };
        ids.chunks(BATCH)
            .flat_map(|batch| self.index.find_batch(batch).into_iter().take(batch.len()))
            .map_while(move |row| row.filter(is_own))
    }

    /// Drops these chunks, even if they are leased, pinned or being written, and says how many
    /// there were. Nobody finds or reads them from now on; memory that an operation still uses is
    /// free when that ends.
    pub fn delete(&mut self, tenant: TenantId, ids: &[ChunkId]) -> usize {
        let rows = self.rows_of(tenant, ids);
        rows.into_iter().filter(|row| self.drop_bytes(*row, Absence::Deleted)).count()
    }

    /// Drops a chunk whose bytes were wrong where they were used, and says whether it was there.
    pub(crate) fn drop_corrupt_named(&mut self, tenant: TenantId, id: &ChunkId) -> bool {
        let rows = self.rows_of(tenant, std::slice::from_ref(id));
        rows.into_iter().any(|row| self.drop_bytes(row, Absence::Corrupt))
    }

    pub(crate) fn rows_of(&self, tenant: TenantId, ids: &[ChunkId]) -> Vec<Row> {
        ids.iter()
            .filter_map(|id| self.index.find(id))
            .filter(|row| self.entry(*row).tenant == tenant)
            .collect()
    }

    pub(crate) fn counters(&self) -> Counters {
        Counters {
            chunks: self.chunks,
            rows: self.index.len(),
            leases: self.leases.len(),
            leases_expired: self.leases.expired(),
            stored: self.stored,
            evicted: self.evicted,
            pinned: self.pins.len(),
            pinned_bytes: self.pins.bytes(),
            pins_broken: self.pins_broken,
            absences_forgotten: self.absences.forgotten(),
            refusals: self.refusals,
            faults: self.faults,
            tenants: self.quotas.report(),
            index_bytes: self.index.table_bytes()
                + self.tree.table_bytes()
                + self.recency.table_bytes()
                + (self.entries.capacity() * size_of::<Entry<S::Slot>>()) as u64,
        }
    }

    /// Takes in the time and ends the leases and pins that are over.
    pub(crate) fn advance(&mut self, now_us: u64) {
        self.clock_us = self.clock_us.max(now_us);
        while let Some(ended) = self.leases.expire(self.clock_us) {
            self.let_go(&ended);
        }
        self.expire_pins();
    }

    pub(crate) fn entry(&self, row: Row) -> &Entry<S::Slot> {
        &self.entries[row.position()]
    }

    pub(crate) fn entry_mut(&mut self, row: Row) -> &mut Entry<S::Slot> {
        &mut self.entries[row.position()]
    }

    pub(crate) fn id_of(&self, row: Row) -> &ChunkId {
        self.index.id(row)
    }

    pub(crate) fn parent_id(&self, row: Row) -> Option<ChunkId> {
        self.tree.parent(row).map(|parent| *self.index.id(parent))
    }

    /// Rows whose chunks can be read.
    pub(crate) fn resident_rows(&self) -> impl Iterator<Item = Row> + '_ {
        let rows = (0..self.entries.len()).filter_map(Row::at);
        rows.filter(|row| self.entry(*row).is_resident())
    }

    /// Whether the row still has the bytes that it had when the reference was made.
    pub(crate) fn is_live(&self, chunk: &ChunkRef) -> bool {
        self.entry(chunk.row).generation == chunk.generation
    }

    pub(crate) fn refund(&mut self, refund: Option<Refund>) {
        if let Some(Refund { tenant, bytes }) = refund {
            self.quotas.credit(tenant, bytes);
        }
    }

    /// Takes the bytes of a row away, if it has any, and says whether it had: from now on it is a
    /// hole or, without descendants, nothing. Its place in the order of use falls to the first
    /// ancestor that has become evictable by it.
    pub(crate) fn drop_bytes(&mut self, row: Row, why: Absence) -> bool {
        let entry = self.entry_mut(row);
        let (tenant, state, slot) = (entry.tenant, entry.state, entry.slot.take());
        if state == State::Hole {
            return false;
        }
        let (was_pinned, generation) = (entry.pinned, entry.generation.saturating_add(1));
        *entry = Entry { generation, ..Entry::unused(tenant) };
        if was_pinned {
            self.pins.remove(row);
        }
        if state != State::Writing {
            self.chunks -= 1;
            self.changes.note(self.index.id(row));
            self.absences.note(self.clock_us, self.index.id(row), why);
        }
        if let Some(slot) = slot {
            let refund = self.space.vacate(slot, tenant, self.index.id(row));
            self.refund(refund);
        }
        let heir = self.remove_empty_holes(row).filter(|heir| self.awaits_listing(*heir));
        match (state == State::Listed, heir) {
            (true, Some(heir)) => {
                self.recency.replace(row, heir, tenant);
                self.entry_mut(heir).state = State::Listed;
            }
            (true, None) => self.recency.remove(row, tenant),
            (false, Some(heir)) => self.relist(heir),
            (false, None) => {}
        }
        true
    }

    /// Forgets the row, and then each ancestor, as long as they are holes without children. Returns
    /// the first row that stays.
    fn remove_empty_holes(&mut self, row: Row) -> Option<Row> {
        let mut at = Some(row);
        while let Some(row) =
            at.filter(|row| self.entry(*row).state == State::Hole && self.tree.is_leaf(*row))
        {
            at = self.tree.remove(row);
            let reusable = self.entry(row).generation < u32::MAX;
            self.index.remove(row, reusable);
        }
        at
    }
}
