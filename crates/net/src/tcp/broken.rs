//! Why a connection ended, in words.

use super::bad_frame::BadFrame;
use super::greeting::Refusal;
use thiserror::Error;

/// Why a connection ended.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Broken {
    /// The peer closed it, or died.
    #[error("the peer closed the connection")]
    Closed,
    /// The system says so.
    #[error("the connection failed: {0}")]
    System(String),
    /// There is no trust between the two ends, or what came was tampered with.
    #[error("TLS: {0}")]
    Tls(String),
    /// The peer sent what it may not send.
    #[error("the peer sent {0}")]
    Bad(#[from] BadFrame),
    /// The peer refused this end.
    #[error("the peer refused the connection: {0}")]
    Refused(Refusal),
    /// This end refused the peer.
    #[error("the peer was refused: {0}")]
    Turned(Refusal),
    /// Nothing moved although something was due.
    #[error("the peer is frozen: no byte moved for {limit_us} us")]
    Frozen { limit_us: u64 },
    /// This end closed it.
    #[error("the flow was closed")]
    Ended,
}
