//! The disk tier: a tier whose medium is the segments of one or more logs. This file is what its
//! users call besides what every tier has; it must never do I/O: reads, writes and commits are
//! carried out by others, who say how they ended.

use super::format::Footer;
use super::segments::{Segments, State};
use crate::stat::{Counters, NotCommitted};
use crate::tenant::TenantId;
use crate::tier::{SlotRead, SlotWrite, Tier, WriteBegun};
use forebay_kv::ChunkId;
use std::ops::Deref;
use std::sync::Arc;

/// Chunks on disk.
///
/// A sans-IO state machine as the memory tier is one. A write begins with a slot; its writer puts
/// the chunk's bytes and footer there and says so; from then on the chunk can be read. It survives
/// a crash from the next [commit](Tier::next_commit) on. A read is verified by its reader against
/// the footer, as the copy that [`DiskRead::copy`] says.
pub type DiskTier = Tier<Segments>;

/// What became of the wish to store a chunk on disk.
pub type DiskBegun = WriteBegun<Segments>;

pub type DiskRead = SlotRead<Segments>;

pub type DiskWrite = SlotWrite<Segments>;

/// The limits of a disk tier, besides the size of its logs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskTierConfig {
    /// Chunks known at most. Tables for so many are reserved at the start, below 100 bytes each,
    /// and touched as they fill.
    pub max_chunks: u32,
    pub max_leases: usize,
    /// Longest time to live of a lease; longer wishes are cut to it.
    pub max_lease_us: u64,
    /// What a tenant may use that is not named in `quotas`.
    pub default_quota_bytes: u64,
    /// What single tenants may use.
    pub quotas: Vec<(TenantId, u64)>,
    /// Bytes of chunks that are relocated out of segments that are reclaimed, at most, in percent
    /// of the bytes that are stored. Chunks beyond are dropped.
    pub relocated_percent: u32,
}

impl Default for DiskTierConfig {
    /// A million chunks, 65,536 leases of at most a minute, no quotas, a quarter of what is stored
    /// relocated.
    fn default() -> DiskTierConfig {
        DiskTierConfig {
            max_chunks: 1 << 20,
            max_leases: 65_536,
            max_lease_us: 60_000_000,
            default_quota_bytes: u64::MAX,
            quotas: Vec::new(),
            relocated_percent: 25,
        }
    }
}

/// Where the segments are, and what they hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DiskUse {
    /// Length of all segments.
    pub capacity_bytes: u64,
    /// Slots with a chunk, or with one being written, each with its share of what a segment has
    /// besides slots.
    pub live_bytes: u64,
    pub live_limit_bytes: u64,
    /// Segments that may be opened, or that may be as soon as that is durable or their bytes are
    /// overwritten.
    pub free_segments: usize,
    pub open_segments: usize,
    pub sealed_segments: usize,
    /// Segments whose space belongs to the file system.
    pub withdrawn_segments: usize,
    /// Changes that are not durable.
    pub pending_records: usize,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DiskStat {
    pub counters: Counters,
    pub space: DiskUse,
    pub relocated: u64,
    pub relocated_bytes: u64,
    pub slot_table_bytes: u64,
}

impl Deref for DiskStat {
    type Target = Counters;

    fn deref(&self) -> &Counters {
        &self.counters
    }
}

impl DiskTier {
    /// The page that is to follow the chunk's extents, from the CRC-32C of each layer as it is on
    /// disk.
    pub fn footer(&self, write: &DiskWrite, crcs: &[u32]) -> Footer {
        let row = write.chunk.row;
        let parent = self.parent_id(row);
        let tenant = self.entry(row).tenant;
        Footer::new(write.place.copy, tenant, parent, Arc::clone(&write.place.shape), crcs)
    }

    /// The chunk's bytes and its footer are in the file: it becomes visible. A write that failed
    /// ends with [`abort`](Tier::abort).
    pub fn end_write(&mut self, now_us: u64, write: DiskWrite) -> Result<(), NotCommitted> {
        self.advance(now_us);
        let (slot, row, id) = (write.slot, write.chunk.row, write.place.copy.id);
        let stride = write.place.shape.stride_bytes();
        self.finish(write)?;
        let tenant = self.entry(row).tenant;
        self.space.note_stored(slot, tenant, id, None);
        self.space.relocation.allow(stride);
        Ok(())
    }

    pub fn stat(&self) -> DiskStat {
        let count = |states: &[State]| {
            self.space.segments.iter().filter(|segment| states.contains(&segment.state)).count()
        };
        let volumes = &self.space.volumes;
        let bytes = |volume: &super::volume_state::VolumeState| {
            u64::from(volume.layout.segments) * volume.layout.segment_bytes
        };
        DiskStat {
            counters: self.counters(),
            space: DiskUse {
                capacity_bytes: volumes.iter().map(bytes).sum(),
                live_bytes: self.space.live_bytes,
                live_limit_bytes: self.space.live_limit_bytes(),
                free_segments: count(&[State::Free, State::Freeing, State::Scrubbing]),
                open_segments: count(&[State::Open]),
                sealed_segments: count(&[State::Sealed]),
                withdrawn_segments: count(&[State::Withdrawn]),
                pending_records: volumes
                    .iter()
                    .map(|volume| volume.pending.len() + volume.committing_records)
                    .sum(),
            },
            relocated: self.space.relocation.chunks,
            relocated_bytes: self.space.relocation.bytes,
            slot_table_bytes: self.space.table_bytes(),
        }
    }

    pub fn volumes(&self) -> usize {
        self.space.volumes.len()
    }

    /// The ids of all chunks that can be read, in no particular order.
    pub fn resident(&self) -> impl Iterator<Item = (TenantId, ChunkId)> + '_ {
        self.resident_rows().map(|row| (self.entry(row).tenant, *self.id_of(row)))
    }
}
