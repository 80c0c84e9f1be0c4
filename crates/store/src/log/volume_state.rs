//! A volume: one log on one file or partition, and what of its changes is not yet durable. This
//! file knows records, blocks and checkpoints by their numbers.

use super::format::{JournalPosition, Layout, LogUuid, RECORDS_PER_BLOCK, Record, SegmentHeader, Superblock};
use crate::tenant::TenantId;
use std::collections::VecDeque;
use std::ops::Range;

/// Records that may wait for a commit. Beyond, the volume takes no chunks until one succeeds.
const PENDING_MAX: usize = 1 << 20;

/// So many records make a commit urgent: half a megabyte of journal.
const URGENT_RECORDS: usize = 128 * RECORDS_PER_BLOCK;

#[derive(Debug)]
pub(super) struct VolumeState {
    pub log: LogUuid,
    pub layout: Layout,
    /// The number of its segment 0 over all volumes.
    pub first_segment: usize,
    /// What the file says now.
    pub superblock: Superblock,
    /// Segments that may be opened, the one that became free first is first.
    pub free: VecDeque<usize>,
    /// Segments that are free once the pending records are durable.
    pub freeing: Vec<usize>,
    /// Sealed segments whose summaries are to be written.
    pub to_summarise: Vec<usize>,
    /// Changes that are not durable, and how many more a commit under way has.
    pub pending: Vec<Record>,
    pub committing_records: usize,
    /// Segments that are free once that commit has ended.
    pub committing_freed: usize,
    /// Headers that are not in the file.
    pub headers: Vec<SegmentHeader>,
    /// Where the next block of the journal goes.
    pub journal: JournalPosition,
    /// First block that the last checkpoint does not cover.
    pub replay_from: u64,
    /// The last checkpoint's number.
    pub checkpoint: u64,
    /// Whether the next commit is to be one, without blocks, since the last attempt's may or may
    /// not be in the file.
    pub checkpoint_is_due: bool,
    pub committing: bool,
    pub closed: bool,
    /// Segments that are not withdrawn.
    pub usable: usize,
    /// Tenants whose bytes are being overwritten.
    pub doomed: Vec<TenantId>,
    /// Segments to be given to the file system, if positive, or taken back.
    pub to_withdraw: i64,
    /// Generations begun since the log was opened.
    generations: u32,
}

impl VolumeState {
    /// A volume that was just opened, with nothing pending.
    pub fn new(superblock: Superblock, first_segment: usize, journal: JournalPosition) -> VolumeState {
        VolumeState {
            log: superblock.log,
            layout: superblock.layout,
            first_segment,
            superblock,
            free: VecDeque::new(),
            freeing: Vec::new(),
            to_summarise: Vec::new(),
            pending: Vec::new(),
            committing_records: 0,
            committing_freed: 0,
            headers: Vec::new(),
            journal,
            replay_from: journal.sequence,
            checkpoint: 0,
            checkpoint_is_due: false,
            committing: false,
            closed: false,
            usable: superblock.layout.segments as usize,
            doomed: Vec::new(),
            to_withdraw: 0,
            generations: 0,
        }
    }

    /// Its segments, by their numbers over all volumes.
    pub fn segments(&self) -> Range<usize> {
        self.first_segment..self.first_segment + self.layout.segments as usize
    }

    /// The number of a segment within this volume.
    pub fn local(&self, segment: usize) -> u32 {
        (segment - self.first_segment) as u32
    }

    /// The generation of the next segment that is opened. The epoch is part of it: a generation
    /// that a crash made the log forget is never used again.
    pub fn take_sequence(&mut self) -> u64 {
        self.generations += 1;
        self.next_sequence() - 1
    }

    /// What [`take_sequence`](VolumeState::take_sequence) gives next.
    pub fn next_sequence(&self) -> u64 {
        (self.superblock.epoch << 32) + u64::from(self.generations) + 1
    }

    pub fn note_opened(&mut self, header: &SegmentHeader) {
        let SegmentHeader { segment, sequence, slots } = header;
        self.pending.push(Record::Opened { segment: *segment, sequence: *sequence, slots: slots.count });
        self.headers.push(header.clone());
    }

    /// Whether nothing may be added until a commit succeeds.
    pub fn is_congested(&self) -> bool {
        self.pending.len() >= PENDING_MAX || self.closed
    }

    /// Whether something waits for a commit that should not wait for the next interval.
    pub fn is_urgent(&self, free_goal: usize) -> bool {
        let starved = !self.freeing.is_empty() && self.free.len() < free_goal;
        !self.committing && (starved || self.pending.len() >= URGENT_RECORDS)
    }

    pub fn has_pending(&self) -> bool {
        !self.pending.is_empty() || !self.headers.is_empty() || !self.to_summarise.is_empty()
    }
}
