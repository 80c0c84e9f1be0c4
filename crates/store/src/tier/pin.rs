//! Pinning chunks where they are, and sending single ones away. This file knows what a pin keeps:
//! the chunk, and all that it continues, since no chunk goes before those that continue it.
//!
//! A tenant that pins pays for that too, so that what cannot be evicted is never more than
//! [`Pins`] allows. Where room cannot be made otherwise pins give way, those that end first first:
//! whoever pins may never keep others from storing.

use super::{SlotAllocator, Tier};
use crate::absence::Absence;
use crate::entry::Row;
use crate::pins::{Pin, Pins};
use crate::tenant::TenantId;
use forebay_kv::ChunkId;
use thiserror::Error;

/// Why a chunk is as it was: not pinned, not unpinned, not sent away.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Unchanged {
    #[error("the chunk is not stored here")]
    NotHere,
    #[error("{needed_bytes} bytes are to be pinned, and the tenant may pin {room_bytes} more")]
    NoRoom { needed_bytes: u64, room_bytes: u64 },
    #[error("the chunk is not pinned")]
    NotPinned,
    #[error("a chunk that continues it is pinned or stays")]
    Continued,
    #[error("the chunk is being read, leased or written")]
    InUse,
    #[error("the chunk is pinned")]
    Pinned,
    #[error("there is no disk that it could go to")]
    NoDisk,
    #[error("the chunk is not on disk yet; it is being written")]
    NotOnDisk,
}

impl<S: SlotAllocator> Tier<S> {
    /// Keeps a chunk, and those that it continues, from being evicted for `ttl_us` or
    /// [`PIN_US_MAX`](crate::PIN_US_MAX), and says until when. A pin that ends later stays as it
    /// is.
    pub fn pin(
        &mut self,
        now_us: u64,
        tenant: TenantId,
        id: &ChunkId,
        ttl_us: u64,
    ) -> Result<u64, Unchanged> {
        self.advance(now_us);
        let row = self.resident_of(tenant, id)?;
        let until_us = Pins::end_of(self.clock_us, ttl_us);
        let line = std::iter::successors(Some(row), |row| self.tree.parent(*row));
        let ends_sooner = |row: &Row| self.pins.until_us(*row).is_none_or(|end_us| end_us < until_us);
        let line: Vec<Row> =
            line.filter(|row| self.entry(*row).is_resident()).take_while(ends_sooner).collect();
        let new = line.iter().filter(|row| !self.entry(**row).pinned);
        let needed_bytes = new.map(|row| self.bytes_of(*row)).sum();
        let quota_bytes = self.quotas.limit_bytes(tenant);
        let room_bytes = self.pins.room_bytes(tenant, quota_bytes, self.space.room_bytes());
        if needed_bytes > room_bytes {
            return Err(Unchanged::NoRoom { needed_bytes, room_bytes });
        }
        for row in line {
            self.set_pin(row, until_us);
        }
        Ok(self.pins.until_us(row).unwrap_or(until_us))
    }

    /// Pins a chunk that is here, with or without room for it.
    pub(super) fn set_pin(&mut self, row: Row, until_us: u64) {
        let pin = Pin { tenant: self.entry(row).tenant, bytes: self.bytes_of(row), until_us };
        self.pins.set(row, pin);
        self.entry_mut(row).pinned = true;
    }

    /// Ends the pin of a chunk, unless one that continues it is pinned and needs it.
    pub fn unpin(&mut self, now_us: u64, tenant: TenantId, id: &ChunkId) -> Result<(), Unchanged> {
        self.advance(now_us);
        let row = self.resident_of(tenant, id)?;
        if !self.entry(row).pinned {
            return Err(Unchanged::NotPinned);
        }
        if self.tree.children(row).any(|child| self.entry(child).pinned) {
            return Err(Unchanged::Continued);
        }
        self.end_pin(row);
        Ok(())
    }

    /// When the pin of a chunk ends, if it is the tenant's and pinned.
    pub fn pinned_until_us(&mut self, now_us: u64, tenant: TenantId, id: &ChunkId) -> Option<u64> {
        self.advance(now_us);
        let row = self.resident_of(tenant, id).ok()?;
        self.pins.until_us(row)
    }

    /// Evicts one chunk that nobody needs to stay, whatever has been used since.
    pub fn demote(&mut self, now_us: u64, tenant: TenantId, id: &ChunkId) -> Result<(), Unchanged> {
        self.advance(now_us);
        let row = self.resident_of(tenant, id)?;
        let entry = self.entry(row);
        match (entry.pinned, entry.holds > 0, self.tree.is_leaf(row)) {
            (true, ..) => Err(Unchanged::Pinned),
            (_, true, _) => Err(Unchanged::InUse),
            (.., false) => Err(Unchanged::Continued),
            (false, false, true) => {
                self.evicted += u64::from(self.drop_bytes(row, Absence::Demoted));
                Ok(())
            }
        }
    }

    /// Whether a chunk is here and the tenant's.
    pub fn has(&self, tenant: TenantId, id: &ChunkId) -> bool {
        self.resident_of(tenant, id).is_ok()
    }

    /// Ends pins whose time has come.
    pub(super) fn expire_pins(&mut self) {
        while let Some(row) = self.pins.expire(self.clock_us) {
            self.entry_mut(row).pinned = false;
            self.relist(row);
        }
    }

    /// Ends up to `most` pins that are all that keeps their chunks, of one tenant or of all. Says
    /// whether there was one.
    pub(super) fn pins_give_way(&mut self, tenant: Option<TenantId>, most: usize) -> bool {
        let unheld = self.pins.soonest(tenant).filter(|row| self.entry(*row).holds == 0);
        let rows: Vec<Row> = unheld.take(most).collect();
        rows.iter().for_each(|row| self.end_pin(*row));
        self.pins_broken += rows.len() as u64;
        !rows.is_empty()
    }

    /// Pins that gave way since the start.
    pub fn pins_broken(&self) -> u64 {
        self.pins_broken
    }

    fn end_pin(&mut self, row: Row) {
        self.pins.remove(row);
        self.entry_mut(row).pinned = false;
        self.relist(row);
    }

    fn resident_of(&self, tenant: TenantId, id: &ChunkId) -> Result<Row, Unchanged> {
        let is_own = |row: &Row| self.entry(*row).is_resident() && self.entry(*row).tenant == tenant;
        self.index.find(id).filter(is_own).ok_or(Unchanged::NotHere)
    }

    fn bytes_of(&self, row: Row) -> u64 {
        self.entry(row).slot.map_or(0, |slot| self.space.bytes_of(slot))
    }
}
