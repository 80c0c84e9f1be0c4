//! Why a cache was not opened, a job not begun, bytes not copied.

use crate::cache::BadValue;
use crate::page_tables::BadPages;
use crate::verify::BadVerify;
use forebay_client::ConnectError;
use forebay_transfer::{Forked, MAX_COPY_THREADS};
use thiserror::Error;

/// Why something was not copied. Pages or slot may hold anything.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("the copy failed: {0}")]
pub struct NotCopied(pub String);

/// Why there is no cache.
#[derive(Debug, Error)]
pub enum NotOpened {
    /// A node that is not there is no reason: it is looked for. One that does not want this client
    /// is.
    #[error(transparent)]
    Client(#[from] ConnectError),
    #[error(transparent)]
    Copies(#[from] NotCopied),
    #[error(transparent)]
    Verify(#[from] BadVerify),
    #[error("threads is {threads}; allowed: 1 to {MAX_COPY_THREADS}")]
    Threads { threads: usize },
    #[error("threads: {0}")]
    System(#[from] std::io::Error),
}

/// Why something was not begun. Nothing of it happened, and nothing of it ends.
#[derive(Debug, Error)]
pub enum NotBegun {
    #[error(transparent)]
    Pages(#[from] BadPages),
    #[error(transparent)]
    Value(#[from] BadValue),
    #[error(transparent)]
    Copies(#[from] NotCopied),
    #[error("the cache is closed")]
    Closed,
    #[error("direct hand-overs are off, or not possible: see the log")]
    NoDirect,
    #[error(transparent)]
    Forked(#[from] Forked),
}
