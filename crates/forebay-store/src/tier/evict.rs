//! Making room: the coldest chunk that nobody needs goes first, and no chunk goes before those that continue it. This
//! file knows the order in which chunks go; it must never know who asks for the room.
//!
//! The orders of use hold every chunk since it was last stored or released, evictable or not. One that comes up for
//! eviction and may not go is set aside (parked), and comes back when its last hold or its last child is gone. Each
//! setting aside is paid for by the use that put the chunk into the order, so eviction is O(1) amortised.

use super::{Space, Taken, Tier};
use crate::entry::{EntryIx, State};
use crate::shape::ChunkShape;
use crate::stat::Refused;
use crate::tenant::TenantId;

impl<S: Space> Tier<S> {
    /// Evicts until the index can take one more id.
    pub(super) fn make_row(&mut self) -> Result<(), Refused> {
        while !self.index.has_room() {
            let victim = self.victim(None).ok_or(Refused::IndexFull { limit: self.index.limit() })?;
            self.evict(victim);
        }
        Ok(())
    }

    /// Evicts the coldest chunk that may go, and says whether there was one.
    pub(crate) fn evict_coldest(&mut self) -> bool {
        let victim = self.victim(None);
        victim.into_iter().for_each(|row| self.evict(row));
        victim.is_some()
    }

    /// Drops a chunk, whoever continues it, as an eviction.
    pub(crate) fn drop_reclaimed(&mut self, row: EntryIx) {
        self.evicted += u64::from(self.drop_bytes(row));
    }

    /// Evicts chunks of the tenant until `needed_bytes` more are within its quota.
    pub(super) fn make_share(&mut self, tenant: TenantId, needed_bytes: u64) -> Result<(), Refused> {
        while !self.quotas.has_room(tenant, needed_bytes) {
            let victim = self.victim(Some(tenant)).ok_or_else(|| Refused::Quota {
                tenant,
                used_bytes: self.quotas.used_bytes(tenant),
                quota_bytes: self.quotas.limit_bytes(tenant),
                needed_bytes,
            })?;
            self.evict(victim);
        }
        Ok(())
    }

    /// Evicts until there is a slot for a chunk of this shape, and takes it for `occupant`.
    ///
    /// Where the medium says that the coldest chunk had better go with others, they all go if nobody needs any of them.
    pub(super) fn make_slot(&mut self, shape: &ChunkShape, occupant: EntryIx) -> Result<S::Slot, Refused> {
        let full = Refused::Full { needed_bytes: self.space.slot_bytes(shape)? };
        loop {
            match self.space.take(shape, occupant) {
                Taken::Slot(slot) => return Ok(slot),
                Taken::Full => return Err(full),
                Taken::Evict => {}
            }
            let Some(victim) = self.victim(None) else { return Err(full) };
            let slot = self.entry(victim).slot;
            let companions = slot.and_then(|slot| self.space.companions(slot, shape));
            if !companions.is_some_and(|rows| self.evict_together(rows)) {
                self.evict(victim);
            }
        }
    }

    /// The coldest chunk, of one tenant or of all, that may go.
    fn victim(&mut self, tenant: Option<TenantId>) -> Option<EntryIx> {
        loop {
            let row = match tenant {
                None => self.recency.coldest()?,
                Some(tenant) => self.recency.coldest_of(tenant)?,
            };
            if self.is_evictable(row) {
                return Some(row);
            }
            self.recency.remove(row, self.entry(row).tenant);
            self.entry_mut(row).state = State::Parked;
        }
    }

    fn evict(&mut self, row: EntryIx) {
        debug_assert!(self.is_evictable(row));
        self.evicted += u64::from(self.drop_bytes(row));
    }

    /// Evicts these chunks with all that continues them. Does nothing and says so if any of that must stay.
    fn evict_together(&mut self, rows: Vec<EntryIx>) -> bool {
        let doomed = self.tree.descend(rows);
        let may_go = |row: &EntryIx| {
            let entry = self.entry(*row);
            entry.is_unheld() || entry.state == State::Hole
        };
        if !doomed.iter().all(may_go) {
            return false;
        }
        for row in doomed {
            // Parents may come first: they are holes until the last of their descendants, all of them doomed, is gone.
            self.evicted += u64::from(self.drop_bytes(row));
        }
        true
    }

    fn is_evictable(&self, row: EntryIx) -> bool {
        self.entry(row).is_unheld() && self.tree.is_leaf(row)
    }

    /// Whether the row was set aside and could be evicted now.
    pub(super) fn awaits_listing(&self, row: EntryIx) -> bool {
        self.entry(row).state == State::Parked && self.is_evictable(row)
    }

    /// Puts a row that was set aside back as the warmest, if what kept it is gone.
    pub(super) fn relist(&mut self, row: EntryIx) {
        if self.awaits_listing(row) {
            self.list(row);
        }
    }

    /// Makes a resident row the warmest.
    pub(super) fn touch(&mut self, row: EntryIx) {
        if self.entry(row).state == State::Listed {
            self.recency.remove(row, self.entry(row).tenant);
        }
        self.list(row);
    }

    pub(super) fn list(&mut self, row: EntryIx) {
        let entry = self.entry_mut(row);
        entry.state = State::Listed;
        let tenant = entry.tenant;
        self.recency.push_warmest(row, tenant);
    }
}
