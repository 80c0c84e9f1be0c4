//! Why a peer is not reached, as one of a few reasons: for labels of metrics, and with what to do
//! about each.

use super::bad_frame::BadFrame;
use super::broken::Broken;
use super::flow::FlowError;
use super::greeting::RefusalCode;
use std::io::ErrorKind;

/// Why a peer is not reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Unreached {
    /// Nobody listens there.
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

impl Unreached {
    pub const ALL: [Unreached; 12] = [
        Unreached::Refused,
        Unreached::TimedOut,
        Unreached::NoRoute,
        Unreached::Token,
        Unreached::Certificate,
        Unreached::Encryption,
        Unreached::Version,
        Unreached::NotForebay,
        Unreached::Full,
        Unreached::Ended,
        Unreached::Closed,
        Unreached::System,
    ];

    /// A word for labels.
    pub fn label(self) -> &'static str {
        match self {
            Unreached::Refused => "refused",
            Unreached::TimedOut => "timed_out",
            Unreached::NoRoute => "no_route",
            Unreached::Token => "token",
            Unreached::Certificate => "certificate",
            Unreached::Encryption => "encryption",
            Unreached::Version => "version",
            Unreached::NotForebay => "not_forebay",
            Unreached::Full => "full",
            Unreached::Ended => "ended",
            Unreached::Closed => "closed",
            Unreached::System => "system",
        }
    }

    /// What to do about it.
    pub fn advice(self) -> &'static str {
        match self {
            Unreached::Refused => "nobody listens there: look whether it runs, and at its address and port",
            Unreached::TimedOut => "look whether the host is up, and at firewalls",
            Unreached::NoRoute => "look at the address and the network",
            Unreached::Token => "give both ends the same token",
            Unreached::Certificate => {
                "look at the certificates of both ends: dates, names, authorities, clocks"
            }
            Unreached::Encryption => "give both ends TLS, or neither of them",
            Unreached::Version => "update both ends together",
            Unreached::NotForebay => "look at the port in its address",
            Unreached::Full => "raise its limit of connections, or look who holds them",
            Unreached::Ended => "it is tried again by itself",
            Unreached::Closed => "look at its log",
            Unreached::System => "look at this machine's limits",
        }
    }
}

impl RefusalCode {
    /// A word for labels.
    pub fn label(self) -> &'static str {
        Unreached::from(self).label()
    }
}

impl From<RefusalCode> for Unreached {
    fn from(code: RefusalCode) -> Unreached {
        match code {
            RefusalCode::NotForebay | RefusalCode::Other => Unreached::NotForebay,
            RefusalCode::Version => Unreached::Version,
            RefusalCode::Token => Unreached::Token,
            RefusalCode::Instance | RefusalCode::Closing => Unreached::Ended,
            RefusalCode::TooManyFlows => Unreached::Full,
            RefusalCode::NotEncrypted | RefusalCode::Encrypted => Unreached::Encryption,
            RefusalCode::Certificate => Unreached::Certificate,
        }
    }
}

impl From<&Broken> for Unreached {
    fn from(broken: &Broken) -> Unreached {
        match broken {
            Broken::Refused(refusal) | Broken::Turned(refusal) => refusal.code.into(),
            Broken::Bad(bad) => RefusalCode::from(bad).into(),
            Broken::Tls(_) => Unreached::Certificate,
            Broken::Frozen { .. } => Unreached::TimedOut,
            Broken::Closed => Unreached::Closed,
            Broken::Ended => Unreached::Ended,
            Broken::System(_) => Unreached::System,
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

impl From<&FlowError> for Unreached {
    fn from(error: &FlowError) -> Unreached {
        match error {
            FlowError::Plain { .. } => Unreached::Encryption,
            FlowError::Connect { source, .. } | FlowError::System(source) => match source.kind() {
                ErrorKind::ConnectionRefused => Unreached::Refused,
                ErrorKind::TimedOut | ErrorKind::WouldBlock => Unreached::TimedOut,
                ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable => Unreached::NoRoute,
                ErrorKind::ConnectionReset => Unreached::Closed,
                _ => Unreached::System,
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
        let labels: HashSet<_> = Unreached::ALL.iter().map(|reason| reason.label()).collect();
        assert_eq!(labels.len(), Unreached::ALL.len());
    }

    #[test]
    fn what_the_system_says_is_a_reason() {
        for (kind, reason) in [
            (ErrorKind::ConnectionRefused, Unreached::Refused),
            (ErrorKind::TimedOut, Unreached::TimedOut),
            (ErrorKind::NetworkUnreachable, Unreached::NoRoute),
            (ErrorKind::OutOfMemory, Unreached::System),
        ] {
            assert_eq!(Unreached::from(&FlowError::System(kind.into())), reason, "{kind:?}");
        }
    }
}
