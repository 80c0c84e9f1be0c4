//! Where KV rests: memory, and an SSD below it.
//!
//! Knows chunks by their ids, the bytes of memory and disk that each has, leases, pins, tenants'
//! shares and the order of eviction.

mod absence;
pub mod admission;
pub mod checksum;
mod chunk_leases;
pub mod chunk_store;
pub mod disk;
mod entry;
mod index;
pub mod log;
mod lost;
mod operations;
mod pins;
mod recency;
mod shape;
mod slots;
pub mod ssd;
mod stat;
mod store;
mod tenant;
mod tier;
mod tree;
mod wipes;

pub use absence::{Absence, Absences, Noted};
pub use chunk_leases::LeaseId;
pub use pins::{PIN_US_MAX, PINNED_OF_QUOTA, PINNED_OF_TIER};
pub use shape::{ChunkShape, MAX_LAYERS, ShapeError};
pub use slots::{SLAB_BYTES_MAX, SLABS_MAX, SLOT_ALIGN_BYTES, SlabError};
pub use stat::{ArenaUse, Counters, Faults, NotCommitted, Refusals, Refused, Stat, Unreadable};
pub use store::{
    Changed, ChunkStatus, DiskSideStat, Hits, Lease, Left, Load, NotLoaded, NotStored, NotVerified,
};
pub use store::{LayerGuard, NotFetched, NotPromoted, ReadGuard, Reservation};
pub use store::{Memory, OpenError, PromotionStat, Store, StoreEnd, Whereabouts, WhyAbsent};
pub use store::{Timing, WriteBackConfig, WriteBackStat, WritesBegun};
pub use tenant::{TenantId, TenantUse};
pub use tier::{
    Begun, Kept, KeptChunk, MemoryTier, NotAdopted, Read, ReadEnd, TierConfig, Unchanged, Wipe, Write,
};
