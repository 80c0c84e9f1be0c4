//! Why a connection ended, in words.

use super::bad_frame::BadFrame;
use super::greeting::Refusal;
use thiserror::Error;

/// Why a connection ended.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Broken {
    #[error("the peer closed the connection")]
    Closed,
    #[error("the connection failed: {0}")]
    System(String),
    #[error("TLS: {0}")]
    Tls(String),
    #[error("the peer sent {0}")]
    Bad(#[from] BadFrame),
    #[error("the peer refused the connection: {0}")]
    Refused(Refusal),
    #[error("the peer was refused: {0}")]
    Turned(Refusal),
    #[error("the peer is frozen: no byte moved for {limit_us} us")]
    Frozen { limit_us: u64 },
    #[error("the flow was closed")]
    Ended,
}
