//! Telemetry: what went where, how long each stage took and what went wrong. This file counts.

use crate::transfer::Class;

/// A snapshot of a mover's counters. All counts are since the mover started.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Telemetry {
    /// One entry per link, in the order in which they were added.
    pub links: Vec<LinkTelemetry>,
    /// One entry per class, most urgent first.
    pub classes: [ClassTelemetry; Class::ALL.len()],
    /// Transfers accepted and not ended.
    pub transfers_active: usize,
    /// Bytes accepted and not yet put on a link.
    pub waiting_bytes: u64,
}

/// What one link did.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct LinkTelemetry {
    pub name: String,
    /// Whether it was taken out of service.
    pub down: bool,
    pub bytes: u64,
    /// Of these, bytes of relays for other places.
    pub guest_bytes: u64,
    /// Operations that completed in full.
    pub lots: u64,
    /// Operations that completed in part and were continued.
    pub short: u64,
    pub failed: u64,
    pub corrupt: u64,
    /// Operations that did not complete within the link's limit.
    pub timed_out: u64,
    pub in_flight_lots: u32,
    pub in_flight_bytes: u64,
    /// Measured rate, or the hint while nothing has been measured; 0 when neither is known.
    pub rate_bytes_per_s: f64,
}

/// What the transfers of one class went through. Times are sums over lots; divide by `lots` for
/// means.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ClassTelemetry {
    pub done: u64,
    pub failed: u64,
    pub cancelled: u64,
    /// Transfers that ended after their deadline.
    pub late: u64,
    /// Lots that reached their target.
    pub lots: u64,
    /// Bytes that reached their target.
    pub bytes: u64,
    /// From submission until the first hop started.
    pub queued_us: u64,
    /// Waiting between hops.
    pub staged_us: u64,
    /// On links.
    pub moved_us: u64,
}
