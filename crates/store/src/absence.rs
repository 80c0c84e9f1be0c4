//! Why chunks are not in a tier: which left it, and which it did not take in, with the time. A ring
//! of fixed size; what gives way to newer entries is counted. This file knows ids and reasons.

use crate::admission::Verdict;
use crate::stat::Refused;
use forebay_kv::ChunkId;
use serde::{Deserialize, Serialize};
use std::collections::{HashMap, VecDeque};

/// Chunks that each log remembers, 16 bytes for each.
pub(crate) const REMEMBERED: usize = 1 << 18;

/// Why a chunk is not in a tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Absence {
    /// It gave way to others.
    Evicted,
    /// It gave way to others of its tenant, whose quota was used up.
    EvictedForQuota,
    Deleted,
    /// Somebody sent it to the tier below.
    Demoted,
    /// Its bytes did not match their checksums.
    Corrupt,
    /// Its write failed, or its writer gave it up or died.
    NotWritten,
    /// The chunk before it was not there, so nobody could have found it.
    ParentMissing,
    /// Its id, or the parent's, is another tenant's.
    OtherTenant,
    /// No chunk of its shape can be taken in.
    TooLarge,
    /// There was no room, and nothing could be evicted.
    Full,
    /// The tenant's quota was used up, and nothing of it could be evicted.
    QuotaFull,
    /// It was used once only.
    UsedOnce,
    /// The SSD's endurance budget was used up.
    OverBudget,
    /// Too many chunks waited to be written.
    QueueFull,
    /// It had waited to be written for too long.
    TooOld,
    /// It had left memory before it was written.
    GoneBefore,
    /// The SSD tier did not take it in.
    NotTaken,
}

/// A reason, and when it came about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Noted {
    pub why: Absence,
    /// Seconds of the store's clock.
    pub at_s: u32,
}

/// The last reasons.
#[derive(Debug)]
pub(crate) struct AbsenceLog {
    ring: VecDeque<(u64, Noted)>,
    limit: usize,
    forgotten: u64,
}

/// What a log holds, by chunk.
#[derive(Debug, Clone, Default)]
pub struct Absences {
    newest: HashMap<u64, Noted>,
    /// The time of the oldest entry, if older ones were forgotten.
    pub since_s: Option<u32>,
}

impl AbsenceLog {
    pub fn new(limit: usize) -> AbsenceLog {
        AbsenceLog { ring: VecDeque::new(), limit, forgotten: 0 }
    }

    pub fn note(&mut self, now_us: u64, id: &ChunkId, why: Absence) {
        if self.ring.len() >= self.limit {
            self.ring.pop_front();
            self.forgotten += 1;
        }
        let at_s = u32::try_from(now_us / 1_000_000).unwrap_or(u32::MAX);
        self.ring.push_back((fingerprint(id), Noted { why, at_s }));
    }

    pub fn forgotten(&self) -> u64 {
        self.forgotten
    }

    /// A copy of 4 MiB at most, so that whoever holds the log waits a millisecond and not for a
    /// search.
    pub fn copy(&self) -> AbsenceLog {
        AbsenceLog { ring: self.ring.clone(), ..*self }
    }

    pub fn by_chunk(self) -> Absences {
        let oldest = self.ring.front().map(|(_, noted)| noted.at_s);
        let since_s = oldest.filter(|_| self.forgotten > 0);
        Absences { newest: self.ring.into_iter().collect(), since_s }
    }
}

impl Absences {
    /// The newest reason.
    pub fn of(&self, id: &ChunkId) -> Option<Noted> {
        self.newest.get(&fingerprint(id)).copied()
    }
}

/// Ids are digests: one in 2^46 chunks is told what became of another.
fn fingerprint(id: &ChunkId) -> u64 {
    let mut first = [0; 8];
    first.copy_from_slice(&id.as_bytes()[..8]);
    u64::from_le_bytes(first)
}

impl From<&Refused> for Absence {
    fn from(refused: &Refused) -> Absence {
        match refused {
            Refused::ParentMissing => Absence::ParentMissing,
            Refused::OtherTenant { .. } => Absence::OtherTenant,
            Refused::TooLarge { .. } | Refused::Unfit { .. } => Absence::TooLarge,
            Refused::Quota { .. } => Absence::QuotaFull,
            Refused::Full { .. } | Refused::IndexFull { .. } | Refused::BeingWritten => Absence::Full,
        }
    }
}

impl Absence {
    /// Why admission leaves a chunk out.
    pub(crate) fn of_verdict(verdict: Verdict) -> Option<Absence> {
        match verdict {
            Verdict::Write => None,
            Verdict::UsedOnce => Some(Absence::UsedOnce),
            Verdict::OverBudget => Some(Absence::OverBudget),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(number: u8) -> ChunkId {
        ChunkId::from_bytes([number; 32])
    }

    #[test]
    fn the_newest_reason_of_a_chunk_is_told_and_what_gives_way_is_counted() {
        let mut log = AbsenceLog::new(3);
        log.note(1_500_000, &id(1), Absence::Full);
        log.note(2_000_000, &id(1), Absence::Evicted);
        log.note(2_000_000, &id(2), Absence::Corrupt);
        let all = log.copy().by_chunk();
        assert_eq!(all.of(&id(1)), Some(Noted { why: Absence::Evicted, at_s: 2 }));
        assert_eq!((all.of(&id(3)), all.since_s, log.forgotten()), (None, None, 0));
        for number in [3, 4] {
            log.note(7_000_000, &id(number), Absence::Deleted);
        }
        let all = log.copy().by_chunk();
        assert_eq!((all.of(&id(1)), all.of(&id(2)).is_some()), (None, true));
        assert_eq!((all.since_s, log.forgotten()), (Some(2), 2));
    }
}
