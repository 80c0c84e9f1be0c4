//! Why something did not work with the node.

use crate::driver::CudaError;
use forebay_transfer::listen::NotWatched;
use forebay_transfer::{Closed, PathError};
use std::io;
use thiserror::Error;

/// Why an engine did not attach, or is not attached any more.
#[derive(Debug, Error)]
pub enum NotAttached {
    /// The node will not.
    #[error("the node refuses: {0}")]
    Refused(String),
    /// What the node says makes no sense.
    #[error("the node's answer cannot be used: {0}")]
    Nonsense(String),
    /// Nothing to gain, or staging of other sizes than before.
    #[error("none of the node's relays is another GPU that this one reaches, with staging as it was before")]
    NoRelays,
    /// There is no node, or no talking to it.
    #[error("the node: {0}")]
    Io(#[from] io::Error),
    /// It would not be seen when the node ends.
    #[error("the node's process cannot be watched: {0}")]
    Unwatched(#[from] NotWatched),
    /// The driver.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// The copier's mover has ended.
    #[error(transparent)]
    Closed(#[from] Closed),
    /// A path does not fit together.
    #[error(transparent)]
    Route(#[from] PathError),
}
