//! Why a connection does not come about, or ends: in words, and as one of a few reasons for labels
//! of metrics, with what to do about each.

use super::greeting::{Refusal, RefusalCode};
use super::runs::BadRuns;
use std::io::ErrorKind;
use std::net::SocketAddr;
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
    Header { start: [u8; 4] },
    #[error("a frame of version {version}; this end speaks {VERSION}")]
    Version { version: u16 },
    #[error("a frame of kind {kind} with flags {flags}; allowed: 1 to 16 without flags")]
    Kind { kind: u8, flags: u8 },
    /// Body or payload longer than frames of the kind may have.
    #[error(
        "a frame of kind {kind} with a body of {body} and a payload of {payload} bytes, which it may not have"
    )]
    TooLong { kind: u8, body: u32, payload: u32 },
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

impl Broken {
    /// The peer sent what may not come now.
    pub(super) fn unexpected(what: &'static str, operation: u64) -> Broken {
        Broken::Bad(BadFrame::Unexpected { what, operation })
    }

    /// The peer is refused.
    pub(super) fn turned(code: RefusalCode, text: impl Into<String>) -> Broken {
        Broken::Turned(Refusal { code, text: text.into() })
    }
}

impl From<std::io::Error> for Broken {
    fn from(error: std::io::Error) -> Broken {
        Broken::System(error.to_string())
    }
}

/// Why there is no flow.
#[derive(Debug, Error)]
pub enum FlowError {
    #[error("{address} is beyond loopback: give TLS, or allow plain_beyond_loopback")]
    Plain { address: SocketAddr },
    #[error("{address}: {source}")]
    Connect { address: SocketAddr, source: std::io::Error },
    #[error("a flow could not be set up: {0}")]
    System(#[from] std::io::Error),
    #[error("{address}: {broken}")]
    Greeting { address: SocketAddr, broken: Broken },
}

/// Why a peer is not reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum UnreachableReason {
    Refused,
    /// No answer came in time.
    TimedOut,
    /// The network has no way there.
    NoRoute,
    Token,
    /// A certificate has expired, is of another authority, or speaks for another node.
    Certificate,
    /// One end speaks TLS and the other one plain text, or plain text was not asked for.
    Encryption,
    /// The two ends speak other versions of the protocol.
    Version,
    /// What answers is no Forebay.
    NotForebay,
    /// It has as many connections as it may.
    Full,
    /// It is about to end, or another instance has taken its place.
    Ended,
    /// The connection ended without a word.
    Closed,
    /// This machine lacks something: descriptors, threads, memory.
    System,
}

impl UnreachableReason {
    pub const ALL: [UnreachableReason; 12] = [
        UnreachableReason::Refused,
        UnreachableReason::TimedOut,
        UnreachableReason::NoRoute,
        UnreachableReason::Token,
        UnreachableReason::Certificate,
        UnreachableReason::Encryption,
        UnreachableReason::Version,
        UnreachableReason::NotForebay,
        UnreachableReason::Full,
        UnreachableReason::Ended,
        UnreachableReason::Closed,
        UnreachableReason::System,
    ];

    /// A word for labels.
    pub fn label(self) -> &'static str {
        self.label_and_advice().0
    }

    /// What to do about it.
    pub fn advice(self) -> &'static str {
        self.label_and_advice().1
    }

    fn label_and_advice(self) -> (&'static str, &'static str) {
        match self {
            UnreachableReason::Refused => {
                ("refused", "nobody listens there: look whether it runs, and at its address and port")
            }
            UnreachableReason::TimedOut => ("timed_out", "look whether the host is up, and at firewalls"),
            UnreachableReason::NoRoute => ("no_route", "look at the address and the network"),
            UnreachableReason::Token => ("token", "give both ends the same token"),
            UnreachableReason::Certificate => {
                let advice = "look at the certificates of both ends: dates, names, authorities, clocks";
                ("certificate", advice)
            }
            UnreachableReason::Encryption => ("encryption", "give both ends TLS, or neither of them"),
            UnreachableReason::Version => ("version", "update both ends together"),
            UnreachableReason::NotForebay => ("not_forebay", "look at the port in its address"),
            UnreachableReason::Full => ("full", "raise its limit of connections, or look who holds them"),
            UnreachableReason::Ended => ("ended", "it is tried again by itself"),
            UnreachableReason::Closed => ("closed", "look at its log"),
            UnreachableReason::System => ("system", "look at this machine's limits"),
        }
    }
}

impl RefusalCode {
    /// A word for labels.
    pub fn label(self) -> &'static str {
        UnreachableReason::from(self).label()
    }
}

impl From<RefusalCode> for UnreachableReason {
    fn from(code: RefusalCode) -> UnreachableReason {
        match code {
            RefusalCode::NotForebay | RefusalCode::Other => UnreachableReason::NotForebay,
            RefusalCode::Version => UnreachableReason::Version,
            RefusalCode::Token => UnreachableReason::Token,
            RefusalCode::Instance | RefusalCode::Closing => UnreachableReason::Ended,
            RefusalCode::TooManyFlows => UnreachableReason::Full,
            RefusalCode::NotEncrypted | RefusalCode::Encrypted => UnreachableReason::Encryption,
            RefusalCode::Certificate => UnreachableReason::Certificate,
        }
    }
}

impl From<&Broken> for UnreachableReason {
    fn from(broken: &Broken) -> UnreachableReason {
        match broken {
            Broken::Refused(refusal) | Broken::Turned(refusal) => refusal.code.into(),
            Broken::Bad(bad) => RefusalCode::from(bad).into(),
            Broken::Tls(_) => UnreachableReason::Certificate,
            Broken::Frozen { .. } => UnreachableReason::TimedOut,
            Broken::Closed => UnreachableReason::Closed,
            Broken::Ended => UnreachableReason::Ended,
            Broken::System(_) => UnreachableReason::System,
        }
    }
}

impl From<&BadFrame> for RefusalCode {
    fn from(bad: &BadFrame) -> RefusalCode {
        match bad {
            BadFrame::Tls => RefusalCode::Encrypted,
            BadFrame::Version { .. } => RefusalCode::Version,
            _ => RefusalCode::NotForebay,
        }
    }
}

impl From<&FlowError> for UnreachableReason {
    fn from(error: &FlowError) -> UnreachableReason {
        match error {
            FlowError::Plain { .. } => UnreachableReason::Encryption,
            FlowError::Connect { source, .. } | FlowError::System(source) => match source.kind() {
                ErrorKind::ConnectionRefused => UnreachableReason::Refused,
                ErrorKind::TimedOut | ErrorKind::WouldBlock => UnreachableReason::TimedOut,
                ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable => UnreachableReason::NoRoute,
                ErrorKind::ConnectionReset => UnreachableReason::Closed,
                _ => UnreachableReason::System,
            },
            FlowError::Greeting { broken, .. } => broken.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn each_reason_has_a_label_of_its_own() {
        let labels: HashSet<_> = UnreachableReason::ALL.iter().map(|reason| reason.label()).collect();
        assert_eq!(labels.len(), UnreachableReason::ALL.len());
    }

    #[test]
    fn what_the_system_says_is_a_reason() {
        for (kind, reason) in [
            (ErrorKind::ConnectionRefused, UnreachableReason::Refused),
            (ErrorKind::TimedOut, UnreachableReason::TimedOut),
            (ErrorKind::NetworkUnreachable, UnreachableReason::NoRoute),
            (ErrorKind::OutOfMemory, UnreachableReason::System),
        ] {
            assert_eq!(UnreachableReason::from(&FlowError::System(kind.into())), reason, "{kind:?}");
        }
    }
}
