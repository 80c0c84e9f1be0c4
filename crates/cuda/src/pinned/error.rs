//! Why memory cannot be pinned.

use super::space::Full;
use crate::driver::CudaError;
use crate::topology::MemoryFacts;
use rustix::io::Errno;
use thiserror::Error;

/// Why there is no pinned memory.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum PinError {
    /// The pool's limit.
    #[error(transparent)]
    Full(#[from] Full),
    /// More than one registration may span.
    #[error("{bytes} bytes in one piece: allowed are {most_bytes}, which is what one registration spans")]
    TooLong {
        bytes: u64,
        /// What one registration spans.
        most_bytes: u64,
    },
    /// The system gives no memory.
    #[error("{bytes} bytes of host memory: {step}: {error}; {host}")]
    Map {
        /// The length.
        bytes: u64,
        /// What failed.
        step: &'static str,
        /// What the system said.
        error: Errno,
        host: Box<MemoryFacts>,
    },
    /// The driver does not pin it.
    #[error("pinning {bytes} bytes: {error}; {host}")]
    Pin {
        /// The length.
        bytes: u64,
        /// What the driver said.
        error: CudaError,
        host: Box<MemoryFacts>,
    },
}
