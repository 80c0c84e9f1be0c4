//! What the SSD tier says about itself. This file counts.

use super::pool::StagingUse;
use crate::disk::DiskStats;
use crate::log::DiskStat;

/// A snapshot of the SSD tier. Counts are since it was opened.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SsdStat {
    /// Chunks, space, refusals and faults.
    pub tier: DiskStat,
    /// Requests to read that ended with verified bytes.
    pub reads: u64,
    /// Chunks, or runs of their layers, in them.
    pub read_wants: u64,
    /// Bytes of the layers in them.
    pub read_bytes: u64,
    /// Chunks that were read to where they were wanted, without a copy in staging.
    pub direct_reads: u64,
    pub writes: u64,
    pub written_bytes: u64,
    /// Of the writes, those that went to disk from where they lay, without a copy in staging.
    pub direct_writes: u64,
    /// Wants whose bytes or footers were not the ones that were written.
    pub corrupt: u64,
    /// Reads, writes and relocations that the disk failed.
    pub io_faults: u64,
    /// Stretches that could not be overwritten, withdrawn or restored; they are tried again.
    pub failed_chores: u64,
    pub staging: StagingUse,
    pub volumes: Vec<VolumeStat>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct VolumeStat {
    pub commits: u64,
    pub failed_commits: u64,
    pub last_commit_us: u64,
    /// Whether nothing is written because commits fail.
    pub read_only: bool,
    /// Bytes of the disk that the volume holds.
    pub physical_bytes: u64,
    pub link: DiskStats,
}

impl SsdStat {
    pub fn physical_bytes(&self) -> u64 {
        self.volumes.iter().map(|volume| volume.physical_bytes).sum()
    }
}
