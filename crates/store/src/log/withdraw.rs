//! Giving space back to the file system when it runs short, and taking it again. This file knows
//! segments.

use super::format::Record;
use super::segments::State;
use super::tier::DiskTier;

/// A segment's stretch of a volume that is to be given to the file system, or taken back.
#[derive(Debug)]
#[must_use = "the segment is nobody's until the withdrawal is ended"]
pub struct Withdrawal {
    pub volume: usize,
    pub offset: u64,
    pub bytes: u64,
    /// Whether it is taken back rather than given.
    pub restore: bool,
    segment: usize,
}

/// Segments that a volume keeps, whatever the disk says.
const KEPT_SEGMENTS: usize = 4;

impl DiskTier {
    /// The disk is short of `bytes`: so many segments less are to be used. Chunks are evicted to
    /// empty them.
    pub fn shrink(&mut self, volume: usize, bytes: u64) {
        self.resize(volume, bytes, 1);
    }

    /// The disk has `bytes` to spare: so many segments that were given away are to be used again.
    pub fn grow(&mut self, volume: usize, bytes: u64) {
        self.resize(volume, bytes, -1);
    }

    fn resize(&mut self, volume: usize, bytes: u64, sign: i64) {
        let owner = &mut self.space.volumes[volume];
        let segment_bytes = owner.layout.segment_bytes;
        // What was asked before is part of what the disk lacks now.
        let segments = if sign > 0 { bytes.div_ceil(segment_bytes) } else { bytes / segment_bytes } as i64;
        let most = if sign > 0 {
            owner.usable.saturating_sub(KEPT_SEGMENTS)
        } else {
            owner.layout.segments as usize - owner.usable
        };
        owner.to_withdraw = sign * segments.min(most as i64);
    }

    /// A segment to be given away or taken back. Chunks are evicted on the way, if that is needed.
    pub fn next_withdrawal(&mut self, volume: usize) -> Option<Withdrawal> {
        let wish = self.space.volumes[volume].to_withdraw;
        let restore = wish < 0;
        let number = match wish {
            0 => return None,
            1.. => self.free_segment(volume)?,
            _ => self.withdrawn_segment(volume)?,
        };
        let owner = &mut self.space.volumes[volume];
        owner.to_withdraw -= wish.signum();
        let segment = owner.local(number);
        if !restore {
            owner.usable -= 1;
            owner.pending.push(Record::Withdrawn { segment });
            self.space.begin_giving();
        }
        self.space.segments[number].state = State::Withdrawn;
        let layout = self.space.volumes[volume].layout;
        Some(Withdrawal {
            volume,
            offset: layout.segment_at(segment),
            bytes: layout.segment_bytes,
            restore,
            segment: number,
        })
    }

    /// A segment was given away or taken back, or could not be.
    pub fn end_withdrawal(&mut self, withdrawal: Withdrawal, done: bool) {
        let Withdrawal { volume, restore, segment: number, .. } = withdrawal;
        let owner = &mut self.space.volumes[volume];
        let local = owner.local(number);
        // What could not be given away is still ours; what could not be taken back stays away.
        if done == restore {
            owner.usable += 1;
            owner.free.push_back(number);
            owner.pending.push(Record::Restored { segment: local });
            self.space.segments[number].state = State::Free;
        }
        self.space.segments[number].clean |= done && !restore;
        if !restore {
            self.space.end_giving(number, done);
        }
    }

    fn free_segment(&mut self, volume: usize) -> Option<usize> {
        if let Some(number) = self.space.volumes[volume].free.pop_front() {
            return Some(number);
        }
        // The limit on live bytes follows the number of segments, so that eviction and reclaim free
        // others.
        let segment_bytes = self.space.volumes[volume].layout.segment_bytes;
        let limit_bytes = self.space.live_limit_bytes().saturating_sub(segment_bytes);
        while self.space.live_bytes > limit_bytes && self.evict_coldest() {}
        None
    }

    fn withdrawn_segment(&self, volume: usize) -> Option<usize> {
        let mut own = self.space.volumes[volume].segments();
        own.find(|number| self.space.segments[*number].state == State::Withdrawn)
    }
}
