//! What the tier says about itself: refusals with their reasons, faults and a snapshot of all
//! counters. This file names and counts.

use crate::tenant::{TenantId, TenantUse};
use std::ops::Deref;
use thiserror::Error;

/// Why a chunk is not stored. Nothing was changed for it; others may have been evicted in the
/// attempt.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Refused {
    /// The chunk before this one is neither here nor being written, so nobody could find this one.
    #[error("the chunk's parent is not stored")]
    ParentMissing,
    #[error("the chunk is being written")]
    BeingWritten,
    /// The id, or the parent's, belongs to another tenant.
    #[error("the chunk or its parent belongs to {owner:?}")]
    OtherTenant { owner: TenantId },
    #[error("the chunk takes {slot_bytes} bytes; a slab has {slab_bytes}")]
    TooLarge {
        /// The chunk's length, rounded up to a slot.
        slot_bytes: u64,
        slab_bytes: u64,
    },
    #[error("{reason}")]
    Unfit { reason: String },
    /// Everything here is leased, pinned, being written or being read; or, on disk, no segment is
    /// free yet.
    #[error("{needed_bytes} bytes are needed and nothing may be evicted")]
    Full { needed_bytes: u64 },
    /// The tenant's share is used up by chunks that may not be evicted.
    #[error(
        "{tenant:?} uses {used_bytes} of {quota_bytes} bytes; {needed_bytes} more are needed and nothing may be evicted"
    )]
    Quota { tenant: TenantId, used_bytes: u64, quota_bytes: u64, needed_bytes: u64 },
    /// The index is full of chunks that may not be evicted.
    #[error("the index holds its {limit} chunks and none may be evicted")]
    IndexFull { limit: usize },
}

/// Why a lease does not give access to a chunk. To the caller it is a miss.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Unreadable {
    #[error("the lease is dead")]
    DeadLease,
    /// The chunk was deleted or found corrupt since the lease was granted.
    #[error("chunk {chunk} of the lease is gone")]
    Gone {
        /// Its place in the lease.
        chunk: usize,
    },
    /// The lease does not cover so many chunks, or the chunk has fewer layers.
    #[error("chunk {chunk}, layer {layer} is outside of the lease")]
    Outside { chunk: usize, layer: usize },
}

/// Why a written chunk did not become visible.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum NotCommitted {
    #[error("the chunk was deleted while it was written")]
    Deleted,
    #[error("{given} checksums for {layers} layers")]
    Checksums { given: usize, layers: usize },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Refusals {
    pub parent_missing: u64,
    pub being_written: u64,
    pub other_tenant: u64,
    /// [`Refused::TooLarge`] and [`Refused::Unfit`].
    pub too_large: u64,
    pub full: u64,
    pub quota: u64,
    pub index_full: u64,
    /// Leases that were not granted because there were too many.
    pub leases: u64,
}

impl Refusals {
    pub(crate) fn count(&mut self, refused: &Refused) {
        let counter = match refused {
            Refused::ParentMissing => &mut self.parent_missing,
            Refused::BeingWritten => &mut self.being_written,
            Refused::OtherTenant { .. } => &mut self.other_tenant,
            Refused::TooLarge { .. } | Refused::Unfit { .. } => &mut self.too_large,
            Refused::Full { .. } => &mut self.full,
            Refused::Quota { .. } => &mut self.quota,
            Refused::IndexFull { .. } => &mut self.index_full,
        };
        *counter += 1;
    }
}

/// What went wrong with bytes, by kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Faults {
    /// Chunks dropped because a layer's bytes did not match their checksum.
    pub corrupt: u64,
    /// Writes that failed or were cancelled.
    pub writes: u64,
    /// Reads that failed or were cancelled.
    pub reads: u64,
    /// Operations that lost track of bytes of a slot.
    pub lost: u64,
}

/// What tiers of every medium count.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Counters {
    /// Chunks that can be found, if their parents can.
    pub chunks: usize,
    /// Ids known, including chunks being written and holes.
    pub rows: usize,
    pub leases: usize,
    pub leases_expired: u64,
    /// Chunks written in full since the start.
    pub stored: u64,
    pub evicted: u64,
    /// Chunks that are pinned, and what they take.
    pub pinned: usize,
    pub pinned_bytes: u64,
    /// Pins that gave way before their time, since there was no other room.
    pub pins_broken: u64,
    /// Chunks of which it is forgotten why they are not here.
    pub absences_forgotten: u64,
    pub refusals: Refusals,
    pub faults: Faults,
    /// Tenants that use something.
    pub tenants: Vec<TenantUse>,
    /// Bytes of the tables that grow with the limit on chunks: ids, relatives, recency, state.
    pub index_bytes: u64,
}

/// Where every byte of the arena is. The five add up to the arena's length.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ArenaUse {
    /// Slots with a chunk, or with one being written.
    pub used_bytes: u64,
    /// Slots whose chunk is gone while an operation still reads or writes them, for which the
    /// tenant still pays, and those of forgotten chunks until they are overwritten.
    pub draining_bytes: u64,
    /// Slots whose chunk is gone while a lost operation may still touch them. Nobody pays.
    pub quarantined_bytes: u64,
    /// Free slots, and slabs in the pool.
    pub free_bytes: u64,
    /// What is left of slabs, and of the arena, after the last slot or slab that fits.
    pub tail_bytes: u64,
}

/// A snapshot of the memory tier.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Stat {
    pub capacity_bytes: u64,
    /// Where every byte of it is.
    pub arena: ArenaUse,
    pub counters: Counters,
    /// Bytes of the tables that grow with slots in use: occupants and checksums.
    pub slot_table_bytes: u64,
}

impl Deref for Stat {
    type Target = Counters;

    fn deref(&self) -> &Counters {
        &self.counters
    }
}
