//! What can go wrong, in words.

use crate::capabilities::RAILS_MAX;
use crate::descriptors::BadRun;
use crate::metadata::{BadMetadata, NAME_BYTES_MAX};
use crate::notifications::NOTIFICATION_BYTES_MAX;
use crate::prepared::BadBlocks;
use crate::tcp::{Broken, CallError, ExportError, NoLease, TOKEN_BYTES_MAX, UnreachableReason};
use crate::transports::NoSuchTransport;
use forebay_transfer::mapped::Absent;
use forebay_transfer::{Closed, Forked, PathError, Place, Reason, Refused};
use std::net::SocketAddr;
use std::ops::Range;
use thiserror::Error;

/// Why something that was asked of a peer did not come about.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum PeerError {
    #[error("peer {peer} cannot be reached: {why}")]
    Unreachable { peer: String, why: String },
    /// The peer has ended and another instance is in its place, or its new metadata came. What was
    /// known of its memory is void.
    #[error("peer {peer} has restarted: its new metadata are needed")]
    Restarted { peer: String },
    #[error("peer {peer} was removed")]
    Removed { peer: String },
    #[error("peer {peer} was lost: {why}")]
    Lost { peer: String, why: Broken },
    #[error("not done within {limit_us} us")]
    Late { limit_us: u64 },
    #[error("{0}")]
    Unmoved(Reason),
    #[error("nothing more is taken in: {0}")]
    Full(String),
    #[error("the bytes are in place, but peer {peer} was not notified: {why}")]
    NotNotified { peer: String, why: Box<PeerError> },
    #[error("peer {peer}: {why}")]
    Unanswered { peer: String, why: CallError },
    #[error("this agent has ended")]
    Ended,
}

impl PeerError {
    /// A short name of the kind, for counters.
    pub fn kind(&self) -> &'static str {
        match self {
            PeerError::Unreachable { .. } => "unreachable",
            PeerError::Restarted { .. } => "restarted",
            PeerError::Removed { .. } => "removed",
            PeerError::Lost { why: Broken::Frozen { .. }, .. } => "frozen",
            PeerError::Lost { .. } => "lost",
            PeerError::Late { .. } => "late",
            PeerError::Unmoved(Reason::Corrupt { .. }) => "corrupt",
            PeerError::Unmoved(_) => "unmoved",
            PeerError::Full(_) => "full",
            PeerError::NotNotified { .. } => "not_notified",
            PeerError::Unanswered { .. } => "unanswered",
            PeerError::Ended => "ended",
        }
    }
}

/// Why a peer is not reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unreachable {
    /// As one of a few.
    pub reason: UnreachableReason,
    /// In words, with the address.
    pub why: String,
}

/// Why an agent did not do what it was told.
#[derive(Debug, Error)]
pub enum AgentError {
    #[error("name: {bytes} bytes given; 1 to {NAME_BYTES_MAX} are allowed")]
    Name { bytes: usize },
    /// It may be tried again.
    #[error(
        "memory at {base:#x}: GPUs of {peers} peers may still copy to or from it; it must stay allocated until it \
         can be deregistered"
    )]
    Reached { base: u64, peers: usize },
    #[error("token: {bytes} bytes given; at most {TOKEN_BYTES_MAX} are allowed")]
    Token { bytes: usize },
    #[error("rails: {rails} given; at most {RAILS_MAX} are allowed")]
    Rails { rails: usize },
    #[error(transparent)]
    Transport(#[from] NoSuchTransport),
    #[error("listen: {listen} is no address that peers can connect to; set advertise")]
    Unspecified { listen: SocketAddr },
    #[error("{what}: {source}")]
    System { what: &'static str, source: std::io::Error },
    #[error("memory at {given:#x?} overlaps what is registered at {registered:#x?}")]
    Overlap { given: Range<u64>, registered: Range<u64> },
    #[error("device: {place:?} is not a place of this agent; add it first")]
    NoSuchDevice { place: Place },
    #[error("there is no staging for memory of GPUs: {0}")]
    Staging(String),
    #[error("it cannot be registered: {0}")]
    Absent(#[from] Absent),
    #[error(transparent)]
    Export(#[from] ExportError),
    #[error("the memory is in use: {0}")]
    InUse(#[from] Refused),
    #[error("no memory is registered under key {key}")]
    NotRegistered { key: u64 },
    #[error(transparent)]
    Metadata(#[from] BadMetadata),
    #[error("no peer is called {peer}")]
    NoSuchPeer { peer: String },
    #[error(transparent)]
    Run(#[from] BadRun),
    #[error(transparent)]
    Blocks(#[from] BadBlocks),
    #[error("a request needs one list of this end's memory and one of a peer's, in this order")]
    Sides,
    #[error(transparent)]
    Lease(#[from] NoLease),
    #[error("a notification of {bytes} bytes; allowed: {NOTIFICATION_BYTES_MAX}")]
    TooLong { bytes: usize },
    #[error("the request is under way; it can be posted again after its end")]
    UnderWay,
    #[error(transparent)]
    Peer(#[from] PeerError),
    #[error(transparent)]
    Forked(#[from] Forked),
    #[error(transparent)]
    Mover(#[from] Closed),
    #[error(transparent)]
    Route(#[from] PathError),
}
