//! What clients ask through their rings, counted, and told where it is not as it should be.

use forebay_ring::{BadRequest, ContextResult, ContextStatus, Violation};
use forebay_transfer::LogGate;
use std::sync::atomic::{AtomicU64, Ordering};

#[derive(Debug, Default)]
pub struct RingCounts {
    done: AtomicU64,
    failed: AtomicU64,
    refused: AtomicU64,
    closed: AtomicU64,
    refused_gate: LogGate,
    closed_gate: LogGate,
}

/// The same at one time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RingStat {
    /// Contexts that were done.
    pub done: u64,
    /// Contexts that were not.
    pub failed: u64,
    /// Requests that were none, or named nothing of the client's.
    pub refused: u64,
    /// Rings that were closed since their client wrote what it must not.
    pub closed: u64,
}

impl RingCounts {
    /// A request has ended so.
    pub fn count(&self, results: &[ContextResult]) {
        let done = results.iter().filter(|result| result.status == ContextStatus::Done).count();
        self.done.fetch_add(done as u64, Ordering::Relaxed);
        self.failed.fetch_add((results.len() - done) as u64, Ordering::Relaxed);
    }

    /// A client named a slot that is not its own.
    pub fn count_refused(&self) {
        self.refused.fetch_add(1, Ordering::Relaxed);
    }

    /// A client posted what is no request.
    pub fn note_bad(&self, client: &str, bad: &BadRequest) {
        self.count_refused();
        if let Some(repeated) = self.refused_gate.pass() {
            tracing::warn!(client, reason = %bad, repeated, "bad request in a ring");
        }
    }

    /// A client's ring is closed.
    pub fn note_violation(&self, client: &str, violation: &Violation) {
        self.closed.fetch_add(1, Ordering::Relaxed);
        if let Some(repeated) = self.closed_gate.pass() {
            tracing::warn!(client, reason = %violation, repeated, "ring closed");
        }
    }

    pub fn stat(&self) -> RingStat {
        let [done, failed, refused, closed] = [&self.done, &self.failed, &self.refused, &self.closed]
            .map(|count| count.load(Ordering::Relaxed));
        RingStat { done, failed, refused, closed }
    }
}
