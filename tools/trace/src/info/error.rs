//! Why a trace has no figures, and how large one may be.

use crate::format::TraceError;

/// The most requests that are surveyed.
pub const MAX_REQUESTS: usize = 1 << 25;
/// The most distinct blocks that are surveyed, at some 20 bytes each.
pub const MAX_DISTINCT_BLOCKS: usize = 1 << 26;

/// Why a trace has no figures.
#[derive(Debug, thiserror::Error)]
pub enum InfoError {
    /// It could not be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// It has no request that could be read.
    #[error("no requests: {skipped_lines} bad lines and nothing else")]
    Empty {
        /// How many lines were bad.
        skipped_lines: u64,
    },
    /// It is larger than memory is meant to hold.
    #[error("more than {limit} {what}: sample the trace first")]
    TooLarge {
        /// What there is too much of.
        what: &'static str,
        /// How much is allowed.
        limit: usize,
    },
}
