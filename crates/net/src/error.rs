//! What can go wrong, in words.

use crate::capabilities::RAILS_MAX;
use crate::descriptors::BadRun;
use crate::leases::NoLease;
use crate::metadata::{BadMetadata, NAME_BYTES_MAX};
use crate::notifications::NOTIFICATION_BYTES_MAX;
use crate::prepared::BadBlocks;
use crate::tcp::{Broken, CallError, ExportError, TOKEN_BYTES_MAX, Unreached};
use crate::transports::NoSuchTransport;
use forebay_transfer::mapped::Absent;
use forebay_transfer::{Closed, Forked, PathError, Reason, Refused};
use std::net::SocketAddr;
use std::ops::Range;
use thiserror::Error;

/// Why something that was asked of a peer did not come about.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum PeerError {
    /// No connection came about in time, or the peer turned this end away.
    #[error("peer {peer} cannot be reached: {why}")]
    Unreachable { peer: String, why: String },
    /// The peer has ended and another instance is in its place, or its new metadata came. What was known of its memory
    /// is void.
    #[error("peer {peer} has restarted: its new metadata are needed")]
    Restarted { peer: String },
    /// The peer was removed here.
    #[error("peer {peer} was removed")]
    Removed { peer: String },
    /// The connection ended, because the peer died or froze.
    #[error("peer {peer} was lost: {why}")]
    Lost {
        peer: String,
        /// How the connection ended.
        why: Broken,
    },
    /// The caller's limit has passed.
    #[error("not done within {limit_us} us")]
    Late { limit_us: u64 },
    /// The mover could not move the bytes, or the peer refused to have them moved.
    #[error("{0}")]
    Unmoved(Reason),
    /// The mover takes nothing in.
    #[error("nothing more is taken in: {0}")]
    Full(String),
    /// All bytes are in place, but the peer is not known to have taken the notification in.
    #[error("the bytes are in place, but peer {peer} was not notified: {why}")]
    NotNotified { peer: String, why: Box<PeerError> },
    /// The peer did not answer a call, or declined.
    #[error("peer {peer}: {why}")]
    Unanswered { peer: String, why: CallError },
    /// This agent has ended.
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
pub struct NotReached {
    /// As one of a few.
    pub reason: Unreached,
    /// In words, with the address.
    pub why: String,
}

/// Why an agent did not do what it was told.
#[derive(Debug, Error)]
pub enum AgentError {
    /// An agent's or a peer's name cannot be one.
    #[error("name: {bytes} bytes given; 1 to {NAME_BYTES_MAX} are allowed")]
    Name { bytes: usize },
    /// A token is longer than one that peers are shown may be.
    #[error("token: {bytes} bytes given; at most {TOKEN_BYTES_MAX} are allowed")]
    Token { bytes: usize },
    /// More rails than an agent may have.
    #[error("rails: {rails} given; at most {RAILS_MAX} are allowed")]
    Rails {
        /// How many were given.
        rails: usize,
    },
    /// A rail's transport that is none.
    #[error(transparent)]
    Transport(#[from] NoSuchTransport),
    /// Peers could not be told where to connect.
    #[error("listen: {listen} is no address that peers can connect to; set advertise")]
    Unspecified { listen: SocketAddr },
    /// The system lacks something, or the address is in use.
    #[error("{what}: {source}")]
    System { what: &'static str, source: std::io::Error },
    /// Memory that is registered already, in part or in full.
    #[error("memory at {given:#x?} overlaps what is registered at {registered:#x?}")]
    Overlap {
        /// Addresses given.
        given: Range<u64>,
        /// Addresses registered before.
        registered: Range<u64>,
    },
    /// Memory that is not there, or may not be written although peers may.
    #[error("it cannot be registered: {0}")]
    Absent(#[from] Absent),
    /// The memory could not be offered.
    #[error(transparent)]
    Export(#[from] ExportError),
    /// A transfer that this agent does not know of uses the memory.
    #[error("the memory is in use: {0}")]
    InUse(#[from] Refused),
    /// No such registration, or no longer.
    #[error("no memory is registered under key {key}")]
    NotRegistered { key: u64 },
    /// Metadata that are not.
    #[error(transparent)]
    Metadata(#[from] BadMetadata),
    /// No peer has this name.
    #[error("no peer is called {peer}")]
    NoSuchPeer { peer: String },
    /// A list of memory that cannot be one.
    #[error(transparent)]
    Run(#[from] BadRun),
    /// Lists of memory that do not fit to what is registered, or to each other.
    #[error(transparent)]
    Blocks(#[from] BadBlocks),
    /// A list that was made ready for this end where one for a peer is needed, or the other way round.
    #[error("a request needs one list of this end's memory and one of a peer's, in this order")]
    Sides,
    /// A lease that cannot be granted.
    #[error(transparent)]
    Lease(#[from] NoLease),
    /// A notification that is too long.
    #[error("a notification of {bytes} bytes; allowed: {NOTIFICATION_BYTES_MAX}")]
    TooLong { bytes: usize },
    /// The request is under way.
    #[error("the request is under way; it can be posted again after its end")]
    UnderWay,
    /// The peer cannot be used.
    #[error(transparent)]
    Peer(#[from] PeerError),
    /// The agent is another process's.
    #[error(transparent)]
    Forked(#[from] Forked),
    /// The mover has ended.
    #[error(transparent)]
    Mover(#[from] Closed),
    /// The mover does not take a route.
    #[error(transparent)]
    Route(#[from] PathError),
}
