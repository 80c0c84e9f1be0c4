//! Where chunks are, and why they are not there, for people who ask why a prompt was no hit. This
//! file asks both tiers and write-back; looking keeps nothing and is no use.

use super::Store;
use crate::absence::{AbsenceLog, Absences};
use crate::tenant::TenantId;
use forebay_kv::ChunkId;

/// Where a chunk is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Whereabouts {
    pub in_memory: bool,
    pub on_disk: bool,
    /// Whose it is, if it is known here.
    pub owner: Option<TenantId>,
    /// Whether a chunk that is known here continues it.
    pub is_continued: bool,
}

/// Why chunks are not in a store.
#[derive(Debug, Clone, Default)]
pub struct WhyAbsent {
    pub from_memory: Absences,
    /// What left the disk. Empty without one.
    pub from_disk: Absences,
    /// What was not written to the disk.
    pub not_written: Absences,
}

impl Store {
    pub fn whereabouts(&self, id: &ChunkId) -> Whereabouts {
        let in_memory = self.shared.tier.lock().known(id);
        let on_disk = self.shared.open_disk().and_then(|disk| disk.ssd.known(id));
        let known = [in_memory, on_disk].into_iter().flatten();
        Whereabouts {
            in_memory: in_memory.is_some_and(|known| known.is_resident),
            on_disk: on_disk.is_some_and(|known| known.is_resident),
            owner: known.clone().next().map(|known| known.owner),
            is_continued: known.clone().any(|known| known.is_continued),
        }
    }

    /// Why chunks are not here, as far as it is remembered: of the last 262,144 in each tier.
    pub fn why_absent(&self) -> WhyAbsent {
        // A copy each, so that nobody who stores or loads waits while they are sorted.
        let memory = self.shared.tier.lock().absences.copy();
        let disk = self.shared.disk.as_ref();
        let by_chunk = |log: Option<AbsenceLog>| log.map(AbsenceLog::by_chunk).unwrap_or_default();
        WhyAbsent {
            from_memory: memory.by_chunk(),
            from_disk: by_chunk(disk.map(|disk| disk.ssd.absences())),
            not_written: by_chunk(disk.map(|disk| disk.write_back.absences())),
        }
    }
}
