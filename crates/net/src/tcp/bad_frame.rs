//! Why bytes are no frame, with the limits that the reasons name.

use super::runs::BadRuns;
use thiserror::Error;

/// The version of the protocol that this crate speaks.
pub const VERSION: u16 = 1;
/// Spans of an operation at most: as many as the mover puts into a lot.
pub const SPANS_MAX: u32 = 16_384;
/// Bytes of an operation at most.
pub const OP_BYTES_MAX: u64 = 64 << 20;

/// Why bytes are no frame, or none that may come now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum BadFrame {
    #[error("HTTP on a port of Forebay's own protocol")]
    Http,
    #[error("TLS on a port without TLS")]
    Tls,
    #[error("a header that starts with {start:02x?} has the wrong CRC")]
    Header {
        /// Its first bytes.
        start: [u8; 4],
    },
    #[error("a frame of version {version}; this end speaks {VERSION}")]
    Version { version: u16 },
    #[error("a frame of kind {kind} with flags {flags}; allowed: 1 to 16 without flags")]
    Kind { kind: u8, flags: u8 },
    /// Body or payload longer than frames of the kind may have.
    #[error(
        "a frame of kind {kind} with a body of {body} and a payload of {payload} bytes, which it may not have"
    )]
    TooLong {
        kind: u8,
        /// Bytes of the body.
        body: u32,
        /// Bytes of the payload.
        payload: u32,
    },
    #[error("a body of {bytes} bytes has the wrong CRC")]
    BodyCrc { bytes: u32 },
    #[error("a body with {what}")]
    Body { what: &'static str },
    #[error("spans: {0}")]
    Runs(BadRuns),
    #[error("an operation of {spans} spans; allowed: {SPANS_MAX}")]
    TooManySpans { spans: u64 },
    #[error("an operation of {bytes} bytes; allowed: {OP_BYTES_MAX}")]
    TooManyBytes { bytes: u64 },
    #[error("{what}, operation {operation}")]
    Unexpected { what: &'static str, operation: u64 },
}
