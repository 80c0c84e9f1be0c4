//! What a log needs of a disk besides the chunks themselves: exact, blocking I/O on pages, for
//! superblocks, journal, checkpoints, headers and summaries. This file knows the wish.

use std::io;

/// One volume: a preallocated file or a raw partition.
///
/// Offsets and lengths are multiples of [`PAGE_BYTES`](super::PAGE_BYTES). An operation moves all
/// bytes or fails; a short result of the system is the implementation's to continue.
pub trait Medium: Send + Sync {
    fn bytes(&self) -> u64;

    /// Fills `buffer` from `offset` on.
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()>;

    /// Writes all of `bytes` from `offset` on.
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;

    /// Makes durable what was written, by this medium or by others to the same volume, before the
    /// call.
    fn sync(&self) -> io::Result<()>;

    /// Gives a stretch's space back to the file system. It reads as zeros from now on.
    fn withdraw(&self, offset: u64, bytes: u64) -> io::Result<()>;

    /// Sets space aside for a stretch that was withdrawn.
    fn restore(&self, offset: u64, bytes: u64) -> io::Result<()>;

    /// What the volume takes of its disk and what is left there.
    fn space(&self) -> io::Result<VolumeSpace> {
        Ok(VolumeSpace { held_bytes: self.bytes(), free_bytes: None })
    }
}

/// What a volume takes of its disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VolumeSpace {
    /// Bytes of the disk that the volume holds.
    pub held_bytes: u64,
    /// Bytes that others, and this volume, may still take; unknown where there is no file system.
    pub free_bytes: Option<u64>,
}
