//! Transfers: what callers ask for and how it ends.

use crate::region::{Place, Refused, Span, SpanPair};
use thiserror::Error;

/// Names a transfer. Ids are never reused while a mover lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TransferId(pub(crate) u64);

/// How urgent a transfer is, most urgent first. Less urgent classes are served when more urgent
/// ones leave links free, and at least once every [`STARVE_LOTS`](crate::STARVE_LOTS) lots of a
/// link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Class {
    /// A request waits for these bytes.
    Demand,
    /// Bytes that a request will want soon.
    Prefetch,
    /// Computed KV on its way to where it is kept.
    WriteBack,
    /// Checks and clean-up.
    Scrub,
}

impl Class {
    pub const ALL: [Class; 4] = [Class::Demand, Class::Prefetch, Class::WriteBack, Class::Scrub];

    pub(crate) fn index(self) -> usize {
        self as usize
    }
}

/// A wish to copy bytes between pairs of spans.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transfer {
    /// What goes where. Targets must not overlap each other or any source.
    pub pairs: Vec<SpanPair>,
    pub class: Class,
    /// When the bytes are needed, in the mover's clock. Within a class the earliest deadline goes
    /// first, those without one last. A missed deadline does not end the transfer; it is counted.
    pub deadline_us: Option<u64>,
}

impl Transfer {
    pub fn new(pairs: Vec<SpanPair>, class: Class) -> Transfer {
        Transfer { pairs, class, deadline_us: None }
    }
}

/// How a transfer ended. Each transfer ends exactly once, and only when nothing reads or writes its
/// spans any more, except those listed as quarantined.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    /// Every span was moved in full; `bytes` is their exact sum.
    Done { bytes: u64 },
    /// Something could not be moved.
    Failed(Failure),
    Cancelled {
        /// Bytes that had reached their target by then.
        moved_bytes: u64,
        /// Spans that a lost operation may still touch; an [`Event::Quiet`](crate::Event::Quiet)
        /// names them again once it cannot.
        quarantined: Vec<Span>,
    },
}

/// Why and where a transfer failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    pub reason: Reason,
    /// What did not reach its target in full, in no particular order. Everything else did.
    pub unmoved: Vec<SpanPair>,
    /// Bytes that reached their target.
    pub moved_bytes: u64,
    /// Spans that a lost operation may still touch. They must not be reused until an
    /// [`Event::Quiet`](crate::Event::Quiet) names them.
    pub quarantined: Vec<Span>,
}

/// Why a lot, and with it its transfer, failed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Reason {
    #[error("refused: {0}")]
    Refused(Refused),
    /// A link reported an error, after the stated number of attempts on all paths.
    #[error("link {link} failed after {attempts} attempts: {error}")]
    Link { link: String, error: String, attempts: u32 },
    /// Whoever owns the other memory will not have it.
    #[error("denied over link {link}: {error}")]
    Denied { link: String, error: String },
    #[error("corrupt bytes on link {link}")]
    Corrupt { link: String },
    /// An operation did not complete within its link's limit. Its spans are quarantined.
    #[error("an operation on link {link} did not complete in {timeout_us} us")]
    TimedOut { link: String, timeout_us: u64 },
    #[error("no live path from {from:?} to {to:?}")]
    NoPath { from: Place, to: Place },
    /// The mover ended before. What its links had not let go of is quarantined for good.
    #[error("the mover has ended")]
    Closed,
}
