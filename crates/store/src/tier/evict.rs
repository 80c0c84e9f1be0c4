//! Making room: the coldest chunk that nobody needs goes first, and no chunk goes before those that
//! continue it. This file knows the order in which chunks go.
//!
//! The orders of use hold every chunk since it was last stored or released, evictable or not. One
//! that comes up for eviction and may not go is set aside (parked), and comes back when its last
//! hold or its last child is gone. Each setting aside is paid for by the use that put the chunk
//! into the order, so eviction is O(1) amortised.
//!
//! A chunk may be free to go and be of no use: its slot is for chunks of another length, and
//! something in its slab has to stay. It is passed over and keeps its place. Nothing pays for that,
//! so the search for a slot gives up at some time.

use super::{SlotAllocator, Taken, Tier};
use crate::absence::Absence;
use crate::entry::{Row, State};
use crate::recency::Recency;
use crate::shape::ChunkShape;
use crate::stat::Refused;
use crate::tenant::TenantId;
use std::collections::HashSet;

/// Chunks that the search for a slot looks at in vain before it gives up: some milliseconds, for
/// which the store waits.
const LOOKS_MAX: usize = 1 << 14;

/// A search for a slot, and what was of no use.
#[derive(Default)]
struct Search {
    /// The warmest chunk that was passed over. All colder ones were, too.
    passed: Option<Row>,
    /// Slabs that were tried.
    slabs: HashSet<u16>,
    looks: usize,
}

impl<S: SlotAllocator> Tier<S> {
    /// Evicts until the index can take one more id. Pins give way last, here and below.
    pub(super) fn make_row(&mut self) -> Result<(), Refused> {
        let mut most = 1;
        while !self.index.has_room() {
            match self.victim(Recency::coldest) {
                Some(victim) => self.evict(victim, Absence::Evicted),
                None if self.pins_give_way(None, most) => most *= 2,
                None => return Err(Refused::IndexFull { limit: self.index.limit() }),
            }
        }
        Ok(())
    }

    /// Evicts the coldest chunk that may go, and says whether there was one.
    pub(crate) fn evict_coldest(&mut self) -> bool {
        let victim = self.victim(Recency::coldest);
        victim.into_iter().for_each(|row| self.evict(row, Absence::Evicted));
        victim.is_some()
    }

    /// Drops a chunk, whoever continues it, as an eviction.
    pub(crate) fn drop_reclaimed(&mut self, row: Row) {
        self.evicted += u64::from(self.drop_bytes(row, Absence::Evicted));
    }

    /// Evicts chunks of the tenant until `needed_bytes` more are within its quota. None for what
    /// never is.
    pub(super) fn evict_within_quota(&mut self, tenant: TenantId, needed_bytes: u64) -> Result<(), Refused> {
        let (quota_bytes, mut most) = (self.quotas.limit_bytes(tenant), 1);
        let fits = needed_bytes <= quota_bytes;
        while !self.quotas.has_room(tenant, needed_bytes) {
            let victim = if fits { self.victim(|recency| recency.coldest_of(tenant)) } else { None };
            match victim {
                Some(victim) => self.evict(victim, Absence::EvictedForQuota),
                None if fits && self.pins_give_way(Some(tenant), most) => most *= 2,
                None => {
                    let used_bytes = self.quotas.used_bytes(tenant);
                    return Err(Refused::Quota { tenant, used_bytes, quota_bytes, needed_bytes });
                }
            }
        }
        Ok(())
    }

    /// Evicts until there is a slot for a chunk of this shape, and takes it for `occupant`. Evicts
    /// nothing in vain.
    pub(super) fn make_slot(&mut self, shape: &ChunkShape, occupant: Row) -> Result<S::Slot, Refused> {
        let full = Refused::Full { needed_bytes: self.space.slot_bytes(shape)? };
        let (mut search, mut most) = (Search::default(), 1);
        loop {
            match self.space.take(shape, occupant) {
                Taken::Slot(slot) => return Ok(slot),
                Taken::Full => return Err(full),
                Taken::Evict => {}
            }
            if self.make_room(shape, &mut search) {
                continue;
            }
            if !self.pins_give_way(None, most) {
                return Err(full);
            }
            (search, most) = (Search::default(), most * 2);
        }
    }

    /// Evicts the coldest chunk whose slot is of use for this shape, or the slab of the coldest
    /// chunk whose slab can go whole, whichever is found first. Says whether there was one.
    fn make_room(&mut self, shape: &ChunkShape, search: &mut Search) -> bool {
        while search.looks < LOOKS_MAX {
            let passed = search.passed;
            let Some(victim) = self.victim(|recency| recency.next_warmer(passed)) else {
                return self.make_room_above(shape, search);
            };
            let slot = self.entry(victim).slot;
            match slot.and_then(|slot| self.space.slab_to_empty(slot, shape)) {
                None => {
                    self.evict(victim, Absence::Evicted);
                    return true;
                }
                Some(slab) if search.slabs.insert(slab) && self.evict_slab(slab, &mut search.looks) => {
                    search.passed = None;
                    return true;
                }
                Some(_) => (search.passed, search.looks) = (Some(victim), search.looks + 1),
            }
        }
        false
    }

    /// Evicts a slab of chunks that are continued elsewhere, with all that continues them, where
    /// none of that has to stay. What continues them gave no room by itself.
    fn make_room_above(&mut self, shape: &ChunkShape, search: &mut Search) -> bool {
        let mut end = self.recency.coldest();
        while let Some(last) = end {
            let mut above = self.tree.parent(last);
            while let Some(row) = above.filter(|row| self.may_go_with_all(*row)) {
                if search.looks >= LOOKS_MAX {
                    return false;
                }
                search.looks += 1;
                let slab = self.entry(row).slot.and_then(|slot| self.space.slab_to_empty(slot, shape));
                let slab = slab.filter(|slab| search.slabs.insert(*slab));
                if slab.is_some_and(|slab| self.evict_slab(slab, &mut search.looks)) {
                    search.passed = None;
                    return true;
                }
                above = self.tree.parent(row);
            }
            end = self.recency.next_warmer(end);
        }
        false
    }

    /// The first chunk that may go, as `next` finds them in the order of use.
    fn victim(&mut self, next: impl Fn(&Recency) -> Option<Row>) -> Option<Row> {
        loop {
            let row = next(&self.recency)?;
            if self.is_evictable(row) {
                return Some(row);
            }
            self.park(row);
        }
    }

    /// Sets a listed row aside that may not go now.
    pub(super) fn park(&mut self, row: Row) {
        if !self.is_evictable(row) {
            self.recency.remove(row, self.entry(row).tenant);
            self.entry_mut(row).state = State::Parked;
        }
    }

    fn evict(&mut self, row: Row, why: Absence) {
        debug_assert!(self.is_evictable(row));
        self.evicted += u64::from(self.drop_bytes(row, why));
    }

    /// Evicts all chunks of a slab with all that continues them. Does nothing and says so if any of
    /// that must stay.
    fn evict_slab(&mut self, slab: u16, looks: &mut usize) -> bool {
        let may_go = |row| {
            *looks += 1;
            self.may_go_with_all(row)
        };
        let doomed = self.tree.descend(self.space.chunks_of_slab(slab), may_go);
        let Some(doomed) = doomed.filter(|_| !self.space.is_slab_owned(slab)) else { return false };
        for row in doomed {
            // Parents may come first: they are holes until the last of their descendants, all of
            // them doomed, is gone.
            self.evicted += u64::from(self.drop_bytes(row, Absence::Evicted));
        }
        true
    }

    /// Whether a row may go if all that continues it goes.
    fn may_go_with_all(&self, row: Row) -> bool {
        let entry = self.entry(row);
        entry.is_unheld() || entry.state == State::Hole
    }

    fn is_evictable(&self, row: Row) -> bool {
        self.entry(row).is_unheld() && self.tree.is_leaf(row)
    }

    /// Whether the row was set aside and could be evicted now.
    pub(super) fn awaits_listing(&self, row: Row) -> bool {
        self.entry(row).state == State::Parked && self.is_evictable(row)
    }

    /// Puts a row that was set aside back as the warmest, if what kept it is gone.
    pub(super) fn relist(&mut self, row: Row) {
        if self.awaits_listing(row) {
            self.list(row);
        }
    }

    /// Makes a resident row the warmest.
    pub(super) fn touch(&mut self, row: Row) {
        if self.entry(row).state == State::Listed {
            self.recency.remove(row, self.entry(row).tenant);
        }
        self.list(row);
    }

    pub(super) fn list(&mut self, row: Row) {
        let entry = self.entry_mut(row);
        entry.state = State::Listed;
        let tenant = entry.tenant;
        self.recency.push_warmest(row, tenant);
    }
}
