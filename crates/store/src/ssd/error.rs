//! Why the SSD tier did not do what was asked of it. This file names reasons.

use super::crypt::EncryptionError;
use super::pool::NotStaged;
use crate::disk::DiskError;
use crate::log::{Fault, LayoutError, NotOpened};
use crate::shape::ShapeError;
use crate::stat::{Refused, Unreadable};
use forebay_transfer::ArenaError;
use forebay_transfer::{Closed, PathError, Span};
use std::ops::Range;
use std::path::PathBuf;
use thiserror::Error;

/// Why there is no SSD tier, or why it cannot promise anything.
#[derive(Debug, Error)]
pub enum SsdError {
    /// The file or its disk cannot be used.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// Somebody else has the log.
    #[error(
        "{}: another process, or another part of this one, has this log{}: stop it first, or give each its own log",
        path.display(), process.map(|process| format!(" (process {process})")).unwrap_or_default()
    )]
    SecondOwner {
        /// The file.
        path: PathBuf,
        /// The process, where the system says it.
        process: Option<u32>,
    },
    /// There is something at the place of a new log.
    #[error("{}: exists already: open it, or say that what it holds may be destroyed", path.display())]
    Exists {
        /// The file.
        path: PathBuf,
    },
    /// The path is a link to nothing.
    #[error(
        "{}: is a link to {}, which is not there: mount its disk, or remove the link",
        path.display(), target.display()
    )]
    DanglingLink {
        /// The link.
        path: PathBuf,
        /// What it says.
        target: PathBuf,
    },
    /// The partition is too small for the new log.
    #[error("{}: {bytes} bytes were asked for, the partition has {have_bytes}", path.display())]
    TooSmall {
        /// The partition.
        path: PathBuf,
        bytes: u64,
        have_bytes: u64,
    },
    /// The file cannot be divided into segments.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// What is there is no log that this program can open.
    #[error("{}: {error}", path.display())]
    Log {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        error: Box<NotOpened>,
    },
    /// There is no memory for staging.
    #[error("staging: {0}")]
    Staging(#[from] ArenaError),
    /// The mover has ended.
    #[error(transparent)]
    Mover(#[from] Closed),
    /// The mover refused a route.
    #[error(transparent)]
    Route(#[from] PathError),
    /// No volumes, or more than there can be.
    #[error("{volumes} volumes, allowed are 1 to {}", super::VOLUMES_MAX)]
    Volumes { volumes: usize },
    /// The system refused something else.
    #[error("{doing}: {source}")]
    System {
        /// What was tried.
        doing: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
    /// A commit failed: what was written since the last one may not survive a crash. It is tried
    /// again.
    #[error("volume {volume}: changes cannot be made durable: {error}")]
    Commit {
        volume: usize,
        /// What failed.
        error: String,
    },
    /// The store was closed before.
    #[error("the store is closed")]
    Closed,
}

/// Why nothing was read. To the caller it is a miss.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum NotRead {
    /// The lease does not give access to a chunk.
    #[error(transparent)]
    Unreadable(#[from] Unreadable),
    /// A chunk has no such layers.
    #[error("layers {layers:?} of chunk {chunk} of the lease, which has {chunk_layers} layers")]
    Layers {
        /// The chunk's place in the lease.
        chunk: usize,
        layers: Range<usize>,
        chunk_layers: usize,
    },
    /// There was no staging for it.
    #[error(transparent)]
    Staging(#[from] NotStaged),
    /// The bytes did not arrive.
    #[error("the read failed: {reason}")]
    Failed {
        /// What the disk or the mover said.
        reason: String,
        /// Spans of the reader's own memory that a lost operation may still write.
        quarantined: Vec<Span>,
    },
    /// What arrived is not what was written. The chunk was dropped and the fault counted.
    #[error("want {want}: {fault}")]
    Corrupt {
        /// The first want for which it is so.
        want: usize,
        /// What is wrong.
        fault: Fault,
    },
    /// What arrived was encrypted with a key that is not here.
    #[error("want {want}: {error}")]
    Encrypted {
        /// The first want for which it is so.
        want: usize,
        /// What is wrong.
        error: EncryptionError,
    },
    /// The mover takes nothing in, or has ended.
    #[error("the mover takes nothing in")]
    MoverEnded,
    /// The store is closed.
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

/// Why a chunk is not written.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum NotWritten {
    /// The layers do not make a chunk.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// The tier does not take it in.
    #[error(transparent)]
    Refused(#[from] Refused),
    /// There is not one checksum per layer.
    #[error("{given} checksums for {layers} layers")]
    Checksums {
        /// Checksums given.
        given: usize,
        /// Layers of the chunk.
        layers: usize,
    },
    /// A source is not memory of this host that the mover knows.
    #[error("{0:?} is no registered host memory")]
    NotHost(Span),
    /// As many writes are under way as may be.
    #[error("{} chunks are being written; no more may be", super::WRITES_MAX)]
    TooMany,
    /// Commits of the volume fail: nothing more is written to it until one succeeds.
    #[error("volume {volume} cannot make anything durable; it is read only until it can")]
    ReadOnly { volume: usize },
    /// There was no staging for it.
    #[error(transparent)]
    Staging(#[from] NotStaged),
    /// The layers could not be encrypted.
    #[error(transparent)]
    NotEncrypted(#[from] EncryptionError),
    /// The bytes did not reach the disk.
    #[error("the write failed: {0}")]
    Failed(String),
    /// The mover takes nothing in, or has ended.
    #[error("the mover takes nothing in")]
    MoverEnded,
    /// The store is closed.
    #[error("the store is closed")]
    Closed,
}
