//! What has gone to and come from one peer: bytes, times by stage, faults by kind. This file
//! counts; what it decides is only when the number of flows is worth a thought, which is
//! [`FlowControl`]'s to have.

use crate::flow_control::{Advice, FlowControl, Moved};
use crate::tcp::UnreachableReason;
use forebay_transfer::Outcome;
use forebay_transfer::lock::Mutex;
use std::collections::BTreeMap;
use std::time::Instant;

/// The path of bytes that GPUs of one host copy by themselves, as metrics and stats name it.
pub const IPC: &str = "ipc";

/// Times in microseconds, counted by powers of two.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Histogram {
    /// How many were below 2^n us and not below 2^(n-1), for n from 0; the last also has those
    /// above.
    pub counts: [u64; 32],
    /// The sum of all, in microseconds.
    pub sum_us: u64,
}

impl Histogram {
    pub(crate) fn add(&mut self, us: u64) {
        let bucket = (u64::BITS - us.leading_zeros()) as usize;
        self.counts[bucket.min(self.counts.len() - 1)] += 1;
        self.sum_us = self.sum_us.saturating_add(us);
    }

    fn add_all(&mut self, other: &Histogram) {
        self.counts.iter_mut().zip(other.counts).for_each(|(count, more)| *count += more);
        self.sum_us = self.sum_us.saturating_add(other.sum_us);
    }

    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// An upper bound of the time that this part of them, from 0 to 1, did not exceed. `None`
    /// without any.
    pub fn quantile_us(&self, part: f64) -> Option<u64> {
        let wanted = (self.count() as f64 * part).ceil().max(1.0) as u64;
        let mut seen = 0;
        let reached = |count: &u64| {
            seen += count;
            seen >= wanted
        };
        self.counts.iter().position(reached).map(|bucket| 1 << bucket)
    }
}

/// Times of each stage of requests.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Stages {
    /// From post until the mover had them. Long while there is no connection.
    pub queued: Histogram,
    /// From then until the last byte was in place and acknowledged.
    pub posted: Histogram,
    /// Where there is a notification: from the last byte until the peer had taken it in.
    pub notified: Histogram,
}

/// What went on over flows of one path.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PathCounts {
    /// Bytes of lots that arrived, both ways.
    pub moved_bytes: u64,
    pub in_flight_lots: u64,
    pub in_flight_bytes: u64,
    /// Times of lots: until all bytes were in place, their CRCs compared, and acknowledged.
    pub wire: Histogram,
}

/// A snapshot of what went on with a peer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counts {
    /// By what carried the bytes.
    pub paths: BTreeMap<&'static str, PathCounts>,
    pub busy_us: u64,
    pub done: u64,
    pub cancelled: u64,
    /// Everything that failed, by kind.
    pub faults: BTreeMap<&'static str, u64>,
    /// Connections that did not come about, by reason.
    pub unreached: BTreeMap<UnreachableReason, u64>,
    pub stages: Stages,
}

impl Counts {
    /// Bytes of lots that arrived, both ways, over all paths.
    pub fn moved_bytes(&self) -> u64 {
        self.paths.values().map(|path| path.moved_bytes).sum()
    }

    pub fn in_flight_lots(&self) -> u64 {
        self.paths.values().map(|path| path.in_flight_lots).sum()
    }

    pub fn in_flight_bytes(&self) -> u64 {
        self.paths.values().map(|path| path.in_flight_bytes).sum()
    }

    /// Times of lots on flows, over all paths.
    pub fn wire(&self) -> Histogram {
        let mut all = Histogram::default();
        self.paths.values().for_each(|path| all.add_all(&path.wire));
        all
    }
}

/// Counts for one peer, from any thread.
#[derive(Debug)]
pub(crate) struct PeerMetrics {
    state: Mutex<State>,
    epoch: Instant,
}

#[derive(Debug)]
struct State {
    counts: Counts,
    busy_since_us: u64,
    control: FlowControl,
    flows: usize,
}

impl PeerMetrics {
    pub fn new(flows_max: usize) -> PeerMetrics {
        let (counts, control) = (Counts::default(), FlowControl::new(flows_max));
        let state = State { counts, busy_since_us: 0, control, flows: 0 };
        PeerMetrics { state: Mutex::new(state), epoch: Instant::now() }
    }

    fn now_us(&self) -> u64 {
        self.epoch.elapsed().as_micros() as u64
    }

    /// A lot goes on a flow. What it returns is for [`lot_ended`](PeerMetrics::lot_ended).
    pub fn lot_began(&self, on: &'static str, bytes: u64) -> u64 {
        let now_us = self.now_us();
        let mut state = self.state.lock();
        if state.lots_on_flows() == 0 {
            state.busy_since_us = now_us;
        }
        let path = state.counts.paths.entry(on).or_default();
        path.in_flight_lots += 1;
        path.in_flight_bytes += bytes;
        now_us
    }

    /// It has left it again.
    pub fn lot_ended(&self, on: &'static str, began_us: u64, bytes: u64, outcome: &Outcome) -> Advice {
        let now_us = self.now_us();
        let mut state = self.state.lock();
        let busy_us = now_us.saturating_sub(state.busy_since_us);
        state.counts.busy_us += busy_us;
        state.busy_since_us = now_us;
        let path = state.counts.paths.entry(on).or_default();
        path.in_flight_lots -= 1;
        path.in_flight_bytes -= bytes;
        let Outcome::Moved { bytes } = outcome else { return Advice::Stay };
        path.moved_bytes += bytes;
        path.wire.add(now_us.saturating_sub(began_us));
        let (moved, flows) = (state.moved(), state.flows);
        state.control.advise(moved, flows)
    }

    /// A lot is copied beside all flows. What it returns is for
    /// [`copy_ended`](PeerMetrics::copy_ended).
    pub fn copy_began(&self, on: &'static str, bytes: u64) -> u64 {
        let mut state = self.state.lock();
        let path = state.counts.paths.entry(on).or_default();
        path.in_flight_lots += 1;
        path.in_flight_bytes += bytes;
        self.now_us()
    }

    pub fn copy_ended(&self, on: &'static str, began_us: u64, bytes: u64, outcome: &Outcome) {
        let mut state = self.state.lock();
        let path = state.counts.paths.entry(on).or_default();
        path.in_flight_lots -= 1;
        path.in_flight_bytes -= bytes;
        if let Outcome::Moved { bytes } = outcome {
            path.moved_bytes += bytes;
            path.wire.add(self.now_us().saturating_sub(began_us));
        }
    }

    /// There are now so many flows that carry bytes.
    pub fn flows(&self, flows: usize) {
        let mut state = self.state.lock();
        let moved = state.moved();
        state.flows = flows;
        state.control.changed(moved);
    }

    /// One more flow was not to be had.
    pub fn flow_refused(&self) {
        self.state.lock().control.refused();
    }

    /// Has `count` change the counters.
    pub fn count(&self, count: impl FnOnce(&mut Counts)) {
        count(&mut self.state.lock().counts);
    }

    pub fn fault(&self, kind: &'static str) {
        self.count(|counts| *counts.faults.entry(kind).or_default() += 1);
    }

    pub fn counts(&self) -> Counts {
        self.state.lock().counts.clone()
    }
}

impl State {
    fn lots_on_flows(&self) -> u64 {
        let beside = self.counts.paths.get(IPC).map_or(0, |path| path.in_flight_lots);
        self.counts.in_flight_lots() - beside
    }

    /// Over flows: more of them bring no more of what takes none.
    fn moved(&self) -> Moved {
        let beside = self.counts.paths.get(IPC).map_or(0, |path| path.moved_bytes);
        Moved { bytes: self.counts.moved_bytes() - beside, busy_us: self.counts.busy_us }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quantile_bounds_what_it_is_of() {
        let mut times = Histogram::default();
        assert_eq!(times.quantile_us(0.5), None);
        (0..100).for_each(|_| times.add(20));
        times.add(5_000);
        times.add(u64::MAX);
        assert_eq!(
            (times.count(), times.quantile_us(0.5), times.quantile_us(0.985)),
            (102, Some(32), Some(8_192))
        );
    }
}
