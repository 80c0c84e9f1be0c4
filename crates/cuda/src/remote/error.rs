//! Why something did not work with the node.

use crate::driver::CudaError;
use forebay_transfer::listen::NotWatched;
use forebay_transfer::{Closed, PathError};
use std::io;
use thiserror::Error;

/// Why an engine did not attach, or is not attached any more.
#[derive(Debug, Error)]
pub enum NotAttached {
    #[error("the node refuses: {0}")]
    Refused(String),
    #[error("the node's answer cannot be used: {0}")]
    Nonsense(String),
    #[error("none of the node's relays is another GPU that this one reaches, with staging as it was before")]
    NoRelays,
    #[error(
        "this GPU is an instance of a partitioned one (MIG), {name}, which reaches no other GPU's memory"
    )]
    Part { name: String },
    #[error("the node: {0}")]
    Io(#[from] io::Error),
    #[error("the node's process cannot be watched: {0}")]
    Unwatched(#[from] NotWatched),
    #[error(transparent)]
    Cuda(#[from] CudaError),
    #[error(transparent)]
    Closed(#[from] Closed),
    #[error(transparent)]
    Route(#[from] PathError),
}
