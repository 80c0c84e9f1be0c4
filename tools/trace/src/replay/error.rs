//! Why a replay does not start or go on.

use std::io;
use std::path::PathBuf;

/// A replay that cannot start or cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The target is no URL that requests can be sent to.
    #[error("target {target:?} is not a URL of the form http://host:port or https://host")]
    Target { target: String },
    /// The file with certificates cannot be used.
    #[error("certificates in {}: {reason}", path.display())]
    Ca { path: PathBuf, reason: String },
    /// The target is https, and no certificate is trusted.
    #[error(
        "target {target:?} is https, and this system trusts no certificates: name a file of them with ca"
    )]
    NoCertificates { target: String },
    /// TLS cannot be used.
    #[error("TLS: {0}")]
    Tls(#[source] rustls::Error),
    /// An option is out of its range.
    #[error("{name} is {value}, allowed is {allowed}")]
    Option { name: &'static str, value: String, allowed: &'static str },
    /// A closed loop holds its whole trace, and this one is too large.
    #[error("a closed loop holds at most {limit} requests and the trace has more: replay a sample of it")]
    TooManyRequests { limit: usize },
    /// An open loop sends as it reads, so that its trace must be sorted.
    #[error(
        "turn {turn} of session {session:?} arrives before a request in front of it: sort the trace by arrival"
    )]
    OutOfOrder {
        /// The session of the request.
        session: String,
        turn: u32,
    },
    /// A record could not be written; the replay stops, because what it does is not kept.
    #[error("cannot keep a record: {0}")]
    Record(#[source] io::Error),
}

/// An error with its causes: hyper's own text names only the outermost.
pub(super) fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}
