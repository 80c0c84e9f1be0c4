//! Counters of a disk link. This file counts.

use super::kernel::Action;
use super::progress::{FaultKind, Next};

/// What a disk link has done since it was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DiskStats {
    /// Bytes of reads that succeeded.
    pub read_bytes: u64,
    /// Bytes of writes that succeeded.
    pub written_bytes: u64,
    /// Requests made of the system that moved something: the I/Os.
    pub ios: u64,
    /// Of these, I/Os that moved less than asked for and were continued.
    pub short: u64,
    /// Requests that were interrupted or deferred, and made again.
    pub again: u64,
    /// I/Os that failed because the file ended.
    pub truncated: u64,
    /// I/Os that failed because the disk was full.
    pub no_space: u64,
    /// I/Os that failed in the device.
    pub device: u64,
    /// I/Os that failed for another reason.
    pub other: u64,
    /// Waits that failed; the link goes on, but operations under way may overrun their limits.
    pub failed_waits: u64,
}

impl DiskStats {
    /// I/Os that failed, whatever the reason.
    pub fn faults(&self) -> u64 {
        self.truncated + self.no_space + self.device + self.other
    }

    pub(crate) fn moved(&mut self, action: Action, bytes: u64) {
        match action {
            Action::Read => self.read_bytes += bytes,
            Action::Write => self.written_bytes += bytes,
        }
    }

    pub(crate) fn count(&mut self, next: &Next) {
        match next {
            Next::Done => self.ios += 1,
            Next::Continue { .. } => {
                self.ios += 1;
                self.short += 1;
            }
            Next::Again => self.again += 1,
            Next::Fail(FaultKind::Truncated { .. }) => self.truncated += 1,
            Next::Fail(FaultKind::NoSpace { .. }) => self.no_space += 1,
            Next::Fail(FaultKind::Device { .. }) => self.device += 1,
            Next::Fail(_) => self.other += 1,
        }
    }
}
