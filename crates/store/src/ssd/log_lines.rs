//! What the SSD tier writes to the process's log. Each line names the volume by its file; a line
//! that many events would repeat passes a [`LogGate`]. `docs/reference/logs.md` says what each line
//! means.

use crate::log::{ChunkCopy, Fault, Recovered};
use forebay_kv::ChunkId;
use forebay_transfer::LogGate;
use std::path::Path;

/// The lines, each with its gate.
#[derive(Debug, Default)]
pub(super) struct LogLines {
    read_failed: LogGate,
    write_failed: LogGate,
    relocation_failed: LogGate,
    corrupt: LogGate,
    commit_failed: LogGate,
    chore_failed: LogGate,
    short_of_space: LogGate,
}

impl LogLines {
    pub fn opened(&self, volume: &Path, recovered: &Recovered) {
        let Recovered { chunks, clean, salvaged, lost, left_out, .. } = *recovered;
        let volume = volume.display();
        tracing::info!(%volume, chunks, clean, salvaged, "SSD log opened");
        if lost > 0 {
            tracing::warn!(%volume, lost, "SSD log lost chunks in a crash");
        }
        if left_out > 0 {
            tracing::warn!(%volume, left_out, "SSD log has more chunks than the index holds");
        }
    }

    pub fn read_failed(&self, volume: &Path, reason: &str) {
        if let Some(repeated) = self.read_failed.pass() {
            tracing::warn!(volume = %volume.display(), reason, repeated, "SSD read failed");
        }
    }

    pub fn write_failed(&self, volume: &Path, reason: &str) {
        if let Some(repeated) = self.write_failed.pass() {
            tracing::warn!(volume = %volume.display(), reason, repeated, "SSD write failed");
        }
    }

    pub fn relocation_failed(&self, volume: &Path, reason: &str) {
        if let Some(repeated) = self.relocation_failed.pass() {
            tracing::warn!(volume = %volume.display(), reason, repeated, "SSD relocation failed");
        }
    }

    pub fn corrupt(&self, volume: &Path, copy: &ChunkCopy, fault: &Fault) {
        if let Some(repeated) = self.corrupt.pass() {
            let ChunkCopy { id, segment, slot, .. } = copy;
            let volume = volume.display();
            tracing::error!(%volume, chunk = ?id, segment, slot, %fault, repeated, "chunk on SSD is corrupt");
        }
    }

    /// Whoever used a chunk found it wrong.
    pub fn wrong_at_use(&self, id: &ChunkId) {
        if let Some(repeated) = self.corrupt.pass() {
            tracing::error!(chunk = ?id, repeated, "chunk on SSD was wrong where it was used");
        }
    }

    /// A commit failed; `read_only`: and so many before it that nothing more is written.
    pub fn commit_failed(&self, volume: &Path, error: &std::io::Error, read_only: bool) {
        let volume = volume.display();
        match self.commit_failed.pass() {
            _ if read_only => tracing::error!(%volume, %error, "SSD volume is read only"),
            Some(repeated) => tracing::warn!(%volume, %error, repeated, "SSD commit failed"),
            None => {}
        }
    }

    pub fn writable_again(&self, volume: &Path) {
        self.commit_failed.reset();
        tracing::info!(volume = %volume.display(), "SSD volume can be written again");
    }

    pub fn chore_failed(&self, volume: &Path, chore: &str, error: &std::io::Error) {
        if let Some(repeated) = self.chore_failed.pass() {
            tracing::warn!(volume = %volume.display(), chore, %error, repeated, "SSD space cannot be managed");
        }
    }

    pub fn short_of_space(&self, volume: &Path, free_bytes: u64, reserve_bytes: u64) {
        if let Some(repeated) = self.short_of_space.pass() {
            let volume = volume.display();
            tracing::warn!(%volume, free_bytes, reserve_bytes, repeated, "SSD file system is short of space");
        }
    }
}
