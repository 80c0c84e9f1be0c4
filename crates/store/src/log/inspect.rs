//! Looking at a log without changing it: how it is divided, in what state it is, and which chunks
//! it holds. This file knows what a reader finds; it must never write, and it takes nothing over.

use super::format::{ChunkCopy, Layout, LogUuid, NotOpened, SegmentState, SlotShape};
use super::medium::Medium;
use super::recovery::{Found, FoundSegment, Metadata, Recovered, read_metadata, read_segments};
use crate::tenant::TenantId;
use forebay_kv::ChunkId;
use std::collections::BTreeMap;
use std::sync::Arc;

/// A chunk that a log holds. What its slot says is not checked yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChunkInLog {
    pub copy: ChunkCopy,
    pub tenant: TenantId,
    pub parent: Option<ChunkId>,
    pub shape: Arc<SlotShape>,
    pub slot_at: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TenantInLog {
    pub chunks: u64,
    /// Bytes of their layers.
    pub bytes: u64,
    /// Bytes of their slots, with padding and footers.
    pub slot_bytes: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SegmentCounts {
    /// Hold nothing.
    pub free: u32,
    /// Took chunks when the log was last in use.
    pub open: u32,
    /// Take no more.
    pub sealed: u32,
    /// Their space belongs to the file system.
    pub withdrawn: u32,
}

/// What a log is and holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inspection {
    pub log: LogUuid,
    /// How often its superblock was written.
    pub epoch: u64,
    /// Whether both superblocks can be read.
    pub both_superblocks: bool,
    pub checkpoint: u64,
    pub layout: Layout,
    /// What opening it would find.
    pub recovered: Recovered,
    pub segments: SegmentCounts,
    pub tenants: BTreeMap<TenantId, TenantInLog>,
    /// Tenants that are gone and whose bytes are still to be overwritten.
    pub doomed: Vec<TenantId>,
}

/// Reads what opening a log would read, and hands each chunk to `each`, by segment and slot.
pub fn inspect(medium: &dyn Medium, mut each: impl FnMut(&ChunkInLog)) -> Result<Inspection, NotOpened> {
    let mut metadata = read_metadata(medium)?;
    let Metadata { superblock, both_sound, checkpoint, .. } = metadata;
    let mut seen = Inspection {
        log: superblock.log,
        epoch: superblock.epoch,
        both_superblocks: both_sound,
        checkpoint,
        layout: superblock.layout,
        recovered: Recovered::default(),
        segments: SegmentCounts::default(),
        tenants: BTreeMap::new(),
        doomed: metadata.doomed.clone(),
    };
    read_segments(medium, &mut metadata, |segment| {
        seen.count_segment(segment.row.state);
        for chunk in segment.chunks.iter().filter(|chunk| !seen.doomed.contains(&chunk.tenant)) {
            seen.tenants.entry(chunk.tenant).or_default().count(&segment.slots.shape);
            each(&in_log(seen.log, &seen.layout, &segment, chunk));
        }
    })?;
    let chunks = seen.tenants.values().map(|tenant| tenant.chunks).sum();
    Ok(Inspection { recovered: Recovered { chunks, ..metadata.recovered }, ..seen })
}

fn in_log(log: LogUuid, layout: &Layout, segment: &FoundSegment, chunk: &Found) -> ChunkInLog {
    let Found { slot, tenant, id, parent } = *chunk;
    let copy = ChunkCopy { log, id, segment: segment.number, sequence: segment.row.sequence, slot };
    let slot_at = layout.segment_at(segment.number) + segment.slots.slot_at(slot);
    ChunkInLog { copy, tenant, parent, shape: Arc::clone(&segment.slots.shape), slot_at }
}

impl TenantInLog {
    fn count(&mut self, shape: &SlotShape) {
        self.chunks += 1;
        self.bytes += shape.chunk().bytes();
        self.slot_bytes += shape.stride_bytes();
    }
}

impl Inspection {
    fn count_segment(&mut self, state: SegmentState) {
        let counts = &mut self.segments;
        *match state {
            SegmentState::Free => &mut counts.free,
            SegmentState::Open => &mut counts.open,
            SegmentState::Sealed => &mut counts.sealed,
            SegmentState::Withdrawn => &mut counts.withdrawn,
        } += 1;
    }
}
