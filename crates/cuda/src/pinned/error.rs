//! Why memory cannot be pinned.

use super::space::Full;
use crate::driver::CudaError;
use crate::topology::MemoryFacts;
use rustix::io::Errno;
use thiserror::Error;

/// Why there is no pinned memory.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum PinError {
    #[error(transparent)]
    Full(#[from] Full),
    #[error("{bytes} bytes in one piece: allowed are {most_bytes}, which is what one registration spans")]
    TooLong {
        bytes: u64,
        /// What one registration spans.
        most_bytes: u64,
    },
    #[error("{bytes} bytes of host memory: {step}: {error}; {host}")]
    Map { bytes: u64, step: &'static str, error: Errno, host: Box<MemoryFacts> },
    #[error("pinning {bytes} bytes: {error}; {host}")]
    Pin { bytes: u64, error: CudaError, host: Box<MemoryFacts> },
}
