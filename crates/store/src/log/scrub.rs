//! Overwriting what is gone: the slots of deleted chunks, and after the end of a tenant every byte
//! that no living chunk has. This file knows which bytes.

use super::format::Record;
use super::segments::{Job, LogSlot, Scrubs, Segments, State};
use super::tier::DiskTier;
use crate::absence::Absence;
use crate::entry::Row;
use crate::tenant::TenantId;
use crate::tier::SlotAllocator;
use forebay_kv::ChunkId;

/// Bytes of one piece at most, so that scrubbing gives way to others in between.
const PIECE_BYTES: u64 = 8 << 20;

/// How often all that is dead is overwritten because chunks are forgotten, at most.
const SWEEP_EVERY_US: u64 = 60_000_000;

/// A stretch of a volume to be overwritten with zeros.
#[derive(Debug)]
#[must_use = "the stretch stays taken until the scrub is ended"]
pub struct Scrub {
    pub volume: usize,
    pub offset: u64,
    pub bytes: u64,
    segment: usize,
    /// Where it starts in the segment, if all of that is overwritten, piece by piece.
    piece_at: Option<u64>,
}

impl DiskTier {
    /// Drops chunks as [`delete`](DiskTier::delete) does, and has their bytes overwritten: those of
    /// their slots now, and with the next sweep every byte that no living chunk has, since the log
    /// may have moved them before. Survives a crash. Says of each whether it was here.
    pub fn forget(&mut self, now_us: u64, tenant: TenantId, ids: &[ChunkId]) -> Vec<bool> {
        self.advance(now_us);
        let is_here = |id: &ChunkId| !self.rows_of(tenant, std::slice::from_ref(id)).is_empty();
        let gone: Vec<bool> = ids.iter().map(is_here).collect();
        if gone.contains(&true) {
            // Before the chunks go: a crash between the two leaves a chunk, and no bytes of one.
            self.space.doom(TenantId::NOBODY);
            self.space.scrubs.sweep_is_due = true;
            self.delete_and_scrub(tenant, ids);
        }
        gone
    }

    /// Drops chunks as [`delete`](DiskTier::delete) does, and has their bytes overwritten.
    pub fn delete_and_scrub(&mut self, tenant: TenantId, ids: &[ChunkId]) -> usize {
        let own = |row: &Row| self.entry(*row).tenant == tenant;
        let rows: Vec<Row> = ids.iter().filter_map(|id| self.index.find(id)).filter(own).collect();
        for slot in rows.into_iter().filter_map(|row| self.entry(row).slot).collect::<Vec<_>>() {
            self.space.scrub_slot(slot);
        }
        self.delete(tenant, ids)
    }

    /// Ends a tenant: its chunks are gone at once, and every byte on disk that no other chunk has
    /// is to be overwritten, as [`next_scrub`](DiskTier::next_scrub) says. Survives a crash. Says
    /// how many chunks there were.
    pub fn doom_tenant(&mut self, now_us: u64, tenant: TenantId) -> usize {
        self.advance(now_us);
        let rows = (0..self.entries.len()).filter_map(Row::at);
        let own: Vec<Row> = rows.filter(|row| self.entry(*row).tenant == tenant).collect();
        let gone = own.into_iter().filter(|row| self.drop_bytes(*row, Absence::Deleted)).count();
        self.space.doom(tenant);
        self.sweep();
        gone
    }

    /// Has every byte be overwritten that no living chunk has.
    fn sweep(&mut self) {
        for number in self.space.open_segments() {
            // Bytes of earlier generations lie behind its frontier.
            self.space.seal(number);
        }
        self.space.scrub_everything();
        let scrubs = &mut self.space.scrubs;
        (scrubs.sweep_is_due, scrubs.swept_us) = (false, Some(self.clock_us));
    }

    pub fn next_scrub(&mut self, now_us: u64) -> Option<Scrub> {
        self.advance(now_us);
        if self.space.scrubs.may_sweep(self.clock_us) {
            self.sweep();
        }
        for _ in 0..self.space.scrubs.jobs.len() {
            let job = self.space.scrubs.jobs.pop_front()?;
            if let Some(scrub) = self.space.scrub_of(job) {
                self.space.scrubs.under_way += 1;
                return Some(scrub);
            }
        }
        self.space.scrubs_may_be_over();
        None
    }

    /// A stretch was overwritten, or could not be; then it comes again.
    pub fn end_scrub(&mut self, scrub: Scrub, overwritten: bool) {
        self.space.scrubs.under_way -= 1;
        let Scrub { segment: number, piece_at, bytes, .. } = scrub;
        match piece_at {
            None => {
                self.space.segments[number].busy -= 1;
                if !overwritten {
                    self.space.scrubs.jobs.push_back(Job::Segment(number));
                }
                self.space.free_if_empty(number);
            }
            Some(at) => self.end_piece(number, if overwritten { at + bytes } else { at }),
        }
        self.space.scrubs_may_be_over();
    }

    /// A free segment is overwritten up to `next`. One piece follows the other, so that none is
    /// under way, or to be written again, when the segment may be opened.
    fn end_piece(&mut self, number: usize, next: u64) {
        if next < self.segment_bytes(number) {
            self.space.scrubs.jobs.push_back(Job::Rest(number, next));
            return;
        }
        let segment = &mut self.space.segments[number];
        segment.clean = true;
        segment.state = State::Free;
        self.space.volume_of(number).free.push_back(number);
    }
}

impl Scrubs {
    fn are_over(&self) -> bool {
        self.jobs.is_empty() && self.under_way == 0
    }

    /// Whether all that is dead is to be overwritten now. One sweep follows the other, so that
    /// chunks that are forgotten one by one cost a few of them.
    fn may_sweep(&self, now_us: u64) -> bool {
        let rested = self.swept_us.is_none_or(|swept_us| now_us >= swept_us.saturating_add(SWEEP_EVERY_US));
        self.sweep_is_due && self.are_over() && rested
    }
}

impl Segments {
    /// Bytes of a tenant that is gone are to be overwritten, also after a crash.
    fn doom(&mut self, tenant: TenantId) {
        for volume in &mut self.volumes {
            if !volume.doomed.contains(&tenant) {
                volume.doomed.push(tenant);
                volume.pending.push(Record::TenantDoomed { tenant });
            }
        }
    }

    pub(super) fn scrub_everything(&mut self) {
        let in_question = (0..self.segments.len()).filter(|number| {
            let segment = &self.segments[*number];
            segment.state != State::Withdrawn && !(segment.state == State::Free && segment.clean)
        });
        self.scrubs.jobs.extend(in_question.map(Job::Segment));
    }

    fn scrub_slot(&mut self, slot: LogSlot) {
        // Until it is overwritten, the segment is not given to others.
        self.segments[slot.segment()].busy += 1;
        self.scrubs.jobs.push_back(Job::Slot(slot));
    }

    /// A chunk was dropped while it was relocated to this slot. If its old slot waits to be
    /// overwritten, so does this one.
    pub(super) fn scrub_copy(&mut self, slot: LogSlot) {
        if !self.scrubs.jobs.is_empty() {
            self.scrub_slot(slot);
        }
    }

    /// A segment is about to be given to the file system. Tenants that end wait for that.
    pub(super) fn begin_giving(&mut self) {
        self.scrubs.under_way += 1;
    }

    /// It was given, or could not be and is free: then it is overwritten if a tenant ends.
    pub(super) fn end_giving(&mut self, number: usize, given: bool) {
        self.scrubs.under_way -= 1;
        if !given && self.volumes.iter().any(|volume| !volume.doomed.is_empty()) {
            self.scrubs.jobs.push_back(Job::Segment(number));
        }
        self.scrubs_may_be_over();
    }

    /// The next stretch of a job; what is left of the job comes later.
    fn scrub_of(&mut self, job: Job) -> Option<Scrub> {
        match job {
            Job::Slot(slot) => {
                if self.is_in_use(slot) {
                    self.scrubs.jobs.push_back(job);
                    return None;
                }
                let place = self.place(slot, &ChunkId::from_bytes([0; 32]));
                let bytes = place.shape.stride_bytes();
                let (volume, offset) = (place.volume, place.slot_at);
                Some(Scrub { volume, offset, bytes, segment: slot.segment(), piece_at: None })
            }
            Job::Segment(number) => match self.segments[number].state {
                State::Free => {
                    self.volume_of(number).free.retain(|free| *free != number);
                    self.segments[number].state = State::Scrubbing;
                    self.scrub_of(Job::Rest(number, 0))
                }
                State::Sealed => {
                    self.scrub_dead(number);
                    None
                }
                State::Freeing => {
                    self.scrubs.jobs.push_back(job);
                    None
                }
                // Opened since: what is written there now is alive, and the rest is scrubbed when
                // it is sealed.
                State::Open => {
                    self.seal(number);
                    self.scrubs.jobs.push_back(job);
                    None
                }
                State::Scrubbing | State::Withdrawn => None,
            },
            Job::Behind(number, from) => Some(self.piece(number, from, None)),
            Job::Rest(number, from) => Some(self.piece(number, from, Some(from))),
        }
    }

    /// What is left of a segment from an offset on, as far as it is one piece.
    fn piece(&self, number: usize, from: u64, piece_at: Option<u64>) -> Scrub {
        let volume = usize::from(self.segments[number].volume);
        let layout = self.volumes[volume].layout;
        let bytes = (layout.segment_bytes - from).min(PIECE_BYTES);
        let offset = layout.segment_at(self.volumes[volume].local(number)) + from;
        Scrub { volume, offset, bytes, segment: number, piece_at }
    }

    /// Makes a job of each slot of a sealed segment in which nothing lives, and of each piece
    /// behind the slots.
    fn scrub_dead(&mut self, number: usize) {
        let volume = usize::from(self.segments[number].volume);
        let segment_bytes = self.volumes[volume].layout.segment_bytes;
        let segment = &mut self.segments[number];
        let slots = segment.occupants.iter().enumerate().filter(|(_, occupant)| occupant.is_none());
        let slots = slots.map(|(slot, _)| Job::Slot(LogSlot::new(number, slot as u16)));
        let end = if segment.clean { segment_bytes } else { segment.slots.slot_at(segment.slots.count) };
        let behind = (end..segment_bytes).step_by(PIECE_BYTES as usize);
        let dead: Vec<Job> = slots.chain(behind.map(|from| Job::Behind(number, from))).collect();
        segment.busy += dead.len() as u32;
        self.scrubs.jobs.extend(dead);
    }

    /// Says that doomed tenants are gone once nothing is left to overwrite.
    fn scrubs_may_be_over(&mut self) {
        if !self.scrubs.are_over() || self.scrubs.sweep_is_due {
            return;
        }
        for volume in &mut self.volumes {
            for tenant in std::mem::take(&mut volume.doomed) {
                volume.pending.push(Record::TenantGone { tenant });
            }
        }
    }
}
