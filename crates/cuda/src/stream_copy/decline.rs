//! Why a copy is left to the driver, and the counts of those that were not and those that were.

use forebay_transfer::LogGate;
use std::sync::atomic::{AtomicU64, Ordering};
use thiserror::Error;

/// Why a copy was left to the driver. Nothing was done about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Error)]
#[repr(u8)]
pub enum DeclineReason {
    /// So small that the direct path is the fastest.
    #[error("small")]
    Small = 1,
    /// The stream is being captured into a graph.
    #[error("capturing")]
    Capturing = 2,
    /// Host memory that is not pinned, or that other contexts do not reach.
    #[error("pageable")]
    Pageable = 3,
    /// Managed memory or an array: the driver knows where it is, we do not.
    #[error("managed")]
    Managed = 4,
    /// No peer reaches this GPU.
    #[error("no relay")]
    NoRelay = 5,
    /// Copies of other streams have the relays, or these are too slow now to have a part in it.
    #[error("busy")]
    Busy = 6,
    /// Both sides are host memory, or both are GPUs.
    #[error("not between host and device")]
    SameKind = 7,
    /// The stream is not of a primary context.
    #[error("foreign context")]
    ForeignContext = 8,
    /// The driver refused something on the way.
    #[error("fault")]
    Fault = 9,
    /// All peers that reach this GPU were seen to move wrong bytes.
    #[error("relays move wrong bytes")]
    Untrusted = 12,
    /// A call that the driver would refuse, or might.
    #[error("for the driver to judge")]
    DriverJudges = 13,
}

/// What stream copies have done.
#[derive(Debug, Default)]
pub struct Counters {
    pub stream_copies: AtomicU64,
    /// Bytes that went over the target's own PCIe link.
    pub direct_bytes: AtomicU64,
    /// Bytes that went over relays.
    pub relayed_bytes: AtomicU64,
    declined: [AtomicU64; DeclineReason::CODES],
    lines: [LogGate; DeclineReason::CODES],
}

impl DeclineReason {
    pub const ALL: [DeclineReason; 11] = [
        DeclineReason::Small,
        DeclineReason::Capturing,
        DeclineReason::Pageable,
        DeclineReason::Managed,
        DeclineReason::NoRelay,
        DeclineReason::Busy,
        DeclineReason::SameKind,
        DeclineReason::ForeignContext,
        DeclineReason::Fault,
        DeclineReason::Untrusted,
        DeclineReason::DriverJudges,
    ];
    /// The largest of their numbers, some of which are others' (see `forebay_copy.h`).
    const CODES: usize = DeclineReason::DriverJudges as usize;
}

impl Counters {
    pub(super) fn count(&self, direct_bytes: u64, relayed_bytes: u64) {
        self.stream_copies.fetch_add(1, Ordering::Relaxed);
        self.direct_bytes.fetch_add(direct_bytes, Ordering::Relaxed);
        self.relayed_bytes.fetch_add(relayed_bytes, Ordering::Relaxed);
    }

    /// Counts a copy that was left to the driver, and tells of it unless it is a small one: these
    /// are direct as a rule.
    pub(super) fn decline(&self, why: DeclineReason) {
        self.declined[why as usize - 1].fetch_add(1, Ordering::Relaxed);
        if why != DeclineReason::Small {
            self.tell(why);
        }
    }

    /// Tells of a copy that goes over its GPU's own link, once a minute at most.
    pub(super) fn tell(&self, why: DeclineReason) {
        if let Some(repeated) = self.lines[why as usize - 1].pass() {
            tracing::info!(repeated, reason = %why, "copy is left to the driver");
        }
    }

    /// How many copies were left to the driver for a reason.
    pub fn declined(&self, why: DeclineReason) -> u64 {
        self.declined[why as usize - 1].load(Ordering::Relaxed)
    }
}
