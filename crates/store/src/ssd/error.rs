//! Why the SSD tier did not do what was asked of it. This file names reasons.

use super::crypt::EncryptionError;
use super::inner::{VOLUMES_MAX, WRITES_MAX};
use super::pool::NotStaged;
use crate::disk::DiskError;
use crate::log::{Fault, LayoutError, NotOpened};
use crate::shape::ShapeError;
use crate::stat::{Refused, Unreadable};
use forebay_transfer::{ArenaError, Closed, PathError, Span};
use std::ops::Range;
use std::path::PathBuf;
use thiserror::Error;

/// Why there is no SSD tier, or why it cannot promise anything.
#[derive(Debug, Error)]
pub enum SsdError {
    #[error(transparent)]
    Disk(#[from] DiskError),
    #[error(
        "{}: another process, or another part of this one, has this log{}: stop it first, or give each its own log",
        path.display(), process.map(|process| format!(" (process {process})")).unwrap_or_default()
    )]
    SecondOwner {
        path: PathBuf,
        /// The process, where the system says it.
        process: Option<u32>,
    },
    /// There is something at the place of a new log.
    #[error("{}: exists already: open it, or say that what it holds may be destroyed", path.display())]
    Exists { path: PathBuf },
    #[error(
        "{}: is a link to {}, which is not there: mount its disk, or remove the link",
        path.display(), target.display()
    )]
    DanglingLink { path: PathBuf, target: PathBuf },
    /// The partition is too small for the new log.
    #[error("{}: {bytes} bytes were asked for, the partition has {have_bytes}", path.display())]
    TooSmall { path: PathBuf, bytes: u64, have_bytes: u64 },
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// What is there is no log that this program can open.
    #[error("{}: {error}", path.display())]
    Log { path: PathBuf, error: Box<NotOpened> },
    #[error("staging: {0}")]
    Staging(#[from] ArenaError),
    #[error(transparent)]
    Mover(#[from] Closed),
    #[error(transparent)]
    Route(#[from] PathError),
    #[error("{volumes} volumes, allowed are 1 to {}", VOLUMES_MAX)]
    Volumes { volumes: usize },
    #[error("{doing}: {source}")]
    System { doing: &'static str, source: std::io::Error },
    /// A commit failed: what was written since the last one may not survive a crash. It is tried
    /// again.
    #[error("volume {volume}: changes cannot be made durable: {error}")]
    Commit { volume: usize, error: String },
    #[error("the store is closed")]
    Closed,
}

/// Why nothing was read. To the caller it is a miss.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum NotRead {
    /// The lease does not give access to a chunk.
    #[error(transparent)]
    Unreadable(#[from] Unreadable),
    #[error("layers {layers:?} of chunk {chunk} of the lease, which has {chunk_layers} layers")]
    Layers {
        /// The chunk's place in the lease.
        chunk: usize,
        layers: Range<usize>,
        chunk_layers: usize,
    },
    #[error(transparent)]
    Staging(#[from] NotStaged),
    #[error("the read failed: {reason}")]
    Failed {
        reason: String,
        /// Spans of the reader's own memory that a lost operation may still write.
        quarantined: Vec<Span>,
    },
    /// What arrived is not what was written. The chunk was dropped and the fault counted.
    #[error("want {want}: {fault}")]
    Corrupt {
        /// The first want for which it is so.
        want: usize,
        fault: Fault,
    },
    /// What arrived was encrypted with a key that is not here.
    #[error("want {want}: {error}")]
    Encrypted {
        /// The first want for which it is so.
        want: usize,
        error: EncryptionError,
    },
    #[error("the mover takes nothing in")]
    MoverEnded,
    #[error("the store is closed")]
    Closed,
}

impl NotRead {
    /// Spans of the reader's memory that are nobody's until the mover says that they are quiet.
    pub(crate) fn quarantined(&self) -> &[Span] {
        match self {
            NotRead::Failed { quarantined, .. } => quarantined,
            _ => &[],
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum NotWritten {
    #[error(transparent)]
    Shape(#[from] ShapeError),
    #[error(transparent)]
    Refused(#[from] Refused),
    #[error("{given} checksums for {layers} layers")]
    Checksums { given: usize, layers: usize },
    /// A source is not memory of this host that the mover knows.
    #[error("{0:?} is no registered host memory")]
    NotHost(Span),
    /// As many writes are under way as may be.
    #[error("{} chunks are being written; no more may be", WRITES_MAX)]
    TooMany,
    /// Commits of the volume fail: nothing more is written to it until one succeeds.
    #[error("volume {volume} cannot make anything durable; it is read only until it can")]
    ReadOnly { volume: usize },
    #[error(transparent)]
    Staging(#[from] NotStaged),
    #[error(transparent)]
    NotEncrypted(#[from] EncryptionError),
    #[error("the write failed: {0}")]
    Failed(String),
    #[error("the mover takes nothing in")]
    MoverEnded,
    #[error("the store is closed")]
    Closed,
}
