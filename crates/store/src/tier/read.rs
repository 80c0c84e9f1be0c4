//! Reading: leases are granted over prefixes, and reads run under leases. This file knows who may
//! read which bytes.

use super::{SlotAllocator, Tier};
use crate::absence::Absence;
use crate::chunk_leases::{LeaseId, LiveLease};
use crate::entry::{ChunkRef, Row};
use crate::stat::Unreadable;
use crate::tenant::TenantId;
use forebay_kv::ChunkId;
use std::ops::Deref;

/// A read that may run: it owns the slot until this value is given to [`Tier::end_read`], whatever
/// becomes of the chunk and the lease meanwhile. If it is dropped instead, the chunk is never
/// evicted.
#[derive(Debug)]
#[must_use = "the slot is owned until the read is ended"]
pub struct SlotRead<S: SlotAllocator> {
    pub(crate) chunk: ChunkRef,
    pub(crate) slot: S::Slot,
    pub(crate) place: S::Place,
}

impl<S: SlotAllocator> Deref for SlotRead<S> {
    type Target = S::Place;

    fn deref(&self) -> &S::Place {
        &self.place
    }
}

impl<S: SlotAllocator> Tier<S> {
    /// Leases the longest prefix of `ids` that is here and the tenant's, for `ttl_us` or the
    /// configured maximum, and says how many chunks that are. `None` if there are none, or as many
    /// leases as may be.
    pub fn lease(
        &mut self,
        now_us: u64,
        tenant: TenantId,
        ids: &[ChunkId],
        ttl_us: u64,
    ) -> Option<(LeaseId, usize)> {
        self.advance(now_us);
        let held = |row| ChunkRef { row, generation: self.entry(row).generation };
        let chunks: Box<[ChunkRef]> = self.prefix(tenant, ids).map(held).collect();
        if chunks.is_empty() {
            return None;
        }
        if !self.leases.has_room() {
            self.refusals.leases += 1;
            return None;
        }
        for chunk in &chunks {
            self.entry_mut(chunk.row).holds += 1;
        }
        let (count, expires_us) = (chunks.len(), self.leases.end_of(self.clock_us, ttl_us));
        Some((self.leases.add(LiveLease { chunks, expires_us }), count))
    }

    /// Makes the longest prefix of `ids` that is here and the tenant's the one used last, as a
    /// lease that ends does. What is held comes behind it when it is let go of.
    pub fn used(&mut self, tenant: TenantId, ids: &[ChunkId]) {
        let own: Vec<Row> = self.prefix(tenant, ids).collect();
        self.touch_ends(&own);
    }

    /// Lets a live lease end `ttl_us` from now, and says when that is. A dead lease stays dead.
    pub fn renew(&mut self, now_us: u64, lease: LeaseId, ttl_us: u64) -> Result<u64, Unreadable> {
        self.advance(now_us);
        let expires_us = self.leases.end_of(self.clock_us, ttl_us);
        if self.leases.renew(lease, expires_us) { Ok(expires_us) } else { Err(Unreadable::DeadLease) }
    }

    /// Ends a lease. Says whether it was alive.
    pub fn release(&mut self, now_us: u64, lease: LeaseId) -> bool {
        self.advance(now_us);
        let ended = self.leases.end(lease);
        if let Some(ended) = &ended {
            self.let_go(ended);
        }
        ended.is_some()
    }

    /// Takes back the holds of a lease that ended, and makes its chunks the ones used last.
    pub(super) fn let_go(&mut self, ended: &LiveLease) {
        for chunk in &ended.chunks {
            self.unhold(chunk);
        }
        let live = ended.chunks.iter().filter(|chunk| self.is_live(chunk));
        let rows: Vec<Row> = live.map(|chunk| chunk.row).collect();
        self.touch_ends(&rows);
    }

    /// Makes a sequence the one used last. A chunk that the next one continues needs no place of
    /// its own: it cannot go before that one, and inherits its place. Where the tree does not know
    /// that, since a lease that brought chunks here began with the next one, each part has a place,
    /// and the beginning the warmest.
    fn touch_ends(&mut self, rows: &[Row]) {
        for (at, row) in rows.iter().enumerate().rev() {
            if rows.get(at + 1).is_none_or(|next| self.tree.parent(*next) != Some(*row)) {
                self.touch(*row);
            }
        }
    }

    /// Begins to read a chunk of a lease, counted from 0.
    pub fn begin_read(
        &mut self,
        now_us: u64,
        lease: LeaseId,
        chunk: usize,
    ) -> Result<SlotRead<S>, Unreadable> {
        self.advance(now_us);
        let (chunk, slot) = self.readable(lease, chunk)?;
        Ok(self.start_reading(chunk, slot))
    }

    pub(crate) fn start_reading(&mut self, chunk: ChunkRef, slot: S::Slot) -> SlotRead<S> {
        self.entry_mut(chunk.row).holds += 1;
        self.space.begin(slot);
        let place = self.space.place(slot, self.index.id(chunk.row));
        SlotRead { chunk, slot, place }
    }

    /// A read ended. `lost_bytes` of the slot may still be read by a part of it that is lost; they
    /// are reported to `quiet` once they cannot, and the slot is not given to another chunk before.
    pub fn end_read(&mut self, now_us: u64, read: SlotRead<S>, ended: ReadEnd) {
        self.advance(now_us);
        let mut lost = 0;
        if let ReadEnd::Failed { lost_bytes } = ended {
            self.faults.reads += 1;
            self.faults.lost += u64::from(lost_bytes > 0);
            lost = lost_bytes;
        }
        self.unhold(&read.chunk);
        let refund = self.space.end(read.slot, lost);
        self.refund(refund);
        if ended == ReadEnd::Corrupt {
            self.drop_found_corrupt(&read.chunk);
        }
    }

    /// Bytes at an offset of a volume that were reported as lost are touched by nobody any more.
    /// They may be of several slots side by side.
    pub fn quiet(&mut self, volume: usize, offset: u64, bytes: u64) {
        let (mut at, end) = (offset, offset.saturating_add(bytes));
        while at < end
            && let Some((slot, slot_end)) = self.space.at_offset(volume, at)
        {
            let part_end = slot_end.min(end);
            let refund = self.space.quiet(slot, part_end - at);
            self.refund(refund);
            at = part_end;
        }
    }

    /// Bytes of a leased chunk did not match their checksum: the chunk is dropped, and the fault
    /// counted. Says whose chunk it was.
    pub fn drop_corrupt(&mut self, now_us: u64, lease: LeaseId, chunk: usize) -> Option<(TenantId, ChunkId)> {
        self.advance(now_us);
        match self.readable(lease, chunk) {
            Ok((chunk, _)) => self.drop_found_corrupt(&chunk),
            Err(_) => {
                self.faults.corrupt += 1;
                None
            }
        }
    }

    /// Bytes of a chunk are not the ones that were written: it is dropped, if it is still here, and
    /// the fault counted. Says whose chunk it was.
    pub(crate) fn drop_found_corrupt(&mut self, chunk: &ChunkRef) -> Option<(TenantId, ChunkId)> {
        self.faults.corrupt += 1;
        let name = self.is_live(chunk).then(|| (self.entry(chunk.row).tenant, *self.id_of(chunk.row)));
        if name.is_some() {
            self.drop_bytes(chunk.row, Absence::Corrupt);
        }
        name
    }

    /// Bytes of a chunk that is not here yet were found to be wrong.
    pub(crate) fn count_corrupt(&mut self) {
        self.faults.corrupt += 1;
    }

    pub(super) fn readable(&self, lease: LeaseId, chunk: usize) -> Result<(ChunkRef, S::Slot), Unreadable> {
        let lease = self.leases.get(lease).ok_or(Unreadable::DeadLease)?;
        let held = lease.chunks.get(chunk).ok_or(Unreadable::Outside { chunk, layer: 0 })?;
        let entry = self.entry(held.row);
        let slot = entry.slot.filter(|_| self.is_live(held));
        slot.map(|slot| (*held, slot)).ok_or(Unreadable::Gone { chunk })
    }

    fn unhold(&mut self, chunk: &ChunkRef) {
        if self.is_live(chunk) {
            let entry = self.entry_mut(chunk.row);
            debug_assert!(entry.holds > 0, "a chunk is let go as often as it is held");
            entry.holds = entry.holds.saturating_sub(1);
            self.relist(chunk.row);
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadEnd {
    Done,
    /// The bytes arrived and are not the ones that were written. The chunk is dropped, and the
    /// fault counted.
    Corrupt,
    /// They did not arrive, or not all of them.
    Failed {
        /// Bytes of the slot that a lost operation may still read.
        lost_bytes: u64,
    },
}
